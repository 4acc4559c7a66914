"""Results of every operation from the formulas alone: float64 PyTorch that imports nothing of w4gemm.

A number type is (digits of the significand, exponent of the smallest normal number, largest number).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch


class NumberType(NamedTuple):
    digits: int
    least_exponent: int
    largest: float
    saturates: bool = False
    """True if larger numbers become ``largest``, false if they become infinite."""

    @property
    def unit(self) -> float:
        """Largest relative error of a rounded normal number."""
        return 2.0**-self.digits

    @property
    def smallest_step(self) -> float:
        """Distance of subnormal numbers."""
        return 2.0 ** (self.least_exponent - self.digits + 1)


TYPES = {
    "float32": NumberType(24, -126, (2 - 2.0**-23) * 2.0**127),
    "bfloat16": NumberType(8, -126, (2 - 2.0**-7) * 2.0**127),
    "float16": NumberType(11, -14, 65504.0),
    "float8_e4m3fn": NumberType(4, -6, 448.0, saturates=True),
}


FP8_LEAST_EXPONENTS = {"e4m3": -6, "e5m2": -14}
"""Exponents of the least normal numbers."""


def rounded(values: torch.Tensor, to: NumberType) -> torch.Tensor:
    """float64 ``values`` to the nearest numbers of a type, ties to even, as float64."""
    exponent = torch.frexp(values).exponent.clamp(min=to.least_exponent + 1).double() - to.digits
    step = torch.exp2(exponent)
    near = torch.round(values / step) * step
    beyond = near.abs() > to.largest
    limit = torch.full_like(near, to.largest if to.saturates else math.inf).copysign(near)
    return torch.where(beyond, limit, near)


CODEBOOKS = {
    "int4": tuple(range(-8, 8)),
    # IQ4_NL: from the middle outwards the steps grow
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    # NF4: quantiles of a normal distribution, -1 to 1
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    # sign, two bits of exponent, one of mantissa
    "e2m1": (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6),
    **{f"int{bits}": tuple(range(-(2 ** (bits - 1)), 2 ** (bits - 1))) for bits in (8, 6, 5, 3, 2)},
    **{
        name: tuple(torch.arange(256).to(torch.uint8).view(dtype).double().tolist())
        for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2))
    },
    # in eighths: below 1, then steps that double; in sixteenths: below 1/4, ...
    "e2m3": tuple(s * v / 8 for s in (1, -1) for v in (*range(16), *range(16, 32, 2), *range(32, 64, 4))),
    "e3m2": tuple(
        s * v / 16 for s in (1, -1) for v in (*range(8), *(2**e * m for e in range(1, 7) for m in range(4, 8)))
    ),
}
"""Numbers of the codes of each element, without a zero point."""


def codebook(element: str) -> tuple[float, ...]:
    """Return the numbers of an element: by its name or, behind "codebook", in hexadecimal bits of float32 or its upper
    half."""
    bits = element.removeprefix("codebook")
    if bits == element:
        return CODEBOOKS[element]
    size = len(bits) // 16
    words = (bits[i : i + size].ljust(8, "0") for i in range(0, len(bits), size))
    return tuple(struct.unpack(">f", bytes.fromhex(word))[0] for word in words)


def finite(element: str) -> list[float]:
    """Return the numbers of an element, without NaN and infinity."""
    return [number for number in codebook(element) if math.isfinite(number)]


class Weight(NamedTuple):
    """Exact numbers (n, k) in float64."""

    value: torch.Tensor
    terms: torch.Tensor
    """Sum of the magnitudes of what ``value`` is a difference of: a kernel may add these up apart."""
    operands: torch.Tensor
    """Magnitudes by which a tensor core aligns products with fp8 x: of codes without their float zero points, which
    are added behind, and of subnormal fp8 numbers that of the least normal one."""


def weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    channels: torch.Tensor | None,
    group: torch.Tensor,
    zero: str,
    element: str = "int4",
    products_rounded: bool = False,
    numbers: str = "float32",
) -> Weight:
    """w from its parts.

    codes (n, k); scales and zeros (n, groups); channels (n) or None; group (k), that of each column; zero "none":
    s * the code's number, "int": s (u - z), "float": s u + z. With channels: c times that, which is rounded to e4m3
    before if ``products_rounded``. A code's number is rounded to ``numbers`` first, one of TYPES.
    """
    u, s, middle = codes.double(), scales.float().double()[:, group], len(codebook(element)) // 2
    if zero == "none":
        values = torch.tensor(codebook(element), dtype=torch.float64, device=codes.device)
        w = s * rounded(values, TYPES[numbers])[codes.int()]
        terms = s.abs() * (u + middle) if element.startswith("int") else w.abs()
        operands = aligned(w.abs(), s.abs() * 2.0 ** FP8_LEAST_EXPONENTS.get(element, -math.inf))
    else:
        assert zeros is not None
        z = zeros.float().double()[:, group]
        w = s * (u - z) if zero == "int" else s * u + z
        # sums may be of u - middle, as signed codes are, with what is left of a group's zero point added behind
        signed = (u - middle).abs()
        apart = torch.maximum(u + z, signed + (z - middle).abs()) if zero == "int" else signed + middle
        terms = s.abs() * apart + (0 if zero == "int" else z.abs())
        operands = w.abs() if zero == "int" else s.abs() * torch.maximum(u, signed)
    if channels is not None:
        w = rounded(w, TYPES["float8_e4m3fn"]) if products_rounded else w
        w = w * channels.double()[:, None]
        terms = w.abs()
        operands = aligned(terms, channels.double().abs()[:, None] * 2.0 ** FP8_LEAST_EXPONENTS["e4m3"])
    return Weight(w, terms, operands)


def aligned(magnitudes: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Magnitudes by which tensor cores align products: a subnormal number has the exponent of the ``least`` normal one,
    a zero has none (MMA-Sim, arXiv 2511.10909)."""
    return torch.where(magnitudes > 0, torch.maximum(magnitudes, least), 0.0)


def token_quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """16-bit x (m, k) to e4m3 numbers and a scale for each row, every operation rounded once to float32."""
    f32 = TYPES["float32"]
    top = x.double().abs().amax(dim=1, keepdim=True)
    top = torch.where(top == 0, torch.full_like(top, 448.0), top.clamp(min=2.0**-100))
    scale, inverse = rounded(top / 448, f32), rounded(448 / top, f32)
    return rounded(rounded(x.double() * inverse, f32), TYPES["float8_e4m3fn"]), scale[:, 0]


def activated(activation: str | None, y: torch.Tensor) -> torch.Tensor:
    """An activation of y (m, n); gated ones give (m, n / 2)."""
    if activation is None:
        return y
    if activation == "relu":
        return torch.where(y > 0, y, torch.where(y.isnan(), y, torch.zeros_like(y)))
    if activation == "relu2":
        return activated("relu", y) ** 2
    if activation == "gelu":
        return y * torch.special.erfc(-y / math.sqrt(2)) / 2
    if activation == "gelu_tanh":
        return y / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    if activation == "silu":
        return y / (1 + torch.exp(-y))
    a, b = gated(activation, y)
    return a * b


def gated(activation: str, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two factors of a gated activation of y (m, n), each (m, n / 2)."""
    gate, up = y[:, 0::2], y[:, 1::2]
    name, _, limit = activation.rstrip(")").partition("(limit=")
    if name == "swiglu_oai" or limit:
        most = float(limit or 7)
        gate, up = torch.where(gate > most, most, gate), torch.where(up.abs() > most, most * up.sign(), up)
    if name == "situ_mul":
        return 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)), 25 * torch.tanh(up / 25)
    if name == "swiglu_oai":
        return gate / (1 + torch.exp(-1.702 * gate)), up + 1
    return activated(name.removesuffix("_mul"), gate), up


class Sums(NamedTuple):
    """x @ w.T and how far a kernel's may be off."""

    value: torch.Tensor
    error: torch.Tensor


def product(
    x: torch.Tensor,
    weight: Weight,
    x_type: str,
    *,
    w_may_be_rounded: bool,
    columns_at_a_time: int,
    x_scale: torch.Tensor | None = None,
) -> Sums:
    """x (m, k) @ w (n, k).T in float64. x_scale: (m, k) if x has been multiplied by scales of its blocks.

    The error allowed: weights rounded to x's type (independent errors, so their root of squares, ten times); float32
    additions in any order, and one after the other, where each of k partial sums may be about as large as the whole and
    is rounded (independent errors, of 2**-24 / sqrt(3) of it in the mean, three and a half times their root of
    squares); and, for e4m3 x, what tensor cores cut off: after every 32 columns of ``columns_at_a_time`` the sum at 14
    bits, and before it is added each of 33 terms at 14 bits of the largest one, which is at most the root of squares of
    what products are aligned by: independent errors again, sqrt(33) < 8 of them.
    """
    x, w = x.double(), weight.value
    value = x @ w.T
    spread = (x.square() @ w.square().T).sqrt()
    error = 2.0**-22 * (x.abs() @ weight.terms.T) + 2.0**-23 * math.sqrt(x.shape[1]) * (value.abs() + spread)
    if w_may_be_rounded:
        number = TYPES[x_type]
        error = error + 10 * number.unit * spread + number.smallest_step * x.abs().sum(1, keepdim=True)
    if x_type == "float8_e4m3fn":
        steps = 1 + -(-min(x.shape[1], columns_at_a_time) // 32)
        least = torch.full_like(x, 2.0 ** FP8_LEAST_EXPONENTS["e4m3"]) * (1 if x_scale is None else x_scale)
        of_x, of_w = aligned(x.abs(), least), weight.operands
        error = error + steps * 2.0**-13 * (of_x @ of_w.T + 8 * (of_x.square() @ of_w.square().T).sqrt())
    return Sums(value, error)


def epilogue(
    sums: Sums,
    out_type: str,
    *,
    alpha: float | None,
    scales: Sequence[torch.Tensor | None],
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
) -> Sums:
    """act(alpha * scales * sums + bias) + residual, not rounded, and the error allowed of the rounded result.

    scales: of each row (m). bias (n), or one for each row (m, n).
    """
    y, error = sums
    for scale in scales:
        if scale is not None:
            y, error = y * scale.double()[:, None], error * scale.double().abs()[:, None]
    if alpha is not None:
        y, error = y * alpha, error * abs(alpha)
    if bias is not None:
        y = y + bias.double()
        error = error + 2.0**-23 * bias.double().abs()
    error = error + 2.0**-22 * y.abs()
    d = activated(activation, y)
    if d.shape != y.shape:
        gate, (_, up) = y[:, 0::2], gated(activation or "", y)
        e_gate, e_up, steepest = error[:, 0::2], error[:, 1::2], 2 if activation == "situ_mul" else 1.2
        error = steepest * e_gate * (up.abs() + e_up) + (gate.abs() + e_gate) * e_up + 2.0**-20 * d.abs()
    elif activation == "relu2":
        error = (2 * y.abs() + error) * error + 2.0**-20 * d.abs()
    elif activation is not None:
        error = 1.2 * error + 2.0**-20 * y.abs()
    if residual is not None:
        d = d + residual.double()
        error = error + 2.0**-22 * residual.double().abs()
    number = TYPES[out_type]
    return Sums(d, error + 1.01 * number.unit * (d.abs() + error) + number.smallest_step)
