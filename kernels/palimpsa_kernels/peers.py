"""Other packages' CUDA kernels behind our interfaces: what they take, and where they fall short of our contract.

Facts read from mamba_ssm 2.3.2.post1, fla-core 0.6.0 and causal_conv1d 1.7.0. fla-core's simple GLA is not among them:
it wants q and k for every head, reads cu_seqlens on the host, and takes the gradient to log_alpha as a difference of
sums, which has no correct digit left where the decay is strong.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from palimpsa_kernels.activations import step_and_decay

if TYPE_CHECKING:
    from palimpsa_kernels.mixing import HeadParameters, Importance

COMPILED_MAMBA1 = "selective_scan_cuda"
MAMBA_CHUNK = 256


class Call(NamedTuple):
    """What a choice depends on."""

    device_type: str
    dtype: torch.dtype
    packed: bool
    states: bool
    """initial states are given, or final ones asked for"""
    long_addresses: bool
    """an element's number does not fit into 31 bits"""
    key_dim: int = 0
    width: int = 0
    channels: int = 0
    mamba2: bool = True
    """Mamba2's scan as it is, without importance, strength and scale"""


def facts(x: Tensor, cu_seqlens: Tensor | None, states: bool, **others: Any) -> Call:
    """The call's facts, from its largest tensor x [B, T, ...]."""
    reach = (x.numel() and sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) >= 2**31
    return Call(x.device.type, x.dtype, cu_seqlens is not None, states, bool(reach), **others)


@dataclass(frozen=True)
class Peer:
    """Attributes:
    load: imports the package and gives a function with the interface of ours; ImportError where that fails.
    refuses: "only ..." for a call that the package cannot take or gets wrong, else None.
    shortcoming: what of our contract it does not keep even where it runs, as the end of "it is installed, but".
    """

    load: Callable[[], Callable[..., Any]]
    refuses: Callable[[Call], str | None]
    shortcoming: str


def document_numbers(tokens: int, cu_seqlens: Tensor) -> Tensor:
    """Each token's document [1, T] int32, from 0; behind the last offset -1."""
    place = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    number = torch.searchsorted(cu_seqlens, place, right=True, out_int32=True) - 1
    return number.masked_fill_(place >= cu_seqlens[-1], -1)[None].to(torch.int32)


def load_mamba_ssm() -> Callable[..., Any]:
    """mamba_ssm's Triton SSD as a `mixing_scan` without importance."""
    absent = COMPILED_MAMBA1 not in sys.modules and importlib.util.find_spec(COMPILED_MAMBA1) is None
    if absent:  # the package imports its compiled Mamba1 kernel first, which its SSD does without
        sys.modules[COMPILED_MAMBA1] = ModuleType(COMPILED_MAMBA1)
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    finally:
        if absent:
            del sys.modules[COMPILED_MAMBA1]

    def scan(
        q: Tensor,
        k: Tensor,
        x: Tensor,
        dt: Tensor,
        heads: "HeadParameters",
        importance: "Importance | None",
        *,
        cu_seqlens: Tensor | None,
        **_others: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        # Its own softplus is log(exp(dt) + 1), which loses small steps.
        step, _ = step_and_decay(dt, heads.dt_bias, heads.A_log)
        numbers = None
        if cu_seqlens is not None:
            numbers = document_numbers(x.shape[1], cu_seqlens)
            step = step.masked_fill(numbers[..., None] < 0, 0.0)
        y = mamba_chunk_scan_combined(x, step, -heads.A_log.exp(), k, q, MAMBA_CHUNK, D=heads.D, seq_idx=numbers)
        return y, ()

    return scan


def mamba_ssm_refuses(call: Call) -> str | None:
    """Products of fp32 inputs are tf32, and states of fp16 inputs are kept in fp16."""
    if call.dtype != torch.bfloat16:
        return "only bf16"
    if call.states:
        return "only calls without initial and final states"
    if call.long_addresses:
        return "only tensors of fewer than 2^31 elements"
    return "only K up to 256" if call.key_dim > 256 else None


def load_causal_conv1d() -> Callable[..., Any]:
    """causal_conv1d's CUDA kernel as our `causal_conv1d` without states."""
    from causal_conv1d import causal_conv1d_fn

    def convolve(
        x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None, cu_seqlens: Tensor | None,
        **_states: Any,
    ) -> Tensor:  # fmt: skip
        numbers = None if cu_seqlens is None else document_numbers(x.shape[1], cu_seqlens)
        return causal_conv1d_fn(x.mT, weight, bias, seq_idx=numbers, activation=activation).mT

    return convolve


def causal_conv1d_refuses(call: Call) -> str | None:
    """It wants channels last, in eights."""
    if call.states:
        return "only calls without initial and final states"
    if not 2 <= call.width <= 4:
        return "only filters of width 2 to 4"
    if call.channels % 8:
        return "only multiples of 8 channels"
    return "only tensors of fewer than 2^31 elements" if call.long_addresses else None


def load_fla() -> Callable[..., Any]:
    """fla-core's Triton convolution as our `causal_conv1d` without states."""
    from fla.modules.causal_conv1d import causal_conv1d as fla_conv1d

    def convolve(
        x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str | None, **_others: Any
    ) -> Tensor:  # fmt: skip
        return fla_conv1d(x, weight, bias, activation=activation)[0]

    return convolve


def fla_refuses(call: Call) -> str | None:
    """It keeps W instead of W - 1 inputs as a state, reads cu_seqlens on the host and leaves padding unwritten."""
    if call.states:
        return "only calls without initial and final states"
    return "only rows without cu_seqlens" if call.packed else None


PEERS: dict[str, dict[str, Peer]] = {
    "mamba2_scan": {
        "mamba_ssm": Peer(
            load_mamba_ssm,
            mamba_ssm_refuses,
            "its gradients to the parameters differ from run to run (atomic sums), its decays are differences of fp32 "
            "sums over 256 tokens, and it tunes itself in the first step",
        )
    },
    "causal_conv1d": {
        "causal_conv1d": Peer(
            load_causal_conv1d,
            causal_conv1d_refuses,
            "its gradients to weight and bias differ from run to run (atomic sums)",
        ),
        "fla": Peer(
            load_fla,
            fla_refuses,
            "it rounds what goes into the activation to the inputs' dtype for its backward pass, and tunes itself in "
            "the first step",
        ),
    },
}
