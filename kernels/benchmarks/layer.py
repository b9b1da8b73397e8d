"""Times what surrounds the scan in a layer of the 2.7B shape on a GPU: activations and skip, gated norm, convolution.

usage: python kernels/benchmarks/layer.py [--tokens 32768]

Each part is timed as it runs in training, as PyTorch operations, and in the other packages that take the call. The
bytes are the counted ones of kernels/palimpsa_kernels/README.md: a share of 100 % means that a part takes no longer
than a copy of as many bytes. Errors are those of tests with the marker gpu, which compare with float64.
"""

import argparse
import os
from collections.abc import Callable

import torch
import triton
from measured import kernel_hash
from palimpsa_kernels import HeadParameters, Importance, causal_conv1d, conv, dispatch, gated_rms_norm, mixing_scan
from palimpsa_kernels import mixing as mixing_module
from palimpsa_kernels import norm as norm_module
from palimpsa_kernels.peers import PEERS
from timing import positive
from torch import Tensor

HEADS, GROUPS, KEY_DIM, VALUE_DIM, WIDTH = 80, 1, 128, 64, 4
CHANNELS = HEADS * VALUE_DIM
Function = Callable[..., Tensor]


def milliseconds(function: Callable[[], object]) -> float:
    return triton.testing.do_bench(function, warmup=50, rep=300, return_mode="median")


def timed(function: Function, leaves: list[Tensor]) -> tuple[float, float]:
    """Milliseconds of forward, and of forward + backward."""
    with torch.no_grad():
        dy = torch.randn_like(function(*leaves))
        forward = milliseconds(lambda: function(*leaves))

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        function(*leaves).backward(dy)

    return forward, milliseconds(both)


def copy_bandwidth() -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-3 * milliseconds(lambda: target.copy_(source)))


def report(name: str, function: Function, leaves: list[Tensor], bytes_moved: int | None, bandwidth: float) -> None:
    """One line; `bytes_moved` are those of forward + backward."""
    forward, both = timed(function, leaves)
    share = "" if bytes_moved is None else f"  {bytes_moved / bandwidth / (1e-3 * both):4.0%} of a copy's speed"
    print(f"{name:44s} forward {forward:7.3f} ms   with backward {both:7.3f} ms{share}", flush=True)


def with_setting(setting: str, function: Function) -> Function:
    def call(*arguments: Tensor) -> Tensor:
        os.environ[dispatch.VARIABLE] = setting
        return function(*arguments)

    return call


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def scans(tokens: int, bandwidth: float) -> None:
    q, k = (random(1, tokens, GROUPS, KEY_DIM) for _ in range(2))
    x, logits = (random(1, tokens, HEADS, VALUE_DIM) for _ in range(2))
    dt = random(1, tokens, HEADS)
    per_head = [random(HEADS, dtype=torch.float32) for _ in range(4)]
    with torch.no_grad():
        per_head[0] -= 4  # steps around 0.02
    prior = torch.ones(HEADS, device="cuda")

    def of(scan: Callable[..., tuple[Tensor, object]], importance: bool) -> Function:
        def run(q: Tensor, k: Tensor, x: Tensor, dt: Tensor, logits: Tensor, *heads: Tensor) -> Tensor:
            given = Importance(logits, heads[3], prior) if importance else None
            return scan(q, k, x, dt, HeadParameters(*heads[:3]), given)[0]

        return run

    def composed(*arguments: object) -> tuple[Tensor, object]:
        return mixing_module.composed(*arguments, initial_state=None, output_final_state=False, cu_seqlens=None)  # type: ignore[arg-type]

    leaves = [q, k, x, dt, logits, *per_head]
    for letter, importance in (("M", False), ("P", True)):
        report(
            f"{letter}: scan, activations, skip",
            with_setting("own", of(mixing_scan, importance)),
            leaves,
            None,
            bandwidth,
        )
        report(f"{letter}: PyTorch operations around the scan", of(composed, importance), leaves, None, bandwidth)
    for name in PEERS["mamba2_scan"]:
        attempt(f"M: {name}", with_setting(name, of(mixing_scan, False)), leaves, bandwidth)


def attempt(name: str, function: Function, leaves: list[Tensor], bandwidth: float) -> None:
    """`report` of a peer, unless its package is missing."""
    try:
        report(name, function, leaves, None, bandwidth)
    except ValueError as error:
        print(f"{name}: {error}")


def norms(tokens: int, bandwidth: float) -> None:
    x, z, weight = random(1, tokens, CHANNELS), random(1, tokens, CHANNELS), random(CHANNELS)
    options = {"eps": 1e-5, "group_size": CHANNELS}
    moved = (6 + 10) * x.numel()
    report("gated norm", lambda *a: gated_rms_norm(*a, **options), [x, z, weight], moved, bandwidth)
    plain = options | {"segments": None, "total": None}
    report("  PyTorch operations", lambda *a: norm_module.in_pytorch(*a, **plain), [x, z, weight], None, bandwidth)


def convolutions(tokens: int, bandwidth: float) -> None:
    leaves = [random(1, tokens, CHANNELS), random(CHANNELS, WIDTH), random(CHANNELS)]
    moved = (4 + 6) * leaves[0].numel()
    report("convolution", with_setting("own", causal_conv1d), leaves, moved, bandwidth)
    report("  PyTorch operations", conv.causal_conv1d, leaves, None, bandwidth)
    for name in PEERS["causal_conv1d"]:
        attempt(f"  {name}", with_setting(name, causal_conv1d), leaves, bandwidth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, default=32768)
    tokens = parser.parse_args().tokens
    if not torch.cuda.is_available():
        parser.exit(2, "this benchmark needs a CUDA device\n")
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, T = {tokens}")
    print(f"Kernel files: {kernel_hash()}; a copy moves {bandwidth / 1e12:.2f} TB/s", flush=True)
    convolutions(tokens, bandwidth)
    norms(tokens, bandwidth)
    scans(tokens, bandwidth)


if __name__ == "__main__":
    main()
