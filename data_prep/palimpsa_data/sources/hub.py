"""Data sets of the Hugging Face hub, streamed through `datasets`; needs a network."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from palimpsa_data.errors import DataError
from palimpsa_data.files import json_sha256
from palimpsa_data.optional import optional_packages


@dataclass(frozen=True)
class HubShard:
    """Part `number` of the `count` files that a data set's train split has at `revision`."""

    name: str
    config: str | None
    revision: str
    number: int
    count: int
    bytes: int

    @property
    def label(self) -> str:
        config = f":{self.config}" if self.config else ""
        return f"{self.name}{config}/{self.number:05d}-of-{self.count:05d}"

    def sha256(self) -> str:
        return json_sha256([self.name, self.config, self.revision, self.number, self.count])


def hub_shards(name: str, config: str | None) -> list[HubShard]:
    """The parts of the train split at the hub's newest revision.

    Raises:
        DataError: nothing local has this name, and the hub does not answer or does not know it.
    """
    with optional_packages():
        from huggingface_hub import HfApi

    try:
        revision = str(HfApi().dataset_info(name).sha)
        dataset = _stream(name, config, revision)
        size = (dataset.info.download_size or 0) // dataset.num_shards
        return [HubShard(name, config, revision, n, dataset.num_shards, size) for n in range(dataset.num_shards)]
    except _hub_errors() as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name}: nothing here has this name, and the hub says: {reason}") from None


def hub_rows(shard: HubShard, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Rows of one part, with those of `columns` that there are.

    Raises:
        DataError: the stream broke off.
    """
    try:
        part = _stream(shard.name, shard.config, shard.revision).shard(shard.count, shard.number)
        if part.column_names is not None:
            part = part.select_columns([column for column in part.column_names if column in columns])
        yield from part
    except _hub_errors() as error:
        raise DataError(f"{shard.label}: the hub's stream broke off ({error}); run again") from None


def _stream(name: str, config: str | None, revision: str) -> Any:
    with optional_packages():
        import datasets

    return datasets.load_dataset(name, config, split="train", streaming=True, revision=revision)


def _hub_errors() -> tuple[type[Exception], ...]:
    # huggingface_hub's HTTP client is another one in newer versions, and its errors are no OSErrors.
    clients = [importlib.import_module(name) for name in ("httpx", "httpx2") if importlib.util.find_spec(name)]
    return OSError, ValueError, RuntimeError, *(client.HTTPError for client in clients)
