"""Small tokenizers of the GPT-NeoX type, and texts that are hard on tokenizers."""

from __future__ import annotations

import functools
import random
import sysconfig
from pathlib import Path

from palimpsa_data.tokenizers import train_json

SPECIAL = ("<|endoftext|>", "<|padding|>")
STARTS = (0x20, 0x30, 0xC0, 0x300, 0x370, 0x600, 0x900, 0xE00, 0x1100, 0x2000, 0x3040, 0x4E00, 0xAC00, 0xFB00, 0x1F300)
WORDS = (
    "don't",
    "I'LL",
    " 've",
    "1234",
    "   ",
    "\n\n",
    "\r\n",
    "\t",
    "a\u0300",
    "\u1100\u1161",
    "\u0627\u0644",
    "x+=1;",
)


def stdlib_texts(count: int) -> list[str]:
    """The longest of Python's own modules, text that is on every machine."""
    paths = sorted(
        Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: (-path.stat().st_size, path.name)
    )
    return [path.read_text() for path in paths[:count]]


@functools.cache
def _trained(vocab_size: int) -> bytes:
    return train_json([text[:20000] for text in stdlib_texts(12)], vocab_size)


def write_tokenizer(folder: Path, vocab_size: int = 300) -> Path:
    """A tokenizer.json with NFC, GPT-2's pre-splitting, two control tokens and runs of spaces as added tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_bytes(_trained(vocab_size))
    return path


def unicode_text(draw: random.Random) -> str:
    """Up to some 400 characters of everything: scripts and their marks, spaces, contractions, control tokens' names."""
    parts = []
    for _ in range(draw.randint(0, 40)):
        kind = draw.random()
        if kind < 0.3:
            start = draw.choice(STARTS)
            parts.append("".join(chr(start + draw.randint(0, 0x7F)) for _ in range(draw.randint(1, 12))))
        elif kind < 0.5:
            parts.append("".join(_character(draw) for _ in range(draw.randint(1, 6))))
        elif kind < 0.9:
            parts.append(draw.choice(WORDS))
        else:
            parts.append(draw.choice((*SPECIAL, " " * draw.randint(2, 30))))
    return "".join(parts)


def _character(draw: random.Random) -> str:
    while 0xD800 <= (code := draw.randrange(0x110000)) < 0xE000:
        pass
    return chr(code)
