"""Codes of a few bits in bytes and words: :func:`pack` and :func:`unpack`."""

from __future__ import annotations

import torch


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes, uint8 (..., codes), as bytes, uint8 (..., ceil(codes * bits / 8)), the first code lowest; what is
    left of the last byte is 0.

    Args:
        bits: bits of a code, a divisor of 8.
    """
    assert 8 % bits == 0, f"{bits} bits: codes that straddle bytes"
    together = 8 // bits
    if together == 1:
        return codes.contiguous()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % together))
    packed = codes[..., 0::together] | codes[..., 1::together] << bits
    for i in range(2, together):
        packed |= codes[..., i::together] << bits * i
    return packed.contiguous()  # what is computed keeps the strides of its operands


def fields(packed: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """Return the codes of bytes, uint8: a tensor for each place in a byte, the lowest first.

    Args:
        bits: bits of a code, a divisor of 8.
    """
    assert 8 % bits == 0, f"{bits} bits: codes that straddle bytes"
    if bits == 8:
        return [packed]
    mask = 2**bits - 1
    return [packed & mask, *(packed >> shift & mask for shift in range(bits, 8 - bits, bits)), packed >> 8 - bits]


def unpack(packed: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the codes in integers, which are read as little-endian bytes, as uint8 (..., codes).

    Args:
        packed: (..., words), of any integer dtype.
        bits: bits of a code, a divisor of 8.
        order: which code of a word, counted from its lowest bits, is the first, the second, ...; None for lowest first.
    """
    # a clone, since contiguous() leaves a last dimension of one word its stride
    stream = packed.clone(memory_format=torch.contiguous_format) if packed.itemsize > 1 else packed
    codes = torch.stack(fields(stream.view(torch.uint8), bits), -1).flatten(-2)
    return codes if order is None else codes.unflatten(-1, (-1, len(order)))[..., list(order)].flatten(-2)
