"""The Triton kernels against the float64 recurrences: outputs, final states and every gradient.

Tiny shapes, so that they also run under the interpreter; the tests with the marker gpu take real ones.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from palimpsa_kernels.reference import palimpsa_reference, ssd_reference
from torch import Tensor

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
DECAYS = ("weak", "medium", "strong", "mixed")


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


def decay_of(kind: str, shape: tuple[int, ...]) -> Tensor:
    weak = -0.1 * torch.rand(shape)
    return {
        "weak": weak,
        "medium": -2 * torch.rand(shape),
        "strong": -5 - 10 * torch.rand(shape),
        "mixed": torch.where(torch.rand(shape) < 0.3, -100 * torch.rand(shape), weak),
    }[kind]


def make_inputs(case: Case) -> tuple[dict[str, Tensor], Tensor | None]:
    """Inputs by name; heads take the case's decays in turn."""
    torch.manual_seed(0)
    b, t, h, g, k, v = case.batch, case.tokens, case.heads, case.groups, case.key_dim, case.value_dim
    documents = b if case.offsets is None else len(case.offsets) - 1
    inputs = {
        "q": torch.randn(b, t, g, k).to(case.dtype),
        "k": torch.randn(b, t, g, k).to(case.dtype),
        "v": torch.randn(b, t, h, v).to(case.dtype),
        "beta": torch.rand(b, t, h, v).to(case.dtype),
        "log_alpha": torch.stack([decay_of(case.decays[i % len(case.decays)], (b, t)) for i in range(h)], 2),
        "prior": 0.5 + torch.rand(h),
    }
    if case.initial:
        inputs |= {"M": torch.randn(documents, h, v, k), "Ibar": torch.rand(documents, h, v, k)}
    return inputs, None if case.offsets is None else torch.tensor(case.offsets, dtype=torch.int32)


def run(function, inputs: dict[str, Tensor], offsets: Tensor | None, seeds: list[Tensor], **options):
    """Outputs and gradients of a scan, for the given adjoints of its outputs."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    names = ("q", "k", "v", "beta", "log_alpha", "prior") if "beta" in leaves else ("q", "k", "v", "log_alpha")
    initial = tuple(leaves[name] for name in ("M", "Ibar") if name in leaves) or None
    if initial is not None and "beta" not in leaves:
        initial = initial[0]
    y, states = function(
        *(leaves[name] for name in names), scale=0.7, initial_state=initial, cu_seqlens=offsets, **options
    )
    outputs = [y, *(states if isinstance(states, tuple) else (states,))]
    torch.autograd.backward(outputs, [s.to(x) for s, x in zip(seeds, outputs, strict=True)])
    results = dict(zip(("y", "final M", "final Ibar"), outputs, strict=False))
    return {name: x.detach().double().cpu() for name, x in results.items()} | {
        f"d{name}": x.grad.double().cpu() for name, x in leaves.items()
    }


def relative_error(x: Tensor, reference: Tensor, floor: float) -> float:
    return float((x - reference).norm() / reference.norm().clamp_min(floor))


def errors(result: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Of each tensor, and of each head of those that have heads, with a floor of 1e-6 of the whole tensor's norm."""
    found = {}
    for name, expected in reference.items():
        found[name] = relative_error(result[name], expected, 1e-30)
        axis = {"y": 2, "dv": 2, "dbeta": 2, "dlog_alpha": 2, "dprior": 0}.get(
            name, None if name in ("dq", "dk") else 1
        )
        if axis is not None:
            for head in range(expected.shape[axis]):
                pair = result[name].select(axis, head), expected.select(axis, head)
                found[f"{name} head {head}"] = relative_error(*pair, 1e-6 * float(expected.norm()))
    return found


def check(case: Case, *, ssd: bool = False) -> None:
    from palimpsa_kernels.triton import chunk_palimpsa, chunk_ssd

    inputs, offsets = make_inputs(case)
    if ssd:
        inputs = {name: x for name, x in inputs.items() if name not in ("beta", "prior", "Ibar")}
    documents = case.batch if offsets is None else len(offsets) - 1
    shape = (case.batch, case.tokens, case.heads, case.value_dim)
    seeds = [torch.randn(shape).to(case.dtype).double()]
    seeds += [torch.randn(documents, case.heads, case.value_dim, case.key_dim).double() for _ in range(1 if ssd else 2)]
    double = {name: x.double() for name, x in inputs.items()}
    reference = run(ssd_reference if ssd else palimpsa_reference, double, offsets, seeds)
    options = {"output_final_state": True} if ssd else {"output_final_state": True, "chunk_size": case.chunk_size}
    moved = {name: x.to(DEVICE) for name, x in inputs.items()}
    moved_offsets = None if offsets is None else offsets.to(DEVICE)
    result = run(chunk_ssd if ssd else chunk_palimpsa, moved, moved_offsets, seeds, **options)
    wrong = {name: e for name, e in errors(result, reference).items() if not e <= BOUNDS[case.dtype]}
    assert not wrong, wrong


SMALL = {
    "all decays": Case(heads=4, decays=DECAYS),
    "half precision": Case(heads=2, decays=("weak", "mixed"), dtype=torch.bfloat16, tokens=13),
    "fp16, no initial state": Case(heads=1, dtype=torch.float16, tokens=9, initial=False),
    "packed, empty documents, padding": Case(
        heads=4, groups=2, offsets=(0, 0, 7, 7, 18), key_dim=20, value_dim=18, decays=("mixed", "weak")
    ),
    "rows": Case(batch=2, tokens=9, heads=2, groups=2, key_dim=17, decays=("medium", "strong")),
    "one token": Case(tokens=1, chunk_size=None),
}


@pytest.mark.parametrize("name", SMALL)
def test_palimpsa(name: str) -> None:
    check(SMALL[name])


@pytest.mark.parametrize("name", SMALL)
def test_ssd(name: str) -> None:
    check(SMALL[name], ssd=True)


def test_a_document_does_not_see_the_one_before() -> None:
    from palimpsa_kernels.triton import chunk_palimpsa

    inputs, offsets = make_inputs(Case(offsets=(0, 6, 14), tokens=14, initial=False))
    arguments = {name: x.to(DEVICE) for name, x in inputs.items()}
    before = chunk_palimpsa(*arguments.values(), cu_seqlens=offsets.to(DEVICE), chunk_size=4)
    arguments["v"][:, 5] += 1
    after = chunk_palimpsa(*arguments.values(), cu_seqlens=offsets.to(DEVICE), chunk_size=4)
    assert not torch.equal(before[:, 5], after[:, 5])
    assert torch.equal(before[:, 6:], after[:, 6:])


def test_tokens_that_are_apart_in_memory() -> None:
    """Slices of one projection, as a layer passes them."""
    from palimpsa_kernels.triton import chunk_palimpsa

    inputs, _ = make_inputs(Case(tokens=9, heads=1))
    arguments = {name: x.to(DEVICE) for name, x in inputs.items()}
    expected = chunk_palimpsa(*(arguments[n] for n in ("q", "k", "v", "beta", "log_alpha", "prior")))
    joint = torch.cat([arguments[n].flatten(2) for n in ("v", "k", "q")], 2)
    v, k, q = (x.unflatten(2, (1, -1)) for x in joint.split(16, 2))
    y = chunk_palimpsa(q, k, v, arguments["beta"], arguments["log_alpha"], arguments["prior"])
    assert torch.equal(y, expected)


def test_states_are_run_backwards_exactly_at_a_documents_start() -> None:
    """They grow there by orders of magnitude; the gradient to the initial importance, kept in fp32, shows it."""
    from palimpsa_kernels.triton import chunk_palimpsa

    case = Case(tokens=64, heads=1, dtype=torch.bfloat16, chunk_size=64)
    inputs, _ = make_inputs(case)
    seeds = [torch.randn(1, 64, 1, 16).to(case.dtype).double(), *(torch.randn(1, 1, 16, 16).double() for _ in range(2))]
    reference = run(palimpsa_reference, {name: x.double() for name, x in inputs.items()}, None, seeds)
    moved = {name: x.to(DEVICE) for name, x in inputs.items()}
    result = run(chunk_palimpsa, moved, None, seeds, output_final_state=True, chunk_size=64)
    for name in ("dM", "dIbar", "dprior"):
        assert relative_error(result[name], reference[name], 0.0) < 1e-5, name


def test_gradients_are_the_same_in_every_run() -> None:
    from palimpsa_kernels.triton import chunk_palimpsa

    inputs, _ = make_inputs(Case(heads=2, decays=("weak", "mixed"), initial=False))
    results = []
    for _ in range(2):
        leaves = [x.to(DEVICE).requires_grad_() for x in inputs.values()]
        chunk_palimpsa(*leaves, chunk_size=8).sum().backward()
        results.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


LARGE = {
    f"{shape}, {str(dtype).removeprefix('torch.')}": replace(case, dtype=dtype, decays=DECAYS)
    for dtype in (torch.bfloat16, torch.float32)
    for shape, case in {
        "2.7B": Case(tokens=600, heads=4, key_dim=128, value_dim=64, chunk_size=None),
        "760M": Case(batch=2, tokens=150, heads=4, groups=4, key_dim=96, value_dim=192, chunk_size=None),
        "170M, packed": Case(
            tokens=400, heads=4, groups=2, key_dim=48, value_dim=96, offsets=(0, 0, 65, 65, 64 * 3, 391), chunk_size=128
        ),
        "widest": Case(tokens=100, heads=4, key_dim=256, value_dim=256, initial=False, chunk_size=32),
    }.items()
}


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("ssd", [False, True], ids=["palimpsa", "ssd"])
def test_real_shapes(name: str, ssd: bool) -> None:
    check(LARGE[name], ssd=ssd)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_new_length_compiles_nothing() -> None:
    from palimpsa_kernels.triton import chunk_palimpsa
    from palimpsa_kernels.triton.adjoint import adjoint_kernel
    from palimpsa_kernels.triton.readout import readout_kernel

    def compiled(tokens: int) -> list[int]:
        inputs, _ = make_inputs(Case(tokens=tokens, heads=4, dtype=torch.bfloat16, initial=False))
        leaves = [x.to(DEVICE).requires_grad_() for x in inputs.values()]
        chunk_palimpsa(*leaves, chunk_size=64).sum().backward()
        return [
            len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in (readout_kernel, adjoint_kernel)
        ]

    assert compiled(256) == compiled(640) == compiled(77)
