"""Process groups, Megatron's parallel state and the random states of a process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_palimpsa import launcher
from megatron_palimpsa.config import ConfigError, ParallelConfig, check_ranks
from megatron_palimpsa.parallel import cpu

TIMEOUT = timedelta(minutes=20)
"""After this long without an answer a collective fails: a dead rank must not hold the others for ever."""


def initialize(parallel: ParallelConfig, seed: int) -> None:
    """`join`, build Megatron's groups for the layout and seed every random state.

    Raises:
        ConfigError: the layout does not divide the number of ranks, or as `join`.
    """
    check_ranks(parallel, dist.get_world_size() if dist.is_initialized() else launcher.world_size())
    join()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=int(TIMEOUT.total_seconds()) // 60,
    )
    _seed(seed)


def join() -> None:
    """Join the process group of all ranks; one that exists already is used as it is.

    Reads torchrun's environment (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). One process alone needs
    neither the environment nor a port. NCCL with one GPU a rank where CUDA exists, gloo on the CPU otherwise.

    Raises:
        ConfigError: there are more ranks here than GPUs.
    """
    if torch.cuda.is_available():
        _take_gpu()
    else:
        cpu.install()
    if not dist.is_initialized():
        _join_process_group(launcher.world_size())


def _take_gpu() -> None:
    """One GPU a rank."""
    ranks, gpus = max(launcher.ranks_of_this_machine(), launcher.local_rank() + 1), torch.cuda.device_count()
    if ranks > gpus:
        raise ConfigError(
            f"{ranks} ranks were started on this machine, where {gpus} GPU{'s are' if gpus > 1 else ' is'} visible: "
            f"each takes one; start no more than {gpus} (torchrun --nproc-per-node {gpus})"
        )
    torch.cuda.set_device(launcher.local_rank())


def _join_process_group(world_size: int) -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    if world_size == 1:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT, device_id=device
        )
    else:
        dist.init_process_group(backend, init_method="env://", timeout=TIMEOUT, device_id=device)


def _seed(seed: int) -> None:
    # Pipeline stages hold different layers: one seed for all would give layers of two stages the same weights.
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def leave_layout() -> None:
    """Give up the groups of a layout with the memory that NCCL holds for each; the process group stays. Collective."""
    groups = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None:  # None stands for the process group.
            dist.destroy_process_group(group)


@contextmanager
def leaving() -> Iterator[None]:
    """Leave parallel state and process group at the end.

    Not after an error on one rank of several: over NCCL that would wait for the others, which may be in a collective
    that this rank will never join. Its process has to end without (`launcher.end_at_once`).
    """
    try:
        yield
    except BaseException:
        if is_alone():
            destroy()
        raise
    destroy()


def is_alone() -> bool:
    """Whether no other rank is in this process's group, if it is in one."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def destroy() -> None:
    """Leave the parallel state and the process group; a process that never joined may call it too."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
        # What is left of an engine are cycles that hold its groups, and with them tens of threads of gloo's.
        gc.collect()
