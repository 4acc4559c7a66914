"""The loops of the method "tiles" of ``cpu_mixed_gemm``, as LLVM's intermediate representation: products by AMX. This
module needs llvmlite.

    d[t, n] = sum over groups g of  s[g, n] * (sum over j in g of x[t, j] * c[j, n])  +  z[g, n] * (sum of x[t] over g)

c are the codes - zero points, or the codes where z are zero points in floating point. They are exact in bf16, so that
products of bf16 lose nothing: x is bf16 itself, or the sum of two or three bf16 numbers, its parts. AMX adds up in
float32, and takes numbers below 2**-126 as 0. Loops, outermost first:

    chunk      128 features: a row of the table. A thread takes several
    panel      at most 256 columns and 4 groups, or 576 columns of rounded numbers, or 640 as a whole
    block      2 or 4 tiles of 16 features. The codes of a panel become bf16 in memory, at most 40 KiB
    tokens     1 or 2 tiles of up to 16 tokens
    group      sums of tiles, for 32 columns at a time, are 4 KiB in memory. Those of all groups are scaled and added up

A tile's row holds one field of 16 neighbouring bytes, as vectors in program.py do, for two columns side by side. Sums
are put in the order of features at the end of a panel. The products of a token and a feature are added in one order,
whatever m, the tiles and the number of threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from llvmlite import ir

from w4gemm.kernels.cpu.amx import I8, I16, ROW, WORDS, Amx
from w4gemm.kernels.cpu.builder import F32, I32, Builder, Int, constant, floats_of, ints_of, module_of
from w4gemm.kernels.cpu.compiled import Code, CodeArguments
from w4gemm.kernels.cpu.program import AHEAD, number_of, scale_and_addend, scale_and_zero
from w4gemm.kernels.cpu.tile_product import GROUPS, SIDE, STEP, PartArguments
from w4gemm.packing.layouts.cpu import TABLE_N

_PRODUCTS = 4 * SIDE * ROW
"""Bytes of a group's products."""


class TileCode(NamedTuple):
    """Compile-time parameters beside those of :class:`Code`."""

    rows: int
    """Tokens of a tile."""
    tiles: int
    """Tiles of tokens at a time, 1 or 2."""
    parts: int
    """bf16 numbers of a number of x."""
    is_rounded: bool
    """True if numbers of the weight, rounded to bf16, are multiplied instead of codes."""
    columns: int
    """Columns of a panel at most."""
    gathers: bool
    """True if x lies in the order of tiles, which have 64 bytes of each token, side by side: see :func:`parts`."""
    is_whole: bool
    """True if a panel has all columns, so that its sums are the results."""

    @property
    def tokens(self) -> int:
        """Tokens at a time."""
        return self.rows * self.tiles


def parts(dtype: torch.dtype, count: int, has_sums: bool, tile_rows: int) -> str:
    """Return the text of a module whose function takes :class:`PartArguments`. It splits x of ``dtype`` into ``count``
    bf16 numbers, of which each has the upper bits of what the others leave, and sums up groups. Rows from m on become
    0.

    Args:
        tile_rows: 32 columns of so many rows are written side by side, then the next 32 columns of the panel, then the
            next rows; 0 for rows side by side.
    """

    def write(b: Builder, arguments: list[Int]) -> None:
        a, kind, wide = PartArguments(*arguments), floats_of(SIDE), ints_of(SIDE)
        upper, shift = (ir.Constant(wide, [n] * SIDE) for n in (-65536, 16))
        halves = ir.VectorType(I16, SIDE)
        with b.loop(0, a.rows) as row, b.loop(0, a.k, a.panel) as first:
            target = a.target + (first // a.panel * a.panel_stride + row * a.row_stride) * 2
            if tile_rows:
                target -= (row - row // tile_rows * tile_rows) * (a.row_stride - STEP) * 2
            is_row, last = b.icmp_signed("<", row.value, a.m.value), (first + a.panel).at_most(a.k)
            source = a.x + Int(b, b.select(is_row, row.value, b.number(0))) * a.k * dtype.itemsize
            with b.loop(first, last, a.group if has_sums else a.panel) as start:
                total = b.variable(constant(0, SIDE))
                with b.loop(start, (start + a.group).at_most(last) if has_sums else last, SIDE) as column:
                    rest = b.select(is_row, b.floats(source + column * dtype.itemsize, dtype, SIDE), constant(0, SIDE))
                    if has_sums:
                        b.store(b.fadd(b.load(total), rest), total)
                    for part in range(count):
                        bits = b.and_(b.bitcast(rest, wide), upper)
                        place = column - first
                        if tile_rows:
                            place += place // STEP * ((tile_rows - 1) * STEP)
                        b.write(b.trunc(b.lshr(bits, shift), halves), target + (a.part_stride * part + place) * 2)
                        rest = b.fsub(rest, b.bitcast(bits, kind))
                if has_sums:
                    groups = (a.k + a.group - 1) // a.group
                    b.write(b.sum_of(b.load(total)), a.sums + (row * groups + start // a.group) * 4)

    return module_of(write, len(PartArguments._fields))


class Tiles:
    """Writes the function."""

    @classmethod
    def text(cls, code: Code, tile: TileCode, amx: type[Amx] = Amx) -> str:
        """Return the text of a module whose function takes :class:`CodeArguments`."""

        def write(b: Builder, arguments: list[Int]) -> Any:
            return cls(code, tile, b, amx(b), CodeArguments(*arguments)).write()

        return module_of(write, len(CodeArguments._fields))

    def __init__(self, code: Code, tile: TileCode, b: Builder, amx: Amx, a: CodeArguments) -> None:
        self.code, self.tile, self.b, self.amx, self.a = code, tile, b, amx, a
        self.width = 4 // tile.tiles
        """Tiles of features of a block."""
        assert self.width % code.fields == 0
        self.features, self.has_sums = self.width * SIDE, code.zero == "float" and not tile.is_rounded
        self.largest = b.variable(ir.Constant(ints_of(SIDE), [0] * SIDE))
        self.codes, self.panel_bytes = b.array(tile.columns // 2 * SIDE * self.width), tile.columns // 2 * ROW
        """bf16 codes of a panel: of each tile, a row for two columns."""
        self.scaled_bytes = 2 * self.width * ROW
        self.scaled = b.array(GROUPS * self.scaled_bytes // 4)
        """Of a group: scales of each tile, then zero points."""
        self.products = b.array(GROUPS * _PRODUCTS // 4)

    def write(self) -> Any:
        """Build the loops, and return the largest bit pattern of a result's magnitude in float32."""
        b, a, rows = self.b, self.a, self.tile.rows
        self.amx.configure([rows] * 6 + [SIDE] * 2)
        with b.loop(a.first_chunk, a.last_chunk) as chunk, b.loop(0, a.k, a.panel) as first:
            x, groups = a.x + first // a.panel * a.x_panel * 2, self.groups_until((first + a.panel).at_most(a.k))
            groups -= self.groups_until(first)
            with b.loop(0, (a.columns - chunk * TABLE_N).at_most(TABLE_N), self.features) as feature:
                with b.loop(0, groups) as group:
                    self.decode(chunk, feature, first, group)
                with b.loop(0, a.m, self.tile.tokens) as token:
                    spans = 1 if self.tile.is_rounded else groups
                    with b.loop(0, spans) as span:
                        start, end = self.panel(first) if self.tile.is_rounded else self.columns(first, span)
                        self.multiply(x + (token * a.x_row) * 2, (start - first, end - first), span)
                    self.add_up(token, first, spans, (chunk, feature))
        self.amx.release()
        return b.intrinsic("llvm.vector.reduce.umax", I32, b.load(self.largest))

    def decode(self, chunk: Int, feature: Int, first: Int, group: Int) -> None:
        """Write the codes of a group in bf16, its scales and its zero points."""
        b, a, code = self.b, self.a, self.code
        rows = a.table + chunk * a.k * code.row_bytes + feature * code.bits // 8
        start, end = self.columns(first, group)
        scales, zeros = self.factors(chunk, start, feature)
        if not self.tile.is_rounded:
            at = self.scaled + group * self.scaled_bytes
            for i in range(self.width):
                b.write(scales[i], at + i * ROW)
                if self.has_sums:
                    b.write(zeros[i], at + (self.width + i) * ROW)
            zeros = [b.fptosi(zero, ints_of(SIDE)) for zero in zeros] if code.zero == "int" else []
        with b.loop(start, end, 2) as column:
            target = self.codes + (column - first) * (ROW // 2)
            b.prefetch(rows + column * code.row_bytes + AHEAD)
            b.prefetch(rows + (column + 1) * code.row_bytes + AHEAD)
            for i, number in enumerate(self.numbers_of(rows, column, scales, zeros)):
                b.write(number, target + i * self.panel_bytes)

    def multiply(self, x: Int, columns: tuple[Int, Int], span: Int) -> None:
        """Write the products of a panel's columns, all or a group: for each tile of tokens, those of each tile of
        features. Tiles 0 to 3 hold them, 4 and 5 those of x, 6 and 7 two of features."""
        b, a, amx, tiles = self.b, self.a, self.amx, self.tile.tiles
        rows = self.tile.rows
        row, step = (ROW, rows * STEP) if self.tile.gathers else (a.x_row * 2, STEP)
        for i in range(4):
            amx.zero(i)
        with b.loop(columns[0], columns[1], STEP) as column:
            for pair in range(0, self.width, 2):
                for w in range(2):
                    amx.load(6 + w, self.codes + (pair + w) * self.panel_bytes + column * (ROW // 2), ROW)
                for p, t in itertools.product(range(self.tile.parts), range(tiles)):
                    own = 4 + (p + t) % 2
                    amx.load(own, x + (column // STEP * step + a.x_part * p + a.x_row * (rows * t)) * 2, row)
                    for w in range(2):
                        amx.multiply(self.width * t + pair + w, own, 6 + w)
        for i in range(4):
            amx.store(i, self.products + span * _PRODUCTS + i * (SIDE * ROW))

    def add_up(self, token: Int, first: Int, spans: Int | int, place: tuple[Int, Int]) -> None:
        """Add the products of a panel, scaled if they are of codes, to the results of a block."""
        b, a, kind, vectors = self.b, self.a, floats_of(SIDE), range(self.width)
        sums, of_row = a.x_sums + self.groups_until(first) * 4, self.groups_until(a.k) * 4
        for t in range(self.tile.tiles):
            with b.loop(0, self.tile.rows) as row:
                own, totals = token + row + t * self.tile.rows, [b.variable(constant(0, SIDE)) for _ in vectors]
                with b.loop(0, spans) as span:
                    scales = self.scaled + span * self.scaled_bytes
                    products = self.products + span * _PRODUCTS + row * ROW + t * self.width * (SIDE * ROW)
                    x_sum = self.x_sum(sums + own * of_row + span * 4) if self.has_sums else None
                    for w, total in enumerate(totals):
                        product = b.read(products + w * (SIDE * ROW), kind)
                        if self.tile.is_rounded:
                            b.store(product, total)
                            continue
                        self.add_scaled(total, product, scales + w * ROW, x_sum)
                self.put(own, place, first, [b.load(total) for total in totals])

    def add_scaled(self, total: Any, product: Any, scale: Int, x_sum: Any) -> None:
        """Add a group's product, times the scale at an address, to a variable; and ``x_sum``, unless it is None, times
        the zero point."""
        b, kind = self.b, floats_of(SIDE)
        result = b.multiply_add(product, b.read(scale, kind), b.load(total))
        if x_sum is not None:
            result = b.multiply_add(x_sum, b.read(scale + self.width * ROW, kind), result)
        b.store(result, total)

    def numbers_of(self, rows: Int, column: Int, scales: Sequence[Any], zeros: Sequence[Any]) -> list[Any]:
        """Return what two columns hold in bf16, codes or numbers, by vectors; ``rows`` is the address of the block in
        column 0."""
        b, code, result = self.b, self.code, []
        for first in range(0, self.width, code.fields):
            bytes = rows + column * code.row_bytes + first // code.fields * SIDE
            both = (b.read(bytes + c * code.row_bytes, ir.VectorType(I8, SIDE)) for c in range(2))
            pair = [b.zext(raw, ints_of(SIDE)) for raw in both]
            result += (
                self.rounded(pair, scales, zeros, first) if self.tile.is_rounded else self.codes_of(pair, zeros, first)
            )
        return result

    def rounded(self, pair: Sequence[Any], scales: Sequence[Any], addends: Sequence[Any], first: int) -> list[Any]:
        """Return the rounded numbers of 16 bytes of two columns, by fields, of which the first one is of tile
        ``first``."""
        b, code, result = self.b, self.code, []
        for f in range(code.fields):
            shift, of_tile = ir.Constant(ints_of(SIDE), [f * code.bits] * SIDE), (scales[first + f], addends[first + f])
            both = self.amx.rounded(*(number_of(b, code, b.lshr(raw, shift), *of_tile) for raw in pair))
            result.append(b.lanes_of(both, [i // 2 + SIDE * (i % 2) for i in range(2 * SIDE)]))
        return result

    def codes_of(self, pair: Sequence[Any], zeros: Sequence[Any], first: int) -> list[Any]:
        """Return the bf16 codes of 16 bytes of two columns, by fields, of which the first one is of tile ``first``.

        Args:
            pair: the bytes of each column, as int32.
            zeros: integer zero points of the tiles, if they are subtracted.
        """
        b, code = self.b, self.code
        wide = ints_of(SIDE)

        def every(number: int) -> Any:
            return ir.Constant(wide, [number] * SIDE)

        if code.bits == 8:
            halves = []
            for raw in pair:
                if zeros:
                    raw = b.sub(raw, zeros[first])
                elif code.zero == "none":
                    raw = b.sub(raw, every(code.middle))
                halves.append(b.bitcast(b.sitofp(raw, floats_of(SIDE)), wide))
            low, high = halves
            return [b.or_(b.lshr(low, every(16)), b.and_(high, every(-65536)))]
        packed = b.bitcast(b.or_(pair[0], b.shl(pair[1], every(16))), WORDS)
        mask = 2**code.bits - 1
        result = []
        for f in range(code.fields):
            index = b.lshr(packed, ir.Constant(WORDS, [f * code.bits] * 2 * SIDE)) if f else packed
            if zeros:
                zero = b.mul(zeros[first + f], every(0x10001))
                index = b.sub(b.and_(index, ir.Constant(WORDS, [mask] * 2 * SIDE)), b.bitcast(zero, WORDS))
                table = [float(n if n < 16 else n - 32) for n in range(32)]
            else:
                table = [float((n & mask) - (code.middle if code.zero == "none" else 0)) for n in range(32)]
            result.append(self.amx.lookup(table, index))
        return result

    def factors(self, chunk: Int, column: Int, feature: Int) -> tuple[list[Any], list[Any]]:
        """Return, by vectors, the scales of a block's codes in a column, and their zero points, or what is added to
        rounded numbers."""
        fields, some = self.code.fields, range(self.width // self.code.fields)
        lanes = [range(i * SIDE * fields + f, (i + 1) * SIDE * fields, fields) for i in some for f in range(fields)]
        read = scale_and_addend if self.tile.is_rounded else scale_and_zero
        both = read(self.b, self.code, self.a, (chunk, column, feature), self.features)
        scales, zeros = ([self.b.lanes_of(vector, those) for those in lanes] for vector in both)
        return scales, zeros

    def columns(self, first: Int, group: Int) -> tuple[Int, Int]:
        """Return the first column of a panel's group, and the one behind its last."""
        start = first + group * self.a.group
        return start, (start + self.a.group).at_most(self.panel(first)[1])

    def panel(self, first: Int) -> tuple[Int, Int]:
        """Return the first column of a panel, and the one behind its last."""
        return first, (first + self.a.panel).at_most(self.a.k)

    def groups_until(self, column: Int) -> Int:
        """Return the number of groups before a column, at most k."""
        return (column + self.a.group - 1) // self.a.group

    def x_sum(self, sums: Int) -> Any:
        """Return a vector of the sum of a token's x over a group, which is at an address."""
        return self.b.spread(self.b.read(sums, F32), SIDE)

    def put(self, token: Int, place: tuple[Int, Int], first: Int, totals: Sequence[Any]) -> None:
        """Add the totals of a token and a panel, by vectors, to the sums of the features from a place on, chunk and
        feature, in the order of features. They are the sums if ``first`` is column 0, and the results behind the last
        panel."""
        b, a, fields, dtype = self.b, self.a, self.code.fields, self.code.dtype
        chunk, feature = place
        wide = floats_of(SIDE * fields)
        in_order = [i + f * SIDE for i in range(SIDE) for f in range(fields)]
        out = a.out + (token * a.columns + chunk * TABLE_N + feature) * dtype.itemsize
        sums = out if dtype.itemsize == 4 else a.scratch + (token * TABLE_N + feature) * 4
        for i in range(0, self.width, fields):
            result = b.lanes_of(b.joined(totals[i : i + fields]), in_order)
            if not self.tile.is_whole:
                is_first, zero = b.icmp_signed("==", first.value, b.number(0)), ir.Constant(wide, [0.0] * SIDE * fields)
                result = b.fadd(b.select(is_first, zero, b.read(sums + i * SIDE * 4, wide)), result)
            if sums is out:
                b.write(result, out + i * SIDE * 4)
            elif self.tile.is_whole:
                b.write(self.narrowed(result), out + i * SIDE * dtype.itemsize)
            else:
                with b.if_else(b.icmp_signed("<", (first + a.panel).value, a.k.value)) as (before_last, is_last):
                    with before_last:
                        b.write(result, sums + i * SIDE * 4)
                    with is_last:
                        b.write(self.narrowed(result), out + i * SIDE * dtype.itemsize)
            for f in range(0 if self.tile.is_rounded else fields):
                bits = b.bitcast(b.lanes_of(result, range(f * SIDE, (f + 1) * SIDE)), ints_of(SIDE))
                bits = b.and_(bits, ir.Constant(ints_of(SIDE), [2**31 - 1] * SIDE))
                b.store(b.intrinsic("llvm.umax", bits.type, bits, b.load(self.largest)), self.largest)

    def narrowed(self, result: Any) -> Any:
        """Return sums in the dtype of ``out``, which has 16 bits."""
        if self.code.dtype != torch.bfloat16 or self.code.fields == 1:
            return self.b.rounded(result, self.code.dtype)
        halves = [self.b.lanes_of(result, range(i, i + SIDE)) for i in range(0, result.type.count, SIDE)]
        return self.b.joined([self.amx.rounded(*halves[i : i + 2]) for i in range(0, len(halves), 2)])
