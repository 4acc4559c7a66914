"""PyTorch's matmul on CPUs: the dtype in which it is fast, and operands that it reads without reading past them."""

from __future__ import annotations

import functools

import torch

_COLUMNS = 32


@functools.cache
def fast_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which this CPU multiplies matrices of ``dtype``: float32 for a 16-bit dtype whose matmul is
    slower.

    float16 is several times slower on most CPUs. bfloat16 is so without AVX-512, AMX or Arm's bf16 instructions, where
    oneDNN leaves it to a loop of PyTorch's: 64 tokens of 4096 x 4096 took 44 times as long as float32 on an EPYC with
    AVX2 (PyTorch 2.13, one thread, 2026-11-28).
    """
    if dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # no public function says so
        return dtype if supported else torch.float32
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def may_round_float32() -> bool:
    """True if the user lets products of float32 be computed in bf16: by ``set_float32_matmul_precision("medium")`` of
    torch or, from PyTorch 2.9 on, ``torch.backends.mkldnn.matmul.fp32_precision = "bf16"``."""
    try:
        return torch.get_float32_matmul_precision() == "medium"
    except RuntimeError:  # it refuses to answer after the second one
        return torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a (m, k) @ b (k, n) in their dtype, rounded once, written to ``out`` if given."""
    dtype = a.dtype if a.is_cuda else fast_dtype(a.dtype)
    if dtype == a.dtype:
        return torch.mm(whole_columns(a, -1), whole_columns(b, -2), out=out)
    d = torch.mm(a.to(dtype), b.to(dtype))
    return d.to(a.dtype) if out is None else out.copy_(d)


def whole_columns(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Return t with zeros at the end of the dimension (-1 or -2) that a matmul sums over, or t itself.

    On CPUs with AMX PyTorch's matmul of 16-bit numbers reads whole multiples of 32 columns, and so a NaN of the next
    row or beside the tensor (PyTorch 2.13, from 16 rows on). Elsewhere nothing is added.
    """
    missing = -t.shape[dim] % _COLUMNS
    if t.is_cuda or t.dtype.itemsize > 2 or not missing:
        return t
    return torch.nn.functional.pad(t, (0, missing) if dim == -1 else (0, 0, 0, missing))
