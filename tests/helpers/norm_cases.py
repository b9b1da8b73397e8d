"""Cases of `gated_rms_norm`, and its definition in float64."""

import torch

CASES = {
    # gate, groups of so many channels, pieces that `total` brings together (None: whole groups)
    "one group": (True, 24, None),
    "groups": (True, 8, None),
    "no gate": (False, 24, None),
    "a group in two pieces": (True, 24, (10, 14)),
    "groups of equal pieces": (True, 12, (6, 6, 6, 6)),
}


def norm_inputs(channels=24, rows=(2, 5), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(*rows, channels, generator=generator).to(dtype) for _ in range(2))
    return {"x": 3 * x, "z": 2 * z, "weight": 1 + torch.randn(channels, generator=generator).to(dtype)}


def over_pieces(group_size, segments):
    """What the sum over ranks does, with all pieces on one: every piece gets the sum of its group's."""
    ends = torch.tensor(segments).cumsum(0)
    group = (ends - 1) // group_size
    same = (group[:, None] == group[None, :]).float()
    return lambda sums: sums @ same.to(sums)


def norm_definition(x, z, weight, *, eps, group_size):
    gated = x if z is None else x * z / (1 + (-z).exp())
    grouped = gated.unflatten(-1, (-1, group_size))
    return (grouped / (grouped.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * weight


def norm_results(function, inputs, case, *, device="cpu", dtype=None, pieces=True):
    """y and the gradients to x, z and weight of a fixed random combination of it, in float64."""
    gate, group_size, segments = CASES[case]
    leaves = {n: t.to(device, dtype).clone().requires_grad_() for n, t in inputs.items() if gate or n != "z"}
    options = {"eps": 0.1, "group_size": group_size}
    if pieces and segments is not None:
        options |= {"segments": segments, "total": over_pieces(group_size, segments)}
    y = function(leaves["x"], leaves.get("z"), leaves["weight"], **options)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(inputs["weight"].dtype)
    y.backward(seed.to(y))
    return {"y": y.detach().double().cpu()} | {f"d{n}": t.grad.double().cpu() for n, t in leaves.items()}


def norm_errors(result, expected):
    return {n: float((result[n] - e).norm() / e.norm()) for n, e in expected.items()}
