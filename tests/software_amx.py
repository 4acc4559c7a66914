"""AMX's instructions as loops, so that every processor can run what is written for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir

from w4gemm.kernels.cpu.amx import I16, ROW, WORDS, Amx
from w4gemm.kernels.cpu.builder import F32, Builder, Int, constant, floats_of, ints_of
from w4gemm.kernels.cpu.tile_product import SIDE

TILE = SIDE * ROW


class SoftwareAmx(Amx):
    def __init__(self, b: Builder) -> None:
        super().__init__(b)
        self.memory, self.table, self.index = b.array(8 * TILE // 4), b.array(SIDE), b.array(SIDE)
        self.rows: Sequence[int] = ()

    def configure(self, rows: Sequence[int]) -> None:
        self.rows = rows

    def release(self) -> None:
        pass

    def _row(self, tile: int, row: Int) -> Int:
        return self.memory + row * ROW + tile * TILE

    def zero(self, tile: int) -> None:
        with self.b.loop(0, self.rows[tile]) as row:
            self.b.write(constant(0, SIDE), self._row(tile, row))

    def load(self, tile: int, address: Int, stride: Int | int) -> None:
        with self.b.loop(0, self.rows[tile]) as row:
            self.b.write(self.b.read(address + row * stride, ints_of(SIDE)), self._row(tile, row))

    def store(self, tile: int, address: Int) -> None:
        with self.b.loop(0, self.rows[tile]) as row:
            self.b.write(self.b.read(self._row(tile, row), ints_of(SIDE)), address + row * ROW)

    def multiply(self, sums: int, x: int, w: int) -> None:
        b = self.b
        with b.loop(0, self.rows[sums]) as row, b.loop(0, SIDE) as pair:
            both = b.bitcast(b.spread(b.read(self._row(x, row) + pair * 4, F32), SIDE), ints_of(SIDE))
            total = b.read(self._row(sums, row), floats_of(SIDE))
            b.write(self.dot(total, both, b.read(self._row(w, pair), ints_of(SIDE))), self._row(sums, row))

    def dot(self, sums: Any, x: Any, w: Any) -> Any:
        for lower in (True, False):
            sums = self.b.multiply_add(self._half(x, lower), self._half(w, lower), sums)
        return sums

    def _half(self, words: Any, lower: bool) -> Any:
        """Return the bf16 numbers in the lower or upper halves of words as float32."""
        b = self.b
        number, operator = (16, b.shl) if lower else (-65536, b.and_)
        return b.bitcast(operator(words, ir.Constant(words.type, [number] * SIDE)), floats_of(SIDE))

    def lookup(self, numbers: Sequence[float], index: Any) -> Any:
        b, bits = self.b, torch.tensor(numbers).bfloat16().view(torch.int16).tolist()
        b.write(ir.Constant(WORDS, bits), self.table)
        b.write(b.and_(index, ir.Constant(WORDS, [31] * 2 * SIDE)), self.index)
        with b.loop(0, 4 * SIDE, 2) as lane:
            place = Int(b, b.zext(b.read(self.index + lane, I16), b.number(0).type))
            b.write(b.read(self.table + place * 2, I16), self.index + lane)
        return b.read(self.index, WORDS)

    def rounded(self, low: Any, high: Any) -> Any:
        b, halves = self.b, []
        for numbers in (low, high):
            bits = b.bitcast(numbers, ints_of(SIDE))
            last, half, mask = (ir.Constant(ints_of(SIDE), [n] * SIDE) for n in (1, 0x7FFF, -65536))
            is_odd = b.and_(b.lshr(bits, ir.Constant(ints_of(SIDE), [16] * SIDE)), last)
            halves.append(b.and_(b.add(b.add(bits, half), is_odd), mask))
        both = (b.lanes_of(b.bitcast(half, WORDS), range(1, 2 * SIDE, 2)) for half in halves)
        return b.joined([*both])
