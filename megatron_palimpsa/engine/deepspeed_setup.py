"""What DeepSpeed is given: its configuration and an optimizer; nothing is compiled."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_palimpsa import launcher
from megatron_palimpsa.config import DeepSpeedConfig, StageConfig
from megatron_palimpsa.config.zero import SAME_NAMES


def import_deepspeed() -> Any:
    """The package, kept from compiling its shared-memory collectives at the first use."""
    import deepspeed

    # Which it wants to read there even of a process that no launcher started.
    os.environ.setdefault("LOCAL_RANK", str(launcher.local_rank()))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


class _Buffers:
    """Flat tensors of several dtypes end to end, as far as DeepSpeed looks at the one that it expects."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._buffers = buffers

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        for buffer in self._buffers:
            if start < buffer.numel():
                return buffer.narrow(dim, start, length)
            start -= buffer.numel()
        raise IndexError(f"{length} elements from {start} on are beyond the end")


@contextmanager
def mixed_dtypes(deepspeed: Any) -> Iterator[None]:
    """Within it DeepSpeed's stage 3 takes parameters of more than one dtype, one after another.

    It keeps all partitions in one buffer, and all partitions in host memory in buffers, of one dtype; parameters that
    stay in float32 get buffers of their own here. Gradients to step with, which it allocates for optimizers that want
    them from the start, are left out: they are stretches of the buffer that it adds up in (`zero_state`).
    """
    stage3 = deepspeed.runtime.zero.stage3
    replaced = {
        (stage3, "defragment"): _by_dtype(stage3.defragment),
        (stage3.DeepSpeedZeroOptimizer_Stage3, "_create_param_groups_fp16_flat_cpu_memory"): _host_buffers,
        (stage3.DeepSpeedZeroOptimizer_Stage3, "initialize_optimizer_states"): lambda optimizer: None,
    }
    originals = {place: getattr(*place) for place in replaced}
    for place, ours in replaced.items():
        setattr(*place, ours)
    try:
        yield
    finally:
        for place, theirs in originals.items():
            setattr(*place, theirs)


def _by_dtype(of_one_dtype: Callable[[list[torch.Tensor]], torch.Tensor]) -> Callable[[list[torch.Tensor]], _Buffers]:
    def defragment(tensors: list[torch.Tensor]) -> _Buffers:
        return _Buffers([of_one_dtype(list(same)) for _, same in itertools.groupby(tensors, lambda t: t.dtype)])

    return defragment


def _host_buffers(optimizer: Any) -> None:
    """In place of DeepSpeed's, for its optimizer of stage 3: a buffer for each group, of the group's dtype."""
    for group in optimizer.trainable_param_groups:
        size = sum(parameter.partition_numel() for parameter in group["params"])
        pinned = optimizer.offload_param_pin_memory and torch.cuda.is_available()
        buffer = torch.empty(size, dtype=group["params"][0].dtype, pin_memory=pinned)
        optimizer.param_groups_fp16_flat_cpu_memory.append(buffer)


def deepspeed_config(config: StageConfig) -> dict[str, Any]:
    """DeepSpeed's own configuration: gradients are summed by it, everything else of a step is the engine's.

    Clipping is off because DeepSpeed would count copies of parameters more than once.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        # A batch is what the schedule passes between two steps.
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        # The loss is scaled by the engine.
        "fp16": {"enabled": False, "loss_scale": 1.0},
        "steps_per_print": 2**31,
        "zero_optimization": _zero_config(config.parallel.deepspeed),
    }


def _zero_config(zero: DeepSpeedConfig) -> dict[str, Any]:
    host = {"device": "cpu", "pin_memory": zero.pin_memory}
    return {
        # Without a stage DeepSpeed keeps no float32 weights: stage 1 among groups of one rank spreads as little.
        "stage": max(zero.zero_stage, 1),
        **{name: getattr(zero, name) for name in SAME_NAMES},
        **({"offload_optimizer": host} if zero.offload_optimizer else {}),
        **({"offload_param": host} if zero.offload_parameters else {}),
    }


def build_adamw(parameters: Iterable[torch.nn.Parameter], config: StageConfig) -> torch.optim.AdamW:
    """torch's AdamW over groups of one dtype and one weight decay each; the same decay as in the Megatron engine."""
    settings = config.optimizer

    def kind(parameter: torch.nn.Parameter) -> tuple[str, bool]:
        return str(parameter.dtype), bool(getattr(parameter, "no_weight_decay", False))

    trained = sorted((parameter for parameter in parameters if parameter.requires_grad), key=kind)
    groups = [
        {"params": list(members), "wd_mult": 0.0 if exempt else 1.0}
        for (_, exempt), members in itertools.groupby(trained, key=kind)
    ]
    # The fused form exists on CPUs too, and needs no room for a group's intermediate results.
    return torch.optim.AdamW(
        groups,
        fused=True,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
