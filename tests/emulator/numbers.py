"""The arithmetic of PTX on arrays of numbers: one for each thread."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {"pred": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64}
DTYPES |= {f"{kind}{8 << i}": np.dtype(f"u{1 << i}").type for kind in "bu" for i in range(4)}
DTYPES |= {f"s{8 << i}": np.dtype(f"i{1 << i}").type for i in range(4)}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
WIDER: dict[Any, Any] = {
    np.int16: np.int32,
    np.uint16: np.uint32,
    np.int32: np.int64,
    np.uint32: np.uint64,
    np.uint64: np.object_,  # Python's integers
}


@functools.cache
def constant(text: str, dtype: Any) -> Any:
    """An immediate operand."""
    if match := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text):
        bits = int(match[1], 16)
    elif text in ("true", "false"):
        bits = int(text == "true")
    else:
        bits = int(text.removesuffix("U"), 0)
    size = dtype().itemsize
    return np.array(bits & (1 << 8 * size) - 1, UNSIGNED[size]).view(dtype)[()]


@functools.cache
def _floats_of_bytes(kind: str) -> Array:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
    return torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()


def unpacked(kind: str, words: Array) -> Array:
    """float32 of the numbers in each word, along a new last axis."""
    size = 1 if kind in ("e4m3", "e5m2") else 2
    parts = np.ascontiguousarray(words)[..., None].view(UNSIGNED[size])
    if size == 1:
        return _floats_of_bytes(kind)[parts]
    if kind == "f16":
        return parts.view(np.float16).astype(np.float32)
    return (parts.astype(np.uint32) << 16).view(np.float32)


def packed(kind: str, values: Array) -> Array:
    """The words of float32 numbers along the last axis, rounded to nearest even; 8-bit floats saturate."""
    t = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    if kind in ("e4m3", "e5m2"):
        dtype, most = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}[kind]
        parts = t.clamp(-most, most).to(dtype).view(torch.uint8).numpy()
    else:
        parts = t.to({"f16": torch.float16, "bf16": torch.bfloat16}[kind]).view(torch.int16).numpy()
    return parts.view(UNSIGNED[parts.itemsize * parts.shape[-1]])[..., 0]


def shift_left(x: Array, by: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    return np.where(by < bits, x << np.minimum(by, bits - 1).astype(x.dtype), x.dtype.type(0))


def shift_right(x: Array, by: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    shifted = x >> np.minimum(by, bits - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(by < bits, shifted, x.dtype.type(0))


def funnel_shift(low: Array, high: Array, by: Array) -> Array:
    """The low 32 bits of ``high`` above ``low``, shifted by the low five bits of ``by``: a rotation if both are
    equal."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    return (both >> (by & np.uint32(31)).astype(np.uint64)).astype(np.uint32)


def _quotient(x: Array, y: Array) -> Array:
    """The quotient of integers, towards 0."""
    return (np.sign(x) * np.sign(y) * (abs(x) // abs(y))).astype(x.dtype)


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    word = np.zeros(np.broadcast(a, b, selector).shape, np.uint32)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & np.uint32(255)
        word |= np.where(nibble >= 8, (byte >> np.uint32(7)) * np.uint32(255), byte) << np.uint32(8 * i)
    return word


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    word = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for i in range(8):
        if int(table) >> i & 1:
            word |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return word


def _fma(x: Array, y: Array, z: Array) -> Array:
    return (x.astype(np.float64) * y + z).astype(x.dtype)


def _dot_product(a: Array, b: Array, c: Array, parts: int) -> Array:
    """c + the products of a's parts, 2 or 4, with as many low bytes of b: modulo 2**32."""
    bits, total = np.uint32(32 // parts), c.astype(np.uint32)
    for i in range(parts):
        part = a >> np.uint32(i) * bits & np.uint32((1 << int(bits)) - 1)
        total = total + part * (b >> np.uint32(8 * i) & np.uint32(255))
    return total


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "mad": lambda x, y, z: x * y + z,
    "fma": _fma,
    "dp2a": functools.partial(_dot_product, parts=2),
    "dp2a.hi": lambda a, b, c: _dot_product(a, b >> np.uint32(16), c, parts=2),
    "dp4a": functools.partial(_dot_product, parts=4),
    "div": lambda x, y: x / y if x.dtype.kind == "f" else _quotient(x, y),
    "rem": lambda x, y: x - y * _quotient(x, y),
    "neg": lambda x: -x,
    "abs": abs,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x: ~x,
    "sqrt": np.sqrt,
    "rcp": lambda x: np.float32(1) / x,
    "ex2": np.exp2,
    "mov": lambda x: x,
    "popc": lambda x: np.bitwise_count(x).astype(np.uint32),
    "prmt": _prmt,
    "lop3": _lop3,
}
COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": lambda x, y: (x < y) | (x > y),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "num": lambda x, y: (x == x) & (y == y),
    "nan": lambda x, y: (x != x) | (y != y),
    # true too if either is NaN
    "equ": lambda x, y: ~((x < y) | (x > y)),
    "neu": np.not_equal,
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
}


def operand_a(registers: list[Array]) -> Array:
    """(warps, 16, k) of four registers: rows g and g + 8 of the lower half of k, then of the upper one."""
    warps, each = registers[0].shape[0] // 32, registers[0].shape[1]
    parts = [r.reshape(warps, 8, 4 * each) for r in registers]
    return np.concatenate((np.concatenate(parts[::2], 2), np.concatenate(parts[1::2], 2)), 1)


def operand_b(registers: list[Array]) -> Array:
    """(warps, k, 8) of two registers: the lower and the upper half of k."""
    warps, each = registers[0].shape[0] // 32, registers[0].shape[1]
    return np.concatenate([r.reshape(warps, 8, 4 * each) for r in registers], 2).swapaxes(1, 2)
