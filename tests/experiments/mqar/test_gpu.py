"""On a GPU: the CPU's examples, its losses but for rounding, and checkpoints that go on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.models import randomise
from helpers.mqar import write_recipe

from megatron_palimpsa import cli, parallel
from megatron_palimpsa.config import ParallelConfig
from megatron_palimpsa.experiments.mqar.config import load_sweep
from megatron_palimpsa.experiments.mqar.examples import Shape, make_examples, shuffled
from megatron_palimpsa.experiments.mqar.learner import Learner
from megatron_palimpsa.experiments.mqar.records import read_records, runs_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZE = {"hidden_size": 128, "headdim": 32, "d_state": 16, "ngroups": 8, "norm_groups": 1, "beta_rank": 8}


@pytest.fixture
def single_process() -> Iterator[None]:
    parallel.initialize(ParallelConfig(distributed_optimizer=False), seed=1)
    yield
    parallel.destroy()


@pytest.mark.parametrize("filler", ["blank", "random"])
def test_examples_are_the_cpus(filler) -> None:
    shape = Shape(8192, 128, 32, filler=filler)
    here, there = (make_examples(shape, 1, torch.arange(2000, device=device)) for device in ("cpu", "cuda"))
    for name in ("tokens", "queries", "answers"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu())
    orders = [shuffled(5000, "x", torch.device(device)).cpu() for device in ("cpu", "cuda")]
    assert torch.equal(*orders)


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("pattern", ["PP", "MM"])
def test_bf16_follows_fp32_and_goes_on_from_what_is_saved(tmp_path: Path, pattern: str) -> None:
    recipe = write_recipe(tmp_path, model={**SIZE, "pattern": pattern})
    examples = make_examples(Shape(32, 16, 3), 0, torch.arange(64, device="cuda"))
    losses, states = {}, {}
    for precision in ("fp32", "bf16"):
        learner = Learner(load_sweep(recipe, [f"train.precision={precision}"]), 1e-3, seed=0)
        randomise_on_gpu(learner)
        losses[precision] = torch.stack([learner.step(examples, 1.0) for _ in range(10)])
        states[precision] = {name: tensor.cpu() for name, tensor in learner.state().items()}
        again = Learner(load_sweep(recipe, [f"train.precision={precision}"]), 1e-3, seed=3)
        randomise_on_gpu(again)
        again.load(states[precision], with_moments=True)
        torch.testing.assert_close(again.step(examples, 1.0), learner.step(examples, 1.0), rtol=1e-6, atol=0)
    torch.testing.assert_close(losses["bf16"], losses["fp32"], rtol=0.03, atol=0.03)
    assert losses["fp32"][-1] < losses["fp32"][0]


def randomise_on_gpu(learner: Learner) -> None:
    learner.model.cpu()
    randomise(learner.model, scale=0.05)
    learner.model.cuda()
    learner.load({f"weights.{name}": weight.float() for name, weight in learner.model.named_parameters()}, False)


def test_processes_share_the_gpu(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, train={"precision": "bf16", "examples": 16, "test_examples": 4})
    assert cli.main(["mqar", str(recipe), "sweep.seeds=[0,1]", "--jobs", "2"]) == 0
    for run in runs_of(load_sweep(recipe, ["sweep.seeds=[0,1]"])):
        assert len(read_records(run)) == 5
