"""The loops of the method "compiled" of ``cpu_mixed_gemm``, as LLVM's intermediate representation. This module needs
llvmlite.

    d[t, n] = sum over panels p of (sum over j in p of x[t, j] * w[j, n]),  w the float32 number of dequantize()

Loops, outermost first:

    chunk      128 features: a row of the table. A thread takes several
    panel      at most 64 columns, and groups as a whole where that is less
    block      2 or 4 vectors of features. If m is at most ``tokens``, the columns of a panel are decoded, multiplied
               and added up in registers at once. Else they are decoded to memory, at most 16 KiB, and for each
    tile       of ``tokens`` tokens they are multiplied and added up. m is a multiple of ``tokens``

A byte has 8 / bits codes of neighbouring features, its fields. Vectors hold one field of neighbouring bytes: lane i of
field f is feature i * fields + f. Sums are put in the order of features at the end of a panel. The products of a token
and a feature are added in one order, whatever m, the tile and the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from llvmlite import ir

from w4gemm.kernels.cpu.builder import STORED, Builder, Int, constant, floats_of, ints_of, module_of
from w4gemm.kernels.cpu.compiled import MOST_FEATURES, PANEL, Code, CodeArguments
from w4gemm.packing.layouts.cpu import TABLE_N

AHEAD = 8192
"""Bytes of the table between what is read and what is prefetched."""


def sums(code: Code) -> str:
    """Return the text of a module whose function takes :class:`CodeArguments`."""
    return module_of(lambda b, arguments: _Sums(code, b, arguments).write(), len(CodeArguments._fields))


class _Sums:
    """Writes the function."""

    def __init__(self, code: Code, b: Builder, arguments: Sequence[Int]) -> None:
        self.code, self.b, self.a = code, b, CodeArguments(*arguments)
        vectors = max(4 if 4 * code.tokens <= code.lanes else 2, code.fields)
        self.features = vectors * code.lanes
        """Features of a block."""
        assert self.features <= MOST_FEATURES
        self.lanes = self.features // code.fields
        """Bytes of a block, and lanes of a field."""
        self.size = code.dtype.itemsize
        self.chunk_sums = b.array(code.tokens * TABLE_N) if self.size < 4 else None
        """Results of a chunk, float32 (tokens, 128), if those of ``out`` have 16 bits."""
        self.x_panel = b.array(code.tokens * PANEL) if code.x_dtype.itemsize < 4 else None
        """Columns of a panel of x, float32 (tokens, 64), if those of x have 16 bits."""

    def write(self) -> None:
        b, a, code = self.b, self.a, self.code
        decoded = b.array(PANEL * self.features) if code.tiled else None
        with b.loop(a.first_chunk, a.last_chunk) as chunk:
            features = (a.columns - chunk * TABLE_N).at_most(TABLE_N)
            with b.loop(0, a.k, a.panel) as first:
                columns = first, (first + a.panel).at_most(a.k)
                x = a.x + first // a.panel * a.x_panel * code.x_dtype.itemsize
                if self.x_panel is not None:
                    self.widen(x, columns[1] - first)
                    x = self.x_panel
                with b.loop(0, features, self.features) as feature:
                    if decoded is None:
                        out = self.of_chunk(chunk) + feature * 4
                        with self.sums(out, first) as sums, self.decoded(chunk, feature, columns) as (column, numbers):
                            self.multiply(x + (column - first) * 4, numbers, sums)
                    else:
                        with self.decoded(chunk, feature, columns) as (column, numbers):
                            for f, number in enumerate(numbers):
                                b.write(number, decoded + ((column - first) * code.fields + f) * self.lanes * 4)
                        self.tiles(x, decoded, columns, self.of_chunk(chunk) + feature * 4)
            if self.size < 4:
                self.round(chunk, features)

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

    def of_chunk(self, chunk: Int) -> Int:
        """Return the address of the first token's results in a chunk, as float32."""
        return self.a.out + chunk * (TABLE_N * 4) if self.chunk_sums is None else self.chunk_sums

    def round(self, chunk: Int, features: Int) -> None:
        """Write a chunk's results, rounded, to ``out``."""
        b, code, sums = self.b, self.code, self.chunk_sums
        assert sums is not None
        with b.loop(0, features, code.lanes) as feature:
            for t in range(code.tokens):
                numbers = b.read(sums + (feature + t * TABLE_N) * 4, floats_of(code.lanes))
                address = self.a.out + (self.a.columns * t + chunk * TABLE_N + feature) * self.size
                b.write(b.rounded(numbers, code.dtype), address)

    def tiles(self, x: Int, decoded: Int, columns: tuple[Int, Int], out: Int) -> None:
        """Multiply the decoded numbers of a block with all tokens."""
        b, a, code = self.b, self.a, self.code
        first, last = columns
        with (
            b.loop(0, a.m, code.tokens) as start,
            self.sums(out + start * a.columns * 4, first) as sums,
            b.loop(0, last - first) as column,
        ):
            addresses = (decoded + (column * code.fields + f) * self.lanes * 4 for f in range(code.fields))
            numbers = [b.read(address, floats_of(self.lanes)) for address in addresses]
            self.multiply(x + (start * a.x_row + column) * 4, numbers, sums)

    @contextmanager
    def sums(self, out: Int, first: Int) -> Iterator[list[list[Any]]]:
        """Variables of sums of a tile and block, for each token one of each field. In the end they are added to the
        results at ``out``, or become these if ``first`` is column 0."""
        b, code = self.b, self.code
        fields, zero = range(code.fields), constant(0, self.lanes)
        variables = [[b.variable(zero) for _ in fields] for _ in range(code.tokens)]
        yield variables
        in_order = [i + f * self.lanes for i in range(self.lanes) for f in fields]
        row = self.a.columns if self.chunk_sums is None else Int(b, b.number(TABLE_N))
        is_first, kind = b.icmp_signed("==", first.value, b.number(0)), floats_of(self.features)
        for t, of_token in enumerate(variables):
            address = out + row * (t * 4)
            before = b.select(is_first, ir.Constant(kind, [0.0] * self.features), b.read(address, kind))
            b.write(b.fadd(before, b.lanes_of(b.joined([b.load(v) for v in of_token]), in_order)), address)

    def multiply(self, x: Int, numbers: Sequence[Any], sums: list[list[Any]]) -> None:
        """Add the products of a column's numbers and that column of x, of which ``x`` is the first token's."""
        b = self.b
        row = self.a.x_row if self.x_panel is None else Int(b, b.number(PANEL))
        for t, of_token in enumerate(sums):
            of_x = b.lanes_of(b.floats(x + row * (t * 4), torch.float32, 1), [0] * self.lanes)
            for variable, number in zip(of_token, numbers, strict=True):
                b.store(b.multiply_add(of_x, number, b.load(variable)), variable)

    @contextmanager
    def decoded(self, chunk: Int, feature: Int, columns: tuple[Int, Int]) -> Iterator[tuple[Int, list[Any]]]:
        """Repeat what is built inside for the columns from the first to before the last: a column, and its numbers in
        the block that begins at ``feature``, by fields."""
        first, last = columns
        b, a, code = self.b, self.a, self.code
        wide = ints_of(self.lanes)
        rows = a.table + chunk * a.k * code.row_bytes + feature * code.bits // 8
        with b.loop(first, last, a.group) as start:
            scales, zeros = self.factors(chunk, start, feature)
            with b.loop(start, (start + a.group).at_most(last)) as column:
                row = rows + column * code.row_bytes
                b.prefetch(row + AHEAD)
                packed = b.zext(b.read(row, ir.VectorType(STORED[torch.uint8], self.lanes)), wide)
                bits = (b.lshr(packed, ir.Constant(wide, [code.bits * f] * self.lanes)) for f in range(code.fields))
                yield column, [number_of(b, code, *field) for field in zip(bits, scales, zeros, strict=True)]

    def factors(self, chunk: Int, column: Int, feature: Int) -> tuple[list[Any], list[Any]]:
        """Return, by fields, both of :func:`scale_and_addend` for a block and column."""
        b, code = self.b, self.code
        scale, zero = scale_and_addend(b, code, self.a, (chunk, column, feature), self.features)
        lanes = [range(f, self.features, code.fields) for f in range(code.fields)]
        return [b.lanes_of(scale, those) for those in lanes], [b.lanes_of(zero, those) for those in lanes]


def scale_and_zero(b: Builder, code: Code, a: CodeArguments, place: tuple[Int, Int, Int], features: int) -> Any:
    """Return the scales of features from a place on, chunk, column and feature, and their zero points as float32, or
    :attr:`Code.middle` without."""
    chunk, column, feature = place
    at = (chunk * a.groups + column // a.whole_group) * TABLE_N + feature
    size = code.scale_dtype.itemsize
    scale = b.floats(a.scales + at * size, code.scale_dtype, features)
    if code.zero == "float":
        zero = b.floats(a.zeros + at * size, code.scale_dtype, features)
    elif code.zero == "int":
        zero = b.floats(a.zeros + at, torch.uint8, features)
    else:
        zero = constant(code.middle, features)
    if code.factors:
        above = (chunk * a.superblocks + column // a.superblock) * (code.factors * TABLE_N) + feature
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
    most, is_centred = 2**code.bits - 1, code.looks_up and code.zero == "none"
    if code.looks_up:
        number = b.lookup([(i & most) - (code.middle if is_centred else 0) for i in range(16)], bits)
    else:
        number = b.sitofp(b.and_(bits, ir.Constant(bits.type, [most] * bits.type.count)), floats_of(bits.type.count))
    if is_centred:
        return b.fmul(number, scale)
    if code.subtracts_first:
        return b.fmul(b.fsub(number, addend), scale)
    return b.multiply_add(number, scale, addend)
