"""Times the Triton kernels on a GPU beside other packages' SSD, and writes a CSV and a picture.

usage: python kernels/benchmarks/run.py [--shapes 2.7B ...] [--lengths 32768 ...] [--decays classes] [--output FILE.csv]

Before anything is timed, outputs and gradients are compared per head with a float64 run over the first 512 tokens of
the same inputs (later tokens take no adjoint); a kernel of ours that is wrong gets no figure. Times are medians; the L2
cache is overwritten before each run. The floor is the counted one: issue slots a state element and token over the fp32
lanes of the device. Each row is appended to the CSV as soon as it is measured; rows that stand there for the same
kernel files, card and versions are not measured again. The rows that the bars need come first.
"""

import argparse
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from bars import DECODE_BATCHES, scan_bars
from correctness import BOUND, class_errors, largest, reference_results
from measured import ROOT, kernel_hash
from palimpsa_kernels import chunk_palimpsa, chunk_ssd, palimpsa_step
from palimpsa_kernels import chunked as pytorch_palimpsa
from palimpsa_kernels import ssd as pytorch_ssd
from peers import importable_peers, runs
from shapes import DECAYS, PALIMPSA_INPUTS, SHAPES, SSD_INPUTS, Shape, make_inputs
from table import Row, append_row, open_for_rows, plot
from timing import clear_gradients, median_ms, peak_gib, positive
from torch import Tensor

FORWARD_SLOTS, BACKWARD_SLOTS = 6.2, 15.5
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
FIRST = (("2.7B", 32768), ("2.7B", 4096), ("2.7B", 131072), ("2.7B, 1 of 8 GPUs", 32768), ("760M", 4096))


@dataclass(frozen=True)
class Kernel:
    """A scan and its float64 reference, both functions of the named inputs; `ours` must be right to be timed."""

    scan: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: tuple[str, ...]
    ours: bool


def kernels() -> dict[str, Kernel]:
    own = {
        "palimpsa": Kernel(chunk_palimpsa, pytorch_palimpsa.chunk_palimpsa, PALIMPSA_INPUTS, True),
        "ssd": Kernel(chunk_ssd, pytorch_ssd.chunk_ssd, SSD_INPUTS, True),
    }
    return own | {
        name: Kernel(scan, reference, SSD_INPUTS, False) for name, (scan, reference) in importable_peers().items()
    }


def floor_ms(shape: Shape, tokens: int, slots: float) -> float:
    device = torch.cuda.get_device_properties(0)
    lanes = device.multi_processor_count * 128 * device.clock_rate * 1e3
    elements = shape.batch * tokens * shape.heads * shape.key_dim * shape.value_dim
    return 1e3 * slots * elements / lanes


def timed(scan: Callable[..., Tensor], inputs: dict[str, Tensor]) -> tuple[float, float, float]:
    """Milliseconds of forward and of forward + backward, and GiB allocated beyond the inputs at the peak."""
    leaves = list(inputs.values())
    dy = torch.randn_like(inputs["v"])

    def forward() -> None:
        with torch.no_grad():
            scan(*leaves)

    def forward_backward() -> None:
        clear_gradients(leaves)
        scan(*leaves).backward(dy)

    forward_backward()
    clear_gradients(leaves)
    peak = peak_gib(forward_backward)
    times = median_ms(forward), median_ms(forward_backward)
    clear_gradients(leaves)
    return *times, peak


class Bench:
    """Rows measured so far, in a CSV; references are kept for shapes whose first tokens are the same."""

    def __init__(self, output: Path, decays: str, stamp: dict[str, str]) -> None:
        self.output, self.decays, self.stamp = output, decays, stamp
        self.rows = {row.key: row for row in open_for_rows(output)}
        self.references: dict[tuple[str, str], dict[str, Tensor]] = {}

    def row(self, shape: str, batch: int, tokens: int, kernel: str, forward: float, **figures: float | None) -> Row:
        blank = dict.fromkeys(("forward_backward_ms", "peak_gib", "floor_fraction", "error"))
        return Row(shape, batch, tokens, self.decays, kernel, forward, **(blank | figures), **self.stamp)

    def has(self, shape: str, batch: int, tokens: int, kernel: str) -> bool:
        return self.row(shape, batch, tokens, kernel, 0.0).key in self.rows

    def add(self, row: Row) -> None:
        append_row(self.output, row)
        self.rows[row.key] = row

    def present_rows(self) -> list[Row]:
        """Those of this version of the kernels on this card."""
        return [r for r in self.rows.values() if all(getattr(r, name) == x for name, x in self.stamp.items())]

    def reference(self, name: str, kernel: str, scan: Kernel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if (name, kernel) not in self.references:
            self.references = {key: x for key, x in self.references.items() if key[0] == name}
            self.references[name, kernel] = reference_results(scan.reference, inputs)
        return self.references[name, kernel]

    def measure(self, name: str, tokens: int, scans: dict[str, Kernel]) -> Iterator[Row]:
        """Rows of the kernels that have none yet for this shape and length."""
        shape = SHAPES[name]
        missing = {kernel: scan for kernel, scan in scans.items() if not self.has(name, shape.batch, tokens, kernel)}
        if not missing:
            return
        print(f"{name}, T = {tokens}", flush=True)
        everything = make_inputs(shape, tokens, self.decays)
        for kernel, scan in missing.items():
            inputs = {n: everything[n] for n in scan.inputs}
            if not scan.ours and not runs(partial(timed_once, scan.scan, inputs), kernel):
                continue
            expected = self.reference(name, kernel, scan, inputs)
            errors = class_errors(scan.scan, expected, inputs, shape, self.decays)
            parts = (f"{where} {error:.1e} ({at})" for where, (error, at) in errors.items())
            print(f"  {kernel}: worst errors {', '.join(parts)}", flush=True)
            error = largest(errors.values())
            if scan.ours and not error <= BOUND:
                print(f"  {kernel}: wrong, so not timed", flush=True)
                continue
            forward, both, peak = timed(scan.scan, inputs)
            floor = floor_ms(shape, tokens, FORWARD_SLOTS + BACKWARD_SLOTS) / both if kernel == "palimpsa" else None
            yield self.row(
                name, shape.batch, tokens, kernel, forward,
                forward_backward_ms=both, peak_gib=peak, floor_fraction=floor, error=error,
            )  # fmt: skip

    def measure_step(self, batch: int) -> Iterator[Row]:
        """A decode step of the 2.7B shape and a copy of as many bytes, each in a CUDA graph."""
        if self.has("2.7B", batch, 1, "copy of as many bytes"):
            return
        shape = SHAPES["2.7B"]
        inputs = make_inputs(Shape(batch, shape.heads, shape.groups, shape.key_dim, shape.value_dim), 1, "weak")
        row = [x.detach()[:, 0].contiguous() for name, x in inputs.items() if name != "prior"]
        size = (batch, shape.heads, shape.value_dim, shape.key_dim)
        states = torch.rand(size, device="cuda"), torch.rand(size, device="cuda")
        source = torch.rand(2, *size, device="cuda")
        target = torch.empty_like(source)

        def graph_ms(function: Callable[[], object]) -> float:
            return triton.testing.do_bench_cudagraph(function, rep=50, return_mode="median")

        step = graph_ms(lambda: palimpsa_step(*row, inputs["prior"], states))
        copy = graph_ms(lambda: target.copy_(source))
        yield self.row("2.7B", batch, 1, "palimpsa step", step)
        yield self.row("2.7B", batch, 1, "copy of as many bytes", copy)


def timed_once(scan: Callable[..., Tensor], inputs: dict[str, Tensor]) -> None:
    y = scan(*inputs.values())
    y.sum().backward()
    clear_gradients(list(inputs.values()))
    torch.cuda.synchronize()


def describe(row: Row) -> str:
    if row.forward_backward_ms is None or row.peak_gib is None:
        return f"  {row.kernel:22s} batch {row.batch:3d}: {1e3 * row.forward_ms:8.1f} us"
    share = "" if row.floor_fraction is None else f", {row.floor_fraction:.0%} of the floor's speed"
    return (
        f"  {row.kernel:14s} forward {row.forward_ms:8.2f} ms, with backward {row.forward_backward_ms:8.2f} ms, "
        f"peak {row.peak_gib:6.2f} GiB{share}"
    )


def stamp() -> dict[str, str]:
    """Card, versions, commit and hash of the kernel files."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "versions": f"torch {torch.__version__} triton {triton.__version__}",
        "commit": git.stdout.strip() or "unknown",
        "kernel_files": kernel_hash(),
    }


def ordered(shapes: list[str], lengths: list[int]) -> list[tuple[str, int]]:
    """Shapes and lengths to measure, those of the bars first."""
    wanted = [(name, tokens) for name in shapes for tokens in lengths]
    return [pair for pair in FIRST if pair in wanted] + [pair for pair in wanted if pair not in FIRST]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=positive, default=list(LENGTHS))
    parser.add_argument("--decays", choices=("classes", *DECAYS), default="classes")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks/benchmarks.csv"))
    parser.add_argument(
        "--steps", nargs="*", type=positive, default=DECODE_BATCHES, help="batch sizes of the decode step"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "this benchmark needs a CUDA device\n")
    try:
        bench = Bench(arguments.output, arguments.decays, stamp())
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    print(", ".join(bench.stamp.values()), f"decays {arguments.decays}", sep=", ", flush=True)
    scans = kernels()
    measurements = [
        *(partial(bench.measure_step, batch) for batch in arguments.steps),
        *(
            partial(bench.measure, name, tokens, scans)
            for name, tokens in ordered(arguments.shapes, arguments.lengths)
        ),
    ]  # fmt: skip
    for measurement in measurements:
        for row in measurement():
            bench.add(row)
            print(describe(row), flush=True)
    rows = [row for row in bench.present_rows() if row.decays == arguments.decays]
    plot(rows, arguments.output.with_suffix(".png"))
    print(*scan_bars(rows, arguments.decays), sep="\n")


if __name__ == "__main__":
    main()
