"""What one process computes of a row, and what each rank does with its part of it under context parallelism."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_model import HybridModel

from helpers.layouts import summed_gradient
from helpers.models import randomise
from helpers.stages import tiny_stage
from megatron_palimpsa import parallel
from megatron_palimpsa.config import ParallelConfig, StageConfig
from megatron_palimpsa.model import build_model, forward_loss, memory_statistics
from megatron_palimpsa.model.naming import global_parameters
from megatron_palimpsa.model.tensor_parallel import local_share
from megatron_palimpsa.model.weights import load_full_weights
from megatron_palimpsa.training.batch import Batch

TOKENS = 32
ROWS: dict[str, list[int]] = {
    "documents cross the borders": [0, 5, 11, 21, 29],
    "documents end on the borders": [0, 8, 16, 24, 32],
    "documents begin on and next to the borders": [0, 7, 8, 9, 15, 16, 23, 25, 32],
    "one document": [0, TOKENS],
    "one document, then padding": [0, 10],
    "a document over three parts of four": [0, 3, 27, 30],
    "empty documents": [0, 0, 7, 16, 16, 20, 20, 32, 32],
}
"""Document offsets of rows of TOKENS tokens; borders lie at 8, 16 and 24 (cp 4) or at 16 (cp 2)."""

GEOMETRIES: dict[str, dict[str, Any]] = {
    "one group": {"pattern": "PM*-MP"},
    # Convolutions that look back over most of a part.
    "two groups, wide convolutions": {
        "pattern": "P*M",
        "ngroups": 2,
        "d_conv": 8,
        "tie_embeddings": False,
        "rope_theta": 100.0,
    },
    "a head's own keys": {"pattern": "Q-LQ"},
}
FLOOR = 1e-7


def stage(geometry: str, world_size: int = 1, **parallel_settings: Any) -> StageConfig:
    return tiny_stage(
        world_size,
        model=GEOMETRIES[geometry],
        parallel=parallel_settings,
        train={"global_batch_tokens": 64 * world_size, "tokens": 64 * world_size * 100},
    )


def row(offsets: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(61, (1, TOKENS), generator=generator)
    mask = torch.rand(1, TOKENS, generator=generator)
    mask[0, offsets[-1] :] = 0
    return Batch(tokens, tokens.roll(-1, dims=1), mask, torch.tensor(offsets, dtype=torch.int32))


@torch.no_grad()
def set_decays(model: HybridModel) -> None:
    """Heads that forget slowly, fast, and at once (log_alpha at its lowest)."""
    dt_bias, a_log = torch.tensor([[-1.0, -2.0, 25.0, -3.0], [-3.0, 1.5, 2.0, -1.0]])
    for layer in model.decoder.layers:
        if hasattr(layer, "mixer"):
            layer.mixer.dt_bias += dt_bias.repeat(2)
            layer.mixer.A_log.copy_(layer.mixer.A_log * 0.1 + a_log.repeat(2))


def single_process_results(folder: Path, geometry: str) -> None:
    model = build_model(stage(geometry))
    randomise(model)
    set_decays(model)
    results: dict[str, Any] = {"weights": {key: p.detach() for key, p in global_parameters(model)}}
    for name, offsets in ROWS.items():
        model.zero_grad()
        batch = row(offsets)
        losses = forward_loss(model, batch)
        (losses * batch.loss_mask).sum().backward()
        results[name] = {
            "losses": losses.detach(),
            "gradients": {key: p.grad.clone() for key, p in global_parameters(model) if p.requires_grad},
            "memory": {str(layer): values for layer, values in memory_statistics(model, batch).items()},
        }
    torch.save(results, folder / f"{geometry}.pt")


def compare_rows(folder: Path, geometry: str, layout: dict[str, Any]) -> None:
    """On each rank: losses, gradients and statistics of every row are those of one process.

    Raises:
        AssertionError: names the row and the parameter.
    """
    config = stage(geometry, dist.get_world_size(), **layout)
    parallel.initialize(config.parallel, seed=1)
    try:
        expected = torch.load(folder / f"{geometry}.pt", weights_only=True)
        model = build_model(config)
        load_full_weights(model, expected["weights"])
        for name, offsets in ROWS.items():
            _compare_row(model, name, row(offsets), expected[name])
    finally:
        parallel_state.destroy_model_parallel()


def _compare_row(model: HybridModel, name: str, whole: Batch, expected: dict[str, Any]) -> None:
    cp, tp = parallel_state.get_context_parallel_group(), parallel_state.get_tensor_model_parallel_group()
    model.zero_grad()
    batch = whole.of_rank(cp.rank(), cp.size())
    losses = forward_loss(model, batch)
    torch.testing.assert_close(
        losses, expected["losses"].chunk(cp.size(), 1)[cp.rank()], atol=1e-5, rtol=1e-5, msg=lambda text: name + text
    )
    (losses * batch.loss_mask).sum().backward()
    for key, parameter in global_parameters(model):
        if not parameter.requires_grad:
            continue
        gradient = summed_gradient(parameter, tp)
        dist.all_reduce(gradient, group=cp)
        reference = expected["gradients"][key]
        share = local_share(reference, parameter, tp.rank(), tp.size())
        error = (gradient - share).abs().max() / (reference.abs().max() + FLOOR)
        # Without context parallelism TP differs from one process by as much.
        assert error < (1e-5 if tp.size() == 1 else 5e-5), f"{name}: {key}: {error}"
    for layer, values in memory_statistics(model, batch).items():
        assert values == pytest.approx(expected["memory"][str(layer)], rel=1e-4), name


def middle_records() -> list[dict[str, Any]]:
    """What the benchmark's single device times, of a tiny shape on the CPU, in one process."""
    context_parallel, shapes = _benchmark()
    parallel.initialize(ParallelConfig(), seed=1)
    try:
        shape = shapes.Shape(batch=1, heads=8, groups=1, key_dim=8, value_dim=4)
        records = []
        for importance in (True, False):
            records += context_parallel.time_middle(shape, 96, importance, rounds=1, device=torch.device("cpu"))
        return records
    finally:
        parallel.destroy()


def _benchmark() -> tuple[Any, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"))
    import context_parallel
    import shapes

    return context_parallel, shapes


def benchmark_records(groups: int) -> list[dict[str, Any]]:
    """What kernels/benchmarks/context_parallel.py finds of a tiny shape on the CPU, one round each."""
    context_parallel, shapes = _benchmark()

    parallel.initialize(ParallelConfig(cp=dist.get_world_size()), seed=1)
    try:
        shape = shapes.Shape(batch=1, heads=8, groups=groups, key_dim=8, value_dim=4)
        device = torch.device("cpu")
        return [
            *context_parallel.compare(shape, 96, documents=1, importance=True, rounds=1, device=device),
            *context_parallel.compare(shape, 96, documents=5, importance=False, rounds=1, device=device),
        ]
    finally:
        parallel_state.destroy_model_parallel()
