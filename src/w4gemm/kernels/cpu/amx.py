"""AMX's instructions, for a builder of LLVM's intermediate representation. This module needs llvmlite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir

from w4gemm.kernels.cpu.builder import I64, Builder, Int
from w4gemm.kernels.cpu.tile_product import SIDE

ROW = 64
"""Bytes of a tile's row."""
I8, I16 = ir.IntType(8), ir.IntType(16)
WORDS = ir.VectorType(I16, 2 * SIDE)


class _Bfloat16(ir.Type):
    """LLVM's type, which llvmlite has not."""

    def _to_string(self) -> str:
        return "bfloat"


class Amx:
    """AMX's instructions and a lookup of AVX-512. Tiles have numbers from 0 to 7."""

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

    def rounded(self, low: Any, high: Any) -> Any:
        """Return the lanes of two vectors in turn, rounded to bf16."""
        b = self.b
        bits = b.bitcast(b.fptrunc(b.joined([low, high]), ir.VectorType(_Bfloat16(), 2 * SIDE)), WORDS)
        return b.lanes_of(bits, [i // 2 + SIDE * (i % 2) for i in range(2 * SIDE)])
