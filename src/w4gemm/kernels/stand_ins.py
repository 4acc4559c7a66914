"""Stand-ins for the tensors of a launch, with dtypes and symbolic shapes, for ``cute.compile``: :func:`contiguous`,
:func:`rows`. The DSL is imported when one is made."""

from __future__ import annotations

from typing import Any

import torch

from w4gemm.packing.codecs import KINDS

DTYPES = {kind: dtype for dtype, kind in KINDS.items()}
"""dtypes of x by their names in device code."""


def contiguous(dtype: torch.dtype, *shape: Any, align: int | None = None) -> Any:
    """Return a contiguous tensor. align: bytes that its address is a multiple of; None for those of an element."""
    from cutlass.cute.runtime import make_fake_compact_tensor

    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(_dsl_dtype(dtype), shape, stride_order=order, assumed_align=align)


def rows(dtype: torch.dtype, *shape: Any, step: int = 1) -> Any:
    """Return contiguous rows of any strides. Their addresses and strides are multiples of ``step`` elements."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    strides = *(cute.sym_int64(divisibility=step) for _ in shape[:-1]), 1
    return make_fake_tensor(_dsl_dtype(dtype), shape, strides, assumed_align=step * dtype.itemsize)


def _dsl_dtype(dtype: torch.dtype) -> Any:
    import cutlass

    return {
        torch.float16: cutlass.Float16,
        torch.bfloat16: cutlass.BFloat16,
        torch.float32: cutlass.Float32,
        torch.float8_e4m3fn: cutlass.Float8E4M3FN,
        torch.uint8: cutlass.Uint8,
        torch.int32: cutlass.Int32,
        torch.int64: cutlass.Int64,
    }[dtype]
