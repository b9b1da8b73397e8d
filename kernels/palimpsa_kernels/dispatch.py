"""Chooses the implementation of a kernel: Triton on CUDA where it is installed and built, PyTorch otherwise.

Other packages' kernels (`palimpsa_kernels.peers`) may stand in for our own on CUDA. The environment variable
PALIMPSA_KERNELS says which:

    auto                  the default: the fastest that keeps the whole contract (`AUTO`)
    own                   our own kernels
    mamba_ssm,fla,...     the first of these that takes the call, our own where none does

What runs, and why, is logged once at INFO.
"""

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from palimpsa_kernels import chunked, conv, peers, ssd, steps

logger = logging.getLogger("palimpsa_kernels")

TRITON_MODULE = "palimpsa_kernels.triton"
VARIABLE = "PALIMPSA_KERNELS"
PYTORCH: dict[str, Callable[..., Any]] = {
    "chunk_palimpsa": chunked.chunk_palimpsa,
    "palimpsa_step": steps.palimpsa_step,
    "chunk_ssd": ssd.chunk_ssd,
    "ssd_step": steps.ssd_step,
    "causal_conv1d": conv.causal_conv1d,
    "causal_conv1d_step": conv.causal_conv1d_step,
}
AUTO: dict[str, tuple[str, ...]] = {"mamba2_scan": (), "causal_conv1d": ()}
"""Peers that `auto` prefers to our own kernels, by function. None as yet: each breaks the contract somewhere
(`Peer.shortcoming`), and none was measured faster."""


@functools.cache
def triton_module() -> ModuleType | None:
    """The package of Triton kernels, or None where Triton or the package is missing."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec(TRITON_MODULE) is None:
        return None
    return importlib.import_module(TRITON_MODULE)


@functools.cache
def implementation(name: str, device_type: str) -> Callable[..., Any]:
    """Our own function behind the public `name` on devices of this type; says once, at INFO, which one it is."""
    function = own_triton(name, device_type)
    backend = "PyTorch" if function is None else "Triton"
    say_once(f"{name} on {torch.device(device_type)} runs in {backend}")
    return function or PYTORCH[name]


def scan_implementation(call: peers.Call) -> Callable[..., Any] | None:
    """What runs a `mixing_scan`; None leaves it to PyTorch operations around our own scan."""
    peer = chosen_peer("mamba2_scan", call) if call.mamba2 else None
    return peer or own_triton("mixing_scan", call.device_type)


def convolution_implementation(call: peers.Call) -> Callable[..., Any]:
    """What runs a `causal_conv1d`."""
    return chosen_peer("causal_conv1d", call) or implementation("causal_conv1d", call.device_type)


def chosen_peer(function: str, call: peers.Call) -> Callable[..., Any] | None:
    """The peer that runs this call, or None for our own kernels.

    Raises:
        ValueError: PALIMPSA_KERNELS names something unknown, or a package that cannot be imported.
    """
    if call.device_type != "cuda":
        return None
    setting = os.environ.get(VARIABLE, "auto")
    return _chosen_peer(function, setting, call)


@functools.cache
def _chosen_peer(function: str, setting: str, call: peers.Call) -> Callable[..., Any] | None:
    reasons = []
    for name in preferred(function, setting):
        peer = peers.PEERS[function].get(name)
        if peer is None:
            continue
        refusal = peer.refuses(call)
        if refusal is None:
            say_once(f"{function} on cuda runs in {name} ({VARIABLE}={setting})")
            return _loaded(name, peer, setting)
        reasons.append(f"{name} takes {refusal}")
    if not reasons and setting == "auto":
        found = [name for name in peers.PEERS[function] if importlib.util.find_spec(name) is not None]
        reasons = [f"{name} is installed, but {peers.PEERS[function][name].shortcoming}" for name in found]
    why = "; ".join([*reasons, f"{VARIABLE}={setting}"])
    say_once(f"{function} on cuda runs in our own kernels ({why})")
    return None


def check_setting() -> None:
    """Refuse a PALIMPSA_KERNELS that no call could follow, before anything runs.

    Raises:
        ValueError: it names something unknown, or a package that is not installed.
    """
    setting = os.environ.get(VARIABLE, "auto")
    if setting in ("auto", "own"):
        return
    for name in preferred("", setting):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"{VARIABLE} is {setting!r}, but {name} is not installed")


def preferred(function: str, setting: str) -> tuple[str, ...]:
    """Names of peers in the order in which a setting prefers them to our own kernels."""
    if setting == "auto":
        return AUTO[function]
    if setting == "own":
        return ()
    names = tuple(name.strip() for name in setting.split(","))
    known = {name for by_name in peers.PEERS.values() for name in by_name}
    for name in names:
        if name in ("auto", "own"):
            raise ValueError(f"{VARIABLE} is {setting!r}: {name} stands alone")
        if name not in known:
            raise ValueError(f"{VARIABLE} is {setting!r}: {name!r} is none of auto, own, {', '.join(sorted(known))}")
    return names


def _loaded(name: str, peer: peers.Peer, setting: str) -> Callable[..., Any]:
    try:
        return peer.load()
    except ImportError as error:
        raise ValueError(f"{VARIABLE} is {setting!r}, but {name} cannot be imported: {error}") from error


def own_triton(name: str, device_type: str) -> Callable[..., Any] | None:
    """Our Triton function of that name, or None where there is none for devices of this type."""
    return getattr(triton_module() if device_type == "cuda" else None, name, None)


@functools.cache
def say_once(message: str) -> None:
    """Log a message at INFO, the first time only."""
    logger.info(message)
