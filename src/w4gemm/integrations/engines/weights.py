"""A weight from the tensors that an engine has loaded, rows after rows, so that little memory is needed beside it.

An engine holds the 4-bit numbers of a layer as its checkpoint does: :func:`gptq`, :func:`awq`, :func:`rowwise` and
:func:`floats` say what such tensors mean, and :func:`packed` makes a weight. Those of experts have a file of their own,
stacked.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from w4gemm.checkpoints.awq import ORDER
from w4gemm.checkpoints.module_tensors import SYMMETRIC
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.core.problem import Device
from w4gemm.integrations.engines.loading import unloaded
from w4gemm.packing.bits import unpack
from w4gemm.packing.layouts import WeightComponents, layout_for, layout_named
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.packing.repack import Matrix, pack_rows
from w4gemm.weights.act_order import sorting_perm
from w4gemm.weights.fold import with_e4m3_scales
from w4gemm.weights.make import check_range
from w4gemm.weights.weight import QuantizedWeight

SCALES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Scale rules of 16-bit scales by their dtype."""
_HELD = {**SCALES, torch.float32: "bf16"}
"""Scale rules of the scales that engines hold. float32 is rounded to bf16, as engines' own W4A8 kernels do."""
_EIGHTS = (0x77777777, 0x88888888 - 2**32)
"""Words of eight zero points of 8, as version 1 and version 2 of GPTQ store them."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of one weight (n, k) in an engine's tensors.

    Attributes:
        rows: return codes, scales and zero points of the rows from ``start`` to before ``stop``, multiples of 8 or n.
        g_idx: integers (k,), the group of each column; None if columns are in order.
        misfit: why the tensors do not fit one another, or the empty string.
    """

    n: int
    k: int
    format: WeightFormat
    device: torch.device
    rows: Callable[[int, int], WeightComponents]
    g_idx: torch.Tensor | None = None
    misfit: str = ""


def gptq(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor | None,
    group_size: int,
    *,
    g_idx: torch.Tensor | None = None,
    added: int = 1,
) -> Numbers:
    """Return the numbers of GPTQ's tensors.

    Args:
        qweight: int32 (k / 8, n).
        scales: (groups, n).
        qzeros: int32 (groups, n / 8); None if the weight is symmetric.
        group_size: -1 for one group.
        added: what is added to a stored zero point: 1 in version 1 of the format, 0 in version 2.
    """
    _check_dtype("qweight", qweight, torch.int32)
    _check_dtype("qzeros", qzeros, torch.int32)
    n, k = qweight.shape[1], 8 * qweight.shape[0]
    format = _format(group_size, scales, qzeros)
    groups = format.groups(k)
    misfit = _misfit(format, k, scales=(scales, (groups, n)), qzeros=(qzeros, (groups, -(-n // 8))))

    def rows(start: int, stop: int) -> WeightComponents:
        codes = unpack(qweight[:, start:stop].T, format.bits)
        if qzeros is None:
            return _components(format, codes, scales[:, start:stop].T, None)
        stored = unpack(qzeros[:, start // 8 : -(-stop // 8)], format.bits)[:, : stop - start].T
        if added and (stored == 15).any():
            raise ValueError("zero points are stored as 15, which in version 1 of GPTQ means 0 or 16; 16 is not held")
        return _components(format, codes, scales[:, start:stop].T, stored + added)

    return Numbers(n, k, format, qweight.device, rows, g_idx, misfit)


def awq(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor | None, group_size: int) -> Numbers:
    """Return the numbers of AWQ's tensors: qweight int32 (k, n / 8), scales (groups, n), qzeros int32 (groups, n / 8)
    or None."""
    _check_dtype("qweight", qweight, torch.int32)
    _check_dtype("qzeros", qzeros, torch.int32)
    n, k = 8 * qweight.shape[1], qweight.shape[0]
    format = _format(group_size, scales, qzeros)
    groups = format.groups(k)
    misfit = _misfit(format, k, scales=(scales, (groups, n)), qzeros=(qzeros, (groups, n // 8)))

    def rows(start: int, stop: int) -> WeightComponents:
        words = slice(start // 8, -(-stop // 8))
        codes = unpack(qweight[:, words], format.bits, ORDER).T
        zeros = None if qzeros is None else unpack(qzeros[:, words], format.bits, ORDER).T
        return _components(format, codes, scales[:, start:stop].T, zeros)

    return Numbers(n, k, format, qweight.device, rows, misfit=misfit)


def rowwise(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    *,
    g_idx: torch.Tensor | None = None,
) -> Numbers:
    """Return the numbers of tensors that hold rows after rows: compressed-tensors, W4AFP8.

    Args:
        codes: int32 (n, k / 8), eight codes q + 8 a word; or int8 (n, k / 2), two signed q a byte, the lower first.
        scales: (n, groups).
        zeros: int32 (n / 8, groups), eight zero points of a column a word; None if the weight is symmetric.
        group_size: -1 for one group.
    """
    _check_dtype("codes", codes, torch.int32, torch.int8)
    _check_dtype("zeros", zeros, torch.int32)
    format, signed = _format(group_size, scales, zeros), codes.dtype == torch.int8
    n, k = codes.shape[0], codes.shape[1] * (2 if signed else 8)
    groups = format.groups(k)
    misfit = _misfit(format, k, scales=(scales, (n, groups)), zeros=(zeros, (-(-n // 8), groups)))

    def rows(start: int, stop: int) -> WeightComponents:
        unpacked = unpack(codes[start:stop], format.bits)
        if signed:
            unpacked = unpacked ^ SYMMETRIC  # two's complement of q to q + 8
        z = None if zeros is None else unpack(zeros[start // 8 : -(-stop // 8)].T, format.bits).T[: stop - start]
        return _components(format, unpacked, scales[start:stop], z)

    return Numbers(n, k, format, codes.device, rows, g_idx, misfit)


def floats(codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | None = None) -> Numbers:
    """Return the numbers of 4-bit floats: NVFP4 or MXFP4.

    Args:
        codes: uint8 (n, k / 2), the even column in the low nibble.
        scales: float8_e4m3fn (n, k / 16), or float8_e8m0fnu (n, k / 32).
        factor: float32, which multiplies the weights of NVFP4: one number, or one for each row; None for MXFP4.
    """
    n, k = codes.shape[0], 2 * codes.shape[1]
    format = WeightFormat.parse("mxfp4" if factor is None else "nvfp4")
    _check_dtype("codes", codes, torch.uint8)
    _check_dtype("scales", scales, format.scale_dtype)
    misfit = _misfit(format, k, scales=(scales, (n, format.groups(k))))
    if factor is not None and factor.numel() not in (1, n):
        raise ValueError(f"factor: wanted one number, or one for each of {n} rows, got {factor.numel()}")
    channels = None if factor is None else factor.float().reshape(-1).expand(n)

    def rows(start: int, stop: int) -> WeightComponents:
        factors = None if channels is None else channels[start:stop].contiguous()
        return WeightComponents(unpack(codes[start:stop], format.bits), scales[start:stop].contiguous(), None, factors)

    return Numbers(n, k, format, codes.device, rows, misfit=misfit)


def check_unused_zeros(qzeros: torch.Tensor) -> None:
    """Raise ValueError unless GPTQ's zero points of a symmetric weight are 8, in either version of the format, or the
    engine has loaded none."""
    if qzeros.dtype != torch.int32 or unloaded(qzeros) == 1 or any((qzeros == word).all() for word in _EIGHTS):
        return
    stored = unpack(qzeros.data, 4)
    came = f"{int(stored.min())} to {int(stored.max())}"
    raise ValueError(f"qzeros: wanted all 7 or all 8, because the config says that weights are symmetric, got {came}")


def packed(numbers: Numbers, activations: str | None = None, format: WeightFormat | None = None) -> QuantizedWeight:
    """Return the weight in the layout that its device's fastest kernel for these activations reads.

    Memory holds the result and a few MiB beside the engine's tensors.

    Args:
        format: of the weight: that of the numbers, or that with ``scale="e4m3"``, whose group scales are rounded as
            :func:`w4gemm.fold_scales` does; None for the first.

    Raises:
        TypeError, ValueError: for numbers that :meth:`w4gemm.QuantizedWeight.from_codes` refuses.
    """
    if numbers.misfit:
        raise ValueError(numbers.misfit)
    n, k, device = numbers.n, numbers.k, numbers.device
    format = format or numbers.format
    folded = format != numbers.format
    perm = None if numbers.g_idx is None else sorting_perm(numbers.g_idx, format, k, device)

    def rows(start: int, stop: int) -> WeightComponents:
        found = numbers.rows(start, stop)
        found = with_e4m3_scales(found, format) if folded else found
        check_range(format, *found[1:])
        return found if perm is None else found._replace(codes=found.codes[:, perm])

    dtype = torch.float8_e4m3fn if activations == "fp8" else None
    layout = layout_for(Device.of(device), format, dtype)
    tensors = packed_shape(format, layout, n, k).empty(device)
    pack_rows(layout_named(layout), tensors, rows, Matrix(format, n, k))
    return QuantizedWeight(format, n, k, layout, tensors, perm, activations=activations)


def _format(group_size: int, scales: torch.Tensor, zeros: torch.Tensor | None) -> WeightFormat:
    if scales.dtype not in _HELD:
        raise ValueError(f"scales: wanted one of {', '.join(map(str, _HELD))}, got {scales.dtype}")
    return WeightFormat(group_size, "none" if zeros is None else "int", _HELD[scales.dtype])


def _misfit(format: WeightFormat, k: int, **given: tuple[torch.Tensor | None, tuple[int, ...]]) -> str:
    """Return why a tensor does not fit the codes, or the empty string: a single group of scales would otherwise serve
    for all of them, and missing rows would stay unwritten."""
    if format.group_size != PER_COLUMN and k % format.group_size:
        return f"groups of {format.group_size} do not divide {k} input features"
    for name, (t, wanted) in given.items():
        if t is not None and t.shape != wanted:
            return f"{name}: wanted shape {wanted} for {format} of k {k}, got {tuple(t.shape)}"
    return ""


def _check_dtype(name: str, t: torch.Tensor | None, *wanted: torch.dtype) -> None:
    """Raise TypeError if packed numbers lie in words of another dtype."""
    if t is not None and t.dtype not in wanted:
        raise TypeError(f"{name}: wanted {' or '.join(map(str, wanted))}, got {t.dtype}")


def _components(
    format: WeightFormat, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> WeightComponents:
    zeros = None if zeros is None else zeros.contiguous()
    return WeightComponents(codes.contiguous(), scales.to(format.scale_dtype).contiguous(), zeros)
