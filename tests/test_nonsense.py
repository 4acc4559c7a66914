"""Nonsense calls of the public functions: refused in a sentence that names the argument."""

from __future__ import annotations

import random

import pytest
import torch

import w4gemm
from fuzz import nonsense

ONE_IN = 4


def test_a_slice_with_a_new_seed(new_seed):
    count, wrong = nonsense.find(random.Random(new_seed), ONE_IN)
    assert count > 1000 and not wrong, "\n".join(map(str, wrong))


def test_a_function_that_takes_nonsense_is_found(monkeypatch):
    call = nonsense.Call(lambda most: int(most) if most != "nonsense" else most.missing, {"most": 1})
    monkeypatch.setattr(nonsense, "calls", lambda: {"a function": call})
    _, wrong = nonsense.find()
    came = {actual.came: actual.what for actual in wrong}
    assert came["text"].startswith("AttributeError")
    assert came["true"].startswith("taken") and came["fraction"].startswith("taken")
    assert came["None"].startswith("no argument is named")
    assert "number" not in came


def test_rows_that_there_are_not():
    """Known on the CPU alone: a GPU's numbers are not read."""
    stack = w4gemm.QuantizedWeight.stack([w4gemm.quantize(torch.randn(48, 64), "int4_g32")] * 2)
    offsets, x = torch.tensor([0, 1, 3], dtype=torch.int32), torch.randn(4, 64)
    for rows, came in (([0, 4, 1], 4), ([0, -1, 1], -1)):
        with pytest.raises(ValueError, match=f"indices: wanted rows 0 .. 3, got {came}"):
            w4gemm.grouped_linear(x, stack, offsets, indices=torch.tensor(rows))
    for rows, error in (([0, 3, 1], "ascending rows, got"), ([0, 1, 5], "rows 0 .. 4, got 5"), ([-1, 1, 3], "got -1")):
        with pytest.raises(ValueError, match=f"m_offsets: wanted .*{error}"):
            w4gemm.grouped_linear(x, stack, torch.tensor(rows, dtype=torch.int32))
    for count in (-9, 5):
        with pytest.raises(ValueError, match=f"counts: wanted rows 0 .. 4, got {count}"):
            w4gemm.masked_linear(x.expand(2, 4, 64).contiguous(), stack, torch.tensor([count, 0], dtype=torch.int32))
    with pytest.raises(ValueError, match="row_of_choice: wanted rows at most 3, got 4"):
        w4gemm.combine(x, torch.tensor([[0, 4]], dtype=torch.int32), torch.rand(1, 2))


def test_a_module_is_no_activation():
    """A module that is set as an attribute becomes a child, and the property of that name is not asked."""
    w = w4gemm.QuantizedWeight.stack([w4gemm.quantize(torch.randn(64, 64), "int4_g32")] * 2)
    with pytest.raises(TypeError, match="activation: wanted a string, got SiLU"):
        w4gemm.W4Experts(w, w, activation=torch.nn.SiLU())


def test_zero_points_for_a_format_without():
    with pytest.raises(ValueError, match="zeros: int4_g32 has none, got int"):
        w4gemm.QuantizedWeight.from_codes("int4_g32", torch.zeros(8, 32).byte(), torch.ones(8, 1).bfloat16(), 3)
