"""What a decoder layer computes between its products for one token, as LLVM's intermediate representation: norms and
attention. All numbers are float32. This module needs llvmlite.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from w4gemm.kernels.cpu.builder import F32, I64, Builder, Int, constant, floats_of, module_of


class NormArguments(NamedTuple):
    """Arguments of :func:`norm`, int64 in a row: addresses of float32 tensors, and a number."""

    x: Any
    """(rows, k), to which ``added`` is added first, where it lies."""
    added: Any
    """(rows, k)"""
    weight: Any
    """(k,)"""
    out: Any
    """(rows, k), may be x."""
    rows: Any


def norm(lanes: int, k: int, eps: float, adds: bool) -> str:
    """Return the text of a module whose function takes :class:`NormArguments`: out = x / sqrt(mean(x ** 2) + eps) *
    weight. k: a multiple of ``lanes``. adds: False if there is no ``added``."""

    def write(b: Builder, arguments: list[Int]) -> None:
        a, kind = NormArguments(*arguments), floats_of(lanes)
        with b.loop(0, a.rows * (4 * k), 4 * k) as row:
            squares = b.variable(constant(0, lanes))
            with b.loop(0, 4 * k, 4 * lanes) as i:
                x = b.read(a.x + row + i, kind)
                if adds:
                    x = b.fadd(x, b.read(a.added + row + i, kind))
                    b.write(x, a.x + row + i)
                b.store(b.multiply_add(x, x, b.load(squares)), squares)
            mean = b.fdiv(b.sum_of(b.load(squares)), ir.Constant(F32, float(k)))
            root = b.intrinsic("llvm.sqrt", F32, b.fadd(mean, ir.Constant(F32, eps)))
            factor = b.spread(b.fdiv(ir.Constant(F32, 1.0), root), lanes)
            with b.loop(0, 4 * k, 4 * lanes) as i:
                y = b.fmul(b.read(a.x + row + i, kind), factor)
                b.write(b.fmul(y, b.read(a.weight + i, kind)), a.out + row + i)

    return module_of(write, len(NormArguments._fields))


class AttentionArguments(NamedTuple):
    """Arguments of :func:`attention`, int64 in a row: addresses, and numbers."""

    q: Any
    """(heads, dim), rotated where it lies."""
    k: Any
    """(kv heads, dim)"""
    v: Any
    """(kv heads, dim)"""
    cos: Any
    """(dim,)"""
    sin: Any
    """(dim,)"""
    keys: Any
    """(kv heads, length, dim); rows from 0 to the slot hold the tokens of the sequence."""
    values: Any
    """(kv heads, length, dim)"""
    slot: Any
    """int64 (1,): the row of the new token."""
    scores: Any
    """(length + 16,), written to."""
    out: Any
    """(heads, dim)"""
    kv_heads: Any
    length: Any


def attention(lanes: int, dim: int, group: int, scale: float) -> str:
    """Return the text of a module whose function takes :class:`AttentionArguments`. It rotates q and k by halves of
    heads, writes k and v of the new token to the cache, and computes softmax(scale * q @ keys.T) @ values.

    Args:
        dim: elements of a head, a multiple of 2 * ``lanes``.
        group: heads that share keys and values.
    """

    def write(b: Builder, arguments: list[Int]) -> None:
        a = AttentionArguments(*arguments)
        _Attention(b, a, lanes, dim, group, scale).write()

    return module_of(write, len(AttentionArguments._fields))


class _Attention:
    """Writes the function."""

    def __init__(self, b: Builder, a: AttentionArguments, lanes: int, dim: int, group: int, scale: float) -> None:
        self.b, self.a, self.lanes, self.group, self.scale = b, a, lanes, group, scale
        self.kind, self.row = floats_of(lanes), 4 * dim
        self.parts = range(0, self.row, 4 * lanes)
        """Offsets of the vectors of a head, in bytes."""

    def write(self) -> None:
        b, a = self.b, self.a
        slot = Int(b, b.read(a.slot, I64))
        with b.loop(0, a.kv_heads) as head:
            keys, values = (cached + head * a.length * self.row for cached in (a.keys, a.values))
            self.rotate(a.k + head * self.row, keys + slot * self.row)
            for i in self.parts:
                b.write(b.read(a.v + head * self.row + i, self.kind), values + slot * self.row + i)
            with b.loop(head * self.group * self.row, (head + 1) * self.group * self.row, self.row) as of_head:
                self.rotate(a.q + of_head, a.q + of_head)
                highest = self.score(a.q + of_head, keys, slot + 1)
                self.add_up(values, slot + 1, self.shares(highest, slot + 1), a.out + of_head)

    def rotate(self, source: Int, target: Int) -> None:
        """Write a head's row, rotated."""
        b, a = self.b, self.a
        half = self.row // 2
        low, high = ([b.read(source + i + at, self.kind) for i in self.parts if i < half] for at in (0, half))
        for i, x, y in zip(self.parts, low, high, strict=False):
            for at, first, second in ((i, x, b.fneg(y)), (i + half, y, x)):
                turned = b.fmul(second, b.read(a.sin + at, self.kind))
                b.write(b.multiply_add(first, b.read(a.cos + at, self.kind), turned), target + at)

    def score(self, q: Int, keys: Int, tokens: Int) -> Any:
        """Write the scores of a head, and return a pointer to the highest."""
        b = self.b
        highest = b.variable(ir.Constant(F32, float("-inf")))
        row = [b.read(q + i, self.kind) for i in self.parts]
        with b.loop(0, tokens) as token:
            product = constant(0, self.lanes)
            for x, i in zip(row, self.parts, strict=True):
                product = b.multiply_add(x, b.read(keys + token * self.row + i, self.kind), product)
            score = b.fmul(b.sum_of(product), ir.Constant(F32, self.scale))
            b.write(score, self.a.scores + token * 4)
            b.store(b.intrinsic("llvm.maxnum", F32, score, b.load(highest)), highest)
        return highest

    def shares(self, highest: Any, tokens: Int) -> Any:
        """Write e ** (score - highest) in the place of scores, and return their sum."""
        b, a, lanes = self.b, self.a, self.lanes
        b.write(constant(float("-inf"), lanes), a.scores + tokens * 4)  # beside the last tokens in their vector
        total, most = b.variable(constant(0, lanes)), b.spread(b.load(highest), lanes)
        with b.loop(0, tokens, lanes) as token:
            share = b.exp(b.fsub(b.read(a.scores + token * 4, self.kind), most))
            b.write(share, a.scores + token * 4)
            b.store(b.fadd(b.load(total), share), total)
        return b.sum_of(b.load(total))

    def add_up(self, values: Int, tokens: Int, total: Any, out: Int) -> None:
        """Write the sum of the values of all tokens times their shares of the total."""
        b = self.b
        sums = [b.variable(constant(0, self.lanes)) for _ in self.parts]
        with b.loop(0, tokens) as token:
            share = b.spread(b.read(self.a.scores + token * 4, F32), self.lanes)
            for i, variable in zip(self.parts, sums, strict=True):
                of_token = b.read(values + token * self.row + i, self.kind)
                b.store(b.multiply_add(share, of_token, b.load(variable)), variable)
        factor = b.spread(b.fdiv(ir.Constant(F32, 1.0), total), self.lanes)
        for i, variable in zip(self.parts, sums, strict=True):
            b.write(b.fmul(b.load(variable), factor), out + i)
