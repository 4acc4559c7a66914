"""Weights of 8, 6, 5, 3 and 2 bits, floats of 8, 6 and 4 bits, codebooks, GGUF's: all that a weight does on the CPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from w4gemm import QuantizedWeight, W4Experts, W4Linear, WeightFormat, codebook, grouped_linear, linear, quantize
from w4gemm.core.elements import ELEMENTS
from w4gemm.core.errors import FormatError, UnsupportedError
from w4gemm.core.problem import H200, GemmProblem
from w4gemm.kernels import KERNELS
from w4gemm.kernels.gpu import MOST_GROUP_WORDS, refused_groups
from w4gemm.packing.layouts import WeightComponents, layout_for, layout_named
from w4gemm.tuning.random_weight import random_components, random_weight

N, K = 200, 560
"""Rows that no table is full of; columns with a short last group of 128 and a short last superblock of 256."""
CASES = [
    ("int8_g128_zint", 8 + 24 / 128, 0.007), ("int8_col_fp32", 8 + 32 / K, 0.008), ("int6_g64", 6.25, 0.024),
    ("int5_g32_zfloat_fp16", 6, 0.04), ("int3_g128_zint_fp16", 3 + 24 / 128, 0.22), ("int2_g16_zfloat", 4, 0.33),
    ("e4m3_col_fp32", 8 + 32 / K, 0.027), ("e4m3_g128_b128", 8 + 2 * 32 / 128**2, 0.027), ("mxfp8", 8.25, 0.027),
    ("e5m2_g32_e8m0", 8.25, 0.054), ("e2m3_g32_e8m0", 6.25, 0.029), ("e3m2_g32_e8m0", 6.25, 0.054),
    ("e5m2_col_fp32", 8 + 32 / K, 0.054), ("e5m2_g128_b128", 8 + 2 * 32 / 128**2, 0.054),
    ("q6_k", 8 * 210 / 256, 0.02), ("q5_k", 5.625, 0.04), ("q3_k", 3.5625, 0.17), ("q2_k", 8 * 84 / 256, 0.34),
    ("iq4_g32_s8x256", 4.3125, 0.085), ("q4_k", 4.625, 0.08), ("mxfp4", 4.25, 0.12), ("nvfp4", 4.5 + 32 / 512, 0.1),
    ("iq4_g32_fp16", 4.5, 0.085), ("iq4_col", 4 + 16 / K, 0.13), ("nf4_g64_fp32", 4.5, 0.1), ("nf4", 4.25, 0.1),
    (f"{codebook([-(1 + i / 100) for i in range(8)] + [2.0**-i for i in range(8)])}_g96", 4.1875, 0.6),
]  # fmt: skip
"""Formats; the bits of a weight whose n and k fill every block, of Q6_K and Q2_K those of GGUF, whose Q5_K, Q4_K
and Q3_K have six bits for each scale, where these have eight; the relative error of a quantized normal distribution."""
FORMATS = [WeightFormat.parse(name) for name, *_ in CASES]
all_formats = pytest.mark.parametrize("format", FORMATS, ids=str)


def dense(n: int = N, k: int = K, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def assert_same(a: WeightComponents, b: WeightComponents) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None) and (x is None or (x.dtype == y.dtype and torch.equal(x.float(), y.float())))


@pytest.mark.parametrize("name, bits, error", CASES)
def test_bits_of_a_weight(name, bits, error):
    format = WeightFormat.parse(name)
    n, k = (128, K) if "col" in name else (128, 512)
    assert 8 * random_weight(format, n, k).nbytes / (n * k) == pytest.approx(bits, abs=1e-9)


@all_formats
def test_products(format):
    """A one-hot x gives the dequantized weight, bit for bit: one token and many, in both layouts, of every dtype."""
    w = random_weight(format, N, K, signed=True)
    columns = torch.tensor([0, 17, 255, 256, 558, 559])
    for layout in (None, "canonical"):
        packed = w.repack(layout)
        assert_same(packed.parts(), w.parts())
        in_tables = format.element_rule.counts and format.scale != "b128"
        assert packed.layout == ("cpu" if layout is None and in_tables else "canonical")
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            eye, exact = torch.eye(K, dtype=dtype), w.dequantize(dtype).T
            assert torch.equal(linear(eye, packed), exact)
            assert torch.equal(torch.cat([linear(eye[i : i + 1], packed) for i in columns]), exact[columns])
    for layout in ("mma16", "mma8"):
        if not layout_named(layout).supports(format):
            assert torch.equal(w.repack(layout).dequantize(), w.dequantize())


@pytest.mark.sampled(0.4)
@all_formats
def test_layers_experts_and_gradients(format):
    w, down = (random_weight(format, n, k, seed).repack() for n, k, seed in ((256, 128, 0), (128, 128, 1)))
    gate, up = (quantize(dense(128, 128, seed) / 11, format) for seed in (2, 3))
    x = dense(3, 128).requires_grad_()
    layer = W4Linear.from_weight(w, bias=dense(1, 256)[0])
    expected = torch.nn.functional.gelu(x @ w.dequantize().T + layer.bias)
    torch.compiler.reset()
    step = torch.compile(lambda x: torch.nn.functional.gelu(layer(x)), fullgraph=True, backend="aot_eager")
    for got in (torch.nn.functional.gelu(layer(x)), linear(x, w, layer.bias, activation="gelu"), step(x)):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
        grads = (torch.autograd.grad(y.sum(), x, retain_graph=True) for y in (got, expected))
        torch.testing.assert_close(*grads, atol=2e-4, rtol=1e-4)
    gate_up = QuantizedWeight.stack([QuantizedWeight.interleave(gate, up)] * 2).repack()
    assert torch.equal(gate_up.dequantize()[1, 0::2], gate.dequantize())
    assert torch.equal(gate_up.dequantize()[0, 1::2], up.dequantize())
    rows, weights = torch.tensor([[0], [1], [0]]), torch.ones(3, 1)
    hidden = torch.nn.functional.silu(x @ gate.dequantize().T) * (x @ up.dequantize().T)
    got = W4Experts(gate_up, QuantizedWeight.stack([down, down]))(x, rows, weights)
    torch.testing.assert_close(got, hidden @ down.dequantize().T, atol=2e-5, rtol=1e-4)
    offsets = torch.tensor([0, 128, 256], dtype=torch.int32)
    assert torch.equal(grouped_linear(torch.eye(128).repeat(2, 1), gate_up, offsets)[128:].T, gate_up.dequantize()[1])


@all_formats
def test_files_state_dicts_and_copies(format, tmp_path):
    w = random_weight(format, N, K, signed=True)
    experts = QuantizedWeight.stack([w, w])
    experts.save(tmp_path / "experts.safetensors")
    assert_same(QuantizedWeight.load(tmp_path / "experts.safetensors").repack().expert(1).parts(), w.parts())
    w.repack().save(tmp_path / "w.safetensors")
    loaded = QuantizedWeight.load(tmp_path / "w.safetensors")
    assert loaded.format == format
    assert_same(loaded.parts(), w.parts())
    layer = W4Linear(K, N, False, format)
    layer.load_state_dict(W4Linear.from_weight(w).state_dict())
    assert_same(layer.weight.parts(), w.parts())
    codes = w.tensors[0]
    assert codes.dtype == torch.uint8 and codes.shape == (N, -(-K * format.bits // 8))
    stream = int.from_bytes(bytes(codes[3].tolist()), "little")
    assert [stream >> format.bits * i & 2**format.bits - 1 for i in range(K)] == w.parts().codes[3].tolist()


@all_formats
@pytest.mark.parametrize("dim, count", [(0, 2), (0, 5), (1, 5), (1, 7)])
def test_shards(format, dim, count):
    """100 and 40 rows, which divide blocks of 128; 112 and 80 columns, which divide groups and superblocks."""
    w = random_weight(format, N, K, signed=True)
    shards = [w.shard(dim, i, count) for i in range(count)]
    assert torch.equal(torch.cat([shard.dequantize() for shard in shards], dim), w.dequantize())
    if dim == 0:  # rows stay whole
        own = replace(format, scale="fp32") if format.scale == "b128" else format
        assert {shard.format for shard in shards} == {own}
    for shard in shards:
        QuantizedWeight.from_codes(shard.format, *shard.parts()[:3], None, *shard.parts()[3:])


@pytest.mark.parametrize(
    "name, dim, count, rule",
    [
        ("q6_k", 1, 2, "s8x256"),
        ("q6_k", 1, 4, "s8x128"),
        ("q6_k", 1, 8, "fp32"),
        ("q2_k", 1, 2, "u4x256"),
        ("q3_k", 1, 4, "s6x128"),
        ("q2_k", 1, 4, "fp32"),
        ("q5_k", 1, 4, "u8x128"),
        ("q4_k", 1, 2, "u8x256"),
        ("q4_k", 1, 16, "fp32"),
        ("e4m3_g128_b128", 0, 2, "b128"),
        ("e4m3_g128_b128", 0, 4, "fp32"),
        ("e4m3_g128_b128", 1, 8, "b128"),
    ],
)
def test_scale_rules_of_shards(name, dim, count, rule):
    w = random_weight(WeightFormat.parse(name), 256, 512, signed=True)
    for layout in ("canonical", "mma16"):
        if layout_named(layout).supports(w.format):
            continue
        shards = [w.repack(layout).shard(dim, i, count) for i in range(count)]
        assert {shard.format.scale for shard in shards} == {rule}
        assert torch.equal(torch.cat([shard.dequantize() for shard in shards], dim), w.dequantize())


@pytest.mark.parametrize("name, rule", [("int6_g256_s8x256", "s8x128"), ("int4_g256_zfloat_u8x256", "u8x128")])
def test_halves_of_a_row_that_is_one_group_and_one_superblock(name, rule):
    w = random_weight(WeightFormat.parse(name), 64, 256, signed=True)
    shards = [w.shard(1, i, 2) for i in range(2)]
    assert {shard.format for shard in shards} == {replace(w.format, group_size=128, scale=rule)}
    assert torch.equal(torch.cat([shard.dequantize() for shard in shards], 1), w.dequantize())


@all_formats
def test_a_row_does_not_depend_on_the_others(format):
    """With batch_invariant=True; PyTorch multiplies weights without a layout of tables, in an order of its own."""
    w, x = random_weight(format, N, K, signed=True).repack(), dense(70, K).bfloat16()
    if w.layout == "canonical":
        with pytest.raises(UnsupportedError, match="the bits of a row depend on the other rows here"):
            linear(x, w, batch_invariant=True)
        return
    whole, order = linear(x, w, batch_invariant=True), torch.randperm(70, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear(x[order], w, batch_invariant=True), whole[order])
    assert all(torch.equal(linear(x[i : i + 1], w, batch_invariant=True)[0], whole[i]) for i in (0, 33, 69))


@pytest.mark.parametrize(
    "name",
    ["int8_g128", "int6_g64_zint", "int3_g32_fp16", "mxfp8", "e4m3_g128_b128", "e3m2_g32_e8m0", "q6_k", "q5_k", "q2_k"],
)
def test_act_order(name, tmp_path):
    format = WeightFormat.parse(name)
    parts = random_components(format, N, 512)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    g_idx = (torch.arange(512) // format.group_size)[order]
    w = QuantizedWeight.from_codes(format, parts.codes, parts.scales, parts.zeros, g_idx, *parts[3:])
    codes = parts.codes[:, torch.argsort(g_idx, stable=True)]
    straight = QuantizedWeight.from_codes(format, codes, *parts[1:3], None, *parts[3:])
    assert torch.equal(w.dequantize()[:, torch.argsort(g_idx, stable=True)], straight.dequantize())
    w.save(tmp_path / "w.safetensors")
    assert torch.equal(
        linear(torch.eye(512), QuantizedWeight.load(tmp_path / "w.safetensors").repack()).T, w.dequantize()
    )


@pytest.mark.parametrize("name, bits, error", CASES)
def test_quantize(name, bits, error):
    """The error is what such numbers cost; a search never makes it larger."""
    w = dense()
    errors = [float((quantize(w, name, search=search).dequantize() - w).norm() / w.norm()) for search in (False, True)]
    assert error * 0.8 < errors[0] < error and errors[1] <= errors[0]
    assert torch.equal(quantize(torch.zeros(4, 64), name).dequantize(), torch.zeros(4, 64)) or name.startswith("iq4")


@pytest.mark.parametrize("name, top", [("int8_col_fp32", 127), ("e4m3_col_fp32", 448), ("e4m3_g128_b128", 448)])
def test_quantize_is_its_formula(name, top):
    """Signed integers and fp8, with the largest magnitude of a row, or of 128 x 128, over the largest number."""
    w = dense(256, 256)
    w[0, 0] = 9  # positive, so that int8's -128 is not used
    w = w.where(w.abs().lt(5) | (w == 9), 1.0)
    largest = w.abs().amax(1, keepdim=True)
    if "b128" in name:
        largest = w.view(2, 128, 2, 128).abs().amax((1, 3), keepdim=True).expand(2, 128, 2, 128).reshape(256, 256)
    elif name.startswith("int8"):
        low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
        scale = torch.maximum(torch.maximum(-low, high) / 128, torch.minimum(-low, high) / 127)
        scale = torch.where(high > -low, -scale, scale)  # the end of larger magnitude is -128
        numbers = (w / scale).round().clamp(-128, 127)
        assert torch.equal(quantize(w, name).dequantize(), numbers * scale)
        return
    scale = largest / top
    assert torch.equal(quantize(w, name).dequantize(), (w / scale).to(torch.float8_e4m3fn).float() * scale)


def test_rows_of_blocks_alternate():
    """An interleaved weight of blocks has a scale for the even and one for the odd rows; it cannot alternate again."""
    gate, up = (quantize(dense(192, 256, seed), "e4m3_g128_b128") for seed in (0, 1))
    both = QuantizedWeight.interleave(gate, up)
    assert both.format == gate.format and both.parts().scales.shape == (6, 2)
    assert torch.equal(both.dequantize()[0::2], gate.dequantize())
    assert torch.equal(both.dequantize()[1::2], up.dequantize())
    with pytest.raises(ValueError, match="gate, up: wanted the same b128 scales for even and odd rows"):
        QuantizedWeight.interleave(both, both)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_codes_of_no_number_are_refused(name, tmp_path):
    """NaN and infinity, in codes, in a file and in a state dict; no quantizer makes them."""
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    numbers = torch.arange(256).to(torch.uint8).view(dtype).float()
    bad = (~numbers.isfinite()).nonzero().flatten().tolist()
    assert bad == list(ELEMENTS[name].refused_codes)
    format, scales = WeightFormat.parse(f"{name}_col_fp32"), torch.ones(2, 1)
    w = quantize(dense(2, 64), format)
    state = W4Linear.from_weight(w, dtype=torch.float32).state_dict()
    w.save(tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as f:
        tensors, metadata = {key: f.get_tensor(key) for key in f.keys()}, f.metadata()  # noqa: SIM118 (not a dict)
    for code in bad:
        tensors["codes"][1, 3] = code
        message = (
            f"codes: wanted finite numbers, got 1 codes of NaN or infinity in {name}; first {code} in row 1, column 3"
        )
        with pytest.raises(ValueError, match=message):
            QuantizedWeight.from_codes(format, tensors["codes"], scales)
        with pytest.raises(RuntimeError, match=message):
            W4Linear(64, 2, False, format).load_state_dict(state | {"codes": tensors["codes"]})
    save_file(tensors, tmp_path / "w.safetensors", metadata=metadata)
    with pytest.raises(FormatError, match="codes: wanted finite numbers"):
        QuantizedWeight.load(tmp_path / "w.safetensors")


def test_a_file_whose_codes_do_not_fit_its_bits(tmp_path):
    path = tmp_path / "w.safetensors"
    quantize(dense(4, 64), "int5_g32").save(path)
    with safe_open(path, "pt") as f:
        tensors, facts = {key: f.get_tensor(key) for key in f.keys()}, json.loads(f.metadata()["w4gemm"])  # noqa: SIM118
    for change in ({"format": "int6_g32"}, {"format": "int3_g32"}, {"k": 66}):
        save_file(tensors, path, metadata={"w4gemm": json.dumps(facts | change)})
        with pytest.raises(FormatError, match=r"tensors\[0\]: canonical int._g32 with n 4, k 6. wants a contiguous"):
            QuantizedWeight.load(path)


LEVELS = torch.zeros(4, 16, dtype=torch.uint8)
LATE = torch.tensor([1.0] * 5 + [torch.inf])[:, None]
CODES, FACTORS = torch.zeros(4, 256, dtype=torch.uint8), torch.ones(4, 1, 2).half()


@pytest.mark.parametrize(
    "name, parts, error, message",
    [
        ("int8_g256", (CODES.int() - 1, CODES[:, :1].bfloat16()), ValueError, r"codes: wanted 0\.\.255, got -1\.\.-1"),
        ("int6_g256", (CODES + 64, CODES[:, :1].bfloat16()), ValueError, r"codes: wanted 0\.\.63, got 64\.\.64"),
        ("int3_g256_zint", (CODES, CODES[:, :1].bfloat16(), CODES[:, :1] + 8), ValueError, r"zeros: wanted 0\.\.7"),
        ("q2_k", (CODES, LEVELS + 16, LEVELS, FACTORS), ValueError, r"scales: wanted 0\.\.15 in int2.*got 16\.\.16"),
        ("q2_k", (CODES, LEVELS, LEVELS + 99, FACTORS), ValueError, r"zeros: wanted 0\.\.15 in int2.*got \d+\.\.99"),
        ("q6_k", (CODES, LEVELS.char(), None, FACTORS), ValueError, r"factors: wanted shape \(4, 1, 1\), got"),
        ("q6_k", (CODES, LEVELS, None, FACTORS[..., :1]), TypeError, "scales: wanted torch.int8, got torch.uint8"),
        ("q6_k", (CODES, LEVELS.char(), None, None), ValueError, r"factors: .* wants torch.float16 \(4, 1, 1\)"),
        ("q6_k", (CODES, LEVELS.char() + 9, None, FACTORS[..., :1] * 6e4), ValueError, "weights of 64 groups"),
        ("e4m3_g256_b128", (CODES, torch.ones(4, 1)), ValueError, r"scales: wanted shape \(2, 1\), got \(4, 1\)"),
        ("e4m3_g256_b128", (CODES, torch.full((2, 1), 1e38)), ValueError, "weights of 2 groups"),
        ("e4m3_g256_b128", (CODES, torch.full((2, 1), torch.nan)), ValueError, "weights of 2 groups"),
        ("e4m3_g256_b128", (CODES[:1].expand(300, -1), LATE), ValueError, "first in row 257, group 0: scale inf"),
        ("int8_g256_zfloat_fp32", (CODES, torch.full((4, 1), 0.1), torch.ones(4, 1)), ValueError, "at most 16"),
    ],
)  # fmt: skip
def test_hostile_numbers(name, parts, error, message):
    codes, scales, zeros, factors = (*parts, None, None)[:4]
    with pytest.raises(error, match=message):
        QuantizedWeight.from_codes(name, codes, scales, zeros, factors=factors)


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "int8_g32_zfloat_u8x256",
            "element: wanted at most 5 bits with u8x256 scales, .* exact in float32, got int8",
        ),
        ("int6_g32_zfloat_u8x128", "element: wanted at most 5 bits with u8x128 scales"),
        ("int6_g16", ""),
        ("int8_g16_zfloat_u4x256", ""),
        ("int6_g16_zint_s8x256", "s8x256 has factors of 256 columns: wanted zero 'none' and a group_size"),
        ("int2_g16_u4x256", "u4x256 has factors of 256 columns: wanted zero 'float' and a group_size"),
        ("int6_g48_s8x256", "wanted zero 'none' and a group_size that divides 256, got 'none' and 48"),
        ("int8_g128_zint_b128", "zero: wanted 'none' with b128 scales, got 'int'"),
        ("e4m3_g128_zint", "zero: wanted 'none' with e4m3 elements, got 'int'"),
        ("q8_0", "format: wanted .*; nearest is 'int8_g32_fp16'"),
        ("fp8", "format: wanted .*; nearest is 'e4m3_col_fp32'"),
        ("int8", "format: wanted .*; nearest is 'int8_g128'"),
        ("int8_128", "format: wanted .*; nearest is 'int8_g128'"),
    ],
)
def test_formats_that_there_are_and_are_not(name, message):
    if not message:
        assert str(WeightFormat.parse(name)) == name
        return
    with pytest.raises(ValueError, match=message):
        WeightFormat.parse(name)


@pytest.mark.parametrize("format", [f for f in FORMATS if f.bits != 4], ids=str)
def test_gpus_run_a_format_or_say_why_not(format):
    """Where no codec holds the format, the layout and every GPU kernel name it and the reason. Some groups a kernel
    refuses by itself."""
    for dtype, layout in ((torch.bfloat16, "mma16"), (torch.float8_e4m3fn, "mma8")):
        problem = GemmProblem(16, 256, 256, dtype, format, layout_for(H200, format, dtype), device=H200)
        kernels = [kernel for kernel in KERNELS if kernel.supports(problem)]
        reason = layout_named(layout).supports(format)
        assert bool(kernels) != bool(reason or refused_groups(problem, MOST_GROUP_WORDS))
        if reason:
            assert re.search(rf"{format.element}|{format.scale}|zero points", reason)
            with pytest.raises(ValueError, match=re.escape(f"layout: {layout} cannot hold {format}: {reason}")):
                random_weight(format, 64, 128).repack(layout)


def test_a_folder_of_our_own(tmp_path: Path) -> None:
    """k is told by the codes' bytes; a k that is not is refused."""
    from w4gemm.checkpoints.w4gemm import settings

    for name, k, message in (("int3_g32", 40, ""), ("int3_g32", 42, "a multiple of 8 for 3 bits, .*, got 42"),
                             ("int6_g32", 42, "a multiple of 4 for 6 bits"), ("int8_g32", 41, "")):  # fmt: skip
        w = quantize(dense(4, k), name)
        if message:
            with pytest.raises(ValueError, match=message):
                settings([("up", w)])
        else:
            assert settings([("up", w)])["format"] == name
