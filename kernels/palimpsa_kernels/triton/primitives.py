"""Small device functions that the kernels share."""

import torch
import triton
import triton.language as tl

if triton.knobs.runtime.interpret:  # the interpreter has no inline assembly

    @triton.jit
    def fast_reciprocal(x):
        return 1.0 / x

else:

    @triton.jit
    def fast_reciprocal(x):
        """1 / x of fp32 by the reciprocal unit, within 1 ulp; 0 above 2^126."""
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def chunk_bounds(table, chunk):
    """First token and end of a chunk; equal at an unused place of the table."""
    row = table + chunk.to(tl.int64) * 4
    return tl.load(row), tl.load(row + 1)


@triton.jit
def chunk_document(table, chunk):
    """A chunk's document, -1 at an unused place of the table, and whether the chunk is its first."""
    row = table + chunk.to(tl.int64) * 4
    return tl.load(row + 2), tl.load(row + 3)


def matrix_dtype(dtype: torch.dtype) -> tl.dtype:
    """Of operands of matrix products: bf16 for bf16 inputs, whose own rounding is as large."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
