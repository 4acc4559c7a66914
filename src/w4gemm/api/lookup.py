"""Rows of a quantized weight by their ids, as an embedding looks them up: :func:`embedding`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from w4gemm.api.modes import is_plain, is_watched
from w4gemm.api.packed_module import check_dtype
from w4gemm.core.autocast import without_autocast
from w4gemm.core.errors import kind_of, require_dense
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device
from w4gemm.kernels import launcher
from w4gemm.kernels.helpers.embedding_rows import EmbeddingRows
from w4gemm.packing.layouts import layout_named
from w4gemm.packing.repack import Matrix
from w4gemm.weights.components import dequantize_rows
from w4gemm.weights.weight import QuantizedWeight

_IDS = (torch.int32, torch.int64)


def embedding(ids: torch.Tensor, w: QuantizedWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return ``w.dequantize(dtype)[ids]``, bit for bit, without the dense weight: what torch.nn.functional.embedding is
    of a dense one. There are no gradients.

    On Hopper a kernel decodes the rows, of a weight in the layout "mma16" with k a multiple of 8, to 16-bit dtypes. It
    does not synchronize, and CUDA graphs can capture it. Elsewhere PyTorch's operators do.

    Args:
        ids: int32 or int64, any shape, on w's device.
        w: a weight without experts.
        dtype: float32, float16 or bfloat16; None for ``w.dtype``.

    Returns:
        (*ids.shape, k) in ``dtype``, contiguous. The row of an id outside 0 .. n - 1 is NaN on a GPU.

    Raises:
        TypeError, ValueError: for a bad argument; the message names it.
        IndexError: on the CPU, for an id outside 0 .. n - 1.

    Examples:
        >>> w = w4gemm.quantize(torch.randn(1000, 256), "int4_g32")
        >>> rows = w4gemm.embedding(torch.tensor([[3, 999]]), w, torch.float32)
        >>> rows.shape, torch.equal(rows[0, 1], w.dequantize()[999])
        (torch.Size([1, 2, 256]), True)
    """
    if not isinstance(w, QuantizedWeight) or w.experts:
        raise TypeError(f"w: wanted a QuantizedWeight without experts, got {w if w is not None else kind_of(w)}")
    if not isinstance(ids, torch.Tensor) or ids.dtype not in _IDS:
        raise TypeError(f"ids: wanted a tensor of int32 or int64, got {kind_of(ids)}")
    require_dense("ids", ids)
    if ids.device != w.device:
        raise ValueError(f"ids: wanted them on {w.device} like w, got {ids.device}")
    dtype = w.dtype if dtype is None else dtype
    check_dtype(dtype)
    return looked_up(ids, w, dtype)


def looked_up(ids: torch.Tensor, w: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return :func:`embedding` of checked arguments. torch.compile can trace this."""
    facts = w.format.name, w.layout, w.n, w.k, dtype
    if not is_plain(ids) or ids.is_meta or is_watched():
        rows = torch.ops.w4gemm.embedding(ids, list(w.tensors), *facts)
    else:
        rows = _rows(ids, w.tensors, *facts)
    return rows if w.perm is None else rows.index_select(-1, torch.argsort(w.perm))


@without_autocast
def _rows(
    ids: torch.Tensor, tensors: Sequence[torch.Tensor], format: str, layout: str, n: int, k: int, dtype: torch.dtype
) -> torch.Tensor:
    flat, of_weight, device = ids.reshape(-1), _parse_format(format), ids.device
    run = None
    if device.type == "cuda" and layout == "mma16":
        run = launcher(EmbeddingRows.of, device, dtype, of_weight, k, ids.dtype == torch.int64)
    if run is not None:
        out = torch.empty((*ids.shape, k), dtype=dtype, device=device)
        if len(flat):
            run(tensors[0], flat, out.view(-1, k), n, EmbeddingRows.most_ctas(Device.of(device)))
        return out
    if not len(flat):
        return torch.empty((*ids.shape, k), dtype=dtype, device=device)
    flat = flat.long()
    outside = (flat < 0) | (flat >= n)
    if device.type == "cpu" and outside.any():
        raise IndexError(f"ids: wanted ids of 0 .. {n - 1}, got {int(flat[outside][0])}")
    inside = flat.clamp(0, n - 1)
    rows = dequantize_rows(layout_named(layout), tuple(tensors), Matrix(of_weight, n, k), inside, dtype)
    rows = rows if device.type == "cpu" else rows.masked_fill(outside[:, None], torch.nan)
    return rows.view(*ids.shape, k)


def _vmap(info: Any, in_dims: tuple[Any, ...], ids: torch.Tensor, *of_weight: Any) -> tuple[torch.Tensor, int]:
    """Return the rows of a batch of ids, by one call with all of them."""
    if any(dim is not None for dim in in_dims[1]):
        raise NotImplementedError("w: vmap over the tensors of several weights is not implemented")
    return torch.ops.w4gemm.embedding(ids.movedim(in_dims[0], 0), *of_weight), 0


_parse_format = functools.cache(WeightFormat.parse)

_NAME = "w4gemm::embedding"
torch.library.define(
    _NAME, "(Tensor ids, Tensor[] weight, str format, str layout, int n, int k, ScalarType dtype) -> Tensor"
)
torch.library.impl(_NAME, ("cpu", "cuda"))(_rows)
torch.library.register_fake(_NAME)(
    lambda ids, weight, format, layout, n, k, dtype: ids.new_empty((*ids.shape, k), dtype=dtype)
)
torch.library.register_vmap(_NAME, _vmap)
