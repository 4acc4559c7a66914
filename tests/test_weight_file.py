"""A flipped bit in the header of a weight's file never gives other numbers."""

from __future__ import annotations

from pathlib import Path

import torch

from w4gemm import FormatError, QuantizedWeight


def test_flipped_bits_of_the_header(tmp_path: Path) -> None:
    """A weight in act-order with zero points has every kind of tensor but channels."""
    random = torch.Generator().manual_seed(0)
    codes, zeros = (torch.randint(16, size, generator=random) for size in ((8, 64), (8, 2)))
    g_idx = (torch.randperm(64, generator=random) // 32).int()
    w = QuantizedWeight.from_codes("int4_g32_zint", codes, torch.rand(8, 2).bfloat16(), zeros.to(torch.uint8), g_idx)
    path = tmp_path / "w.safetensors"
    w.save(path)
    whole = path.read_bytes()
    refused = 0
    for at in range(8 + int.from_bytes(whole[:8], "little")):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        try:
            assert torch.equal(QuantizedWeight.load(path).dequantize(), w.dequantize()), at
        except FormatError:
            refused += 1
    assert refused > 300
