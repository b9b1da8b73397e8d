"""Megatron's process groups in DeepSpeed's terms."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state


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

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return replicas()

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.get_data_parallel_group())

    def get_data_parallel_rank(self) -> int:
        return self.get_data_parallel_group().rank()

    def get_data_parallel_world_size(self) -> int:
        return self.get_data_parallel_group().size()


class SingleGroups(Groups):
    """As if there were no data parallelism: nothing is spread or summed by DeepSpeed (stage 0)."""

    def __init__(self) -> None:
        self.alone = _group_of([dist.get_rank()])

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.alone


def replicas() -> dist.ProcessGroup:
    """The ranks that hold the same parameters."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def set_secondary_groups(deepspeed: Any, size: int) -> dist.ProcessGroup | None:
    """Tell DeepSpeed which ranks share a second copy of the weights; its own choice mixes tensor-parallel ranks.

    They are `size` successive ranks of `replicas`, which follow each other on a node; -> this rank's group, None for 1.
    """
    ranks = dist.get_process_group_ranks(replicas())
    start = replicas().rank() // size * size
    group = _group_of(ranks[start : start + size]) if size > 1 else None
    deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group
    return group


def _group_of(ranks: list[int]) -> dist.ProcessGroup:
    """Formed by its own ranks alone."""
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
