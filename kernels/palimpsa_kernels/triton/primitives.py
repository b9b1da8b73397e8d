"""Small device functions that the kernels share."""

import torch
import triton
import triton.language as tl

# The assembly below relies on how a tile [BLOCK_K, BLOCK_V] of fp32 lies in a warp: 4 columns in a thread, the columns
# over BLOCK_V / 4 lanes, 4 or 8, the rows over the other lanes and then over registers. `layout_fits` checks it.
#
# ROW_SUMS: two rows of a thread, by the tensor cores. To m16n8k8 four lanes' columns are one row of 8; the vector
# takes the place of the 8 columns. Where a row lies on 8 lanes, its two halves meet in the last lines.
PRODUCTS = """{
.reg .pred p;
.reg .b32 a<8>, b<4>, h;
.reg .f32 t;
mov.b32 a0, $8; mov.b32 a1, $9; mov.b32 a2, $10; mov.b32 a3, $11;
mov.b32 a4, $12; mov.b32 a5, $13; mov.b32 a6, $14; mov.b32 a7, $15;
mov.b32 b0, $16; mov.b32 b1, $17; mov.b32 b2, $18; mov.b32 b3, $19;
mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
    {$0, $1, $2, $3}, {a0, a4, a1, a5}, {b0, b1}, {0f00000000, 0f00000000, 0f00000000, 0f00000000};
mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
    {$0, $1, $2, $3}, {a2, a6, a3, a7}, {b2, b3}, {$0, $1, $2, $3};
"""
HALVES = """
and.b32 h, $24, 16;
setp.ne.u32 p, h, 0;
selp.f32 $0, $1, $0, p;
selp.f32 $2, $3, $2, p;
shfl.sync.bfly.b32 t, $0, 4, 31, 0xffffffff;
add.f32 $0, $0, t;
shfl.sync.bfly.b32 t, $2, 4, 31, 0xffffffff;
add.f32 $2, $2, t;
"""
BOTH_ROWS = "mov.f32 $4, $2; mov.f32 $5, $2; mov.f32 $6, $2; mov.f32 $7, $2; }"
ROW_SUMS_4, ROW_SUMS_8 = tl.constexpr(PRODUCTS + BOTH_ROWS), tl.constexpr(PRODUCTS + HALVES + BOTH_ROWS)
ROW_SUMS_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 8 + ["f"] * 16 + ["r"] * 8))
# COLUMN_SUMS of two tiles: at each step a lane keeps half of its sums and sends the others to the lane across.
FIRST_STEPS = """{
.reg .pred p;
.reg .b32 bit;
.reg .f32 keep<4>, send<4>;
and.b32 bit, $12, %(upper)d;
setp.ne.u32 p, bit, 0;
selp.f32 send0, $4, $8, p; selp.f32 send1, $5, $9, p; selp.f32 send2, $6, $10, p; selp.f32 send3, $7, $11, p;
selp.f32 keep0, $8, $4, p; selp.f32 keep1, $9, $5, p; selp.f32 keep2, $10, $6, p; selp.f32 keep3, $11, $7, p;
shfl.sync.bfly.b32 send0, send0, 16, 31, 0xffffffff; shfl.sync.bfly.b32 send1, send1, 16, 31, 0xffffffff;
shfl.sync.bfly.b32 send2, send2, 16, 31, 0xffffffff; shfl.sync.bfly.b32 send3, send3, 16, 31, 0xffffffff;
add.f32 keep0, keep0, send0; add.f32 keep1, keep1, send1; add.f32 keep2, keep2, send2; add.f32 keep3, keep3, send3;
and.b32 bit, $12, %(lower)d;
setp.ne.u32 p, bit, 0;
selp.f32 send0, keep0, keep2, p; selp.f32 send1, keep1, keep3, p;
selp.f32 keep0, keep2, keep0, p; selp.f32 keep1, keep3, keep1, p;
shfl.sync.bfly.b32 send0, send0, 8, 31, 0xffffffff; shfl.sync.bfly.b32 send1, send1, 8, 31, 0xffffffff;
add.f32 $0, keep0, send0; add.f32 $1, keep1, send1;
"""
LAST_STEP = """
and.b32 bit, $12, 1;
setp.ne.u32 p, bit, 0;
selp.f32 send0, $0, $1, p; selp.f32 keep0, $1, $0, p;
shfl.sync.bfly.b32 send0, send0, 4, 31, 0xffffffff;
add.f32 $0, keep0, send0;
mov.f32 $1, $0;
"""
LAST_COPIES = "mov.f32 $2, $0; mov.f32 $3, $1; }"
COLUMN_SUMS_4 = tl.constexpr(FIRST_STEPS % {"upper": 4, "lower": 2} + LAST_STEP + LAST_COPIES)
COLUMN_SUMS_8 = tl.constexpr(FIRST_STEPS % {"upper": 2, "lower": 1} + LAST_COPIES)
COLUMN_SUMS_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 4 + ["f"] * 8 + ["r"] * 4))

if triton.knobs.runtime.interpret:  # the interpreter has no inline assembly

    @triton.jit
    def fast_reciprocal(x):
        return 1.0 / x

    @triton.jit
    def anew(x):
        return x

    @triton.jit
    def tensor_core_row_sums(tile, vector, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
        return tl.broadcast_to(tl.sum(tile * vector[None, :], axis=1)[:, None], [BLOCK_K, BLOCK_V // 4])

    @triton.jit
    def column_sums(a, b, BLOCK_V: tl.constexpr):
        QUADS: tl.constexpr = BLOCK_V // 4
        KEPT: tl.constexpr = BLOCK_V // 16
        sums = tl.reshape(tl.join(tl.sum(a, axis=0), tl.sum(b, axis=0)), [QUADS, 4 // KEPT, KEPT, 2])
        return tl.reshape(tl.permute(sums, (3, 1, 0, 2)), [8 // KEPT, QUADS, KEPT])

else:

    @triton.jit
    def fast_reciprocal(x):
        """1 / x of fp32 by the reciprocal unit, within 1 ulp; 0 above 2^126."""
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def anew(x):
        """x, of which the compiler does not know: what is made from it is made there, not kept in registers before."""
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def tensor_core_row_sums(tile, vector, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
        QUADS: tl.constexpr = BLOCK_V // 4
        ASSEMBLY: tl.constexpr = ROW_SUMS_4 if QUADS == 4 else ROW_SUMS_8
        vector = tl.broadcast_to(vector[None, :], tile.shape)
        column = tl.broadcast_to(tl.arange(0, BLOCK_V)[None, :], tile.shape)
        sums = tl.inline_asm_elementwise(
            ASSEMBLY, ROW_SUMS_CONSTRAINTS, [tile, vector, column], dtype=tl.float32, is_pure=True, pack=8
        )
        even, _ = tl.split(tl.reshape(sums, [BLOCK_K, BLOCK_V // 2, 2]))
        first, _ = tl.split(tl.reshape(even, [BLOCK_K, QUADS, 2]))
        return first

    @triton.jit
    def column_sums(a, b, BLOCK_V: tl.constexpr):
        """Sums of the columns of a and b, each once in a warp: [2 * 4 / n, BLOCK_V / 4, n] with n = BLOCK_V / 16.

        Element (r, c, i) is column 4 c + r n + i of a, and in the second half of the rows of b.
        """
        QUADS: tl.constexpr = BLOCK_V // 4
        KEPT: tl.constexpr = BLOCK_V // 16
        ROWS: tl.constexpr = 8 // KEPT
        ASSEMBLY: tl.constexpr = COLUMN_SUMS_4 if QUADS == 4 else COLUMN_SUMS_8
        row = tl.broadcast_to(tl.arange(0, ROWS)[:, None], a.shape)
        sums = tl.inline_asm_elementwise(
            ASSEMBLY, COLUMN_SUMS_CONSTRAINTS, [a, b, row], dtype=tl.float32, is_pure=True, pack=4
        )
        if QUADS == 4:
            sums, _ = tl.split(tl.reshape(sums, [ROWS, 2 * QUADS, 2]))
            sums, _ = tl.split(tl.reshape(sums, [ROWS, QUADS, 2]))
            return tl.reshape(sums, [ROWS, QUADS, 1])
        else:
            sums, _ = tl.split(tl.permute(tl.reshape(sums, [ROWS, QUADS, 2, 2]), (0, 1, 3, 2)))
            return sums


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


@triton.jit
def row_sums(tile, vector, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EXACT: tl.constexpr):
    """tile [BLOCK_K, BLOCK_V] @ vector, once for every 4 columns: [BLOCK_K, copies].

    In fp32, or with `tile` cut to tf32 and a vector that is exact in it.
    """
    if EXACT:
        QUAD: tl.constexpr = 4 if BLOCK_V >= 4 else BLOCK_V
        # Values of one thread are summed before lanes.
        sums = tl.sum(tl.sum(tl.reshape(tile * vector[None, :], [BLOCK_K, BLOCK_V // QUAD, QUAD]), axis=2), axis=1)
        COPIES: tl.constexpr = row_copies(BLOCK_V)
        return tl.broadcast_to(sums[:, None], [BLOCK_K, COPIES])
    else:
        return tensor_core_row_sums(tile, vector, BLOCK_K, BLOCK_V)


@triton.constexpr_function
def row_copies(BLOCK_V):
    """Lanes over which the columns of a tile lie, at least 2."""
    return max(2, min(32, BLOCK_V // 4))


@triton.constexpr_function
def row_lanes(BLOCK_K, BLOCK_V):
    """Lanes over which the rows of a tile lie."""
    return min(BLOCK_K, max(1, 32 // max(1, BLOCK_V // 4)))


@triton.jit
def thread_sums(tile, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Partial sums over a tile's rows [lanes, BLOCK_V]: of those that a thread holds itself."""
    LANES: tl.constexpr = row_lanes(BLOCK_K, BLOCK_V)
    return tl.sum(tl.reshape(tile, [BLOCK_K // LANES, LANES, BLOCK_V]), axis=0)
