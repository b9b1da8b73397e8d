"""Megatron-LM's own loop trains the model that this package's trainer trains."""

import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import pytest
import torch
from helpers import megatron_lm
from helpers.stages import random_batch, tiny_stage
from helpers.training_runs import always

from megatron_palimpsa import parallel
from megatron_palimpsa.config import ConfigError, InitFrom, StageConfig
from megatron_palimpsa.engine.megatron import MegatronEngine
from megatron_palimpsa.megatron_lm import convert
from megatron_palimpsa.megatron_lm.convert import TRACKER
from megatron_palimpsa.model.naming import global_parameters, unwrap
from megatron_palimpsa.training import checkpoint
from megatron_palimpsa.training.batch import Batch
from megatron_palimpsa.training.run_folder import RunFolder
from megatron_palimpsa.training.stages import find_source

# Megatron's distributed optimizer looks at gradients of views; under the CPU stand-ins torch's warning is ours.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")

STEPS = 4
SAVED = 2
FULLY_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


def stage(precision: str = "fp32", **layout: object) -> StageConfig:
    """Large weights, so that a wrong one shows, and a rate at which Adam does not amplify rounding."""
    return tiny_stage(
        model={"init_std": 0.2},
        train={"global_batch_tokens": 64, "tokens": 64 * STEPS, "precision": precision},
        optimizer={"lr": 1e-3, "schedule": "constant", "warmup_steps": 0},
        parallel={"distributed_optimizer": False, **layout},
    )


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    yield
    parallel.destroy()


@contextmanager
def trainer(config: StageConfig) -> Iterator[MegatronEngine]:
    parallel.initialize(config.parallel, config.seed)
    yield MegatronEngine(config)
    parallel.destroy()


def documents(config: StageConfig) -> Iterator[Batch]:
    return (random_batch(config, seed) for seed in count())


@pytest.mark.parametrize("distributed", [False, True])
def test_losses_are_the_trainers(distributed: bool) -> None:
    config = stage(distributed_optimizer=distributed)
    expected = megatron_lm.trainers_steps(config)
    run = megatron_lm.train(config)
    assert len(run.losses) == STEPS
    for loss, norm, step in zip(run.losses, run.grad_norms, expected, strict=True):
        assert math.isclose(loss, step.loss, rel_tol=1e-5)
        assert math.isclose(norm, step.grad_norm, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("distributed", "flags"),
    [(False, ()), (True, ()), (True, (FULLY_RESHARDABLE,))],
    ids=["bf16 optimizer", "distributed optimizer", "distributed optimizer, by parameter"],
)
def test_a_resumed_run_goes_on_as_an_unbroken_one(distributed: bool, flags: tuple[str, ...], tmp_path: Path) -> None:
    config = stage("bf16", distributed_optimizer=distributed)
    saving = ("--save", str(tmp_path), "--save-interval", str(SAVED), *flags)
    unbroken = megatron_lm.train(config, *saving)
    (tmp_path / TRACKER).write_text(str(SAVED))
    resumed = megatron_lm.train(config, "--load", str(tmp_path), *flags)
    assert resumed.losses == unbroken.losses[SAVED:]
    assert resumed.grad_norms == unbroken.grad_norms[SAVED:]
    check_parameters(resumed)


def check_parameters(run: megatron_lm.MegatronRun) -> None:
    """Those marked are in fp32, and no vector decays, in the model and in the optimizer that trained it."""
    decay = {}
    for part in run.optimizer.chained_optimizers:
        models = (
            chain(*part.model_float16_groups, *part.model_fp32_groups)
            if hasattr(part, "model_float16_groups")
            else chain(*part.float16_groups, *part.fp32_from_fp32_groups)
        )
        mains = (
            chain(*part.shard_fp32_from_float16_groups, *part.shard_fp32_groups)
            if hasattr(part, "model_float16_groups")
            else chain(*part.fp32_from_float16_groups, *part.fp32_from_fp32_groups)
        )
        weight_decay = {id(main): group["weight_decay"] for group in part.param_groups for main in group["params"]}
        decay |= {id(model): weight_decay[id(main)] for model, main in zip(models, mains, strict=True)}
    for name, parameter in unwrap(run.model[0]).named_parameters():
        kept = name.rpartition(".")[2] in {"A_log", "D", "dt_bias", "b_scale", "prior_log"}
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
        if parameter.requires_grad:
            marked = getattr(parameter, "no_weight_decay", False)
            assert decay[id(parameter)] == (0.0 if marked else 0.1), name


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 1e-2)])
def test_weights_go_both_ways(precision: str, tolerance: float, tmp_path: Path) -> None:
    """Stage -> Megatron's checkpoint -> a step in Megatron's loop -> its checkpoint -> stage, in fp32 throughout."""
    config = stage(distributed_optimizer=False)
    config = replace(config, output_dir=str(tmp_path / "runs"), train=replace(config.train, tokens=64))
    with trainer(config) as engine:
        engine.train_step(documents(config), always)
        checkpoint.save(RunFolder(config.folder).checkpoints, 1, engine, {}, keep=2)
        expected = engine.train_step(documents(config), lambda loss, norm: False)
    RunFolder(config.folder).write_config(config)

    assert convert.main(["to-megatron", str(config.folder), str(tmp_path / "to")]) == 0
    config = replace(config, train=replace(config.train, precision=precision))
    back = ("--save", str(tmp_path / "back"), "--save-interval", "1")
    run = megatron_lm.train(config, "--load", str(tmp_path / "to"), "--finetune", *back)
    assert math.isclose(run.losses[0], expected.loss, rel_tol=tolerance)

    overrides = [f"output_dir={tmp_path / 'runs'}", "name=imported"]
    source = str(tmp_path / "back" / "iter_0000001")
    assert convert.main(["from-megatron", source, str(config.folder / "config.yaml"), *overrides]) == 0
    follower = replace(config, name="follower", init_from=InitFrom(stage="imported"))
    origin = find_source(follower)
    assert origin is not None
    with trainer(replace(follower, train=replace(config.train, precision="fp32"))) as engine:
        checkpoint.load(origin.checkpoint, engine, what="weights")
        weights = dict(global_parameters(engine.chunks[0]))
        trained = dict(unwrap(run.model[0]).named_parameters())
        assert weights.keys() == trained.keys()
        for name, parameter in trained.items():
            assert torch.equal(weights[name], getattr(parameter, "main_param", parameter)), name


def test_conversion_refuses_what_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert.main(["to-megatron", str(tmp_path), str(tmp_path / "to")]) == 2
    assert "not a stage's folder" in capsys.readouterr().err
    for content, message in ((pickle.dumps(print), r"builtins\.print"), (b"", "Ran out of input")):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(ConfigError, match=f"not a torch_dist checkpoint: .*{message}"):
            convert.tensor_shapes(tmp_path)
