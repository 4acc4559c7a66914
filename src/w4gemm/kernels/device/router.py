"""The choice of a token's experts by a warp: :class:`RouterMath`."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from w4gemm.core.router import LEAST_SUM, LOWEST, LOWEST_NUMBER, Router
from w4gemm.kernels.device.activation import sigmoid
from w4gemm.kernels.device.sums import warp_sum
from w4gemm.ptx.arithmetic import divide, exp2, float_word, maximum, to_float, warp_maximum
from w4gemm.ptx.memory import load_global, load_global_half

_LOG2_E = 1.4426950408889634
_BEYOND = 4096
"""Above the number of any expert."""


class RouterMath:
    """The rule of a :class:`Router` for logits of a kind. Expert e is that of lane e % 32, in its register e / 32.

    Args:
        experts: number of logits of a token.
        kind: of the logits: "f32", "f16" or "bf16".
    """

    def __init__(self, router: Router, experts: int, kind: str) -> None:
        self.router, self.experts, self.kind = router, experts, kind
        self.registers = range(-(-experts // 32))

    def choose(self, logits: cute.Tensor, bias: cute.Tensor | None, token: Int32) -> tuple[Int32, Float32]:
        """Return a token's choices and their weights, the i-th one in lane i; -1 and 0 in lanes past the last. Called
        by a whole warp. Exponentials and quotients differ from PyTorch's in their last bits.

        Args:
            logits: (tokens, experts), contiguous.
            bias: float32 (experts,) or None.
        """
        router, lane = self.router, cute.arch.lane_idx()
        experts = [lane + 32 * j for j in self.registers]
        scores = self.scores([self.load(logits, Int64(token) * self.experts + e, e < self.experts) for e in experts])
        values = scores
        if bias is not None:
            words = [load_global(bias.iterator.toint() + Int64(e) * 4, 1, e < self.experts)[0] for e in experts]
            values = [score + to_float("f32", word) for score, word in zip(scores, words, strict=True)]
        keys = [_where(e < self.experts, _ordered(v), LOWEST) for e, v in zip(experts, values, strict=True)]
        if const_expr(router.groups > 1):
            size = self.experts // router.groups
            taken = self.groups_of(keys, experts, size, bias is not None)
            in_group = [(taken >> cutlass.min(e // size, 31)) & 1 != 0 for e in experts]
            keys = [_where(inside, key, LOWEST) for inside, key in zip(in_group, keys, strict=True)]
        choice, weight, total = Int32(-1), Float32(0.0), Float32(0.0)
        for rank in range(router.top_k):
            _, expert = _largest(keys, experts)
            keys = [_where(e == expert, LOWEST, key) for e, key in zip(experts, keys, strict=True)]
            score = scores[0]
            for e, other in zip(experts, scores, strict=True):
                score = Float32(cutlass.select_(e == expert, other, score))
            score = cute.arch.shuffle_sync(score, expert % 32)
            total = total + score
            choice = _where(lane == rank, expert, choice)
            weight = Float32(cutlass.select_(lane == rank, score, weight))
        if const_expr(router.renormalize):
            weight = divide(weight, total + Float32(LEAST_SUM))
        return choice, weight if router.scale == 1.0 else weight * Float32(router.scale)

    def load(self, logits: cute.Tensor, index: Int64, exists: Boolean) -> Float32:
        """A logit; -infinity if it does not exist."""
        at = logits.iterator.toint() + index * (4 if self.kind == "f32" else 2)
        word = load_global(at, 1, exists)[0] if self.kind == "f32" else load_global_half(at, exists)
        return Float32(cutlass.select_(exists, to_float(self.kind, word), Float32(-float("inf"))))

    def scores(self, logits: list[Float32]) -> list[Float32]:
        if self.router.scoring == "sigmoid":
            return [sigmoid(logit) for logit in logits]
        top = logits[0]
        for logit in logits[1:]:
            top = maximum(top, logit)
        for offset in (16, 8, 4, 2, 1):
            top = maximum(top, cute.arch.shuffle_sync_bfly(top, offset))
        powers = [exp2((logit - top) * Float32(_LOG2_E)) for logit in logits]
        total = powers[0]
        for power in powers[1:]:
            total = total + power
        total = warp_sum(total)
        return [divide(power, total) for power in powers]

    def groups_of(self, keys: list[Int32], experts: list[Int32], size: int, biased: bool) -> Int32:
        """The groups, of ``size`` experts, that experts are chosen from: a bit for each."""
        lane, of_lane, taken = cute.arch.lane_idx(), Int32(LOWEST), Int32(0)
        for group in range(self.router.groups):
            own = [j for j in self.registers if 32 * j < (group + 1) * size and 32 * j + 32 > group * size]
            numbers = [experts[j] for j in own]
            inside = [_where(experts[j] // size == group, keys[j], LOWEST) for j in own]
            key, expert = _largest(inside, numbers)
            value = _number(key)
            if biased:
                others = [_where(e == expert, LOWEST, k) for e, k in zip(numbers, inside, strict=True)]
                value = value + _number(_largest(others, numbers)[0])
            of_lane = _where(lane == group, _ordered(value), of_lane)
        for _ in range(self.router.top_groups):
            _, group = _largest([of_lane], [lane])
            taken = taken | (Int32(1) << group)
            of_lane = _where(lane == group, LOWEST, of_lane)
        return taken


def _where(condition: Any, x: Any, y: Any) -> Int32:
    return Int32(cutlass.select_(condition, Int32(x), Int32(y)))


def _ordered(value: Float32) -> Int32:
    """A key in the order of float32 values."""
    bits = float_word(value)
    return _where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST_NUMBER)


def _number(key: Int32) -> Float32:
    return to_float("f32", key ^ ((key >> 31) & 0x7FFFFFFF))


def _largest(keys: list[Int32], numbers: list[Int32]) -> tuple[Int32, Int32]:
    """The largest key of a warp, and the least number that has it. Numbers of a lane ascend."""
    key, number = keys[0], numbers[0]
    for other, its in zip(keys[1:], numbers[1:], strict=True):
        number = _where(other > key, its, number)
        key = _where(other > key, other, key)
    top = warp_maximum(key ^ LOWEST) ^ LOWEST  # of unsigned integers
    return top, _BEYOND - warp_maximum(_where(key == top, _BEYOND - number, 0))
