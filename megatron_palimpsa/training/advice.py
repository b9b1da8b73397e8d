"""What would make a stage fit into a GPU's memory, by the estimate."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from megatron_palimpsa.config import ConfigError, StageConfig, check_stage
from megatron_palimpsa.training.memory import estimate_memory

USABLE = 0.95
"""Of a GPU's memory; the CUDA context, NCCL and gaps between the allocator's blocks take the rest."""
_DEGREES = (2, 4, 8)
_SMALL_BUCKET = 50_000_000
"""Elements that ZeRO reduces at once: 200 MB in float32, a tenth of the default. One H200 was measured with it."""

Change = dict[str, object]
"""Value of each key, `section.key`."""


def gpu_memory() -> int | None:
    """Bytes of this machine's first GPU as its driver says; None without one."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    first = answer.stdout.strip().partition("\n")[0]
    return int(first) * 2**20 if answer.returncode == 0 and first.isdecimal() else None


def fits(total: int, memory: int) -> bool:
    return total <= USABLE * memory


def advise(config: StageConfig, world_size: int, memory: int) -> list[str]:
    """Settings that would make a stage fit that does not, one a line with the estimate; the cheapest first.

    Each is tried alone, for tensor and context parallelism with as many times more GPUs; where none is enough, all
    that cost no GPUs are taken together, then with tensor or context parallelism on top.
    """
    cheap = list(_cheap(config, world_size))
    alone = [*cheap, *_more_gpus(config, {})]
    found = [line for change in alone if (line := _line(config, change, world_size, memory))]
    if found:
        return found
    together: Change = {}
    for change in cheap:
        together |= change
    combined = [together, *_more_gpus(config, together)]
    return [line for change in combined if (line := _line(config, change, world_size, memory))]


def _cheap(config: StageConfig, world_size: int) -> Iterator[Change]:
    train, parallel = config.train, config.parallel
    replicas = world_size // (parallel.tp * parallel.pp)
    if parallel.engine == "deepspeed":
        if parallel.deepspeed.reduce_bucket_size > _SMALL_BUCKET:
            yield {"parallel.deepspeed.reduce_bucket_size": _SMALL_BUCKET}
        yield from _higher_stages(config, replicas)
    elif not parallel.distributed_optimizer and replicas > 1:
        yield {"parallel.distributed_optimizer": True}
    if train.micro_batch_size > 1:
        yield {"train.micro_batch_size": 1}
    if train.recompute == "none":
        yield {"train.recompute": "selective"}
    if train.recompute != "full":
        yield {"train.recompute": "full"}
    if parallel.engine == "deepspeed":
        yield from _offload(config)


def _higher_stages(config: StageConfig, replicas: int) -> Iterator[Change]:
    if replicas > 1:
        for stage in range(config.parallel.deepspeed.zero_stage + 1, 4):
            yield {"parallel.deepspeed.zero_stage": stage}


def _offload(config: StageConfig) -> Iterator[Change]:
    zero = config.parallel.deepspeed
    stage = "parallel.deepspeed.zero_stage"
    optimizer: Change = {"parallel.deepspeed.offload_optimizer": True}
    if not zero.offload_optimizer:
        yield optimizer if zero.zero_stage > 0 else {stage: 1, **optimizer}
    if config.parallel.pp == 1 and not (zero.offload_optimizer and zero.zero_stage == 3):
        yield {stage: 3, **optimizer}
    if config.parallel.pp == 1 and not zero.offload_parameters:
        yield {stage: 3, **optimizer, "parallel.deepspeed.offload_parameters": True}


def _more_gpus(config: StageConfig, base: Change) -> Iterator[Change]:
    parallel = config.parallel
    for degree in _DEGREES:
        yield {**base, "parallel.tp": degree * parallel.tp, "parallel.sequence_parallel": True}
        yield {**base, "parallel.cp": degree * parallel.cp}


def _value(settings: Any, path: list[str]) -> object:
    for name in path:
        settings = getattr(settings, name)
    return settings


def _replaced(settings: Any, path: list[str], value: object) -> Any:
    name, *rest = path
    return dataclasses.replace(settings, **{name: _replaced(getattr(settings, name), rest, value) if rest else value})


def _line(config: StageConfig, change: Change, world_size: int, memory: int) -> str | None:
    """The change and its estimate; None where it cannot run or does not fit."""
    changed = config
    for key, value in change.items():
        changed = _replaced(changed, key.split("."), value)
    ranks = world_size * changed.parallel.replica_size // config.parallel.replica_size
    try:
        check_stage(changed, ranks)
    except ConfigError:
        return None
    estimate = estimate_memory(changed, ranks // changed.parallel.replica_size)
    if not fits(estimate.total, memory):
        return None
    keys = " ".join(
        f"{key}={str(value).lower()}" for key, value in change.items() if _value(config, key.split(".")) != value
    )
    host = f" and {estimate.host / 1e9:.1f} GB of host memory" if estimate.host else ""
    return f"{keys}: {estimate.total / 1e9:.1f} GB{host}" + (f" on {ranks} GPUs" if ranks > 1 else "")
