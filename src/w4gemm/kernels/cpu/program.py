"""The loops of the method "compiled" of ``cpu_mixed_gemm``, as LLVM's intermediate representation. This module needs
llvmlite.

    d[t, n] = sum over panels p of (sum over j in p of x[t, j] * w[j, n]),  w the float32 number of dequantize()

or, for a few tokens and codes that are looked up, which is one instruction less a number,

    d[t, n] = sum over groups g of  s[g, n] * (sum over j in g of x[t, j] * c[j, n]  +  r[g, n] * sum of x[t] over g)
                                    + t[g, n]

with c, r and t as in kernel.py. Then sums may be infinite where no result is, and the largest one is returned. Loops,
outermost first:

    chunk      128 features: a row of the table. A thread takes several
    panel      at most 64 columns, and groups as a whole where that is less
    block      2, 4 or 8 vectors of features. If m is at most ``tokens``, the columns of a panel are decoded, multiplied
               and added up in registers at once. Else they are decoded to memory, at most 16 KiB, and for each
    tile       of ``tokens`` tokens they are multiplied and added up. The last one may have fewer

A byte has 8 / bits codes of neighbouring features, its fields. Vectors hold one field of neighbouring bytes: lane i of
field f is feature i * fields + f, but for AVX2's lookups. Sums are put in the order of features at the end, of a panel
in tiles. The products of numbers are added in one order, whatever m, the tile and the number of threads; those of codes
whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from llvmlite import ir

from w4gemm.kernels.cpu.builder import F32, HALVES, I32, STORED, Builder, Int, constant, floats_of, ints_of, module_of
from w4gemm.kernels.cpu.compiled import MOST_FEATURES, PANEL, Code, CodeArguments
from w4gemm.packing.layouts.cpu import TABLE_N

AHEAD = 8192
"""Bytes of the table between what is read and what is prefetched."""


def sums(code: Code) -> str:
    """Return the text of a module whose function takes :class:`CodeArguments`."""
    return module_of(lambda b, arguments: _Sums(code, b, arguments).write(), len(CodeArguments._fields))


class _Block(NamedTuple):
    """Features that are multiplied at once."""

    chunk: Int
    feature: Int
    """The first one in its chunk."""
    features: int
    lanes: int
    """Bytes of a row, and lanes of a field."""


class _Sums:
    """Writes the function."""

    def __init__(self, code: Code, b: Builder, arguments: Sequence[Int]) -> None:
        self.code, self.b, self.a = code, b, CodeArguments(*arguments)
        assert code.features <= TABLE_N and code.features % code.fields == 0
        self.sums = None if code.tiled else b.array(code.tokens * TABLE_N)
        """Sums of a chunk, float32 (tokens, 128), of a block in the order of lanes; those of tiles are in ``out``."""
        self.x_panel = b.array(code.tokens * PANEL) if code.x_dtype.itemsize < 4 else None
        """Columns of a panel of x, float32 (tokens, 64), if those of x have 16 bits."""
        self.largest = b.variable(ir.Constant(ints_of(code.lanes), [0] * code.lanes))

    def write(self) -> Any:
        """Build the loops, and return the largest bit pattern of a result's magnitude in float32."""
        b, a, code = self.b, self.a, self.code
        decoded = b.array(PANEL * code.features) if code.tiled else None
        with b.loop(a.first_chunk, a.last_chunk) as chunk:
            with b.loop(0, a.k, a.panel) as first:
                columns = first, (first + a.panel).at_most(a.k)
                x = a.x + first // a.panel * a.x_panel * code.x_dtype.itemsize
                if self.x_panel is not None:
                    self.widen(x, columns[1] - first)
                    x = self.x_panel
                for block in self.blocks(chunk):
                    if decoded is None:
                        self.at_once(x, block, columns)
                    else:
                        self.tiles(x, decoded, block, columns)
            for block in self.blocks(chunk) if decoded is None else ():
                for token in range(code.tokens):
                    self.put(token, block)
        return b.intrinsic("llvm.vector.reduce.umax", I32, b.load(self.largest))

    def blocks(self, chunk: Int) -> Iterator[_Block]:
        """Repeat what is built inside for the blocks of a chunk: first those of ``code.features``, then those of the
        rest."""
        features = (self.a.columns - chunk * TABLE_N).at_most(TABLE_N)
        start = Int(self.b, self.b.number(0))
        for size in sorted({self.code.features, min(self.code.features, MOST_FEATURES)}, reverse=True):
            end = features // size * size
            with self.b.loop(start, end, size) as feature:
                yield _Block(chunk, feature, size, size // self.code.fields)
            start = end

    def widen(self, x: Int, columns: Int) -> None:
        """Write the columns of x at an address as float32."""
        b, code = self.b, self.code
        assert self.x_panel is not None
        size, whole = code.x_dtype.itemsize, columns // code.lanes * code.lanes
        for t in range(code.tokens):
            for lanes, start, end in ((code.lanes, 0, whole), (1, whole, columns)):
                with b.loop(start, end, lanes) as column:
                    numbers = b.floats(x + (self.a.x_row * t + column) * size, code.x_dtype, lanes)
                    b.write(numbers, self.x_panel + (column + t * PANEL) * 4)

    def put(self, token: int, block: _Block) -> None:
        """Write a token's results of a block to ``out``: in the order of features, rounded."""
        b, code, lanes = self.b, self.code, self.code.lanes
        sums = b.lanes_of(b.read(self.sums_of(token, block), floats_of(block.features)), self.in_order(block))
        out = self.a.out + (self.a.columns * token + block.chunk * TABLE_N + block.feature) * code.dtype.itemsize
        for i in range(0, block.features, lanes):
            result = b.lanes_of(sums, range(i, i + lanes))
            if code.sums_codes:
                magnitude = b.and_(b.bitcast(result, ints_of(lanes)), ir.Constant(ints_of(lanes), [2**31 - 1] * lanes))
                b.store(b.intrinsic("llvm.umax", magnitude.type, magnitude, b.load(self.largest)), self.largest)
            rounded = result if code.dtype.itemsize == 4 else b.rounded(result, code.dtype)
            b.write(rounded, out + i * code.dtype.itemsize)

    def sums_of(self, token: int, block: _Block) -> Int:
        """Return the address of the sums of a token and a block, in the order of lanes."""
        assert self.sums is not None
        return self.sums + (block.feature + token * TABLE_N) * 4

    def order(self, block: _Block) -> list[Sequence[int]]:
        """Return the features of a block by fields, in the order of lanes."""
        fields = self.code.fields
        bytes = HALVES if self.code.by_bytes else range(block.lanes)
        return [[i * fields + f for i in bytes] for f in range(fields)]

    def in_order(self, block: _Block) -> list[int]:
        """Return the lanes of a block's fields, one after another, in the order of features."""
        features = [feature for of_field in self.order(block) for feature in of_field]
        return sorted(range(block.features), key=features.__getitem__)

    def at_once(self, x: Int, block: _Block, columns: tuple[Int, Int]) -> None:
        """Multiply a panel with all tokens as it is decoded."""
        tile, (first, _), sums_codes = self.tile(block), columns, self.code.sums_codes
        row = self.a.x_row if self.x_panel is None else Int(self.b, self.b.number(PANEL))
        for start, end, *factors in self.groups(block, columns):
            with self.b.loop(start, end) as column:
                own = x + (column - first) * 4
                rows = [own + row * (t * 4) for t in range(self.code.tokens)]
                self.multiply(rows, self.decoded(block, column, *factors), tile)
            if sums_codes:
                self.add(tile, block, start, *factors)
        if not sums_codes:
            self.add(tile, block, first, (), ())

    def tiles(self, x: Int, decoded: Int, block: _Block, columns: tuple[Int, Int]) -> None:
        """Decode a panel, and multiply it with one tile of tokens after another."""
        b, a, code, first = self.b, self.a, self.code, columns[0]
        out = a.out + (block.chunk * TABLE_N + block.feature) * 4
        for start, end, scale, addend in self.groups(block, columns):
            with b.loop(start, end) as column:
                for f, number in enumerate(self.decoded(block, column, scale, addend)):
                    b.write(number, decoded + ((column - first) * code.fields + f) * block.lanes * 4)
        whole = a.m // code.tokens * code.tokens if code.is_partial else a.m
        with b.loop(0, whole, code.tokens) as token:
            rows = [a.x_row * (t * 4) for t in range(code.tokens)]
            sums = self.products(x + token * a.x_row * 4, rows, decoded, block, columns[1] - first)
            for t, own in enumerate(sums):
                self.accumulate(own, out + a.columns * (token + t) * 4, first)
        if code.is_partial:  # the last token is multiplied again in place of those that are not
            rows = [a.x_row * Int(b, b.number(t)).at_most(a.m - whole - 1) * 4 for t in range(code.tokens)]
            sums = self.products(x + whole * a.x_row * 4, rows, decoded, block, columns[1] - first)
            for t, own in enumerate(sums):
                with b.if_then(b.icmp_signed("<", (whole + t).value, a.m.value)):
                    self.accumulate(own, out + a.columns * (whole + t) * 4, first)

    def products(self, x: Int, rows: Sequence[Int], decoded: Int, block: _Block, columns: Int) -> list[Any]:
        """Multiply a decoded panel with a tile of tokens, and return the sums of each in the order of features.

        Args:
            x, rows: address of the first token, and bytes from there to each one.
        """
        b, code, tile = self.b, self.code, self.tile(block)
        with b.loop(0, columns) as column:
            addresses = (decoded + (column * code.fields + f) * block.lanes * 4 for f in range(code.fields))
            numbers = [b.read(address, floats_of(block.lanes)) for address in addresses]
            self.multiply([x + column * 4 + row for row in rows], numbers, tile)
        return [b.lanes_of(b.joined([b.load(v) for v in of_token]), self.in_order(block)) for of_token in tile]

    def accumulate(self, sums: Any, address: Int, first: Int) -> None:
        """Add sums to those at an address, which they become if ``first`` is column 0."""
        b, kind = self.b, sums.type
        is_first = b.icmp_signed("==", first.value, b.number(0))
        before = b.select(is_first, ir.Constant(kind, [0.0] * kind.count), b.read(address, kind))
        b.write(b.fadd(before, sums), address)

    def tile(self, block: _Block) -> list[list[Any]]:
        """Return variables of sums, for each token one of each field, and that of x if it matters."""
        code, own = self.code, [constant(0, block.lanes)] * self.code.fields
        own += [ir.Constant(F32, 0.0)] * code.sums_x
        return [[self.b.variable(zero) for zero in own] for _ in range(code.tokens)]

    def multiply(self, x: Sequence[Int], numbers: Sequence[Any], tile: list[list[Any]]) -> None:
        """Add the products of a column's numbers and that column of x, of which ``x`` has the tokens' addresses."""
        b = self.b
        for address, of_token in zip(x, tile, strict=True):
            own = b.read(address, F32)
            of_x = b.spread(own, numbers[0].type.count)
            for variable, number in zip(of_token, numbers, strict=False):
                b.store(b.multiply_add(of_x, number, b.load(variable)), variable)
            for variable in of_token[len(numbers) :]:
                b.store(b.fadd(own, b.load(variable)), variable)

    def add(self, tile: list[list[Any]], block: _Block, start: Int, scale: Sequence[Any], zero: Sequence[Any]) -> None:
        """Add a tile of sums to those in memory, which they become if ``start`` is column 0, and clear the tile. Those
        of codes become those of numbers by scales and zero points of a group, by fields."""
        b, code, none = self.b, self.code, constant(0, block.lanes)
        is_first = b.icmp_signed("==", start.value, b.number(0))
        for t, of_token in enumerate(tile):
            values = [b.load(variable) for variable in of_token]
            for f in range(code.fields):
                address = self.sums_of(t, block) + f * (block.lanes * 4)
                result, own = b.select(is_first, none, b.read(address, none.type)), values[f]
                if f == code.fields - 1 and code.top_factor != 1:
                    own = b.fmul(own, constant(code.top_factor, block.lanes))
                if code.sums_x:
                    of_x, middle = b.spread(values[-1], block.lanes), constant(code.middle, block.lanes)
                    if code.zero == "float":
                        result = b.multiply_add(of_x, zero[f], result)
                    own = b.multiply_add(of_x, middle if code.zero == "float" else b.fsub(middle, zero[f]), own)
                b.write(b.multiply_add(own, scale[f], result) if code.sums_codes else b.fadd(result, own), address)
            for variable, value in zip(of_token, values, strict=True):
                b.store(ir.Constant(value.type, None), variable)

    def groups(self, block: _Block, columns: tuple[Int, Int]) -> Iterator[tuple[Int, Int, list[Any], list[Any]]]:
        """Repeat what is built inside for the groups of the columns from the first to before the last: a group's first
        column and the one behind it, and by fields the scales, and zero points of codes or addends of numbers."""
        first, last = columns
        b, a, code = self.b, self.a, self.code
        with b.loop(first, last, a.group) as start:
            read = scale_and_zero if code.sums_codes else scale_and_addend
            both = read(b, code, a, (block.chunk, start, block.feature), block.features)
            scales, addends = ([b.lanes_of(vector, those) for those in self.order(block)] for vector in both)
            yield start, (start + a.group).at_most(last), scales, addends

    def decoded(self, block: _Block, column: Int, scale: Sequence[Any], addend: Sequence[Any]) -> list[Any]:
        """Return the numbers of a column by fields, or its codes - 2**(bits - 1), the last one divided by
        ``top_factor``."""
        b, a, code = self.b, self.a, self.code
        row = a.table + (block.chunk * a.k + column) * code.row_bytes + block.feature * code.bits // 8
        b.prefetch(row + AHEAD)
        if code.by_bytes:
            packed = b.read(row, ir.VectorType(STORED[torch.uint8], block.lanes))
        else:
            kind, parts = ir.VectorType(STORED[torch.uint8], code.lanes), range(0, block.lanes, code.lanes)
            packed = b.joined([b.sext(b.read(row + part, kind), ints_of(code.lanes)) for part in parts])
        shifts = [ir.Constant(packed.type, [code.bits * f] * block.lanes) for f in range(code.fields)]
        if not code.sums_codes:
            fields = zip(shifts, scale, addend, strict=True)
            return [number_of(b, code, b.lshr(packed, shift), *factors) for shift, *factors in fields]
        if code.top_factor == 1:
            return [float_of(b, code, b.lshr(packed, shift), code.middle) for shift in shifts]
        sign, upper = (ir.Constant(packed.type, [n] * block.lanes) for n in (-128, -16))
        top = b.and_(b.xor(packed, sign), upper)  # 16 * (code - 8)
        return [float_of(b, code, packed, code.middle), b.sitofp(top, floats_of(block.lanes))]


def scale_and_zero(b: Builder, code: Code, a: CodeArguments, place: tuple[Int, Int, Int], features: int) -> Any:
    """Return the scales of features from a place on, chunk, column and feature, and their zero points as float32, or
    :attr:`Code.middle` without."""
    chunk, column, feature = place
    at = (chunk * a.groups + column // code.whole_group) * TABLE_N + feature
    size = code.scale_dtype.itemsize
    scale = b.floats(a.scales + at * size, code.scale_dtype, features)
    if code.zero == "float":
        zero = b.floats(a.zeros + at * size, code.scale_dtype, features)
    elif code.zero == "int":
        zero = b.floats(a.zeros + at, torch.uint8, features)
    else:
        zero = constant(code.middle, features)
    if code.factors:
        above = (chunk * a.superblocks + column // code.superblock) * (code.factors * TABLE_N) + feature
        kinds = range(code.factors)
        factors = [b.floats(a.factors + (above + i * TABLE_N) * 2, torch.float16, features) for i in kinds]
        scale = b.fmul(scale, factors[0])
        zero = b.fmul(zero, factors[1]) if code.factors > 1 else zero
    return scale, zero


def scale_and_addend(b: Builder, code: Code, a: CodeArguments, place: tuple[Int, Int, Int], features: int) -> Any:
    """Return the scales of features from a place on, and what :func:`number_of` adds to the products: zero points or
    minus scale * zero point. If ``subtracts_first``, the latter are the zero points as they are."""
    scale, zero = scale_and_zero(b, code, a, place, features)
    if code.zero != "float" and not code.subtracts_first:
        zero = b.fneg(b.fmul(scale, zero))
    return scale, zero


def number_of(b: Builder, code: Code, bits: Any, scale: Any, addend: Any) -> Any:
    """Return the numbers, float32, of codes in the lowest bits of integers."""
    if code.looks_up and code.zero == "none":
        return b.fmul(float_of(b, code, bits, code.middle), scale)
    number = float_of(b, code, bits)
    if code.subtracts_first:
        return b.fmul(b.fsub(number, addend), scale)
    return b.multiply_add(number, scale, addend)


def float_of(b: Builder, code: Code, bits: Any, middle: int = 0) -> Any:
    """Return codes in the lowest bits of integers as float32, minus ``middle``, which is 0 if they are not looked
    up."""
    most = 2**code.bits - 1
    numbers = [(i & most) - middle for i in range(16)]
    if code.looks_up:
        return b.lookup(numbers, bits)
    lowest = b.and_(bits, ir.Constant(bits.type, [most] * bits.type.count))
    return b.lookup_bytes(numbers, lowest) if code.by_bytes else b.sitofp(lowest, floats_of(bits.type.count))
