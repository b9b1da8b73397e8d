"""What a layout computes: losses, gradient norms, gradients and weights of a few steps, run on every rank."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from torch import Tensor

from helpers.engine_state import state_of
from helpers.stages import random_batch
from megatron_palimpsa import parallel
from megatron_palimpsa.config import ConfigError, ParallelConfig, StageConfig
from megatron_palimpsa.engine import select
from megatron_palimpsa.engine.base import Engine, StepResult
from megatron_palimpsa.engine.deepspeed import DeepSpeedEngine
from megatron_palimpsa.engine.megatron import MegatronEngine
from megatron_palimpsa.engine.optimizer_state import Piece
from megatron_palimpsa.model.naming import global_parameters
from megatron_palimpsa.training import checkpoint, checkpoint_files, checkpoint_saver
from megatron_palimpsa.training.batch import Batch


@dataclass(frozen=True)
class Share:
    """A rank's part of a parameter and how it was split."""

    value: Tensor
    split_dim: int | None
    stride: int


@dataclass(frozen=True)
class Run:
    """What one rank saw."""

    steps: list[StepResult]
    gradients: dict[str, Share]
    """Of the first batch, before clipping, by global parameter name."""
    weights: dict[str, Share]
    """After the steps."""
    learning_rates: list[float]
    evaluation: Tensor
    evaluation_loss: float
    parameters: int
    """Of the whole model."""
    flops_per_token: float


_engines: list[Engine] = []


def build_engine(config: StageConfig) -> Engine:
    """One that `layout` closes: DeepSpeed's hold their groups, and tens of threads of gloo's, for good."""
    _engines.append(select.build_engine(config))
    return _engines[-1]


@contextmanager
def layout(config: StageConfig) -> Iterator[None]:
    """Megatron's parallel state for the configuration, in a process group that may be there already."""
    parallel.initialize(config.parallel, config.seed)
    try:
        yield
    finally:
        while _engines:
            _engines.pop().close()
        parallel_state.destroy_model_parallel()


def share_of_batches(config: StageConfig, first_step: int) -> Iterator[Batch]:
    """This data-parallel rank's microbatches from a step on, the same global batches under every layout."""
    ranks = parallel_state.get_data_parallel_world_size()
    microbatches = config.global_batch_size // config.train.micro_batch_size
    index = first_step * microbatches + parallel_state.get_data_parallel_rank()
    while True:
        yield random_batch(config, seed=index, padding=index % 3)
        index += ranks


def train_refusing(config: StageConfig, refused: tuple[int, ...] | None, steps: int = 4) -> Run:
    """Steps of which those numbered are refused, or, with None, those whose gradients are not finite.

    Each is followed by an evaluation.
    """
    with layout(config):
        engine = build_engine(config)
        batches = share_of_batches(config, 0)
        results, rates = [], []
        for step in range(steps):

            def accept(loss: float, grad_norm: float, step: int = step) -> bool:
                return math.isfinite(grad_norm) if refused is None else step not in refused

            results.append(engine.train_step(batches, accept))
            rates.append(engine.learning_rate)
            evaluation, loss = engine.evaluate([random_batch(config, seed=900 + index) for index in range(3)])
        weights = shares(engine, gradients=False)
        return Run(results, {}, weights, rates, evaluation, loss, engine.num_parameters, engine.model_flops_per_token)


def always(loss: float, grad_norm: float) -> bool:
    return True


def shares(engine: Engine, gradients: bool) -> dict[str, Share]:
    result = {}
    spread = zero_values(engine, gradients) if isinstance(engine, DeepSpeedEngine) else {}
    for name, parameter in (named for chunk in engine.chunks for named in global_parameters(chunk)):
        if gradients and not parameter.requires_grad:
            continue
        value = spread.get(id(parameter), parameter.detach())
        if gradients and not spread:
            value = parameter.main_grad
        split = getattr(parameter, "tensor_model_parallel", False)
        result[name] = Share(
            value.to("cpu", torch.float32, copy=True),
            parameter.partition_dim if split else None,
            getattr(parameter, "partition_stride", 1),
        )
    return result


def zero_values(engine: DeepSpeedEngine, gradients: bool) -> dict[int, Tensor]:
    """Whole weights or reduced gradients from the pieces of all data-parallel ranks, by the parameter's id."""
    values = {}
    parts = {id(piece.parameter): (piece, gradient) for piece, gradient in pieces_with(engine, gradients)}
    for parameter in engine.chunks[0].parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if not parameter.requires_grad:
            values[id(parameter)] = engine._frozen[id(parameter)]
            continue
        whole = torch.zeros(shape, device=parameter.device).view(-1)
        if id(parameter) in parts:
            piece, value = parts[id(parameter)]
            whole[piece.start : piece.end] = value
        if engine.config.parallel.deepspeed.zero_stage:
            dist.all_reduce(whole, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        values[id(parameter)] = whole.view(shape)
    return values


def pieces_with(engine: DeepSpeedEngine, gradients: bool) -> Iterator[tuple[Piece, Tensor]]:
    if gradients:
        for piece, flat in engine._pieces_and_gradients():
            yield piece, flat[piece.place]
    else:
        for piece in engine._pieces():
            yield piece, piece.values("weight")


def gather_gradients(engine: MegatronEngine) -> None:
    """Fill in the parts of the reduced gradients that the distributed optimizer leaves on other ranks."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    buffers = [buffer for chunk in engine._wrapped for buffer in chunk.buffers]
    for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
        own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
        dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def train(config: StageConfig, steps: int) -> Run:
    """`steps` steps from the start, the gradients of the first being looked at, then evaluation."""
    with layout(config):
        engine = build_engine(config)
        gradients: dict[str, Share] = {}

        def look(loss: float, grad_norm: float) -> bool:
            if isinstance(engine, MegatronEngine) and config.parallel.distributed_optimizer:
                gather_gradients(engine)
            gradients.update(shares(engine, gradients=True))
            return True

        batches = share_of_batches(config, 0)
        results, rates = [], []
        for step in range(steps):
            results.append(engine.train_step(batches, always if step else look))
            rates.append(engine.learning_rate)
        evaluation, loss = engine.evaluate([random_batch(config, seed=900 + index) for index in range(3)])
        return Run(
            results,
            gradients,
            shares(engine, gradients=False),
            rates,
            evaluation,
            loss,
            engine.num_parameters,
            engine.model_flops_per_token,
        )


@dataclass(frozen=True)
class Resumed:
    """Steps that followed a checkpoint on one rank, and the weights and moments after them."""

    steps: list[StepResult]
    learning_rates: list[float]
    state: dict[str, Tensor]
    schedule: dict[str, Any]


def _go_on(engine: Engine, batches: Iterator[Batch], steps: int) -> Resumed:
    results, rates = [], []
    for _ in range(steps):
        results.append(engine.train_step(batches, always))
        rates.append(engine.learning_rate)
    return Resumed(results, rates, state_of(engine), engine.scheduler_state())


def train_and_save(config: StageConfig, steps: int, more: int, folder: Path) -> Resumed:
    """`steps` steps, a checkpoint, `more` steps."""
    with layout(config):
        engine = build_engine(config)
        batches = share_of_batches(config, 0)
        for _ in range(steps):
            engine.train_step(batches, always)
        checkpoint.save(folder, steps, engine, {"step": steps}, keep=2)
        return _go_on(engine, batches, more)


def load_and_train(config: StageConfig, steps: int, more: int, folder: Path, save_again: bool) -> Resumed:
    """What `train_and_save` went on to compute, from its checkpoint.

    With `save_again` the state as loaded is saved to `loaded-<steps>`, and the state afterwards as the next step.
    """
    with layout(config):
        engine = build_engine(config)
        path = checkpoint.latest(folder)
        assert path is not None
        assert checkpoint.load(path, engine) == {"step": steps}
        if save_again:
            again = checkpoint.save(folder / "again", steps, engine, {"step": steps}, keep=2)
            if dist.get_rank() == 0:
                again.rename(folder / f"loaded-{steps}")
        resumed = _go_on(engine, share_of_batches(config, steps), more)
        if save_again:
            checkpoint.save(folder, steps + more, engine, {"step": steps + more}, keep=2)
        return resumed


def whole_tensors(path: Path) -> dict[str, Tensor]:
    """Weights and moments of a checkpoint as one process reads them, unsplit."""
    parallel.initialize(ParallelConfig(), seed=0)
    try:
        tensors = dist_checkpointing.load_plain_tensors(str(path))
    finally:
        parallel.destroy()
    return {name: value for name, value in tensors.items() if not name.startswith("rng.")}


def save_with_a_full_disk_on_one_rank(config: StageConfig, folder: Path, background: bool) -> str:
    """The message that this rank gets; the second of two ranks cannot write."""
    with layout(config):
        engine = build_engine(config)
        checkpoint.save(folder, 1, engine, {}, keep=2)

        def no_space(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        working = os.fsync
        if dist.get_rank() == 1:
            os.fsync = no_space
        try:
            saver = checkpoint.Checkpointer(folder, engine, 2, background)
            saver.save(2, {})
            engine.train_step(share_of_batches(config, 0), always)
            saver.finish()
        except checkpoint.CheckpointError as error:
            return str(error)
        finally:
            os.fsync = working
    return "saved"


def save_while_one_rank_is_slow(config: StageConfig, folder: Path) -> list[int | None]:
    """What is saved at each of five step boundaries after a save, where rank 1 has not written before the third."""
    with layout(config):
        engine = build_engine(config)
        written = threading.Event()
        write = checkpoint_saver.write_rank_file

        def held(*arguments: Any) -> Any:
            assert written.wait(60)
            return write(*arguments)

        checkpoint_saver.write_rank_file = held
        try:
            saver = checkpoint.Checkpointer(folder, engine, keep=2, background=True)
            saver.save(1, {})
            saved = []
            for boundary in range(5):
                if boundary == 2 or dist.get_rank() != 1:
                    written.set()
                if boundary == 3:
                    saver.finish()
                engine.train_step(share_of_batches(config, boundary), always)
                saver.poll()
                saved.append(saver.saved_step if boundary != 2 else None)
            return saved
        finally:
            checkpoint_saver.write_rank_file = write


def elements_of_share(config: StageConfig) -> int:
    """How many numbers of weights and moments this rank writes."""
    with layout(config):
        engine = build_engine(config)
        return sum(box.numel for box, _ in engine.state_share())


def verify(folder: Path) -> tuple[str | None, list[str]]:
    """The newest intact checkpoint's name, and which files this rank has read for it."""
    read: list[str] = []
    checksum = checkpoint_files._sha256

    def noted(path: Path) -> str:
        read.append(f"{path.parent.name}/{path.name}")
        return checksum(path)

    checkpoint_files._sha256 = noted
    try:
        found = checkpoint.latest(folder)
    finally:
        checkpoint_files._sha256 = checksum
    return (None if found is None else found.name), [name for name in read if "manifest" not in name]


def require_own_folder(folder: Path) -> str:
    """What a rank is told whose folder is not that of the others."""
    checkpoint._VISIBLE_WITHIN = 0.0
    try:
        checkpoint.require_shared(folder)
        checkpoint.require_shared(folder / str(dist.get_rank()))
    except ConfigError as error:
        return str(error)
    return "shared"


def unsplit(runs: list[dict[str, Share]], tp: int) -> dict[str, Tensor]:
    """Whole parameters from all ranks' shares (tensor-parallel ranks vary fastest).

    Raises:
        AssertionError: copies of a parameter or of a share differ in a bit.
    """
    whole: dict[str, Tensor] = {}
    for first in range(0, len(runs), tp):
        for name, share in runs[first].items():
            parts = [runs[first + rank][name].value for rank in range(tp)]
            if share.split_dim is None:
                assert all(torch.equal(part, parts[0]) for part in parts), f"copies of {name} differ over TP"
                value = parts[0]
            else:
                # Each rank holds `stride` pieces, which interleave over ranks in the whole.
                pieces = [part.chunk(share.stride, share.split_dim) for part in parts]
                ordered = [pieces[rank][index] for index in range(share.stride) for rank in range(tp)]
                value = torch.cat(ordered, share.split_dim)
            if name in whole:
                assert torch.equal(whole[name], value), f"copies of {name} differ over DP or pipeline stages"
            whole[name] = value
    return whole
