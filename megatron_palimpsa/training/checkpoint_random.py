"""Random states in a checkpoint: one row a rank, of use under the layout that saved them alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from megatron_palimpsa.engine.boxes import Box
from megatron_palimpsa.training.checkpoint_format import Reader

RANDOM_STATES = "rng."
"""What the names of their tensors begin with."""


def layout() -> dict[str, int]:
    """The sizes under which every rank has its place."""
    return {
        "world_size": dist.get_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": parallel_state.get_context_parallel_world_size(),
    }


def is_layout(saved: dict[str, Any]) -> bool:
    """Whether a checkpoint was saved under today's layout; earlier ones know nothing of the newer sizes."""
    return {"vpp": 1, "cp": 1} | saved == layout()


def random_shares() -> list[tuple[Box, Tensor]]:
    """Every random state of this rank, one row each of tensors over all ranks."""
    states = {"cpu": torch.get_rng_state(), **tensor_parallel.get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return [(_box(name, state), state.unsqueeze(0)) for name, state in states.items()]


def load_random(reader: Reader) -> None:
    """Restore every random state of this rank."""
    states = {}
    for box, state in random_shares():
        states[box.key.removeprefix(RANDOM_STATES)] = state = torch.empty_like(state)
        reader.read(box, state)
    states = {name: state.squeeze(0) for name, state in states.items()}
    torch.set_rng_state(states.pop("cpu"))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states.pop("cuda"))
    tensor_parallel.get_cuda_rng_tracker().set_states(states)


def _box(name: str, state: Tensor) -> Box:
    size = state.numel()
    return Box(f"{RANDOM_STATES}{name}", (dist.get_world_size(), size), (dist.get_rank(), 0), (1, size))
