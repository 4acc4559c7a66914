"""The activations of :mod:`w4gemm.core.activation` on float32, on the device.

Relative errors stay below 1e-6 if the result is not tiny: no step subtracts numbers that nearly cancel.
"""

from __future__ import annotations

from cutlass import Float32

from w4gemm.core.activation import Activation
from w4gemm.ptx.arithmetic import capped_magnitude, exp2, fma, maximum, minimum, reciprocal, select_near

_LOG2_E = 1.4426950408889634
# exp(a**2 / 2) * erfc(a / sqrt(2)) / 2 = t * polynomial in t with t = 1 / (1 + 0.3 * a), within 1.5e-7 for a >= 0
_TAIL = (
    0.11962930113077164,
    0.12075395882129669,
    0.09991349279880524,
    0.12856163084506989,
    -0.053683649748563766,
    0.20635351538658142,
    -0.1572030931711197,
    0.03567477688193321,
)
_FAR = 20.0
"""The normal distribution's tail from here on is 0 in float32."""
# tanh(x) = x + x * s * polynomial in s with s = x**2, within 4e-8 of it for abs(x) < _NEAR
_TANH = (-0.33332946633771743, 0.13320724995120636, -0.05267180973142055, 0.01643757402494026)
_NEAR = 0.55


def activated(activation: Activation, *y: Float32) -> Float32:
    """The activation of one sum, or of a gate and its up."""
    return _ACTIVATIONS[activation.name](*y, **dict(activation.constants))


def relu(x: Float32) -> Float32:
    """max(x, 0)."""
    return maximum(x, Float32(0.0))


def relu2(x: Float32) -> Float32:
    """max(x, 0)**2."""
    return relu(x) * relu(x)


def silu(x: Float32) -> Float32:
    """x / (1 + exp(-x))."""
    return x * sigmoid(x)


def sigmoid(x: Float32, alpha: float = 1.0) -> Float32:
    """1 / (1 + exp(-alpha * x))."""
    return reciprocal(exp2(x * Float32(-alpha * _LOG2_E)) + Float32(1.0))


def gelu_tanh(x: Float32) -> Float32:
    """x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x**3)."""
    scale = -2 * 0.7978845608028654 * _LOG2_E
    u = x * fma(x * x, Float32(scale * 0.044715), Float32(scale))
    return x * reciprocal(exp2(u) + Float32(1.0))


def gelu(x: Float32) -> Float32:
    """x * P(X <= x) = max(x, 0) - a * P(X > a) with a = abs(x) and a normal X."""
    a = capped_magnitude(x, Float32(_FAR))
    t = reciprocal(fma(a, Float32(0.3), Float32(1.0)))
    tail = Float32(_TAIL[-1])
    for coefficient in _TAIL[-2::-1]:
        tail = fma(tail, t, Float32(coefficient))
    return maximum(x, Float32(0.0)) - tail * t * exp2(a * a * Float32(-0.5 * _LOG2_E)) * a


def tanh(x: Float32) -> Float32:
    """1 - 2 / (1 + exp(2 x)), or near 0, where that cancels, a polynomial."""
    s = x * x
    polynomial = Float32(_TANH[-1])
    for coefficient in _TANH[-2::-1]:
        polynomial = fma(polynomial, s, Float32(coefficient))
    far = fma(reciprocal(exp2(x * Float32(2 * _LOG2_E)) + Float32(1.0)), Float32(-2.0), Float32(1.0))
    return select_near(x, Float32(_NEAR), fma(polynomial * s, x, x), far)


def silu_mul(gate: Float32, up: Float32, limit: float | None) -> Float32:
    """silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    return silu(_at_most(gate, limit)) * _within(up, limit)


def swiglu_oai(gate: Float32, up: Float32, alpha: float, beta: float | None, limit: float | None) -> Float32:
    """g * sigmoid(alpha * g) * (clamp(up, -limit, limit) + beta) with g = min(gate, limit)."""
    gate = _at_most(gate, limit)
    up = _within(up, limit)
    return gate * sigmoid(gate, alpha) * (up if beta is None else up + Float32(beta))


def situ_mul(gate: Float32, up: Float32, beta: float, linear_beta: float | None) -> Float32:
    """beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)."""
    bent = tanh(gate * Float32(1 / beta)) * sigmoid(gate)
    if linear_beta is None:
        return bent * Float32(beta) * up
    return bent * Float32(beta * linear_beta) * tanh(up * Float32(1 / linear_beta))


def _at_most(x: Float32, limit: float | None) -> Float32:
    return x if limit is None else minimum(x, Float32(limit))


def _within(x: Float32, limit: float | None) -> Float32:
    return x if limit is None else maximum(minimum(x, Float32(limit)), Float32(-limit))


_ACTIVATIONS = {
    "relu": relu,
    "relu2": relu2,
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu_mul": silu_mul,
    "gelu_mul": lambda gate, up: gelu(gate) * up,
    "gelu_tanh_mul": lambda gate, up: gelu_tanh(gate) * up,
    "swiglu_oai": swiglu_oai,
    "situ_mul": situ_mul,
}
