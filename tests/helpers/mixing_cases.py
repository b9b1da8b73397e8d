"""Inputs of `mixing_scan`, and its definition in float64 from the step-by-step recurrences."""

import torch
from palimpsa_kernels.mixing import HeadParameters, Importance
from palimpsa_kernels.reference import palimpsa_reference, ssd_reference

HEADS = ("dt_bias", "A_log", "D", "b_scale", "prior")
AXIS_OF_HEADS = {"y": 2, "x": 2, "dt": 2, "logits": 2, "strength": 2, "M": 1, "Ibar": 1, **dict.fromkeys(HEADS, 0)}


def mixing_inputs(
    *, tokens=13, heads=4, groups=2, key_dim=16, value_dim=16, batch=1, states=1, dtype=torch.float32, importance=True,
    initial=True, strength=False,
):  # fmt: skip
    """By name; head 0 forgets slowly, head 1 fast, head 2 beyond the lowest log_alpha, head 3 has tiny and huge dt."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    per_head = torch.tensor([[-3.0, -2.0, 25.0, -8.0], [-4.0, 1.5, 2.0, -1.0]])[:, torch.arange(heads) % 4]
    dt = normal(batch, tokens, heads)
    dt[:, ::3, 3 % heads] += 33
    inputs = {
        "q": normal(batch, tokens, groups, key_dim).to(dtype),
        "k": normal(batch, tokens, groups, key_dim).to(dtype),
        "x": normal(batch, tokens, heads, value_dim).to(dtype),
        "dt": dt.to(dtype),
        "dt_bias": per_head[0].clone(),
        "A_log": per_head[1].clone(),
        "D": normal(heads),
    }
    if importance:
        inputs |= {
            "logits": (3 * normal(batch, tokens, heads, value_dim)).to(dtype),
            "b_scale": normal(heads),
            "prior": 0.5 + torch.rand(heads, generator=generator),
        }
    if strength:
        inputs["strength"] = normal(batch, tokens, heads).to(dtype)
    if initial:
        inputs["M"] = normal(states, heads, value_dim, key_dim)
        if importance:
            inputs["Ibar"] = normal(states, heads, value_dim, key_dim).abs()
    return inputs


def call_mixing(scan, leaves, **options):
    """`scan` with the interface of `mixing_scan`, on inputs by name."""
    importance = Importance(*(leaves[n] for n in ("logits", "b_scale", "prior"))) if "logits" in leaves else None
    initial = tuple(leaves[n] for n in ("M", "Ibar") if n in leaves) or None
    heads = HeadParameters(leaves["dt_bias"], leaves["A_log"], leaves["D"])
    if "strength" in leaves:
        options |= {"strength": leaves["strength"], "scale": leaves["q"].shape[-1] ** -0.5}
    return scan(
        *(leaves[n] for n in ("q", "k", "x", "dt")), heads, importance, initial_state=initial, output_final_state=True,
        **options,
    )  # fmt: skip


def mixing_definition(
    q, k, x, dt, heads, importance, *, initial_state, output_final_state, cu_seqlens, strength=None, scale=1.0
):
    """The equations of the docstring, token by token."""
    dt = dt + heads.dt_bias
    dt = torch.logaddexp(dt, torch.zeros_like(dt))
    log_alpha = torch.maximum(-dt * heads.A_log.exp(), torch.tensor(-100.0, dtype=dt.dtype))
    write = dt if strength is None else 1 / (1 + (-strength).exp())
    v = x * write[..., None]
    if importance is None:
        initial = None if initial_state is None else initial_state[0]
        y, mean = ssd_reference(q, k, v, log_alpha, scale=scale, initial_state=initial, cu_seqlens=cu_seqlens)
        final = (mean,)
    else:
        most = (1 + importance.b_scale.exp()).log()
        beta = most[:, None] * write[..., None] / (1 + (-importance.logits).exp())
        y, final = palimpsa_reference(
            q, k, v, beta, log_alpha, importance.prior, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens
        )
    return y + heads.D[:, None] * x, final


def mixing_results(scan, inputs, *, device="cpu", dtype=None, offsets=None):
    """Outputs and, as d<name>, gradients of a fixed random combination of them, in float64 on the CPU."""
    leaves = {name: x.to(device, dtype).clone().requires_grad_() for name, x in inputs.items()}
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device=device)
    y, final = call_mixing(scan, leaves, cu_seqlens=cu_seqlens)
    outputs = dict(zip(("y", "M", "Ibar"), (y, *final), strict=False))
    generator = torch.Generator().manual_seed(1)
    rounded = inputs["x"].dtype
    seeds = {n: torch.randn(o.shape, generator=generator) for n, o in outputs.items()}
    seeds["y"] = seeds["y"].to(rounded)
    torch.autograd.backward(list(outputs.values()), [seeds[n].to(o) for n, o in outputs.items()])
    results = {name: o.detach() for name, o in outputs.items()}
    results |= {f"d{name}": x.grad for name, x in leaves.items()}
    return {name: x.double().cpu() for name, x in results.items()}


def mixing_errors(result, expected):
    """Largest relative error of each tensor and of each head of it (floor 1e-6 of the tensor's norm), by name."""
    found = {}
    for name, reference in expected.items():
        parts = [(result[name], reference)]
        axis = AXIS_OF_HEADS.get(name.removeprefix("d"))
        if axis is not None and reference.dim() > 1:
            parts += zip(result[name].unbind(axis), reference.unbind(axis), strict=True)
        floor = 1e-6 * float(reference.norm())
        found[name] = max(float((a - b).norm() / b.norm().clamp_min(max(floor, 1e-30))) for a, b in parts)
    return found
