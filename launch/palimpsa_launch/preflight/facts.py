"""What a node finds out about itself, as JSON values."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from palimpsa_data import DataError
from palimpsa_data.files import json_sha256, sha256_file
from palimpsa_data.sets import read_set
from palimpsa_data.shards import output_path

from megatron_palimpsa.config import ConfigError, StageConfig, load_stage
from megatron_palimpsa.training.blend_file import read_blend

_PACKAGES = ("megatron_palimpsa", "palimpsa_kernels", "palimpsa_launch", "palimpsa_data")
_SOURCES = {".py", ".yaml", ".sh", ".toml"}
_DISTRIBUTIONS = ("torch", "triton", "megatron-core", "numpy", "deepspeed", "mamba-ssm", "causal-conv1d")


def node_facts(node: str, stage_folder: Path, local_folder: Path, gpus: int, seconds: float) -> dict[str, Any]:
    """Everything but clock and all-reduce. What cannot be found out is said in words: of this node under
    `own_problems`, of what all nodes share under `shared_problems`.

    Args:
        gpus: 0 asks for none.
        seconds: patience with the GPUs.
    """
    facts: dict[str, Any] = {
        "node": node,
        "hostname": socket.gethostname(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": _versions(),
        "code": code_sha256(_package_folders()),
        "run_folder_gb": _free_gb(stage_folder),
        "local_folder": str(local_folder),
        "own_problems": [],
        "shared_problems": [],
    }
    try:
        facts["local_folder_gb"] = _free_gb(local_folder)
    except OSError as error:
        facts["own_problems"].append(f"local_folder: {error}")
    try:
        facts["data"] = data_sha256(load_stage(stage_folder / "job" / "stage.yaml"))
    except (ConfigError, DataError, OSError) as error:
        facts["shared_problems"].append(f"data: {error}")
    for folder, problems in ((local_folder, "own_problems"), (stage_folder, "shared_problems")):
        if not os.access(folder, os.W_OK | os.X_OK):
            facts[problems].append(f"{folder} cannot be written to")
    if gpus:
        try:
            facts["gpus"] = _ask_for_gpus(seconds)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            facts["own_problems"].append(f"GPUs: {error}")
    return facts


def code_sha256(folders: Iterable[Path]) -> str:
    """Of the source files as they are, committed or not: a change that only one node has gives it another hash."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in _SOURCES and path.is_file():
                digest.update(f"{folder.name}/{path.relative_to(folder)} {sha256_file(path)}\n".encode())
    return digest.hexdigest()


def data_sha256(config: StageConfig) -> str:
    """Of the blends, their sets' records, which hold the checksums of all shards, the shards' sizes and the tokenizer.

    Raises:
        ConfigError: a blend cannot be read.
        DataError: a set cannot.
        OSError: a shard or the tokenizer is not there.
    """
    parts: list[Any] = [sha256_file(Path(config.data.tokenizer))]
    for key in ("train_blend", "valid_blend"):
        path = Path(getattr(config.data, key))
        for entry in read_blend(path, f"data.{key}={path}"):
            info = read_set(entry.folder)
            sizes = [output_path(entry.folder / shard.name, ".bin").stat().st_size for shard in info.shards]
            parts.append([str(entry.folder), entry.weight, sha256_file(entry.folder / "set.json"), sizes])
    return json_sha256(parts)


def _package_folders() -> list[Path]:
    specs = [find_spec(name) for name in _PACKAGES]
    return [Path(folder) for spec in specs if spec is not None for folder in spec.submodule_search_locations or []]


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _free_gb(folder: Path) -> float:
    return round(shutil.disk_usage(folder).free / 1e9, 3)


def _ask_for_gpus(seconds: float) -> Sequence[dict[str, Any]]:
    # In a process of its own: a CUDA context here would keep memory of every GPU while the ranks train.
    command = [sys.executable, "-m", "palimpsa_launch.preflight.gpus"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    if answer.returncode:
        last = answer.stderr.strip().splitlines()[-1:] or [f"exit code {answer.returncode}"]
        raise ValueError(last[0])
    return json.loads(answer.stdout)
