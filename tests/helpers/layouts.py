"""What one rank of a layout does in tests/model/test_layouts.py; importable, so that new processes find it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch.distributed import checkpoint as torch_checkpoint

from helpers.models import randomise
from helpers.reference_model import relative_error
from helpers.stages import random_batch, tiny_stage
from megatron_palimpsa import parallel
from megatron_palimpsa.config import StageConfig
from megatron_palimpsa.model import build_model, forward_loss, memory_statistics
from megatron_palimpsa.model.generation import generate
from megatron_palimpsa.model.naming import global_parameters
from megatron_palimpsa.model.sampling import Sampling
from megatron_palimpsa.model.tensor_parallel import local_share
from megatron_palimpsa.model.weights import load_full_weights

ATTENTION_AND_MLP = {"pattern": "PM*-MP"}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "one group": {**ATTENTION_AND_MLP, "ngroups": 1},
    "a group a rank": {**ATTENTION_AND_MLP, "ngroups": 2, "tie_embeddings": False},
    "a norm over both ranks": {**ATTENTION_AND_MLP, "ngroups": 2, "norm_groups": 1},
    "a head's own keys": {"pattern": "QL-Q", "headdim": 16, "train_prior": True},
    # 6 heads in 3 groups: the border between the ranks cuts the second group, of heads and of the norm.
    "a group cut by the ranks' border": {"pattern": "PM", "hidden_size": 24, "ngroups": 3, "train_prior": True},
}
GENERATION: dict[str, Any] = {
    "prompt_ids": [1, 2, 3],
    "max_new_tokens": 8,
    "sampling": Sampling(temperature=1.0, seed=3),
}


def stage(geometry: str, **parallel_settings: Any) -> StageConfig:
    world_size = parallel_settings.get("tp", 1) * parallel_settings.get("pp", 1)
    return tiny_stage(world_size, model=GEOMETRIES[geometry], parallel=parallel_settings)


def single_process_results(folder: Path, geometry: str) -> None:
    """Save a checkpoint and, for the ranks to compare with, weights, losses, gradients, statistics, generated ids."""
    config = stage(geometry)
    model = build_model(config)
    initial = {key: p.detach().clone() for key, p in global_parameters(model)}
    randomise(model)
    batch = random_batch(config, seed=0, padding=3)
    losses = forward_loss(model, batch)
    losses.sum().backward()
    results = {
        "initial": initial,
        "weights": {key: p.detach() for key, p in global_parameters(model)},
        "losses": losses.detach(),
        "gradients": {key: p.grad for key, p in global_parameters(model) if p.requires_grad},
        "memory": {str(layer): values for layer, values in memory_statistics(model, batch).items()},
        "generated": generate(model, **GENERATION),
    }
    torch.save(results, folder / f"{geometry}.pt")
    save_checkpoint(model, folder / "single" / geometry)


class _SaveInProcess(TorchDistSaveShardedStrategy):
    """Megatron's own starts another process even for a synchronous save."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path | str) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        writer = torch_checkpoint.FileSystemWriter(checkpoint_dir)
        torch_checkpoint.save(mcore_to_pyt_state_dict(by_key, False), storage_writer=writer, planner=planner)


def save_checkpoint(model: HybridModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if dist.get_world_size() > 1:
        dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), str(folder), sharded_strategy=_SaveInProcess())


def load_checkpoint(model: HybridModel, folder: Path) -> None:
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(folder)))


def compare_tensor_parallel(folder: Path, geometry: str, sequence_parallel: bool) -> None:
    """On each of two ranks: initial weights, losses, gradients, statistics and generation are those of one process."""
    config = stage(geometry, tp=2, sequence_parallel=sequence_parallel)
    parallel.initialize(config.parallel, seed=1)
    group = parallel_state.get_tensor_model_parallel_group()
    expected = torch.load(folder / f"{geometry}.pt", weights_only=True)
    model = build_model(config)
    for key, parameter in global_parameters(model):
        assert torch.equal(parameter, local_share(expected["initial"][key], parameter, group.rank(), 2)), key
    load_full_weights(model, expected["weights"])
    batch = random_batch(config, seed=0, padding=3)
    losses = forward_loss(model, batch)
    torch.testing.assert_close(losses, expected["losses"], atol=1e-5, rtol=1e-5)
    losses.sum().backward()
    for key, parameter in global_parameters(model):
        if parameter.requires_grad:
            share = local_share(expected["gradients"][key], parameter, group.rank(), 2)
            error = relative_error(summed_gradient(parameter, group), share)
            assert error < 1e-5, f"{key}: {error}"
    for layer, values in memory_statistics(model, batch).items():
        assert values == pytest.approx(expected["memory"][str(layer)], rel=1e-4)
    if not sequence_parallel:
        assert generate(model, **GENERATION) == expected["generated"]
    parallel_state.destroy_model_parallel()


def summed_gradient(parameter: torch.nn.Parameter, group: dist.ProcessGroup) -> torch.Tensor:
    marks = ("sum_gradient_over_tp", "sequence_parallel")
    if any(getattr(parameter, mark, False) for mark in marks):
        dist.all_reduce(parameter.grad, group=group)
    return parameter.grad


def exchange_checkpoints(folder: Path, geometry: str, layout: dict[str, int], saved_as: str) -> None:
    """On each of two ranks: load what one process saved, and save it for one process to load."""
    config = stage(geometry, **layout)
    parallel.initialize(config.parallel, seed=1)
    group = parallel_state.get_tensor_model_parallel_group()
    expected = torch.load(folder / f"{geometry}.pt", weights_only=True)
    model = build_model(
        config,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    load_checkpoint(model, folder / "single" / geometry)
    for key, parameter in global_parameters(model):
        assert torch.equal(parameter, local_share(expected["weights"][key], parameter, group.rank(), group.size())), key
    save_checkpoint(model, folder / saved_as / geometry)
    parallel_state.destroy_model_parallel()
