"""Keys, values, names and coded words that no training needle can hold."""

from __future__ import annotations

from collections.abc import Callable

from palimpsa_data.needles.draws import Draw
from palimpsa_data.needles.names import split_of, word

_ADJECTIVES = (
    "amber", "ample", "ancient", "azure", "bitter", "blunt", "bold", "brave", "brisk", "calm", "candid", "chilly",
    "civil", "clever", "cosmic", "crisp", "curly", "daring", "deep", "dusty", "eager", "earnest", "early", "faint",
    "famous", "fancy", "fierce", "fluffy", "frosty", "gentle", "giddy", "glossy", "grand", "grumpy", "hasty", "hazy",
    "hollow", "humble", "icy", "idle", "jolly", "keen", "kind", "lively", "lofty", "loyal", "lucky", "mellow",
    "merry", "mighty", "misty", "modest", "muddy", "narrow", "neat", "nimble", "noble", "odd", "pale", "patient",
    "plain", "polite", "proud", "quaint", "quick", "rapid", "rare", "ripe", "rough", "royal", "rusty", "scarce",
    "shiny", "silent", "sleepy", "smooth", "snug", "solemn", "stern", "subtle", "sunny", "swift", "tame", "tender",
    "tidy", "tiny", "vivid", "warm", "wary", "weary", "wild", "wise", "witty", "young", "zesty",
)  # fmt: skip
_NOUNS = (
    "acorn", "anchor", "anvil", "apron", "arrow", "badge", "banjo", "basin", "beacon", "beetle", "blanket", "bottle",
    "bridge", "bucket", "button", "cabin", "cactus", "camel", "candle", "canyon", "castle", "cedar", "cellar", "clover",
    "comet", "compass", "copper", "coral", "cradle", "crater", "cricket", "curtain", "dagger", "desert", "dolphin",
    "drawer", "eagle", "ember", "engine", "falcon", "feather", "fiddle", "forest", "fossil", "fountain", "galaxy",
    "garden", "ginger", "glacier", "goblet", "hammer", "harbor", "hazel", "helmet", "heron", "hornet", "island",
    "jacket", "jasmine", "kernel", "kettle", "ladder", "lagoon", "lantern", "lemon", "lizard", "locket", "magnet",
    "mango", "marble", "meadow", "mirror", "monsoon", "mosaic", "needle", "nutmeg", "oasis", "orchard", "otter",
    "paddle", "parrot", "pebble", "pepper", "pillow", "planet", "pocket", "prairie", "pyramid", "quarry", "quiver",
    "rabbit", "raven", "ribbon", "river", "rocket", "saddle", "sapphire", "shadow", "spider", "statue", "summit",
    "tavern", "temple", "thimble", "tiger", "tunnel", "turtle", "valley", "velvet", "violin", "walnut", "whistle",
    "willow", "window", "zephyr",
)  # fmt: skip
_UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_HEX = "0123456789abcdef"


def _of_evaluation(make: Callable[[], str]) -> str:
    while split_of((made := make()).lower()) != "evaluation":
        pass
    return made


def key(draw: Draw) -> str:
    """An adjective and a noun, such as RULER's keys are."""
    return _of_evaluation(lambda: f"{draw.choice(_ADJECTIVES)}-{draw.choice(_NOUNS)}")


def number(draw: Draw) -> str:
    """7 digits. Training's numbers have 5, 6 or 8, so that variables have 7 here too, where RULER's have 5."""
    return str(draw.between(10**6, 10**7 - 1))


def uuid(draw: Draw) -> str:
    """A random UUID (version 4); training has none."""
    digits = [draw.choice(_HEX) for _ in range(32)]
    digits[12], digits[16] = "4", draw.choice("89ab")
    spelled = "".join(digits)
    return "-".join((spelled[:8], spelled[8:12], spelled[12:16], spelled[16:20], spelled[20:]))


def variable(draw: Draw) -> str:
    """Five capitals; training's names are small letters, and not these."""
    return _of_evaluation(lambda: _letters(draw, 5))


def coded_word(draw: Draw) -> str:
    """Six small letters."""
    return _of_evaluation(lambda: _letters(draw, 6).lower())


def list_word(draw: Draw) -> str:
    """An invented word; RULER takes English ones, of which a long list would have to be brought along."""
    return word(draw, "evaluation")


def distinct(make: Callable[[Draw], str], draw: Draw, count: int) -> list[str]:
    """So many different ones."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[make(draw)] = None
    return list(found)


def _letters(draw: Draw, count: int) -> str:
    return "".join(draw.choice(_UPPER) for _ in range(count))
