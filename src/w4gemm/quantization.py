"""From a dense matrix to 4 bits, by rounding to nearest: :func:`quantize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from w4gemm.errors import kind_of
from w4gemm.formats import SYMMETRIC_ZERO, WeightFormat
from w4gemm.packing.layouts import Parts, layout_named
from w4gemm.weight import QuantizedWeight

_LARGEST_E4M3_SCALE = 56
"""8 times as much is 448, the largest e4m3."""


def quantize(
    weight: torch.Tensor,
    format: WeightFormat | str = WeightFormat(),
    *,
    search: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> QuantizedWeight:
    """Round a dense weight to 4 bits (round to nearest).

    Args:
        weight: floating point (n, k), finite.
        format: what to quantize to, or its string form.
        search: try 24 smaller ranges for each group and keep the one with the least squared error; about 25 times
            slower, never worse.
        progress: called as ``progress(rows done, rows)`` after each block of rows.

    Returns:
        The weight in the canonical layout, on ``weight``'s device.

    Raises:
        TypeError, ValueError: if ``weight`` is not a finite floating-point matrix, or has values too large for the
            format's scales (fp16: above 8188).
    """
    format = WeightFormat.of(format)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        raise TypeError(f"weight: wanted a floating-point tensor (n, k), got {kind_of(weight)}")
    if weight.device.type == "meta":
        raise ValueError("weight: wanted one with numbers, got one on the meta device")
    if 0 in weight.shape:
        raise ValueError(f"weight: wanted n >= 1 and k >= 1, got shape {tuple(weight.shape)}")
    if format.has_channels:
        return fold_scales(quantize(weight, replace(format, scale="bf16"), search=search, progress=progress))[0]
    n, k = weight.shape
    rows = max(1, 2**22 // k)
    # up to here every scale, zero point and weight stays finite, rounding included
    limit = format.largest_weight / 8
    blocks = []
    for start in range(0, n, rows):
        block = weight[start : start + rows].detach().float()
        largest = block.abs().amax().item()
        if not largest <= limit:  # also true for NaN
            raise ValueError(
                f"weight: wanted finite values of at most {limit:g} for {format.scale} scales, got {largest:g} in rows "
                f"{start}..{start + len(block) - 1}"
            )
        blocks.append(_quantize_rows(block, format, search))
        if progress is not None:
            progress(min(start + rows, n), n)
    codes, scales = torch.cat([b.codes for b in blocks]), torch.cat([b.scales for b in blocks])
    zeros = torch.cat([b.zeros for b in blocks if b.zeros is not None]) if format.has_zero else None
    return QuantizedWeight.from_codes(format, codes, scales, zeros)


def fold_scales(w: QuantizedWeight) -> tuple[QuantizedWeight, float]:
    """A symmetric weight with e4m3 scales and a float32 scale for each output channel: for W4A8 products that multiply
    codes and group scales in e4m3 (what vLLM's CUTLASS kernel computes). The codes stay as they are.

    A channel's scale is its largest group scale / 56, and a group's that of the group in units of it, rounded to e4m3:
    56 * 8 is 448, the largest e4m3.

    Args:
        w: with 16-bit scales and without zero points, in any layout; of several experts too, one after the other.

    Returns:
        The weight in w's layout if that holds it, else in the canonical one; and its relative error, the root of the
        mean square of the difference to ``w.dequantize()`` over that of ``w.dequantize()``.

    Raises:
        TypeError, ValueError: if w is no such weight.
    """
    if not isinstance(w, QuantizedWeight):
        raise TypeError(f"w: wanted a QuantizedWeight, got {kind_of(w)}")
    if w.format.has_zero or w.format.has_channels:
        raise ValueError(f"w: wanted a format without zero points and with 16-bit scales, got {w.format}")
    format = replace(w.format, scale="e4m3")
    layout = "canonical" if layout_named(w.layout).supports(format) else w.layout
    errors: list[tuple[float, float]] = []
    if not w.experts:
        folded = _folded(w, format, errors).repack(layout)
    else:
        experts = (_folded(w.expert(e), format, errors) for e in range(w.experts))
        folded = QuantizedWeight.stack(experts, w.experts, layout)
    wrong, whole = (sum(part) for part in zip(*errors, strict=True))
    return folded, (wrong / whole) ** 0.5 if whole else 0.0


def _folded(w: QuantizedWeight, format: WeightFormat, errors: list[tuple[float, float]]) -> QuantizedWeight:
    """One weight; its squared error and its own square are appended to ``errors``."""
    codes, scales, *_ = w.parts()
    largest = scales.float().abs().amax(1)
    channels = torch.where(largest > 0, largest / _LARGEST_E4M3_SCALE, 1.0)
    small = (scales.float() / channels[:, None]).to(format.scale_dtype)
    tensors = layout_named("canonical").pack(Parts(codes, small, None, channels), format)
    folded = QuantizedWeight(format, w.n, w.k, "canonical", tensors, w.perm)
    before = w.dequantize()
    errors.append(((folded.dequantize() - before).square().sum().item(), before.square().sum().item()))
    return folded


def _quantize_rows(w: torch.Tensor, format: WeightFormat, search: bool) -> Parts:
    n, k = w.shape
    length, groups = format.group_length(k), format.groups(k)
    # a short last group is filled with its own first element, which keeps its range, and does not count as an error
    tail = groups * length - k
    if tail:
        w = torch.cat((w, w[:, (groups - 1) * length :][:, :1].expand(n, tail)), dim=1)
    w = w.view(n, groups, length)
    is_column = (torch.arange(groups * length, device=w.device) < k).view(groups, length)
    low, high = w.amin(-1), w.amax(-1)
    best: tuple[torch.Tensor, ...] | None = None
    shrinks = [1.0] + [1 - 0.02 * i for i in range(1, 25)] if search else [1.0]
    for shrink in shrinks:
        scales, zeros, codes = _round_groups(w, low * shrink, high * shrink, format)
        error = ((_values(codes, scales, zeros, format) - w) * is_column).square().sum(-1)
        if best is None:
            best = (error, scales, zeros, codes)
            continue
        better = error < best[0]
        best = (
            torch.where(better, error, best[0]),
            torch.where(better, scales, best[1]),
            torch.where(better, zeros, best[2]),
            torch.where(better[..., None], codes, best[3]),
        )
    assert best is not None
    _, scales, zeros, codes = best
    codes = codes.to(torch.uint8).view(n, -1)[:, :k].contiguous()
    zero_dtype = format.zero_dtype
    return Parts(codes, scales.to(format.scale_dtype), None if zero_dtype is None else zeros.to(zero_dtype))


def _round_groups(
    w: torch.Tensor, low: torch.Tensor, high: torch.Tensor, format: WeightFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales and zero points for the range low..high, rounded to what is stored, and the nearest codes; in float32."""

    def stored(t: torch.Tensor) -> torch.Tensor:
        return t.to(format.scale_dtype).float()

    if format.zero == "none":
        # the code range is -8..7: give the end with the larger magnitude the -8
        extreme = torch.where(low.abs() >= high.abs(), low, high)
        scales = stored(torch.maximum((extreme / -8).abs(), torch.minimum(low.abs(), high.abs()) / 7))
        scales = torch.where(extreme > 0, -scales, scales)
        zeros = torch.full_like(scales, SYMMETRIC_ZERO)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scales = stored((high - low) / 15)
        zeros = stored(low)
    safe = torch.where(scales == 0, torch.ones_like(scales), scales)
    if format.zero == "int":
        zeros = (-low / safe).round().clamp(0, 15)
    if format.zero == "float":
        codes = ((w - zeros[..., None]) / safe[..., None]).round().clamp(0, 15)
    else:
        codes = (w / safe[..., None] + zeros[..., None]).round().clamp(0, 15)
    return scales, zeros, codes


def _values(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    if format.zero == "float":
        return codes * scales[..., None] + zeros[..., None]
    return (codes - zeros[..., None]) * scales[..., None]
