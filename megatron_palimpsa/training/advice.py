"""What would make a stage fit into a GPU's memory, by the estimate."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Iterator

from megatron_palimpsa.config import ConfigError, StageConfig, check_stage
from megatron_palimpsa.training.memory import estimate_memory

USABLE = 0.95
"""Of a GPU's memory; the CUDA context, NCCL and gaps between the allocator's blocks take the rest."""
_DEGREES = (2, 4, 8)

Change = dict[str, dict[str, object]]


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
        together = _merge(together, change)
    combined = [together, *_more_gpus(config, together)]
    return [line for change in combined if (line := _line(config, change, world_size, memory))]


def _cheap(config: StageConfig, world_size: int) -> Iterator[Change]:
    train, parallel = config.train, config.parallel
    if not parallel.distributed_optimizer and world_size > parallel.tp * parallel.pp:
        yield {"parallel": {"distributed_optimizer": True}}
    if train.micro_batch_size > 1:
        yield {"train": {"micro_batch_size": 1}}
    if train.recompute == "none":
        yield {"train": {"recompute": "selective"}}
    if train.recompute != "full":
        yield {"train": {"recompute": "full"}}


def _more_gpus(config: StageConfig, base: Change) -> Iterator[Change]:
    parallel = config.parallel
    for degree in _DEGREES:
        yield _merge(base, {"parallel": {"tp": degree * parallel.tp, "sequence_parallel": True}})
        yield _merge(base, {"parallel": {"cp": degree * parallel.cp}})


def _merge(one: Change, other: Change) -> Change:
    return {section: one.get(section, {}) | other.get(section, {}) for section in one | other}


def _line(config: StageConfig, change: Change, world_size: int, memory: int) -> str | None:
    """The change and its estimate; None where it cannot run or does not fit."""
    sections = {name: dataclasses.replace(getattr(config, name), **keys) for name, keys in change.items()}
    changed = dataclasses.replace(config, **sections)
    ranks = world_size * changed.parallel.replica_size // config.parallel.replica_size
    try:
        check_stage(changed, ranks)
    except ConfigError:
        return None
    total = estimate_memory(changed, ranks // changed.parallel.replica_size).total
    if not fits(total, memory):
        return None
    keys = " ".join(
        f"{section}.{key}={str(value).lower()}"
        for section, values in change.items()
        for key, value in values.items()
        if getattr(getattr(config, section), key) != value
    )
    return f"{keys}: {total / 1e9:.1f} GB" + (f" on {ranks} GPUs" if ranks > 1 else "")
