"""The demo's preparation: real text, disjoint splits, restartable, idempotent."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.without import without
from palimpsa_data import demo, demo_files, demo_sources, tokenizers
from palimpsa_data.demo_sources import Pair, Sources, pieces
from palimpsa_data.documents import Skipped
from palimpsa_data.sets import SetReader, verify

from megatron_palimpsa import cli

KINDS = ("code", "prose", "long", "needles", "instruct")
SETS = [f"{kind}-{split}" for kind in KINDS for split in ("train", "valid")]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    lines: list[str] = []
    demo.prepare(folder, progress=lines.append)
    assert [re.match(r"set \d+/10", line) is not None for line in lines] == [False] * 2 + [True] * 10
    return folder


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


def documents(folder: Path, name: str) -> list[tuple[int, ...]]:
    reader = SetReader(folder / "sets" / name, checksums=False)
    return [tuple(reader.read(i, 0, int(length))[0].tolist()) for i, length in enumerate(reader.lengths)]


def test_sets_verify_and_hold_enough(prepared: Path) -> None:
    tokens = {name: verify(prepared / "sets" / name).tokens for name in SETS}
    assert tokens["code-train"] > 400_000
    assert tokens["prose-train"] > 300_000
    assert tokens["long-train"] > 1_000_000
    assert min(tokens[name] for name in SETS) > 5_000


def test_every_document_ends_once(prepared: Path) -> None:
    tokenizer = tokenizers.load(prepared / "tokenizer.model")
    for name in SETS:
        for document in documents(prepared, name):
            assert document[-1] == tokenizer.eod_id
            assert min(document[:-1]) > 3


def test_code_is_this_pythons_own(prepared: Path) -> None:
    tokenizer = tokenizers.load(prepared / "tokenizer.model")
    texts = [tokenizer.decode(list(document)) for document in documents(prepared, "long-train")]
    assert any(text.encode() == Path(subprocess.__file__).read_bytes() for text in texts)


def test_long_documents_are_long(prepared: Path) -> None:
    assert min(len(document) for document in documents(prepared, "long-train")) > 1500
    short = sorted(len(document) for name in ("code-train", "prose-train") for document in documents(prepared, name))
    assert short[len(short) // 2] < 1024


@pytest.mark.parametrize("kind", KINDS)
def test_train_and_valid_share_no_document(prepared: Path, kind: str) -> None:
    assert not set(documents(prepared, f"{kind}-train")) & set(documents(prepared, f"{kind}-valid"))


def test_all_kinds_split_modules_alike(sources: Sources) -> None:
    """What a module's validation documents say is in no kind's training documents."""
    sides: dict[str, set[bool]] = {}
    for kind in demo_files.KINDS:
        for text in sources.documents(kind):
            sides.setdefault(text.origin, set()).add(demo_files.is_valid_share(text.origin))
    assert all(len(side) == 1 for side in sides.values())
    assert 0.03 < sum(side == {True} for side in sides.values()) / len(sides) < 0.1


def test_loss_is_on_the_answers_alone(prepared: Path, sources: Sources) -> None:
    tokenizer = tokenizers.load(prepared / "tokenizer.model")
    reader = SetReader(prepared / "sets" / "instruct-train", checksums=False)
    examples = {text.content for text in sources.documents("instruct") if isinstance(text.content, Pair)}
    answers = {example.answer for example in examples}
    for number, length in enumerate(reader.lengths):
        assert length <= demo.MAX_EXAMPLE_TOKENS
        tokens, mask = reader.read(number, 0, int(length))
        assert mask is not None
        trained = tokens[mask == 1].tolist()
        assert tokenizer.decode(trained) in answers
        assert tokenizer.decode(tokens[mask == 0].tolist()).endswith("### Response:")
        assert trained[-1] == tokenizer.eod_id


def test_function_bodies_are_whole_and_without_their_docstring(sources: Sources) -> None:
    examples = [text.content for text in sources.documents("instruct") if isinstance(text.content, Pair)]
    contexts = [example.context for example in examples if example.context]
    assert len(contexts) > 100
    for context in contexts:
        (function,) = ast.parse(context).body
        assert isinstance(function, ast.FunctionDef)
        assert ast.get_docstring(function) is None
        assert function.end_lineno == len(context.splitlines())


def test_blends_name_the_sets_from_where_they_lie(prepared: Path) -> None:
    for stage, weights in demo.BLENDS.items():
        for split in ("train", "valid"):
            path = prepared / "blends" / f"{stage}-{split}.yaml"
            blend = yaml.safe_load(path.read_text())
            assert [(path.parent / entry["set"]).resolve().name for entry in blend] == [f"{k}-{split}" for k in weights]
            assert all((path.parent / entry["set"] / "set.json").is_file() for entry in blend)


def test_the_report_says_what_there_is(prepared: Path) -> None:
    report = json.loads((prepared / "report.json").read_text())
    assert report["sources"]["python"] == ".".join(map(str, sys.version_info[:3]))
    text = (prepared / "report.txt").read_text()
    for name in SETS:
        reader = SetReader(prepared / "sets" / name, checksums=False)
        item = report["sets"][name]
        assert (item["documents"], item["tokens"]) == (len(reader.lengths), reader.lengths.sum())
        assert item["longest"] == reader.lengths.max()
        assert re.search(rf"^{name} +{item['documents']} +{item['tokens']} ", text, re.MULTILINE)
    assert report["sets"]["prose-train"]["skipped"]["shorter than 200 characters"] > 0


AGAIN = """
import sys, time
from pathlib import Path
from palimpsa_data import demo
demo.prepare(Path(sys.argv[1]), progress=lambda line: None)
assert "torch" not in sys.modules and "megatron" not in sys.modules
assert time.process_time() < 2, time.process_time()
"""


def test_a_second_call_only_verifies(prepared: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*") if path.is_file()}
    subprocess.run([sys.executable, "-c", AGAIN, str(prepared)], check=True, timeout=240)
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*") if path.is_file()} == before


def test_the_same_commands_give_the_same_sets(prepared: Path, tmp_path: Path) -> None:
    """What the demo prepares is what `prep` makes of its files."""
    commands = {
        "code-valid": ["stackv2"],
        "prose-train": ["fineweb", "--min-length", "200"],
        "long-valid": ["text"],
        "instruct-train": ["longalpaca", "--max-example-tokens", "512"],
    }
    for name, (kind, *flags) in commands.items():
        inputs, output = prepared / "sources" / name, tmp_path / name
        tokenizer = str(prepared / "tokenizer.model")
        assert cli.main(["prep", kind, str(inputs), "--output", str(output), "--tokenizer", tokenizer, *flags]) == 0
        for path in sorted(output.glob(f"{name}-*.bin")):
            assert path.read_bytes() == (prepared / "sets" / name / path.name).read_bytes()
        assert (output / "set.json").read_bytes() == (prepared / "sets" / name / "set.json").read_bytes()


@pytest.mark.long
@pytest.mark.usefixtures("small_sources")
def test_other_sources_give_other_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Python in the same folder: all is made anew, nothing of the former stays."""
    demo.prepare(tmp_path / "d", progress=lambda line: None)
    some = demo_sources._python_files
    monkeypatch.setattr(demo_sources, "_python_files", lambda root, name: dict(list(some(root, name).items())[:-1]))
    monkeypatch.setattr(demo_sources, "_LEAST_MODULES", 50)
    demo.prepare(tmp_path / "d", progress=lambda line: None)
    demo.prepare(tmp_path / "new", progress=lambda line: None)
    assert content(tmp_path / "d") == content(tmp_path / "new")


@pytest.mark.long
def test_nothing_but_what_is_installed_is_needed(tmp_path: Path) -> None:
    """The demo's kinds of files are read without the packages of the extra `data`."""
    done = without("prep", "demo", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr


def test_pieces_are_cut_between_paragraphs() -> None:
    paragraphs = [f"{'word ' * (5 * number)}{number}" for number in range(40)]
    cut = list(pieces("\n\n".join(paragraphs), 500))
    assert [paragraph for piece in cut for paragraph in piece.rstrip("\n").split("\n\n")] == paragraphs
    assert all(piece.endswith("\n") and not piece.endswith("\n\n") for piece in cut)
    assert all(len(piece) <= 503 or "\n\n" not in piece.strip() for piece in cut)


@pytest.fixture
def small_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with a tenth of its text, so that it can be prepared over and over."""
    whole = demo_sources._python_files
    some: dict[str, dict[str, bytes]] = {}

    def first_files(root: Path, name: str) -> dict[str, bytes]:
        if name not in some:
            some[name] = dict(list(whole(root, name).items())[: 40 if name == "numpy" else 110])
        return some[name]

    monkeypatch.setattr(demo_sources, "_python_files", first_files)


def content(folder: Path) -> dict[str, bytes]:
    """Every file but those that note when an input was last changed."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".input.json"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def prepare_and_die(folder: Path, replacements: int) -> None:
    """In a child: prepare, dying before the given number of files has got its name."""
    replace = Path.replace
    left = replacements

    def dying(self: Path, target: Path) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    Path.replace = dying  # type: ignore[assignment,method-assign]
    demo.prepare(folder, progress=lambda line: None)


@pytest.mark.long
@pytest.mark.usefixtures("small_sources")
def test_killed_again_and_again_gives_the_same_bytes(tmp_path: Path) -> None:
    demo.prepare(tmp_path / "unbroken", progress=lambda line: None)
    for replacements in (1, 4, 7, 16):
        child = multiprocessing.get_context("fork").Process(target=prepare_and_die, args=(tmp_path / "d", replacements))
        child.start()
        child.join(120)
        assert child.exitcode == -signal.SIGKILL
    demo.prepare(tmp_path / "d", progress=lambda line: None)
    assert content(tmp_path / "d") == content(tmp_path / "unbroken")


@pytest.mark.usefixtures("small_sources")
def test_damage_is_mended(tmp_path: Path) -> None:
    demo.prepare(tmp_path, progress=lambda line: None)
    before = content(tmp_path)
    damaged = ("sets/code-train/code-train-00001-of-00002.bin", "tokenizer.model", "blends/instruct-train.yaml")
    for name in damaged:
        (tmp_path / name).write_bytes(before[name][:-5])
    (tmp_path / "sources" / "long-train" / "part-1.jsonl").unlink()
    (tmp_path / "sets" / "prose-valid" / "set.json").unlink()
    demo.prepare(tmp_path, progress=lambda line: None)
    assert content(tmp_path) == before


def test_left_out_documents_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"python/m{number}.py": b"x = 1\n" * number for number in range(1, 101)}
    files |= {"python/latin.py": b"# \xe9\n", "python/empty.py": b" \n", "python/huge.py": b"#" * 300_000}
    monkeypatch.setattr(demo_sources, "_python_files", lambda root, name: files if name == "python" else {})
    reasons = {t.origin: t.content.reason for t in Sources().documents("code") if isinstance(t.content, Skipped)}
    assert reasons == {
        "python/latin.py": "not UTF-8",
        "python/empty.py": "empty",
        "python/huge.py": "larger than 256 KiB",
    }
