"""What a node without fault says of itself."""

from __future__ import annotations

from typing import Any


def facts(**changes: Any) -> dict[str, Any]:
    gpus = [{"name": "H", "total_gb": 140.0, "free_gb": 139.0} for _ in range(4)]
    good = {"code": "c" * 64, "data": "d" * 64, "packages": {"torch": "2"}, "python": "3.12", "gpus": gpus}
    good |= {"run_folder_gb": 100.0, "local_folder": "/tmp/x", "local_folder_gb": 100.0}
    return good | {"own_problems": [], "shared_problems": []} | changes
