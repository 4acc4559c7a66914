"""The method "tiles" of ``cpu_mixed_gemm``: processors with AMX. ``tiles.py`` has its loops."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.kernels.cpu import compiled
from w4gemm.kernels.cpu.compiled import MOST_CODES, PANEL, CompiledProduct, Run, Tokens, machine_code, packing, run_all
from w4gemm.packing.layouts.cpu import table_bits

STEP = 32
"""Columns that an instruction of AMX multiplies."""
SIDE = 16
"""Rows of a tile at most, and features of a tile."""
GROUPS = 4
"""Groups of a panel, at most, so that their sums and codes fit the first cache. Of 8 groups of 32 columns a product of
1536 x 576 took 1.25 times as long at 64 tokens, 1.6 times at 256 (Xeon, 2026-11-28)."""
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""bf16 numbers whose sum is a number of x."""
_INFINITE = 0x7F800000
_THREAD_COLUMNS = 2**16
"""Columns of chunks, times tokens, that are worth a thread."""
_DISPLACING = 1024
"""Rows of a multiple of this many columns lie at multiples of 2 KiB, so that those of a tile displace each other from
the first cache."""


@functools.cache
def is_available() -> bool:
    """True if llvmlite is installed, this processor has AMX for bf16, and the system lets this process use it."""
    permitted = getattr(torch.cpu, "_init_amx", lambda: False)  # no public function asks the system
    return compiled.is_available() and compiled.has("amx-bf16", "avx512bw") and permitted()


def holds(format: WeightFormat, k: int) -> bool:
    """True if no instruction's columns are of two groups."""
    return k % STEP == 0 and format.group_length(k) % STEP == 0


class PartArguments(NamedTuple):
    """Arguments of :func:`w4gemm.kernels.cpu.tiles.parts`, int64 in a row: addresses, and numbers of elements."""

    x: Any
    """(m, k), contiguous."""
    target: Any
    """``x`` of :class:`w4gemm.kernels.cpu.compiled.CodeArguments`, with ``rows`` tokens. So are the next ones."""
    panel_stride: Any
    part_stride: Any
    row_stride: Any
    sums: Any
    m: Any
    rows: Any
    k: Any
    panel: Any
    group: Any


_packed = packing(PartArguments)


class _Compiled(NamedTuple):
    """Compiled code for a number of tokens and a dtype of x."""

    tokens: int
    """Tokens at a time."""
    parts: int
    split: Run
    run: Run


class TileProduct(CompiledProduct):
    """x (m, k) @ w.T (m, n) in float32 by AMX, of a format and k that :func:`holds` takes.

    Args:
        is_rounded: bf16 x is multiplied with numbers of the weight rounded to bf16, as those of a dense layer are,
            rather than with codes. Sums need no scales then.
        instructions: class that builds instructions; none for :class:`w4gemm.kernels.cpu.amx.Amx`.
    """

    def __init__(self, format: WeightFormat, n: int, k: int, is_rounded: bool, *instructions: Hashable) -> None:
        super().__init__(format, n, k, PANEL if is_rounded else GROUPS)
        self.is_rounded, self.instructions = is_rounded, instructions
        self.compiled: dict[tuple[int, torch.dtype], _Compiled] = {}
        self.has_sums, self.group = format.zero == "float" and not is_rounded, min(format.group_length(k), self.panel)

    def __call__(self, x: torch.Tensor, weight: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> torch.Tensor:
        m = x.shape[0]
        own = self.compiled.get((m, x.dtype)) or self._compile(m, x.dtype)
        rows = -(-m // own.tokens) * own.tokens
        if out is None or rows != m or self.columns != self.n or out.dtype is not torch.float32:
            out = torch.empty(rows, self.columns, dtype=torch.float32)
        largest = self._multiply(own, x.contiguous(), weight, out)
        result = out if rows == m and self.columns == self.n else out[:m, : self.n]
        # sums before scales, and parts of infinities, may be infinite where no result is
        if largest >= _INFINITE and not self.is_rounded:
            those = ~result.isfinite().all(1)
            result[those] = super().__call__(x[those], weight, None)
        return result

    def _multiply(self, own: _Compiled, x: torch.Tensor, weight: tuple[torch.Tensor, ...], out: torch.Tensor) -> int:
        """Write x @ w.T to ``out``, float32 (rows, columns), with rows of padding, and return the largest bit pattern
        of a result."""
        (m, k), rows, panel = x.shape, out.shape[0], self.panel
        apart = rows > own.tokens and k % _DISPLACING == 0  # a panel's rows side by side
        strides = (own.parts * rows * panel, rows * panel, panel) if apart else (panel, rows * k, k)
        tokens, memory = Tokens(x.data_ptr(), *strides, 0), []
        if own.parts > 1 or rows != m or apart or self.has_sums:
            columns = -(-k // panel) * panel if apart else k
            memory = [torch.empty(own.parts * rows * columns, dtype=torch.bfloat16)]
            memory += [torch.empty(rows * -(-k // self.group), dtype=torch.float32)] if self.has_sums else []
            tokens = Tokens(memory[0].data_ptr(), *strides, memory[-1].data_ptr())
            own.split(_packed(x.data_ptr(), *tokens, m, rows, k, panel, self.group))
        largest = (ctypes.c_int64 * torch.get_num_threads())()
        first = ctypes.addressof(largest)
        run_all(own.run, self.arguments(tokens, weight, out, _THREAD_COLUMNS, lambda thread: first + 8 * thread))
        return max(largest)

    def _compile(self, m: int, dtype: torch.dtype) -> _Compiled:
        """Return the code for m tokens, in tiles of which the last has few rows of padding."""
        from w4gemm.kernels.cpu.tiles import TileCode, parts, sums

        bits = table_bits(self.format)
        at_once = 2 if m > SIDE and bits > 2 else 1  # eight tiles hold the sums of two by two
        rounds = -(-m // (at_once * SIDE))
        tile = TileCode(-(-m // (rounds * at_once)), at_once, PARTS[dtype], self.is_rounded)
        code = self._parameters(tile.tokens, True, SIDE, torch.bfloat16, torch.float32)
        split = machine_code(parts, dtype, tile.parts, self.has_sums)
        run = machine_code(sums, code, tile, *self.instructions)
        if len(self.compiled) > MOST_CODES:
            self.compiled.clear()
        self.compiled[m, dtype] = _Compiled(tile.tokens, tile.parts, split, run)
        return self.compiled[m, dtype]
