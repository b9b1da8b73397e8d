import errno
import json
import os
import pickle
import resource
import tarfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_state import moments_of, state_of, weights_of
from helpers.runs import read_checkpoint
from helpers.single_process import single_process as single_process
from helpers.stages import random_batch, tiny_stage

from megatron_palimpsa.config import ConfigError, StageConfig
from megatron_palimpsa.engine.base import StepResult
from megatron_palimpsa.engine.megatron import MegatronEngine
from megatron_palimpsa.training import checkpoint
from megatron_palimpsa.training.batch import Batch
from megatron_palimpsa.training.checkpoint_state import fingerprint

PROGRESS = {"step": 3, "tokens": 192, "data": {"fingerprint": "ab", "position": [1, 2]}, "wandb": None}


def batches_from(config: StageConfig, step: int) -> Iterator[Batch]:
    return (random_batch(config, seed) for seed in count(2 * step))


def take(engine: MegatronEngine, first: int, steps: int) -> list[StepResult]:
    batches = batches_from(engine.config, first)
    return [engine.train_step(batches, lambda loss, norm: True) for _ in range(steps)]


def trained(config: StageConfig, steps: int = 3) -> MegatronEngine:
    engine = MegatronEngine(config)
    take(engine, 0, steps)
    return engine


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def assert_same_state(left: MegatronEngine, right: MegatronEngine) -> None:
    assert_same(state_of(left), state_of(right))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("saver_distributed", [True, False])
@pytest.mark.parametrize("loader_distributed", [True, False])
def test_loaded_run_goes_on_bit_for_bit(
    precision: str, saver_distributed: bool, loader_distributed: bool, tmp_path: Path
) -> None:
    saver, loader = (
        tiny_stage(train={"precision": precision}, parallel={"distributed_optimizer": distributed})
        for distributed in (saver_distributed, loader_distributed)
    )
    engine = trained(saver)
    path = checkpoint.save(tmp_path, 3, engine, PROGRESS, keep=2)
    assert path == checkpoint.latest(tmp_path) == tmp_path / "step-3"
    saved_random = torch.get_rng_state()
    expected = take(engine, 3, 5)

    torch.manual_seed(99)
    other = MegatronEngine(loader)
    assert checkpoint.load(path, other) == PROGRESS == checkpoint.read_progress(path)
    assert torch.equal(torch.get_rng_state(), saved_random)
    assert other.learning_rate == pytest.approx(1e-2, rel=1e-3)
    assert take(other, 3, 5) == expected
    assert other.learning_rate == engine.learning_rate
    assert other.optimizer_steps == 8
    assert_same_state(engine, other)


def test_skipped_steps_are_not_counted_as_updates(tmp_path: Path) -> None:
    config = tiny_stage()
    engine = trained(config)
    engine.train_step(batches_from(config, 3), lambda loss, norm: False)
    path = checkpoint.save(tmp_path, 4, engine, PROGRESS, keep=2)
    other = MegatronEngine(config)
    checkpoint.load(path, other)
    assert other.optimizer_steps == 3
    assert other.learning_rate == engine.learning_rate
    assert take(other, 4, 2) == take(engine, 4, 2)


def test_checkpoint_before_any_update(tmp_path: Path) -> None:
    config = tiny_stage()
    engine = MegatronEngine(config)
    path = checkpoint.save(tmp_path, 0, engine, PROGRESS, keep=2)
    other = trained(config)
    checkpoint.load(path, other)
    assert_same_state(engine, other)
    assert take(other, 0, 2) == take(engine, 0, 2)


@pytest.mark.parametrize(("what", "same_moments"), [("weights", False), ("weights+optimizer", True)])
def test_next_stage_starts_its_own_schedule(what: Any, same_moments: bool, tmp_path: Path) -> None:
    engine = trained(tiny_stage(optimizer={"lr": 1e-2}))
    path = checkpoint.save(tmp_path, 3, engine, PROGRESS, keep=2)
    config = tiny_stage(optimizer={"lr": 4e-3, "warmup_steps": 4, "weight_decay": 0.0}, model={"seq_length": 16})
    other = MegatronEngine(config)
    checkpoint.load(path, other, what=what)
    assert_same(weights_of(engine), weights_of(other))
    assert other.optimizer_steps == (3 if same_moments else 0)
    zero = all(not moment.any() for moment in moments_of(other).values())
    assert zero is not same_moments
    take(other, 0, 1)
    assert other.learning_rate == 1e-3


def test_bf16_checkpoint_keeps_the_fp32_weights(tmp_path: Path) -> None:
    engine = trained(tiny_stage(train={"precision": "bf16"}))
    path = checkpoint.save(tmp_path, 3, engine, PROGRESS, keep=2)
    other = MegatronEngine(tiny_stage())
    checkpoint.load(path, other)
    assert_same_state(engine, other)


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, trained(tiny_stage(), 1), PROGRESS, keep=2)
    other = MegatronEngine(tiny_stage(model={"d_state": 16, "pattern": "MP*-M"}))
    before = weights_of(other)
    with pytest.raises(ConfigError) as error:
        checkpoint.load(path, other)
    message = str(error.value)
    assert "model.d_state is 8 in the checkpoint and 16 here" in message
    assert "model.pattern is 'MP*-P' in the checkpoint and 'MP*-M' here" in message
    assert "hidden_size" not in message
    assert_same(before, weights_of(other))


def test_what_does_not_change_the_function_is_not_asked_for() -> None:
    base = tiny_stage().model
    same = tiny_stage(model={"seq_length": 16, "pattern": "MP*|-P", "norm_groups": 1, "vocab_size": 64}).model
    assert fingerprint(base) == fingerprint(same)
    assert fingerprint(base) != fingerprint(tiny_stage(model={"norm_eps": 1e-6}).model)
    assert fingerprint(base) != fingerprint(tiny_stage(model={"rope_theta": 1e4}).model)


def test_newer_format_is_refused(tmp_path: Path) -> None:
    engine = MegatronEngine(tiny_stage())
    path = checkpoint.save(tmp_path, 0, engine, PROGRESS, keep=2)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format_version": 2}))
    with pytest.raises(ConfigError, match="format 2"):
        checkpoint.load(path, engine)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.putenv, ("PAYLOAD_RAN", "1")


def test_foreign_metadata_runs_no_code(tmp_path: Path) -> None:
    engine = MegatronEngine(tiny_stage())
    path = checkpoint.save(tmp_path, 0, engine, PROGRESS, keep=2)
    (path / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(checkpoint.CheckpointError, match="putenv"):
        checkpoint.load(path, engine)


def assert_first_survives(folder: Path, engine: MegatronEngine, message: str) -> None:
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.save(folder, 2, engine, PROGRESS, keep=2)
    assert "step-2" in str(error.value)
    assert message in str(error.value)
    assert checkpoint.latest(folder) == folder / "step-1"
    assert (folder / "latest").read_text() == "step-1"
    assert not (folder / "step-2").exists()


def test_full_disk_is_told_and_the_checkpoint_before_survives(tmp_path: Path, monkeypatch: Any) -> None:
    engine = MegatronEngine(tiny_stage())
    checkpoint.save(tmp_path, 1, engine, PROGRESS, keep=2)

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        assert_first_survives(tmp_path, engine, "no space left on the disk")
    checkpoint.save(tmp_path, 2, engine, PROGRESS, keep=2)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-2"


def test_file_that_cannot_grow_fails_the_save_alone(tmp_path: Path) -> None:
    engine = MegatronEngine(tiny_stage())
    checkpoint.save(tmp_path, 1, engine, PROGRESS, keep=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert_first_survives(tmp_path, engine, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_names_and_shapes_are_those_of_the_unsplit_model(tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    path = checkpoint.save(tmp_path, 1, trained(tiny_stage(), 1), PROGRESS, keep=2)
    tensors = dist_checkpointing.load_tensors_metadata(str(path))
    shapes = {name: tuple(tensor.global_shape) for name, tensor in tensors.items()}
    weight = "decoder.layers.4.mixer.beta_up_weight"
    assert (
        shapes[weight] == shapes[f"optimizer.exp_avg.{weight}"] == shapes[f"optimizer.exp_avg_sq.{weight}"] == (64, 4)
    )
    assert shapes["embedding.word_embeddings.weight"] == (64, 32)
    # Frozen parameters have no moments.
    assert "decoder.layers.4.mixer.prior_log" in shapes
    assert "optimizer.exp_avg.decoder.layers.4.mixer.prior_log" not in shapes


FORMAT_1 = {
    "pattern": "P-",
    "hidden_size": 8,
    "vocab_size": 16,
    "seq_length": 16,
    "d_state": 4,
    "headdim": 8,
    "beta_rank": 2,
    "ffn_hidden_size": 8,
    "init_std": 0.2,
}
"""Model of `checkpoint_format_1.tar.xz`: two tensor-parallel ranks, each parameter's share in one piece, 2 steps."""
FORMAT_1_STEPS = [(2.8631281419, 1.5022872686), (2.7868211166, 1.3100857735), (2.9759762174, 1.0891150236)]
"""Losses and gradient norms of the steps that followed there."""


def test_checkpoint_of_the_first_version_is_gone_on_from(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).with_name("checkpoint_format_1.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    path = checkpoint.latest(tmp_path)
    assert path == tmp_path / "step-2"
    engine = MegatronEngine(tiny_stage(model=FORMAT_1, train={"global_batch_tokens": 32, "tokens": 3200}))
    checkpoint.load(path, engine)
    expected = read_checkpoint(path, tmp_path)
    state = state_of(engine)
    assert state.keys() == {name for name in expected if not name.startswith("rng.")}
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    batches = (random_batch(engine.config, seed, padding=seed % 3) for seed in count(4))
    for loss, grad_norm in FORMAT_1_STEPS:
        result = engine.train_step(batches, lambda loss, norm: True)
        assert result.loss == pytest.approx(loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(grad_norm, rel=1e-5)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    engine = MegatronEngine(tiny_stage())
    path = checkpoint.save(tmp_path, 0, engine, PROGRESS, keep=2)
    state = json.loads((path / "state.json").read_text())
    trained = tiny_stage(model={"train_prior": True})
    (path / "state.json").write_text(json.dumps(state | {"optimizer_steps": 1}))
    with pytest.raises(checkpoint.CheckpointError, match=r"optimizer\.exp_avg\..*prior_log is not there"):
        checkpoint.load(path, MegatronEngine(trained))
