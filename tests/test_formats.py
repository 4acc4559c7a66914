"""WeightFormat: its string form, its derived facts, its refusals."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from w4gemm import QuantizedWeight, W4Linear, WeightFormat, codebook, quantize
from w4gemm.core import elements, format_names
from w4gemm.core.elements import ELEMENTS, INTEGERS, Element
from w4gemm.core.formats import PER_COLUMN, SCALES

GROUPS = (32, 64, 96, 128, 160, 256, 1024, PER_COLUMN)
ALL = [WeightFormat(*parts) for parts in itertools.product(GROUPS, ("none", "int", "float"), ("bf16", "fp16"))]
FOLDED = [WeightFormat(group, "none", "e4m3") for group in GROUPS]
WIDE = [WeightFormat(group, zero, "fp32") for group in (32, 96, 256, PER_COLUMN) for zero in ("none", "float")]
WIDE += [WeightFormat(group, "float", scale) for group in (32, 64) for scale in ("u8x256", "u8x128")]


def test_string_form_round_trips_and_is_unique():
    every = ALL + FOLDED + WIDE
    assert [WeightFormat.parse(str(f)) for f in every] == every
    assert len({str(f) for f in every}) == len(set(every)) == len(every)
    assert [hash(WeightFormat.parse(str(f))) for f in every] == [hash(f) for f in every]


@pytest.mark.parametrize(
    "name, format",
    [
        ("int4_g128", WeightFormat(128, "none", "bf16")),
        ("int4_g128_bf16", WeightFormat(128, "none", "bf16")),
        ("int4_g32_zfloat_fp16", WeightFormat(32, "float", "fp16")),
        ("int4_col_zint", WeightFormat(PER_COLUMN, "int", "bf16")),
        ("int4_g16_e4m3_row", WeightFormat(16, "none", "e4m3_row")),
        ("int4_g32_e8m0", WeightFormat(32, scale="e8m0", element="int4")),
        ("iq4_g32_fp16", WeightFormat(32, scale="fp16", element="iq4")),
    ],
)
def test_a_name_is_parsed(name, format):
    assert WeightFormat.parse(name) == format


@pytest.mark.parametrize("name", ["", "int4", "int7_g128", "int4_g128_", "int4_g128_zbool", " int4_col", "int4_g-1", 4])
def test_parse_refuses(name):
    with pytest.raises(ValueError, match="format: wanted int4_g<group size>.*for example.*got"):
        WeightFormat.parse(name)


@pytest.mark.parametrize(
    "group, nearest", [(100, 96), (1, 16), (-2, 16), (0, 16), (129, 128), (2001, 2000), (2**40, 2**31 - 32)]
)
def test_group_size_names_the_nearest(group, nearest):
    with pytest.raises(ValueError, match=f"group_size: wanted a positive multiple of 16.*got {group}; .* {nearest}$"):
        WeightFormat(group)


@pytest.mark.parametrize("group", [128.0, True, "128", None])
def test_group_size_wants_an_int(group):
    with pytest.raises(TypeError, match="group_size: wanted an int, got"):
        WeightFormat(group)


def test_other_refusals():
    with pytest.raises(ValueError, match="zero: wanted one of none, int, float, got 'yes'"):
        WeightFormat(zero="yes")
    names = ", ".join(SCALES)
    with pytest.raises(ValueError, match=f"scale: wanted one of {names}, got 'fp8'"):
        WeightFormat(scale="fp8")


def test_groups_cover_k():
    for format, k in itertools.product(ALL, (1, 31, 32, 33, 127, 128, 300, 4096)):
        groups, length = format.groups(k), format.group_length(k)
        assert (groups - 1) * length < k <= groups * length, (format, k)


def test_dtypes_of_scales_and_zero_points():
    assert WeightFormat(zero="none").zero_dtype is None and not WeightFormat().has_zero
    assert WeightFormat(zero="int", scale="fp16").zero_dtype == torch.uint8
    assert WeightFormat(zero="float", scale="fp16").zero_dtype == torch.float16
    assert WeightFormat(zero="float").zero_dtype == WeightFormat().scale_dtype == torch.bfloat16


def test_is_a_value():
    assert WeightFormat(64) == WeightFormat(64) and len({WeightFormat(64), WeightFormat(64), WeightFormat(32)}) == 2
    with pytest.raises(AttributeError):
        WeightFormat().group_size = 64  # type: ignore[misc]


def test_an_e4m3_scale_is_an_e4m3_scale():
    """The factor of a channel and rounding to e4m3 are facts of the scale rule, apart from the dtype."""
    folded, exact = WeightFormat(scale="e4m3"), WeightFormat(16, scale="e4m3_row")
    assert folded.scale_dtype == exact.scale_dtype == torch.float8_e4m3fn
    assert folded.has_channels and exact.has_channels
    assert folded.scales_in_weights and not exact.scales_in_weights
    assert not WeightFormat(32, scale="e8m0").has_channels


@pytest.mark.parametrize("scale", ["e4m3", "e4m3_row", "e8m0"])
@pytest.mark.parametrize("zero", ["int", "float"])
def test_scales_of_8_bits_go_without_zero_points(scale, zero):
    with pytest.raises(ValueError, match=f"zero: wanted 'none' with {scale} scales, got '{zero}'"):
        WeightFormat(32, zero, scale)


def test_an_elements_numbers_have_their_own_codes():
    int4 = WeightFormat().element_rule
    codes = torch.arange(16)
    assert torch.equal(int4.numbers(codes), codes.float() - 8) and int4.padding_code == 8
    assert torch.equal(int4.nearest(int4.numbers(codes)), codes.float())
    table = Element(
        "table", 4, (0.0, 1.0, 4.0, 9.0, -1.0, -4.0, -9.0, -16.0, 16.0, 25.0, 36.0, 49.0, -25.0, 2.5, 3.5, 5.5)
    )
    assert torch.equal(table.nearest(table.numbers(codes)), codes.float()) and table.padding_code == 0
    assert table.nearest(torch.tensor([-1e9, -0.4, 1.9, 1e9])).tolist() == [12, 0, 13, 11]
    with pytest.raises(ValueError, match="element: wanted one of int4.*, got 'fp4'"):
        WeightFormat(element="fp4")


def test_digits_of_other_scripts_are_no_group_size():
    with pytest.raises(ValueError, match="format: wanted"):
        WeightFormat.parse("int4_g\u0663\u0662")


def test_a_codebooks_name_is_its_numbers():
    """A codebook's name has its numbers; one with a name of its own has that."""
    short, long = codebook([*range(-9, 0), *range(1, 8)]), codebook([v / 3 for v in range(-9, 7)])
    assert (len(short), len(long)) == (8 + 64, 8 + 128) and codebook(ELEMENTS["nf4"].values) == "nf4"
    for name in (short, long):
        format = WeightFormat(64, scale="fp16", element=name)
        assert str(format) == f"{name}_g64_fp16" and WeightFormat.parse(str(format)) == format
        assert codebook(format.element_rule.values) == name
        assert hash(format) != hash(WeightFormat(64, scale="fp16"))


def test_a_codebook_that_gets_a_name_keeps_its_files(tmp_path, monkeypatch):
    """A file that was written before the codebook had a name is read after, as the named format."""
    values = [v / 2 for v in range(-9, 7)]
    unnamed = WeightFormat(64, element=codebook(values))
    w = quantize(torch.randn(64, 128), unnamed)
    w.save(tmp_path / "w.safetensors")
    state = W4Linear.from_weight(w).state_dict()
    elements._codebook_named.cache_clear()
    monkeypatch.setitem(ELEMENTS, "half", Element("half", 4, tuple(values)))
    pattern = format_names._NAME.pattern.replace("int4|", "int4|half|")
    monkeypatch.setattr(format_names, "_NAME", re.compile(pattern, re.ASCII))
    try:
        named = WeightFormat(64, element="half")
        assert WeightFormat.parse(str(unnamed)) == named and str(WeightFormat.parse(str(unnamed))) == "half_g64"
        assert QuantizedWeight.load(tmp_path / "w.safetensors").format == named
        layer = W4Linear.from_weight(quantize(torch.randn(64, 128), named))
        layer.load_state_dict(state)
        assert torch.equal(layer.weight.dequantize(), w.dequantize())
    finally:
        elements._codebook_named.cache_clear()


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (3, TypeError, "values: wanted 16 numbers, got 3"),
        (["x"] * 16, TypeError, "values: wanted 16 numbers"),
        (torch.zeros(4, 4), TypeError, r"values: wanted 16 numbers, got Tensor of shape \(4, 4\)"),
        ([1.0, -1.0], ValueError, "values: wanted 16 numbers, got 2"),
        (range(16), ValueError, "values: wanted numbers of both signs"),
        ([-1.0] * 15 + [math.inf], ValueError, "values: wanted a largest magnitude of 0.015625 to 32768, got nan"),
        ([-1.0] * 15 + [1e300], ValueError, "values: wanted a largest magnitude"),
        ([v / 10000 for v in range(-8, 8)], ValueError, "values: wanted a largest magnitude .* got 0.0008"),
    ],
    ids=str,
)
def test_other_codebooks_are_refused(values, error, message):
    with pytest.raises(error, match=message):
        codebook(values)


@pytest.mark.parametrize("name", ["codebook", "codebook" + "0" * 64, "codebook" + "7f80" * 16, "int7"])
def test_elements_that_there_are_not(name):
    with pytest.raises(ValueError, match="element: wanted one of int4, iq4, .* or a codebook's"):
        WeightFormat(element=name)


def test_names_are_those_of_elements_and_scales() -> None:
    """They are known without PyTorch."""
    assert tuple(ELEMENTS) == format_names.ELEMENT_NAMES and tuple(SCALES) == format_names.SCALE_NAMES
    assert tuple(element.name for element in INTEGERS.values()) == format_names.INTEGER_NAMES
