"""New numbers for a weight that is in use: :func:`update_`."""

from __future__ import annotations

import torch

from w4gemm.api.modes import any_negated
from w4gemm.core.autocast import without_autocast
from w4gemm.core.errors import UnsupportedError, kind_of, require_tensor
from w4gemm.core.formats import WeightFormat
from w4gemm.kernels import launcher
from w4gemm.kernels.helpers.weight_quantize import WeightQuantize
from w4gemm.weights.quantize import channel_scales_of_rows, group_ends, largest_quantized, quantize
from w4gemm.weights.weight import QuantizedWeight

Dense = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def update_(w: QuantizedWeight, weight: Dense) -> None:
    """Quantize new dense numbers into the tensors of a weight, in place, as reinforcement learning does between steps.

    The addresses stay, so layers, engines and CUDA graphs that hold the weight multiply by the new numbers from their
    next launch on. The bits are those of ``w4gemm.quantize(weight, w.format).repack(w.layout)``. On Hopper one kernel
    does it for ``weight`` in 16 bits and a ``w`` in layout ``mma16``: integers and floats with one scale for each group
    of columns, row, or block of 128 x 128, without zero points or with integer ones. It needs further memory only for
    scales that reach beyond 128 columns or one row, whose ranges PyTorch finds first (8 bytes each of a row's).
    Elsewhere PyTorch's operators do it, expert by expert.

    Args:
        w: the weight to overwrite, of any layout; also one of several experts, or in act-order.
        weight: floating point (n, k), or (experts, n, k), on w's device. Or a pair of tensors, gates and ups, (n / 2,
            k) or (experts, n / 2, k) each, for a weight of :meth:`QuantizedWeight.interleave`. Both are quantized as
            one matrix, so that in blocks of 128 rows gates and ups share scales.

    Raises:
        TypeError, ValueError: if ``weight`` is no such tensor, or has a number that is not finite or too large for the
            format. Of numbers alone this is known afterwards: w then holds nothing of use. Work that was launched
            before is waited for.

    Examples:
        >>> w = w4gemm.quantize(torch.zeros(512, 1024), "int4_g128").repack()
        >>> new = torch.randn(512, 1024)
        >>> w4gemm.update_(w, new)
        >>> torch.equal(w.dequantize(), w4gemm.quantize(new, "int4_g128").dequantize())
        True
    """
    if not isinstance(w, QuantizedWeight):
        raise TypeError(f"w: wanted a QuantizedWeight, got {kind_of(w)}")
    if (refused := launch_update(w, weight)) is not None:
        check(refused, w.format)


@without_autocast
@torch.inference_mode()  # in which w's tensors may be made, or not
def launch_update(w: QuantizedWeight, weight: Dense) -> torch.Tensor | None:
    """Do as :func:`update_`, and leave the check of the numbers to the caller, who can make it once for many weights.

    Returns:
        What :func:`check` takes: int32 (1,), not 0 if a number is refused; None if all have been checked.
    """
    sources = weight if isinstance(weight, tuple) else (weight,)
    _check(w, sources)
    refused = _by_kernel(w, sources)
    if refused is None:
        _update_in_pytorch(w, sources)
    return refused


def check(refused: torch.Tensor, format: WeightFormat) -> None:
    """Raise ValueError if the kernel has refused a number, after waiting for it."""
    if refused.item():
        raise ValueError(refusal(format))


def refusal(format: WeightFormat) -> str:
    """Return what the error says of a number that the kernel has refused."""
    limit = largest_quantized(format)
    return f"weight: wanted finite values of at most {limit:g} for {format}; w holds nothing of use now"


def _check(w: QuantizedWeight, sources: tuple[torch.Tensor, ...]) -> None:
    *leading, n, k = w.shape
    if len(sources) not in (1, 2) or (len(sources) == 2 and n % 2):
        raise ValueError(f"weight: wanted a tensor, or a pair of them for even n, got {len(sources)} for n {n}")
    expected = (*leading, n // len(sources), k)
    for source in sources:
        require_tensor("weight", source, (), expected, w.device, whose="w's device", contiguous=False)
        if source.dtype != sources[0].dtype:
            raise ValueError(f"weight: wanted both of {sources[0].dtype}, got {source.dtype}")


def _by_kernel(w: QuantizedWeight, sources: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """Quantize by the kernel, and return its flag of refused numbers; None where it does not run."""
    if w.layout != "mma16" or w.perm is not None or any_negated(*sources):
        return None
    if not all(WeightQuantize.takes(source) for source in sources):
        return None
    limit = largest_quantized(w.format)
    try:
        run = launcher(WeightQuantize.of, w.device, sources[0].dtype, w.format, len(sources) == 2, limit)
    except UnsupportedError:  # W4GEMM_COMPILE=off, and nobody compiled it
        run = None
    if run is None:
        return None
    experts = max(w.experts, 1)
    blocks, *channels = (t if w.experts else t[None] for t in w.tensors)
    rows = [source.view(experts, -1, w.k) for source in sources]
    if channels:
        of_rows = [channel_scales_of_rows(source, w.format) for source in rows]
        channels[0].copy_(torch.stack(of_rows, -1).flatten(1))
    ends = group_ends(rows, w.format) if WeightQuantize.needs_ends(w.format) else None
    refused = torch.zeros(1, dtype=torch.int32, device=w.device)
    even, odd = (*rows, None)[:2]
    run(even, odd, channels[0] if channels else None, ends, blocks, refused, w.n)
    return refused


def _update_in_pytorch(w: QuantizedWeight, sources: tuple[torch.Tensor, ...]) -> None:
    for e in range(max(w.experts, 1)):
        target = w.expert(e) if w.experts else w
        own = [source[e] if w.experts else source for source in sources]
        dense = own[0] if len(own) == 1 else torch.stack(own, 1).flatten(0, 1)
        if w.perm is not None:
            dense = dense[:, target.perm]
        made = quantize(dense, w.format).repack(w.layout)
        for t, new in zip(target.tensors, made.tensors, strict=True):
            t.copy_(new)
