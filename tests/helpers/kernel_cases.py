"""Inputs of the kernels with every kind of decay, and comparisons with the float64 reference."""

import torch

DECAY_CLASSES = ("weak", "medium", "strong", "mixed")  # of heads 0, 1, 2, 3, 4 (weak again), ...
HEAD_DIM = {"q": 2, "k": 2, "v": 2, "beta": 2, "log_alpha": 2, "M": 1, "Ibar": 1, "y": 2}
PALIMPSA_INPUTS = ("q", "k", "v", "beta", "log_alpha", "prior")
SSD_INPUTS = ("q", "k", "v", "log_alpha")


def log_alphas(shape, generator):
    """log_alpha [B, T, H], the heads in turn of DECAY_CLASSES; mixed steps are 0, weak, strong or -100."""
    uniform = torch.rand(shape, generator=generator)
    by_class = {
        "weak": -1e-3 * uniform,
        "medium": -2 * uniform,
        "strong": -5 - 25 * uniform,
        "mixed": torch.stack([0 * uniform, -0.01 * uniform, -16 * uniform, torch.full(shape, -100.0)]),
    }
    kind = torch.randint(4, (1, *shape), generator=generator)
    by_class["mixed"] = by_class["mixed"].gather(0, kind)[0]
    classes = [by_class[DECAY_CLASSES[h % 4]][..., h] for h in range(shape[2])]
    return torch.stack(classes, -1)


def offsets(*values):
    """cu_seqlens of these values."""
    return torch.tensor(values, dtype=torch.int32)


def make_inputs(
    tokens=50, groups=2, heads=4, key_dim=8, value_dim=6, *, batch=1, states=1, dtype=torch.float32, seed=0
):
    """Every tensor that the scans take, by name; M and Ibar are initial states."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    state = (states, heads, value_dim, key_dim)
    inputs = {
        "q": normal(batch, tokens, groups, key_dim).to(dtype),
        "k": normal(batch, tokens, groups, key_dim).to(dtype),
        "v": normal(batch, tokens, heads, value_dim).to(dtype),
        "beta": normal(batch, tokens, heads, value_dim).abs().to(dtype),
        "log_alpha": log_alphas((batch, tokens, heads), generator),
        "prior": 0.5 + torch.rand(heads, generator=generator),
        "M": normal(*state),
        "Ibar": normal(*state).abs(),
    }
    return inputs


def differentiable(inputs, dtype=None):
    """Fresh leaves of the inputs."""
    return {name: x.detach().clone().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}


def with_gradients(outputs, leaves, seed=1):
    """The outputs by name, and the gradients as d<input>, of a fixed random combination of all outputs."""
    generator = torch.Generator().manual_seed(seed)
    loss = 0
    for output in outputs.values():
        loss = loss + (torch.randn(output.shape, generator=generator) * output).sum()
    loss.backward()
    results = {name: output.detach() for name, output in outputs.items()}
    return results | {
        f"d{name}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()
    }


def palimpsa_results(function, inputs, *, dtype=None, initial=True, **settings):
    """Outputs, final states and all gradients of chunk_palimpsa (or, in float64, of the reference)."""
    leaves = differentiable(inputs, dtype)
    if not initial:
        del leaves["M"], leaves["Ibar"]
    state = (leaves["M"], leaves["Ibar"]) if initial else None
    y, (mean, importance) = function(*(leaves[name] for name in PALIMPSA_INPUTS), initial_state=state, **settings)
    return with_gradients({"y": y, "M": mean, "Ibar": importance}, leaves)


def ssd_results(function, inputs, *, dtype=None, initial=True, **settings):
    """Outputs, final state and all gradients of chunk_ssd (or, in float64, of the reference)."""
    leaves = differentiable({name: inputs[name] for name in (*SSD_INPUTS, *(["M"] if initial else []))}, dtype)
    y, mean = function(*(leaves[name] for name in SSD_INPUTS), initial_state=leaves.get("M"), **settings)
    return with_gradients({"y": y, "M": mean}, leaves)


def relative_error(actual, expected, floor=0.0):
    """||actual - expected|| / max(||expected||, floor); 0 where both are 0."""
    difference = (actual.double() - expected.double()).norm()
    if difference == 0:
        return 0.0
    return float(difference / torch.clamp(expected.double().norm(), min=floor))


def assert_close(actual, expected, bound):
    """Each tensor and each head of it (with its own decay class) must agree to the bound."""
    assert actual.keys() == expected.keys()
    for name, reference in expected.items():
        result = actual[name]
        assert result.shape == reference.shape, name
        error = relative_error(result, reference)
        assert error <= bound, f"{name}: relative error {error:.1e}"
        if name == "dprior":  # one number per head, a sum that may cancel: no size of its own to hold it against
            continue
        dim = HEAD_DIM[name.removeprefix("d")]
        floor = 1e-6 * float(reference.double().norm())
        for h in range(reference.shape[dim]):
            error = relative_error(result.select(dim, h), reference.select(dim, h), floor)
            assert error <= bound, f"{name}, head or group {h}: relative error {error:.1e}"


def part_of(results, document, start, end, states=("M", "Ibar")):
    """The results of the tokens from start to end of a packed row, and of that document's states."""
    of_states = {*states, *(f"d{name}" for name in states)}
    of_tokens = {name: x[:, start:end] for name, x in results.items() if name not in of_states and name != "dprior"}
    return of_tokens | {name: results[name][document] for name in of_states}
