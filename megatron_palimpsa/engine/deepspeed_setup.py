"""What DeepSpeed is given: its configuration, Megatron's groups in its terms, and an optimizer; nothing is compiled."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_palimpsa.config import DeepSpeedConfig, StageConfig


class Groups:
    """Megatron's process groups under the names that DeepSpeed asks an `mpu` for.

    "Model" parallelism is everything but data parallelism. Context-parallel ranks hold the same parameters, so that
    they belong to DeepSpeed's data parallelism.
    """

    get_tensor_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_tensor_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_tensor_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_tensor_model_parallel_src_rank = staticmethod(parallel_state.get_tensor_model_parallel_src_rank)
    get_pipeline_model_parallel_group = staticmethod(parallel_state.get_pipeline_model_parallel_group)
    get_pipeline_model_parallel_world_size = staticmethod(parallel_state.get_pipeline_model_parallel_world_size)
    get_model_parallel_group = staticmethod(parallel_state.get_model_parallel_group)

    @staticmethod
    def get_model_parallel_rank() -> int:
        return parallel_state.get_model_parallel_group().rank()

    @staticmethod
    def get_model_parallel_world_size() -> int:
        return parallel_state.get_model_parallel_group().size()

    @staticmethod
    def get_data_parallel_group() -> dist.ProcessGroup:
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    @classmethod
    def get_data_parallel_group_ranks(cls) -> list[int]:
        return dist.get_process_group_ranks(cls.get_data_parallel_group())

    @classmethod
    def get_data_parallel_rank(cls) -> int:
        return cls.get_data_parallel_group().rank()

    @classmethod
    def get_data_parallel_world_size(cls) -> int:
        return cls.get_data_parallel_group().size()


def import_deepspeed() -> Any:
    """The package, kept from compiling its shared-memory collectives at the first use."""
    import deepspeed

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

    It keeps all partitions in one buffer, which has one dtype; parameters that stay in float32 get a buffer of their
    own here.
    """
    stage3 = deepspeed.runtime.zero.stage3
    of_one_dtype = stage3.defragment

    def by_dtype(tensors: list[torch.Tensor]) -> _Buffers:
        return _Buffers([of_one_dtype(list(same)) for _, same in itertools.groupby(tensors, lambda t: t.dtype)])

    stage3.defragment = by_dtype
    try:
        yield
    finally:
        stage3.defragment = of_one_dtype


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
        "steps_per_print": 2**31,
        "zero_optimization": _zero_config(config.parallel.deepspeed),
    }


def _zero_config(zero: DeepSpeedConfig) -> dict[str, Any]:
    same = (
        "overlap_comm",
        "reduce_bucket_size",
        "allgather_bucket_size",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "zero_hpz_partition_size",
    )
    return {"stage": zero.zero_stage, **{name: getattr(zero, name) for name in same}}


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
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
