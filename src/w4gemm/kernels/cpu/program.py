"""The loops of the method "compiled" of ``cpu_mixed_gemm``, as LLVM's intermediate representation. This module needs
llvmlite.

    d[t, n] = sum over panels p of (sum over j in p of x[t, j] * w[j, n]),  w the float32 number of dequantize()

Loops, outermost first:

    chunk      128 features: a row of the table. A thread takes several
    panel      at most 256 columns, and groups as a whole where that is less
    block      2 or 4 vectors of features. If m is at most ``tokens``, the columns of a panel are decoded, multiplied
               and added up in registers at once. Else they are decoded to memory, 16 or 32 KiB, and for each
    tile       of ``tokens`` tokens they are multiplied and added up. The last tile ends at m, and computes some tokens
               of the tile before it once more

A byte has 8 / bits codes of neighbouring features, its fields. Vectors hold one field of neighbouring bytes: lane i of
field f is feature i * fields + f. Sums are put in the order of features at the end of a panel. The products of a token
and a feature are added in one order, whatever m, the tile and the number of threads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from llvmlite import ir

from w4gemm.kernels.cpu.compiled import MOST_FEATURES, PANEL, Code, CodeArguments
from w4gemm.packing.layouts.cpu import TABLE_N

NAME = "sums"
_I64, _I32, _F32 = ir.IntType(64), ir.IntType(32), ir.FloatType()
_STORED = {
    torch.float32: _F32,
    torch.float16: ir.HalfType(),
    torch.bfloat16: ir.IntType(16),
    torch.uint8: ir.IntType(8),
    torch.int8: ir.IntType(8),
}
"""Types of numbers in memory. bfloat16 is the upper half of a float32."""


def program(code: Code) -> str:
    """Return the text of a module with the function :data:`NAME` of :class:`CodeArguments`."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.PointerType()]), NAME)
    _Sums(code, _Builder(function.append_basic_block())).write()
    return str(module)


class _Int:
    """An int64 of compiled code, with Python's operators."""

    def __init__(self, b: _Builder, value: Any) -> None:
        self.b, self.value = b, value

    def _operator(self, instruction: str, other: Any) -> _Int:
        return _Int(self.b, getattr(self.b, instruction)(self.value, self.b.number(other)))

    __add__ = functools.partialmethod(_operator, "add")
    __sub__ = functools.partialmethod(_operator, "sub")
    __mul__ = functools.partialmethod(_operator, "mul")
    __floordiv__ = functools.partialmethod(_operator, "sdiv")

    def at_most(self, other: Any) -> _Int:
        most = self.b.number(other)
        return _Int(self.b, self.b.select(self.b.icmp_signed("<", self.value, most), self.value, most))


class _Builder(ir.IRBuilder):
    """LLVM's builder, with loops and vectors of float32."""

    def number(self, value: Any) -> Any:
        return value.value if isinstance(value, _Int) else ir.Constant(_I64, value)

    def variable(self, start: Any) -> Any:
        """Return a pointer to a new variable, a register after optimization, that is set to ``start`` here."""
        with self.goto_entry_block():
            pointer = self.alloca(start.type)
        self.store(start, pointer)
        return pointer

    @contextmanager
    def loop(self, start: Any, end: Any, step: Any = 1) -> Iterator[_Int]:
        """Repeat what is built inside for start, start + step, ... before ``end``."""
        index = self.variable(self.number(start))
        head, body, after = (self.append_basic_block() for _ in range(3))
        self.branch(head)
        self.position_at_end(head)
        self.cbranch(self.icmp_signed("<", self.load(index), self.number(end)), body, after)
        self.position_at_end(body)
        yield _Int(self, self.load(index))
        self.store(self.add(self.load(index), self.number(step)), index)
        self.branch(head)
        self.position_at_end(after)

    def read(self, address: _Int, kind: Any) -> Any:
        """Return a number or vector in memory at any address."""
        return self.load(self.inttoptr(address.value, ir.PointerType()), align=1, typ=kind)

    def write(self, value: Any, address: _Int) -> None:
        self.store(value, self.inttoptr(address.value, ir.PointerType()), align=1)

    def floats(self, address: _Int, dtype: torch.dtype, lanes: int) -> Any:
        """Return ``lanes`` numbers of ``dtype`` in memory as float32."""
        raw, wide, result = self.read(address, ir.VectorType(_STORED[dtype], lanes)), _ints(lanes), _floats(lanes)
        if dtype == torch.bfloat16:
            return self.bitcast(self.shl(self.zext(raw, wide), ir.Constant(wide, [16] * lanes)), result)
        if dtype == torch.float16:
            return self.fpext(raw, result)
        if dtype == torch.float32:
            return raw
        return self.sitofp((self.zext if dtype == torch.uint8 else self.sext)(raw, wide), result)

    def spread(self, number: Any, lanes: int) -> Any:
        """Return a vector of one number."""
        vector = self.insert_element(ir.Constant(_floats(lanes), ir.Undefined), number, ir.Constant(_I32, 0))
        return self.lanes_of(vector, [0] * lanes)

    def lanes_of(self, vector: Any, lanes: Sequence[int]) -> Any:
        """Return a vector of these lanes."""
        undefined = ir.Constant(vector.type, ir.Undefined)
        return self.shuffle_vector(vector, undefined, ir.Constant(_ints(len(lanes)), list(lanes)))

    def joined(self, vectors: Sequence[Any]) -> Any:
        """Return the lanes of equally long vectors, a power of two of them, one after another."""
        if len(vectors) == 1:
            return vectors[0]
        half = len(vectors) // 2
        first, second = self.joined(vectors[:half]), self.joined(vectors[half:])
        return self.shuffle_vector(
            first, second, ir.Constant(_ints(2 * first.type.count), [*range(2 * first.type.count)])
        )

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once."""
        name = f"llvm.fma.v{a.type.count}f32"
        known = self.module.globals.get(name)
        return self.call(known or ir.Function(self.module, ir.FunctionType(a.type, [a.type] * 3), name), [a, b, c])

    def array(self, numbers: int) -> _Int:
        """Return the address of memory for this many float32 numbers, on the stack."""
        with self.goto_entry_block():
            return _Int(self, self.ptrtoint(self.alloca(_F32, numbers), _I64))


def _floats(lanes: int) -> Any:
    return ir.VectorType(_F32, lanes)


def _ints(lanes: int) -> Any:
    return ir.VectorType(_I32, lanes)


def _constant(number: float, lanes: int) -> Any:
    return ir.Constant(_floats(lanes), [float(number)] * lanes)


class _Sums:
    """Writes the function."""

    def __init__(self, code: Code, b: _Builder) -> None:
        self.code, self.b = code, b
        arguments = _Int(b, b.ptrtoint(b.function.args[0], _I64))
        self.a = CodeArguments(*(_Int(b, b.read(arguments + 8 * i, _I64)) for i in range(len(CodeArguments._fields))))
        vectors = max(4 if code.tokens <= 2 else 2, code.fields)
        self.features = vectors * code.lanes
        """Features of a block."""
        assert self.features <= MOST_FEATURES
        self.lanes = self.features // code.fields
        """Bytes of a block, and lanes of a field."""

    def write(self) -> None:
        b, a = self.b, self.a
        decoded = b.array(PANEL * self.features) if self.code.tiled else None
        with b.loop(a.first_chunk, a.last_chunk) as chunk, b.loop(0, a.k, a.panel) as first:
            columns = first, (first + a.panel).at_most(a.k)
            x = a.x + first // a.panel * a.x_panel * 4
            with b.loop(0, (a.columns - chunk * TABLE_N).at_most(TABLE_N), self.features) as feature:
                out = a.out + (chunk * TABLE_N + feature) * 4
                if decoded is None:
                    with self.sums(out, first) as sums, self.decoded(chunk, feature, columns) as (column, numbers):
                        self.multiply(x + (column - first) * 4, numbers, sums)
                else:
                    with self.decoded(chunk, feature, columns) as (column, numbers):
                        for f, number in enumerate(numbers):
                            b.write(number, decoded + ((column - first) * self.code.fields + f) * self.lanes * 4)
                    self.tiles(x, decoded, columns, out)
        b.ret_void()

    def tiles(self, x: _Int, decoded: _Int, columns: tuple[_Int, _Int], out: _Int) -> None:
        """Multiply the decoded numbers of a block with all tokens."""
        b, a, code = self.b, self.a, self.code
        first, last = columns
        with (
            b.loop(0, a.m, code.tokens) as start,
            self.sums(out + start * a.columns * 4, first) as sums,
            b.loop(0, last - first) as column,
        ):
            addresses = (decoded + (column * code.fields + f) * self.lanes * 4 for f in range(code.fields))
            numbers = [b.read(address, _floats(self.lanes)) for address in addresses]
            self.multiply(x + (start * a.x_row + column) * 4, numbers, sums)

    @contextmanager
    def sums(self, out: _Int, first: _Int) -> Iterator[list[list[Any]]]:
        """Variables of sums of a tile and block, for each token one of each field. In the end they are added to the
        results at ``out``, or become these if ``first`` is column 0."""
        b, code = self.b, self.code
        fields, zero = range(code.fields), _constant(0, self.lanes)
        variables = [[b.variable(zero) for _ in fields] for _ in range(code.tokens)]
        yield variables
        in_order = [i + f * self.lanes for i in range(self.lanes) for f in fields]
        is_first, kind = b.icmp_signed("==", first.value, b.number(0)), _floats(self.features)
        for t, of_token in enumerate(variables):
            address = out + self.a.columns * (t * 4)
            before = b.select(is_first, ir.Constant(kind, [0.0] * self.features), b.read(address, kind))
            b.write(b.fadd(before, b.lanes_of(b.joined([b.load(v) for v in of_token]), in_order)), address)

    def multiply(self, x: _Int, numbers: Sequence[Any], sums: list[list[Any]]) -> None:
        """Add the products of a column's numbers and that column of x, of which ``x`` is the first token's."""
        b = self.b
        for t, of_token in enumerate(sums):
            of_x = b.spread(b.read(x + self.a.x_row * (t * 4), _F32), self.lanes)
            for variable, number in zip(of_token, numbers, strict=True):
                b.store(b.multiply_add(of_x, number, b.load(variable)), variable)

    @contextmanager
    def decoded(self, chunk: _Int, feature: _Int, columns: tuple[_Int, _Int]) -> Iterator[tuple[_Int, list[Any]]]:
        """Repeat what is built inside for the columns from the first to before the last: a column, and its numbers in
        the block that begins at ``feature``, by fields."""
        first, last = columns
        b, a, code = self.b, self.a, self.code
        fields, wide = range(code.fields), _ints(self.lanes)
        rows = a.table + chunk * a.k * code.row_bytes + feature * code.bits // 8
        with b.loop(first, last, a.group) as start:
            scales, zeros = self.factors(chunk, start, feature)
            with b.loop(start, (start + a.group).at_most(last)) as column:
                packed = b.read(rows + column * code.row_bytes, ir.VectorType(_STORED[torch.uint8], self.lanes))
                packed = b.zext(packed, wide)
                numbers = []
                for f in fields:
                    number = b.lshr(packed, ir.Constant(wide, [code.bits * f] * self.lanes))
                    number = b.and_(number, ir.Constant(wide, [2**code.bits - 1] * self.lanes))
                    number = b.sitofp(number, _floats(self.lanes))
                    if code.subtracts_first:
                        numbers.append(b.fmul(b.fsub(number, zeros[f]), scales[f]))
                    else:
                        numbers.append(b.multiply_add(number, scales[f], zeros[f]))
                yield column, numbers

    def factors(self, chunk: _Int, column: _Int, feature: _Int) -> tuple[list[Any], list[Any]]:
        """Return, by fields, the scales of a block's codes in a column, and what is added to the products: zero points
        or minus scale * zero point. If ``subtracts_first``, the latter are the zero points as they are."""
        b, a, code = self.b, self.a, self.code
        at = (chunk * a.groups + column // a.whole_group) * TABLE_N + feature
        size = code.scale_dtype.itemsize
        scale = b.floats(a.scales + at * size, code.scale_dtype, self.features)
        if code.zero == "float":
            zero = b.floats(a.zeros + at * size, code.scale_dtype, self.features)
        elif code.zero == "int":
            zero = b.floats(a.zeros + at, torch.uint8, self.features)
        else:
            zero = _constant(code.middle, self.features)
        if code.factors:
            above = (chunk * a.superblocks + column // a.superblock) * (code.factors * TABLE_N) + feature
            kinds = range(code.factors)
            factors = [b.floats(a.factors + (above + i * TABLE_N) * 2, torch.float16, self.features) for i in kinds]
            scale = b.fmul(scale, factors[0])
            zero = b.fmul(zero, factors[1]) if code.factors > 1 else zero
        if code.zero != "float" and not code.subtracts_first:
            zero = b.fneg(b.fmul(scale, zero))
        lanes = [range(f, self.features, code.fields) for f in range(code.fields)]
        return [b.lanes_of(scale, those) for those in lanes], [b.lanes_of(zero, those) for those in lanes]
