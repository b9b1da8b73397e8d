"""Files of prompts."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_palimpsa.config import ConfigError


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file in UTF-8: one a line, or of a `.jsonl` file the `prompt` of each line's object.

    Raises:
        ConfigError: the file cannot be read, or a line holds no prompt.
    """
    try:
        # Not splitlines: a line of JSON may hold other characters that break lines.
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts: {path}: {error}") from None
    objects = path.suffix == ".jsonl"
    prompts = [_of_object(line) if objects else line for line in lines]
    if "" in prompts:
        wanted = 'a JSON object with the text as "prompt"' if objects else "the text of a prompt"
        raise ConfigError(f"{path}, line {prompts.index('') + 1}: is empty or not {wanted}")
    return prompts


def _of_object(line: str) -> str:
    """The prompt in a line's object, empty where there is none."""
    try:
        prompt = json.loads(line)["prompt"]
        prompt.encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    return prompt
