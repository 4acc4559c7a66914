"""Weights from engines' tensors: the numbers of the checkpoint's own reader, whatever the slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_tensors import AWQ_ORDER, words
from w4gemm import fold_scales
from w4gemm.checkpoints import awq, compressed_tensors, gptq, packed_floats, published
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.engines import loading
from w4gemm.integrations.engines.engine import Engine
from w4gemm.integrations.engines.formats import integer_format
from w4gemm.integrations.sglang.takeover import SGLANG
from w4gemm.integrations.vllm.takeover import VLLM
from w4gemm.packing import repack
from w4gemm.weights.weight import QuantizedWeight

N, K, GROUP = 272, 256, 64
"""Rows of three slices of 128, the last one short."""


class Drawn:
    """Random numbers of a weight, and the weight that they mean."""

    def __init__(self, zero: str, dtype: torch.dtype = torch.float16, group: int = GROUP, act_order: bool = False):
        g = torch.Generator().manual_seed(7)
        groups = 1 if group == -1 else K // group
        self.codes = torch.randint(0, 16, (N, K), generator=g, dtype=torch.uint8)
        self.scales = (torch.rand(N, groups, generator=g) / 100).to(dtype)
        self.zeros = torch.randint(1, 16, (N, groups), generator=g, dtype=torch.uint8) if zero == "int" else None
        self.g_idx = (torch.arange(K) // group)[torch.randperm(K, generator=g)].int() if act_order else None
        scale = {torch.float16: "_fp16"}.get(dtype, "")
        name = f"int4_{'col' if group == -1 else f'g{group}'}{'_zint' if zero == 'int' else ''}{scale}"
        kept = self.scales.to(torch.float16 if scale else torch.bfloat16)
        self.weight = QuantizedWeight.from_codes(name, self.codes, kept, self.zeros, self.g_idx)

    def check(self, numbers: PackedNumbers) -> None:
        for actual, layout in ((numbers.packed(), "cpu"), (numbers.weight(), "canonical")):
            assert actual.format == self.weight.format and actual.layout == layout
            torch.testing.assert_close(actual.dequantize(), self.weight.dequantize(), rtol=0, atol=0)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack, "_ELEMENTS", 128 * K)


def in_gptq(drawn: Drawn) -> PackedNumbers:
    tensors = {"qweight": words(drawn.codes).T, "scales": drawn.scales.T}
    if drawn.g_idx is not None:
        tensors["g_idx"] = drawn.g_idx
    return gptq.numbers(tensors, drawn.weight.format, None if drawn.zeros is None else drawn.zeros.T)


def in_awq(drawn: Drawn) -> PackedNumbers:
    tensors = {"qweight": words(drawn.codes.T, AWQ_ORDER), "scales": drawn.scales.T}
    if drawn.zeros is not None:
        tensors["qzeros"] = words(drawn.zeros.T, AWQ_ORDER)
    return awq.numbers(tensors, drawn.weight.format)


def in_rows(drawn: Drawn, stacked: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone) -> PackedNumbers:
    """compressed-tensors' tensors; ``stacked`` makes experts of each."""
    tensors = {"weight_packed": stacked(words(drawn.codes)), "weight_scale": stacked(drawn.scales)}
    if drawn.zeros is not None:
        tensors["weight_zero_point"] = stacked(words(drawn.zeros.T).T)
    return compressed_tensors.numbers(tensors, drawn.weight.format)


@pytest.mark.parametrize("zero", ["none", "int"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(zero: str, act_order: bool) -> None:
    drawn = Drawn(zero, act_order=act_order)
    drawn.check(in_gptq(drawn))


@pytest.mark.parametrize("zero", ["none", "int"])
def test_awq(zero: str) -> None:
    drawn = Drawn(zero, torch.bfloat16)
    drawn.check(in_awq(drawn))


@pytest.mark.parametrize("zero", ["none", "int"])
@pytest.mark.parametrize("group", [GROUP, -1])
def test_compressed_tensors(zero: str, group: int) -> None:
    drawn = Drawn(zero, torch.bfloat16, group)
    drawn.check(in_rows(drawn))


def pairs(drawn: Drawn) -> torch.Tensor:
    """Two's complements, the even column in the low nibble."""
    q = drawn.codes.to(torch.int8) - 8
    return ((q[:, ::2] & 15) | (q[:, 1::2] << 4)).to(torch.int8)


def test_signed_pairs_with_float32_scales_are_rounded_once() -> None:
    drawn = Drawn("none", torch.float32)
    format = integer_format(GROUP, False, torch.float32)
    drawn.check(published.w4afp8_numbers({"weight": pairs(drawn), "weight_scale_inv": drawn.scales}, format))


@pytest.mark.parametrize("zero", ["none", "int"])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_have_gate_and_up_in_pairs(zero: str, transposed: bool) -> None:
    drawn = Drawn(zero, torch.bfloat16)
    numbers = in_rows(drawn, lambda t: torch.stack((t.T, t.T)).mT if transposed else torch.stack((t, t)))
    numbers.check_range()
    experts, dense = numbers.packed(gated=True), drawn.weight.dequantize()
    paired = torch.stack((dense[: N // 2], dense[N // 2 :]), 1).flatten(0, 1)
    assert experts.experts == 2 and experts.layout == "cpu"
    for e in range(2):
        assert torch.equal(experts.expert(e).dequantize(), paired)
    assert torch.equal(numbers.packed().dequantize()[1], dense)


def test_signed_pairs_of_experts() -> None:
    drawn = Drawn("none", torch.bfloat16)
    tensors = {"weight": pairs(drawn)[None], "weight_scale_inv": drawn.scales[None]}
    numbers = published.w4afp8_numbers(tensors, drawn.weight.format)
    for w in (numbers.packed(), numbers.weight()):
        assert torch.equal(w.dequantize()[0], drawn.weight.dequantize())


@pytest.mark.parametrize(
    ("engine_here", "activations", "scale"),
    [(VLLM, "fp8", "e4m3"), (VLLM, None, "bf16"), (SGLANG, "fp8", "bf16"), (SGLANG, None, "bf16")],
    ids=lambda value: getattr(value, "name", value),
)
def test_group_scales_are_folded_where_the_engines_own_kernel_folds_them(
    engine_here: Engine, activations: str | None, scale: str
) -> None:
    loaded = WeightFormat(GROUP, "none", "bf16")
    assert engine_here.multiplied(loaded, activations) == replace(loaded, scale=scale)


def test_folded_scales_are_those_of_fold_scales() -> None:
    drawn = Drawn("none", torch.bfloat16)
    expected, _ = fold_scales(drawn.weight)
    format = VLLM.multiplied(drawn.weight.format, "fp8")
    actual = in_rows(drawn).packed("fp8", format)
    assert actual.format == expected.format == format and actual.activations == "fp8"
    torch.testing.assert_close(actual.dequantize(), expected.dequantize(), rtol=0, atol=0)
    stacked = in_rows(drawn, lambda t: t.expand(2, -1, -1)).packed("fp8", format)
    for expert in range(2):
        torch.testing.assert_close(stacked.dequantize()[expert], expected.dequantize(), rtol=0, atol=0)


def test_scales_that_are_not_finite_are_refused_wherever_they_are() -> None:
    drawn = Drawn("none")
    drawn.scales[N - 1, -1] = float("nan")
    with pytest.raises(ValueError, match="scales"):
        in_gptq(drawn).packed()


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    """One group would be taken for all, and rows that are missing would be left as memory was."""
    drawn, format = Drawn("int"), WeightFormat(GROUP, "int", "fp16")
    codes, scales, zeros = drawn.codes, drawn.scales, drawn.zeros
    assert zeros is not None
    bytes, in_fp8, one = codes[:, : K // 2].contiguous(), torch.ones(N, K // 16).to(torch.float8_e4m3fn), torch.ones(1)

    def rows(**changed: torch.Tensor) -> PackedNumbers:
        tensors = {"packed": words(codes), "scale": scales, "zero_point": words(zeros.T).T, **changed}
        return compressed_tensors.numbers({f"weight_{name}": t for name, t in tensors.items()}, format)

    def columns(of: Any = gptq, **changed: torch.Tensor) -> PackedNumbers:
        tensors = {"qweight": words(codes).T if of is gptq else words(codes.T), "scales": scales.T}
        if of is awq:
            tensors["qzeros"] = words(zeros.T)
        return of.numbers({**tensors, **changed}, format, *([zeros.T] if of is gptq else []))

    for name, numbers in (
        ("weight_scale", lambda: rows(scale=scales[:, :1])),
        ("weight_scale", lambda: rows(scale=scales[:8])),
        ("weight_zero_point", lambda: rows(zero_point=words(zeros.T).T[:4])),
        ("weight_packed", lambda: rows(packed=words(codes).long())),
        ("scales", lambda: columns(scales=scales.T[:1])),
        ("scales", lambda: columns(awq, scales=scales.T[:2])),
        ("qzeros", lambda: columns(awq, qzeros=words(zeros.T)[:1])),
        ("qweight", lambda: columns(awq, qweight=words(codes.T).long())),
        ("weight_scale", lambda: packed_floats.numbers(bytes, in_fp8[:, :1], packed_floats.NVFP4, one)),
        ("factor", lambda: packed_floats.numbers(bytes, in_fp8, packed_floats.NVFP4, torch.ones(3))),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: wanted"):
            numbers()


def test_memory_beside_the_result_is_that_of_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    rows = PackedMatrix.rows
    monkeypatch.setattr(PackedMatrix, "rows", lambda self, a, b: seen.append(b - a) or rows(self, a, b))
    in_gptq(Drawn("none")).packed()
    assert [*dict.fromkeys(seen)] == [128, 16] and len(seen) == 6


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float16, torch.float32, torch.float8_e4m3fn])
def test_memory_that_was_not_loaded_is_known(dtype: torch.dtype) -> None:
    """A quarter of the rows, or of the columns; nothing; all, with numbers that are 0 or NaN."""
    layer = torch.nn.Module()
    layer.scales = torch.nn.Parameter(torch.zeros(8, 64).to(dtype), requires_grad=False)
    loading.mark(layer, ["scales", "absent"])
    made = layer.scales.data.clone()
    assert loading.unloaded(layer.scales) == 1 and not loading.check_loaded(layer, ["scales"], "it")
    for part in ((slice(2, 4),), (slice(None), slice(16, 32))):
        layer.scales.data.zero_()
        layer.scales.data[part] = made[part]
        assert loading.unloaded(layer.scales) == 0.25
        with pytest.raises(RuntimeError, match=r"it: scales: 25.00% of its shape \(8, 64\) was not loaded"):
            loading.check_loaded(layer, ["scales"], "it")
    layer.scales.data.zero_()
    if dtype.is_floating_point and dtype.itemsize > 1:
        layer.scales.data[0, 0] = float("nan")
    assert loading.check_loaded(layer, ["scales"], "it")


def test_parameters_that_are_not_known_are_refused_and_second_names_are_not() -> None:
    layer = torch.nn.Module()
    layer.scales = torch.nn.Parameter(torch.zeros(8))
    layer.second = layer.scales
    loading.check_known(layer, {"scales", "codes"})
    layer.offset = torch.nn.Parameter(torch.zeros(8))
    with pytest.raises(ValueError, match="parameter 'offset', wanted codes, scales alone"):
        loading.check_known(layer, {"scales", "codes"})
