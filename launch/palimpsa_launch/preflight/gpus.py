"""`python -m palimpsa_launch.preflight.gpus`: this node's GPUs as JSON, each after it has computed something."""

from __future__ import annotations

import json
from typing import Any

import torch


def gpus() -> list[dict[str, Any]]:
    """Name and memory in GB of every GPU, in order.

    Raises:
        RuntimeError: one does not work, or computes wrongly.
    """
    found = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        ones = torch.ones(1024, 1024, device=f"cuda:{number}")
        if not torch.equal(ones @ ones, 1024 * ones):
            raise RuntimeError(f"GPU {number} computes a wrong product")
        name = torch.cuda.get_device_name(number)
        found.append({"name": name, "total_gb": round(total / 1e9, 3), "free_gb": round(free / 1e9, 3)})
    return found


if __name__ == "__main__":
    print(json.dumps(gpus()))
