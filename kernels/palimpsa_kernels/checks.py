"""Input checks of the public functions. Whatever would wait for the device is looked at on the CPU only."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from palimpsa_kernels.activations import LOWEST_LOG_ALPHA

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS = ("silu", None)


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless the condition holds."""
    if not condition:
        raise ValueError(message)


def check_tensors(tensors: Mapping[str, object]) -> None:
    """Each must be a tensor."""
    for name, x in tensors.items():
        require(isinstance(x, Tensor), f"{name} is of type {type(x).__name__}, expected a tensor")


def check_shapes(shapes: Mapping[str, tuple[Tensor, Sequence[int]]]) -> None:
    """Each named tensor must have exactly its shape."""
    check_tensors({name: tensor for name, (tensor, _) in shapes.items()})
    for name, (tensor, shape) in shapes.items():
        require(tuple(tensor.shape) == tuple(shape), f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")


def check_dtypes(inputs: Mapping[str, Tensor], float32: Mapping[str, Tensor]) -> None:
    """The inputs must share one of INPUT_DTYPES, the others be float32; all must be on one device."""
    first_name, first = next(iter(inputs.items()))
    require(first.dtype in INPUT_DTYPES, f"{first_name} has dtype {first.dtype}, expected one of {INPUT_DTYPES}")
    for name, tensor in inputs.items():
        require(tensor.dtype == first.dtype, f"{name} has dtype {tensor.dtype}, but {first_name} has {first.dtype}")
    for name, tensor in float32.items():
        require(tensor.dtype == torch.float32, f"{name} has dtype {tensor.dtype}, expected torch.float32")
    for name, tensor in {**inputs, **float32}.items():
        require(tensor.device == first.device, f"{name} is on {tensor.device}, but {first_name} is on {first.device}")


def check_heads(q: Tensor, v: Tensor, dimensions: int) -> None:
    """q must be [..., G, K] and v [..., H, V] with `dimensions` dimensions, G dividing H, none of the four 0."""
    check_tensors({"q": q, "v": v})
    require(q.dim() == dimensions, f"q has {q.dim()} dimensions, expected {dimensions}")
    require(v.dim() == dimensions, f"v has {v.dim()} dimensions, expected {dimensions}")
    groups, heads = q.shape[-2], v.shape[-2]
    require(
        groups > 0 and heads > 0 and heads % groups == 0,
        f"the number of groups G = {groups} must divide the heads H = {heads}",
    )
    for name, size in (("K", q.shape[-1]), ("V", v.shape[-1])):
        require(size > 0, f"q has shape {tuple(q.shape)} and v {tuple(v.shape)}: {name} must be at least 1")


def check_pair(states: object, name: str) -> None:
    """States of Palimpsa must be (M, Ibar)."""
    require(
        isinstance(states, tuple | list) and len(states) == 2,
        f"{name} must be the pair (M, Ibar), not {_described(states)}",
    )


def _described(x: object) -> str:
    return f"{len(x)} tensors" if isinstance(x, tuple | list) else f"of type {type(x).__name__}"


# NaN goes through the three checks below: it shows in the loss, where training judges it.


def check_prior(prior: Tensor) -> None:
    """The prior importance must be positive."""
    if prior.device.type == "cpu":
        require(not (prior <= 0).any(), "prior must be positive")


def check_beta(beta: Tensor) -> None:
    """The likelihood precision must not be negative."""
    if beta.device.type == "cpu":
        require(not (beta < 0).any(), "beta must not be negative")


def check_log_alpha(log_alpha: Tensor) -> None:
    """Decays must be no growth, and no stronger than the scans take."""
    if log_alpha.device.type == "cpu":
        outside = log_alpha[(log_alpha > 0) | (log_alpha < LOWEST_LOG_ALPHA)].tolist()
        require(not outside, f"log_alpha must lie in [{LOWEST_LOG_ALPHA:g}, 0], but holds {outside[:1]}")


def refuse_second_order(outputs: Iterable[Tensor]) -> None:
    """Backward with create_graph=True through any of these raises: their gradients carry no graph of their own."""
    for x in outputs:
        if x.requires_grad:
            x.register_hook(_refuse_graph)


def _refuse_graph(_: Tensor) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("the scans are differentiable once: backward through them takes no create_graph=True")


def number_of_states(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Check cu_seqlens against x [B, T, ...]; the number N of states: documents, or rows without cu_seqlens."""
    batch, tokens = x.shape[:2]
    if cu_seqlens is None:
        return batch
    check_tensors({"cu_seqlens": cu_seqlens})
    require(batch == 1, f"cu_seqlens packs documents into one row: B must be 1, not {batch}")
    require(cu_seqlens.dtype == torch.int32, f"cu_seqlens has dtype {cu_seqlens.dtype}, expected torch.int32")
    require(
        cu_seqlens.dim() == 1 and len(cu_seqlens) >= 2,
        f"cu_seqlens has shape {tuple(cu_seqlens.shape)}, expected [N + 1] with N >= 1",
    )
    require(cu_seqlens.device == x.device, f"cu_seqlens is on {cu_seqlens.device}, but the inputs are on {x.device}")
    if cu_seqlens.device.type == "cpu":
        require(int(cu_seqlens[0]) == 0, f"cu_seqlens must start at 0, not {int(cu_seqlens[0])}")
        require(bool((cu_seqlens.diff() >= 0).all()), "cu_seqlens must not decrease")
        require(
            int(cu_seqlens[-1]) <= tokens,
            f"cu_seqlens ends at {int(cu_seqlens[-1])}, behind the row's {tokens} tokens",
        )
    return len(cu_seqlens) - 1
