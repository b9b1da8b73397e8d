"""The document on which two models are compared."""

from __future__ import annotations

from pathlib import Path

import torch
from palimpsa_data import tokenizers
from torch import Tensor

from megatron_palimpsa.config import ConfigError

MOST_TOKENS = 512
"""What is behind them in the text is left out."""
_MOST_CHARACTERS = 64 * MOST_TOKENS

_TEXT = """\
The harbour of the town lies on the northern side of a narrow bay. In winter the wind blows from the sea for weeks,
and the fishermen mend their nets in the long sheds behind the quay. A lighthouse was built on the eastern cliff in
1874; its lamp, which burned oil until 1921, can be seen from a distance of nineteen miles. The keeper wrote down every
ship that passed: its name, its flag, the hour and the weather. Forty-one of his books are kept in the library.

Whoever reads them from the beginning learns how the trade changed. In the first years most ships carried timber and
came back with salt. Later there were coal and grain, and the names of the captains, once always the same nine or ten,
became too many to remember. On the third of March 1902 he noted a single line: "Nothing today but fog." The last book
ends in the middle of a page, on the evening on which the lamp was lit for the first time without him.

def count_ships(log, year):
    \"\"\"How many ships of each flag the keeper saw in a year.\"\"\"
    counts = {}
    for entry in log:
        if entry.year == year:
            counts[entry.flag] = counts.get(entry.flag, 0) + 1
    return counts
"""


def read_document(text: Path | None, tokenizer: Path | None, vocab_size: int) -> tuple[Tensor, str]:
    """The ids [T] of the first tokens of a text, and where they come from.

    Args:
        text: a file; None takes a text that comes along, or random ids where there is no tokenizer.

    Raises:
        ConfigError: the file cannot be read, is too short or needs a tokenizer.
        DataError: the tokenizer cannot be read.
    """
    if tokenizer is None:
        if text is not None:
            raise ConfigError(f"{text}: the stage has no tokenizer that could read it")
        generator = torch.Generator().manual_seed(0)
        return torch.randint(vocab_size, (MOST_TOKENS,), generator=generator), "random ids"
    ids = tokenizers.load(tokenizer).encode(_TEXT if text is None else _beginning(text))
    tokens = torch.from_numpy(ids[:MOST_TOKENS]).long()
    if len(tokens) < 2:
        raise ConfigError(f"{text}: gives {len(tokens)} tokens, too few to compare models on")
    if (largest := int(tokens.max())) >= vocab_size:
        raise ConfigError(f"{tokenizer}: gives the id {largest}, the model knows {vocab_size} of them")
    return tokens, "a text of its own" if text is None else str(text)


def _beginning(path: Path) -> str:
    try:
        with path.open() as file:
            return file.read(_MOST_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
