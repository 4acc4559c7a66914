"""Group scales inside 8-bit weights, for W4A8: :func:`fold_scales`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from w4gemm.core.errors import kind_of
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.codecs import E2M1_MMA8, EXACT_BINADES
from w4gemm.packing.layouts import WeightComponents, layout_named
from w4gemm.weights.quantize import channel_scales
from w4gemm.weights.weight import QuantizedWeight

_NVFP4 = WeightFormat.parse("nvfp4")


def fold_scales(w: QuantizedWeight) -> tuple[QuantizedWeight, float]:
    """Return a weight for W4A8 products whose group scales are part of the 8-bit weights that are multiplied, and the
    error that rounding them adds.

    Without this, W4A8 multiplies float32 sums by the group scales, and no weight is rounded again. Folded scales cost
    no such multiplications.

    An int4 weight gets e4m3 group scales and a float32 scale for each output channel, as vLLM's CUTLASS kernel has
    them. A channel's scale is its largest group scale / 56. A group's scale is its own over the channel's, rounded to
    e4m3; 56 * 8 is 448, the largest e4m3. The codes do not change.

    An e2m1 weight with e8m0 scales (MXFP4) keeps its format. Its weights become e5m2, in which the 29 binades below a
    row's largest scale are exact. Groups with smaller scales are rounded as e5m2 would round them: to multiples of 0.5
    times the least exact scale, ties to even.

    An NVFP4 weight becomes e2m1_g16_e4m3, in groups of 32 e2m1_g32_e4m3: its scales, times a power of two for each row,
    times its numbers are rounded to e4m3. An error of about 0.02 is usual, beside the 0.1 by which rounding to NVFP4
    changes a weight.

    Args:
        w: an int4 weight with 16-bit scales and without zero points, an e2m1 weight with e8m0 scales, or an NVFP4
            weight, in any layout. Experts are converted one by one.

    Returns:
        (weight, error): the weight in w's layout if that can hold it, else in the canonical one; and the relative RMS
        difference of ``weight.dequantize()`` from ``w.dequantize()``.

    Raises:
        TypeError, ValueError: if w is no such weight.

    Examples:
        >>> folded, error = w4gemm.fold_scales(w4gemm.quantize(torch.randn(512, 1024)))
        >>> str(folded.format), error < 0.05
        ('int4_g128_e4m3', True)
    """
    if not isinstance(w, QuantizedWeight):
        raise TypeError(f"w: wanted a QuantizedWeight, got {kind_of(w)}")
    if E2M1_MMA8.holds(w.format):
        format, fold = w.format, _within_range
    elif w.format == replace(_NVFP4, group_size=w.format.group_size):
        format, fold = replace(w.format, scale="e4m3"), with_e4m3_scales
    elif w.format.has_zero or w.format.scale_dtype.itemsize < 2:
        raise ValueError(f"w: wanted a format without zero points and with 16-bit scales, got {w.format}")
    elif w.format.element != "int4":
        raise ValueError(f"w: wanted int4 elements, got {w.format}: no kernel decodes others for fp8 activations")
    else:
        format, fold = replace(w.format, scale="e4m3"), with_e4m3_scales
    layout = "canonical" if layout_named(w.layout).supports(format) else w.layout
    errors: list[tuple[float, float]] = []
    if not w.experts:
        folded = _folded(w, format, fold, errors).repack(layout)
    else:
        experts = (_folded(w.expert(e), format, fold, errors) for e in range(w.experts))
        folded = QuantizedWeight.stack(experts, w.experts, layout)
    wrong, whole = (sum(part) for part in zip(*errors, strict=True))
    return folded, (wrong / whole) ** 0.5 if whole else 0.0


_Fold = Callable[[WeightComponents, WeightFormat], WeightComponents]


def _folded(
    w: QuantizedWeight, format: WeightFormat, fold: _Fold, errors: list[tuple[float, float]]
) -> QuantizedWeight:
    """Return a folded weight without experts; append its squared error and the square of w to ``errors``."""
    tensors = layout_named("canonical").pack(fold(w.parts(), format), format)
    folded = QuantizedWeight(format, w.n, w.k, "canonical", tensors, w.perm, activations=w.activations)
    before = w.dequantize()
    errors.append(((folded.dequantize() - before).square().sum().item(), before.square().sum().item()))
    return folded


def with_e4m3_scales(parts: WeightComponents, format: WeightFormat) -> WeightComponents:
    """Return a weight as :func:`fold_scales` rounds it: the same codes, e4m3 scales, and scales of channels.

    Args:
        parts: of an int4 weight with 16-bit scales, or of one in NVFP4.
        format: format of the result, with e4m3 scales.
    """
    scales = parts.scales.float()
    channels = channel_scales(scales, format)
    if parts.channels is not None:  # e4m3 scales are multiplied by a power of two, lest they are rounded again
        fraction, exponent = torch.frexp(channels)
        channels = torch.exp2((exponent - (fraction == 0.5).int()).float())
    scales = (scales / channels[:, None]).to(format.scale_dtype)
    channels = channels if parts.channels is None else channels * parts.channels
    return WeightComponents(parts.codes, scales, None, channels)


def _within_range(parts: WeightComponents, format: WeightFormat) -> WeightComponents:
    """Return e2m1 weights of which groups with a scale below the range that is exact in e5m2 are rounded to its least
    scale."""
    scales = parts.scales.view(torch.uint8).int()
    least = scales.amax(1, keepdim=True) - (EXACT_BINADES - 1)
    kept = torch.maximum(scales, least)
    factor = format.spread(torch.exp2((scales - kept).float()), parts.codes.shape[1])
    rounded = (2 * format.element_rule.numbers(parts.codes) * factor).round() / 2
    codes = torch.where(factor < 1, format.element_rule.nearest(rounded).to(torch.uint8), parts.codes)
    return WeightComponents(codes, kept.to(torch.uint8).view(format.scale_dtype), None)
