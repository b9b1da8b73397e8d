"""Measurements as flat records: JSON lines or CSV for programs, a table for people."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from palimpsa_kernels.dispatch import VARIABLE as KERNELS

from megatron_palimpsa.bench.cases import Case
from megatron_palimpsa.bench.measure import Measurement
from megatron_palimpsa.config import ConfigError, ParallelConfig
from megatron_palimpsa.training.console import peak_flops, short_count
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
    "steps",
    "build_seconds",
    "first_step_seconds",
    "save_bytes",
    "save_copy_seconds",
    "save_stopped_seconds",
    "save_complete_seconds",
    "save_step_seconds",
)
"""Fields that are None where the configuration did not run."""


def describe(case: Case, world_size: int, estimate: MemoryEstimate) -> Record:
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
    saving = measured.saving
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
        "loss": measured.loss,
        "grad_norm": measured.grad_norm,
        "steps": len(measured.step_seconds),
        "build_seconds": measured.build_seconds,
        "first_step_seconds": measured.first_step_seconds,
        **({} if saving is None else {f"save_{name}": value for name, value in asdict(saving).items()}),
    }


class RecordFile:
    """Appends a record at a time, so that what was measured stays; by its ending CSV or JSON lines."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        """
        Args:
            columns: the records' keys.

        Raises:
            ConfigError: neither ending, or a CSV with other columns is there.
        """
        if path.suffix not in (".jsonl", ".csv"):
            raise ConfigError(f"--output {path}: must end with .jsonl or .csv")
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv" and path.exists():
            with path.open(newline="") as file:
                there = next(csv.reader(file), None)
            if there not in (None, list(columns)):
                raise ConfigError(f"--output {path}: has other columns than are to be written; name another file")

    def write(self, record: Record) -> None:
        with self._path.open("a", newline="") as file:
            if self._path.suffix == ".jsonl":
                file.write(json.dumps(record, allow_nan=False) + "\n")
                return
            flat = record | {"layers": _layers(record)}
            writer = csv.DictWriter(file, flat, lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(flat)


def _layers(record: Record) -> str:
    return " ".join(f"{count} {symbol}" for symbol, count in record["layers"].items())


COLUMNS = (
    "case",
    "layers",
    "T x mb",
    "ranks",
    "layout",
    "recompute",
    "tokens/s",
    "spread",
    "MFU",
    "peak",
    "estimate",
    "loss",
)


def saving_line(record: Record) -> str | None:
    """What a background save cost, or None where none was measured."""
    if record["save_bytes"] is None:
        return None
    size, copied = record["save_bytes"] / 1e9, record["save_copy_seconds"]
    meanwhile = "within one step"
    if record["save_step_seconds"]:
        usual = record["global_batch_tokens"] / record["tokens_per_second"]
        meanwhile = f"steps of {record['save_step_seconds']:.3f} s meanwhile, {usual:.3f} s without"
    return (
        f"{record['case']}: a save stops training for {record['save_stopped_seconds']:.3f} s; copying a rank's "
        f"{size:.3g} GB to host memory takes {copied:.3f} s ({size / copied:.1f} GB/s); on disk after "
        f"{record['save_complete_seconds']:.1f} s, {meanwhile}"
    )


def table(records: Sequence[Record]) -> str:
    """The records as aligned columns; memory in GiB."""
    rows = [COLUMNS, *(_row(record) for record in records)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(record: Record) -> tuple[str, ...]:
    layout = [f"{name} {record[name]}" for name in ("tp", "pp", "vpp", "cp", "dp") if record[name] > 1]
    if record["sequence_parallel"]:
        layout.append("sp")
    if record["engine"] == "deepspeed":
        layout.append(f"ZeRO {record['zero_stage']}" + _offload(record))
    known = (
        record["case"],
        _layers(record),
        f"{record['seq_length']} x {record['micro_batch_size']}",
        str(record["ranks"]),
        ", ".join(layout) or "-",
        record["recompute"],
    )
    estimate = _gib(record["estimate_bytes"])
    if record["status"] != "ok":
        return (*known, record["status"], "", "", "", estimate, "")
    if record["estimate_error_percent"] is not None:
        estimate += f" ({record['estimate_error_percent']:+.1f} %)"
    rate = record["tokens_per_second"]
    spread = f"{short_count(record['tokens_per_second_lowest'])}-{short_count(record['tokens_per_second_highest'])}"
    mfu = "-" if record["mfu"] is None else f"{100 * record['mfu']:.1f} %"
    return (*known, f"{rate:,.0f}", spread, mfu, _gib(record["peak_bytes"]), estimate, f"{record['loss']:.4f}")


def _offload(record: Record) -> str:
    if record["offload_parameters"]:
        return ", all offloaded"
    return ", optimizer offloaded" if record["offload_optimizer"] else ""


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.2f} GiB"
