"""The epilogue's arithmetic on float32 sums: see :class:`w4gemm.core.epilogue.Epilogue`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from w4gemm.core.activation import parse
from w4gemm.core.epilogue import Epilogue, EpilogueOperands
from w4gemm.kernels.device.activation import activated
from w4gemm.ptx.arithmetic import float_word, fma, pack_half2, to_float
from w4gemm.ptx.memory import load_global, load_global_half, prefetch_global, store_global, store_global_half


class IndexedScales(NamedTuple):
    """Token scales of a gathered problem: token i has scales[indices[i]]."""

    scales: cute.Tensor
    indices: cute.Tensor


class QuadOperands(NamedTuple):
    """Operands of four neighbouring features of one token, as bits until they are used."""

    alpha: Float32 | None
    biases: list[Int32 | None]
    residual: list[Int32]
    """Words of one or two columns of d; empty without a residual."""


@dataclass(frozen=True)
class EpilogueMath:
    """Loads of the epilogue's operands, the arithmetic on sums, and stores of d. No control flow of the device: plain
    Python.

    A quad is four neighbouring features of one token, the first a multiple of four. Loaded values stay bits until they
    are used, so that no instruction waits for them earlier.

    Args:
        epilogue: the operations.
        bias_kind: "f16" or "bf16", dtype of the bias.
        out_kind: "f16", "bf16" or "f32", dtype of d and the residual.
        vector: True if every row of d starts at a multiple of 16 bytes and is a multiple of 16 bytes long.
        has_channel_scale: True if sums are multiplied by a scale of their feature.
        sum_scale: the number, a power of two, that a sum of 1.0 stands for.
    """

    epilogue: Epilogue
    bias_kind: str
    out_kind: str
    vector: bool
    has_channel_scale: bool = False
    sum_scale: float = 1.0

    def load_alpha(self, operands: EpilogueOperands) -> Float32 | None:
        """Load alpha times the expert's scale, once per thread and tile."""
        factors = []
        if self.epilogue.alpha == "host":
            factors.append(operands.alpha)
        loaded = (
            (self.epilogue.alpha == "device", operands.alpha),
            (self.epilogue.expert_scale, operands.expert_scale),
        )
        for asked, number in loaded:
            if asked:
                factors.append(to_float("f32", load_global(number.iterator.toint(), 1, Boolean(True))[0]))
        return scaled(*factors) if factors else None

    def load_bias(self, operands: EpilogueOperands, feature: Int32) -> Int32 | None:
        """Load the bits of a feature's bias; 0 past the last feature."""
        if not self.epilogue.bias:
            return None
        bias = operands.bias
        return load_global_half(bias.iterator.toint() + Int64(feature) * 2, feature < bias.shape[0])

    def load_token_scale(self, operands: EpilogueOperands, token: Int32, rows: Int32) -> Float32 | None:
        """Load the scale of a token; 0 past the last of ``rows`` tokens."""
        if not self.epilogue.token_scale:
            return None
        scales, exists = operands.token_scale, token < rows
        if isinstance(scales, IndexedScales):
            scales, indices = scales
            token = load_global(indices.iterator.toint() + Int64(token) * 4, 1, exists)[0]
        return to_float("f32", load_global(scales.iterator.toint() + Int64(token) * 4, 1, exists)[0])

    def load_channel_scale(self, operands: EpilogueOperands, feature: Int32) -> Float32 | None:
        """Load the scale of a feature; 0 past the last feature."""
        if not self.has_channel_scale:
            return None
        scales = operands.channel_scale
        address = scales.iterator.toint() + Int64(feature) * 4
        return to_float("f32", load_global(address, 1, feature < scales.shape[0])[0])

    def load_residual(self, operands: EpilogueOperands, token: Int32, feature: Int32) -> list[Int32]:
        """Load the residual of a quad, as words of one or two columns of d; 0 past the last row or column."""
        if not self.epilogue.residual:
            return []
        residual, column, count = operands.residual, self.column(feature), 2 if self.epilogue.gated else 4
        m, columns = residual.shape
        address, per_word = self.address(residual, token, column), 1 if self.out_kind == "f32" else 2
        if self.vector:
            return load_global(address, count // per_word, (token < m) & (column < columns))
        if per_word == 1:
            return [load_global(address + 4 * i, 1, (token < m) & (column + i < columns))[0] for i in range(count)]
        halves = [load_global_half(address + 2 * i, (token < m) & (column + i < columns)) for i in range(count)]
        return [low | (high << 16) for low, high in zip(halves[::2], halves[1::2], strict=True)]

    def prefetch_residual(self, operands: EpilogueOperands, token: Int32, feature: Int32, features: int) -> None:
        """Bring the residual of ``features`` features of a token into L2."""
        residual, column = operands.residual, self.column(feature)
        size = residual.element_type.width // 8
        exists = (token < residual.shape[0]) & (column < residual.shape[1])
        for offset in range(0, self.column(features) * size, 128):
            prefetch_global(self.address(residual, token, column) + offset, exists)

    def prefetch_features(self, operands: EpilogueOperands, feature: Int32, features: int, thread: Int32) -> None:
        """Bring biases and channel scales of ``features`` features into L2; called by at least as many threads."""
        own = feature + thread
        for t, size in ((operands.bias, 2), (operands.channel_scale, 4)):
            if t is not None:
                # one thread per sector of 32 bytes
                exists = (thread < features) & (thread % (32 // size) == 0) & (own < t.shape[0])
                prefetch_global(t.iterator.toint() + Int64(own) * size, exists)

    def address(self, t: cute.Tensor, token: Int32, column: Int32) -> Int64:
        """The address of an element of d or of the residual."""
        return t.iterator.toint() + (Int64(token) * t.stride[0] + column) * (t.element_type.width // 8)

    def column(self, feature: Any) -> Any:
        """The column of d that a feature, or a pair of them, makes."""
        return feature >> 1 if self.epilogue.gated else feature

    def feature_value(self, value: Float32, alpha: Float32 | None, bias: Int32 | None) -> Float32:
        """The element of d for one sum, if it depends on no other sum."""
        value = self.affine(value, alpha, None if bias is None else to_float(self.bias_kind, bias))
        return value if self.epilogue.activation is None else activated(parse(self.epilogue.activation), value)

    def affine(self, value: Float32, alpha: Float32 | None, bias: Float32 | None) -> Float32:
        """sum_scale * alpha * value + bias; sum_scale * value is exact."""
        if self.sum_scale != 1.0:
            factor = Float32(self.sum_scale)
            value, alpha = (value, factor) if alpha is None else (value * factor, alpha)
        if bias is None:
            return value if alpha is None else value * alpha
        return value + bias if alpha is None else fma(value, alpha, bias)

    def store_quad(
        self, sums: list[Float32], operands: QuadOperands, out: cute.Tensor, token: Int32, feature: Int32
    ) -> None:
        """Store the elements of d that a quad's four sums make."""
        alpha, biases, residual = operands.alpha, operands.biases, operands.residual
        if self.epilogue.gated:
            values = [None if bias is None else to_float(self.bias_kind, bias) for bias in biases]
            y = [self.affine(value, alpha, bias) for value, bias in zip(sums, values, strict=True)]
            activation = parse(self.epilogue.activation)
            y = [activated(activation, y[i], y[i + 1]) for i in (0, 2)]
        else:
            y = [self.feature_value(value, alpha, bias) for value, bias in zip(sums, biases, strict=True)]
        if self.out_kind == "f32":
            y = [value + to_float("f32", word) for value, word in zip(y, residual, strict=True)] if residual else y
            words = [float_word(value) for value in y]
        else:
            if residual:
                y = [value + to_float(self.out_kind, residual[i // 2], i % 2 == 1) for i, value in enumerate(y)]
            words = [pack_half2(self.out_kind, y[i], y[i + 1]) for i in range(0, len(y), 2)]
        self.store(words, out, token, self.column(feature))

    def store(self, words: list[Int32], out: cute.Tensor, token: Int32, column: Int32) -> None:
        """Store neighbouring columns of one token, 1, 2 or 4 words of them, as far as they exist."""
        m, columns = out.shape
        address = self.address(out, token, column)
        if self.vector:
            store_global(address, words, (token < m) & (column < columns))
        elif self.out_kind == "f32":
            for i, word in enumerate(words):
                store_global(address + 4 * i, [word], (token < m) & (column + i < columns))
        else:
            for i in range(2 * len(words)):
                half = words[i // 2] >> (16 * (i % 2))
                store_global_half(address + 2 * i, half, (token < m) & (column + i < columns))


def scaled(value: Float32, *scales: Float32 | None) -> Float32:
    """``value`` times the scales that are not None."""
    for scale in scales:
        value = value if scale is None else value * scale
    return value
