"""The package that only exports and comparisons need."""

from __future__ import annotations

import importlib

from megatron_palimpsa.config import ConfigError


def require_transformers() -> None:
    """Raises ConfigError, saying how it is installed, where Hugging Face's transformers is missing or too old."""
    try:
        importlib.import_module("megatron_palimpsa.hf")
    except ImportError as error:
        raise ConfigError(
            "this needs Hugging Face's transformers, 5.24 or newer: in this project's folder "
            f".venv/bin/pip install -e '.[hf]' -c constraints.txt ({error})"
        ) from None
