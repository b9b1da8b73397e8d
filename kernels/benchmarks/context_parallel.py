"""Two ways to scan a row whose tokens are spread over ranks: exchange of states, or exchange of tokens for heads.

usage: [torchrun --nproc-per-node 2] kernels/benchmarks/context_parallel.py [--tokens 32768] [--output F.csv]

What a mixer does between its convolution and its gated norm, forward and backward: beta's second projection, the scan,
the skip. `states` is `model/context_parallel.py`, which training uses: each rank scans its own tokens. `heads` gathers
keys, queries, dt and beta's low rank, sends x by an all-to-all so that each rank scans the whole row of its share of
heads, and sends y back. `apart` scans the ranks' own tokens without any exchange, which is wrong and shows what the
exchange costs; `one rank` scans the whole row by itself.

Without torchrun one GPU times the middle part of a document that lies on four ranks or more, `apart` and with the
exchange of `states` as far as the GPU has to do with it: nothing is sent, prepared states come from before and behind.

Outputs and gradients of both are compared with one rank's first; what is wrong is not timed. The time is the slowest
rank's, the median of rounds that all ranks begin together. Runs on GPUs (NCCL, bf16) and, for its test, on the CPU
(gloo, fp32). Needs megatron_palimpsa with its dependencies (megatron-core, pydantic, pyyaml).
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measured import kernel_hash
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_to_all
from palimpsa_kernels import Carry, HeadParameters, Importance, mixing_scan
from shapes import SHAPES, Shape
from timing import clear_gradients, positive
from torch import Tensor

from megatron_palimpsa import launcher, parallel
from megatron_palimpsa.config import ParallelConfig
from megatron_palimpsa.model.context_parallel import Exchange, gather_parts
from megatron_palimpsa.training.batch import Batch

RANK = 128
BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
COLUMNS = (
    "shape", "card", "torch", "kernel_files", "layer", "tokens", "documents", "ranks", "way", "error", "forward_ms",
    "forward_backward_ms", "peak_gib",
)  # fmt: skip
PER_TOKEN = ("q", "k", "x", "dt", "low")


@dataclass(frozen=True)
class Row:
    """A row's inputs as leaves, whole or a rank's part, and its documents."""

    per_token: dict[str, Tensor]
    """q, k [1, T, G, K], x [1, T, H, V], dt [1, T, H] and beta's low rank [1, T, R]"""
    parameters: dict[str, Tensor]
    """dt_bias, A_log, D, b_scale, prior [H] fp32 and beta's second projection up [H, V, R]"""
    adjoint: Tensor
    """of y [1, T, H, V]"""
    cu_seqlens: Tensor

    def leaves(self) -> dict[str, Tensor]:
        return self.per_token | self.parameters


def make_row(shape: Shape, tokens: int, documents: int, device: torch.device, dtype: torch.dtype) -> Row:
    """The same on every rank. Documents are equally long but for the first, which is half as long as the others."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    groups, heads = (1, tokens, shape.groups, shape.key_dim), (1, tokens, shape.heads, shape.value_dim)
    per_token = {"q": normal(*groups), "k": normal(*groups), "x": normal(*heads), "dt": normal(1, tokens, shape.heads)}
    per_token["low"] = normal(1, tokens, RANK)
    # Windows of about 10 to 3,000 tokens, as trained models have them.
    spread = torch.linspace(-7, -1, shape.heads, device=device)
    parameters = {
        "dt_bias": spread,
        "A_log": torch.zeros(shape.heads, device=device),
        "D": torch.ones(shape.heads, device=device),
        "b_scale": torch.ones(shape.heads, device=device),
        "prior": torch.ones(shape.heads, device=device),
        "up": normal(shape.heads, shape.value_dim, RANK).to(dtype) / RANK**0.5,
    }
    lengths = [1] + [2] * (documents - 1)
    offsets = torch.tensor([0, *lengths]).cumsum(0) * tokens // sum(lengths)
    leaves = {name: x.to(dtype).requires_grad_() for name, x in per_token.items()}
    return Row(
        leaves,
        {name: x.requires_grad_() for name, x in parameters.items()},
        normal(*heads).to(dtype),
        offsets.to(torch.int32),
    )


def part_of(row: Row, rank: int, ranks: int) -> Row:
    """A rank's tokens; parameters are leaves of its own."""
    return Row(
        {name: x.detach().chunk(ranks, 1)[rank].clone().requires_grad_() for name, x in row.per_token.items()},
        {name: x.detach().clone().requires_grad_() for name, x in row.parameters.items()},
        row.adjoint.chunk(ranks, 1)[rank],
        row.cu_seqlens,
    )


Scan = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]


def mix(
    scan: Scan, tokens: dict[str, Tensor], parameters: dict[str, Tensor], cu_seqlens: Tensor, importance: bool
) -> Tensor:
    heads = HeadParameters(parameters["dt_bias"], parameters["A_log"], parameters["D"])
    of_beta = None
    if importance:
        up = parameters["up"]
        logits = F.linear(tokens["low"], up.flatten(0, 1)).unflatten(-1, up.shape[:2])
        of_beta = Importance(logits, parameters["b_scale"], parameters["prior"])
    q, k, x, dt = (tokens[name] for name in ("q", "k", "x", "dt"))
    y, _ = scan(q, k, x, dt, heads, of_beta, output_final_state=False, cu_seqlens=cu_seqlens)
    return y


def to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, T / ranks, H, V] of every rank -> the whole row of this rank's heads [1, T, H / ranks, V]."""
    by_rank = x[0].unflatten(1, (group.size(), -1)).transpose(0, 1)
    return all_to_all(group, by_rank.contiguous()).flatten(0, 1).unsqueeze(0)


def to_tokens(y: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse of `to_heads`."""
    by_rank = all_to_all(group, y[0].unflatten(0, (group.size(), -1)).contiguous())
    return by_rank.transpose(0, 1).flatten(1, 2).unsqueeze(0)


class Methods:
    """y of this rank's tokens, in each way."""

    def __init__(self, part: Row, group: dist.ProcessGroup, importance: bool) -> None:
        self._part, self._group, self._importance = part, group, importance
        tokens = part.adjoint.shape[1] * group.size()
        empty = torch.empty(1, tokens, dtype=torch.uint8)
        own = Batch(empty, empty, empty, part.cu_seqlens).of_rank(group.rank(), group.size())
        assert own.part is not None
        self._row_part = own.part
        device = part.adjoint.device
        self._own_offsets, self._row_offsets = own.cu_seqlens.to(device), part.cu_seqlens.to(device)

    def apart(self) -> Tensor:
        part = self._part
        return mix(mixing_scan, part.per_token, part.parameters, self._own_offsets, self._importance)

    def states(self) -> Tensor:
        part = self._part
        if not self._row_part.crossed:
            return self.apart()
        scan = Exchange(self._row_part, self._group).scan
        return mix(scan, part.per_token, part.parameters, self._own_offsets, self._importance)

    def heads(self) -> Tensor:
        group, given = self._group, self._part.per_token
        names = [name for name in PER_TOKEN if name not in ("x", "dt") and (self._importance or name != "low")]
        widths = [given[name][0].flatten(1).shape[1] for name in names]
        shared = gather_parts(torch.cat([given[name][0].flatten(1) for name in names], -1), group).flatten(0, 1)
        tokens = {
            name: x.unflatten(-1, given[name].shape[2:]).unsqueeze(0)
            for name, x in zip(names, shared.split(widths, -1), strict=True)
        }
        if tokens["q"].shape[2] > 1:
            # Groups are as many as ranks or a multiple, as heads are.
            tokens |= {name: tokens[name].chunk(group.size(), 2)[group.rank()] for name in ("q", "k")}
        sent = to_heads(torch.cat([given["x"], given["dt"].unsqueeze(-1)], -1), group)
        tokens["x"], tokens["dt"] = sent[..., :-1].contiguous(), sent[..., -1]
        own = {name: x.chunk(group.size())[group.rank()] for name, x in self._part.parameters.items()}
        return to_tokens(mix(mixing_scan, tokens, own, self._row_offsets, self._importance), group)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def largest_error(method: Callable[[], Tensor], part: Row, whole: Row, y: Tensor, group: dist.ProcessGroup) -> float:
    """Over y and the gradients of all inputs, relative, of any rank; `whole` has the gradients of one rank's scan."""
    clear_gradients(list(part.leaves().values()))
    actual = method()
    actual.backward(part.adjoint)
    errors = [error(actual, y.chunk(group.size(), 1)[group.rank()])]
    for name, leaf in part.leaves().items():
        expected = whole.leaves()[name].grad
        if expected is None or leaf.grad is None:
            continue
        if name in part.parameters:
            dist.all_reduce(leaf.grad, group=group)
            errors.append(error(leaf.grad, expected))
        else:
            errors.append(error(leaf.grad, expected.chunk(group.size(), 1)[group.rank()]))
    worst = torch.tensor(max(errors), device=y.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return float(worst)


def slowest_ms(run: Callable[[], object], rounds: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """Median over rounds of the slowest rank's time; two rounds before warm up."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    taken = []
    for _ in range(2 + rounds):
        dist.barrier(group)
        wait()
        start = time.perf_counter()
        run()
        wait()
        taken.append(1e3 * (time.perf_counter() - start))
    times = torch.tensor(taken[2:], device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return statistics.median(times.tolist())


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Allocated at the peak beyond what was allocated before; 0 without CUDA."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compare(
    shape: Shape, tokens: int, documents: int, importance: bool, rounds: int, device: torch.device
) -> list[dict[str, Any]]:
    """Check and time every way on all ranks of Megatron's context-parallel group; one record each."""
    group = parallel_state.get_context_parallel_group()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    whole = make_row(shape, tokens, documents, device, dtype)
    part = part_of(whole, group.rank(), group.size())
    methods = Methods(part, group, importance)

    def one_rank() -> Tensor:
        return mix(mixing_scan, whole.per_token, whole.parameters, whole.cu_seqlens.to(device), importance)

    def step(method: Callable[[], Tensor], row: Row) -> Callable[[], None]:
        def run() -> None:
            clear_gradients(list(row.leaves().values()))
            method().backward(row.adjoint)

        return run

    y = one_rank()
    y.backward(whole.adjoint)
    y = y.detach()
    ways: dict[str, tuple[Callable[[], Tensor], Row]] = {
        "states": (methods.states, part),
        "heads": (methods.heads, part),
        "apart": (methods.apart, part),
        "one rank": (one_rank, whole),
    }
    records = []
    for name, (method, row) in ways.items():
        wrong = largest_error(method, part, whole, y, group) if row is part and name != "apart" else None
        record: dict[str, Any] = {
            "layer": "P" if importance else "M", "tokens": tokens, "documents": documents, "ranks": group.size(),
            "way": name, "error": wrong, "forward_ms": None, "forward_backward_ms": None, "peak_gib": None,
        }  # fmt: skip
        if wrong is None or wrong < BOUNDS[dtype]:
            with torch.no_grad():
                record["forward_ms"] = slowest_ms(method, rounds, group, device)
            record["forward_backward_ms"] = slowest_ms(step(method, row), rounds, group, device)
            record["peak_gib"] = peak_bytes(step(method, row), device) / 2**30
        records.append(record)
    return records


class Silent(Carry):
    """A part in the middle of a document, whose neighbours send small numbers at once."""

    goes_on = goes_off = is_inside = True

    def from_before(self, end: Tensor, decay: Tensor) -> Tensor:
        return decay.view(1, -1, *[1] * (end.dim() - 2)) * end + 0.1

    def from_behind(self, start: Tensor) -> Tensor:
        return torch.full_like(start, 0.1)


def time_middle(shape: Shape, tokens: int, importance: bool, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """One record for each way that a single device can time, of a part of `tokens` tokens."""
    group = parallel_state.get_context_parallel_group()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    row = make_row(shape, tokens, 1, device, dtype)
    offsets = row.cu_seqlens.to(device)

    def forward(carry: Carry | None) -> Tensor:
        scan = partial(mixing_scan, carry=carry)
        return mix(scan, row.per_token, row.parameters, offsets, importance)

    def step(carry: Carry | None) -> None:
        clear_gradients(list(row.leaves().values()))
        forward(carry).backward(row.adjoint)

    records = []
    for name, carry in (("apart", None), ("states", Silent())):
        record: dict[str, Any] = {
            "layer": "P" if importance else "M", "tokens": tokens, "documents": 1, "ranks": 1, "way": name,
            "error": None,
        }  # fmt: skip
        with torch.no_grad():
            record["forward_ms"] = slowest_ms(partial(forward, carry), rounds, group, device)
        record["forward_backward_ms"] = slowest_ms(partial(step, carry), rounds, group, device)
        record["peak_gib"] = peak_bytes(partial(step, carry), device) / 2**30
        records.append(record)
    return records


def line(record: dict[str, Any]) -> str:
    if record["forward_ms"] is None:
        return f"{record['way']:>9}: wrong, error {record['error']:.1e}, not timed"
    known = "" if record["error"] is None else f", error {record['error']:.1e}"
    return (
        f"{record['way']:>9}: forward {record['forward_ms']:8.2f} ms, and backward "
        f"{record['forward_backward_ms']:8.2f} ms, peak {record['peak_gib']:.2f} GiB{known}"
    )


def start_csv(path: Path) -> None:
    """Make the file and its header, unless they are there.

    Raises:
        ValueError: the file has other columns.
        OSError: it cannot be read or written.
    """
    header = ",".join(COLUMNS)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        file.seek(0)
        first = file.readline().rstrip()
        if first not in ("", header):
            raise ValueError(f"{path}: not a CSV of this benchmark; give --output another file")
        if not first:
            file.write(header + "\n")


def append(path: Path, records: list[dict[str, Any]]) -> None:
    with path.open("a", newline="") as file:
        csv.DictWriter(file, COLUMNS).writerows(records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="2.7B")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[32768])
    parser.add_argument("--documents", type=positive, nargs="+", default=[1, 5])
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    ranks = launcher.world_size()
    if not torch.cuda.is_available():
        parser.exit(2, "this benchmark needs a CUDA device, and torchrun with two for all it can tell\n")
    if arguments.output is not None and launcher.rank() == 0:
        try:
            start_csv(arguments.output)
        except (OSError, ValueError) as error:
            parser.exit(2, f"{error}\n")
    parallel.initialize(ParallelConfig(cp=ranks), seed=1)
    device = torch.device("cuda", torch.cuda.current_device())
    stamp = {
        "shape": arguments.shape, "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "kernel_files": kernel_hash(),
    }  # fmt: skip
    is_main = dist.get_rank() == 0
    for tokens in arguments.tokens:
        for documents in arguments.documents if ranks > 1 else [1]:
            for importance in (True, False):
                shape, rounds = SHAPES[arguments.shape], arguments.rounds
                if ranks > 1:
                    records = compare(shape, tokens, documents, importance, rounds, device)
                else:
                    records = time_middle(shape, tokens, importance, rounds, device)
                if is_main:
                    kind = "P" if importance else "M"
                    print(f"{kind}, {tokens:,} tokens in {documents} documents over {ranks} ranks", flush=True)
                    print("\n".join(line(record) for record in records), flush=True)
                if is_main and arguments.output is not None:
                    append(arguments.output, [stamp | record for record in records])
    parallel.destroy()


if __name__ == "__main__":
    main()
