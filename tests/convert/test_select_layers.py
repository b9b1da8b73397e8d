"""Layers chosen by their memory windows: planted ones are found, and windows are those of a direct computation."""

from __future__ import annotations

import csv
import fcntl
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from helpers.bpe import write_tokenizer
from helpers.published_mamba2 import random_mamba2
from helpers.runs import VOCAB_SIZE
from palimpsa_data import tokenizers
from torch import Tensor
from transformers import Mamba2ForCausalLM

from megatron_palimpsa import cli
from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.config.reading import read_tree
from megatron_palimpsa.convert import mamba2
from megatron_palimpsa.convert.sample import Sample
from megatron_palimpsa.convert.select_layers import choose, select_layers, with_palimpsa
from megatron_palimpsa.convert.selection import Selection, write_selection
from megatron_palimpsa.convert.windows import LayerWindows, Quartiles

ROWS, SEQ_LENGTH = 3, 32
PLANTED = {2: 1e-3, 5: 1e-7}
"""Layer -> rate of its decay: of 1e-7 a float32 alpha is 1 or the number before it."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mamba2ForCausalLM, Path]:
    """A model of six layers, of which two were made to remember long, and its converted stage."""
    folder = tmp_path_factory.mktemp("windows")
    model = random_mamba2(vocab_size=VOCAB_SIZE, n_groups=1, num_hidden_layers=6)
    for layer, rate in PLANTED.items():
        with torch.no_grad():
            model.backbone.layers[layer - 1].mixer.A_log.copy_(math.log(rate) + 0.1 * torch.randn(8))
    model.save_pretrained(folder / "source")
    mamba2.convert(str(folder / "source"), folder / "base")
    return model, folder / "base"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sample.txt"
    path.write_text(" ".join("abcdefghij"[i * i % 7 : i * i % 7 + 1 + i % 4] for i in range(200)))
    return path


@pytest.fixture(scope="module")
def selection(source, text: Path, tiny_data: Path) -> tuple[Selection, Path]:
    output = source[1].parent / "selection"
    sample = Sample(text, False, ROWS * SEQ_LENGTH + 1, SEQ_LENGTH)
    tokenizer = tiny_data / "tokenizer.model"
    return select_layers(source[1], sample, 2, output, precision="fp32", tokenizer=tokenizer), output


@pytest.fixture(scope="module")
def direct(source, text: Path, tiny_data: Path) -> list[Tensor]:
    """N_t of each layer [rows, tokens, heads], in float64 from the hidden states of Hugging Face's model."""
    model = source[0].double()
    ids = tokenizers.load(tiny_data / "tokenizer.model").encode(text.read_text())[: ROWS * SEQ_LENGTH]
    ids = torch.tensor(ids).long().view(ROWS, -1)
    with torch.no_grad():
        # Theirs begin behind the first layer.
        states = [model.backbone.embeddings(ids), *model(ids, output_hidden_states=True).hidden_states]
        windows = []
        for block, u in zip(model.backbone.layers, states, strict=False):
            u = u * (u.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * block.norm.weight
            dt = F.softplus((u @ block.mixer.in_proj.weight.T)[..., -8:] + block.mixer.dt_bias)
            windows.append(1 / (1 - torch.exp(-dt * block.mixer.A_log.exp())))
    return windows


def middle(windows: Tensor, share: float) -> float:
    ordered = windows.flatten().sort().values
    return float(ordered[math.ceil(share * len(ordered)) - 1])


def expected_quartiles(windows: Tensor) -> Any:
    return pytest.approx([middle(windows, share) for share in (0.25, 0.5, 0.75)], rel=3e-4)


def test_planted_layers_are_chosen_and_recipes_inherit_the_pattern(selection, tmp_path: Path) -> None:
    chosen, output = selection
    assert chosen.chosen == sorted(PLANTED)
    assert sorted(path.name for path in output.iterdir()) == [
        "heads.csv",
        "layers.csv",
        "pattern.yaml",
        "positions.png",
        "windows.png",
    ]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"base": str(output / "pattern.yaml"), "model": {"seq_length": 64}}))
    assert read_tree(recipe)["model"] == {"pattern": "MPMMPM", "seq_length": 64}


def test_windows_are_those_of_a_direct_computation(selection, direct: list[Tensor]) -> None:
    chosen, output = selection
    layers = list(csv.DictReader((output / "layers.csv").open()))
    heads = list(csv.DictReader((output / "heads.csv").open()))
    for number, windows in enumerate(direct, 1):
        row = layers[number - 1]
        assert (row["layer"], row["symbol"], row["chosen"]) == (str(number), "M", str(int(number in PLANTED)))
        assert _quartiles(row) == expected_quartiles(windows)
        for head in range(8):
            row = heads[8 * (number - 1) + head]
            assert (row["layer"], row["head"]) == (str(number), str(head + 1))
            assert _quartiles(row) == expected_quartiles(windows[..., head])
        # As many buckets as positions.
        by_position = [middle(windows[:, position], 0.5) for position in range(SEQ_LENGTH)]
        assert chosen.layers[number - 1].by_position == pytest.approx(by_position, rel=3e-4)
    assert direct[4].median() > 1e6
    assert len({round(float(value)) for value in direct[4].flatten()}) > 100


def _quartiles(row: dict[str, str]) -> list[float]:
    return [float(row[name]) for name in ("quartile_1", "median", "quartile_3")]


def test_a_blend_of_prepared_sets(source, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blend = ["--blend", tiny_data / "valid.yaml", "--tokenizer", tiny_data / "tokenizer.model"]
    options = [*blend, "--tokens", 64, "--seq-length", 16, "--layers", 2, "--output", tmp_path / "out"]
    assert cli.main(["convert", "select-layers", *map(str, [source[1], *options])]) == 0
    assert f"{tmp_path}/out/pattern.yaml: MPMMPM" in capsys.readouterr().out
    assert "by 64 tokens of" in (tmp_path / "out" / "pattern.yaml").read_text()


def test_two_at_once_do_not_write_into_one_folder(selection, tmp_path: Path) -> None:
    folder = tmp_path / ".out.converting"
    folder.mkdir()
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process works in this folder"):
            write_selection(tmp_path / "out", selection[0])
    assert [path.name for path in folder.iterdir()] == [".lock"]
    (folder / "layers.csv").write_text("left by a kill")
    write_selection(tmp_path / "out", selection[0])
    assert (tmp_path / "out" / "layers.csv").read_text() == (selection[1] / "layers.csv").read_text()
    with pytest.raises(ConfigError, match="out is there already"):
        write_selection(tmp_path / "out", selection[0])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--layers": 7}, "--layers 7: the model has 6 Mamba2 layers (M) of 6"),
        ({"--tokenizer": None}, "names no tokenizer; give --tokenizer FILE"),
        ({"--tokenizer": "{folder}/no.json"}, "no.json"),
        ({"--tokens": 10}, "10 tokens fill no row of 32"),
        ({"--seq-length": 4096, "--tokens": 4096}, "tokens are too few, a row has 4096"),
        ({"--text": "{folder}/no.txt"}, "no.txt: cannot be read as UTF-8 text"),
        ({"--text": "{folder}/config.yaml", "--tokenizer": "{folder}/large"}, "has 400 ids, the model knows 320"),
        ({"--text": None, "--blend": "{folder}/no.yaml"}, "no.yaml: cannot read the blend"),
        ({"--output": "{folder}"}, "is there already"),
        ({"stage": "{folder}/no"}, "holds no stage"),
    ],
)
def test_what_is_wrong_is_one_message_and_nothing_is_written(
    source, text: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: Any, message: str
) -> None:
    stage = source[1]
    options = {"--text": text, "--tokenizer": tiny_data / "tokenizer.model", "--layers": 2, "--tokens": 64}
    options |= {"stage": stage, "--seq-length": 32, "--output": tmp_path / "out", **changes}
    if "large" in str(changes):
        write_tokenizer(stage / "large", 400)
    values = {key: str(value).format(folder=stage) for key, value in options.items() if value is not None}
    arguments = [values.pop("stage"), *(word for option in values.items() for word in option)]
    assert cli.main(["convert", "select-layers", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())


def test_only_mamba2_layers_are_chosen_and_borders_stay() -> None:
    windows = {1: ("M", 3.0), 2: ("P", 9.0), 4: ("M", 5.0), 5: ("M", 5.0), 6: ("M", 1.0)}
    layers = [
        LayerWindows(number, symbol, Quartiles(0.0, median, 99.0), [], [])
        for number, (symbol, median) in windows.items()
    ]
    assert choose(layers, 1) == [4]
    assert choose(layers, 3) == [1, 4, 5]
    assert with_palimpsa("MP|*M|MM", choose(layers, 2)) == "MP|*P|PM"
