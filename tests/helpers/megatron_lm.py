"""Megatron-LM's own training loop on a stage's model and random documents; on a machine without CUDA too."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import arguments as megatron_arguments
from megatron.training import get_args, global_vars, initialize, training
from torch import Tensor, nn
from torch.utils.data import Dataset

from helpers.stages import random_batch
from helpers.training_runs import always
from megatron_palimpsa import parallel
from megatron_palimpsa.config import ParallelConfig, StageConfig
from megatron_palimpsa.engine.base import StepResult
from megatron_palimpsa.engine.megatron import MegatronEngine
from megatron_palimpsa.megatron_lm import add_palimpsa_args
from megatron_palimpsa.megatron_lm import pretrain as entry
from megatron_palimpsa.megatron_lm.arguments import SPEC
from megatron_palimpsa.parallel import cpu


def arguments(config: StageConfig, *extra: str) -> list[str]:
    """The command line for the stage's model, layout, batches and optimizer; the rate must be constant from the start.

    Megatron counts its schedule behind the update where the trainer counts before it.
    """
    assert config.optimizer.schedule == "constant"
    assert config.optimizer.warmup_steps == 0
    model, train, optimizer, layout = config.model, config.train, config.optimizer, config.parallel
    values: dict[str, Any] = {
        "hybrid-layer-pattern": "|".join(model.stages(layout.pp * layout.vpp)),
        "hidden-size": model.hidden_size,
        "num-attention-heads": model.num_attention_heads,
        "num-query-groups": model.num_query_groups,
        "ffn-hidden-size": model.ffn_hidden_size,
        "mamba-state-dim": model.d_state,
        "mamba-head-dim": model.headdim,
        "mamba-num-groups": model.ngroups,
        "mamba-num-heads": model.nheads,
        "palimpsa-beta-rank": model.beta_rank,
        "init-method-std": model.init_std,
        "seq-length": model.seq_length,
        "max-position-embeddings": model.seq_length,
        # The null tokenizer adds an id of its own.
        "vocab-size": model.vocab_size - 1,
        "tokenizer-type": "NullTokenizer",
        # Megatron pads to a multiple of this times the tensor-parallel size.
        "make-vocab-size-divisible-by": model.vocab_multiple // layout.tp,
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "micro-batch-size": train.micro_batch_size,
        "global-batch-size": config.global_batch_size,
        "train-iters": config.total_steps,
        "lr": optimizer.lr,
        "lr-decay-style": "constant",
        "weight-decay": optimizer.weight_decay,
        "adam-beta2": optimizer.beta2,
        "clip-grad": optimizer.clip_grad,
        "seed": config.seed,
        "transformer-impl": "local",
        "normalization": "RMSNorm",
        "position-embedding-type": "none",
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "eval-iters": 0,
        "eval-interval": 1000,
        "num-workers": 0,
        "log-interval": 1,
    }
    switches = {
        "group-query-attention": model.num_query_groups is not None,
        "untie-embeddings-and-output-weights": not model.tie_embeddings,
        "bf16": train.precision == "bf16",
        "fp32-residual-connection": model.fp32_residual and train.precision == "bf16",
        "sequence-parallel": layout.sequence_parallel,
        "use-distributed-optimizer": layout.distributed_optimizer,
        "swiglu": True,
        "disable-bias-linear": True,
        "no-gradient-accumulation-fusion": True,
        "calculate-per-token-loss": True,
        "dataloader-inter-document-masking": True,
        "disable-jit-fuser": True,
        # On the CPU every group is gloo's already.
        "disable-gloo-process-groups": not torch.cuda.is_available(),
    }
    given = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    return ["--spec", *SPEC, *given, *(f"--{name}" for name, on in switches.items() if on), *extra]


class Documents(Dataset):
    """Item n is the sequence of `random_batch(config, seed=n)`, as Megatron's data sets give it."""

    def __init__(self, config: StageConfig) -> None:
        self.config = config

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = random_batch(self.config, seed=index)
        length = self.config.model.seq_length
        offsets = torch.full((length + 1,), length, dtype=torch.int32)
        offsets[: len(batch.cu_seqlens)] = batch.cu_seqlens
        return {
            "tokens": batch.tokens[0],
            "labels": batch.labels[0],
            "loss_mask": batch.loss_mask[0],
            "position_ids": torch.arange(length),
            "cu_seqlens": offsets,
            "max_seqlen": batch.cu_seqlens.diff().max(),
        }


@dataclass
class MegatronRun:
    """What Megatron's loop did; without the process groups, which are gone."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    model: list[nn.Module] = field(default_factory=list)
    optimizer: Any = None


def train(config: StageConfig, *extra: str) -> MegatronRun:
    """The entry script's `main` from parsing to the end, on `Documents` instead of files."""
    run = MegatronRun()

    def documents(samples: list[int], vp_stage: int | None = None) -> tuple[Dataset, None, None]:
        return Documents(config), None, None

    documents.is_distributed = True  # type: ignore[attr-defined]
    step = training.train_step

    def recorded(
        forward: Any, batches: Any, model: list[nn.Module], optimizer: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        result = step(forward, batches, model, optimizer, *args, **kwargs)
        loss = torch.stack([value.detach() for value in result[0].values()] or [torch.tensor(torch.nan)])
        run.losses.append(float(loss[0]))
        run.grad_norms.append(float(result[5]))
        run.model, run.optimizer = model, optimizer
        return result

    with pytest.MonkeyPatch.context() as patch, _cuda_or_stand_ins(patch):
        patch.setattr(sys, "argv", ["pretrain", *arguments(config, *extra)])
        if dist.is_initialized():
            patch.setenv("RANK", str(dist.get_rank()))
            patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        # Megatron's condition for tensor parallelism on GPUs before Blackwell.
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        patch.setattr(entry, "datasets", documents)
        patch.setattr(training, "train_step", recorded)
        try:
            entry.main()
        finally:
            clear_globals()
    return run


def parse(words: list[str]) -> argparse.Namespace:
    """Megatron's arguments, validated; its global variables are as before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain", *words])
        args = megatron_arguments.parse_and_validate_args(extra_args_provider=add_palimpsa_args)
    clear_globals()
    return args


def losses_and_norms(config: StageConfig) -> tuple[list[float], list[float]]:
    """Of `train` on this rank; NaN for losses where it is not of the last pipeline stage."""
    run = train(config)
    return run.losses, run.grad_norms


def trainers_steps(config: StageConfig) -> list[StepResult]:
    """What this package's trainer makes of the same sequences, on one rank."""
    parallel.initialize(config.parallel, config.seed)
    engine = MegatronEngine(config)
    batches = (random_batch(config, seed) for seed in count())
    steps = [engine.train_step(batches, always) for _ in range(config.total_steps)]
    parallel.destroy()
    return steps


def clear_globals() -> None:
    """What Megatron keeps for a process's whole life, so that another run may follow."""
    global_vars.unset_global_variables()
    training.destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def _cuda_or_stand_ins(patch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    cpu.install()
    patch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: torch.cuda.current_stream())
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    patch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
    patch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))
    patch.setattr(megatron_arguments, "get_device_arch_version", lambda: 9)
    patch.setattr(entry, "require_gpu", lambda: None)
    patch.setattr(training, "initialize_megatron", _initialize_without_cuda)
    patch.setattr(training, "set_jit_fusion_options", lambda tp_size: None)
    with cpu.cuda_means_cpu():
        yield


def _initialize_without_cuda(**kwargs: Any) -> None:
    """Megatron's own, but for the process groups and the seeds, which ask for CUDA."""
    args = get_args()
    layout = ParallelConfig(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=args.virtual_pipeline_model_parallel_size or 1,
    )
    parallel.initialize(layout, args.seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        patch.setattr(initialize, "_set_random_seed", lambda *args, **kwargs: None)
        initialize.initialize_megatron()
