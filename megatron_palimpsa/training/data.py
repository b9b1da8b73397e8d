"""Blends of prepared sets -> batches, in an order that any position of the stage can be computed from.

A packed sequence has a number n in the stage. `Interleave` says which set sequence n comes from and how many of that
set came before it, the set's packing says which documents make it up: both in O(log) time, whatever n is, and nothing
depends on the number of ranks. Position on resume is therefore the count of sequences consumed, and nothing else.

Orders and packings are memory-mapped where `prep index` has written them beside the sets (`palimpsa_data.index`), or
built in memory when the stage starts: a second or less, and some 100 MB, a million documents.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from palimpsa_data import DataError
from palimpsa_data.files import json_sha256, sha256_file
from palimpsa_data.index import SetIndex
from palimpsa_data.packing import VERSION, BestFitPacking, ConcatPacking, Packing, Segment
from palimpsa_data.sets import SetInfo, SetReader, Share, TokenizerInfo, read_set

from megatron_palimpsa import launcher
from megatron_palimpsa.config import ConfigError, StageConfig
from megatron_palimpsa.training.batch import Batch
from megatron_palimpsa.training.blend_file import REMEDY, BlendEntry, read_blend
from megatron_palimpsa.training.interleave import Interleave

logger = logging.getLogger(__name__)

CHECKSUM_LIMIT = 2**28
"""A set is read whole when a stage starts, and compared with its checksums and the vocabulary: one of up to this many
bytes by every rank, a larger one by all ranks together, each its share of the shards. No rank goes on without the
others, so a damaged shard that one of them finds stops all before the first step."""

_INDEX_ADVISED = 2_000_000  # documents of a set, from which the time and memory that `prep index` saves matter
_SILENT_BYTES = 2 * 2**30  # reading more takes long enough to be said


@dataclass(frozen=True)
class Source:
    """What a stage takes from one set, for its plan."""

    name: str
    share: float
    """Of the stage's packed sequences."""
    tokens: int
    """In one epoch."""
    epochs: float
    """Over the stage."""
    fill: float
    """Tokens in an average packed sequence over seq_length."""


class StageData:
    """Training and validation batches of one stage.

    Raises:
        ConfigError: a blend, set or shard is missing, damaged, or does not fit the tokenizer, the model's vocabulary
            or the stage's length; names the file, the key and what to do.
    """

    def __init__(self, config: StageConfig, *, write_index: bool = False) -> None:
        self._config = config
        tokenizer = _tokenizer_sha256(config)
        self._train = _Blend(config, "train_blend", tokenizer, endless=True, write_index=write_index)
        self._valid = _Blend(config, "valid_blend", tokenizer, endless=False, write_index=write_index)
        self._train.check_epochs(config.total_steps * config.global_batch_size)
        self.recipe: dict[str, Any] = {
            "sets": [
                {"name": reader.info.name, "sha256": reader.sha256, "weight": entry.weight}
                for entry, reader in zip(self._train.entries, self._train.readers, strict=True)
            ],
            "packing": [config.data.packing, VERSION],
            "seq_length": config.model.seq_length,
            "seed": config.seed,
        }
        """Everything that decides the order of the training data; a position means nothing under another."""
        self.fingerprint = json_sha256(self.recipe)

    def changes_since(self, recipe: dict[str, Any]) -> str:
        """What differs from the `recipe` of an earlier start, in words."""
        before, now = _blend_text(recipe.get("sets", [])), _blend_text(self.recipe["sets"])
        if before == now:
            return "other content of the sets, or another way of packing them"
        return f"{now}, there {before}"

    def train_batches(self, consumed_sequences: int, dp_rank: int, dp_size: int) -> Iterator[Batch]:
        """Endless microbatches of one data-parallel rank, from the stage's sequence number `consumed_sequences` on.

        Microbatch k of all ranks together takes the sequences that follow k * dp_size * micro_batch_size; rank r the
        r-th micro_batch_size of them. The global order is the same for every dp_size.
        """
        size = self._config.train.micro_batch_size
        for microbatch in itertools.count():
            first = consumed_sequences + (microbatch * dp_size + dp_rank) * size
            yield self._batch(self._train, [self._train.place(first + i) for i in range(size)])

    def valid_batches(self) -> list[Batch]:
        """All validation microbatches, for the ranks to share out: the same at every call and for every dp_size.

        Together eval_batches * global_batch_size sequences, or fewer where the sets hold fewer: none comes twice. The
        last row may be filled in part.
        """
        config = self._config
        places = map(self._valid.place, range(config.train.eval_batches * config.global_batch_size))
        held = (place for place in places if self._valid.holds(*place))
        return [self._batch(self._valid, list(row)) for row in itertools.batched(held, config.train.micro_batch_size)]

    def sources(self) -> list[Source]:
        """What the stage takes from each set of the training blend."""
        return self._train.sources(self._config.total_steps * self._config.global_batch_size)

    def train_sequence(self, n: int) -> tuple[SetReader, list[Segment]]:
        """What training sequence n consists of: its set, and the parts of that set's documents."""
        number, index = self._train.place(n)
        return self._train.readers[number], self._train.packings[number].segments(index)

    def prepare_index(self) -> list[Path]:
        """Have the orders of all the stage's epochs made; -> the index folders, with `write_index` on the disk."""
        self._train.prepare([math.ceil(source.epochs) + 1 for source in self.sources()])
        self._valid.prepare([1] * len(self._valid.readers))
        return sorted({index.folder for blend in (self._train, self._valid) for index in blend.indices})

    def _batch(self, blend: _Blend, places: list[tuple[int, int]]) -> Batch:
        row = _Row(self._config.train.micro_batch_size * self._config.model.seq_length, blend.pad_id)
        for number, index in places:
            for segment in blend.packings[number].segments(index):
                row.add(blend.readers[number], segment)
        return row.batch()


class _Row:
    """A microbatch under construction: documents are laid one after the other, padding stays at the end."""

    def __init__(self, size: int, pad_id: int) -> None:
        self._tokens = np.full(size, pad_id, np.int64)
        self._labels = np.full(size, pad_id, np.int64)
        self._loss_mask = np.zeros(size, np.float32)
        self._ends = [0]

    def add(self, reader: SetReader, segment: Segment) -> None:
        begin, length = self._ends[-1], segment.length
        end = begin + length
        # One token more, where the document goes on: the label of the segment's last token.
        tokens, mask = reader.read(segment.document, segment.start, segment.start + length + 1)
        self._tokens[begin:end] = tokens[:length]
        labelled = slice(begin, begin + len(tokens) - 1)
        self._labels[labelled] = tokens[1:]
        self._loss_mask[labelled] = 1.0 if mask is None else mask[1:]
        self._ends.append(end)

    def batch(self) -> Batch:
        import torch  # late: all checks of the data, and the dry run, do without

        return Batch(
            tokens=torch.from_numpy(self._tokens)[None],
            labels=torch.from_numpy(self._labels)[None],
            loss_mask=torch.from_numpy(self._loss_mask)[None],
            cu_seqlens=torch.tensor(self._ends, dtype=torch.int32),
        )


class _Blend:
    """The sets of one blend file, opened, checked and packed."""

    def __init__(
        self, config: StageConfig, key: str, tokenizer_sha256: str, *, endless: bool, write_index: bool
    ) -> None:
        self._path = Path(getattr(config.data, key))
        self._where = f"data.{key}={self._path}"
        self.entries = read_blend(self._path, self._where)
        self.readers = [self._open(entry, config, tokenizer_sha256) for entry in self.entries]
        self.pad_id = self.readers[0].info.tokenizer.pad_id
        self.indices = [self._index(reader, write_index) for reader in self.readers]
        self.packings = [self._packing(number, config, endless) for number in range(len(self.readers))]
        weights = np.array([entry.weight for entry in self.entries])
        tokens = np.array([packing.tokens_per_sequence for packing in self.packings])
        # Relative to the largest, so that no weight is too large or too small to add up.
        self._interleave = Interleave(weights / weights.max() / tokens)
        self._seq_length = config.model.seq_length

    def _open(self, entry: BlendEntry, config: StageConfig, tokenizer_sha256: str) -> SetReader:
        try:
            info = read_set(entry.folder)
            self._check_tokenizer(entry, info.tokenizer, config, tokenizer_sha256)
            if info.trained_tokens == 0 or info.longest < 2:
                raise ConfigError(
                    f"{self._where}: set {entry.folder} holds nothing to learn: no document has a next token that "
                    f"counts; leave the set out"
                )
            share = _share(info)
            if info.tokens * 2 > share.count * _SILENT_BYTES:
                size = info.tokens * 2 / share.count / 1e9
                logger.info("%s: comparing %.1f GB a rank with their checksums", entry.folder, size)
            return SetReader(entry.folder, checksums=True, share=share)
        except DataError as error:
            raise ConfigError(f"{self._where}: {error}") from None

    def _check_tokenizer(
        self, entry: BlendEntry, tokenizer: TokenizerInfo, config: StageConfig, tokenizer_sha256: str
    ) -> None:
        if tokenizer.vocab_size > config.model.vocab_size:
            advice = (
                "raise model.vocab_size or use another tokenizer"
                if config.init_from is None
                else f"prepare the text with the tokenizer of init_from.stage={config.init_from.stage!r}, whose "
                "weights know no other ids"
            )
            raise ConfigError(
                f"{self._where}: set {entry.folder} has a vocabulary of {tokenizer.vocab_size} ids, "
                f"model.vocab_size is {config.model.vocab_size}; {advice}"
            )
        if tokenizer.sha256 != tokenizer_sha256:
            raise ConfigError(
                f"{self._where}: set {entry.folder} was made with another tokenizer than "
                f"data.tokenizer={config.data.tokenizer}; name the right one or prepare the set again"
            )

    def _index(self, reader: SetReader, write: bool) -> SetIndex:
        try:
            return SetIndex(reader, _share(reader.info), write=write)
        except DataError as error:
            raise ConfigError(f"{self._where}: {error}") from None

    def _packing(self, number: int, config: StageConfig, endless: bool) -> Packing:
        lengths, index = self.readers[number].lengths, self.indices[number]
        key, seq_length = (config.seed, number), config.model.seq_length
        packing: Packing
        if config.data.packing == "best-fit":
            packing = BestFitPacking(lengths, seq_length, key, arrays=index)
        else:
            packing = ConcatPacking(lengths, seq_length, key, endless=endless, arrays=index)
        packing.prepare(0)
        if index.built and len(lengths) > _INDEX_ADVISED:
            logger.info(
                "%s: every rank built the order of %d documents in memory; `prep index` builds it once",
                self.readers[number].folder,
                len(lengths),
            )
        return packing

    def prepare(self, epochs: list[int]) -> None:
        """Have the orders of the first `epochs` of each set made."""
        for packing, count in zip(self.packings, epochs, strict=True):
            for epoch in range(count):
                packing.prepare(epoch)

    def place(self, n: int) -> tuple[int, int]:
        """Sequence n of the blend -> (number of its set, sequence within the set's endless run)."""
        return self._interleave.place(n)

    def holds(self, number: int, index: int) -> bool:
        """Whether a set's sequence `index` belongs to its first epoch."""
        return index < self.packings[number].sequences

    def sources(self, sequences: int) -> list[Source]:
        """What the first `sequences` sequences take from each set."""
        sources = []
        for number, (reader, packing) in enumerate(zip(self.readers, self.packings, strict=True)):
            tokens = self._interleave.count(number, sequences) * packing.tokens_per_sequence
            share = float(self._interleave.shares[number])
            fill = packing.tokens_per_sequence / self._seq_length
            sources.append(Source(reader.info.name, share, reader.info.tokens, tokens / reader.info.tokens, fill))
        return sources

    def check_epochs(self, sequences: int) -> None:
        """Refuse a stage that would repeat a set more often than its entry allows."""
        for entry, source in zip(self.entries, self.sources(sequences), strict=True):
            if entry.epochs is not None and source.epochs > entry.epochs:
                raise ConfigError(
                    f"{self._where}: the stage takes {source.epochs:.2f} epochs of set {entry.folder}, "
                    f"epochs={entry.epochs:g} is allowed; lower its weight or train.tokens, or raise epochs"
                )


def _share(info: SetInfo) -> Share:
    """The shards of a set whose bytes this rank reads when the stage starts."""
    if info.tokens * 2 <= CHECKSUM_LIMIT:
        return Share()
    return Share(launcher.rank(), launcher.world_size())


def _blend_text(sets: list[dict[str, Any]]) -> str:
    return " + ".join(f"{item['weight']:g} {item['name']}" for item in sets) or "unknown"


def _tokenizer_sha256(config: StageConfig) -> str:
    try:
        return sha256_file(Path(config.data.tokenizer))
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer}: cannot read it: {error.strerror}; {REMEDY}"
        ) from None
