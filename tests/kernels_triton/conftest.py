"""Without a CUDA device the kernels run under Triton's interpreter, which must be chosen before they are imported.

The interpreter cuts fp32 to bf16 where a GPU rounds, takes integers for bit patterns of bf16 and multiplies such
patterns as they are; this is put right here, so that the bounds of a GPU hold.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_cast, plain_dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def to_float(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounding_cast(builder: InterpreterBuilder, source: TensorHandle, target: tl.dtype) -> TensorHandle:
        if target.scalar == tl.bfloat16 and source.dtype.scalar != tl.bfloat16:
            data = np.ascontiguousarray(source.data.astype(np.float32))
            return TensorHandle(torch.from_numpy(data).bfloat16().view(torch.uint16).numpy(), tl.bfloat16)
        return plain_cast(builder, source, target)

    def float_dot(builder: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object) -> TensorHandle:
        return plain_dot(builder, to_float(a), to_float(b), *rest)

    InterpreterBuilder.cast_impl = rounding_cast
    InterpreterBuilder.create_dot = float_dot
    for name in ("create_fp_trunc", "create_fp_ext"):
        setattr(InterpreterBuilder, name, lambda builder, source, target: builder.cast_impl(source, target))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory holds NaN, so that whatever reads it shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
