"""M and L layers into P and Q and back: nothing that stays changes, importance 0 is none, wrong input is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import palimpsa_kernels.mixing
import pytest
import torch
import yaml
from helpers.runs import read_checkpoint
from helpers.stages import tiny_stage
from helpers.surgery import go_on, train_to_its_end
from helpers.workers import Workers
from torch import Tensor

from megatron_palimpsa import cli, parallel
from megatron_palimpsa.config import ParallelConfig, load_stage
from megatron_palimpsa.convert import stage_folder
from megatron_palimpsa.convert.layers import WITHOUT_IMPORTANCE, Turn
from megatron_palimpsa.convert.layerwise import LayerByLayer
from megatron_palimpsa.engine.boxes import Box
from megatron_palimpsa.inference import Opened, opened
from megatron_palimpsa.model import build_model
from megatron_palimpsa.model.naming import global_parameters
from megatron_palimpsa.training import checkpoint_files as files
from megatron_palimpsa.training.checkpoint_format import write_index, write_rank_file

BEFORE, AFTER = "M*MP-LQ", "P*MP-QQ"
GEOMETRY = {"pattern": BEFORE, "vocab_size": 320, "init_std": 0.1}
NEW = {
    f"decoder.layers.{layer}.mixer.{name}": shape
    for layer in (0, 5)
    for name, shape in {
        "beta_down_weight": (4, 32),
        "beta_up_weight": (64, 4),
        "b_scale": (8,),
        "prior_log": (8,),
    }.items()
}
MOMENTS = ("optimizer.exp_avg.", "optimizer.exp_avg_sq.")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def runs(ranks: Workers, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of `trained` under TP 2, `surgery` of it and the way `back`, in small stretches."""
    folder = tmp_path_factory.mktemp("surgery")
    data = {"tokenizer": str(tiny_data / "tokenizer.model")}
    trained = tiny_stage(2, name="trained", output_dir=str(folder), model=GEOMETRY, parallel={"tp": 2}, data=data)
    ranks.run(train_to_its_end, trained, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_folder, "AT_ONCE", 7 * 32)
        assert convert("palimpsa", folder / "trained", folder / "surgery", "--layers", "1,6", "--seed", "7") == 0
        assert convert("without-importance", folder / "surgery", folder / "back", "--pattern", BEFORE) == 0
    return folder


def convert(*arguments: str | Path) -> int:
    return cli.main(["convert", *map(str, arguments)])


def tensors(stage: Path, scratch: Path) -> dict[str, Tensor]:
    """All but random states, of the stage's only checkpoint."""
    (path,) = (stage / "checkpoints").glob("step-*")
    found = read_checkpoint(path, scratch)
    return {name: value for name, value in found.items() if not name.startswith("rng.")}


def report(stage: Path) -> dict[str, Any]:
    return json.loads((stage / "conversion.json").read_text())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_old_weights_and_moments_stay_and_new_ones_are_as_a_fresh_model_s(runs: Path, tmp_path: Path) -> None:
    before, after = tensors(runs / "trained", tmp_path), tensors(runs / "surgery", tmp_path)
    new = {name: after.pop(name) for name in NEW}
    new_moments = {key: after.pop(key) for prefix in MOMENTS for name in NEW if (key := prefix + name) in after}
    assert_same(after, before)
    assert all(before[f"{prefix}decoder.layers.5.mixer.A_log"].abs().min() > 0 for prefix in MOMENTS)
    assert {key.split(".")[-1] for key in new_moments} == {"beta_down_weight", "beta_up_weight", "b_scale"}
    assert not any(value.any() for value in new_moments.values())
    parallel.initialize(ParallelConfig(), seed=0)
    try:
        fresh = tiny_stage(model={"pattern": AFTER, "beta_scale_init": "finetune"}, seed=7)
        drawn = {name: value.detach() for name, value in global_parameters(build_model(fresh)) if name in NEW}
    finally:
        parallel.destroy()
    assert_same(new, drawn)
    assert {name: tuple(value.shape) for name, value in new.items()} == NEW
    assert report(runs / "surgery")["layers"] == [1, 6]
    count = report(runs / "surgery")["parameters"]
    assert (count["carried"], count["new"], count["dropped"]) == (
        sum(value.numel() for name, value in before.items() if not name.startswith("optimizer.")),
        sum(value.numel() for value in new.values()),
        0,
    )


def test_training_goes_on_with_weights_and_moments_under_any_layout(ranks: Workers, runs: Path, tmp_path: Path) -> None:
    section = yaml.safe_load((runs / "surgery" / "model.yaml").read_text())["model"]
    losses = {}
    for tp in (1, 2):
        config = tiny_stage(
            tp,
            name=f"after-{tp}",
            output_dir=str(runs),
            model=section | {"seq_length": 32},
            parallel={"tp": tp},
            data={"tokenizer": load_stage(runs / "surgery" / "config.yaml").data.tokenizer},
            init_from={"stage": "surgery", "load": "weights+optimizer"},
        )
        losses[tp] = ranks.run_on(tp, go_on, config, 3, tmp_path / str(tp))[0]
        loaded = read_checkpoint(tmp_path / str(tp) / "step-1", tmp_path)
        assert_same(
            {name: value for name, value in loaded.items() if not name.startswith("rng.")},
            tensors(runs / "surgery", tmp_path),
        )
        assert json.loads((tmp_path / str(tp) / "step-1" / "state.json").read_text())["optimizer_steps"] == 3
    torch.testing.assert_close(torch.tensor(losses[2]), torch.tensor(losses[1]), atol=1e-5, rtol=1e-5)


def test_the_way_back_gives_every_bit_back(runs: Path, tmp_path: Path) -> None:
    assert_same(tensors(runs / "back", tmp_path), tensors(runs / "trained", tmp_path))
    assert report(runs / "back")["parameters"]["dropped"] == report(runs / "surgery")["parameters"]["new"]
    for key in ("largest", "mean_kl", "nll_plain", "nll_palimpsa"):
        expected = report(runs / "surgery")["importance"][key]
        assert report(runs / "back")["importance"][key] == pytest.approx(expected, rel=1e-4)


def test_the_new_stage_is_in_the_precision_of_the_old_one(runs: Path) -> None:
    precisions = [load_stage(runs / name / "config.yaml").train.precision for name in ("trained", "surgery", "back")]
    assert precisions == ["fp32"] * 3


def test_the_way_back_is_of_all_layers_with_importance_unless_told(runs: Path) -> None:
    model = load_stage(runs / "surgery" / "config.yaml").model
    assert Turn(WITHOUT_IMPORTANCE).of(model).pattern == "M*MM-LL"


@torch.no_grad()
def logits_of(it: Opened, tokens: Tensor) -> Tensor:
    """Of the whole model at once, [T, V]."""
    return it.model(input_ids=tokens, position_ids=None, attention_mask=None)[0, :, : it.config.model.vocab_size]


@torch.no_grad()
def drop_importance(it: Opened, layers: tuple[int, ...]) -> None:
    for layer in layers:
        it.model.decoder.layers[layer].mixer.beta_up_weight.zero_()
        it.model.decoder.layers[layer].mixer.b_scale.fill_(-torch.inf)


def test_without_importance_logits_are_the_source_s_and_the_report_is_true(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text("abc defg hij " * 80)
    rows: list[int] = []
    betas: list[float] = []
    scan = palimpsa_kernels.mixing.chunk_palimpsa

    def counted(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *arguments: Any, **options: Any) -> Any:
        rows.append(len(q))
        betas.append(float(beta.abs().max()))
        return scan(q, k, v, beta, *arguments, **options)

    monkeypatch.setattr(palimpsa_kernels.mixing, "chunk_palimpsa", counted)
    assert convert("palimpsa", runs / "trained", tmp_path / "new", "--layers", "1,6", "--text", text) == 0
    monkeypatch.undo()
    # Of each turned layer once as it is and once without importance; of the layers that had it already as they are.
    assert rows == [1, 1, 2, 2, 1, 1, 2, 2]
    assert [beta > 0 for beta in betas] == [True, False, True, True, True, False, True, True]
    found = report(tmp_path / "new")
    with opened(tmp_path / "new", "fp32") as it:
        assert it.tokenizer is not None
        tokens = torch.from_numpy(it.tokenizer.encode(text.read_text())[:512]).long()[None]
        full = logits_of(it, tokens)
        drop_importance(it, (0, 5))
        limit = logits_of(it, tokens)
    with opened(runs / "trained", "fp32") as it:
        expected = logits_of(it, tokens)
    assert found["sample"] == {"of": str(text), "tokens": tokens.shape[1]}
    torch.testing.assert_close(limit, expected, atol=1e-5, rtol=0)
    assert max(found["importance_zero"]["largest"], found["farthest_step"]) <= 1e-5
    importance = found["importance"]
    assert importance["largest"] == pytest.approx(float((full - expected).abs().max()), rel=1e-3)
    assert importance["mean"] == pytest.approx(float((full - expected).abs().mean()), rel=1e-3)
    logs = [logits.double().log_softmax(-1) for logits in (expected, full)]
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()
    assert importance["mean_kl"] == pytest.approx(float(kl), rel=1e-2)
    for name, log in zip(("nll_plain", "nll_palimpsa"), logs, strict=True):
        nll = -log[:-1].gather(-1, tokens[0, 1:, None]).mean()
        assert importance[name] == pytest.approx(float(nll), rel=1e-5)
    assert importance["largest"] > 1e-3


@pytest.fixture
def source(runs: Path, tmp_path: Path) -> Path:
    """The trained stage, alone in its folder."""
    shutil.copytree(runs / "trained", tmp_path / "runs" / "trained")
    return tmp_path / "runs" / "trained"


def rewrite_state(**changes: Any) -> Callable[[Path], None]:
    def rewrite(source: Path) -> None:
        path = source / "checkpoints" / "step-3" / "state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return rewrite


def change_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Leave an intact checkpoint of other tensors."""

    def rewrite(source: Path) -> None:
        folder = source / "checkpoints"
        found = tensors(source, folder)
        state = json.loads((folder / "step-3" / "state.json").read_text())
        change(found)
        shutil.rmtree(folder)
        (folder / "step-3").mkdir(parents=True)
        values = [
            (Box(name, tuple(value.shape), (0,) * value.dim(), tuple(value.shape)), value)
            for name, value in found.items()
        ]
        written = write_rank_file(folder / "step-3", 0, values, threading.Event())
        files.seal(folder / "step-3", state, write_index(folder / "step-3", [written]))

    return rewrite


def flip_a_bit(source: Path) -> None:
    path = source / "checkpoints" / "step-3" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def recipe(**model: Any) -> Callable[[Path], None]:
    def write(source: Path) -> None:
        (source / "recipe.yaml").write_text(yaml.safe_dump({"model": model}))

    return write


def nothing(source: Path) -> None:
    pass


RECIPE = ("--pattern", "{source}/recipe.yaml")
ONE = ("--layers", "1")


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (nothing, ("--layers", "0"), "'0' is none of the layers 1 to 7"),
        (nothing, ("--layers", "1,8"), "'8' is none of the layers 1 to 7"),
        (nothing, ("--layers", "1,a"), "'a' is none of the layers 1 to 7"),
        (nothing, ("--layers", "1,2"), "layer 2 is * (attention) in the stage: only M (Mamba2) can become P"),
        (nothing, ("--layers", "4"), "only M (Mamba2) can become P, L (Palimpsa-D without importance) can become Q"),
        (nothing, ("--pattern", "P*MP-"), "model.pattern='P*MP-' has 5 layers, the stage has 7"),
        (nothing, ("--pattern", "|"), "model.pattern='|' has 0 layers, the stage has 7"),
        (nothing, ("--pattern", BEFORE), f"no layer of the stage's pattern '{BEFORE}' would become P or Q"),
        (nothing, ("--pattern", "P*MM-LQ"), "layer 4 is P (Palimpsa-M) in the stage: only M (Mamba2) can become P"),
        (nothing, ("--pattern", "*PMP-LQ"), "layer 1, M in the stage, can become P and not *"),
        (nothing, ("--pattern", "P*MP-PQ"), "layer 6, L in the stage, can become Q and not P"),
        (nothing, ("--pattern", "none.yaml"), "cannot read the configuration none.yaml"),
        (nothing, (*ONE, "--beta-rank", "8"), "model.beta_rank=8: the stage's weights were made with 4"),
        (nothing, (*ONE, "--seed", "-1"), "seed=-1"),
        (nothing, (*ONE, "--text", "{source}/none"), "none: cannot be read: No such file"),
        (lambda source: (source / "empty").touch(), (*ONE, "--text", "{source}/empty"), "gives 0 tokens, too few"),
        (recipe(hidden_size=32), RECIPE, "recipe.yaml: has no model.pattern"),
        (recipe(pattern=AFTER, d_state=16), RECIPE, "model.d_state=16: the stage's weights were made with 8"),
        (recipe(pattern=AFTER, train_prior=True), RECIPE, "model.train_prior=True: the stage's weights were made with"),
        (recipe(pattern=AFTER, new=1), RECIPE, "recipe.yaml: unknown key 'new'"),
        (lambda source: (source / "STAGE_COMPLETE").unlink(), ONE, "that stage is not complete"),
        (lambda source: (source / "config.yaml").unlink(), ONE, "holds no stage (config.yaml is missing)"),
        (lambda source: shutil.rmtree(source), ONE, "trained: no such folder"),
        (lambda source: shutil.rmtree(source / "checkpoints" / "step-3"), ONE, "its last checkpoint"),
        (
            lambda source: (source / "checkpoints" / "step-3" / ".metadata").write_bytes(b""),
            ONE,
            ".metadata has 0 bytes",
        ),
        (flip_a_bit, ONE, "__0_0.distcp does not match its checksum"),
        (rewrite_state(model={}), ONE, "a checkpoint of another model"),
        (rewrite_state(format_version=2), ONE, "checkpoint format 2"),
        (
            change_tensors(lambda found: found.pop("decoder.layers.2.mixer.D")),
            ONE,
            "decoder.layers.2.mixer.D is missing",
        ),
        (change_tensors(lambda found: found.update(more=torch.ones(2))), ONE, "more is not known"),
        (
            change_tensors(lambda found: found.pop("optimizer.exp_avg.decoder.layers.2.mixer.D")),
            ONE,
            "optimizer.exp_avg.decoder.layers.2.mixer.D is missing",
        ),
        (
            change_tensors(lambda found: found.update({"decoder.layers.2.mixer.D": torch.ones(4)})),
            ONE,
            "decoder.layers.2.mixer.D is [4] and not [8]",
        ),
    ],
)
def test_what_cannot_be_turned_is_one_message_and_nothing_is_written(
    source: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], object],
    options: tuple[str, ...],
    message: str,
) -> None:
    damage(source)
    capsys.readouterr()
    options = tuple(option.format(source=source) for option in options)
    assert convert("palimpsa", source, source.parent / "new", *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert {path.name for path in source.parent.iterdir()} <= {"trained"}


def test_places_that_are_taken(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert("palimpsa", source, source, *ONE) == 2
    assert "trained is there already" in capsys.readouterr().err
    folder = source.parent / ".new.converting"
    folder.mkdir()
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert convert("palimpsa", source, source.parent / "new", *ONE) == 2
    assert "another process works in this folder" in capsys.readouterr().err


def test_what_a_kill_left_is_replaced_and_a_full_disk_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = source.parent / ".new.converting"
    (left / "checkpoints" / ".tmp-step-3").mkdir(parents=True)
    for name in ("config.yaml", "checkpoints/latest", "checkpoints/.tmp-step-3/__0_0.distcp"):
        (left / name).write_text("left")
    with monkeypatch.context() as patch:

        def full(*arguments: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(stage_folder, "write_index", full)
        capsys.readouterr()
        assert convert("palimpsa", source, source.parent / "new", *ONE) == 1
        expected = f"megatron-palimpsa: error: [Errno 28] No space left on device: '{left}'"
        assert capsys.readouterr().err.splitlines() == [expected]
        assert list(source.parent.iterdir()) == [source]
    assert convert("palimpsa", source / "checkpoints" / "step-3", source.parent / "new", *ONE) == 0
    assert {path.name for path in (source.parent / "new").iterdir()} == {
        "STAGE_COMPLETE", "checkpoints", "config.yaml", "conversion.json", "model.yaml", "tokenizer.model"
    }  # fmt: skip
    assert [path.name for path in (source.parent / "new" / "checkpoints").glob("step-*")] == ["step-3"]
    assert sorted(path.name for path in source.parent.iterdir()) == ["new", "trained"]


def test_a_kernel_that_computes_something_else_without_importance_is_refused(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    working = LayerByLayer.silence

    def another_prior(self: LayerByLayer, letter: str) -> None:
        working(self, letter)
        self._model.decoder.layers[self._letters.index(letter)].mixer.prior_log.fill_(1e-3)

    monkeypatch.setattr(LayerByLayer, "silence", torch.no_grad()(another_prior))
    assert convert("palimpsa", source, source.parent / "new", *ONE) == 2
    assert "with importance 0 the Palimpsa layers' logits differ from those without it" in capsys.readouterr().err
    assert list(source.parent.iterdir()) == [source]


def test_without_a_tokenizer_and_without_moments(source: Path, tmp_path: Path) -> None:
    config = source / "config.yaml"
    config.write_text(config.read_text().replace(load_stage(config).data.tokenizer, "''"))
    rewrite_state(optimizer_steps=0)(source)
    change_tensors(lambda found: [found.pop(name) for name in list(found) if name.startswith("optimizer.")])(source)
    (source / "pattern.yaml").write_text("model: {pattern: P*MP-QQ}")
    assert convert("palimpsa", source, source.parent / "new", "--pattern", source / "pattern.yaml") == 0
    found = report(source.parent / "new")
    assert (found["sample"], found["moments"]) == ({"of": "random ids", "tokens": 512}, False)
    assert (found["seed"], found["beta_scale_init"]) == (1234, "finetune")
    assert not any(name.startswith("optimizer.") for name in tensors(source.parent / "new", tmp_path))
    marker = json.loads((source.parent / "new" / "STAGE_COMPLETE").read_text())
    assert (marker["steps"], marker["checkpoint"]) == (0, "checkpoints/step-0")
    assert convert("palimpsa", source, source.parent / "other", *ONE, "--text", source / "pattern.yaml") == 2
