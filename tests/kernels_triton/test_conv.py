"""The convolution kernels against the float64 definition: outputs, final state and every gradient."""

import pytest
import torch
from palimpsa_kernels.reference import causal_conv1d_reference

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("offsets", [None, (0, 0, 2, 2, 7, 9)], ids=["rows", "packed"])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("given", [True, False], ids=["bias and state", "neither"])
def test_convolution(offsets: tuple[int, ...] | None, activation: str | None, given: bool) -> None:
    check(offsets, activation, given)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_filters_of_other_widths(width: int) -> None:
    check((0, 3, 9), "silu", True, width=width)


@pytest.mark.parametrize("offsets", [None, (0, 0, 2, 2, 7, 9)], ids=["rows", "packed"])
def test_gradients_across_blocks_of_tokens(offsets: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from palimpsa_kernels.triton import conv

    monkeypatch.setitem(conv.WALK, "BLOCK_T", 4)
    check(offsets, "silu", True)


def check(offsets: tuple[int, ...] | None, activation: str | None, given: bool, width: int = 4) -> None:
    from palimpsa_kernels.triton import causal_conv1d

    torch.manual_seed(0)
    batch, tokens, dim = (2 if offsets is None else 1), 11, 5
    documents = batch if offsets is None else len(offsets) - 1
    inputs = [torch.randn(batch, tokens, dim), torch.randn(dim, width)]
    if given:
        inputs += [torch.randn(dim), torch.randn(documents, dim, width - 1)]
    seeds = torch.randn(batch, tokens, dim), torch.randn(documents, dim, width - 1)
    cu_seqlens = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)

    def run(function, device: str, dtype: torch.dtype, **options) -> list[torch.Tensor]:
        leaves = [x.to(device, dtype).clone().requires_grad_() for x in inputs]
        bias, initial = leaves[2:] if given else (None, None)
        outputs = function(
            *leaves[:2],
            bias,
            activation=activation,
            initial_state=initial,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(device),
            **options,
        )
        torch.autograd.backward(outputs, [s.to(x) for s, x in zip(seeds, outputs, strict=True)])
        return [x.detach().double().cpu() for x in outputs] + [x.grad.double().cpu() for x in leaves]

    expected = run(causal_conv1d_reference, "cpu", torch.float64)
    result = run(causal_conv1d, DEVICE, torch.float32, output_final_state=True)
    for x, reference in zip(result, expected, strict=True):
        torch.testing.assert_close(x, reference, rtol=1e-5, atol=1e-5)
