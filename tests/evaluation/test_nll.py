"""`eval nll`: losses by position against the logits, the difference's band, what is measured again and what not."""

from __future__ import annotations

import csv
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers.bpe import write_tokenizer
from helpers.random_stage import write_random_stage
from palimpsa_data import tokenizers
from palimpsa_data.sets import SetReader

from megatron_palimpsa import cli
from megatron_palimpsa.config import ConfigError
from megatron_palimpsa.evaluation import documents, nll, nll_picture
from megatron_palimpsa.evaluation.documents import Text, read_documents
from megatron_palimpsa.evaluation.nll import Bin, Sums, summarize
from megatron_palimpsa.inference import opened
from megatron_palimpsa.report.style import save

TEXTS = ["abc def ghi jab " * 4, "cde", "fgh ija bcd efg hij " * 9, "jih gfe"]


@pytest.fixture(scope="module")
def other_stage(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    return write_random_stage(tmp_path_factory.mktemp("other"), tiny_data, seed=1)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    return path


def direct(stage: Path, length: int) -> list[np.ndarray]:
    """Losses of all tokens of each document but its first, from the logits of the document alone in float64."""
    found = []
    with opened(stage) as it, torch.no_grad():
        assert it.tokenizer is not None
        for text in TEXTS:
            ids = torch.from_numpy(it.tokenizer.encode_document(text)[:length]).long()
            logits = it.model(input_ids=ids[None], position_ids=None, attention_mask=None)[0].double()
            found.append(-logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy())
    return found


def test_two_models_are_compared_by_position(
    evaluated_stage: Path, other_stage: Path, texts: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    output = tmp_path / "nll"
    command = ["eval", "nll", str(evaluated_stage), str(other_stage), "--text", str(texts), "--text-column", "body"]
    command += ["--output", str(output), "--length", "60", "--batch-tokens", "100"]
    assert cli.main(command) == 0
    a, b = direct(evaluated_stage, 60), direct(other_stage, 60)
    assert capsys.readouterr().out.count(f": 4 documents, {sum(len(losses) + 1 for losses in a)} tokens in all\n") == 2
    with (output / "nll.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["start"]), int(row["stop"])) for row in rows] == [(0, 16), (16, 32), (32, 59)]
    for row in rows:
        part = slice(int(row["start"]), int(row["stop"]))
        inside_a, inside_b = (np.concatenate([losses[part] for losses in own]) for own in (a, b))
        assert int(row["tokens"]) == len(inside_a)
        assert int(row["documents"]) == sum(len(losses) > part.start for losses in a)
        assert float(row["a"]) == pytest.approx(inside_a.mean(), abs=1e-5)
        assert float(row["difference"]) == pytest.approx((inside_b - inside_a).mean(), abs=1e-5)
        assert float(row["low"]) < float(row["difference"]) < float(row["high"])
    content = json.loads((output / "nll.json").read_text())
    assert content["all"]["tokens"] == sum(map(len, a))
    assert (output / "nll.png").read_bytes().startswith(b"\x89PNG")

    # The first model is not measured again: as after a kill in between.
    kept = (output / "nll.json").read_bytes()
    (output / "nll.json").unlink()
    (output / "model-b.npz").unlink()
    measured: list[str] = []
    measure = nll.measure
    monkeypatch.setattr(nll, "measure", lambda scorer, *rest: measured.append(scorer.task) or measure(scorer, *rest))
    assert cli.main(command) == 0
    assert measured == [f"model b, {other_stage}"]
    assert (output / "nll.json").read_bytes() == kept

    with pytest.raises(ConfigError, match=r"model-a.npz holds results with other settings \(documents: "):
        nll.compare((evaluated_stage, other_stage), Text((str(texts),), "body", documents=2, length=60), output)
    with pytest.raises(ConfigError, match=r"model-a.npz holds results with other settings \(weights: "):
        nll.compare((other_stage, other_stage), Text((str(texts),), "body", length=60), output)
    file = output / "model-a.npz"
    whole = file.read_bytes()
    with np.load(file) as content:
        arrays = dict(content)
    changed = io.BytesIO()
    np.savez(changed, **{**arrays, "settings": np.array("[1]")})
    flipped = bytearray(whole)
    flipped[whole.index(b"losses.npy") + 200] ^= 1
    for damaged in (b"", b"PK", whole[: len(whole) // 2], bytes(flipped), changed.getvalue()):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"model-a.npz: cannot be read"):
            nll.compare((evaluated_stage, other_stage), Text((str(texts),), "body", length=60), output)
    np.savez(file, **{**arrays, "losses": arrays["losses"][:1]})
    with pytest.raises(ConfigError, match=r"model-a.npz: holds sums of other documents"):
        nll.compare((evaluated_stage, other_stage), Text((str(texts),), "body", length=60), output)


def test_the_band_is_that_of_a_mean_where_all_documents_are_alike() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.normal(3, 1, (40, 2)), draw.normal(2.5, 1, (40, 2))
    tokens = np.full((40, 2), 4)
    for at, one in enumerate(summarize(Sums(4 * a, tokens), Sums(4 * b, tokens), [0, 4, 8])):
        differences = (b - a)[:, at]
        assert one.difference == pytest.approx(differences.mean())
        assert one.high - one.difference == pytest.approx(1.96 * differences.std(ddof=1) / 40**0.5)
        assert one.difference - one.low == pytest.approx(one.high - one.difference)


def test_the_band_of_documents_of_any_length_is_that_of_the_bootstrap() -> None:
    draw = np.random.default_rng(1)
    tokens = draw.integers(1, 60, (300, 1))
    a = tokens * draw.normal(3, 0.5, (300, 1))
    b = a + tokens * draw.normal(-0.2, 0.3, (300, 1))
    (one,) = summarize(Sums(a, tokens), Sums(b, tokens), [0, 60])
    again = draw.integers(0, 300, (4000, 300))
    means = (b - a)[again, 0].sum(1) / tokens[again, 0].sum(1)
    assert one.high - one.difference == pytest.approx(1.96 * means.std(), rel=0.05)


def test_empty_bins_are_left_out_and_one_document_has_no_band() -> None:
    tokens = np.array([[3, 0]])
    (one,) = summarize(Sums(tokens * 2.0, tokens), Sums(tokens * 1.0, tokens), [0, 4, 8])
    assert (one.start, one.documents, one.a, one.difference) == (0, 1, 2.0, -1.0)
    assert np.isnan(one.low)


def test_the_picture_names_the_positions_of_each_bin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(nll_picture, "save", lambda figure, path: figures.append(figure) or save(figure, path))
    edges = [0, 16, 32, 2048]
    bins = [Bin(start, stop, 9, 90, 3.0, 2.5, -0.5, -0.75, -0.25) for start, stop in pairwise(edges)]
    nll_picture.draw(bins, ["A: one", "B: other"], tmp_path / "nll.png", even=False)
    losses, difference = figures[0].axes
    assert [text.get_text() for text in difference.get_xticklabels()] == ["0-15", "16-31", "32-2,047"]
    assert difference.get_xticks().tolist() == [8, 24, 1040]
    assert [line.get_ydata()[0] for line in losses.get_lines()] == [3.0, 2.5]
    (band,) = difference.collections
    assert band.get_datalim(difference.transData).intervaly.tolist() == [-0.75, -0.25]


def test_documents_of_blends_come_in_proportion_and_streams_in_equal_pieces(tiny_data: Path, tmp_path: Path) -> None:
    tokenizer = tokenizers.load(tiny_data / "tokenizer.model")
    blend = tmp_path / "blend.yaml"
    blend.write_text(f"- {{set: {tiny_data}/train, weight: 3.0}}\n- {{set: {tiny_data}/valid, weight: 1.0}}\n")
    found = read_documents(Text(blend=blend, documents=30, length=1000), tokenizer)
    sets = {name: SetReader(tiny_data / name, checksums=False) for name in ("train", "valid")}
    whole = {tuple(sets[name].read(n, 0, 10**6)[0]): name for name in sets for n in range(len(sets[name].lengths))}
    tokens = {name: sum(len(ids) for ids in found if whole[tuple(ids)] == name) for name in sets}
    assert len(found) == 30
    assert tokens["train"] / sum(tokens.values()) == pytest.approx(0.75, abs=0.1)
    pieces = read_documents(Text(blend=blend, documents=7, length=50, stream=True), tokenizer)
    assert [len(ids) for ids in pieces] == [50] * 7
    assert np.concatenate(pieces).tolist() == np.concatenate(found).tolist()[:350]
    assert max(len(ids) for ids in read_documents(Text(blend=blend, length=50), tokenizer)) == 50


def of_settings(stage: Path, folder: Path, **changes: Any) -> Path:
    """A folder with a stage's configuration, changed, and nothing else."""
    config = yaml.safe_load((stage / "config.yaml").read_text())
    for section, values in changes.items():
        config[section].update(values)
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_wrong_input_is_one_message_before_the_first_model_is_measured(
    evaluated_stage: Path, tiny_data: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*changes: str, b: Path = evaluated_stage, output: Path = tmp_path / "nll") -> str:
        assert cli.main(["eval", "nll", str(evaluated_stage), str(b), "--output", str(output), *changes]) == 2
        assert not output.exists()
        (message,) = capsys.readouterr().err.splitlines()
        return message

    text = ("--text", str(texts), "--text-column", "body")
    assert "absent: holds no stage" in refusal(*text, b=tmp_path / "absent")
    rounded = of_settings(evaluated_stage, tmp_path / "rounded", train={"precision": "bf16"})
    assert f"{evaluated_stage} is a model in fp32 and {rounded} one in bf16" in refusal(*text, b=rounded)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    worded = of_settings(evaluated_stage, tmp_path / "worded", data={"tokenizer": str(tokenizer)})
    assert "have different tokenizers" in refusal(*text, b=worded)

    assert "absent" in refusal("--text", "absent.jsonl")
    assert "--bins 9: more than the 4 predicted positions" in refusal(*text, "--length", "5", "--bins", "9")
    assert "--bins 100000: more than 10000" in refusal(*text, "--length", "1000000", "--bins", "100000")
    assert "no piece of 9999 tokens is there" in refusal(*text, "--stream", "--length", "9999")
    (broken := tmp_path / "broken.jsonl").write_text('{"text": 3}\n{"text": "a')
    assert "no document has 2 tokens; left out: 1 x " in refusal("--text", str(broken))
    assert f"--output: {broken} is not a folder" in refusal(*text, output=broken / "nll")


def test_one_document_has_no_band_in_the_json_either(evaluated_stage: Path, texts: Path, tmp_path: Path) -> None:
    nll.compare((evaluated_stage, evaluated_stage), Text((str(texts),), "body", documents=1, length=9), tmp_path)

    def no_number(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    content = json.loads((tmp_path / "nll.json").read_text(), parse_constant=no_number)
    assert (content["all"]["documents"], content["all"]["low"], content["all"]["difference"]) == (1, None, 0)


def test_rows_that_are_left_out_are_counted(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(documents.logger, "warning", lambda text, *values: said.append(text % values))
    tokenizer = tokenizers.load(tiny_data / "tokenizer.model")
    (rows := tmp_path / "rows.jsonl").write_text('{"text": 3}\n{"text": "abc def"}\n{"text": 4}\n')
    assert len(read_documents(Text((str(rows),)), tokenizer)) == 1
    (message,) = said
    assert f"{rows}: left out: 2 x " in message
