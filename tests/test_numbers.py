"""Numbers of checkpoints are packed once, for their device, with the bits of a canonical weight that is repacked."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from fuzz import samples
from quantized_model import write_model
from test_gptq import CONFIG, writer
from tiny_model import write_gguf
from w4gemm import QuantizedWeight, W4Linear, WeightFormat, quantize
from w4gemm.checkpoints import numbers, open_checkpoint
from w4gemm.checkpoints.numbers import ExpertsNumbers, Numbers, PairedNumbers, WeightNumbers
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.integrations.transformers import W4GemmConfig, load
from w4gemm.packing import repack
from w4gemm.weights import checks, weight

N, K = 272, 512
"""Rows of three slices of 128, the last one short; shards and pairs begin inside of a slice."""


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack, "_ELEMENTS", 1)


def assert_same(actual: QuantizedWeight, expected: QuantizedWeight) -> None:
    facts = [(w.format, w.n, w.k, w.experts, w.layout, w.activations) for w in (actual, expected)]
    assert facts[0] == facts[1]
    for both in zip(actual.tensors, expected.tensors, strict=True):
        assert torch.equal(*(t.view(torch.uint8) for t in both))
    assert actual.perm is expected.perm or torch.equal(actual.perm, expected.perm)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in samples.FORMATS if name != "weight"])
def test_every_format_is_packed_as_it_is_repacked(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(samples.FORMATS[name](tmp_path))
    for module in checkpoint.modules:
        w = checkpoint.weight(module)
        assert w.layout == "canonical"
        assert_same(checkpoint.weight(module, "cpu", Numbers.packed), w.repack())
        for dim, index in ((0, 1), (1, 0)):
            if dim == 1 and w.perm is not None:
                continue
            part = functools.partial(Numbers.shard, dim=dim, index=index, count=2)
            shard = checkpoint.weight(module, "cpu", lambda numbers, own, part=part: part(numbers).packed(own))
            assert_same(shard, w.shard(dim, index, 2).repack())


def test_slices_are_checked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is waited for once, after all of them. The row of an error is that of the whole weight."""
    checked: list[int] = []
    monkeypatch.setattr(numbers, "check_rules", lambda rules: checked.append(len(rules)) or checks.check_rules(rules))
    w = quantize(torch.randn(N, K), "int4_g64_zfloat")
    codes, scales, zeros, *_ = (PackedMatrix(t) for t in w.parts() if t is not None)
    PackedNumbers(w.format, codes, scales, zeros).packed()
    assert checked == [3]
    scales.tensor[N - 1, 2] = torch.inf
    with pytest.raises(ValueError, match=f"the weights of 1 groups would not be finite .* in row {N - 1}, group 2"):
        PackedNumbers(w.format, codes, scales, zeros).packed()


@pytest.mark.parametrize("format", ["int4_g64_zint", "nvfp4", "e4m3_g128_b128", "q4_k", "q6_k"])
def test_parts_and_pairs(format: str) -> None:
    """They are those of a whole weight, whose blocks of rows or of columns they may divide."""
    gate, up = (quantize(torch.randn(N, K), format) for _ in range(2))
    numbers = [WeightNumbers(w) for w in (gate, up)]
    for dim, count in ((0, 2), (0, 16), (1, 2), (1, 8)):
        for index in {0, count - 1}:
            assert_same(numbers[0].shard(dim, index, count).weight(), gate.shard(dim, index, count))
    pairs = QuantizedWeight.interleave(gate, up)
    assert_same(PairedNumbers(*numbers).packed(), pairs.repack())
    for index, count in ((1, 2), (0, 32)):  # the last of 17 rows
        assert_same(PairedNumbers(*numbers).shard(0, index, count).weight(), pairs.shard(0, index, count))
    stacked = ExpertsNumbers(gate.format, N, K, gate.device, 2, numbers.__getitem__)
    assert_same(stacked.packed(), QuantizedWeight.stack((gate, up)))
    assert_same(stacked.select(1, 1).weight(), QuantizedWeight.stack((up,), layout="canonical"))


def test_rows_in_errors_are_those_of_the_whole() -> None:
    codes, scales = torch.full((N, K), 7, dtype=torch.uint8), torch.ones(N, 1)
    scales[200] = torch.inf
    numbers = PackedNumbers(WeightFormat.of("e4m3_col_fp32"), PackedMatrix(codes), PackedMatrix(scales))
    with pytest.raises(ValueError, match="first in row 200, group 0"):
        numbers.packed()
    scales[200], codes[201, 3] = 1, 0x7F
    with pytest.raises(ValueError, match="in row 201, column 3"):
        numbers.packed()


def test_models_are_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    def refused(*args: object) -> None:
        raise AssertionError("rows were packed before")

    write_model(tmp_path / "gptq", CONFIG, writer(0))
    monkeypatch.setattr(weight, "repack_rows", refused)
    config = W4GemmConfig()
    for model in (
        load(tmp_path / "gptq")[0],
        AutoModelForCausalLM.from_pretrained(tmp_path / "gptq", quantization_config=config),
        load(write_gguf(tmp_path / "model.gguf"))[0],
    ):
        assert any(isinstance(module, W4Linear) for module in model.modules())
