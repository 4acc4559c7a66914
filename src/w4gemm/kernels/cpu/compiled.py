"""The method "compiled" of ``cpu_mixed_gemm``: machine code (``machine.py``) that is made in some 0.1 s at the first
call of each :class:`Code`. ``program.py`` has its loops.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.kernels.cpu.machine import Run, array_of, has, lanes, machine_code, run_all
from w4gemm.packing.layouts.cpu import TABLE_N, CpuLayout, table_bits


class Code(NamedTuple):
    """Compile-time parameters."""

    bits: int
    """Bits of a code in the table."""
    row_bytes: int
    """Bytes of a row of the table: 128 codes and what the other methods read behind them."""
    middle: int
    """Number that is subtracted from a code without integer zero point: 2**(bits of the format - 1)."""
    zero: str
    scale_dtype: torch.dtype
    whole_group: int
    """Columns that share a scale, at least k if all do: a constant, because a division takes 20 cycles."""
    factors: int
    """Factors of a superblock, 0 to 2."""
    superblock: int
    """Columns of a superblock; 1 without factors."""
    tokens: int
    """Tokens of a tile."""
    tiled: bool
    """True if there are several tiles."""
    is_partial: bool
    """True if the last of several tiles has fewer tokens."""
    lanes: int
    """float32 numbers of a vector register."""
    x_dtype: torch.dtype
    """float32 if there are several tiles."""
    dtype: torch.dtype
    """Of the result: float32 if there are several tiles."""
    looks_up: bool
    """True if codes become numbers by AVX-512's lookup of 16 numbers."""
    by_bytes: bool
    """True if codes become numbers by AVX2's lookup of 16 bytes."""
    sums_codes: bool
    """True if codes are added up, and the sums of a group are scaled; False if numbers are."""
    features: int
    """Of a block; at most :data:`MOST_FEATURES` of the last blocks of a chunk."""

    @property
    def fields(self) -> int:
        """Codes of a byte."""
        return 8 // self.bits

    @property
    def sums_x(self) -> bool:
        """True if zero points need the sum of x over a group."""
        return self.sums_codes and self.zero != "none"

    @property
    def top_factor(self) -> float:
        """Factor of the codes of a byte's last field. 16 times a code of 4 bits is converted where it stands: beside
        the lookup of the other one this takes other units of the processor than another lookup."""
        return 1 / 16 if self.sums_codes and self.looks_up and (self.bits, self.middle) == (4, 8) else 1

    @property
    def subtracts_first(self) -> bool:
        """True if (u - z) * s is rounded where it is written so. Else s * z is exact, so that a fused u * s - (s * z)
        is exact too."""
        return self.scale_dtype == torch.float32 and self.zero != "float"


class CodeArguments(NamedTuple):
    """Arguments of compiled code, int64 in a row: addresses, and numbers of elements."""

    x: Any
    """(panels, m, columns), or (m, k). In tiles bf16 (panels, parts, m, columns), or (parts, m, k)."""
    x_panel: Any
    """Numbers from one panel to the next."""
    x_part: Any
    x_row: Any
    """Numbers from one token to the next."""
    x_sums: Any
    """float32 (m, ceil(k / group)): sums of x, read in tiles beside zero points in floating point."""
    table: Any
    scales: Any
    zeros: Any
    factors: Any
    out: Any
    """(m, columns), contiguous."""
    scratch: Any
    """In tiles, if ``out`` has 16 bits and there are several panels: float32 (m, 128), sums of a chunk."""
    first_chunk: Any
    last_chunk: Any
    """The first chunk that this call does not compute."""
    m: Any
    columns: Any
    """Features, a multiple of a block."""
    k: Any
    panel: Any
    """Columns of a panel: at most :data:`PANEL`, and in whole groups or a part of one."""
    groups: Any
    group: Any
    """Columns of a group, at most a panel."""
    superblocks: Any


class Tokens(NamedTuple):
    """Where compiled code finds x: the first five of :class:`CodeArguments`."""

    x: int
    panel: int
    part: int
    row: int
    sums: int


_addresses, _own, _sizes = (struct.Struct(f"={count}q").pack for count in (10, 4, 6))
"""Functions that pack the first ten :class:`CodeArguments`, the four of a thread and the last six."""
PANEL = 64
"""Columns of a panel, at most: their rows of the table stay in the first cache while another block is multiplied. With
256 columns one token of 11008 x 2048 took 1.25 times as long (EPYC, AVX-512 or AVX2, 2026-11-29)."""
Direct = Callable[[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor], None]
"""A launch on contiguous x, a weight's tensors and the result, without an epilogue; x and the result may have any
shape."""
INFINITE = 0x7F800000
"""Bit pattern of infinity in float32; those of NaN are larger."""


class PanelLimits(NamedTuple):
    """The most that a panel has."""

    groups: int = 64
    columns: int = PANEL


MOST_FEATURES = 64
"""Features of a block, at most."""
MOST_CODES = 1024
_DISPLACING = 512
"""Rows of a multiple of this many columns lie at multiples of 2 KiB, so that those of a tile displace each other from
the first cache."""


class CompiledProduct:
    """x (m, k) @ w.T (m, n) in float32 for every weight of one format, n and k in the ``cpu`` layout.

    The chunks are divided over as many threads as PyTorch uses, if each has enough to do.

    Args:
        sums_codes: True if the codes of a few tokens may be added up before they are scaled, where that is faster. The
            bits of a row then depend on the number of rows.
    """

    def __init__(
        self, format: WeightFormat, n: int, k: int, most: PanelLimits = PanelLimits(), sums_codes: bool = True
    ) -> None:
        self.format, self.n, self.k, self.sums_codes = format, n, k, sums_codes
        self.columns, self.chunks = -(-n // MOST_FEATURES) * MOST_FEATURES, -(-n // TABLE_N)
        self.has_zero, self.has_factors = format.has_zero, format.has_factors
        group = format.group_length(k)
        self.panel = panel_columns(group, k, most)
        self.group = min(group, self.panel)
        superblocks = -(-k // format.scale_rule.factor_columns) if format.has_factors else 0
        self.sizes = _sizes(self.columns, k, self.panel, format.groups(k), self.group, superblocks)
        self.codes: dict[tuple[int, torch.dtype], tuple[Code, Run]] = {}

    def __call__(self, x: torch.Tensor, weight: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> torch.Tensor:
        """Return x @ w.T, which is ``out`` itself where that can be written to.

        Args:
            x: any floating-point dtype.
            weight: packed tensors of the layout.
            out: (m, n), contiguous, for the result; None if no sums may be written to it.
        """
        m, dtype = x.shape[0], x.dtype
        out_dtype = out.dtype if out is not None and self.columns == self.n else None
        if dtype is not torch.float32 and dtype is not out_dtype:
            x, dtype = x.float(), torch.float32
        code, run = self.codes.get((m, dtype)) or self._code(m, dtype)
        panel, row = self.panel, self.k
        if m == code.tokens:
            x = x.contiguous()
        else:
            x, panel, row = self._tiled(x)
        if out is None or out_dtype is not code.dtype:
            out = torch.empty(m, self.columns, dtype=torch.float32)
        largest = run_all(run, self.arguments((x.data_ptr(), panel, 0, row, 0), weight, out, _THREAD_COLUMNS))
        result = out if self.columns == self.n else out[:, : self.n]
        if largest >= INFINITE:
            self.repair(result, x, weight)
        return result

    def repair(self, result: torch.Tensor, x: torch.Tensor, weight: tuple[torch.Tensor, ...]) -> None:
        """Compute the rows of a result anew that are not finite, from numbers: sums of codes before their scales, and
        parts of infinities, may be infinite where no result is."""
        those = ~result.isfinite().all(1)
        if those.any():  # else only sums of features of padding are infinite
            product = CompiledProduct(self.format, self.n, self.k, sums_codes=False)
            result[those] = product(x[those], weight, None).to(result.dtype)

    def direct(self, m: int, dtype: torch.dtype) -> Direct | None:
        """Return a function that writes x @ w.T to ``out`` as :meth:`__call__` does, in 1 us less, which is half of a
        small layer's product; None if that takes threads, padding or another order of x.

        Args:
            m, dtype: tokens, and dtype of x and ``out``. They are contiguous, and of any shape.
        """
        code, run = self.codes.get((m, dtype)) or self._code(m, dtype)
        if code.tiled and self.k % _DISPLACING == 0:
            return None
        multiply = self.alone(run, m, _THREAD_COLUMNS)
        if multiply is None or code.dtype is dtype:
            return multiply

        def converted(x: torch.Tensor, weight: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            d = torch.empty_like(out, dtype=torch.float32)
            multiply(x.float(), weight, d)
            out.copy_(d)

        return converted

    def alone(self, run: Run, m: int, least: int, scratch_bytes: int = 0) -> Direct | None:
        """Return the function that runs compiled code in one thread, as :meth:`direct`.

        Args:
            least: columns of chunks, times tokens, that are worth a thread.
            scratch_bytes: bytes of scratch.
        """
        if self.columns != self.n or m * self.chunks * self.k >= 2 * least:
            return None
        panel, k, own, has_zero, has_factors = self.panel, self.k, (0, self.chunks, m), self.has_zero, self.has_factors
        without_scratch = _own(0, *own) + self.sizes

        def multiply(x: torch.Tensor, weight: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            rest = without_scratch
            if scratch_bytes:
                scratch = array_of(scratch_bytes)()
                rest = _own(ctypes.addressof(scratch), *own) + self.sizes
            tokens, table, scales = x.data_ptr(), weight[0].data_ptr(), weight[1].data_ptr()
            if not (tokens and table and scales):
                refuse_freed(x=x, w=weight)
            zeros = weight[2].data_ptr() if has_zero else 0
            factors = weight[-1].data_ptr() if has_factors else 0
            places = _addresses(tokens, panel, 0, k, 0, table, scales, zeros, factors, out.data_ptr())
            if run(places + rest) >= INFINITE:
                self.repair(out.view(m, -1), x.view(m, -1), weight)

        return multiply

    def addresses(self, x: tuple[int, ...], weight: tuple[torch.Tensor, ...], out: torch.Tensor) -> bytes:
        """Return the packed arguments before ``scratch``.

        Args:
            x: as :class:`Tokens`.
        """
        zeros = weight[2].data_ptr() if self.has_zero else 0
        factors = weight[-1].data_ptr() if self.has_factors else 0
        return _addresses(*x, weight[0].data_ptr(), weight[1].data_ptr(), zeros, factors, out.data_ptr())

    def _tiled(self, x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        """Return x as float32 for several tiles, and the numbers from one panel and from one row to the next."""
        m, panel = x.shape[0], self.panel
        x = x.float()
        if self.k % _DISPLACING:
            return x.contiguous(), panel, self.k
        x = torch.nn.functional.pad(x, (0, -self.k % panel)) if self.k % panel else x.contiguous()
        return x.view(m, -1, panel).transpose(0, 1).contiguous(), m * panel, panel  # a panel's rows side by side

    def step(self, x: torch.Tensor, weight: tuple[torch.Tensor, ...], out: torch.Tensor) -> Callable[[], None]:
        """Return a function that writes x @ w.T to ``out``, without checks and allocations.

        Args:
            x: float32 (1, k), contiguous. Like the other tensors it must not move.
            out: float32 (1, ``columns``), contiguous.
        """
        _, run = self._code(1, torch.float32)
        tokens = Tokens(x.data_ptr(), self.panel, 0, self.k, 0)
        arguments = self.arguments(tokens, weight, out, _THREAD_COLUMNS)

        def call() -> None:
            if run_all(run, arguments) >= INFINITE:
                self.repair(out[:, : self.n], x, weight)

        return call

    def arguments(
        self,
        x: tuple[int, ...],
        weight: tuple[torch.Tensor, ...],
        out: torch.Tensor,
        least: int,
        scratch: int = 0,
        scratch_bytes: int = 0,
    ) -> list[bytes]:
        """Return the packed arguments of a product, for each thread.

        Args:
            x: as :class:`Tokens`.
            least: columns of chunks, times tokens, that are worth a thread.
            scratch: that argument of the first thread.
            scratch_bytes: bytes from one thread's to the next one's.
        """
        addresses = self.addresses(x, weight, out)
        rows, chunks = out.shape[0], self.chunks
        threads = rows * chunks * self.k // least
        if threads > 1:
            threads = min(torch.get_num_threads(), chunks, threads)
        if threads <= 1:
            return [addresses + _own(scratch, 0, chunks, rows) + self.sizes]
        bounds = itertools.pairwise(chunks * i // threads for i in range(threads + 1))
        return [addresses + _own(scratch + scratch_bytes * i, *two, rows) + self.sizes for i, two in enumerate(bounds)]

    def _code(self, m: int, dtype: torch.dtype) -> tuple[Code, Run]:
        """Return the code for m tokens of a dtype, in large tiles of about one size."""
        bits, width = table_bits(self.format), lanes()
        most = 3 * width // 2 // max(2, 8 // bits)  # sums take three quarters of the registers: 16, or 32 of AVX-512
        tokens = m if m <= most else min(range(most, most - most // 3 - 1, -1), key=lambda size: -(-m // size) * size)
        x_dtype = dtype if m == tokens else torch.float32
        tiles = m > tokens, m % tokens > 0
        code = self._parameters(tokens, tiles, width, x_dtype, dtype if m == tokens else torch.float32)
        if len(self.codes) > MOST_CODES:
            self.codes.clear()
        from w4gemm.kernels.cpu.program import sums

        self.codes[m, dtype] = code, machine_code(sums, code)
        return self.codes[m, dtype]

    def _parameters(
        self, tokens: int, tiles: tuple[bool, bool], lanes: int, x_dtype: torch.dtype, dtype: torch.dtype
    ) -> Code:
        """Return the parameters of a program.

        Args:
            tiles: ``tiled`` and ``is_partial``.
        """
        format, bits = self.format, table_bits(self.format)
        middle, row_bytes = format.element_rule.padding_code, CpuLayout().shapes(format, 1, 1)[0][1][2]
        vectors = max(4 if 4 * tokens <= lanes else 2, 8 // bits)
        registers = tokens * (vectors + format.has_zero)
        may_sum = self.sums_codes and not tiles[0] and registers <= 3 * lanes // 2
        looks_up = lanes == 16 and bits <= 4 and has("avx512f")
        by_bytes = may_sum and tokens == 1 and lanes == 8 and bits == 4 and has("avx2")
        by_bytes = by_bytes and format.zero != "float"  # beside such zero points sums take 1.1 times as long
        sums_codes = may_sum and (looks_up or by_bytes)
        vectors = 8 if sums_codes and tokens == 1 else vectors
        decoded = looks_up, by_bytes, sums_codes, vectors * lanes
        whole_group = format.group_length(self.k) if format.groups(self.k) > 1 else 2**31
        superblock = format.scale_rule.factor_columns if format.has_factors else 1
        stored = format.zero, format.scale_dtype, whole_group, format.factors, superblock
        tiled, is_partial = tiles
        return Code(bits, row_bytes, middle, *stored, tokens, tiled, is_partial, lanes, x_dtype, dtype, *decoded)


def refuse_freed(**tensors: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    """Raise RuntimeError for the first tensor whose memory was freed, as by FSDP: compiled code would crash."""
    for name, of in tensors.items():
        if not all(t.data_ptr() for t in (of if isinstance(of, tuple) else (of,))):
            raise RuntimeError(f"{name}: wanted a tensor with memory, got one whose storage was freed")


def panel_columns(group: int, k: int, most: PanelLimits = PanelLimits()) -> int:
    """Columns of a panel: whole groups of ``group`` columns, or an equal share of a longer one."""
    if group <= most.columns:
        groups = -(-k // group)
        panels = -(-groups // min(most.columns // group, most.groups))
        return -(-groups // panels) * group  # of about one size
    if group >= k:
        return most.columns
    step = math.gcd(group, 32)
    return next(part for part in range(most.columns, 0, -step) if group % part == 0)


_THREAD_COLUMNS = 2**14
"""Columns of chunks, times tokens, that are worth a thread: 20 to 100 us."""
