"""The folder of a stage: its lock, its resolved configuration, its marker; nothing here needs torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megatron_palimpsa.config import ConfigError, StageConfig, load_stage, save_resolved, to_dict, writable_place

logger = logging.getLogger(__name__)

# A resumed run may change these: they do not change which weights the stage ends with, but for rounding.
# Moved data files are recognised by their fingerprint, in whatever place they lie.
_FREE_SECTIONS = {"output_dir", "parallel", "checkpoint", "logging", "evaluation"}
_FREE_KEYS = {
    "data.train_blend",
    "data.valid_blend",
    "data.tokenizer",
    "init_from.pattern",
    "train.micro_batch_size",
    "train.recompute",
    "train.eval_interval",
    "train.eval_batches",
    "train.stop_at_step",
    "train.stop_at_tokens",
    "train.stop_after_minutes",
    "train.max_grad_norm_ratio",
    "train.max_loss_rise",
    "train.max_bad_steps",
    "train.watchdog_seconds",
}

_MARKER_KEYS = {"steps", "tokens", "seconds", "checkpoint"}


class RunFolder:
    """Paths of one stage's folder (`output_dir/name`) and the files that belong to the folder as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.marker = path / "STAGE_COMPLETE"
        self.evaluated = path / "EVALUATION_COMPLETE"
        self.save_now = path / "SAVE_NOW"

    @property
    def is_evaluated(self) -> bool:
        """Whether the recipe's evaluation has run; by its marker."""
        return self.evaluated.exists()

    @property
    def has_checkpoints(self) -> bool:
        return self.checkpoints.is_dir() and any(self.checkpoints.glob("step-*"))

    def read_marker(self) -> dict[str, Any] | None:
        """What the finished stage noted at its end, or None while it is not complete."""
        try:
            marker = json.loads(self.marker.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise self._bad_marker(str(error)) from None
        if not isinstance(marker, dict) or not marker.keys() >= _MARKER_KEYS:
            raise self._bad_marker(f"it does not hold {', '.join(sorted(_MARKER_KEYS))}")
        return marker

    def _bad_marker(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.marker}: not readable as the marker of a complete stage: {reason}; "
            f"remove it and train the stage again: it goes on from its last checkpoint"
        )

    def write_marker(self, summary: dict[str, Any]) -> None:
        temporary = self.marker.with_name(".STAGE_COMPLETE.tmp")
        with temporary.open("w") as file:
            file.write(json.dumps(summary, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.marker)

    def write_config(self, config: StageConfig) -> None:
        temporary = self.config.with_name(".config.yaml.tmp")
        save_resolved(config, temporary)
        temporary.replace(self.config)

    def check_config(self, config: StageConfig) -> None:
        """Refuse to go on with the folder's checkpoints under a configuration that would give other weights.

        Raises:
            ConfigError: names every differing key with both values.
        """
        if not self.config.is_file() or not (self.has_checkpoints or self.marker.exists()):
            return
        before, now = _flatten(to_dict(load_stage(self.config))), _flatten(to_dict(config))
        differing = [
            f"{key}={now.get(key)!r} (there {before.get(key)!r})"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key) and key not in _FREE_KEYS and key.split(".")[0] not in _FREE_SECTIONS
        ]
        if differing:
            raise ConfigError(
                f"{self.path} holds a run with other settings: {', '.join(differing)}; "
                f"give the stage another name, or remove that folder to start anew"
            )

    def check_place(self, checkpoint_bytes: int, keep: int) -> None:
        """Refuse a folder that cannot be written, or whose disk `keep` checkpoints and the one being written will fill.

        Raises:
            ConfigError: names the folder; the free and the needed space.
        """
        held = len(list(self.checkpoints.glob("step-*"))) if self.has_checkpoints else 0
        needed = checkpoint_bytes * max(keep + 1 - held, 1)
        place = writable_place(self.path, "output_dir")
        free = shutil.disk_usage(place).free
        if free < needed:
            raise ConfigError(
                f"output_dir: no disk space for checkpoints in {place}: {_gigabytes(free)} are free, "
                f"{_gigabytes(needed)} needed (checkpoint.keep={keep}, {_gigabytes(checkpoint_bytes)} each)"
            )

    def is_locked(self) -> bool:
        """Whether a process of this machine, or of one that shares its locks, trains into this folder now."""
        try:
            with (self.path / ".lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    @contextlib.contextmanager
    def locked(self, patience: float = 0.0) -> Iterator[None]:
        """Hold the folder for this process; the kernel lets go of the lock however the process ends.

        Args:
            patience: seconds that another process is given to end.

        Raises:
            ConfigError: another process works in this folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a+") as file:
            if not self._lock(file, patience):
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise ConfigError(f"{self.path}: another process works in this folder ({holder})")
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            yield

    def _lock(self, file: IO[str], patience: float) -> bool:
        """Whether no other process holds the lock, or none after so many seconds."""
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(min(1.0, patience))
                continue
            except OSError as error:
                # Lustre and some NFS mounts offer no locks.
                logger.warning("%s: cannot be locked against a second process: %s", self.path, error)
            return True


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
