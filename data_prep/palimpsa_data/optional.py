"""Packages of the extra `data`, which the demo and training do without."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from palimpsa_data.errors import DataError


@contextlib.contextmanager
def optional_packages() -> Iterator[None]:
    """Around imports that need them.

    Raises:
        DataError: one is not installed; names it and says how it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise DataError(
            f"this needs the package {error.name}, which is not installed: in this project's folder "
            ".venv/bin/pip install -e '.[data]' -c constraints.txt"
        ) from None
