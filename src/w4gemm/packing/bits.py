"""Codes of a few bits in bytes and words: :func:`pack` and :func:`unpack`; in planes, :func:`unpack_planes`."""

from __future__ import annotations

import functools
import math
import operator

import torch


def _unit(bits: int) -> tuple[int, int]:
    """Return after how many codes and bytes a stream of codes begins a byte again."""
    together = 8 // math.gcd(8, bits)
    return together, together * bits // 8


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes, uint8 (..., codes), as bytes, uint8 (..., ceil(codes * bits / 8)), the first code lowest; what is
    left of the last byte is 0.

    Args:
        bits: bits of a code, 1 to 8.
    """
    together, size = _unit(bits)
    if together == 1:
        return codes.contiguous()
    count = codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, -count % together))
    packed = []
    for byte in range(size):
        first, last = 8 * byte // bits, (8 * byte + 7) // bits  # the codes that have bits in it
        shifts = {i: i * bits - 8 * byte for i in range(first, last + 1)}
        parts = (codes[..., i::together] << s if s >= 0 else codes[..., i::together] >> -s for i, s in shifts.items())
        packed.append(functools.reduce(operator.or_, parts))
    stream = packed[0] if size == 1 else torch.stack(packed, -1).flatten(-2)[..., : -(-count * bits // 8)]
    return stream.contiguous()  # what is computed keeps the strides of its operands


def fields(packed: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """Return the codes of bytes, uint8 (..., bytes): a tensor for each place of a code among as few bytes as hold whole
    codes, the lowest first. Their number divides that of the bytes: 1 for 1, 2, 4 and 8 bits, 3 for 3 and 6, 5 for 5,
    7 for 7.

    Args:
        bits: bits of a code, 1 to 8.
    """
    together, size = _unit(bits)
    if together == 1:
        return [packed]
    mask, codes = 2**bits - 1, []
    for i in range(together):
        byte, shift = divmod(i * bits, 8)
        code = packed[..., byte::size] >> shift if shift else packed[..., byte::size]
        if shift + bits > 8:
            code = code | packed[..., byte + 1 :: size] << 8 - shift
        codes.append(code if shift + bits == 8 else code & mask)
    return codes


def unpack(packed: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the codes in integers, which are read as little-endian bytes, as uint8 (..., codes): all that are whole.

    Args:
        packed: (..., words), of any integer dtype.
        bits: bits of a code, 1 to 8.
        order: which code of a run of so many, counted from its lowest bits, is the first, the second, ...; None for
            lowest first. A run is a word if codes do not straddle words.
    """
    # a clone, since contiguous() leaves a last dimension of one word its stride
    stream = packed.clone(memory_format=torch.contiguous_format) if packed.itemsize > 1 else packed
    stream = stream.view(torch.uint8)
    count, (_, size) = stream.shape[-1] * 8 // bits, _unit(bits)
    if missing := -stream.shape[-1] % size:
        stream = torch.nn.functional.pad(stream, (0, missing))
    places = fields(stream, bits)
    codes = torch.stack(places, -1).flatten(-2)[..., :count] if len(places) > 1 else places[0]
    return codes if order is None else codes.unflatten(-1, (-1, len(order)))[..., list(order)].flatten(-2)


def unpack_planes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of planes, as uint8 (..., codes). Of 32 codes come first words with the lowest bits of each,
    then words with the next ones: 4, 2 and 1 bits at a time, those of which ``bits`` is the sum.

    Args:
        packed: int32 (..., words), a multiple of ``bits``.
        bits: bits of a code, 1 to 8.
    """
    widths = [width for width in (8, 4, 2, 1) if bits & width]
    codes, shift = [], 0
    for width, plane in zip(widths, packed.unflatten(-1, (-1, bits)).split(widths, -1), strict=True):
        codes.append(unpack(plane, width) << shift)
        shift += width
    return functools.reduce(operator.or_, codes).flatten(-2)
