"""A tokenizer file of any supported kind."""

from __future__ import annotations

from pathlib import Path

from palimpsa_data.errors import DataError
from palimpsa_data.tokenizers.base import Tokenizer

BACKENDS = ("auto", "gigatoken", "huggingface")
_NAMES = ("tokenizer.json", "tokenizer.model")


def load(path: Path | str, *, backend: str = "auto") -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, a SentencePiece `.model`, or a folder that holds one of them.

    Args:
        backend: what encodes with a `tokenizer.json`: `gigatoken`, `huggingface`, or `auto`: gigatoken where it is
            installed and gives Hugging Face's ids for a list of difficult strings (else `Tokenizer.note` says why not).

    Raises:
        DataError: the file is missing or unusable, or so is the backend asked for.
    """
    path = Path(path)
    if backend not in BACKENDS:
        raise DataError(f"tokenizer backend {backend!r}: one of {', '.join(BACKENDS)}")
    if path.is_dir():
        inside = [path / name for name in _NAMES if (path / name).is_file()]
        if not inside:
            raise DataError(f"{path}: the folder holds no {' and no '.join(_NAMES)}")
        path = inside[0]
    if path.suffix != ".json":
        from palimpsa_data.tokenizers.sentencepiece_model import SentencePieceTokenizer

        return SentencePieceTokenizer(path)
    from palimpsa_data.tokenizers.json_file import GigatokenTokenizer, HuggingFaceTokenizer

    reference = HuggingFaceTokenizer(path)
    if backend == "huggingface":
        return reference
    try:
        return GigatokenTokenizer(reference)
    except DataError as error:
        if backend == "gigatoken":
            raise
        reference.note = f"{error}; encoding with Hugging Face tokenizers, which is many times slower"
        return reference
