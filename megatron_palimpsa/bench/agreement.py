"""Whether cases that train the same model on the same tokens see the same losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from megatron_palimpsa.bench.record import Record, layers_text

STEPS = 10
BOUNDS = {"fp32": (1e-5, 1e-4), "bf16": (2e-3, 2e-2), "fp16": (2e-3, 2e-2)}
"""Largest relative difference of losses and of gradient norms, by precision; ours."""
_LAYOUT = ("parallel.", "train.recompute=")
_SAME = ("stage", "precision", "seq_length", "micro_batch_size", "global_batch_tokens", "data")


def agreement_lines(records: Sequence[Record]) -> Iterator[str]:
    """A line for each group of cases that differ in layout alone: how far they are from the first of them."""
    groups: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in records:
        if record["status"] == "ok" and record["losses"] and record["grad_norms"]:
            groups[(*(record[key] for key in _SAME), layers_text(record), _other_settings(record))].append(record)
    for first, *others in groups.values():
        if others:
            yield _line(first, others)


def _other_settings(record: Record) -> frozenset[str]:
    """The overrides that say something else than how the same function is computed."""
    return frozenset(key for key in record["overrides"].split() if not key.startswith(_LAYOUT))


def _line(first: Record, others: Sequence[Record]) -> str:
    bounds = BOUNDS[first["precision"]]
    found = []
    for key, name, bound in zip(("losses", "grad_norms"), ("losses", "gradient norms"), bounds, strict=True):
        worst = max(others, key=lambda other: _apart(first[key], other[key]))
        apart = _apart(first[key], worst[key])
        verdict = "" if apart <= bound else ", NOT"
        found.append(f"{name} {apart:.1e} ({worst['case']}{verdict} within {bound:.0e})")
    steps = min(STEPS, *(len(record["losses"]) for record in (first, *others)))
    return f"{first['case']} and {len(others)} of the same model, {steps} steps, largest difference: " + ", ".join(
        found
    )


def _apart(first: Sequence[float], other: Sequence[float]) -> float:
    """Over the first steps that both have."""
    pairs = list(zip(first, other, strict=False))[:STEPS]
    return max(abs(a - b) / max(abs(a), 1e-30) for a, b in pairs)
