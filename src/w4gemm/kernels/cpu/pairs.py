"""The loops of the method "pairs" of ``cpu_mixed_gemm``, as LLVM's intermediate representation: products of bf16 x by
AVX-512's dot products of pairs. This module needs llvmlite.

Numbers and panels are those of ``tiles.py``. Sums of a group are in registers, for a few tokens and a block of 64
features, and are scaled there, or of a panel if numbers are rounded. A lane holds a feature, and adds the products of
two columns.
"""

from __future__ import annotations

from typing import Any

from w4gemm.kernels.cpu.amx import PAIRS, ROW
from w4gemm.kernels.cpu.builder import F32, I32, Int, constant
from w4gemm.kernels.cpu.tile_product import SIDE
from w4gemm.kernels.cpu.tiles import Tiles
from w4gemm.packing.layouts.cpu import TABLE_N


class PairTiles(Tiles):
    """Writes the function."""

    def write(self) -> Any:
        b, a, most = self.b, self.a, self.tile.rows
        rounds = (a.m + (most - 1)) // most
        larger = (a.m - rounds * (most - 1)) * most
        """Tokens in tiles of ``most``; the others are in tiles of one token less."""
        with b.loop(a.first_chunk, a.last_chunk) as chunk, b.loop(0, a.k, a.panel) as first:
            groups = self.groups_until((first + a.panel).at_most(a.k)) - self.groups_until(first)
            with b.loop(0, (a.columns - chunk * TABLE_N).at_most(TABLE_N), self.features) as feature:
                with b.loop(0, groups) as group:
                    self.decode(chunk, feature, first, group)
                for count, start, end in ((most, 0, larger), (most - 1, larger, a.m)):
                    if count == most or (count and self.code.tiled):
                        with b.loop(start, end, count) as token:
                            self.tokens(count, token, (chunk, feature), first, groups)
        return b.intrinsic("llvm.vector.reduce.umax", I32, b.load(self.largest))

    def tokens(self, count: int, token: Int, place: tuple[Int, Int], first: Int, groups: Int) -> None:
        """Multiply the codes of a panel with ``count`` tokens, and add the products to the results from a place on."""
        b, a, vectors = self.b, self.a, range(self.width)
        x = a.x + token * a.x_row * 2
        if self.tile.is_rounded:
            for t, own in enumerate(self.products_of(count, x, first, *self.panel(first))):
                self.put(token + t, place, first, [b.load(product) for product in own])
            return
        totals = [[b.variable(constant(0, SIDE)) for _ in vectors] for _ in range(count)]
        with b.loop(0, groups) as group:
            products = self.products_of(count, x, first, *self.columns(first, group))
            scales = self.scaled + group * self.scaled_bytes
            for t, (of_token, own) in enumerate(zip(products, totals, strict=True)):
                place_of_sum = (token + t) * self.groups_until(a.k) + self.groups_until(first) + group
                x_sum = self.x_sum(a.x_sums + place_of_sum * 4) if self.has_sums else None
                for w, (product, total) in enumerate(zip(of_token, own, strict=True)):
                    self.add_scaled(total, b.load(product), scales + w * ROW, x_sum)
        for t, own in enumerate(totals):
            self.put(token + t, place, first, [b.load(total) for total in own])

    def products_of(self, count: int, x: Int, first: Int, start: Int, end: Int) -> list[list[Any]]:
        """Return variables of the products of codes from a column to before another, for each token one of each
        vector. ``x`` is the address of the first token's column 0."""
        b, a, vectors = self.b, self.a, range(self.width)
        products = [[b.variable(constant(0, SIDE)) for _ in vectors] for _ in range(count)]
        with b.loop(start, end, 2) as column:
            at = self.codes + (column - first) * (ROW // 2)
            codes = [b.read(at + w * self.panel_bytes, PAIRS) for w in vectors]
            for t, of_token in enumerate(products):
                both = b.bitcast(b.spread(b.read(x + (a.x_row * t + column) * 2, F32), SIDE), PAIRS)
                for code, product in zip(codes, of_token, strict=True):
                    b.store(self.amx.dot(b.load(product), both, code), product)
        return products
