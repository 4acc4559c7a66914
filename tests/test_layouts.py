"""Layouts: lossless for every format and ragged shape, and mma16 as its docstring says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from test_formats import ALL, FOLDED, WIDE
from w4gemm import GemmProblem, QuantizedWeight, WeightFormat, configs, linear
from w4gemm.core.problem import H200, Device
from w4gemm.kernels import kernel_named
from w4gemm.packing import codecs
from w4gemm.packing.bits import pack, unpack
from w4gemm.packing.block import BLOCK_K, BLOCK_N, HALF_K, STRIP_N, Block
from w4gemm.packing.layouts import LAYOUTS, WeightComponents, layout_for, layout_named, native_layout
from w4gemm.tuning.random_weight import random_components

CODE_WORDS = 64 * 128 * 4 // 32
"""Words of the codes of a block, of 4 bits."""
SHAPES = [(1, 1), (1, 128), (64, 128), (63, 127), (65, 129), (70, 300), (130, 257), (128, 1024), (5, 32)]


def random_parts(format: WeightFormat, n: int, k: int, seed: int = 0) -> WeightComponents:
    """Components of a random weight; -0 and subnormals are among its scales."""
    parts = random_components(format, n, k, seed, signed=True)
    if not format.scale_rule.signed:
        return parts
    scales, g = parts.scales.float(), torch.Generator().manual_seed(seed)
    for rare in (-0.0, torch.finfo(format.scale_dtype).smallest_normal / 4):
        scales = torch.where(torch.rand(scales.shape, generator=g) < 0.1, rare, scales)
    return parts._replace(scales=scales.to(format.scale_dtype))


def bits(t: torch.Tensor | None) -> torch.Tensor | None:
    """For bit-equality: -0 is not 0."""
    return t if t is None else t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.itemsize])


def assert_same(a: WeightComponents, b: WeightComponents) -> None:
    for name, x, y in zip(WeightComponents._fields, a, b, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y)), name


@pytest.mark.parametrize("format", ALL + FOLDED + WIDE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_round_trip_is_bit_equal(layout, format):
    if layout.supports(format):
        pytest.skip(layout.supports(format))
    for seed, (n, k) in enumerate(SHAPES):
        parts = random_parts(format, n, k, seed)
        tensors = layout.pack(parts, format)
        assert [(t.dtype, tuple(t.shape)) for t in tensors] == list(layout.shapes(format, n, k)), (n, k)
        assert all(t.is_contiguous() for t in tensors)
        assert_same(layout.unpack(tensors, format, n, k), parts)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_packing_reads_views(layout):
    """Components that are slices of larger tensors pack like their copies."""
    format = WeightFormat(32, "int")
    whole = random_parts(format, 96, 512)
    view = WeightComponents(whole.codes[16:80, 128:384], whole.scales[16:80, 4:12], whole.zeros[16:80, 4:12])
    copy = WeightComponents.of(None if t is None else t.contiguous() for t in view)
    for a, b in zip(layout.pack(view, format), layout.pack(copy, format), strict=True):
        assert torch.equal(a, b)


def test_canonical_bits():
    format = WeightFormat(32)
    codes, scales = torch.tensor([[1, 2, 3]], dtype=torch.uint8), torch.ones(1, 1, dtype=torch.bfloat16)
    packed, _ = layout_named("canonical").pack(WeightComponents(codes, scales, None), format)
    assert packed.tolist() == [[0x21, 0x03]]


@pytest.mark.parametrize("format", [f for f in ALL if f.group_size != 1024], ids=str)
@pytest.mark.parametrize("n, k", [(64, 128), (70, 300), (130, 129)])
def test_mma16_is_what_its_docstring_says(format, n, k):
    """Each sampled element is found, by the formula alone, where the docstring puts it."""
    parts = random_parts(format, n, k)
    (packed,) = layout_named("mma16").pack(parts, format)
    blocks = packed.tolist()
    step = BLOCK_K if format.group_size == -1 else math.gcd(format.group_size, BLOCK_K)
    dtype, per_scale = format.scale_dtype, 2 if format.has_zero else 1
    assert packed.shape[2] == CODE_WORDS + Block.of(format).scale_words and Block.of(format).scale_group == step

    def half(word: int, high: int) -> float:
        value = (word >> (16 * high)) & 0xFFFF
        return torch.tensor(value - (value & 0x8000) * 2, dtype=torch.int16).view(dtype).item()

    rng = torch.Generator().manual_seed(1)
    sampled = zip(
        torch.randint(0, n, (300,), generator=rng).tolist(),
        torch.randint(0, k, (300,), generator=rng).tolist(),
        strict=True,
    )
    for row, column in (*sampled, (0, 0), (n - 1, k - 1), (0, k - 1), (n - 1, 0)):
        block = blocks[row // BLOCK_N][column // BLOCK_K]
        r, c = row % BLOCK_N, column % BLOCK_K
        warp, row8, g = r // 16, r // 8 % 2, r % 8
        chunk, k_step, col8, q, element = c // 64, c // 16 % 4, c // 8 % 2, c // 2 % 4, c % 2
        lane, register = 4 * g + q, row8 + 2 * col8
        word = block[((chunk * 4 + warp) * 32 + lane) * 4 + k_step]
        assert (word >> (4 * register + 16 * element)) & 0xF == parts.codes[row, column], (row, column)

        at = CODE_WORDS + ((c // step * 4 + warp) * 8 + g) * per_scale
        group = column // format.group_length(k)
        assert half(block[at], row8) == parts.scales[row, group].item(), (row, column)
        if format.has_zero:
            assert half(block[at + 1], row8) == parts.zeros[row, group].item(), (row, column)


@pytest.mark.parametrize("format", [f for f in ALL if f.scale == "bf16"], ids=str)
def test_mma16_padding_weighs_nothing(format):
    """Rows past n and groups past k: all bits of their scales and zero points are 0."""
    n, k = 70, 200
    parts = random_parts(format, n, k)
    layout = layout_named("mma16")
    (packed,) = layout.pack(WeightComponents(parts.codes, torch.ones_like(parts.scales), parts.zeros), format)
    step = Block.of(format).scale_group
    words = packed[:, :, CODE_WORDS:].reshape(2, 2, BLOCK_K // step, 4, 8, -1)  # nb kb group warp g part
    halves = torch.stack((words & 0xFFFF, (words >> 16) & 0xFFFF), dim=4)  # nb kb group warp row8 g part
    rows = halves.permute(0, 3, 4, 5, 1, 2, 6).reshape(128, 2 * BLOCK_K // step, -1)
    assert not rows[n:].any()
    assert not rows[:, -(-k // step) :].any(), "steps wholly past k"
    assert rows[:n, : -(-k // step), 0].all(), "steps with elements of k"


def test_layouts_have_their_names():
    assert all(layout.name == name for name, layout in LAYOUTS.items())
    with pytest.raises(ValueError, match="layout: wanted one of canonical, .*, got 'sm89'"):
        layout_named("sm89")
    with pytest.raises(ValueError, match="got 'sm90_fp8', which is called mma8 now"):
        layout_named("sm90_fp8")


def test_native_layout_of_devices():
    for device in (H200, Device("cuda", "A100", (8, 0)), Device("cuda", "RTX 5090", (12, 0))):
        assert native_layout(device) == "mma16", device
    for device in (Device("cpu"), Device("cuda", "T4", (7, 5)), Device("cuda", "MI300", (9, 4), rocm=True)):
        assert native_layout(device) in LAYOUTS and native_layout(device) != "mma16", device


def test_layout_for_activations():
    """e4m3 begins with SM89."""
    folded = WeightFormat.parse("int4_g128_e4m3")
    for device in (H200, Device("cuda", "RTX 4090", (8, 9)), Device("cuda", "RTX 5090", (12, 0))):
        assert layout_for(device, WeightFormat(), torch.float8_e4m3fn) == "mma8"
        assert (layout_for(device, WeightFormat()), layout_for(device, folded)) == ("mma16", "mma8")
    a100 = Device("cuda", "A100", (8, 0))
    assert layout_for(a100, WeightFormat(), torch.float8_e4m3fn) == "mma16"
    assert layout_for(a100, folded) == "canonical"


def test_nothing_but_codes_scales_and_zero_points_is_stored():
    """4 bits a weight, 16 a scale, 16 a zero point: nothing else is stored where nothing is padded."""
    for format, (n, k) in itertools.product(ALL, [(128, 1024), (64, 2048)]):
        if format.group_size in (96, 160) or k % format.group_length(k):
            continue
        (shape,) = layout_named("mma16").shapes(format, n, k)
        scales = k // min(format.group_length(k), BLOCK_K) * n * (4 if format.has_zero else 2)
        assert 4 * math.prod(shape[1]) == n * k // 2 + scales, format


@pytest.mark.parametrize("format", ["int4_g32", "int4_g32_zint", "int4_g32_e4m3", "e4m3_col_fp32", "e4m3_g128_b128"])
@pytest.mark.parametrize("n, k", [(6, 64), (6, 63), (1, 32), (64, 1)])
def test_transposed_codes_and_scales(format, n, k):
    """Checkpoints may hold them along n first."""
    parts = random_parts(WeightFormat.parse(format), n, k)
    across = [None if t is None else t.t().contiguous().t() for t in parts[:3]]
    w = QuantizedWeight.from_codes(format, *across, channels=parts.channels)
    assert_same(w.parts(), parts)
    assert_same(w.repack("mma8").parts(), parts)


@pytest.mark.parametrize(
    "name, bits",
    [
        *(("int4_g128", 4.125), ("int4_g32_zint", 5.0), ("int4_g16", 5.0), ("mxfp4", 4.25), ("nvfp4", 4.5)),
        *(("q4_k", 4.625), ("q6_k", 6.5625), ("q5_k", 5.625), ("q3_k", 3.5625), ("q2_k", 2.625), ("int8_g128", 8.125)),
        *(("e4m3_col_fp32", 8.0), ("e4m3_g128_b128", 8.25)),
    ],
)
def test_bits_of_a_weight(name, bits):
    """MXFP4's e8m0 for each 32 takes 4.25 bits a weight, NVFP4's e4m3 for each 16 takes 4.5, Q4_K's levels 4.625."""
    format = WeightFormat.parse(name)
    block = codecs.codec_for(format, codecs.MMA16).block(format)
    assert block.stride * 8 / (BLOCK_N * BLOCK_K) == bits
    assert block.words * 4 == block.stride and block.code_bytes == CODE_WORDS * format.bits


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize(
    "bits, scale_bits, zero, factors",
    [
        *((4, 16, False, 0), (8, 16, True, 0), (4, 8, False, 0), (5, 8, True, 2), (4, 32, True, 0), (2, 32, False, 0)),
        *((6, 8, False, 1), (3, 8, False, 2), (8, 0, False, 0)),
    ],
)
@pytest.mark.parametrize("rows, columns", [(64, 128), (64, 64), (32, 128), (16, 128)])
def test_a_part_of_a_block_has_what_its_rows_and_columns_need(group, bits, scale_bits, zero, factors, rows, columns):
    """Each lane's codes and each pair of rows' scales and factors, found in the part, are those found in the whole."""
    whole = Block(bits, group, zero, scale_bits, factors)
    part, strips = whole.sub_block(rows, columns), range(rows // STRIP_N)
    for half, row in itertools.product(range(2 * HALF_K // columns), range(0, BLOCK_N, rows)):
        source_of = {}
        for copy in part.copies(half) if rows == BLOCK_N else part.row_copies(row, rows, 0, 0):
            assert copy.size % 16 == copy.target % 16 == (copy.source + copy.offset) % 16 == 0
            source_of |= {copy.target + i: copy.source + copy.offset + i for i in range(copy.size)}
        assert sorted(source_of) == list(range(part.bytes))
        for h, strip in itertools.product(range(columns // HALF_K), strips):
            own, other = row // STRIP_N + strip, half + h
            actual = source_of[h * part.half_bytes + strip * part.strip_bytes]
            assert actual == other * whole.half_bytes + own * part.strip_bytes
            for column in range(h * HALF_K, (h + 1) * HALF_K, 16) if scale_bits else ():
                actual = source_of[part.scales_at(column // group) + strip * 8 * part.pair_bytes]
                of_whole = whole.scales_at((half * HALF_K + column) // group)
                assert actual == of_whole + own * 8 * whole.pair_bytes
            if factors:
                actual = source_of[part.factors_at + strip * 8 * part.factor_pair_bytes]
                assert actual == whole.factors_at + own * 8 * part.factor_pair_bytes


@pytest.mark.parametrize("name", ["int4_g16_e4m3_row", "int4_g32_e8m0"])
def test_formats_without_a_decoder_say_so(name):
    format = WeightFormat.parse(name)
    for layout in ("mma16", "mma8"):
        assert f"no decoder of int4 with {format.scale} scales" in layout_named(layout).supports(format)
    assert layout_for(H200, format) == layout_for(Device("cpu"), format) == "canonical"
    w = QuantizedWeight.from_codes(format, *random_parts(format, 40, 64)[:2], channels=random_parts(format, 40, 64)[3])
    assert torch.equal(linear(torch.eye(64), w.repack()).T, w.dequantize())


@pytest.mark.parametrize("name", ["int4_g16_zint", "int4_g16", "int8_g16_zfloat_fp32", "nf4_g16_fp16"])
def test_groups_of_16(name):
    """A thread of the WGMMA kernel holds all scale words of a block, so it takes one word a group; the others take
    any."""
    format = WeightFormat.parse(name)
    parts = random_parts(format, 40, 64)
    w = QuantizedWeight.from_codes(format, *parts[:3], channels=parts[3])
    assert_same(w.repack("mma16").parts(), w.parts())
    assert torch.equal(linear(torch.eye(64), w.repack()).T, w.dequantize())
    problem = GemmProblem(16, 128, 128, torch.bfloat16, format, "mma16", device=H200)
    kernels = {config.partition("/")[0] for config in configs(problem)}
    assert {"sm90_decode", "sm80_mixed_gemm"} <= kernels
    assert ("sm90_mixed_gemm" in kernels) == (name in ("int4_g16", "nf4_g16_fp16"))
    if "sm90_mixed_gemm" not in kernels:
        refused = "decodes groups of a multiple of 32 columns with zero points or scales of 32 bits, not of 16"
        assert refused in kernel_named("sm90_mixed_gemm").supports(problem).reason


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_in_bytes(bits):
    """Packed codes are one little-endian stream, whatever words hold it."""
    codes = torch.randint(2**bits, (3, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = pack(codes, bits)
    streams = [sum(code << bits * i for i, code in enumerate(row)) for row in codes.tolist()]
    assert [int.from_bytes(bytes(row), "little") for row in packed.tolist()] == streams
    words = packed.view(torch.int32 if bits > 1 else torch.int16)
    assert torch.equal(unpack(packed, bits), codes) and torch.equal(unpack(words, bits), codes)
    count = 8 * words.itemsize // bits if 8 % bits == 0 else 32
    order = tuple(reversed(range(count)))
    assert torch.equal(unpack(words, bits, order), codes.unflatten(1, (-1, count)).flip(2).flatten(1))
    column = words[:1].T  # contiguous() leaves it its strides, and no bytes of it can be viewed
    assert column.stride(-1) > 1 and column.is_contiguous()
    if 8 % bits == 0:
        assert torch.equal(unpack(column, bits), codes[:1].view(-1, count))
    for k in range(56, 64):
        part = pack(codes[:, :k], bits)
        assert part.shape[1] == -(-k * bits // 8) and torch.equal(unpack(part, bits)[:, :k], codes[:, :k])
