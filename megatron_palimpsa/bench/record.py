"""Measurements as flat records."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from palimpsa_kernels.dispatch import VARIABLE as KERNELS

from megatron_palimpsa.bench.cases import Case
from megatron_palimpsa.bench.measure import Measurement, Plan
from megatron_palimpsa.bench.profile import PARTS
from megatron_palimpsa.config import ParallelConfig
from megatron_palimpsa.training.console import peak_flops
from megatron_palimpsa.training.memory import MemoryEstimate
from megatron_palimpsa.training.parameters import count_parameters

Record = dict[str, Any]
MEASURED = (
    "tokens_per_second",
    "tokens_per_second_lowest",
    "tokens_per_second_highest",
    "mfu",
    "peak_bytes",
    "reserved_bytes",
    "beside_bytes",
    "static_bytes",
    "estimate_error_percent",
    "loss",
    "grad_norm",
    "losses",
    "grad_norms",
    *(f"share_{part}" for part in (*PARTS, "other", "idle")),
    "build_seconds",
    "first_step_seconds",
    "save_bytes",
    "save_copy_seconds",
    "save_stopped_seconds",
    "save_complete_seconds",
    "save_step_seconds",
)
"""Fields that are None where the configuration did not run."""


def describe(case: Case, world_size: int, estimate: MemoryEstimate, plan: Plan) -> Record:
    """What is known of a case before it runs; memory in bytes."""
    config = case.config
    model, train, parallel = config.model, config.train, config.parallel
    on_cuda = torch.cuda.is_available()
    return {
        "case": case.name,
        "status": "ok",
        "stage": config.name,
        "overrides": " ".join(case.overrides),
        "ranks": world_size,
        "tp": parallel.tp,
        "sequence_parallel": parallel.sequence_parallel,
        "pp": parallel.pp,
        "vpp": parallel.vpp,
        "cp": parallel.cp,
        "dp": world_size // parallel.replica_size,
        "engine": parallel.engine,
        **_optimizer(parallel),
        "recompute": train.recompute,
        "precision": train.precision,
        "seq_length": model.seq_length,
        "micro_batch_size": train.micro_batch_size,
        "global_batch_tokens": train.global_batch_tokens,
        "data": "own" if plan.own_data else "random",
        "steps": plan.steps,
        "layers": {symbol: model.layers.count(symbol) for symbol in dict.fromkeys(model.layers)},
        "parameters": count_parameters(model),
        "estimate_bytes": estimate.total,
        **dict.fromkeys(MEASURED),
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "kernels": os.environ.get(KERNELS, "auto"),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "megatron_core": _version("megatron-core"),
        "deepspeed": _version("deepspeed"),
    }


def _optimizer(parallel: ParallelConfig) -> Record:
    """How the optimizer is spread: the settings of the engine that runs, None for those of the other."""
    zero = parallel.deepspeed if parallel.engine == "deepspeed" else None
    return {
        "distributed_optimizer": parallel.distributed_optimizer if zero is None else None,
        "zero_stage": None if zero is None else zero.zero_stage,
        "offload_optimizer": None if zero is None else zero.offload_optimizer,
        "offload_parameters": None if zero is None else zero.offload_parameters,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None


def complete(record: Record, measured: Measurement) -> Record:
    """The record of a case that ran."""
    tokens = record["global_batch_tokens"]
    rates = [tokens / seconds for seconds in measured.step_seconds]
    rate = tokens / measured.median_seconds
    peak = peak_flops(record["device"])
    saving, shares = measured.saving, measured.shares
    error = None
    if measured.peak_bytes is not None:
        error = 100 * (record["estimate_bytes"] / measured.peak_bytes - 1)
    return record | {
        "parameters": measured.parameters,
        "tokens_per_second": rate,
        "tokens_per_second_lowest": min(rates),
        "tokens_per_second_highest": max(rates),
        "mfu": None if peak is None else rate * measured.flops_per_token / (peak * record["ranks"]),
        "peak_bytes": measured.peak_bytes,
        "reserved_bytes": measured.reserved_bytes,
        "beside_bytes": measured.beside_bytes,
        "static_bytes": measured.static_bytes,
        "estimate_error_percent": error,
        # None where one is not finite: neither kind of file has a number for it.
        "loss": measured.loss if math.isfinite(measured.loss) else None,
        "grad_norm": measured.grad_norm if math.isfinite(measured.grad_norm) else None,
        "losses": measured.losses if all(map(math.isfinite, measured.losses)) else None,
        "grad_norms": measured.grad_norms if all(map(math.isfinite, measured.grad_norms)) else None,
        **({} if shares is None else {f"share_{part}": share for part, share in shares.items()}),
        "build_seconds": measured.build_seconds,
        "first_step_seconds": measured.first_step_seconds,
        **({} if saving is None else {f"save_{name}": value for name, value in asdict(saving).items()}),
    }


def layers_text(record: Record) -> str:
    """Such as "56 M 8 P"."""
    return " ".join(f"{count} {symbol}" for symbol, count in record["layers"].items())
