import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from megatron_palimpsa.parallel import cpu

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for CUDA where there is none")


def test_not_installed_beside_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="must not be installed"):
        cpu.install()
    with cpu.cuda_means_cpu():
        assert torch.zeros(1, device="cpu").type() == "torch.FloatTensor"


@without_cuda
def test_fork_draws_from_its_own_state_and_restores_the_outer_one() -> None:
    cpu.install()
    tracker = cpu.CpuRngStatesTracker()
    tracker.add("inner", 5)
    torch.manual_seed(1)
    expected_outer = torch.rand(4)
    expected_inner = torch.rand(4, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(1)
    first_outer = torch.rand(2)
    with tracker.fork("inner"):
        first_inner = torch.rand(2)
    with tracker.fork("inner"):
        second_inner = torch.rand(2)
    second_outer = torch.rand(2)
    assert torch.equal(torch.cat([first_outer, second_outer]), expected_outer)
    assert torch.equal(torch.cat([first_inner, second_inner]), expected_inner)
    with pytest.raises(ValueError, match="in use"):
        tracker.add("other", 5)
    with pytest.raises(ValueError, match="exists"):
        tracker.add("inner", 6)


@without_cuda
def test_recomputation_repeats_the_random_numbers() -> None:
    cpu.install()
    megatron_random.initialize_rng_tracker(force_reset=True)
    megatron_random.get_cuda_rng_tracker().add(megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME, 3)
    seen = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        with megatron_random.get_cuda_rng_tracker().fork():
            noise = torch.rand(4)
        noise = noise + torch.rand(4)
        seen.append(noise)
        return x * noise

    x = torch.ones(4, requires_grad=True)
    megatron_random.checkpoint(layer, False, x).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(x.grad, seen[0])


@without_cuda
def test_cuda_means_cpu_inside_only() -> None:
    cpu.install()
    with cpu.cuda_means_cpu():
        tensor = torch.zeros(2, device="cuda")
        assert tensor.device.type == "cpu"
        assert tensor.cuda() is tensor
        # Only Megatron's optimizers see another type.
        assert tensor.type() == "torch.FloatTensor"
        assert tensor.type(torch.float64).dtype == torch.float64
        assert eval("t.type()", {"__name__": "megatron.core.optimizer.optimizer", "t": tensor}) == (  # noqa: S307
            "torch.cuda.FloatTensor"
        )
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")
