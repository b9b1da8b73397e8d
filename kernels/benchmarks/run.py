"""Times the Triton kernels on a GPU, beside mamba_ssm's SSD where it is importable, and writes a CSV and a picture.

usage: python kernels/benchmarks/run.py [--shapes 2.7B ...] [--lengths 32768 ...] [--decays classes] [--output FOLDER]

Before anything is timed, outputs and gradients of the same inputs are compared per head with a float64 run over their
first CHECKED tokens (later tokens get a zero adjoint); a shape that is wrong gets no figure. Times are medians of
`triton.testing.do_bench`, which empties the L2 cache before each run. The floor is the counted one: issue slots a state
element and token over the fp32 lanes of the device.
"""

import argparse
import csv
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from measured import kernel_hash
from palimpsa_kernels import chunk_palimpsa, chunk_ssd, palimpsa_step
from palimpsa_kernels import chunked as float64
from palimpsa_kernels import ssd as float64_ssd
from torch import Tensor

CHECKED = 512
BOUND = 5e-3
FORWARD_SLOTS, BACKWARD_SLOTS = 6.2, 15.5
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
DECAYS = ("weak", "medium", "strong", "mixed")


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int


SHAPES = {
    "2.7B": Shape(1, 80, 1, 128, 64),
    "2.7B, 1 of 8 GPUs": Shape(1, 10, 1, 128, 64),
    "760M": Shape(4, 16, 16, 96, 192),
    "170M": Shape(8, 16, 16, 48, 96),
}


@dataclass(frozen=True)
class Row:
    shape: str
    tokens: int
    kernel: str
    forward_ms: float
    forward_backward_ms: float
    peak_gib: float
    floor_fraction: float | None


def log_alphas(shape: Shape, tokens: int, kind: str) -> Tensor:
    """log_alpha [B, T, H]: all heads of one class, or ("classes") a quarter of the heads of each in turn."""
    size = (shape.batch, tokens, shape.heads)
    uniform = torch.rand(size, device="cuda")
    weak = -0.05 * uniform
    rare = torch.rand(size, device="cuda") < 0.02
    of_class = {
        "weak": weak,
        "medium": -uniform,
        "strong": -2 - 14 * uniform,
        "mixed": torch.where(rare, -100 * uniform, weak),
    }
    if kind != "classes":
        return of_class[kind]
    stacked = torch.stack([of_class[name] for name in DECAYS])
    index = torch.arange(shape.heads, device="cuda") % len(DECAYS)
    return stacked.gather(0, index.expand(1, *size))[0].contiguous()


def make_inputs(shape: Shape, tokens: int, kind: str) -> dict[str, Tensor]:
    """bf16 inputs of the scan as leaves, prior 1."""
    torch.manual_seed(0)
    b, t, h, g, k, v = shape.batch, tokens, shape.heads, shape.groups, shape.key_dim, shape.value_dim
    inputs = {name: torch.randn(b, t, g, k, device="cuda").bfloat16() for name in ("q", "k")}
    inputs["v"] = torch.randn(b, t, h, v, device="cuda").bfloat16()
    inputs["beta"] = torch.rand(b, t, h, v, device="cuda").bfloat16()
    inputs["log_alpha"] = log_alphas(shape, tokens, kind)
    return {name: x.requires_grad_() for name, x in inputs.items()} | {"prior": torch.ones(h, device="cuda")}


def errors(result: dict[str, Tensor], reference: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Relative error of every tensor [B, T, heads or groups, ...] and head, floor 1e-6 of the whole tensor's norm."""
    for name, expected in reference.items():
        floor = 1e-6 * expected.norm()
        for head in range(expected.shape[2]):
            difference = (result[name][:, :, head].double() - expected[:, :, head]).norm()
            yield f"{name} of head {head}", float(difference / expected[:, :, head].norm().clamp_min(floor))


def gradients(scan: Callable[..., Tensor], inputs: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    y = scan(*leaves.values())
    y.backward(dy.to(y))
    return {"y": y.detach()} | {
        f"d{name}": x.grad for name, x in leaves.items() if name != "prior" and x.grad is not None
    }


def worst_error(scan: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: dict[str, Tensor]) -> float:
    """Largest relative error over outputs, gradients and heads in the first CHECKED tokens."""
    dy = torch.randn_like(inputs["v"])
    dy[:, CHECKED:] = 0
    result = gradients(scan, inputs, dy)
    first = {n: (x if n == "prior" else x[:, :CHECKED]).detach().double() for n, x in inputs.items()}
    expected = gradients(reference, first, dy[:, :CHECKED].double())
    found = dict(errors({name: x[:, :CHECKED] for name, x in result.items()}, expected))
    name = max(found, key=lambda key: found[key] if found[key] == found[key] else float("inf"))
    print(f"  worst relative error {found[name]:.1e}, {name}", flush=True)
    return found[name]


def timed(scan: Callable[..., Tensor], inputs: dict[str, Tensor]) -> tuple[float, float, float]:
    """Milliseconds of forward and of forward + backward, and GiB allocated beyond the inputs at the peak."""
    dy = torch.randn_like(inputs["v"])
    leaves = list(inputs.values())

    def forward() -> None:
        with torch.no_grad():
            scan(*leaves)

    def forward_backward() -> None:
        for x in leaves:
            x.grad = None
        scan(*leaves).backward(dy)

    forward_backward()
    for x in leaves:
        x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward_backward()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    times = [triton.testing.do_bench(f, warmup=50, rep=300, return_mode="median") for f in (forward, forward_backward)]
    return *times, peak


def mamba_ssd() -> Callable[..., Tensor] | None:
    """mamba_ssm's Triton SSD with our arguments, or None where it is missing; its compiled Mamba-1 is not needed."""
    sys.modules.setdefault("selective_scan_cuda", types.ModuleType("selective_scan_cuda"))
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError as error:
        print(f"mamba_ssm: {error}")
        return None

    def scan(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor) -> Tensor:
        return mamba_chunk_scan_combined(v, -log_alpha, v.new_full((v.shape[2],), -1.0).float(), k, q, 256)

    return scan


def floor_ms(shape: Shape, tokens: int, slots: float) -> float:
    device = torch.cuda.get_device_properties(0)
    lanes = device.multi_processor_count * 128 * device.clock_rate * 1e3
    elements = shape.batch * tokens * shape.heads * shape.key_dim * shape.value_dim
    return 1e3 * slots * elements / lanes


def measure(name: str, tokens: int, kind: str, peer: Callable[..., Tensor] | None) -> Iterator[Row]:
    shape = SHAPES[name]
    inputs = make_inputs(shape, tokens, kind)
    without_importance = {n: inputs[n] for n in ("q", "k", "v", "log_alpha")}
    scans = [
        ("palimpsa", chunk_palimpsa, float64.chunk_palimpsa, inputs),
        ("ssd", chunk_ssd, float64_ssd.chunk_ssd, without_importance),
    ]
    for kernel, scan, reference, arguments in scans:
        if not worst_error(scan, reference, arguments) <= BOUND:
            print(f"  {kernel}: wrong, so not timed")
            continue
        forward, both, peak = timed(scan, arguments)
        floor = floor_ms(shape, tokens, FORWARD_SLOTS + BACKWARD_SLOTS) if kernel == "palimpsa" else None
        yield Row(name, tokens, kernel, forward, both, peak, None if floor is None else floor / both)
    if peer is not None:
        yield Row(name, tokens, "mamba_ssm ssd", *timed(peer, without_importance), None)


def measure_step(batch: int) -> tuple[float, float]:
    """Microseconds of a decode step of the 2.7B shape and of a copy of as many bytes, each in a CUDA graph."""
    shape = SHAPES["2.7B"]
    inputs = make_inputs(Shape(batch, shape.heads, shape.groups, shape.key_dim, shape.value_dim), 1, "weak")
    row = [x.detach()[:, 0].contiguous() for name, x in inputs.items() if name != "prior"]
    size = (batch, shape.heads, shape.value_dim, shape.key_dim)
    states = torch.rand(size, device="cuda"), torch.rand(size, device="cuda")
    source = torch.rand(2, *size, device="cuda")
    target = torch.empty_like(source)

    def graph_us(function: Callable[[], object]) -> float:
        return 1e3 * triton.testing.do_bench_cudagraph(function, rep=50, return_mode="median")

    step = graph_us(lambda: palimpsa_step(*row, inputs["prior"], states))
    return step, graph_us(lambda: target.copy_(source))


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.shape for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(4.5 * len(names), 3.6), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for kernel in dict.fromkeys(row.kernel for row in rows if row.shape == name):
            own = [row for row in rows if row.shape == name and row.kernel == kernel]
            axis.plot([r.tokens for r in own], [r.forward_backward_ms for r in own], marker="o", label=kernel)
        axis.set(title=name, xlabel="tokens", ylabel="forward + backward, ms", xscale="log", yscale="log")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def stamp(kind: str) -> str:
    """Card, versions, commit and hash of the kernel files."""
    git = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"commit {git.stdout.strip() or 'unknown'}, decays {kind}\nKernel files: {kernel_hash()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--decays", choices=("classes", *DECAYS), default="classes")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--steps", nargs="*", type=int, default=[1, 16, 64, 256], help="batch sizes of the decode step")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "this benchmark needs a CUDA device\n")
    print(stamp(arguments.decays), flush=True)
    peer = mamba_ssd()
    rows: list[Row] = []
    for name in arguments.shapes:
        for tokens in arguments.lengths:
            print(f"{name}, T = {tokens}")
            for row in measure(name, tokens, arguments.decays, peer):
                share = "" if row.floor_fraction is None else f", {row.floor_fraction:.0%} of the floor's speed"
                print(
                    f"  {row.kernel:14s} forward {row.forward_ms:8.2f} ms, "
                    f"with backward {row.forward_backward_ms:8.2f} ms, peak {row.peak_gib:6.2f} GiB{share}",
                    flush=True,
                )
                rows.append(row)
    for batch in arguments.steps:
        step, copy = measure_step(batch)
        print(f"step, batch {batch}: {step:.1f} us, copy of as many bytes {copy:.1f} us, ratio {step / copy:.2f}")
    if rows:
        arguments.output.mkdir(parents=True, exist_ok=True)
        with (arguments.output / "benchmarks.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(asdict(rows[0])))
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
        plot(rows, arguments.output / "benchmarks.png")


if __name__ == "__main__":
    main()
