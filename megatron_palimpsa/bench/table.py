"""Records as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_palimpsa.bench.profile import PARTS
from megatron_palimpsa.bench.record import Record, layers_text
from megatron_palimpsa.training.console import short_count

COLUMNS = (
    "case",
    "layers",
    "T x mb",
    "ranks",
    "layout",
    "recompute",
    "tokens/s",
    "a rank",
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
        layers_text(record),
        f"{record['seq_length']} x {record['micro_batch_size']}",
        str(record["ranks"]),
        ", ".join(layout) or "-",
        record["recompute"],
    )
    estimate = _gib(record["estimate_bytes"])
    if record["status"] != "ok":
        return (*known, record["status"], "", "", "", "", estimate, "")
    if record["estimate_error_percent"] is not None:
        estimate += f" ({record['estimate_error_percent']:+.1f} %)"
    rate = record["tokens_per_second"]
    spread = f"{short_count(record['tokens_per_second_lowest'])}-{short_count(record['tokens_per_second_highest'])}"
    mfu = "-" if record["mfu"] is None else f"{100 * record['mfu']:.1f} %"
    each = f"{rate / record['ranks']:,.0f}"
    return (*known, f"{rate:,.0f}", each, spread, mfu, _gib(record["peak_bytes"]), estimate, f"{record['loss']:.4f}")


def _offload(record: Record) -> str:
    if record["offload_parameters"]:
        return ", all offloaded"
    return ", optimizer offloaded" if record["offload_optimizer"] else ""


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.2f} GiB"


def shares_line(record: Record) -> str | None:
    """What a profiled step spends its time on, or None where none was."""
    parts = {part: record[f"share_{part}"] for part in (*PARTS, "other", "idle")}
    if any(share is None for share in parts.values()):
        return None
    largest = sorted(parts.items(), key=lambda item: item[1], reverse=True)
    return f"{record['case']}, of a step: " + ", ".join(f"{part} {100 * share:.0f} %" for part, share in largest)
