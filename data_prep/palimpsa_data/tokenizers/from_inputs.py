"""Training a tokenizer on the text of input files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from palimpsa_data import sources
from palimpsa_data.documents import Document
from palimpsa_data.errors import DataError
from palimpsa_data.files import write_atomically
from palimpsa_data.sources import Input, TextOptions
from palimpsa_data.tokenizers.training import train_json, train_sentencepiece

_TRAINERS = {".json": train_json, ".model": train_sentencepiece}


@dataclass
class TrainingText:
    """The beginnings of the inputs, equally much of each, `most_bytes` together; counts what went through.

    Raises:
        DataError: in the middle, for an input that cannot serve.
    """

    inputs: Sequence[Input]
    options: TextOptions
    most_bytes: int
    documents: int = field(default=0, init=False)
    bytes: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[str]:
        for number, source in enumerate(self.inputs):
            # What an input had too little of is left for those that follow.
            end = self.bytes + (self.most_bytes - self.bytes) // (len(self.inputs) - number)
            for item in sources.read(source, self.options, lambda done: None):
                if isinstance(item, Document):
                    self.documents += 1
                    self.bytes += len(item.text.encode())
                    yield item.text
                if self.bytes >= end:
                    break


def make_tokenizer(text: TrainingText, path: Path, vocab_size: int, *, say: Callable[[str], None]) -> None:
    """Train on the text and write `path`: a SentencePiece .model, or a tokenizer.json of the GPT-NeoX type.

    Raises:
        DataError: another suffix, a file that is there already, or too little text for `vocab_size` ids.
    """
    train = _TRAINERS.get(path.suffix)
    if train is None:
        raise DataError(f"{path}: a tokenizer is a .json (byte-level, GPT-NeoX type) or a .model (SentencePiece)")
    if path.exists():
        raise DataError(f"{path} is there already, and data may have been prepared with it; choose another name")
    say(f"training on up to {text.most_bytes / 1e6:.0f} MB of {len(text.inputs)} inputs")
    write_atomically(path, train(text, vocab_size))
    say(f"{path}: {vocab_size} ids, from {text.documents} documents, {text.bytes / 1e6:.1f} MB")
