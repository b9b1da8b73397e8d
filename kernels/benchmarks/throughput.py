"""Tokens a second of token-by-token decoding with large states, as the paper's Fig. 7: one head, K = V = D.

usage: python kernels/benchmarks/throughput.py [--sizes 512 1024 2048] [--batch 16] [--tokens 2048] [--output FILE.csv]

Each recurrence runs over the same tokens from empty states, a CUDA graph of 64 steps at a time. Its first outputs are
compared with the float64 recurrence: one that is wrong gets no figure. Beside ours stands mamba_ssm's step where it can
be imported. Rows are appended as they are measured, and rows that stand there for the same kernel files, card and
versions are not measured again.
"""

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from correctness import BOUND
from palimpsa_kernels import palimpsa_step, ssd_step
from palimpsa_kernels.peers import load_mamba_ssm
from palimpsa_kernels.reference import palimpsa_reference, ssd_reference
from peers import runs
from run import stamp
from shapes import PALIMPSA_INPUTS, SSD_INPUTS, Shape, make_inputs
from table import Row, append_row, open_for_rows
from timing import positive
from torch import Tensor

STEPS_A_GRAPH = 64
COMPARED = 16
"""First tokens that are compared."""
States = tuple[Tensor, ...]


@dataclass(frozen=True)
class Recurrence:
    """`step` takes one token of the inputs [B, ...] and the states, which it updates, and gives y [B, H, V]."""

    step: Callable[[dict[str, Tensor], States], Tensor]
    reference: Callable[..., tuple[Tensor, object]]
    inputs: tuple[str, ...]


def recurrences() -> dict[str, Recurrence]:
    def palimpsa(x: dict[str, Tensor], states: States) -> Tensor:
        return palimpsa_step(*(x[name] for name in PALIMPSA_INPUTS), (states[0], states[1]))

    def ssd(x: dict[str, Tensor], states: States) -> Tensor:
        return ssd_step(*(x[name] for name in SSD_INPUTS), states[0])

    found = {
        "palimpsa": Recurrence(palimpsa, palimpsa_reference, PALIMPSA_INPUTS),
        "ssd": Recurrence(ssd, ssd_reference, SSD_INPUTS),
    }
    try:
        found["mamba_ssm"] = Recurrence(mamba_ssm_step(), mamba_ssm_reference, SSD_INPUTS)
    except ImportError as error:
        print(f"mamba_ssm is left out: {error}", flush=True)
    return found


def mamba_ssm_step() -> Callable[[dict[str, Tensor], States], Tensor]:
    """It multiplies v by its step, which here is -log_alpha with A = -1. Without a bias and a skip D it fails."""
    load_mamba_ssm()
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    def step(x: dict[str, Tensor], states: States) -> Tensor:
        dt = -x["log_alpha"][..., None].expand(x["v"].shape)
        A = dt.new_full((), -1.0).expand(states[0].shape[1:])  # a tensor made on the host cannot go into a graph
        zero = dt.new_zeros(()).expand(x["v"].shape[1:])
        return selective_state_update(states[0], x["v"], dt, A, x["k"], x["q"], D=zero, dt_bias=zero)

    return step


def mamba_ssm_reference(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor) -> tuple[Tensor, object]:
    return ssd_reference(q, k, v * -log_alpha[..., None], log_alpha)


def token(inputs: dict[str, Tensor], place: int) -> dict[str, Tensor]:
    return {name: x if name == "prior" else x[:, place] for name, x in inputs.items()}


def empty_states(batch: int, size: int) -> States:
    return tuple(torch.zeros(batch, 1, size, size, device="cuda") for _ in range(2))


def error(recurrence: Recurrence, inputs: dict[str, Tensor], size: int) -> float:
    """Of the first outputs, relative to their norm."""
    states = empty_states(inputs["v"].shape[0], size)
    first = {name: x if name == "prior" else x[:, :COMPARED] for name, x in inputs.items()}
    expected, _ = recurrence.reference(*(x.double() for x in first.values()))
    y = torch.stack([recurrence.step(token(inputs, place), states) for place in range(COMPARED)], 1)
    return float((y.double() - expected).norm() / expected.norm())


def milliseconds(recurrence: Recurrence, inputs: dict[str, Tensor], size: int, tokens: int) -> float:
    """All tokens, from empty states; the second of two runs."""
    states = empty_states(inputs["v"].shape[0], size)

    def steps() -> None:
        for place in range(STEPS_A_GRAPH):
            recurrence.step(token(inputs, place), states)

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        for state in states:
            state.zero_()
        start.record()
        for _ in range(tokens // STEPS_A_GRAPH):
            graph.replay()
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def measured(wanted: Row, recurrence: Recurrence, inputs: dict[str, Tensor], size: int) -> Row | None:
    """The row with its figures; None, with the reason printed, for a recurrence that fails or is wrong."""
    errors: list[float] = []
    if not runs(lambda: errors.append(error(recurrence, inputs, size)), wanted.kernel):
        return None
    if not errors[0] <= BOUND:
        print(f"D {size}, {wanted.kernel}: error {errors[0]:.1e}: wrong, so not timed", flush=True)
        return None
    taken = milliseconds(recurrence, inputs, size, wanted.tokens)
    return dataclasses.replace(wanted, forward_ms=taken, error=errors[0])


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.6))
    for kernel in dict.fromkeys(row.kernel for row in rows):
        own = [row for row in rows if row.kernel == kernel]
        sizes = [int(row.shape.removeprefix("D ")) for row in own]
        rates = [1e3 * row.batch * row.tokens / row.forward_ms for row in own]
        axis.plot(sizes, rates, marker="o", label=kernel)
    axis.set(xlabel="D (state of D x D)", ylabel="tokens/s", xscale="log", yscale="log")
    shown = sorted({int(row.shape.removeprefix("D ")) for row in rows})
    axis.set_xticks(shown, [str(size) for size in shown])
    axis.minorticks_off()
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=positive, default=[512, 1024, 2048])
    parser.add_argument("--batch", type=positive, default=16)
    parser.add_argument("--tokens", type=positive, default=2048, help=f"a multiple of {STEPS_A_GRAPH}")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks/throughput.csv"))
    arguments = parser.parse_args()
    if arguments.tokens % STEPS_A_GRAPH:
        parser.error(f"--tokens {arguments.tokens} is no multiple of {STEPS_A_GRAPH}")
    if not torch.cuda.is_available():
        parser.exit(2, "this benchmark needs a CUDA device\n")
    marks = stamp()
    try:
        rows = {row.key: row for row in open_for_rows(arguments.output)}
    except (OSError, ValueError) as problem:
        parser.exit(2, f"{problem}\n")
    print(", ".join(marks.values()), flush=True)
    found = recurrences()
    shown = []
    for size in arguments.sizes:
        everything = make_inputs(Shape(arguments.batch, 1, 1, size, size), STEPS_A_GRAPH, "weak")
        for name, recurrence in found.items():
            wanted = Row(
                f"D {size}", arguments.batch, arguments.tokens, "weak", name, 0.0, None, None, None, None, **marks
            )
            row = rows.get(wanted.key)
            if row is None:
                row = measured(wanted, recurrence, {n: everything[n].detach() for n in recurrence.inputs}, size)
                if row is None:
                    continue
                append_row(arguments.output, row)
            rate = 1e3 * row.batch * row.tokens / row.forward_ms
            print(f"D {size}, {name}: {rate:,.0f} tokens/s, error {row.error:.1e}", flush=True)
            shown.append(row)
    if shown:
        plot(shown, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
