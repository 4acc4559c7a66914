"""Instructions for bf16 of AMX and AVX-512, for a builder of LLVM's intermediate representation. This module needs
llvmlite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir

from w4gemm.kernels.cpu.builder import I64, Builder, Int, floats_of, ints_of
from w4gemm.kernels.cpu.tile_product import SIDE

ROW = 64
"""Bytes of a tile's row."""
I8, I16 = ir.IntType(8), ir.IntType(16)
WORDS = ir.VectorType(I16, 2 * SIDE)
PAIRS = ints_of(SIDE)
"""Two bf16 numbers in each lane."""


class _Bfloat16(ir.Type):
    """LLVM's type, which llvmlite has not."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_NUMBERS = ir.VectorType(_Bfloat16(), 2 * SIDE)


class Amx:
    """AMX's instructions, and those of AVX-512 beside it. Tiles have numbers from 0 to 7."""

    def __init__(self, b: Builder) -> None:
        self.b = b

    def _call(self, name: str, result: Any, *operands: Any) -> Any:
        function = self.b.function_named(name, ir.FunctionType(result, [o.type for o in operands]))
        return self.b.call(function, operands)

    def _pointer(self, address: Int) -> Any:
        return self.b.inttoptr(address.value, ir.PointerType())

    def configure(self, rows: Sequence[int]) -> None:
        """Set the rows of tiles. A row has 64 bytes."""
        b = self.b
        config = b.array(16)
        fields = bytearray(64)
        fields[0] = 1
        for i, count in enumerate(rows):
            fields[16 + 2 * i], fields[48 + i] = ROW, count
        for i in range(0, 64, 8):
            b.write(ir.Constant(I64, int.from_bytes(fields[i : i + 8], "little")), config + i)
        self._call("llvm.x86.ldtilecfg", ir.VoidType(), self._pointer(config))

    def release(self) -> None:
        self._call("llvm.x86.tilerelease", ir.VoidType())

    def zero(self, tile: int) -> None:
        self._call("llvm.x86.tilezero", ir.VoidType(), ir.Constant(I8, tile))

    def load(self, tile: int, address: Int, stride: Int | int) -> None:
        place = ir.Constant(I8, tile), self._pointer(address), self.b.number(stride)
        self._call("llvm.x86.tileloadd64", ir.VoidType(), *place)

    def store(self, tile: int, address: Int) -> None:
        place = ir.Constant(I8, tile), self._pointer(address), self.b.number(ROW)
        self._call("llvm.x86.tilestored64", ir.VoidType(), *place)

    def multiply(self, sums: int, x: int, w: int) -> None:
        """Add x (rows, 32) times w (32, 16), of which a row holds two columns side by side."""
        self._call("llvm.x86.tdpbf16ps", ir.VoidType(), *(ir.Constant(I8, tile) for tile in (sums, x, w)))

    def lookup(self, numbers: Sequence[float], index: Any) -> Any:
        """Return the bf16 numbers, 32 of them, at the lower 5 bits of 32 indices of 16 bits."""
        bits = torch.tensor(numbers).bfloat16().view(torch.int16).tolist()
        return self._call("llvm.x86.avx512.permvar.hi.512", WORDS, ir.Constant(WORDS, bits), index)

    def dot(self, sums: Any, x: Any, w: Any) -> Any:
        """Return sums plus the products of both numbers of each lane of x and w, which are :data:`PAIRS`."""
        x, w = (self.b.bitcast(pairs, _NUMBERS) for pairs in (x, w))
        return self._call("llvm.x86.avx512bf16.dpbf16ps.512", floats_of(SIDE), sums, x, w)

    def rounded(self, low: Any, high: Any) -> Any:
        """Return the lanes of two vectors, one vector after the other, rounded to bf16."""
        return self.b.bitcast(self._call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", _NUMBERS, high, low), WORDS)
