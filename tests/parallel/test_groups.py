import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron_palimpsa import launcher, parallel
from megatron_palimpsa.config import ConfigError, ParallelConfig


@pytest.fixture(autouse=True)
def leave_afterwards():
    yield
    parallel.destroy()


def test_one_process_needs_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        parallel.initialize(ParallelConfig(), seed=1)
        assert dist.get_world_size() == 1
        assert parallel_state.get_tensor_model_parallel_world_size() == 1
        parallel.destroy()
        assert not dist.is_initialized()
        assert not parallel_state.model_parallel_is_initialized()


def test_layout_larger_than_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel.tp=2 \* parallel.pp=1 \* parallel.cp=1 does not divide"):
        parallel.initialize(ParallelConfig(tp=2), seed=1)
    assert not dist.is_initialized()


@pytest.mark.parametrize(("local_rank", "ranks", "gpus", "found"), [(0, 4, 2, "4 ranks"), (1, 1, 1, "2 ranks")])
def test_more_ranks_than_gpus_are_refused_on_all_of_them(
    local_rank: int, ranks: int, gpus: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=f"{found} were started .* {gpus} GPU.* --nproc-per-node {gpus}"):
        parallel.initialize(ParallelConfig(), seed=1)
    assert not dist.is_initialized()


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_an_error_only_a_rank_alone_leaves(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with parallel.leaving():
        parallel.initialize(ParallelConfig(), seed=1)
    assert not dist.is_initialized()

    def fail() -> None:
        with parallel.leaving():
            parallel.initialize(ParallelConfig(), seed=1)
            monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
            raise ValueError("in between")

    with pytest.raises(ValueError, match="in between"):
        fail()
    assert dist.is_initialized() == (ranks > 1)


def test_seed_sets_every_random_state() -> None:
    draws = []
    for seed in (1, 1, 2):
        parallel.initialize(ParallelConfig(), seed=seed)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            inside = torch.rand(3)
        draws.append((inside, torch.rand(3)))
        parallel.destroy()
    for first, again, other in zip(*draws, strict=True):
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_world_size_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert launcher.rank() == 7
    assert launcher.world_size() == 8


def test_threads_of_groups_held_by_garbage_end_with_them() -> None:
    process = psutil.Process()
    parallel.initialize(ParallelConfig(), seed=1)
    parallel.destroy()
    before = process.num_threads()
    parallel.initialize(ParallelConfig(), seed=1)
    # As an engine does: its parts refer to each other and to the groups.
    cycle: list[object] = [parallel_state.get_tensor_model_parallel_group()]
    cycle.append(cycle)
    assert process.num_threads() > before
    del cycle
    parallel.destroy()
    assert process.num_threads() == before
