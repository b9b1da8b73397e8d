"""How long `convert mamba2` takes at the size of mamba2-2.7b, in how much memory, and whether what it writes loads.

    python tests/benchmarks/convert_mamba2.py FOLDER [--format safetensors] [--layers 64]

FOLDER/source gets random bf16 weights of that geometry (5.4 GB; kept between calls), FOLDER/base what `convert` makes
of them (10.8 GB). The conversion is a process of its own, whose peak memory counts the mapped parts of its input too.
Then two processes at once load the model in bf16 as the ranks of tp 2 and of pp 2, and compare each parameter with its
rows in the source. Exit code 1 where a target is missed or a weight differs; other work on the machine disturbs the
time, so the CPU time is shown beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_palimpsa import parallel
from megatron_palimpsa.config import ModelConfig, ParallelConfig, StageConfig, check_stage, load_stage
from megatron_palimpsa.convert.mamba2_config import read_geometry
from megatron_palimpsa.convert.sources import open_tensors, read_json
from megatron_palimpsa.model.mamba2_names import lines, sizes

SECONDS, GIGABYTES = 300, 12
CONFIG = json.loads((Path(__file__).parents[1] / "helpers" / "mamba2-2.7b.json").read_text())
"""The published config.json."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=("bin", "safetensors"), default="bin")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--load", choices=("tp", "pp"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        return _load(options.folder, options.load)
    _write_source(options.folder / "source", options.format, options.layers)
    good = _convert(options.folder)
    for layout in ("tp", "pp"):
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*ranks, __file__, str(options.folder), "--load", layout]
        good &= subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode == 0
    return 0 if good else 1


def _write_source(folder: Path, form: str, layers: int) -> None:
    """As state-spaces publish it: bf16, the tied output layer under its own name too in the pickled file."""
    config = CONFIG | {"n_layer": layers}
    name = "pytorch_model.bin" if form == "bin" else "model.safetensors"
    if (folder / name).is_file() and json.loads((folder / "config.json").read_text()) == config:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelConfig(**read_geometry(config, "config.json").section, seq_length=4096)
    size = sizes(model)
    shapes = {line.theirs.replace("embeddings.", "embedding."): line.their_shape(size) for line in lines(model)}
    if form == "safetensors":
        _write_safetensors(folder / name, shapes)
        return
    tensors = {key: _random(shape) for key, shape in shapes.items()}
    torch.save({**tensors, "lm_head.weight": tensors["backbone.embedding.weight"]}, folder / name)


def _write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """One tensor in memory at a time: the header's length and the header, then the tensors end to end."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            file.write(_random(shape).view(torch.uint8).numpy())


def _random(shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02)


def _convert(folder: Path) -> bool:
    shutil.rmtree(folder / "base", ignore_errors=True)
    command = [sys.executable, "-m", "megatron_palimpsa", "convert", "mamba2", folder / "source", folder / "base"]
    start = time.perf_counter()
    subprocess.run(list(map(str, command)), check=True)
    seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = used.ru_maxrss * 1024 / 1e9
    cpu = used.ru_utime + used.ru_stime
    print(f"converted in {seconds:.0f} s ({SECONDS} allowed), {cpu:.0f} s of CPU time, load {os.getloadavg()[0]:.1f}")
    print(f"peak memory {peak:.1f} GB ({GIGABYTES} allowed)", flush=True)
    return seconds < SECONDS and peak < GIGABYTES


def _load(folder: Path, layout: str) -> int:
    # After the conversion, and not in its process: Megatron is not imported there.
    from megatron_palimpsa.engine.assembly import build_chunks
    from megatron_palimpsa.engine.optimizer_state import load_weights, locals_of
    from megatron_palimpsa.training.checkpoint_format import Reader

    config = load_stage(folder / "base" / "config.yaml")
    config = dataclasses.replace(config, parallel=ParallelConfig(**{layout: 2}))
    check_stage(config, world_size=2)
    parallel.initialize(config.parallel, config.seed)
    start = time.perf_counter()
    chunks = build_chunks(config)
    built = time.perf_counter()
    load_weights([], locals_of(chunks), Reader(folder / "base" / "checkpoints" / "step-0").read)
    loaded = time.perf_counter()
    wrong = [name for name, same in _compared(config, folder / "source", chunks[0]) if not same]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(
        f"{layout} 2, rank {torch.distributed.get_rank()}: built in {built - start:.0f} s, loaded in "
        f"{loaded - built:.0f} s, peak memory {peak:.1f} GB, {len(wrong)} parameters differ {wrong[:3]}"
    )
    parallel.destroy()
    return 1 if wrong else 0


def _compared(config: StageConfig, source: Path, chunk: torch.nn.Module) -> Iterator[tuple[str, bool]]:
    """Each of this rank's parameters and whether it is its share of the source's rows, bit by bit."""
    from megatron_palimpsa.model.naming import global_parameters
    from megatron_palimpsa.model.tensor_parallel import local_share

    rows = read_geometry(read_json(source / "config.json"), "config.json").vocabulary_rows
    theirs = sizes(config.model) | {"vocabulary": rows}
    line_of = {line.ours: line for line in lines(config.model)}
    tensors = {key.replace("embedding.", "embeddings."): value for key, value in open_tensors(source).items()}
    group = chunk.tp_group
    for name, parameter in global_parameters(chunk):
        line = line_of[name]
        full = tensors[line.theirs].rows(line.rows(theirs))
        full = full.squeeze(1) if line.is_filter else full
        if name.endswith("embeddings.weight"):
            full = F.pad(full, (0, 0, 0, config.model.padded_vocab_size - rows))
        yield name, torch.equal(local_share(full, parameter, group.rank(), group.size()).to(parameter.dtype), parameter)


if __name__ == "__main__":
    sys.exit(main())
