"""JSON records to dataclasses: what people edit by hand, or disks damage, is found here and not where it is used."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from palimpsa_data.errors import DataError
from palimpsa_data.files import read_json


class RecordError(ValueError):
    """A key that is missing, unknown, or of another type than the field's."""


def from_json[Record](kind: type[Record], value: Any) -> Record:
    """An instance of the dataclass `kind`, lists made tuples where its fields say so.

    Raises:
        RecordError: names the place and what belongs there.
    """
    return _checked(value, kind, "")


def read_record[Record](
    path: Path, kind: type[Record], *, format: int, what: str, remedy: str = "prepare the data again"
) -> Record:
    """The JSON object in a file as the dataclass `kind`, of which `format` is what its "format" must be.

    Raises:
        DataError: names the file when it is missing, of another format or not `what` it should be.
    """
    content = read_json(path)
    if content.get("format") != format:
        raise DataError(f"{path}: format {content.get('format')}, this version reads {format}; prepare the data again")
    try:
        return from_json(kind, content)
    except RecordError as error:
        raise DataError(f"{path}: not {what} ({error}); {remedy}") from None


def is_file_name(name: str) -> bool:
    """Whether the name stays within its folder."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _checked(value: Any, hint: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
        return _record(value, hint, where)
    if origin is dict and isinstance(value, dict):
        return {key: _checked(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    if origin in (list, tuple) and isinstance(value, list):
        hints = arguments if len(arguments) == len(value) and ... not in arguments else arguments[:1] * len(value)
        if origin is list or ... in arguments or len(arguments) == len(value):
            items = enumerate(zip(value, hints, strict=True))
            return origin(_checked(item, kind, f"{where}[{number}]") for number, (item, kind) in items)
    # True is an int, and no count.
    elif isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise RecordError(f"{where.removeprefix('.') or 'the record'} is {value!r:.60}, not {_name(hint)}")


def _record(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise RecordError(f"{where.removeprefix('.') or 'the record'} is {value!r:.60}, not an object")
    hints = typing.get_type_hints(kind)
    optional = {name for name in hints if hasattr(kind, name)}  # a field's default is the class's attribute
    for what, names in (("unknown", value.keys() - hints.keys()), ("missing", hints.keys() - value.keys() - optional)):
        if names:
            raise RecordError(f"{where.removeprefix('.')} {min(names)!r} is {what}".strip())
    return kind(**{name: _checked(item, hints[name], f"{where}.{name}") for name, item in value.items()})


def _name(hint: Any) -> str:
    kind = typing.get_origin(hint) or hint
    return {int: "an integer", str: "a string", bool: "true or false", dict: "an object"}.get(kind, "a list")
