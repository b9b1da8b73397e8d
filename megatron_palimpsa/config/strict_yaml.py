"""YAML read without its surprises."""

from __future__ import annotations

import re
from typing import Any

import yaml

from megatron_palimpsa.config.values import ConfigError


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML as it is meant: a key given twice or a NUL is an error, `1e-4` is a number, a date is text."""


def _construct_unique(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{node.start_mark.name}, line {node.start_mark.line + 1}: key {key!r} is given twice")
    return loader.construct_mapping(node, deep=True)


def _construct_text(loader: _UniqueKeyLoader, node: yaml.ScalarNode) -> str:
    if "\0" in node.value:
        raise ConfigError(f"{node.start_mark.name}, line {node.start_mark.line + 1}: {node.value!r} holds a NUL")
    return loader.construct_scalar(node)


_UniqueKeyLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_unique)
_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG, _construct_text)


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader would take for something else than text."""


for _kind in (_UniqueKeyLoader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def parse_yaml(text: str, where: str) -> Any:
    try:
        loader = _UniqueKeyLoader(text)
        loader.name = where
        return loader.get_single_data()
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        # PyYAML lets through what its conversions raise: `!!int x`, an integer of 5000 digits, a thousand brackets.
        raise ConfigError(f"{where}: not valid YAML: {error}") from None


def write_yaml(tree: Any) -> str:
    """What `parse_yaml` makes the same tree of, keys in their order."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False)
