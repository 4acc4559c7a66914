"""Files of weights: a flipped bit in the header never gives other numbers, and each file is whole."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save

from w4gemm import FormatError, QuantizedWeight, quantize
from w4gemm.core.files import _pid_namespace


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


def test_what_is_no_path_is_named(tmp_path: Path) -> None:
    w = quantize(torch.randn(8, 64))
    for path in (None, 3, b"w"):
        for call in (w.save, QuantizedWeight.load):
            with pytest.raises(TypeError, match=f"path: wanted a string or a Path, got {type(path).__name__}"):
                call(path)
    with pytest.raises(ValueError, match="weight: wanted one with numbers, got one on the meta device"):
        w.to("meta").save(tmp_path / "w")
    assert not list(tmp_path.iterdir())


def test_others_may_read_a_weight_and_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    w, path = quantize(torch.randn(8, 64)), tmp_path / "w"
    w.save(path)
    assert path.stat().st_mode & 0o777 == 0o644
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match=f"path: cannot write '{place}': it is no regular file"):
            w.save(place)
    with pytest.raises(OSError, match=f"^path: {tmp_path}/no/w: No such file or directory"):
        w.save(tmp_path / "no/w")


def test_a_file_is_whole_and_keeps_the_numbers_of_weights_that_were_loaded_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with safetensors before 0.8, which writes over the memory that it reads from."""

    def save_file(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(save(tensors, metadata)[:most])
        if most is not None:
            raise SafetensorError("disk full")

    most, (first, second, path) = None, (*(quantize(torch.randn(8, 64)) for _ in range(2)), tmp_path / "w")
    monkeypatch.setattr("w4gemm.weights.file.save_file", save_file)
    first.save(path)
    loaded = QuantizedWeight.load(path)
    second.save(path)
    assert torch.equal(loaded.dequantize(), first.dequantize())
    most = 100
    with pytest.raises(OSError, match=f"path: cannot write '{path}': disk full"):
        first.save(path)
    assert torch.equal(QuantizedWeight.load(path).dequantize(), second.dequantize())
    assert list(tmp_path.iterdir()) == [path]


def test_several_writers_of_a_file_and_what_a_killed_one_left(tmp_path: Path) -> None:
    w, path = quantize(torch.randn(64, 256), "int4_g128"), tmp_path / "w.safetensors"
    dead, elsewhere = 2**22 + 1, "00000000"
    killed, alive, abandoned, far = (
        tmp_path / f"{path.name}.{place}-{process}-7f.unfinished"
        for place, process in ((_pid_namespace(), dead), (_pid_namespace(), 1), (elsewhere, 1), (elsewhere, dead))
    )
    for leftover in (killed, alive, abandoned, far):
        leftover.touch()
    os.utime(abandoned, (0, 0))
    with ThreadPoolExecutor(8) as pool:
        for saved in [pool.submit(w.save, path) for _ in range(100)]:
            saved.result()
    assert {file.name for file in tmp_path.iterdir()} == {path.name, alive.name, far.name}
    assert torch.equal(QuantizedWeight.load(path).dequantize(), w.dequantize())


def test_a_name_of_255_bytes_and_a_link(tmp_path: Path) -> None:
    w, path, link = quantize(torch.randn(8, 64)), tmp_path / ("é" * 127 + "w"), tmp_path / "link"
    link.symlink_to(path.name)
    for place in (link, path, link):
        w.save(place)
        assert torch.equal(QuantizedWeight.load(place).dequantize(), w.dequantize())
    assert link.is_symlink() and sorted(tmp_path.iterdir()) == sorted([link, path])


def test_what_is_no_device_is_named(tmp_path: Path) -> None:
    w, path = quantize(torch.randn(8, 64)), tmp_path / "w"
    w.save(path)
    for device, error, message in (
        ("meta", ValueError, "device: wanted one that holds numbers, got meta"),
        ("cuda:77", ValueError, "device: cuda:77 is not there; PyTorch sees"),
        ("hpu", ValueError, "device: hpu is not there"),
        ("fast", ValueError, "device: wanted a torch.device or its string"),
        (None, TypeError, "device: wanted a torch.device or its string"),
    ):
        with pytest.raises(error, match=message):
            QuantizedWeight.load(path, device)  # type: ignore[arg-type]
        if device != "meta":
            with pytest.raises(error, match=message):
                w.to(device)  # type: ignore[arg-type]
    assert torch.equal(QuantizedWeight.load(path, "cpu:0").dequantize(), w.dequantize())
