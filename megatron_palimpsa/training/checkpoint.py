"""Sharded checkpoints that are either complete and intact or not there.

A checkpoint is a folder `step-N` of Megatron's dist_checkpointing format: weights in float32 and Adam's moments under
the names and in the shapes of the unsplit model, so that any layout, either precision and every engine can load it.
Beside it lie `state.json` (position, schedule, fingerprint of the model), `manifest.json` (bytes and SHA-256 of every
file) and `COMPLETE` (SHA-256 of the manifest), which is written last.

Saving writes to `.tmp-step-N`, reads everything back for the checksums, renames once, replaces `latest` by a rename
and only then removes checkpoints beyond the newest `keep`. Loading takes the checkpoint that `latest` names, or the
newest intact one before it. Nothing in a checkpoint can run code when it is loaded.
"""

from __future__ import annotations

import errno
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as torch_checkpoint

from megatron_palimpsa.engine.base import Engine
from megatron_palimpsa.training import checkpoint_files as files
from megatron_palimpsa.training.checkpoint_state import FORMAT_VERSION, fingerprint, read_state, require_same_model


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names it and says what is left."""


def save(folder: Path, step: int, engine: Engine, progress: dict[str, Any], keep: int) -> Path:
    """Save everything a resumed run needs. Collective; returns when the checkpoint is on disk and the latest.

    Args:
        folder: the run's `checkpoints` folder; created if missing.
        progress: the loop's own position, as JSON has it; given back by `load`.
        keep: complete checkpoints to leave, the new one included.

    Raises:
        CheckpointError: on every rank, where any rank could not write (disk full, for instance); the checkpoints
            there before are untouched and nothing half-written has a checkpoint's name.
    """
    final = folder / f"step-{step}"
    temporary = folder / f".tmp-{final.name}"
    state = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "model": fingerprint(engine.config.model),
        "layout": _layout(),
        "optimizer_steps": engine.optimizer_steps,
        "scheduler": engine.scheduler_state(),
        "progress": progress,
    }
    try:
        _on_first_rank(lambda: files.prepare(folder, temporary))
        shards = {"weights": engine.weight_shards(), "moments": engine.moment_shards(), "rng": _rng_shards()}
        dist_checkpointing.save(shards, str(temporary), sharded_strategy=_SaveInProcess())
        _on_first_rank(lambda: files.seal(temporary, state))
        _on_first_rank(lambda: files.publish(temporary, final, keep))
    except (OSError, torch_checkpoint.CheckpointException) as error:
        reason = _reason(error)
        raise CheckpointError(
            f"{final}: could not be saved ({reason}); the checkpoints before it are untouched"
        ) from error
    return final


class _SaveInProcess(TorchDistSaveShardedStrategy):
    """Megatron's format written by this process: its own writer starts another one even for a synchronous save."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path | str) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
            ),
        )


def _on_first_rank(action: Callable[[], Any]) -> Any:
    """Run on rank 0; its result, or its OSError, reaches every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except OSError as error:
            outcome[1] = error
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _reason(error: BaseException) -> str:
    if isinstance(error, torch_checkpoint.CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        full = [cause for cause in causes if isinstance(cause, OSError)]
        return _reason(full[0]) if full else str(causes[0])
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "no space left on the disk"
    return str(error)


def latest(folder: Path) -> Path | None:
    """The checkpoint to go on from: the one `latest` names, or the newest intact one before it.

    Every file is read and checked against its checksum; each checkpoint passed over is named in a warning with what
    is wrong with it. Collective where a process group exists (rank 0 reads), local otherwise.
    """
    if dist.is_initialized():
        return _on_first_rank(lambda: files.latest_intact(folder))
    return files.latest_intact(folder)


def read_progress(path: Path) -> dict[str, Any]:
    """The `progress` that was saved, without loading anything."""
    return read_state(path)["progress"]


def load(
    path: Path, engine: Engine, *, what: Literal["everything", "weights", "weights+optimizer"] = "everything"
) -> dict[str, Any]:
    """Load a checkpoint under whatever layout the engine has. Collective.

    Args:
        what: `weights` leaves a fresh optimizer and schedule, `weights+optimizer` takes the moments over and starts
            the schedule anew, `everything` continues the stage: schedule and, under the same layout, random states.

    Returns:
        The `progress` that was saved.

    Raises:
        ConfigError: the checkpoint is of another model (the differing settings are named) or of a newer format.
    """
    state = read_state(path)
    require_same_model(path, engine.config.model)
    _require_plain_metadata(path)
    engine.load_weights(_load({"weights": engine.weight_shards(for_loading=True)}, path)["weights"])
    if what != "weights":
        moments = _load({"moments": engine.moment_shards(for_loading=True)}, path)["moments"]
        engine.load_moments(moments, state["optimizer_steps"])
    if what == "everything":
        engine.load_scheduler_state(state["scheduler"])
        # Checkpoints from before there was context parallelism do not name it.
        if {"cp": 1, **state["layout"]} == _layout():
            _set_rng(_load({"rng": _rng_shards()}, path)["rng"])
    return state["progress"]


def _load(shards: dict[str, Any], path: Path) -> dict[str, Any]:
    return dist_checkpointing.load(shards, str(path))


class _PlainUnpickler(pickle.Unpickler):
    """Builds the classes that torch's checkpoint metadata consists of, and nothing else."""

    ALLOWED = re.compile(
        r"torch\.distributed\.checkpoint\.metadata\.(Metadata|MetadataIndex|StorageMeta|TensorProperties"
        r"|TensorStorageMetadata|BytesStorageMetadata|ChunkStorageMetadata|_MEM_FORMAT_ENCODING)"
        r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
        r"|torch\.(Size|float32|uint8|serialization\._get_layout)"
        r"|pathlib\.(_local\.)?PosixPath"
    )

    def find_class(self, module: str, name: str) -> Any:
        if not self.ALLOWED.fullmatch(f"{module}.{name}"):
            raise CheckpointError(f"the checkpoint's metadata refers to {module}.{name}, which it has no use for")
        return super().find_class(module, name)


def _require_plain_metadata(path: Path) -> None:
    """torch unpickles these files, the ranks' own where the first cannot be read; foreign ones may hold anything."""
    for file in (path / ".metadata", *path.glob("__*.metadata")):
        _PlainUnpickler(io.BytesIO(file.read_bytes())).load()


def _layout() -> dict[str, int]:
    return {
        "world_size": dist.get_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
    }


def _rng_shards() -> dict[str, ShardedTensor]:
    """Every random state of this rank, one row each of tensors over all ranks."""
    states = {"cpu": torch.get_rng_state(), **tensor_parallel.get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    rank = (0, dist.get_rank(), dist.get_world_size())
    return {
        name: ShardedTensor.from_rank_offsets(f"rng.{name}", state.clone().unsqueeze(0), rank)
        for name, state in states.items()
    }


def _set_rng(states: dict[str, torch.Tensor]) -> None:
    states = {name: state.squeeze(0) for name, state in states.items()}
    torch.set_rng_state(states.pop("cpu"))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states.pop("cuda"))
    tensor_parallel.get_cuda_rng_tracker().set_states(states)
