"""Inputs for the Triton scans by case, and comparisons of outputs, final states and gradients with float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from palimpsa_kernels.reference import palimpsa_reference, ssd_reference
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
DECAYS = ("weak", "medium", "strong", "mixed")
HEAD_AXIS = {"y": 2, "dv": 2, "dbeta": 2, "dlog_alpha": 2, "dprior": 0, "dq": None, "dk": None}


@dataclass(frozen=True)
class Case:
    batch: int = 1
    tokens: int = 21
    heads: int = 2
    groups: int = 1
    key_dim: int = 16
    value_dim: int = 16
    offsets: tuple[int, ...] | None = None
    initial: bool = True
    dtype: torch.dtype = torch.float32
    chunk_size: int | None = 8
    decays: tuple[str, ...] = DECAYS[:1]
    smallest_prior: float = 0.5


def decay_of(kind: str, shape: tuple[int, ...]) -> Tensor:
    weak = -0.1 * torch.rand(shape)
    return {
        "weak": weak,
        "medium": -2 * torch.rand(shape),
        "strong": -5 - 10 * torch.rand(shape),
        "mixed": torch.where(torch.rand(shape) < 0.3, -100 * torch.rand(shape), weak),
    }[kind]


def make_inputs(case: Case) -> tuple[dict[str, Tensor], Tensor | None]:
    """Inputs by name and cu_seqlens, on the device; heads take the case's decays in turn."""
    torch.manual_seed(0)
    b, t, h, g, k, v = case.batch, case.tokens, case.heads, case.groups, case.key_dim, case.value_dim
    documents = b if case.offsets is None else len(case.offsets) - 1
    inputs = {
        "q": torch.randn(b, t, g, k).to(case.dtype),
        "k": torch.randn(b, t, g, k).to(case.dtype),
        "v": torch.randn(b, t, h, v).to(case.dtype),
        "beta": torch.rand(b, t, h, v).to(case.dtype),
        "log_alpha": torch.stack([decay_of(case.decays[i % len(case.decays)], (b, t)) for i in range(h)], 2),
        "prior": case.smallest_prior * (1 + 2 * torch.rand(h)),
    }
    if case.initial:
        inputs |= {"M": torch.randn(documents, h, v, k), "Ibar": torch.rand(documents, h, v, k)}
    offsets = None if case.offsets is None else torch.tensor(case.offsets, dtype=torch.int32, device=DEVICE)
    return {name: x.to(DEVICE) for name, x in inputs.items()}, offsets


def run(
    function: Callable[..., Any],
    inputs: dict[str, Tensor],
    offsets: Tensor | None,
    seeds: list[Tensor],
    **options: Any,
) -> dict[str, Tensor]:
    """Outputs and gradients of a scan in float64, for the given adjoints of its outputs."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    names = ("q", "k", "v", "beta", "log_alpha", "prior") if "beta" in leaves else ("q", "k", "v", "log_alpha")
    initial: Any = tuple(leaves[name] for name in ("M", "Ibar") if name in leaves) or None
    if initial is not None and "beta" not in leaves:
        initial = initial[0]
    y, states = function(
        *(leaves[name] for name in names), scale=0.7, initial_state=initial, cu_seqlens=offsets, **options
    )
    outputs = [y, *(states if isinstance(states, tuple) else (states,))]
    torch.autograd.backward(outputs, [s.to(x) for s, x in zip(seeds, outputs, strict=True)])
    results = dict(zip(("y", "final M", "final Ibar"), outputs, strict=False))
    return {name: x.detach().double() for name, x in results.items()} | {
        f"d{name}": x.grad.double() for name, x in leaves.items() if x.grad is not None
    }


def relative_error(x: Tensor, reference: Tensor, floor: float) -> float:
    return float((x - reference).norm() / reference.norm().clamp_min(floor))


def errors(result: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Of each tensor, and of each head of those that have heads, with a floor of 1e-6 of the whole tensor's norm."""
    found = {}
    for name, expected in reference.items():
        found[name] = relative_error(result[name], expected, 1e-30)
        axis = HEAD_AXIS.get(name, 1)
        if axis is not None:
            floor = 1e-6 * float(expected.norm())
            for head in range(expected.shape[axis]):
                pair = result[name].select(axis, head), expected.select(axis, head)
                found[f"{name} head {head}"] = relative_error(*pair, floor)
    return found


def wrong_results(case: Case, *, ssd: bool = False) -> dict[str, float]:
    """Errors beyond the dtype's bound, of the Triton scan on the case; NaN counts as one."""
    from palimpsa_kernels.triton import chunk_palimpsa, chunk_ssd

    inputs, offsets = make_inputs(case)
    if ssd:
        inputs = {name: x for name, x in inputs.items() if name not in ("beta", "prior", "Ibar")}
    documents = case.batch if offsets is None else len(offsets) - 1
    shape = (case.batch, case.tokens, case.heads, case.value_dim)
    seeds = [torch.randn(shape, device=DEVICE).to(case.dtype).double()]
    state = (documents, case.heads, case.value_dim, case.key_dim)
    seeds += [torch.randn(state, device=DEVICE).double() for _ in range(1 if ssd else 2)]
    double = {name: x.double() for name, x in inputs.items()}
    reference = run(ssd_reference if ssd else palimpsa_reference, double, offsets, seeds)
    options = {"output_final_state": True} | ({} if ssd else {"chunk_size": case.chunk_size})
    result = run(chunk_ssd if ssd else chunk_palimpsa, inputs, offsets, seeds, **options)
    return {name: e for name, e in errors(result, reference).items() if not e <= BOUNDS[case.dtype]}
