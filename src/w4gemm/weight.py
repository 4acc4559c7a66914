"""A 4-bit weight: :class:`QuantizedWeight`, and how one is made from a dense matrix: :func:`quantize`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from w4gemm.errors import FormatError
from w4gemm.formats import SYMMETRIC_ZERO, WeightFormat
from w4gemm.layouts import Parts, layout_named, native_layout
from w4gemm.problem import Device

_FILE_KIND = "w4gemm.weight"
_FILE_VERSION = "1"


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight w (n, k) in 4 bits: packed tensors, and what they mean. Immutable; every method returns a new one.

    Make one with :meth:`from_codes`, :func:`quantize`, :meth:`load` or a loader in ``w4gemm.checkpoints``.

    Attributes:
        format: what the numbers mean.
        n, k: output and input features, without any padding of the layout.
        layout: the name of the order in which the bits of ``tensors`` lie.
        tensors: the packed tensors, as ``layout_named(layout).shapes(format, n, k)`` says.

    Raises:
        ValueError, TypeError: if the tensors do not fit format, layout, n and k.
    """

    format: WeightFormat
    n: int
    k: int
    layout: str
    tensors: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        layout = layout_named(self.layout)
        if reason := layout.supports(self.format):
            raise ValueError(f"layout: {self.layout} cannot hold {self.format}: {reason}")
        if self.n < 1 or self.k < 1:
            raise ValueError(f"n, k: wanted both >= 1, got n {self.n}, k {self.k}")
        wanted = layout.shapes(self.format, self.n, self.k)
        if len(wanted) != len(self.tensors):
            raise ValueError(
                f"tensors: {self.layout} {self.format} wants {len(wanted)} tensors, got {len(self.tensors)}"
            )
        for i, ((dtype, shape), t) in enumerate(zip(wanted, self.tensors, strict=True)):
            if t.dtype != dtype or tuple(t.shape) != shape or not t.is_contiguous():
                raise ValueError(
                    f"tensors[{i}]: {self.layout} {self.format} with n {self.n}, k {self.k} wants a contiguous "
                    f"{dtype} {shape}, got {'' if t.is_contiguous() else 'non-contiguous '}{t.dtype} {tuple(t.shape)}"
                )
        if len({t.device for t in self.tensors}) > 1:
            raise ValueError(f"tensors: wanted one device, got {sorted({str(t.device) for t in self.tensors})}")

    @classmethod
    def from_codes(
        cls, format: WeightFormat, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
    ) -> QuantizedWeight:
        """A weight in the canonical layout from its numbers.

        Args:
            codes: integers 0..15 (n, k), any integer dtype. A symmetric format's signed value v is code v + 8.
            scales: (n, groups) of ``format.scale_dtype``.
            zeros: (n, groups) of ``format.zero_dtype``; None for a format without zero points.

        Raises:
            TypeError, ValueError: naming the argument, what was wanted and what came. Scales and zero points whose
                weights would not be finite in the scale dtype are refused.
        """
        if codes.dim() != 2 or codes.is_floating_point() or codes.dtype == torch.bool:
            raise TypeError(f"codes: wanted integers (n, k), got {codes.dtype} {tuple(codes.shape)}")
        n, k = codes.shape
        if n < 1 or k < 1:
            raise ValueError(f"codes: wanted n >= 1 and k >= 1, got shape {(n, k)}")
        if int(codes.min()) < 0 or int(codes.max()) > 15:
            raise ValueError(f"codes: wanted 0..15, got {int(codes.min())}..{int(codes.max())}")
        _check_part("scales", scales, format.scale_dtype, (n, format.groups(k)), codes.device)
        if format.zero_dtype is None:
            if zeros is not None:
                raise ValueError(f"zeros: {format} has none, got a tensor {tuple(zeros.shape)}")
        elif zeros is None:
            raise ValueError(f"zeros: {format} wants {format.zero_dtype} {(n, format.groups(k))}, got None")
        else:
            _check_part("zeros", zeros, format.zero_dtype, (n, format.groups(k)), codes.device)
        _check_range(format, scales, zeros)
        tensors = layout_named("canonical").pack(Parts(codes.to(torch.uint8), scales, zeros), format)
        return cls(format, n, k, "canonical", tensors)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of all packed tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def parts(self) -> Parts:
        """Codes uint8 (n, k), scales (n, groups) and zero points, unpacked from any layout."""
        return layout_named(self.layout).unpack(self.tensors, self.format, self.n, self.k)

    def repack(self, layout: str | None = None) -> QuantizedWeight:
        """The same weight in another layout, bit for bit.

        Args:
            layout: a layout's name; None for the one that the fastest kernel on this weight's device reads.
        """
        target = native_layout(Device.of(self.device)) if layout is None else layout_named(layout).name
        if target == self.layout:
            return self
        if reason := layout_named(target).supports(self.format):
            raise ValueError(f"layout: {target} cannot hold {self.format}: {reason}")
        tensors = layout_named(target).pack(self.parts(), self.format)
        return replace(self, layout=target, tensors=tensors)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """w (n, k): computed in float32 as :mod:`w4gemm.formats` says, then rounded once to ``dtype``."""
        codes, scales, zeros = self.parts()
        length = self.format.group_length(self.k)

        def spread(t: torch.Tensor) -> torch.Tensor:
            return t.float().repeat_interleave(length, dim=1)[:, : self.k]

        u = codes.float()
        if zeros is None:
            return ((u - SYMMETRIC_ZERO) * spread(scales)).to(dtype)
        if self.format.zero == "int":
            return ((u - spread(zeros)) * spread(scales)).to(dtype)
        return (u * spread(scales) + spread(zeros)).to(dtype)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight, in the same layout, on another device."""
        return replace(self, tensors=tuple(t.to(device) for t in self.tensors))

    def shard(self, dim: int, index: int, count: int) -> QuantizedWeight:
        """Part ``index`` of ``count`` equal parts, for tensor parallelism, in this weight's layout.

        Args:
            dim: 0 splits the output features n (column parallel), 1 the input features k (row parallel).

        Raises:
            ValueError: if the parts would not be equal, or a group of k would straddle two parts; the message says
                which counts fit.
        """
        if dim not in (0, 1):
            raise ValueError(f"dim: wanted 0 (n, output features) or 1 (k, input features), got {dim!r}")
        if count < 1 or not 0 <= index < count:
            raise ValueError(f"index, count: wanted 0 <= index < count, got index {index}, count {count}")
        size = (self.n, self.k)[dim]
        unit = 1 if dim == 0 or self.format.groups(self.k) == 1 else self.format.group_size
        if size % (count * unit):
            fits = [c for c in range(1, min(size // unit, 256) + 1) if size % (c * unit) == 0]
            what = "equal parts" if unit == 1 else f"parts of whole groups of {unit}"
            raise ValueError(
                f"count: {'nk'[dim]} {size} does not split into {count} {what}; counts that fit: {fits or 'none'}"
            )
        codes, scales, zeros = self.parts()
        first, last = index * size // count, (index + 1) * size // count
        if dim == 0:
            rows = slice(first, last)
            part = Parts(codes[rows], scales[rows], None if zeros is None else zeros[rows])
        else:
            columns = slice(None) if unit == 1 else slice(first // unit, last // unit)
            part = Parts(codes[:, first:last], scales[:, columns], None if zeros is None else zeros[:, columns])
        part = Parts(*(None if t is None else t.contiguous() for t in part))
        n, k = part.codes.shape
        tensors = layout_named(self.layout).pack(part, self.format)
        return replace(self, n=n, k=k, tensors=tensors)

    def save(self, path: str | Path) -> None:
        """Write the weight to a safetensors file, in the canonical layout, with its format in the metadata."""
        from safetensors.torch import save_file

        canonical = self.repack("canonical")
        names = ("codes", "scales", "zeros")
        tensors = {name: t.cpu() for name, t in zip(names, canonical.tensors, strict=False)}
        meta = {"kind": _FILE_KIND, "version": _FILE_VERSION, "format": str(self.format), "n": self.n, "k": self.k}
        save_file(tensors, path, metadata={"w4gemm": json.dumps(meta)})

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> QuantizedWeight:
        """Read what :meth:`save` wrote, in the canonical layout.

        Raises:
            FileNotFoundError: if there is no such file.
            FormatError: if the file is truncated or is not such a file.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"path: no file {str(path)!r}")
        try:
            with safe_open(path, "pt", device=str(device)) as f:
                text = (f.metadata() or {}).get("w4gemm")
                if text is None:
                    raise FormatError(f"path: {path} is a safetensors file without w4gemm metadata")
                tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
        except SafetensorError as e:
            raise FormatError(f"path: {path} is not a whole safetensors file: {e}") from e
        meta = json.loads(text)
        if meta.get("kind") != _FILE_KIND or meta.get("version") != _FILE_VERSION:
            raise FormatError(
                f"path: {path} holds {meta.get('kind')!r} version {meta.get('version')!r}, "
                f"wanted {_FILE_KIND!r} version {_FILE_VERSION!r}"
            )
        ordered = tuple(tensors[name] for name in ("codes", "scales", "zeros") if name in tensors)
        return cls(WeightFormat.parse(meta["format"]), meta["n"], meta["k"], "canonical", ordered)

    def __repr__(self) -> str:
        return (
            f"QuantizedWeight({self.format}, n={self.n}, k={self.k}, layout={self.layout!r}, device={self.device}, "
            f"{self.nbytes / 2**20:.1f} MiB)"
        )


def _check_part(
    name: str, t: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if t.dtype != dtype:
        raise TypeError(f"{name}: wanted {dtype}, got {t.dtype}")
    if tuple(t.shape) != shape:
        raise ValueError(f"{name}: wanted shape {shape}, got {tuple(t.shape)}")
    if t.device != device:
        raise ValueError(f"{name}: wanted device {device} like codes, got {t.device}")


def _check_range(format: WeightFormat, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
    """Refuse numbers whose weights would be NaN or infinite."""
    largest = scales.float().abs() * 15
    if format.zero == "float" and zeros is not None:
        largest = largest + zeros.float().abs()
    limit = torch.finfo(format.scale_dtype).max
    bad = ~(largest <= limit)  # also true for NaN
    if bad.any():
        row, group = (int(i) for i in bad.nonzero()[0])
        zero = "" if zeros is None else f", zero point {zeros[row, group].item()}"
        raise ValueError(
            f"scales: the weights of {int(bad.sum())} groups would not be finite in {format.scale_dtype} (15 * |scale| "
            f"must be at most {limit:g}); the first is row {row}, group {group}: scale {scales[row, group].item()}{zero}"
        )
    if format.zero == "int" and zeros is not None and int(zeros.max()) > 15:
        raise ValueError(f"zeros: wanted 0..15, got up to {int(zeros.max())}")


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
        TypeError, ValueError: if ``weight`` is not a finite floating-point matrix.
    """
    format = WeightFormat.parse(format) if isinstance(format, str) else format
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        came = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise TypeError(f"weight: wanted a floating-point tensor (n, k), got {came}")
    if 0 in weight.shape:
        raise ValueError(f"weight: wanted n >= 1 and k >= 1, got shape {tuple(weight.shape)}")
    n, k = weight.shape
    rows = max(1, 2**22 // k)
    blocks = []
    for start in range(0, n, rows):
        block = weight[start : start + rows].detach().float()
        if not torch.isfinite(block).all():
            raise ValueError(f"weight: wanted finite values, got NaN or infinity in rows {start}..{start + len(block)}")
        blocks.append(_quantize_rows(block, format, search))
        if progress is not None:
            progress(min(start + rows, n), n)
    codes, scales, zeros = (None if p[0] is None else torch.cat(p) for p in zip(*blocks, strict=True))
    return QuantizedWeight.from_codes(format, codes, scales, zeros)


def _quantize_rows(w: torch.Tensor, format: WeightFormat, search: bool) -> Parts:
    n, k = w.shape
    length, groups = format.group_length(k), format.groups(k)
    # a short last group is filled with its own first element, which changes neither its range nor its best scale much
    tail = groups * length - k
    if tail:
        w = torch.cat((w, w[:, (groups - 1) * length :][:, :1].expand(n, tail)), dim=1)
    w = w.view(n, groups, length)
    low, high = w.amin(-1), w.amax(-1)
    best: tuple[torch.Tensor, ...] | None = None
    shrinks = [1.0] + [1 - 0.02 * i for i in range(1, 25)] if search else [1.0]
    for shrink in shrinks:
        scales, zeros, codes = _round_groups(w, low * shrink, high * shrink, format)
        error = (_values(codes, scales, zeros, format) - w).square().sum(-1)
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
        limit = torch.finfo(format.scale_dtype).max / 32
        return t.clamp(-limit, limit).to(format.scale_dtype).float()

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
