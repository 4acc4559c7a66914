"""QuantizedWeight: its numbers, its layouts, shards and files, and every refusal."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import w4gemm
from conformance.cases import random_weight
from test_formats import ALL, FOLDED
from test_layouts import assert_same, random_parts
from w4gemm import FormatError, QuantizedWeight, W4Linear, WeightFormat, quantize
from w4gemm.packing.layouts import LAYOUTS
from w4gemm.tuning.random_weight import random_weight as random_weight_of


def weight(name: str | WeightFormat = "int4_g128", n: int = 96, k: int = 512, seed: int = 0) -> QuantizedWeight:
    format = name if isinstance(name, WeightFormat) else WeightFormat.parse(name)
    codes, scales, zeros, channels, *_ = random_parts(format, n, k, seed)
    return QuantizedWeight.from_codes(format, codes, scales, zeros, channels=channels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["int4_g128", "int4_g32_fp16", "q4_k", "mxfp4", "nvfp4", "int4_g128_e4m3"])
def test_under_autocast(format, dtype):
    """Weights are made and unpacked as outside of it, whose cat and stack refuse most dtypes of scales."""

    def made() -> list[QuantizedWeight]:
        w = quantize(torch.randn(64, 512, generator=torch.Generator().manual_seed(0)), format)
        rows = QuantizedWeight.stack([w, w], layout="canonical")
        packed = w.repack() if format == "int4_g128_e4m3" else w.repack("mma16")
        return [w, packed, w.shard(1, 0, 4), QuantizedWeight.interleave(w, w), rows, rows.repack()]

    expected = made()
    with torch.autocast("cpu", dtype):
        actual = made()
        dense = [[w.dequantize(d) for d in (torch.float32, torch.bfloat16, torch.float16)] for w in actual]
        codes = [w.parts().codes for w in actual]
    for w, same, numbers, u in zip(expected, actual, dense, codes, strict=True):
        assert_same(w.parts(), same.parts())
        assert all(torch.equal(w.dequantize(d.dtype), d) for d in numbers) and torch.equal(w.parts().codes, u)


@pytest.mark.parametrize("format", ALL + FOLDED, ids=str)
def test_repack_is_lossless_between_all_layouts(format):
    w = weight(format, 70, 300)
    names = [name for name, layout in LAYOUTS.items() if not layout.supports(format)]
    for first, second in itertools.product(names, names):
        there = w.repack(first).repack(second)
        assert there.layout == second and there.n == 70 and there.k == 300 and there.format == format
        assert_same(there.parts(), w.parts())
        assert torch.equal(there.dequantize(), w.dequantize())
    assert w.repack("canonical") is w


def test_repack_goes_native_by_default():
    w = weight().repack()
    assert w.layout == w.repack().layout and w.layout in LAYOUTS
    with pytest.raises(ValueError, match="layout: wanted one of .*, got 'fast'"):
        w.repack("fast")


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
)
def test_from_codes_takes_any_integers(dtype):
    parts = random_parts(WeightFormat(), 4, 256)
    w = QuantizedWeight.from_codes(WeightFormat(), parts.codes.to(dtype), parts.scales)
    assert_same(w.parts(), parts)
    g_idx = torch.tensor([1, 0]).repeat(128)
    expected = QuantizedWeight.from_codes(WeightFormat(), parts.codes, parts.scales, g_idx=g_idx)
    w = QuantizedWeight.from_codes(WeightFormat(), parts.codes, parts.scales, g_idx=g_idx.to(dtype))
    assert torch.equal(w.dequantize(), expected.dequantize())
    if not dtype.is_signed:
        with pytest.raises(ValueError, match=r"codes: wanted 0..15, got 15..16"):
            QuantizedWeight.from_codes(WeightFormat(), (parts.codes + 1).clamp(15).to(dtype), parts.scales)


def test_immutable_and_readable():
    w = weight("int4_g64_zint", 8, 128)
    with pytest.raises(AttributeError):
        w.n = 5  # type: ignore[misc]
    assert repr(w) == "QuantizedWeight(int4_g64_zint, n=8, k=128, layout='canonical', device=cpu, 0.0 MiB)"
    assert w.nbytes == 8 * 64 + 2 * 8 * 2 + 8 * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", ["int4_g32", "int4_g128_zint", "int4_col_zfloat_fp16", "int4_g64_e4m3", "iq4_g32_fp16"]
)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_shards_put_together_are_the_whole(layout, name, count):
    if reason := LAYOUTS[layout].supports(WeightFormat.parse(name)):
        pytest.skip(reason)
    w = weight(name, 96, 512).repack(layout)
    for dim in (0, 1):
        shards = [w.shard(dim, i, count) for i in range(count)]
        assert all(s.layout == layout and s.format == w.format for s in shards)
        assert torch.equal(torch.cat([s.dequantize() for s in shards], dim), w.dequantize())


@pytest.mark.parametrize("dim", [0, 1])
def test_scales_of_channels_stay_whole_where_columns_are_split(dim):
    """Also if a shard has as many columns as the weight has rows."""
    w = weight("int4_g32_e4m3", 64, 256)
    shards = [w.shard(dim, i, 4) for i in range(4)]
    assert all(s.parts().channels.shape == (16 if dim == 0 else 64,) for s in shards)
    assert torch.equal(torch.cat([s.dequantize() for s in shards], dim), w.dequantize())


@pytest.mark.parametrize(
    ("name", "k", "count", "group_size"),
    [
        ("int4_g128", 3 * 128, 2, 64),
        ("int4_g128_zint", 7 * 128, 8, 16),
        ("int4_g128_zfloat_fp16", 5 * 128, 4, 32),
        ("int4_g64", 96, 2, 16),
        ("iq4_g32_fp16", 32 * 3, 2, 16),
        ("int4_g128_e4m3", 3 * 128, 2, 64),
    ],
)
def test_shards_that_divide_groups_repeat_scales(name, k, count, group_size):
    w = quantize(torch.randn(32, k), name)
    shards = [w.shard(1, i, count) for i in range(count)]
    assert {s.format for s in shards} == {replace(w.format, group_size=group_size)}
    assert torch.equal(torch.cat([s.dequantize() for s in shards], 1), w.dequantize())


def test_one_shard_is_the_whole_even_with_a_short_group():
    w = weight("int4_g128_zint", 10, 300)
    for dim in np.arange(2):
        assert torch.equal(w.shard(dim, 0, 1).dequantize(), w.dequantize())


def test_a_shard_keeps_only_its_own_memory():
    w = weight()
    shard = w.shard(0, 0, 4)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in shard.tensors)
    assert shard.nbytes * 4 == w.nbytes


@pytest.mark.parametrize(
    "dim, index, count, message",
    [
        (2, 0, 2, "dim: wanted 0 .* got 2"),
        (0, 2, 2, "index, count: wanted 0 <= index < count, got index 2, count 2"),
        (0, -1, 2, "index, count: .* got index -1"),
        (0, 0, 0, "index, count: .* count 0"),
        (0, 0, 5, r"count: n 96 does not split into 5 equal parts; .* fit: \[1, 2, 3, 4, 6, 8, 12,"),
        (
            1,
            0,
            3,
            r"count: k 512 does not split into 3 equal parts of whole groups of 16, the smallest; .* 2, 4, 8, 16",
        ),
    ],
)
def test_shard_refuses_and_says_what_fits(dim, index, count, message):
    with pytest.raises(ValueError, match=message):
        weight().shard(dim, index, count)


@pytest.mark.parametrize("n, listed", [(512, "256, 512]"), (1023, "1, 3, 11, 31, 33, 93, 341, 1023]"), (17, "[1, 17]")])
def test_every_count_of_shards_that_fits_is_listed(n, listed):
    w = weight(n=n, k=32)
    with pytest.raises(ValueError, match="counts that fit: ") as e:
        w.shard(0, 0, 1024)
    assert str(e.value).endswith(listed)
    fits = json.loads(str(e.value).partition("counts that fit: ")[2])
    assert fits == [c for c in range(1, n + 1) if n % c == 0]
    assert [w.shard(0, c - 1, c).n * c for c in fits] == [n] * len(fits)


def test_of_very_many_counts_of_shards_the_nearest_are_listed():
    w = weight(n=55440, k=16)  # 120 divisors
    with pytest.raises(ValueError, match=r"the nearest of 120 counts that fit: \[.* 99, 105, .*\]"):
        w.shard(0, 0, 101)
    with pytest.raises(ValueError, match=r"counts that fit: \[1\]$"):
        weight(k=300).shard(1, 0, 2)


@pytest.mark.parametrize("format", ALL + FOLDED, ids=str)
def test_file_round_trip_is_bit_equal(format, tmp_path):
    for n, k in [(1, 1), (70, 300)]:
        w = weight(format, n, k)
        w.repack("mma8" if format.has_channels else "mma16").save(tmp_path / "w.safetensors")
        back = QuantizedWeight.load(tmp_path / "w.safetensors")
        assert (back.format, back.n, back.k, back.layout) == (format, n, k, "canonical")
        assert_same(back.parts(), w.parts())


def test_saves_parts_that_share_storage(tmp_path):
    both = torch.rand(2, 4, 1).bfloat16()
    w = QuantizedWeight.from_codes(WeightFormat(zero="float"), torch.ones(4, 128, dtype=torch.uint8), *both)
    w.save(tmp_path / "w")
    assert_same(QuantizedWeight.load(tmp_path / "w").parts(), w.parts())


def test_load_refuses_what_is_no_whole_file(tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(FileNotFoundError, match="path: no file"):
        QuantizedWeight.load(path)
    weight().save(path)
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError, match="path: .* is not a whole safetensors file"):
            QuantizedWeight.load(path)


def test_only_the_canonical_layout_has_names():
    w = weight().repack("cpu")
    for method in (w.named_tensors, w.check_range):
        with pytest.raises(ValueError, match=r"layout: wanted canonical, got cpu; w.repack\('canonical'\) gives that"):
            method()


GOOD = {"kind": "w4gemm.weights.weight", "version": "1", "format": "int4_g128", "n": 96, "k": 512}


@pytest.mark.parametrize(
    "meta, message",
    [
        (None, "without w4gemm metadata"),
        ("{", "is not a w4gemm weight"),
        ("[]", "is not a w4gemm weight"),
        ("[" * 100_000, "its metadata are nested too deep"),
        (GOOD | {"kind": "lora"}, "it holds 'lora' version '1', wanted 'w4gemm.weights.weight' '1'"),
        (GOOD | {"version": "2"}, "it holds 'w4gemm.weights.weight' version '2'"),
        (GOOD | {"format": "int3"}, "format: wanted int4_g"),
        (GOOD | {"format": "int4_g64"}, r"tensors\[1\]: canonical int4_g64 .* wants"),
        (GOOD | {"format": "int4_g128_zint"}, "wants tensors codes, scales, zeros, and perm"),
        (GOOD | {"n": 95}, r"tensors\[0\]: .* n 95, k 512"),
        (GOOD | {"k": "512"}, "is not a w4gemm weight"),
        ({k: v for k, v in GOOD.items() if k != "n"}, "its metadata lack 'n'"),
    ],
)
def test_load_refuses_wrong_metadata(tmp_path, meta, message):
    path = tmp_path / "w.safetensors"
    tensors = dict(zip(("codes", "scales"), weight().tensors, strict=True))
    text = meta if meta is None or isinstance(meta, str) else json.dumps(meta)
    save_file(tensors, path, metadata=None if text is None else {"w4gemm": text})
    with pytest.raises(FormatError, match=message):
        QuantizedWeight.load(path)


def test_load_refuses_a_lost_or_unknown_tensor(tmp_path):
    """One flipped bit in the name ``perm`` would otherwise load a weight in act-order as one that is not."""
    path = tmp_path / "w.safetensors"
    w = weight()
    QuantizedWeight(w.format, w.n, w.k, w.layout, w.tensors, torch.randperm(w.k, dtype=torch.int32)).save(path)
    data = path.read_bytes()
    for name in (b"perm", b"codes"):
        at = data.index(b'"' + name + b'":')  # in the header, which names tensors as keys
        path.write_bytes(data[: at + 1] + b"q" + data[at + 2 :])
        with pytest.raises(
            FormatError, match=r"it holds tensors \[.*'q.*\], its metadata name \['codes', 'perm', 'scales'\]"
        ):
            QuantizedWeight.load(path)
    tensors = dict(zip(("codes", "scales"), w.tensors, strict=True))
    save_file(tensors | {"g_idx": torch.zeros(3)}, path, metadata={"w4gemm": json.dumps(GOOD)})
    with pytest.raises(FormatError, match="wants tensors codes, scales, and perm in act-order, got codes, g_idx"):
        QuantizedWeight.load(path)
    save_file(tensors, path, metadata={"w4gemm": json.dumps(GOOD | {"tensors": ["codes", "perm", "scales"]})})
    with pytest.raises(FormatError, match="its metadata name"):
        QuantizedWeight.load(path)


def test_load_refuses_numbers_that_are_not_finite(tmp_path):
    path = tmp_path / "w.safetensors"
    codes, scales = weight().tensors
    scales[3, 1] = torch.nan
    save_file({"codes": codes, "scales": scales}, path, metadata={"w4gemm": json.dumps(GOOD)})
    with pytest.raises(FormatError, match="scales: the weights of 1 groups would not be finite.*row 3, group 1"):
        QuantizedWeight.load(path)


CODES = torch.zeros(4, 128, dtype=torch.uint8)
SCALES = torch.ones(4, 1, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "zero, codes, scales, zeros, error, message",
    [
        ("none", CODES.float(), SCALES, None, TypeError, "codes: wanted integers .* got torch.float32"),
        ("none", CODES.bool(), SCALES, None, TypeError, "codes: wanted integers .* got torch.bool"),
        ("none", CODES[0], SCALES, None, TypeError, r"codes: wanted integers \(n, k\), got torch.uint8 \(128,\)"),
        ("none", [[1]], SCALES, None, TypeError, "codes: wanted integers .* got list"),
        ("none", CODES[:0], SCALES[:0], None, ValueError, r"codes: wanted n >= 1 and k >= 1, got shape \(0, 128\)"),
        ("none", CODES + 16, SCALES, None, ValueError, r"codes: wanted 0..15, got 16..16"),
        ("none", CODES.int() - 1, SCALES, None, ValueError, r"codes: wanted 0..15, got -1..-1"),
        ("none", CODES, SCALES.float(), None, TypeError, "scales: wanted torch.bfloat16, got torch.float32"),
        ("none", CODES, None, None, ValueError, "scales: int4_g128 wants torch.bfloat16 .*, got NoneType"),
        ("none", CODES, SCALES.T, None, ValueError, r"scales: wanted shape \(4, 1\), got \(1, 4\)"),
        ("none", CODES, SCALES.to("meta"), None, ValueError, "scales: wanted codes' device cpu, got meta"),
        ("none", CODES, SCALES, SCALES, ValueError, "zeros: int4_g128 has none, got torch.bfloat16"),
        ("none", CODES, SCALES * torch.nan, None, ValueError, "scales: the weights of 4 groups would not be finite"),
        ("none", CODES, SCALES * torch.inf, None, ValueError, "scales: .* first in row 0, group 0: scale inf"),
        ("none", CODES, SCALES * 1e38, None, ValueError, "scales: .* must be at most 2.14748e"),
        ("int", CODES, SCALES, None, ValueError, r"zeros: int4_g128_zint wants torch.uint8 \(4, 1\), got None"),
        ("int", CODES, SCALES, SCALES, TypeError, "zeros: wanted torch.uint8, got torch.bfloat16"),
        ("int", CODES, SCALES, CODES[:, :1] + 16, ValueError, "zeros: wanted 0..15, got up to 16"),
        ("float", CODES, SCALES, CODES[:, :1], TypeError, "zeros: wanted torch.bfloat16, got torch.uint8"),
        ("float", CODES, SCALES, SCALES * torch.inf, ValueError, "scales: .* zero point inf"),
    ],
)
def test_from_codes_refuses(zero, codes, scales, zeros, error, message):
    with pytest.raises(error, match=message):
        QuantizedWeight.from_codes(WeightFormat(zero=zero), codes, scales, zeros)


def test_constructor_refuses():
    w = weight()
    packed, scales = w.tensors
    cases = [
        (w.n, w.k, "sm89", w.tensors, "layout: wanted one of"),
        (0, w.k, "canonical", w.tensors, "n: wanted an int from 1 on, got 0"),
        (w.n, w.k, "canonical", (packed,), "wants 2 tensors, got 1"),
        (w.n, w.k, "canonical", (packed.int(), scales), r"tensors\[0\]: .* wants a contiguous torch.uint8 \(96, 256\)"),
        (
            w.n,
            w.k,
            "canonical",
            (packed, scales[:, :3]),
            r"tensors\[1\]: .* got non-contiguous torch.bfloat16 \(96, 3\)",
        ),
        (w.n, w.k, "canonical", (packed, scales.to("meta")), r"tensors: wanted one device, got \['cpu', 'meta'\]"),
    ]
    for n, k, layout, tensors, message in cases:
        with pytest.raises(ValueError, match=message):
            QuantizedWeight(w.format, n, k, layout, tensors)


@pytest.mark.parametrize("layout", ["canonical", "cpu", "mma16"])
def test_interleaved_rows_alternate(layout):
    gate, up = (random_weight(WeightFormat.parse("int4_g32_zint"), 11, 96, seed).repack(layout) for seed in (1, 2))
    both = QuantizedWeight.interleave(gate, up)
    assert (both.n, both.k, both.layout) == (22, 96, layout)
    assert torch.equal(both.dequantize()[0::2], gate.dequantize())
    assert torch.equal(both.dequantize()[1::2], up.dequantize())


def test_interleave_refuses():
    gate = random_weight(WeightFormat(32), 12, 96)
    for up in (random_weight(WeightFormat(64), 12, 96), random_weight(WeightFormat(32), 10, 96), gate.to("meta")):
        with pytest.raises(ValueError, match="up: wanted format, n, k, device, activations and perm of gate"):
            QuantizedWeight.interleave(gate, up)
    with pytest.raises(TypeError, match="gate: wanted a QuantizedWeight, got Tensor"):
        QuantizedWeight.interleave(gate.dequantize(), gate)


# --- activations ------------------------------------------------------------------------------------------------------


def test_activations_are_a_fact_of_the_weight(tmp_path):
    """Every method but ``repack`` keeps them, and a file does."""
    w = weight().repack(activations="fp8")
    assert w.activations == "fp8" and w.layout == "cpu" and "activations='fp8'" in repr(w)
    experts = QuantizedWeight.stack([w, w])
    kept = [w.repack("canonical"), w.to("cpu"), w.shard(0, 0, 2), QuantizedWeight.interleave(w, w), experts]
    assert {v.activations for v in (*kept, experts.expert(1), experts.shard(1, 0, 2))} == {"fp8"}
    for saved in (w, experts):
        saved.save(tmp_path / "w")
        assert QuantizedWeight.load(tmp_path / "w").activations == "fp8"
    plain = w.repack(activations=None)
    assert plain.activations is None and plain.layout == "cpu" and plain.repack() is plain
    with pytest.raises(ValueError, match="activations: wanted 'fp8' or None, got 'int8'"):
        w.repack(activations="int8")
    with pytest.raises(ValueError, match="wanted activations fp8 like the first, got activations None as number 2"):
        QuantizedWeight.stack([w, plain])


def test_what_only_a_tensor_has():
    w = quantize(torch.randn(48, 64), "int4_g32")
    for name, hint in (
        ("size", "; it is no tensor, and dequantize.. returns one"),
        ("T", "; it is no"),
        ("codes", "$"),
    ):
        with pytest.raises(AttributeError, match=f"^a QuantizedWeight has no attribute '{name}'{hint}"):
            getattr(w, name)


def test_a_property_that_fails_says_why():
    """Once the weight was said to have no such property."""

    class Broken(QuantizedWeight):
        @property
        def ratio(self) -> float:
            return self.format.no_such_field

    w = quantize(torch.randn(48, 64), "int4_g32")
    w = Broken(w.format, w.n, w.k, w.layout, w.tensors)
    with pytest.raises(AttributeError, match="^'WeightFormat' object has no attribute 'no_such_field'$"):
        _ = w.ratio


def test_shape_and_dtype():
    w = weight()
    assert w.shape == (w.n, w.k) and w.dtype == torch.bfloat16
    assert QuantizedWeight.stack([w, w]).shape == (2, w.n, w.k)
    assert {str(q.dtype) for q in (weight("int4_g64_fp16"), weight("int4_g128_e4m3"))} == {
        "torch.float16",
        "torch.bfloat16",
    }


def test_a_format_may_be_named_by_its_string():
    w = quantize(torch.randn(4, 64), "int4_g32")
    same = QuantizedWeight("int4_g32", 4, 64, "canonical", w.tensors)
    assert same.format == w.format and torch.equal(same.dequantize(), w.dequantize())
    with pytest.raises(TypeError, match="format: wanted a WeightFormat or its string"):
        QuantizedWeight(4, 4, 64, "canonical", w.tensors)


DEVICE_FORMATS = ("int4_g64_zint_fp16", "int4_g32_zfloat_fp32", "q4_k", "mxfp4", "nvfp4", "nf4", "int4_g128_e4m3")


@pytest.mark.parametrize("name", DEVICE_FORMATS)
def test_everything_is_made_on_the_weights_device(name):
    """Under another default device, a tensor that is made without its device meets the weight's on two devices."""
    format, dense = WeightFormat.parse(name), torch.randn(64, 512)
    with torch.device("meta"):
        for w in (quantize(dense, format, search=True), random_weight_of(format, 64, 512, device="cpu", signed=True)):
            w.check_range()
            for layout in (name for name, layout in LAYOUTS.items() if not layout.supports(format)):
                packed = w.repack(layout)
                parts = packed, packed.shard(1, 1, 4), packed.shard(0, 1, 2), QuantizedWeight.interleave(packed, packed)
                for part in (*parts, QuantizedWeight.stack([packed, packed])):
                    assert part.dequantize(torch.bfloat16).device.type == part.parts().codes.device.type == "cpu"


@pytest.mark.parametrize("format", ["int4_g32", "int4_g32_e4m3", "mxfp4", "nvfp4", "q4_k"])
def test_plain_pickle(format):
    """Also weights whose scales are 8-bit floats, which pickle alone does not know."""
    w = quantize(torch.randn(16, 256), format)
    for again in (pickle.loads(pickle.dumps(w)), copy.deepcopy(w)):
        assert [t.dtype for t in again.tensors] == [t.dtype for t in w.tensors] and again.packed is w.packed
        assert torch.equal(again.dequantize(), w.dequantize())
    layer = W4Linear.from_weight(w.repack())
    assert torch.equal(pickle.loads(pickle.dumps(layer)).weight.dequantize(), w.dequantize())


def test_a_pickle_of_another_order_of_bits_is_refused(monkeypatch):
    """It was read as other numbers."""
    w = quantize(torch.randn(64, 256), "e4m3_col_fp32")
    pickled = [pickle.dumps(each) for each in (w, w.repack("mma16"))]
    monkeypatch.setattr("w4gemm.weights.weight.BIT_ORDER", 0)
    assert torch.equal(pickle.loads(pickled[0]).dequantize(), w.dequantize())
    with pytest.raises(ValueError, match="pickled it in the layout mma16, whose bits have another order here"):
        pickle.loads(pickled[1])


def test_the_check_of_scales_unpacks_no_codes(monkeypatch):
    """They are most of a weight: it took two thirds of the time of loading a folder."""
    w = quantize(torch.randn(64, 512), "int4_g64_zint")
    stack = QuantizedWeight.stack([w, w], layout="canonical")
    monkeypatch.setattr(QuantizedWeight, "parts", None)
    for good in (w, stack):
        good.check_range()
    for bad in (w, stack):
        scales = bad.tensors[1].clone()
        scales.view(-1, scales.shape[-1])[-1, 0] = float("nan")
        row = 127 if bad.experts else 63
        with pytest.raises(ValueError, match=f"first in row {row}, group 0: scale nan, zero point"):
            replace(bad, tensors=(bad.tensors[0], scales, *bad.tensors[2:])).check_range()


def test_a_weight_of_parameters_is_frozen() -> None:
    scales = torch.nn.Parameter((torch.rand(32, 2) + 0.5).bfloat16())
    w = QuantizedWeight.from_codes("int4_g32", torch.randint(16, (32, 64)), scales)
    assert not any(t.requires_grad for t in (*w.tensors, *w.repack().tensors))
    assert not w4gemm.linear(torch.randn(3, 64), w.repack()).requires_grad
    copy.deepcopy(W4Linear.from_weight(w))


def test_gates_and_ups_of_two_layouts_interleave() -> None:
    gate, up = (quantize(torch.randn(64, 64)) for _ in range(2))
    actual, expected = QuantizedWeight.interleave(gate, up.repack()), QuantizedWeight.interleave(gate, up)
    assert actual.layout == "canonical" and all(map(torch.equal, actual.tensors, expected.tensors))
