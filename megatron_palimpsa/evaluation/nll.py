"""`eval nll`: two models' loss by the position in the document (the paper's Fig. 4), and their difference."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import math
import zipfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from palimpsa_data.files import json_bytes, write_atomically

from megatron_palimpsa.config import ConfigError, writable_place
from megatron_palimpsa.evaluation.documents import Text, read_documents
from megatron_palimpsa.evaluation.results import require_same, weights_sha256
from megatron_palimpsa.evaluation.scorer import Scorer
from megatron_palimpsa.evaluation.spans import Span
from megatron_palimpsa.inference import load_tokenizer, opened, settings_of
from megatron_palimpsa.training.validation import position_edges

logger = logging.getLogger(__name__)

_CONFIDENCE = 1.96
"""Standard errors on each side of a mean: 95 %."""
_MOST_BINS = 10_000
"""There is a sum for each of them and each document."""


@dataclass(frozen=True, eq=False)
class Sums:
    """Of one model: D documents, B bins of positions."""

    losses: np.ndarray
    """[D, B] float64."""
    tokens: np.ndarray
    """[D, B] int64."""


@dataclass(frozen=True)
class Bin:
    """Tokens that are predicted behind `start` to `stop - 1` others of their document."""

    start: int
    stop: int
    documents: int
    tokens: int
    a: float
    """Mean loss in nats a token."""
    b: float
    difference: float
    """b - a: below zero where the second model is better."""
    low: float
    high: float


def compare(
    models: tuple[Path, Path],
    source: Text,
    output: Path,
    *,
    bins: int | None = None,
    precision: Literal["bf16", "fp32"] | None = None,
    batch_tokens: int = 16384,
    tokenizer: Path | None = None,
) -> list[Bin]:
    """Measure both models on the same documents and write nll.csv, nll.json and nll.png into `output`.

    A model that was measured by an earlier run, with the same settings, is not measured again.

    Args:
        bins: so many of equal width; None doubles their widths.
        tokenizer: in place of the models' own.

    Raises:
        ConfigError, DataError: a model or the text cannot be read, the models have different tokenizers or precisions,
            or `output` holds results of other models, text or settings.
    """
    from megatron_palimpsa.evaluation import nll_picture

    edges = position_edges(source.length - 1) if bins is None else _even_edges(source.length - 1, bins)
    _check_comparable(models, precision, tokenizer)
    writable_place(output, "--output")
    sums: list[Sums] = []
    settings: list[dict[str, Any]] = []
    for name, model in zip("ab", models, strict=True):
        with opened(model, precision, tokenizer) as it:
            scorer = Scorer(it, None, batch_tokens)
            scorer.task = f"model {name}, {model}"
            documents = read_documents(source, scorer.tokenizer)
            settings.append(
                {
                    "weights": weights_sha256(it.model),
                    "precision": it.config.train.precision,
                    "tokenizer": scorer.tokenizer.sha256,
                    "documents": _sha256(documents),
                    "edges": edges,
                }
            )
            sums.append(_measured(output / f"model-{name}.npz", settings[-1], scorer, documents, edges))
    a, b = sums
    result = summarize(a, b, edges)
    write_atomically(output / "nll.csv", _csv(result))
    of_all = summarize(a, b, edges, whole=True)[0]
    content = {"models": settings, "all": _finite(of_all), "bins": [_finite(one) for one in result]}
    write_atomically(output / "nll.json", json_bytes(content))
    nll_picture.draw(
        result,
        [f"{name}: {model}" for name, model in zip("AB", models, strict=True)],
        output / "nll.png",
        even=bins is not None,
    )
    band = f"95 %: {of_all.low:.4f} to {of_all.high:.4f}" if of_all.documents > 1 else "no band of one document"
    logger.info(
        "%d documents, %d tokens: %.4f and %.4f nats a token, difference %.4f (%s)",
        *(of_all.documents, of_all.tokens, of_all.a, of_all.b, of_all.difference, band),
    )
    return result


def _check_comparable(models: tuple[Path, Path], precision: str | None, tokenizer: Path | None) -> None:
    """Refuse, before the first model is measured, what would not compare with it."""
    a, b = (settings_of(model) for model in models)
    if precision is None and a.train.precision != b.train.precision:
        raise ConfigError(
            f"{models[0]} is a model in {a.train.precision} and {models[1]} one in {b.train.precision}, which changes "
            f"losses too; --precision bf16 or fp32 measures both in one"
        )
    loaded = [load_tokenizer(config, tokenizer) for config in (a, b)]
    if len({it.sha256 for it in loaded if it is not None}) > 1:
        raise ConfigError(f"{models[0]} and {models[1]} have different tokenizers: losses a token do not compare")


def _finite(one: Bin) -> dict[str, Any]:
    """By name; JSON knows no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in vars(one).items()}


def _measured(
    path: Path, settings: dict[str, Any], scorer: Scorer, documents: list[np.ndarray], edges: list[int]
) -> Sums:
    if path.is_file():
        there, found = _read(path)
        require_same(path, there, settings)
        if not found.losses.shape == found.tokens.shape == (len(documents), len(edges) - 1):
            raise ConfigError(f"{path}: holds sums of other documents; remove it to measure again")
        logger.info("%s: measured already", scorer.task)
        return found
    logger.info("%s: %d documents, %d tokens in all", scorer.task, len(documents), sum(map(len, documents)))
    found = measure(scorer, documents, edges)
    content = io.BytesIO()
    np.savez(content, settings=np.array(json.dumps(settings)), losses=found.losses, tokens=found.tokens)
    write_atomically(path, content.getvalue())
    return found


def _read(path: Path) -> tuple[dict[str, Any], Sums]:
    try:
        with np.load(path, allow_pickle=False) as content:
            return dict(json.loads(str(content["settings"]))), Sums(content["losses"], content["tokens"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove it to measure again") from None


def measure(scorer: Scorer, documents: list[np.ndarray], edges: list[int]) -> Sums:
    """Losses of all tokens but each document's first, by how many tokens stand before the one that predicts them."""
    sums = Sums(np.zeros((len(documents), len(edges) - 1)), np.zeros((len(documents), len(edges) - 1), np.int64))
    for number, scores in enumerate(scorer.score([Span(ids, 1) for ids in documents])):
        at = np.searchsorted(edges, np.arange(len(scores.log_probabilities)), side="right") - 1
        np.add.at(sums.losses[number], at, -scores.log_probabilities.astype(np.float64))
        np.add.at(sums.tokens[number], at, 1)
    return sums


def summarize(a: Sums, b: Sums, edges: list[int], whole: bool = False) -> list[Bin]:
    """Means over tokens in each bin that has any, or in one bin of all (`whole`).

    The band of the difference is 95 % over documents: they are independent, tokens of one are not. Its variance is that
    of a ratio of sums over documents (linearised), which is the usual one of a mean where all have as many tokens.
    """
    tokens, losses_a, losses_b = a.tokens, a.losses, b.losses
    if whole:
        tokens, losses_a, losses_b = (part.sum(1, keepdims=True) for part in (tokens, losses_a, losses_b))
        edges = [edges[0], edges[-1]]
    found = []
    for at, (start, stop) in enumerate(pairwise(edges)):
        counts = tokens[:, at].astype(np.float64)
        there = counts > 0
        if not there.any():
            continue
        counts, differences = counts[there], (losses_b[there, at] - losses_a[there, at])
        total = counts.sum()
        difference = differences.sum() / total
        documents = len(counts)
        # Of one document there is no variance.
        error = float("nan")
        if documents > 1:
            residuals = differences - difference * counts
            error = float(np.sqrt(documents / (documents - 1) * (residuals**2).sum()) / total)
        half = _CONFIDENCE * error
        found.append(
            Bin(
                start,
                stop,
                documents,
                int(total),
                float(losses_a[there, at].sum() / total),
                float(losses_b[there, at].sum() / total),
                float(difference),
                float(difference - half),
                float(difference + half),
            )
        )
    return found


def _even_edges(length: int, bins: int) -> list[int]:
    if bins > length:
        raise ConfigError(f"--bins {bins}: more than the {length} predicted positions")
    if bins > _MOST_BINS:
        raise ConfigError(f"--bins {bins}: more than {_MOST_BINS}")
    return [length * number // bins for number in range(bins + 1)]


def _csv(bins: list[Bin]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(vars(bins[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(vars(one) for one in bins)
    return text.getvalue().encode()


def _sha256(documents: list[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for ids in documents:
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.hexdigest()
