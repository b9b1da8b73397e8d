"""Weights between this package's stages and Megatron-LM's `torch_dist` checkpoints.

    python -m megatron_palimpsa.megatron_lm.convert to-megatron runs/x/stage OUTPUT
    python -m megatron_palimpsa.megatron_lm.convert from-megatron OUTPUT/iter_0001000 STAGE.yaml [key=value ...]

Both keep tensors under the same names and in the shapes of the unsplit model. The first writes a `release` checkpoint
for --load, the second a complete stage (its folder is `output_dir/name` of STAGE.yaml) whose weights another stage
takes by `init_from`. Optimizer, schedule and position stay behind. One process, with the whole model in fp32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_palimpsa import parallel
from megatron_palimpsa.config import ConfigError, ParallelConfig, StageConfig, check_stage, load_stage
from megatron_palimpsa.engine.megatron import MegatronEngine
from megatron_palimpsa.model.naming import global_parameters
from megatron_palimpsa.model.weights import load_full_weights
from megatron_palimpsa.training import checkpoint
from megatron_palimpsa.training.checkpoint_format import PLAIN, read_metadata
from megatron_palimpsa.training.run_folder import RunFolder

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
_FP32_COPIES = ("optimizer.state.fp32_param.", "optimizer.state.param.")
"""Where Megatron's bf16 optimizer and its distributed one (`fully_reshardable`) keep the weights in fp32."""
_MEGATRONS_OWN = (
    r"torch\.distributed\.checkpoint\.planner\.(SavePlan|TensorWriteData|WriteItem|WriteItemType)"
    r"|torch\.(bfloat16|int64)"
)
"""Its save plans, which it keeps in the metadata, and dtypes that ours have not."""


def to_megatron(stage: Path, output: Path) -> Path:
    """Write the fp32 weights of a stage's last intact checkpoint as Megatron's; its folder is returned.

    Raises:
        ConfigError: there is no such checkpoint, or `output` holds one already.
    """
    run, folder = RunFolder(stage), output / RELEASE
    if not run.config.is_file():
        raise ConfigError(f"{stage}: not a stage's folder ({run.config.name} is missing)")
    source = checkpoint.latest(run.checkpoints)
    if source is None:
        raise ConfigError(f"{stage}: no intact checkpoint")
    if (output / TRACKER).exists() or folder.exists():
        raise ConfigError(f"{output} holds a Megatron checkpoint already")
    with _whole_model(load_stage(run.config)) as engine:
        checkpoint.load(source, engine, what="weights")
        # Without a pattern Megatron takes the checkpoint for a GPT's.
        settings = argparse.Namespace(hybrid_layer_pattern=engine.config.model.pattern)
        common = {"args": settings, "checkpoint_version": 3.0, "iteration": 0}
        folder.mkdir(parents=True)
        dist_checkpointing.save({"model": engine.chunks[0].sharded_state_dict(), **common}, str(folder))
    (output / TRACKER).write_text(RELEASE)
    return folder


def from_megatron(source: Path, config: StageConfig) -> Path:
    """Write the weights of Megatron's checkpoint `source` as a complete stage of `config`; its folder is returned.

    They are taken from the optimizer's fp32 copies where the checkpoint has those by parameter.

    Raises:
        ConfigError: the weights are not those of the stage's model, or the stage's folder has checkpoints.
    """
    run = RunFolder(config.folder)
    if run.has_checkpoints or run.marker.exists():
        raise ConfigError(f"{run.path} holds checkpoints already")
    shapes = tensor_shapes(source)
    with _whole_model(config) as engine:
        wanted = {name: list(parameter.shape) for name, parameter in global_parameters(engine.chunks[0])}
        differing = [
            f"{name} is {list(shapes[name]) if name in shapes else 'missing'}, the model has {shape}"
            for name, shape in wanted.items()
            if name not in shapes or list(shapes[name]) != shape
        ]
        if differing:
            raise ConfigError(f"{source}: not the weights of model in {config.name}: {'; '.join(differing)}")
        keys = {name: next((c + name for c in _FP32_COPIES if c + name in shapes), name) for name in wanted}
        tensors = {key: torch.empty(shapes[key], dtype=torch.float32) for key in keys.values()}
        load(tensors, storage_reader=FileSystemReader(source), no_dist=True)
        load_full_weights(engine.chunks[0], {name: tensors[key] for name, key in keys.items()})
        path = checkpoint.save(run.checkpoints, 0, engine, {}, keep=2)
    run.write_config(config)
    run.write_marker({"steps": 0, "tokens": 0, "seconds": 0.0, "checkpoint": str(path.relative_to(run.path))})
    return run.path


@contextmanager
def _whole_model(config: StageConfig) -> Iterator[MegatronEngine]:
    """The stage's model in fp32 in this process alone."""
    alone = replace(
        config, parallel=ParallelConfig(distributed_optimizer=False), train=replace(config.train, precision="fp32")
    )
    parallel.initialize(alone.parallel, seed=0)
    try:
        yield MegatronEngine(alone)
    finally:
        parallel.destroy()


def tensor_shapes(path: Path) -> dict[str, torch.Size]:
    """Shapes of a checkpoint's tensors by name. What could run code is refused before torch reads the metadata.

    Raises:
        ConfigError: no `torch_dist` checkpoint, or one with more than metadata in its metadata.
    """
    try:
        entries = read_metadata(path, f"{PLAIN}|{_MEGATRONS_OWN}").state_dict_metadata.items()
    except checkpoint.CheckpointError as error:
        raise ConfigError(str(error)) from None
    return {name: entry.size for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 and one message for wrong input."""
    parser = argparse.ArgumentParser(prog="python -m megatron_palimpsa.megatron_lm.convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    to = commands.add_parser("to-megatron", help="from a stage of ours")
    to.add_argument("source", type=Path, help="the stage's folder")
    to.add_argument("output", type=Path, help="what --load names")
    back = commands.add_parser("from-megatron", help="to a complete stage of ours")
    back.add_argument("source", type=Path, help="a folder iter_N")
    back.add_argument("stage", type=Path, help="YAML of a stage with the same model")
    back.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    try:
        if options.command == "to-megatron":
            print(to_megatron(options.source, options.output))
        else:
            config = load_stage(options.stage, options.overrides)
            check_stage(config)
            print(from_megatron(options.source, config))
    except ConfigError as error:
        print(f"megatron_palimpsa: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
