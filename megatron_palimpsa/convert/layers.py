"""Which layers a surgery turns into others: from the command line to the `model:` settings of the new stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_palimpsa.config import IMPORTANCE_SYMBOLS, LAYER_SYMBOLS, ConfigError, ModelConfig, read_as, read_tree
from megatron_palimpsa.training.checkpoint_state import fingerprint

WITH_IMPORTANCE = {"M": "P", "L": "Q"}
"""Layers without importance and what they are with it."""
WITHOUT_IMPORTANCE = {after: before for before, after in WITH_IMPORTANCE.items()}


@dataclass(frozen=True)
class Turn:
    """Layers that become others: all whose letter can, or those that `numbers` or `pattern` says."""

    letters: Mapping[str, str]
    """What becomes of which letter: WITH_IMPORTANCE or WITHOUT_IMPORTANCE."""
    numbers: str | None = None
    """`4,8,...`, counted from 1, as what is said about layers elsewhere (`convert select-layers`, reports) is."""
    pattern: str | None = None
    """The new pattern, or a YAML file with it as `model.pattern`, whose other model settings count too."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of the new stage's `model:` section, where the file says nothing."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the section too, whatever the file says."""

    def of(self, model: ModelConfig) -> ModelConfig:
        """What becomes of a model; all weights but those of importance are of use to both.

        Raises:
            ConfigError: a layer is not there or of a letter that cannot turn, the pattern says something else than
                the turn or nothing, or a setting is none, or one that the weights were not made for.
        """
        tree = dataclasses.asdict(model) | dict(self.defaults) | self._chosen(model) | dict(self.settings)
        new = read_as(ModelConfig, tree, self.pattern or "the new stage's model")
        self._check(model, new)
        return dataclasses.replace(new, pattern=new.layers)

    def _chosen(self, model: ModelConfig) -> dict[str, Any]:
        if self.pattern is not None:
            return _by_pattern(self.pattern)
        if self.numbers is None:
            return {"pattern": "".join(self.letters.get(letter, letter) for letter in model.layers)}
        layers = list(model.layers)
        for number in map(str.strip, self.numbers.split(",")):
            if not number.isdecimal() or not 1 <= int(number) <= len(layers):
                raise ConfigError(f"--layers {self.numbers}: {number!r} is none of the layers 1 to {len(layers)}")
            layers[int(number) - 1] = self._turned(model.layers[int(number) - 1], int(number))
        return {"pattern": "".join(layers)}

    def _check(self, model: ModelConfig, new: ModelConfig) -> None:
        if len(new.layers) != len(model.layers):
            raise ConfigError(
                f"model.pattern={new.pattern!r} has {len(new.layers)} layers, the stage has {len(model.layers)}"
            )
        if not (layers := changed(model, new)):
            wanted = " or ".join(self.letters.values())
            raise ConfigError(f"no layer of the stage's pattern {model.layers!r} would become {wanted}")
        for layer in layers:
            before, after = model.layers[layer - 1], new.layers[layer - 1]
            if after != (possible := self._turned(before, layer)):
                raise ConfigError(
                    f"model.pattern={new.pattern!r}: layer {layer}, {before} in the stage, can become {possible} and "
                    f"not {after}"
                )
        now = _of_weights(new)
        for name, value in _of_weights(model).items():
            if now.get(name, value) != value:
                raise ConfigError(f"model.{name}={now[name]!r}: the stage's weights were made with {value!r}")

    def _turned(self, letter: str, layer: int) -> str:
        if letter not in self.letters:
            possible = (f"{old} ({LAYER_SYMBOLS[old]}) can become {new}" for old, new in self.letters.items())
            raise ConfigError(
                f"layer {layer} is {letter} ({LAYER_SYMBOLS[letter]}) in the stage: only {', '.join(possible)}"
            )
        return self.letters[letter]


def _by_pattern(pattern: str) -> dict[str, Any]:
    if set(pattern) <= {*LAYER_SYMBOLS, "|"}:
        return {"pattern": pattern}
    section = read_tree(pattern).get("model")
    if not isinstance(section, dict) or "pattern" not in section:
        raise ConfigError(f"{pattern}: has no model.pattern")
    return section


def changed(before: ModelConfig, after: ModelConfig) -> list[int]:
    """The layers, counted from 1, whose letters differ."""
    pairs = zip(before.layers, after.layers, strict=True)
    return [layer for layer, (old, new) in enumerate(pairs, 1) if old != new]


def _of_weights(model: ModelConfig) -> dict[str, Any]:
    """The settings that kept weights and moments depend on."""
    settings = {name: value for name, value in fingerprint(model).items() if name != "pattern"}
    has_priors = not IMPORTANCE_SYMBOLS.isdisjoint(model.layers)
    return settings | ({"train_prior": model.train_prior} if has_priors else {})
