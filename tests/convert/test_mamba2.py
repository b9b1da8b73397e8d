"""Published Mamba2 models as stages: the source implementation's logits, or one error and nothing written."""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.published_mamba2 import (
    DEEP,
    TOKENS,
    computed,
    expected,
    one_document,
    random_mamba2,
    save_as_state_spaces,
)
from helpers.stages import tiny_stage
from helpers.workers import Workers
from palimpsa_data.tokenizers import load
from palimpsa_launch import stages
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from megatron_palimpsa import cli
from megatron_palimpsa.config import ConfigError, ModelConfig, StageConfig, load_stage
from megatron_palimpsa.config.reading import read_tree
from megatron_palimpsa.convert import mamba2, stage_folder
from megatron_palimpsa.convert.mamba2_config import read_geometry
from megatron_palimpsa.engine.boxes import Box
from megatron_palimpsa.model.mamba2_names import from_mamba2
from megatron_palimpsa.report.write import stages_in
from megatron_palimpsa.training.batch import Batch
from megatron_palimpsa.training.checkpoint_format import Reader
from megatron_palimpsa.training.checkpoint_state import differences, fingerprint
from megatron_palimpsa.training.stages import find_source

VOCABULARY = 61
"""Ids that a text has; 50277 made small. state-spaces' embedding has 64 rows for them, Hugging Face's as many."""
PUBLISHED = json.loads((Path(__file__).parents[1] / "helpers" / "mamba2-2.7b.json").read_text())


@pytest.fixture(scope="module")
def ranks() -> Iterator[Workers]:
    workers = Workers(4)
    yield workers
    workers.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model in state-spaces' files."""
    save_as_state_spaces(random_mamba2(n_groups=1, vocab_size=64, tie_word_embeddings=True), tmp_path / "source", 61)
    return tmp_path / "source"


def follower(runs: Path, load: str = "weights", **parallel: Any) -> StageConfig:
    """A stage that inherits the converted model's section and starts from its weights."""
    section = read_tree(runs / "base" / "model.yaml")["model"]
    world_size = parallel.get("tp", 1) * parallel.get("pp", 1)
    init = {"stage": "base", "load": load}
    return tiny_stage(
        world_size, output_dir=str(runs), model=section | {"seq_length": TOKENS}, parallel=parallel, init_from=init
    )


@pytest.mark.parametrize(
    ("style", "settings"),
    [
        ("state-spaces", {"n_groups": 1, "tie_word_embeddings": True, "num_hidden_layers": 4}),
        ("state-spaces", {"n_groups": 8, "tie_word_embeddings": False, "num_hidden_layers": 4}),
        ("hugging face", {"n_groups": 8, "tie_word_embeddings": True, "num_hidden_layers": 4}),
        ("hugging face", {"n_groups": 1, "tie_word_embeddings": False, "num_hidden_layers": 4, "dtype": "bfloat16"}),
    ],
)
def test_logits_are_those_of_the_source_under_any_layout(ranks: Workers, tmp_path: Path, style: str, settings) -> None:
    theirs = random_mamba2(**settings, vocab_size=64 if style == "state-spaces" else VOCABULARY)
    if style == "state-spaces":
        save_as_state_spaces(theirs, tmp_path / "source", VOCABULARY)
    else:
        dtype = getattr(torch, settings.get("dtype", "float32"))
        theirs.to(dtype).save_pretrained(tmp_path / "source", max_shard_size="30KB")
        assert (tmp_path / "source" / "model.safetensors.index.json").is_file()
    batch = one_document(VOCABULARY)
    logits, losses = expected(theirs.float(), batch, 64)
    assert cli.main(["convert", "mamba2", str(tmp_path / "source"), str(tmp_path / "base")]) == 0
    check_layouts(ranks, tmp_path, batch, logits, losses, {}, {"tp": 2}, {"pp": 2})


def check_layouts(ranks: Workers, runs: Path, batch: Batch, logits: Tensor, losses: Tensor, *layouts: Any) -> None:
    assert logits.std() > 0.5
    for layout in layouts:
        results = ranks.run_on(layout.get("tp", 1) * layout.get("pp", 1), computed, follower(runs, **layout), batch)
        for ours, our_losses in results:
            torch.testing.assert_close(our_losses, losses, atol=1e-4, rtol=1e-4)
            if ours is not None:
                torch.testing.assert_close(ours, logits, atol=1e-4, rtol=1e-4)
        assert results[-1][0] is not None


@pytest.mark.long
@pytest.mark.parametrize(
    ("style", "n_groups", "tied"),
    [("state-spaces", 1, True), ("state-spaces", 8, False), ("hugging face", 8, True), ("hugging face", 1, False)],
)
def test_logits_are_those_of_the_source_at_the_published_depth_and_vocabulary(
    ranks: Workers, tmp_path: Path, style: str, n_groups: int, tied: bool
) -> None:
    rows = 50288 if style == "state-spaces" else 50277
    theirs = random_mamba2(noise=0.02, n_groups=n_groups, tie_word_embeddings=tied, vocab_size=rows, **DEEP)
    if style == "state-spaces":
        save_as_state_spaces(theirs, tmp_path / "source", 50277)
    else:
        theirs.save_pretrained(tmp_path / "source")
    batch = one_document(50277)
    assert cli.main(["convert", "mamba2", str(tmp_path / "source"), str(tmp_path / "base")]) == 0
    check_layouts(ranks, tmp_path, batch, *expected(theirs, batch, 50288), {}, {"tp": 2}, {"tp": 4}, {"pp": 2})


def test_large_tensors_go_through_in_stretches(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_folder, "AT_ONCE", 7 * 32)
    model = mamba2.convert(str(source), tmp_path / "base").model
    reader = Reader(tmp_path / "base" / "checkpoints" / "step-0")
    theirs = torch.load(source / "pytorch_model.bin", weights_only=True)
    theirs["backbone.embeddings.weight"] = theirs.pop("backbone.embedding.weight")
    for name, expected_value in from_mamba2(theirs, model).items():
        out = torch.empty(expected_value.shape)
        reader.read(Box(name, tuple(out.shape), (0,) * out.dim(), tuple(out.shape)), out)
        assert torch.equal(out, expected_value), name


def test_geometry_of_the_published_2_7b_model_is_the_control_run_s() -> None:
    geometry = read_geometry(PUBLISHED, "config.json")
    model = ModelConfig(**geometry.section, seq_length=4096)
    assert differences(fingerprint(model), load_stage(stages.path("2.7b-control/stage-1")).model, "published") == ""
    assert geometry.vocabulary_rows == model.padded_vocab_size == 50288


def test_a_tokenizer_comes_along(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 60}}, "added_tokens": []}))
    stage = mamba2.convert(str(source), tmp_path / "base")
    assert Path(stage.data.tokenizer).read_text() == (source / "tokenizer.json").read_text()


def ending_with(end: str, source: Path) -> None:
    """A tokenizer of which only the tokenizer_config.json beside it says that `end` ends documents."""
    encoder = Tokenizer(models.BPE({"a": 0, "b": 1, **{f"unused {number}": number for number in range(2, 58)}}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(["</s>", "<stop>", "<pad>"])
    encoder.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))


def test_what_ends_documents_stays_through_every_conversion(source: Path, tmp_path: Path) -> None:
    ending_with("<stop>", source)
    base, surgery, exported, back = (tmp_path / name for name in ("base", "surgery", "exported", "back"))
    for step in (
        ("convert", "mamba2", source, base),
        ("convert", "palimpsa", base, surgery, "--layers", "2"),
        ("export", surgery, exported),
        ("convert", "huggingface", exported, back),
    ):
        assert cli.main([str(part) for part in step]) == 0
    for stage in (base, surgery, back):
        path = load_stage(stage / "config.yaml").data.tokenizer
        assert Path(path).parent == stage
        assert load(path, backend="huggingface").eod_id == 59
    assert json.loads((exported / "config.json").read_text())["eos_token_id"] == 59


def test_a_model_of_the_hub_comes_with_what_ends_documents(source: Path, tmp_path: Path, monkeypatch) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        assert name == "state-spaces/small"
        for path in source.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, cache)
        return str(cache)

    ending_with("<stop>", source)
    (cache := tmp_path / "cache").mkdir()
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    stage = mamba2.convert("state-spaces/small", tmp_path / "base")
    assert load(stage.data.tokenizer, backend="huggingface").eod_id == 59


def test_a_published_model_in_the_place_of_a_stage(source: Path, tmp_path: Path, capsys) -> None:
    for command in (
        ("generate", source, "text"),
        ("convert", "palimpsa", source, tmp_path / "new", "--layers", "1"),
    ):
        assert cli.main([str(part) for part in command]) == 2
        assert "(config.yaml is missing); `convert mamba2` makes one" in capsys.readouterr().err


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        path = source / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def change_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(source: Path) -> None:
        tensors = torch.load(source / "pytorch_model.bin", weights_only=True)
        change(tensors)
        torch.save(tensors, source / "pytorch_model.bin")

    return rewrite


def flip_a_bit(source: Path) -> None:
    path = source / "pytorch_model.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(source: Path) -> None:
    path = source / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-1000])


def hugging_face(**changes: Any) -> Callable[[Path], None]:
    def replace(source: Path) -> None:
        random_mamba2(n_groups=1, vocab_size=64).save_pretrained(source)
        change_config(**changes)(source)

    return replace


def tokenizer(content: dict[str, Any]) -> Callable[[Path], None]:
    def write(source: Path) -> None:
        (source / "tokenizer.json").write_text(json.dumps(content))

    return write


def cut_safetensors(source: Path) -> None:
    hugging_face()(source)
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def bits_that_torch_cannot_read(source: Path) -> None:
    hugging_face()(source)
    path = source / "model.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, values = json.loads(content[8:start]), content[start:]
    header[_A_LOG]["dtype"], header[_A_LOG]["shape"] = "F4", [8]
    first, end = header[_A_LOG]["data_offsets"]
    values = values[: first + 4] + values[end:]
    for name in header.keys() - {"__metadata__"}:
        places = header[name]["data_offsets"]
        header[name]["data_offsets"] = [place - (end - first - 4) * (place > first) for place in places]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + values)


def in_parts(changes: dict[str, str]) -> Callable[[Path], None]:
    """Two files of weights and an index of them, whose weight_map is changed."""

    def split(source: Path) -> None:
        hugging_face()(source)
        tensors = load_file(source / "model.safetensors")
        (source / "model.safetensors").unlink()
        norm = "backbone.norm_f.weight"
        save_file({norm: tensors.pop(norm)}, source / "model-2.safetensors")
        save_file(tensors, source / "model-1.safetensors")
        places = dict.fromkeys(tensors, "model-1.safetensors") | {norm: "model-2.safetensors"}
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places | changes}))

    return split


_A_LOG = "backbone.layers.1.mixer.A_log"
_IN_PROJ = "backbone.layers.1.mixer.in_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda source: (source / "config.json").unlink(), "config.json: cannot be read: No such file"),
        (lambda source: (source / "config.json").write_text("[]"), "config.json: holds no mapping"),
        (lambda source: (source / "pytorch_model.bin").unlink(), "holds neither model.safetensors nor pytorch_model"),
        (change_config(ssm_cfg={"layer": "Mamba1"}), "neither of Hugging Face's Mamba2"),
        (change_config(ssm_cfg={"layer": "Mamba2", "d_ssm": 32}), "ssm_cfg: d_ssm=32: only None can be converted"),
        (change_config(ssm_cfg={"layer": "Mamba2", "new": 1}), "ssm_cfg.new=1: what it does is not known here"),
        (change_config(attn_layer_idx=[1]), "attn_layer_idx=[1]: only [] can be converted"),
        (change_config(n_layer="3"), "n_layer='3': a positive whole number is needed"),
        (change_config(d_model=34), "model.headdim=8 does not divide"),
        (change_config(n_layer=4), "backbone.layers.3.norm.weight is missing"),
        (change_config(vocab_size=65), "backbone.embeddings.weight is [64, 32] and not [80, 32]"),
        (change_config(ssm_cfg={"layer": "Mamba2", "headdim": 8, "d_state": 16, "ngroups": 2}), f"{_IN_PROJ} is [168"),
        (change_tensors(lambda tensors: tensors.pop(_IN_PROJ)), f"{_IN_PROJ} is missing"),
        (change_tensors(lambda tensors: tensors.update(more=torch.ones(2))), "more is not known"),
        (change_tensors(lambda tensors: tensors[_IN_PROJ].fill_(math.nan)), f"{_IN_PROJ} holds something else"),
        (
            change_tensors(lambda tensors: tensors.update({_IN_PROJ: 1})),
            "holds something else than dense tensors by name",
        ),
        (
            change_tensors(lambda tensors: tensors.update({"lm_head.weight": torch.ones(64, 32)})),
            "to which config.json",
        ),
        (lambda source: torch.save(print, source / "pytorch_model.bin"), "no file of tensors alone"),
        (flip_a_bit, "does not match its checksum"),
        (cut, "pytorch_model.bin: damaged"),
        (cut_safetensors, "model.safetensors: damaged or no safetensors file"),
        (hugging_face(model_type="mamba"), "neither of Hugging Face's Mamba2"),
        (hugging_face(use_bias=True), "use_bias=True: only False can be converted"),
        (hugging_face(num_heads=4), "num_heads=4 * head_dim=8 is not expand * hidden_size"),
        (tokenizer({"model": {"vocab": {"a": 1}}, "added_tokens": [{"id": 61}]}), "tokenizer.json: has ids up to 61"),
        (tokenizer({"model": "none"}), "tokenizer.json: not a tokenizer"),
        (
            lambda source: (ending_with("", source), (source / "tokenizer_config.json").write_text("{")),
            "_config.json: cannot",
        ),
        (tokenizer({"model": {"vocab": {"a": math.inf}}, "added_tokens": []}), "tokenizer.json: not a tokenizer"),
        (change_tensors(lambda tensors: tensors.update({_IN_PROJ: torch.ones(168, 32).to_sparse()})), "dense tensors"),
        (change_tensors(lambda tensors: tensors.update({_IN_PROJ: torch.ones(168, 32, device="meta")})), "dense"),
        (bits_that_torch_cannot_read, f"{_A_LOG} cannot be read"),
        (in_parts({_A_LOG: "../beside.safetensors"}), "'../beside.safetensors' is no name of a file in this folder"),
        (in_parts({_A_LOG: "/beside.safetensors"}), "'/beside.safetensors' is no name of a file in this folder"),
        (in_parts({_A_LOG: ""}), "'' is no name of a file in this folder"),
        (in_parts({_A_LOG: "model-2.safetensors"}), f"{_A_LOG} is in model-1.safetensors, and not only in the file"),
        (in_parts({"more": "model-2.safetensors"}), "more is not in model-2.safetensors"),
    ],
)
def test_what_cannot_be_converted_is_one_message_and_nothing_is_written(
    source: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object], message: str
) -> None:
    damage(source)
    capsys.readouterr()
    assert cli.main(["convert", "mamba2", str(source), str(source.parent / "base")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert list(source.parent.iterdir()) == [source]


def test_a_stage_that_is_there_and_a_source_that_is_not(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "mamba2", str(source / "no"), str(source.parent / "base")]) == 2
    assert "no: no such folder" in capsys.readouterr().err
    assert cli.main(["convert", "mamba2", str(source), str(source.parent)]) == 2
    assert "is there already" in capsys.readouterr().err
    link = source.parent / "link"
    link.symlink_to("nowhere")
    assert cli.main(["convert", "mamba2", str(source), str(link)]) == 2
    assert "link is there already" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stage_folder, "write_index", full)
    assert cli.main(["convert", "mamba2", str(source), str(source.parent / "base")]) == 1
    assert list(source.parent.iterdir()) == [source]


def test_converted_models_have_no_moments_and_no_report(source: Path, tmp_path: Path) -> None:
    mamba2.convert(str(source), tmp_path / "base")
    with pytest.raises(ConfigError, match=r"it has weights alone; set init_from\.load=weights"):
        find_source(follower(tmp_path, load="weights+optimizer"))
    with pytest.raises(ConfigError, match="holds no stage"):
        stages_in(tmp_path)
