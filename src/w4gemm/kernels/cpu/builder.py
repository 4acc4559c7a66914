"""LLVM's intermediate representation of the CPU kernels, written in Python. This module needs llvmlite."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from llvmlite import ir

NAME = "run"
"""Name of the one function of a module."""
I64, I32, F32 = ir.IntType(64), ir.IntType(32), ir.FloatType()
STORED = {
    torch.float32: F32,
    torch.float16: ir.HalfType(),
    torch.bfloat16: ir.IntType(16),
    torch.uint8: ir.IntType(8),
    torch.int8: ir.IntType(8),
}
"""Types of numbers in memory. bfloat16 is the upper half of a float32."""


HALVES = [i + lane for first in (0, 1, 8, 9) for lane in (0, 16) for i in range(first, first + 8, 2)]
"""Bytes in the order of what AVX2 makes of them in halves of registers: see :meth:`Builder.lookup_bytes`."""


def module_of(write: Callable[[Builder, list[Int]], Any], count: int) -> str:
    """Return the text of a module with a function that takes the address of ``count`` arguments, int64 in a row.
    ``write`` builds its body, and returns the function's result, an int32, or None for 0."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(I32, [ir.PointerType()]), NAME)
    b = Builder(function.append_basic_block())
    first = Int(b, b.ptrtoint(function.args[0], I64))
    result = write(b, [Int(b, b.read(first + 8 * i, I64)) for i in range(count)])
    b.ret(ir.Constant(I32, 0) if result is None else result)
    return str(module)


class Int:
    """An int64 of compiled code, with Python's operators."""

    def __init__(self, b: Builder, value: Any) -> None:
        self.b, self.value = b, value

    def _operator(self, instruction: str, other: Any) -> Int:
        return Int(self.b, getattr(self.b, instruction)(self.value, self.b.number(other)))

    __add__ = functools.partialmethod(_operator, "add")
    __sub__ = functools.partialmethod(_operator, "sub")
    __mul__ = functools.partialmethod(_operator, "mul")
    __floordiv__ = functools.partialmethod(_operator, "sdiv")

    def at_most(self, other: Any) -> Int:
        most = self.b.number(other)
        return Int(self.b, self.b.select(self.b.icmp_signed("<", self.value, most), self.value, most))


class Builder(ir.IRBuilder):
    """LLVM's builder, with loops and vectors of float32."""

    def number(self, value: Any) -> Any:
        return value.value if isinstance(value, Int) else ir.Constant(I64, value)

    def variable(self, start: Any) -> Any:
        """Return a pointer to a new variable, a register after optimization, that is set to ``start`` here."""
        with self.goto_entry_block():
            pointer = self.alloca(start.type)
        self.store(start, pointer)
        return pointer

    @contextmanager
    def loop(self, start: Any, end: Any, step: Any = 1) -> Iterator[Int]:
        """Repeat what is built inside for start, start + step, ... before ``end``."""
        index = self.variable(self.number(start))
        head, body, after = (self.append_basic_block() for _ in range(3))
        self.branch(head)
        self.position_at_end(head)
        self.cbranch(self.icmp_signed("<", self.load(index), self.number(end)), body, after)
        self.position_at_end(body)
        yield Int(self, self.load(index))
        self.store(self.add(self.load(index), self.number(step)), index)
        self.branch(head)
        self.position_at_end(after)

    def read(self, address: Int, kind: Any) -> Any:
        """Return a number or vector in memory at any address."""
        return self.load(self.inttoptr(address.value, ir.PointerType()), align=1, typ=kind)

    def write(self, value: Any, address: Int) -> None:
        self.store(value, self.inttoptr(address.value, ir.PointerType()), align=1)

    def prefetch(self, address: Int) -> None:
        """Fetch a cache line, which may be in no memory, for reading."""
        pointer, read, soon, data = ir.PointerType(), 0, 3, 1
        kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        options = (ir.Constant(I32, option) for option in (read, soon, data))
        self.call(self.function_named("llvm.prefetch.p0", kind), [self.inttoptr(address.value, pointer), *options])

    def floats(self, address: Int, dtype: torch.dtype, lanes: int) -> Any:
        """Return ``lanes`` numbers of ``dtype`` in memory as float32."""
        raw, wide, result = self.read(address, ir.VectorType(STORED[dtype], lanes)), ints_of(lanes), floats_of(lanes)
        if dtype == torch.bfloat16:
            return self.bitcast(self.shl(self.zext(raw, wide), ir.Constant(wide, [16] * lanes)), result)
        if dtype == torch.float16:
            return self.fpext(raw, result)
        if dtype == torch.float32:
            return raw
        return self.sitofp((self.zext if dtype == torch.uint8 else self.sext)(raw, wide), result)

    def rounded(self, numbers: Any, dtype: torch.dtype) -> Any:
        """Return float32 numbers as those of float16, or as the bits of bfloat16."""
        lanes = numbers.type.count
        stored, wide = ir.VectorType(STORED[dtype], lanes), ints_of(lanes)
        if dtype == torch.float16:
            return self.fptrunc(numbers, stored)
        bits, shift, quiet = self.bitcast(numbers, wide), *(ir.Constant(wide, [n] * lanes) for n in (16, 0x400000))
        is_odd = self.and_(self.lshr(bits, shift), ir.Constant(wide, [1] * lanes))
        nearest = self.add(self.add(bits, ir.Constant(wide, [0x7FFF] * lanes)), is_odd)  # a NaN would become a number
        bits = self.select(self.fcmp_unordered("uno", numbers, numbers), self.or_(bits, quiet), nearest)
        return self.trunc(self.lshr(bits, shift), stored)

    def spread(self, number: Any, lanes: int) -> Any:
        """Return a vector of one number."""
        vector = self.insert_element(ir.Constant(floats_of(lanes), ir.Undefined), number, ir.Constant(I32, 0))
        return self.lanes_of(vector, [0] * lanes)

    def lanes_of(self, vector: Any, lanes: Sequence[int]) -> Any:
        """Return a vector of these lanes."""
        undefined = ir.Constant(vector.type, ir.Undefined)
        return self.shuffle_vector(vector, undefined, ir.Constant(ints_of(len(lanes)), list(lanes)))

    def joined(self, vectors: Sequence[Any]) -> Any:
        """Return the lanes of equally long vectors, a power of two of them, one after another."""
        if len(vectors) == 1:
            return vectors[0]
        half = len(vectors) // 2
        first, second = self.joined(vectors[:half]), self.joined(vectors[half:])
        return self.shuffle_vector(
            first, second, ir.Constant(ints_of(2 * first.type.count), [*range(2 * first.type.count)])
        )

    def lookup(self, numbers: Sequence[float], index: Any) -> Any:
        """Return the numbers, 16 of them, at the lower 4 bits of indices, by AVX-512."""
        kind, table = floats_of(16), ir.Constant(floats_of(16), [float(number) for number in numbers])
        function = self.function_named("llvm.x86.avx512.permvar.sf.512", ir.FunctionType(kind, [kind, ints_of(16)]))
        parts = (self.lanes_of(index, range(first, first + 16)) for first in range(0, index.type.count, 16))
        return self.joined([self.call(function, [table, part]) for part in parts])

    def lookup_bytes(self, numbers: Sequence[float], index: Any) -> Any:
        """Return the numbers, 16 of them that bfloat16 holds, at 32 bytes below 16, by AVX2: in the order of
        :data:`HALVES`."""
        kind, wide = index.type, ints_of(8)
        function = self.function_named("llvm.x86.avx2.pshuf.b", ir.FunctionType(kind, [kind, kind]))
        stored = [struct.unpack("<I", struct.pack("<f", number))[0] for number in numbers]
        tables = (ir.Constant(kind, [bits >> shift & 255 for bits in stored] * 2) for shift in (16, 24))
        both = [self.call(function, [table, index]) for table in tables]
        result = []
        for first in (0, 8):
            places = [i + half for lane in (0, 16) for i in range(lane + first, lane + first + 8) for half in (0, 32)]
            words = self.bitcast(self.shuffle_vector(*both, ir.Constant(ints_of(32), places)), wide)
            result += [self.shl(words, ir.Constant(wide, [16] * 8)), self.and_(words, ir.Constant(wide, [-65536] * 8))]
        return self.bitcast(self.joined(result), floats_of(32))

    def function_named(self, name: str, kind: Any) -> Any:
        """Return a function of LLVM's, declared once in the module."""
        return self.module.globals.get(name) or ir.Function(self.module, kind, name)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once."""
        return self.intrinsic("llvm.fma", a.type, a, b, c)

    def intrinsic(self, name: str, result: Any, *operands: Any, **options: Any) -> Any:
        """Return the result of a function of LLVM's for these operands. Its full name has the type of the last one."""
        kind = operands[-1].type
        count, scalar = (f"v{kind.count}", kind.element) if isinstance(kind, ir.VectorType) else ("", kind)
        name += f".{count}{'i32' if scalar == I32 else 'f32'}"
        function = self.function_named(name, ir.FunctionType(result, [o.type for o in operands]))
        return self.call(function, operands, **options)

    def sum_of(self, vector: Any) -> Any:
        """Return the sum of a vector's lanes, added by halves."""
        zero = ir.Constant(F32, -0.0)
        return self.intrinsic("llvm.vector.reduce.fadd", F32, zero, vector, fastmath=("reassoc",))

    def exp(self, x: Any) -> Any:
        """Return e ** x of a vector of numbers that are not above 0, to a last digit or two; below -87, where float32
        ends, that of -87."""
        lanes = x.type.count
        x = self.intrinsic("llvm.maxnum", x.type, x, constant(-87, lanes))
        power = self.intrinsic("llvm.rint", x.type, self.fmul(x, constant(math.log2(math.e), lanes)))
        for part in (0.693359375, math.log(2) - 0.693359375):  # ln 2 in two parts: products with the first are exact
            x = self.multiply_add(power, constant(-part, lanes), x)
        result = constant(1 / math.factorial(7), lanes)
        for i in range(6, -1, -1):  # |x| <= ln(2) / 2: the next term is below 6e-9
            result = self.multiply_add(result, x, constant(1 / math.factorial(i), lanes))
        wide = ints_of(lanes)
        exponent = self.add(self.fptosi(power, wide), ir.Constant(wide, [127] * lanes))
        return self.fmul(result, self.bitcast(self.shl(exponent, ir.Constant(wide, [23] * lanes)), x.type))

    def array(self, numbers: int) -> Int:
        """Return the address of memory for this many float32 numbers, on the stack. It begins with a cache line."""
        with self.goto_entry_block():
            memory = self.alloca(F32, numbers)
            memory.align = 64
            return Int(self, self.ptrtoint(memory, I64))


def floats_of(lanes: int) -> Any:
    return ir.VectorType(F32, lanes)


def ints_of(lanes: int) -> Any:
    return ir.VectorType(I32, lanes)


def constant(number: float, lanes: int) -> Any:
    return ir.Constant(floats_of(lanes), [float(number)] * lanes)
