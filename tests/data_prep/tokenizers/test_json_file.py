"""tokenizer.json: gigatoken's and our Hugging Face ids against Hugging Face's own, which ids are control ids."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as hf
from helpers.bpe import SPECIAL, stdlib_texts, unicode_text, write_tokenizer
from palimpsa_data import DataError
from palimpsa_data.tokenizers import load, train_json
from palimpsa_data.tokenizers.json_file import GigatokenTokenizer

CODE = "\tdef f(x):\r\n\t    return x  # caf\xe9 \u212b\n"
FIXTURES = {
    "empty": "",
    "only spaces": " " * 100,
    "literal control tokens": f"a {SPECIAL[0]}b{SPECIAL[1]} </s>\n{SPECIAL[0]}{SPECIAL[0]}",
    "latin-1": CODE.encode("latin-1", "replace").decode("latin-1"),
    "utf-16": CODE.encode("utf-16").decode("utf-16"),
    "invalid bytes": b"int \xff\xfe = '\xc3('; // \x80".decode(errors="replace"),
    "decomposed": "e\u0301 \u1100\u1161\u11a8 a\u0316\u0301 \u0344",
}
BACKENDS = ("gigatoken", "huggingface")


@pytest.fixture(scope="module", params=[300, 1500])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param)


def reference(path: Path) -> Callable[[str], list[int]]:
    tokenizer = hf.Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("backend", BACKENDS)
def test_fixtures_encode_as_hugging_face_does(path: Path, backend: str) -> None:
    tokenizer, expected = load(path, backend=backend), reference(path)
    assert tokenizer.backend == backend
    for name, text in FIXTURES.items():
        assert tokenizer.encode(text).tolist() == expected(text), name


@pytest.mark.parametrize("backend", ["gigatoken", pytest.param("huggingface", marks=pytest.mark.long)])
def test_five_megabytes_encode_as_hugging_face_does(tmp_path: Path, backend: str) -> None:
    path = write_tokenizer(tmp_path)
    text = "\n".join(2 * stdlib_texts(120))[: 5 << 20]
    assert len(text) == 5 << 20
    assert np.array_equal(load(path, backend=backend).encode(text), reference(path)(text))


@pytest.mark.parametrize(
    "count", [400, pytest.param(10_000, marks=pytest.mark.long)], ids=["some documents", "all documents"]
)
def test_random_unicode_encodes_as_hugging_face_does(path: Path, count: int) -> None:
    tokenizer, expected = load(path, backend="gigatoken"), reference(path)
    draw = random.Random(6)
    texts = [unicode_text(draw) for _ in range(count)]
    assert sum(map(len, texts)) > 50 * count
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == expected(text), text


@pytest.mark.parametrize("backend", BACKENDS)
def test_control_tokens_in_text_stay_text(path: Path, backend: str) -> None:
    tokenizer = load(path, backend=backend)
    assert (tokenizer.eod_id, tokenizer.pad_id) == (0, 1)
    text = f"x{SPECIAL[0]}\n{SPECIAL[1]} {SPECIAL[0]}"
    ids = tokenizer.encode(text)
    assert ids.min() > 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 0, 1]) == text
    assert tokenizer.encode_document(text).tolist() == [*ids, 0]


def test_runs_of_spaces_are_one_id(path: Path) -> None:
    tokenizer = load(path)
    assert len(tokenizer.encode(" " * 24)) == 1
    assert tokenizer.encode(" " * 24)[0] == tokenizer.vocab_size - 23


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_is_its_texts(path: Path, backend: str) -> None:
    tokenizer = load(path, backend=backend)
    texts = ["", *stdlib_texts(3), "", "end"]
    ids, offsets = tokenizer.encode_flat(texts)
    assert offsets.tolist() == [0, *np.cumsum([len(tokenizer.encode(text)) for text in texts])]
    assert [tokenizer.decode(part) for part in tokenizer.encode_batch(texts)] == texts
    assert tokenizer.encode_batch([]) == []
    assert ids.size == offsets[-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_a_surrogate_pair_is_refused(path: Path, backend: str) -> None:
    with pytest.raises(UnicodeEncodeError):
        load(path, backend=backend).encode("a\ud800")


def changed(path: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    settings = json.loads(path.read_bytes())
    change(settings)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_file_would_add_or_cut_is_left_out(path: Path, tmp_path: Path, backend: str) -> None:
    text = stdlib_texts(1)[0][:3000]
    expected = load(path).encode(text).tolist()

    def change(settings: dict[str, Any]) -> None:
        settings["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
        settings["padding"] = {
            "strategy": {"Fixed": 9999},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 1,
            "pad_type_id": 0,
            "pad_token": SPECIAL[1],
        }
        settings["model"]["dropout"] = 0.5
        ends = [{"SpecialToken": {"id": SPECIAL[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        tokens = {SPECIAL[0]: {"id": SPECIAL[0], "ids": [0], "tokens": [SPECIAL[0]]}}
        settings["post_processor"] = {
            "type": "TemplateProcessing",
            "single": ends,
            "pair": ends,
            "special_tokens": tokens,
        }

    assert load(changed(path, tmp_path, change), backend=backend).encode(text).tolist() == expected


def test_the_end_token_can_be_named_beside_the_file(path: Path, tmp_path: Path) -> None:
    def rename(settings: dict[str, Any]) -> None:
        for token, name in zip(settings["added_tokens"], ("<stop>", "<blank>"), strict=False):
            settings["model"]["vocab"][name] = settings["model"]["vocab"].pop(token["content"])
            token["content"] = name

    renamed = changed(path, tmp_path, rename)
    with pytest.raises(DataError, match=r"'<stop>', '<blank>'.*tokenizer_config\.json"):
        load(renamed)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<stop>"}, "pad_token": "<stop>"})
    )
    tokenizer = load(tmp_path)
    assert (tokenizer.eod_id, tokenizer.pad_id, tokenizer.info.pad_id) == (0, None, 1)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<blank>", "pad_token": "<stop>"}))
    assert (load(tmp_path).eod_id, load(tmp_path).pad_id) == (1, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_control_tokens_that_the_file_does_not_call_special_stay_text(path: Path, tmp_path: Path, backend: str) -> None:
    def ordinary(settings: dict[str, Any]) -> None:
        for token in settings["added_tokens"]:
            token["special"] = False

    tokenizer = load(changed(path, tmp_path, ordinary), backend=backend)
    assert tokenizer.encode(f"a{SPECIAL[0]}{SPECIAL[1]}").min() > 1
    assert len(tokenizer.encode(" " * 24)) == 1


def test_what_gigatoken_cannot_read_goes_to_hugging_face(path: Path, tmp_path: Path) -> None:
    def characters(settings: dict[str, Any]) -> None:
        vocab = {token: i for i, token in enumerate([*SPECIAL, "a", "b", "ab", "[UNK]"])}
        settings["model"] |= {"vocab": vocab, "merges": [["a", "b"]], "unk_token": "[UNK]"}
        settings |= {"pre_tokenizer": None, "decoder": None, "normalizer": None}
        settings["added_tokens"] = settings["added_tokens"][:2]

    other = changed(path, tmp_path, characters)
    tokenizer = load(other)
    assert tokenizer.backend == "huggingface"
    assert "gigatoken cannot encode" in tokenizer.note
    assert "\n" not in tokenizer.note
    assert tokenizer.encode("abba").tolist() == [4, 3, 2]
    with pytest.raises(DataError, match="gigatoken cannot encode"):
        load(other, backend="gigatoken")


def test_other_ids_for_the_probes_go_to_hugging_face(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GigatokenTokenizer, "_encode", lambda self, texts: self.reference._encode([*texts[:-1], "b"]))
    assert "different ids" in load(path).note


@pytest.mark.parametrize("package", ["gigatoken", "awkward"])
def test_without_gigatoken_or_what_it_needs(path: Path, package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from palimpsa_data.tokenizers import load\n"
        f"tokenizer = load({str(path)!r}); print(tokenizer.backend, '-', tokenizer.note)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert result.stdout.startswith(f"huggingface - {package} is not installed"), result.stderr


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"model": 3}', b'{"model": {"type": "BPE"}}'])
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("content", ["{}", "[1]", '{"model": 3}', '{"vocab_size": 2048, "sha256": "0"}'])
def test_other_json_is_called_no_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"not a tokenizer\.json of Hugging Face's tokenizers$"):
        load(tmp_path / "tokenizer.json")


def test_wrong_paths_and_backends_are_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json"):
        load(tmp_path / "none.json")
    with pytest.raises(DataError, match=r"no tokenizer\.json and no tokenizer\.model"):
        load(tmp_path)
    with pytest.raises(DataError, match="auto, gigatoken, huggingface"):
        load(tmp_path, backend="fast")


def test_training_is_reproducible_and_says_when_text_is_short() -> None:
    texts = [text[:5000] for text in stdlib_texts(4)]
    assert train_json(iter(texts), 320) == train_json(texts, 320)
    with pytest.raises(DataError, match="the text gives"):
        train_json(["short"], 2048)
    with pytest.raises(DataError, match="at least 300"):
        train_json(texts, 299)
