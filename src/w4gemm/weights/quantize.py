"""Rounding a dense matrix to the nearest: :func:`quantize`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from w4gemm.core.autocast import without_autocast
from w4gemm.core.errors import kind_of, require_bool, require_dense, require_progress
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.layouts import WeightComponents
from w4gemm.weights.components import rounded_products
from w4gemm.weights.weight import QuantizedWeight

_SHRINKS = tuple(1 - 0.02 * i for i in range(1, 25))
"""The ranges that a search tries, as fractions of a group's whole range."""


@without_autocast
def quantize(
    weight: torch.Tensor,
    format: WeightFormat | str = WeightFormat(),
    *,
    search: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> QuantizedWeight:
    """Quantize a dense weight, each number rounded to the nearest. A group whose scale would be 0 in the
    format's dtype becomes zeros (fp16 scales: numbers of 1e-7 and less).

    Args:
        weight: the matrix (n, k) as torch.nn.Linear has it, output features first; floating point, finite, on any
            device. No calibration data is needed, and none is used.
        format: format of the result, or its string: "int4_g128", "int8_col", "int4_g64_zint", "nf4", "mxfp8", ...
        search: True to try 24 smaller ranges for each group and keep the one of least squared error. That takes about
            ten times as long on a CPU, and is never worse.
        progress: called as ``progress(rows done, rows)`` after each block of rows.

    Returns:
        The weight in the canonical layout, on ``weight``'s device. ``repack()`` gives the layout that a kernel reads
        there fastest.

    Raises:
        TypeError, ValueError: if ``weight`` is no finite floating-point matrix, or has values too large for the
            format's scales (fp16: above 8188); or if the format is unknown.

    Examples:
        >>> w4gemm.quantize(torch.ones(512, 1024), "int4_g64_zint")
        QuantizedWeight(int4_g64_zint, n=512, k=1024, layout='canonical', device=cpu, 0.3 MiB)
    """
    format = WeightFormat.of(format)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        raise TypeError(f"weight: wanted a floating-point tensor (n, k), got {kind_of(weight)}")
    require_dense("weight", weight)
    require_bool("search", search)
    require_progress(progress, "two ints")
    if weight.device.type == "meta":
        raise ValueError("weight: wanted one with numbers, got one on the meta device")
    if 0 in weight.shape:
        raise ValueError(f"weight: wanted n >= 1 and k >= 1, got shape {tuple(weight.shape)}")
    n, k = weight.shape
    unit = format.scale_rule.block_rows or 1
    rows = max(1, 2**22 // k // unit) * unit
    limit = largest_quantized(format)
    blocks = []
    for start in range(0, n, rows):
        block = weight[start : start + rows].detach().float()
        if not block.abs().amax().item() <= limit:  # also true for NaN
            row, column = (~(block.abs() <= limit)).nonzero()[0].tolist()
            raise ValueError(
                f"weight: wanted finite values of at most {limit:g} for {format}, got "
                f"{weight[start + row, column].item():g} at row {start + row}, column {column}"
            )
        blocks.append(_quantize_rows(block, format, search))
        if progress is not None:
            progress(min(start + rows, n), n)
    parts = WeightComponents.of(None if ts[0] is None else torch.cat(ts) for ts in zip(*blocks, strict=True))
    return QuantizedWeight.from_codes(format, *parts[:3], channels=parts.channels, factors=parts.factors)


def largest_quantized(format: WeightFormat) -> float:
    """Return the magnitude up to which every scale, zero point and weight stays finite, rounding included."""
    plain = format if format.has_factors else _plain(format)
    return plain.largest_weight / 8


def _plain(format: WeightFormat) -> WeightFormat:
    """Return the format whose scales are found first: the same without scales of channels, factors and blocks."""
    if format.has_factors or format.scale_rule.block_rows:
        return replace(format, scale="fp32")
    return replace(format, scale="bf16") if format.has_channels else format


def channel_scales(scales: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """Return scales of channels, float32 (n,), so that group scales (n, groups) over them use the whole range of the
    stored dtype."""
    top = torch.finfo(format.scale_dtype).max
    if format.scales_in_weights:
        top /= format.element_rule.largest_value
    largest = scales.abs().amax(1)
    return torch.where(largest > 0, _over(largest, top), 1.0)


def channel_scales_of_rows(rows: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """Return the float32 scales (..., n) of dense rows (..., n, k) of an element whose largest values are of both
    signs: :func:`channel_scales` or, in a format without, the one scale of each row."""
    least, most = rows.aminmax(dim=-1)
    scales = _over(torch.maximum(-least, most).float(), format.element_rule.largest_value)
    if not format.has_channels:
        return scales
    scales = scales.to(_plain(format).scale_dtype).float()
    return channel_scales(scales.view(-1, 1), format).view_as(scales)


def group_ends(sources: Sequence[torch.Tensor], format: WeightFormat) -> torch.Tensor:
    """Return the least and the largest number of each row's groups, or of those of its block of rows: float32 (experts,
    n, groups, 2).

    Args:
        sources: floating point (experts, n, k); or several (experts, n / count, k), whose rows take turns.
    """
    k = sources[0].shape[-1]
    length = min(format.group_length(k), k)
    whole = k // length * length
    of_sources = []
    for dense in sources:
        groups = [dense[..., :whole].unflatten(-1, (-1, length)), dense[..., None, whole:]]
        ends = [torch.stack((part.amin(-1), part.amax(-1)), -1) for part in groups if part.shape[-1]]
        of_sources.append(torch.cat(ends, -2).float())
    ends_of_rows = torch.stack(of_sources, 2).flatten(1, 2)
    if rows := format.scale_rule.block_rows:
        full = ends_of_rows.shape[1] // rows * rows
        for blocks in (ends_of_rows[:, :full].unflatten(1, (-1, rows)), ends_of_rows[:, None, full:]):
            if blocks.numel():
                least, most = blocks[..., 0], blocks[..., 1]
                least.copy_(least.amin(2, keepdim=True).expand_as(least))
                most.copy_(most.amax(2, keepdim=True).expand_as(most))
    return ends_of_rows


def _over(t: torch.Tensor, number: float) -> torch.Tensor:
    """Return t / number, rounded once: on GPUs PyTorch multiplies by the reciprocal of a number."""
    return t / torch.full_like(t, number)


_LARGEST_BYTE = 63
"""Largest unsigned scale or zero point that has a factor, because GGUF's Q4_K has six bits for each."""
_LEAST_FACTOR = 2.0**-24
"""The smallest number of fp16 above 0."""


def _levels(format: WeightFormat) -> tuple[int, int]:
    """Return the smallest and the largest level of a scale or zero point that has a factor."""
    least, most = format.scale_rule.levels
    return least, most if format.scale_rule.signed else min(most, _LARGEST_BYTE)


def _factors(scales: torch.Tensor, zeros: torch.Tensor, format: WeightFormat, k: int) -> torch.Tensor:
    """Return factors, fp16 (n, superblocks, 1 or 2), so that scales and zero points <= 0 (n, groups) over them use the
    whole range of their levels."""
    together = format.scale_rule.factor_columns // format.group_size
    padding = format.superblocks(k) * together - scales.shape[1]
    sizes = torch.stack((scales, zeros)[: format.factors], dim=-1).abs()
    sizes = torch.nn.functional.pad(sizes, (0, 0, 0, padding))
    largest = sizes.unflatten(1, (-1, together)).amax(2) / _levels(format)[1]
    # rounded to 0, a factor would make all its scales 0
    largest = torch.where(largest > 0, largest.clamp(min=_LEAST_FACTOR), largest)
    return (largest * torch.tensor([1.0, -1.0][: format.factors], device=scales.device)).half()


class _TwoLevels(NamedTuple):
    """Weights rounded to scales and zero points of two levels."""

    scales: torch.Tensor
    """Levels of the scales, as float32 (n, groups)."""
    zeros: torch.Tensor
    """Levels of the zero points, as float32 (n, groups); 0 without zero points."""
    codes: torch.Tensor
    """float32 (n, groups, length)."""
    values: torch.Tensor
    """The weights (n, groups, length) that all these stand for."""


def _two_levels(
    w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, factors: torch.Tensor, format: WeightFormat
) -> _TwoLevels:
    """Round weights (n, groups, length) to scales and zero points that are levels times ``factors``, nearest to
    ``scales`` and ``zeros``, which were found without factors."""
    together = format.scale_rule.factor_columns // format.group_size
    spread = factors.float().repeat_interleave(together, dim=1)[:, : scales.shape[1]]
    sizes = torch.stack((scales, zeros)[: format.factors], dim=-1)
    levels = (sizes / torch.where(spread == 0, torch.ones_like(spread), spread)).round().clamp(*_levels(format))
    s, *z = (levels * spread)[:, :, None].unbind(-1)
    safe = torch.where(s == 0, torch.ones_like(s), s)
    if format.has_zero:
        codes = ((w - z[0]) / safe).round().clamp(0, format.element_rule.largest_code)
        return _TwoLevels(levels[..., 0], levels[..., 1], codes, codes * s + z[0])
    codes = format.element_rule.nearest(w / safe)
    return _TwoLevels(levels[..., 0], zeros, codes, format.element_rule.numbers(codes) * s)


class _Rounded(NamedTuple):
    """Weights (n, groups, length) rounded to what is stored, all in float32."""

    error: torch.Tensor
    """Squared error of each group (n, groups)."""
    scales: torch.Tensor
    zeros: torch.Tensor
    codes: torch.Tensor

    def better(self, other: _Rounded) -> _Rounded:
        """Return for each group the rounding with the smaller error; this one if both are equal."""
        use = other.error < self.error
        pairs = zip(self, other, strict=True)
        return _Rounded(*(torch.where(use[..., None] if a.dim() > use.dim() else use, b, a) for a, b in pairs))


def _quantize_rows(w: torch.Tensor, format: WeightFormat, search: bool) -> WeightComponents:
    n, k = w.shape
    length, groups = min(format.group_length(k), k), format.groups(k)
    low, high = group_ends((w[None],), format)[0].unbind(-1)
    # a short last group is filled with its own first element, which does not count as an error
    tail = groups * length - k
    if tail:
        w = torch.cat((w, w[:, (groups - 1) * length :][:, :1].expand(n, tail)), dim=1)
    w = w.view(n, groups, length)
    is_column = (torch.arange(groups * length, device=w.device) < k).view(groups, length)
    channels: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    def rounded(shrink: float, again: bool) -> _Rounded:
        """Return the weights rounded for a range that is ``shrink`` times the whole one. If ``again``, codes are chosen
        by the stored scale, where it differs from the one of the plain format."""
        nonlocal channels, factors
        scales, zeros, codes = _round_groups(w, low * shrink, high * shrink, _plain(format))
        if format.has_factors:
            factors = _factors(scales, zeros, format, k) if factors is None else factors
            scales, zeros, codes, values = _two_levels(w, scales, zeros, factors, format)
            return judged(values, scales, zeros, codes)
        effective = scales
        if format.has_channels:
            channels = channel_scales(scales, format) if channels is None else channels
            scales = (scales / channels[:, None]).to(format.scale_dtype).float()
            effective = scales * channels[:, None]
            if again:
                safe = torch.where(effective == 0, torch.ones_like(effective), effective)
                codes = format.element_rule.nearest(w / safe[..., None])
        values = _values(codes, scales, zeros, format)
        if channels is not None:
            values = values * channels[:, None, None]
        return judged(values, scales, zeros, codes)

    def judged(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, codes: torch.Tensor) -> _Rounded:
        """Return rounded weights with their error. Groups whose scale was rounded to 0 beside a zero point that was not
        are all zeros if that is nearer."""
        error = ((values - w) * is_column).square().sum(-1)
        if rows := format.scale_rule.block_rows:
            error = torch.cat([block.sum(0, keepdim=True).expand_as(block) for block in error.split(rows)])
        if format.zero == "float":
            nothing = (w * is_column).square().sum(-1)
            worse = error > nothing
            scales, zeros = (torch.where(worse, torch.zeros_like(t), t) for t in (scales, zeros))
            error = torch.minimum(error, nothing)
        return _Rounded(error, scales, zeros, codes)

    best = rounded(1.0, again=not format.scales_in_weights)
    if search:
        for shrink in (1.0, *_SHRINKS) if format.has_channels else _SHRINKS:
            best = best.better(rounded(shrink, again=True))
    codes = best.codes.to(torch.uint8).view(n, -1)[:, :k].contiguous()
    zero_dtype = format.zero_dtype
    zeros = None if zero_dtype is None else best.zeros.to(zero_dtype)
    scales = best.scales
    if rows := format.scale_rule.block_rows:  # twice, for even and for odd rows
        scales = scales[::rows].repeat_interleave(2, dim=0)
    return WeightComponents(codes, format.stored_scales(scales), zeros, channels, factors)


def _round_groups(
    w: torch.Tensor, low: torch.Tensor, high: torch.Tensor, format: WeightFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scales and zero points for ranges low..high (n, groups), rounded to what is stored, and the nearest codes;
    all in float32."""

    def stored(t: torch.Tensor) -> torch.Tensor:
        return t.to(format.scale_dtype).float()

    element = format.element_rule
    if format.zero == "none":
        # give the end with the larger magnitude the larger end of the values, which is -8 of int4
        small, large = sorted((element.least, element.most), key=abs)
        extreme = torch.where(low.abs() >= high.abs(), low, high)
        smaller = torch.minimum(low.abs(), high.abs())
        scales = torch.maximum(_over(extreme, large).abs(), _over(smaller, small).abs())
        if format.scale_rule.signed:
            scales = stored(scales)
            scales = torch.where((extreme * large < 0) & (not element.symmetric), -scales, scales)
        else:  # of a power of two the next larger one, so that nothing is cut off
            ends = _over(low, element.least), _over(high, element.most)
            mantissa, exponent = torch.frexp(torch.maximum(*ends).clamp(min=2.0**-126))
            power = exponent.int() - (mantissa == 0.5).int()
            scales = stored((power + 127 << 23).view(torch.float32))
        zeros = torch.zeros_like(scales)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        scales = format.stored_scales(_over(high - low, element.largest_code)).float()
        zeros = stored(low)
    safe = torch.where(scales == 0, torch.ones_like(scales), scales)
    if format.zero == "none":
        codes = element.nearest(w / safe[..., None])
    elif format.zero == "int":
        zeros = (-low / safe).round().clamp(0, element.largest_code)
        codes = (w / safe[..., None] + zeros[..., None]).round().clamp(0, element.largest_code)
    else:
        codes = ((w - zeros[..., None]) / safe[..., None]).round().clamp(0, element.largest_code)
    return scales, zeros, codes


def _values(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """Return the weights (n, groups, length) that codes stand for, in float32, without scales of channels."""
    if format.zero == "none":
        return rounded_products(format.element_rule.numbers(codes) * scales[..., None], format)
    if format.zero == "float":
        return codes * scales[..., None] + zeros[..., None]
    return (codes - zeros[..., None]) * scales[..., None]
