"""The methods "tiles", "rounded" and "pairs" of ``cpu_mixed_gemm``: processors that multiply bf16 by AMX or AVX-512.
``tiles.py`` and ``pairs.py`` have their loops."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from w4gemm.core.formats import WeightFormat
from w4gemm.kernels.cpu import machine
from w4gemm.kernels.cpu.compiled import INFINITE, MOST_CODES, CompiledProduct, Direct, PanelLimits
from w4gemm.kernels.cpu.machine import Run, array_of, machine_code, packing, run_all
from w4gemm.packing.layouts.cpu import TABLE_N, table_bits

if TYPE_CHECKING:
    from w4gemm.kernels.cpu.tiles import TileCode

STEP = 32
"""Columns that an instruction of AMX multiplies."""
SIDE = 16
"""Rows of a tile at most, and features of a tile."""
GROUPS = 4
"""Groups of a panel of codes for AMX, at most, so that their sums and codes fit the first cache. Of 8 groups of 32
columns a product of 1536 x 576 took 1.25 times as long at 64 tokens, 1.6 times at 256 (Xeon, 2026-11-28)."""
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""bf16 numbers whose sum is a number of x."""
_SMALL = 2**16
"""Bytes that are the faster made by ctypes, which clears them, than as a tensor."""
_DISPLACING = 1024
"""Rows of a multiple of this many columns lie at multiples of 2 KiB, so that those of a tile displace each other from
the first cache. x is copied then, unless the second cache holds it and few features share the copy."""
_FEW_NUMBERS, _FEW_FEATURES = 2**19, 2048
"""Numbers of such an x that the second cache holds, and features that are too few for a copy: without it 640 x 2048 and
1024 x 4096 take 0.88 to 0.95 of the time, up to 1 MiB of bf16, but 4096 x 4096 and 11008 x 2048 1.02 to 1.05 times, and
every layer with 2 MiB or more 1.1 to 1.5 times (Xeon, 2026-11-29)."""
_MOST_WHOLE = 640
"""Columns of rounded numbers for AMX that may be one panel, whose sums are the results: Gemma 3 270M's layers have 640.
In one panel they take 0.88 to 0.94 of the time of two, for 64 to 256 tokens (three layers, Xeon, 2026-11-29)."""
_PAIRS_TOKENS = 4
"""Tokens of a tile of "pairs"."""


@functools.cache
def is_available() -> bool:
    """True if llvmlite is installed, this processor has AMX for bf16, and the system lets this process use it."""
    permitted = getattr(torch.cpu, "_init_amx", lambda: False)  # no public function asks the system
    return machine.is_available() and machine.has("amx-bf16", "avx512bw") and permitted()


@functools.cache
def has_pairs() -> bool:
    """True if llvmlite is installed, and this processor has AVX-512's dot products of bf16."""
    return machine.is_available() and machine.has("avx512bf16", "avx512bw")


def holds(format: WeightFormat, k: int) -> bool:
    """True if no instruction's columns are of two groups."""
    return k % STEP == 0 and format.group_length(k) % STEP == 0


def panel_limits(tiles: bool, k: int) -> tuple[PanelLimits, PanelLimits]:
    """Return the most that panels of codes have, and those of rounded numbers.

    Args:
        tiles: True for AMX, False for AVX-512's pairs.
        k: columns of the weight.
    """
    if not tiles:
        return PanelLimits(), PanelLimits(columns=256)
    return PanelLimits(GROUPS, 256), PanelLimits(columns=_MOST_WHOLE if k <= _MOST_WHOLE else 576)


def multiplies_bf16(format: WeightFormat, k: int) -> bool:
    """True if this processor's products of bf16 serve a weight, so that bf16 x is the faster one for many tokens."""
    return holds(format, k) and (is_available() or has_pairs())


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
    """Compiled code for a number of tokens and dtypes of x and results."""

    tokens: int
    """Of which ``out`` has a multiple."""
    parts: int
    gathers: bool
    dtype: torch.dtype
    """Of ``out``."""
    split: Run
    run: Run


class _Program(NamedTuple):
    """What is compiled."""

    text: Callable[..., str]
    """Returns the text of the module."""
    tokens: int
    """Of which a multiple is computed."""
    tile: TileCode


class TileProduct(CompiledProduct):
    """x (m, k) @ w.T (m, n) by AMX, of a format and k that :func:`holds` takes.

    Args:
        is_rounded: True if bf16 x is multiplied with numbers of the weight rounded to bf16, as those of a dense layer
            are, rather than with codes. Sums need no scales then.
        instructions: class that builds instructions; none for :class:`w4gemm.kernels.cpu.amx.Amx`.
    """

    has_tiles = True

    def __init__(self, format: WeightFormat, n: int, k: int, is_rounded: bool = False, *instructions: Hashable) -> None:
        most = panel_limits(self.has_tiles, k)[is_rounded]
        super().__init__(format, n, k, most, sums_codes=False)
        self.most_columns, self.is_rounded, self.instructions = most.columns, is_rounded, instructions
        self.compiled: dict[tuple[int, torch.dtype, torch.dtype], _Compiled] = {}
        self.has_sums = format.zero == "float" and not is_rounded

    def __call__(self, x: torch.Tensor, weight: tuple[torch.Tensor, ...], out: torch.Tensor | None) -> torch.Tensor:
        m, dtype = x.shape[0], torch.float32 if out is None else out.dtype
        own = self.compiled.get((m, x.dtype, dtype)) or self._compile(m, x.dtype, dtype)
        rows = -(-m // own.tokens) * own.tokens
        is_whole = rows == m and self.columns == self.n
        if out is None or not is_whole:
            out = torch.empty(rows, self.columns, dtype=own.dtype)
        largest = self._multiply(own, x.contiguous(), weight, out)
        result = out if is_whole else out[:m, : self.n]
        if largest >= INFINITE:
            self.repair(result, x, weight)
        return result

    def _multiply(self, own: _Compiled, x: torch.Tensor, weight: tuple[torch.Tensor, ...], out: torch.Tensor) -> int:
        """Write x @ w.T to ``out`` (rows, columns), with rows of padding, and return the largest bit pattern of a
        result in float32; 0 of rounded numbers, whose sums are finite if the result is."""
        (m, k), rows, panel = x.shape, out.shape[0], self.panel
        strides = (own.parts * rows * panel, rows * panel, panel) if own.gathers else (panel, rows * k, k)
        tokens: tuple[int, ...] = (x.data_ptr(), *strides, 0)
        memory = []
        if own.parts > 1 or rows != m or own.gathers or self.has_sums:
            columns = -(-k // panel) * panel if own.gathers else k
            memory.append(torch.empty(own.parts * rows * columns, dtype=torch.bfloat16))
            if self.has_sums:
                memory.append(torch.empty(rows * -(-k // self.group), dtype=torch.float32))
            tokens = (memory[0].data_ptr(), *strides, memory[-1].data_ptr())
            own.split(_packed(x.data_ptr(), *tokens, m, rows, k, panel, self.group))
        size = self.scratch_bytes(own, rows)
        every = size * torch.get_num_threads()
        if every <= _SMALL:
            scratch = array_of(every)()
        else:
            memory.append(torch.empty(every, dtype=torch.uint8))
            scratch = array_of(every).from_address(memory[-1].data_ptr())
        arguments = self.arguments(tokens, weight, out, self.worth(rows), ctypes.addressof(scratch), size)
        return run_all(own.run, arguments)

    def direct(self, m: int, dtype: torch.dtype) -> Direct | None:
        own = self.compiled.get((m, dtype, dtype)) or self._compile(m, dtype, dtype)
        if m % own.tokens or own.parts > 1 or own.gathers or self.has_sums:
            return None
        return self.alone(own.run, m, self.worth(m), self.scratch_bytes(own, m))

    def scratch_bytes(self, own: _Compiled, rows: int) -> int:
        """Return the bytes of scratch of a thread."""
        return 4 * TABLE_N * rows * (own.dtype is not torch.float32 and self.panel < self.k)

    def worth(self, tokens: int) -> int:
        """Return the columns of chunks, times tokens, that are worth a thread: some 70 us."""
        return 2**16

    def _compile(self, m: int, x_dtype: torch.dtype, dtype: torch.dtype) -> _Compiled:
        """Return the code for m tokens and results of a dtype, which become float32 where they get padding."""
        from w4gemm.kernels.cpu.tiles import parts

        key, program = (m, x_dtype, dtype), self._program(m, x_dtype)
        tile = program.tile
        dtype = dtype if m % program.tokens == 0 and self.columns == self.n else torch.float32
        code = self._parameters(tile.tokens, (m > tile.tokens, False), SIDE, torch.bfloat16, dtype)
        split = machine_code(parts, x_dtype, tile.parts, self.has_sums, tile.rows * tile.gathers)
        run = machine_code(program.text, code, tile, *self.instructions)
        if len(self.compiled) > MOST_CODES:
            self.compiled.clear()
        self.compiled[key] = _Compiled(program.tokens, tile.parts, tile.gathers, dtype, split, run)
        return self.compiled[key]

    def _program(self, m: int, dtype: torch.dtype) -> _Program:
        """Return the program for m tokens of x, in tiles of which the last has few rows of padding."""
        from w4gemm.kernels.cpu.tiles import TileCode, Tiles

        at_once = 2 if m > SIDE and table_bits(self.format) > 2 else 1  # eight tiles hold the sums of two by two
        rounds = -(-m // (at_once * SIDE))
        is_near = PARTS[dtype] == 1 and m * self.k <= _FEW_NUMBERS and self.n <= _FEW_FEATURES
        apart = rounds > 1 and self.k % _DISPLACING == 0 and not is_near
        rows, is_whole = -(-m // (rounds * at_once)), self.panel >= self.k
        tile = TileCode(rows, at_once, PARTS[dtype], self.is_rounded, self.most_columns, apart, is_whole)
        return _Program(Tiles.text, tile.tokens, tile)


class PairProduct(TileProduct):
    """bf16 x (m, k) @ w.T (m, n) by AVX-512's dot products of pairs, of a format and k that :func:`holds` takes."""

    has_tiles = False

    def worth(self, tokens: int) -> int:
        return 2**17 * tokens // (tokens + 4)  # decoding a weight takes as long as four tokens

    def _program(self, m: int, dtype: torch.dtype) -> _Program:
        from w4gemm.kernels.cpu.pairs import PairTiles
        from w4gemm.kernels.cpu.tiles import TileCode

        rows, is_whole = -(-m // -(-m // _PAIRS_TOKENS)), self.panel >= self.k
        tile = TileCode(rows, 1, 1, self.is_rounded, self.most_columns, False, is_whole)
        return _Program(PairTiles.text, m, tile)
