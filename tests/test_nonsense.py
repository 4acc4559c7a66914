"""Nonsense calls of the public functions: refused in a sentence that names the argument."""

from __future__ import annotations

import random
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import w4gemm
from fuzz import nonsense
from w4gemm.integrations import transformers as models
from w4gemm.integrations.data_parallel import leave_out_packed
from w4gemm.integrations.decoder import decode_by_graph
from w4gemm.integrations.transformers.layers import quantize_layers, summarize

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


def test_tensors_that_processes_share():
    """PyTorch's own error was of an operator that gets mixed tensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight, w = torch.randn(64, 64), w4gemm.quantize(torch.randn(64, 64)).repack()
        shared, layer = distribute_tensor(weight, mesh, [Shard(0)]), torch.nn.Linear(64, 64)
        layer.weight = torch.nn.Parameter(shared)
        calls = {
            "weight": (lambda: w4gemm.quantize(shared), lambda: w4gemm.W4Linear.from_linear(layer)),
            "0: weight": (lambda: quantize_layers(torch.nn.Sequential(layer)),),
            "x": (lambda: w4gemm.linear(shared, w), lambda: w4gemm.W4Linear.from_weight(w)(shared)),
            "bias": (lambda: w4gemm.W4Linear.from_weight(w, shared[0]), lambda: w4gemm.linear(weight, w, shared[0])),
        }
        for name, each in calls.items():
            for call in each:
                said = f"{name}: wanted a tensor of this process, got a DTensor; {name[-6:].strip(': ')}.to_local() is"
                with pytest.raises(TypeError, match=re.escape(said)):
                    call()
        assert torch.equal(w4gemm.quantize(shared.full_tensor()).dequantize(), w4gemm.quantize(weight).dequantize())
    finally:
        dist.destroy_process_group()


def test_a_trace_of_torch_fx():
    layers = torch.nn.Sequential(w4gemm.W4Linear.from_linear(torch.nn.Linear(64, 64)), torch.nn.GELU())
    with pytest.raises(TypeError, match=r"x: wanted a tensor \(..., k\), got a Proxy of torch.fx, whose Tracer has to"):
        torch.fx.symbolic_trace(layers)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return isinstance(m, w4gemm.W4Linear) or super().is_leaf_module(m, module_qualified_name)

    x = torch.randn(3, 64)
    traced = torch.fx.GraphModule(layers, Tracer().trace(layers))
    assert torch.equal(traced(x), layers(x))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: summarize("MODEL"), TypeError, "model: wanted a torch.nn.Module, got str"),
        (lambda: leave_out_packed(None), TypeError, "model: wanted a torch.nn.Module, got NoneType"),
        (
            lambda: models.describe(torch.nn.Sequential()),
            TypeError,
            "model: wanted a model of transformers, got Sequential",
        ),
        (
            lambda: models.dequantize_embedding(torch.nn.Sequential()),
            TypeError,
            "model: wanted a model of transformers, got",
        ),
        (lambda: decode_by_graph("MODEL"), TypeError, "model: wanted a model of transformers, got str"),
        (
            lambda: models.load("MODEL", progress="tqdm"),
            TypeError,
            "progress: wanted a function of two ints and a string or",
        ),
        (
            lambda: models.W4GemmConfig(modules=["mlp"]),
            TypeError,
            "modules: wanted a dict of strings or None, got ['mlp']",
        ),
        (
            lambda: models.W4GemmConfig(tied={"embedding": 3}),
            TypeError,
            "tied: wanted a dict of strings or None, got {'e",
        ),
        (lambda: w4gemm.W4Embedding(48, 64, 48), ValueError, "padding_idx: wanted an int of at most 47, got 48"),
    ],
)
def test_arguments_around_models(call, error, words):
    """They ended in the words of an AttributeError, or were taken."""
    pytest.importorskip("transformers")
    with pytest.raises(error, match=re.escape(words)):
        call()


def test_a_wrong_argument_leaves_the_model_as_it_was():
    """A progress that is no function was called once the first layer was quantized."""
    for wrong in ({"progress": 3}, {"search": "yes"}):
        layers = torch.nn.Sequential(torch.nn.Linear(64, 64))
        with pytest.raises(TypeError, match=f"^{next(iter(wrong))}: wanted"):
            quantize_layers(layers, **wrong)
        assert type(layers[0]) is torch.nn.Linear


def test_the_name_of_a_weight_to_skip():
    with pytest.raises(ValueError, match="got 'mlp.down.weight'; nearest is 'down'"):
        quantize_layers(torch.nn.ModuleDict({"down": torch.nn.Linear(64, 64)}), skip=("mlp.down.weight",))


def test_padding_from_the_last_row_on():
    assert w4gemm.W4Embedding(48, 64, -1).padding_idx == torch.nn.Embedding(48, 64, -1).padding_idx == 47
