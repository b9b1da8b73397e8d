"""Real text that every installation has: Python's standard library and reference manual, NumPy's documentation.

Nothing is downloaded. Python's text is under the PSF licence, NumPy's under BSD-3-Clause. Which files there are depends
on the versions of the two; `Sources.versions` and `Sources.sha256` say which these were.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

from palimpsa_data.documents import Skipped
from palimpsa_data.errors import DataError
from palimpsa_data.files import json_sha256

# Tests, generated tables and whatever a system keeps beside the standard library.
_LEFT_OUT = {
    "__pycache__", "dist-packages", "encodings", "idle_test", "lib2to3", "pydoc_data", "site-packages", "test", "tests",
}  # fmt: skip
_PIECE = 2000
_LONG_MODULE = 16 * 1024
_LONG_TOPIC = 8 * 1024
_LARGEST_MODULE = 256 * 1024
_SHORTEST_DOCSTRING = 200
_LEAST_MODULES = 100


@dataclass(frozen=True)
class Pair:
    """An instruction, the text that it is about or nothing, and its answer."""

    instruction: str
    context: str
    answer: str


@dataclass(frozen=True)
class Text:
    """A document; all documents of one origin (a module, a topic) fall on the same side of the train/valid split."""

    origin: str
    content: str | Skipped | Pair


class Sources:
    """The demo's documents: `code`, `prose`, `long` and `instruct`, each in a fixed order.

    Raises:
        DataError: this Python comes without the sources of its standard library.
    """

    def __init__(self) -> None:
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        self._stdlib = _python_files(stdlib, "python")
        self._numpy = _python_files(Path(str(resources.files("numpy"))), "numpy")
        if len(self._stdlib) < _LEAST_MODULES:
            raise DataError(
                f"{stdlib} holds {len(self._stdlib)} modules: this Python comes without the sources of its "
                "standard library; use another installation of Python"
            )

    @functools.cached_property
    def sha256(self) -> str:
        contents = {name: hashlib.sha256(content).hexdigest() for name, content in (self._stdlib | self._numpy).items()}
        return json_sha256([contents, self._manual])

    @property
    def size(self) -> int:
        """Bytes of all sources: no set holds more tokens."""
        modules = sum(len(content) for content in (self._stdlib | self._numpy).values())
        return modules + sum(len(topic.encode()) for topic in self._manual.values())

    @functools.cache  # noqa: B019 - one object lives as long as the preparation
    def documents(self, kind: str) -> list[Text]:
        """The documents of one kind, those left out included, in an order that only the sources decide."""
        seen: set[str | Skipped | Pair] = set()
        documents = []
        for text in getattr(self, kind)():
            if not isinstance(text.content, Skipped) and text.content in seen:
                documents.append(Text(text.origin, Skipped("the same as another")))
            else:
                documents.append(text)
                seen.add(text.content)
        return documents

    @property
    def versions(self) -> dict[str, str]:
        return {"python": platform.python_version(), "numpy": metadata.version("numpy")}

    def code(self) -> Iterator[Text]:
        """The shorter modules, in pieces of some 2000 characters."""
        for origin, module in self._modules.items():
            if isinstance(module, Skipped):
                yield Text(origin, module)
            elif len(module) < _LONG_MODULE:
                yield from (Text(origin, piece) for piece in pieces(module))

    def prose(self) -> Iterator[Text]:
        """The shorter topics of the reference manual, in pieces; NumPy's docstrings."""
        for origin, topic in self._manual.items():
            if len(topic) < _LONG_TOPIC:
                yield from (Text(origin, piece) for piece in pieces(topic))
        for origin, content in self._numpy.items():
            for name, docstring in _docstrings(content.decode()):
                if len(docstring) < _SHORTEST_DOCSTRING:
                    yield Text(origin, Skipped(f"shorter than {_SHORTEST_DOCSTRING} characters"))
                else:
                    yield Text(origin, f"{name}\n\n{docstring}\n")

    def long(self) -> Iterator[Text]:
        """The longer modules and topics, whole."""
        for origin, module in self._modules.items():
            if not isinstance(module, Skipped) and len(module) >= _LONG_MODULE:
                yield Text(origin, module)
        for origin, topic in self._manual.items():
            if len(topic) >= _LONG_TOPIC:
                yield Text(origin, topic)

    def instruct(self) -> Iterator[Text]:
        """Questions on functions and topics; the answers are the first paragraphs of their documentation."""
        for origin, topic in self._manual.items():
            heading, _, body = topic.partition("\n\n")
            title = heading.strip().splitlines()[0]
            question = f"What does the Python reference manual say under the heading {title!r}?"
            yield Text(origin, _example(question, "", body))
        for origin, module in self._modules.items():
            if not isinstance(module, Skipped):
                name = origin.removeprefix("python/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                yield from (Text(origin, example) for example in _function_examples(name, module))

    @functools.cached_property
    def _modules(self) -> dict[str, str | Skipped]:
        return {origin: _decode(content) for origin, content in self._stdlib.items()}

    @functools.cached_property
    def _manual(self) -> dict[str, str]:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:
            raise DataError(f"this Python comes without its reference manual ({error}); use another one") from None
        return {f"topics/{name}": text for name, text in sorted(topics.items())}


def _python_files(root: Path, name: str) -> dict[str, bytes]:
    files = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        left_out = any(part in _LEFT_OUT or part.startswith("config-") for part in relative.parts[:-1])
        # _sysconfigdata holds the paths of the machine that built this Python.
        if not left_out and not relative.name.startswith("_sysconfigdata"):
            files[f"{name}/{relative.as_posix()}"] = path.read_bytes()
    return files


def _decode(content: bytes) -> str | Skipped:
    if not content.strip():
        return Skipped("empty")
    if len(content) > _LARGEST_MODULE:
        return Skipped(f"larger than {_LARGEST_MODULE // 1024} KiB")
    try:
        return content.decode()
    except UnicodeDecodeError:
        return Skipped("not UTF-8")


def pieces(text: str, size: int = _PIECE) -> Iterator[str]:
    """Cut between paragraphs, as late as `size` characters allow; a longer paragraph is a piece of its own."""
    kept: list[str] = []
    room = size
    for paragraph in text.split("\n\n"):
        if kept and len(paragraph) > room:
            yield "\n\n".join(kept) + "\n"
            kept, room = [], size
        kept.append(paragraph)
        room -= len(paragraph) + 2
    if any(kept):
        yield "\n\n".join(kept).rstrip("\n") + "\n"


def _docstrings(module: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(module)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.name, docstring


def _first_paragraph(text: str) -> str:
    return " ".join(text.strip().partition("\n\n")[0].split())


def _example(question: str, context: str, text: str) -> Pair | Skipped:
    answer = _first_paragraph(text)
    return Pair(question, context, answer) if 40 <= len(answer) <= 400 else Skipped("answer too short or too long")


def _function_examples(module: str, source: str) -> Iterator[Pair | Skipped]:
    """One question for each documented public function, alternately from its name and from its body."""
    lines = source.splitlines()
    for number, node in enumerate(ast.parse(source).body):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            yield Skipped("function without a docstring")
        elif number % 2 or len(node.body) == 1:
            yield _example(f"What does the function {node.name} of Python's module {module} do?", "", docstring)
        else:
            first = node.body[0]
            without = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]
            code = "\n".join(without)
            yield _example(f"Say in a sentence what this function of Python's module {module} does.", code, docstring)
