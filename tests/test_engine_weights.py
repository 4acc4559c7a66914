"""Weights from engines' tensors: the numbers of the checkpoint's own reader, whatever the slices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine_tensors import words
from w4gemm import fold_scales
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.engines import loading
from w4gemm.integrations.engines import weights as engine
from w4gemm.integrations.engines.engine import Engine
from w4gemm.integrations.engines.stacked import Stacked, StackedNumbers
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

    def check(self, found: QuantizedWeight) -> None:
        assert found.format == self.weight.format and found.layout == "cpu"
        torch.testing.assert_close(found.dequantize(), self.weight.dequantize(), rtol=0, atol=0)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack, "_ELEMENTS", 128 * K)


@pytest.mark.parametrize("added", [0, 1])
@pytest.mark.parametrize("zero", ["none", "int"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(zero: str, added: int, act_order: bool) -> None:
    drawn = Drawn(zero, act_order=act_order)
    qzeros = None if drawn.zeros is None else words(drawn.zeros.T - added)
    numbers = engine.gptq(words(drawn.codes).T, drawn.scales.T, qzeros, GROUP, g_idx=drawn.g_idx, added=added)
    drawn.check(engine.packed(numbers))


def test_gptq_with_a_zero_point_of_16_is_refused() -> None:
    drawn = Drawn("int")
    assert drawn.zeros is not None
    drawn.zeros[200, 1] = 0  # stored as 15 in version 1
    numbers = engine.gptq(words(drawn.codes).T, drawn.scales.T, words((drawn.zeros.T.int() - 1) % 16), GROUP)
    with pytest.raises(ValueError, match="zero points are stored as 15"):
        engine.packed(numbers)


@pytest.mark.parametrize("zero", ["none", "int"])
def test_awq(zero: str) -> None:
    drawn, order = Drawn(zero, torch.bfloat16), (0, 4, 1, 5, 2, 6, 3, 7)
    qzeros = None if drawn.zeros is None else words(drawn.zeros.T, order)
    drawn.check(engine.packed(engine.awq(words(drawn.codes.T, order), drawn.scales.T, qzeros, GROUP)))


@pytest.mark.parametrize("zero", ["none", "int"])
@pytest.mark.parametrize("group", [GROUP, -1])
def test_compressed_tensors(zero: str, group: int) -> None:
    drawn = Drawn(zero, torch.bfloat16, group)
    zeros = None if drawn.zeros is None else words(drawn.zeros.T).T
    drawn.check(engine.packed(engine.rowwise(words(drawn.codes), drawn.scales, zeros, group)))


def test_signed_pairs_with_float32_scales_are_rounded_once() -> None:
    drawn = Drawn("none", torch.float32)
    q = drawn.codes.to(torch.int8) - 8
    pairs = (q[:, ::2] & 15) | (q[:, 1::2] << 4)
    drawn.check(engine.packed(engine.rowwise(pairs.to(torch.int8), drawn.scales, None, GROUP)))


@pytest.mark.parametrize("zero", ["none", "int"])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_have_gate_and_up_in_pairs(zero: str, transposed: bool) -> None:
    drawn = Drawn(zero, torch.bfloat16)

    def stacked(t: torch.Tensor | None, along: str) -> Stacked | None:
        return None if t is None else Stacked(torch.stack((t.T, t.T) if transposed else (t, t)), transposed, along)

    zeros = None if drawn.zeros is None else words(drawn.zeros.T).T
    codes, scales = stacked(words(drawn.codes), "k"), stacked(drawn.scales, "")
    assert codes is not None and scales is not None
    numbers = StackedNumbers(drawn.weight.format, codes, scales, stacked(zeros, "n"))
    numbers.check()
    experts, dense = numbers.packed(gated=True), drawn.weight.dequantize()
    paired = torch.stack((dense[: N // 2], dense[N // 2 :]), 1).flatten(0, 1)
    assert experts.experts == 2 and experts.layout == "cpu"
    for e in range(2):
        assert torch.equal(experts.expert(e).dequantize(), paired)
    assert torch.equal(numbers.packed().dequantize()[1], dense)


def test_signed_pairs_of_experts() -> None:
    drawn = Drawn("none", torch.bfloat16)
    q = drawn.codes.to(torch.int8) - 8
    pairs = ((q[:, ::2] & 15) | (q[:, 1::2] << 4)).to(torch.int8)
    codes, scales = Stacked(pairs[None], False, "k", signed=True), Stacked(drawn.scales[None], False)
    found = StackedNumbers(drawn.weight.format, codes, scales).packed()
    assert torch.equal(found.dequantize()[0], drawn.weight.dequantize())


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
    wanted, _ = fold_scales(drawn.weight)
    format = VLLM.multiplied(drawn.weight.format, "fp8")
    numbers = engine.rowwise(words(drawn.codes), drawn.scales, None, GROUP)
    found = engine.packed(numbers, "fp8", format)
    assert found.format == wanted.format == format and found.activations == "fp8"
    torch.testing.assert_close(found.dequantize(), wanted.dequantize(), rtol=0, atol=0)
    codes, scales = (Stacked(t.expand(2, -1, -1), transposed=False) for t in (words(drawn.codes), drawn.scales))
    stacked = StackedNumbers(drawn.weight.format, replace(codes, along="k"), scales).packed("fp8", format)
    for expert in range(2):
        torch.testing.assert_close(stacked.dequantize()[expert], wanted.dequantize(), rtol=0, atol=0)


def test_scales_that_are_not_finite_are_refused_wherever_they_are() -> None:
    drawn = Drawn("none")
    drawn.scales[N - 1, -1] = float("nan")
    with pytest.raises(ValueError, match="scales"):
        engine.packed(engine.gptq(words(drawn.codes).T, drawn.scales.T, None, GROUP))


def test_tensors_that_do_not_fit_are_refused_by_name() -> None:
    """One group would be taken for all, and rows that are missing would be left as memory was."""
    drawn = Drawn("int")
    codes, scales, zeros = drawn.codes, drawn.scales, drawn.zeros
    assert zeros is not None
    bytes, in_fp8 = codes[:, : K // 2].contiguous(), torch.ones(N, K // 16).to(torch.float8_e4m3fn)
    for name, numbers in (
        ("scales", lambda: engine.rowwise(words(codes), scales[:, :1], None, GROUP)),
        ("scales", lambda: engine.rowwise(words(codes), scales[:8], None, GROUP)),
        ("zeros", lambda: engine.rowwise(words(codes), scales, words(zeros.T).T[:4], GROUP)),
        ("scales", lambda: engine.gptq(words(codes).T, scales.T[:1], None, GROUP)),
        ("qzeros", lambda: engine.gptq(words(codes).T, scales.T, words(zeros.T)[:, :4], GROUP)),
        ("scales", lambda: engine.awq(words(codes.T), scales.T[:2], None, GROUP)),
        ("qzeros", lambda: engine.awq(words(codes.T), scales.T, words(zeros.T)[:1], GROUP)),
        ("scales", lambda: engine.floats(bytes, in_fp8[:, :1], torch.ones(1))),
        ("factor", lambda: engine.floats(bytes, in_fp8, torch.ones(3))),
    ):
        with pytest.raises(ValueError, match=f"^{name}: wanted"):
            engine.packed(numbers())


def test_memory_beside_the_result_is_that_of_a_slice() -> None:
    seen: list[int] = []
    drawn = Drawn("none")
    numbers = engine.gptq(words(drawn.codes).T, drawn.scales.T, None, GROUP)

    def rows(start: int, stop: int):
        seen.append(stop - start)
        return numbers.rows(start, stop)

    engine.packed(replace(numbers, rows=rows))
    assert seen == [128, 128, 16]


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
