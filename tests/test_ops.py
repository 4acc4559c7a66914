"""The boundary: what linear takes, what it refuses and how, and PyTorch around it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import w4gemm
from conformance.cases import assert_close, random_weight, runs_beside_others
from w4gemm import W4Linear, choice, linear
from w4gemm.api import arguments, product
from w4gemm.api.operators import flat_epilogue, flat_weight
from w4gemm.core.activation import ACTIVATIONS
from w4gemm.core.epilogue import Epilogue, EpilogueOperands
from w4gemm.core.errors import UnsupportedError
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem

ROOT = Path(__file__).resolve().parent.parent
N, K = 130, 96
FORMAT = WeightFormat.parse("int4_g32_zint_fp16")


@pytest.fixture
def w(device) -> w4gemm.QuantizedWeight:
    return random_weight(FORMAT, N, K).to(device).repack()


@pytest.fixture
def x(device, dtype) -> torch.Tensor:
    return torch.randn(2, 3, K, generator=torch.Generator().manual_seed(0)).to(device, dtype)


@pytest.fixture
def bias(device, dtype) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def flat(rows, w, bias=None, activation=None, out_dtype=None, **operands) -> tuple:
    """Arguments of ``torch.ops.w4gemm.linear``."""
    asked = EpilogueOperands(bias=bias, **operands)
    epilogue = flat_epilogue(Epilogue.of(asked, activation, out_dtype), asked)
    return rows, *flat_weight(w).values(), *epilogue.values(), "", False


# --- what it takes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(K,), (1, K), (2, 3, K), (2, 1, 3, K)])
def test_leading_dimensions(w, x, shape):
    x = x.flatten().repeat(2)[: torch.Size(shape).numel()].view(shape)
    d = linear(x, w)
    assert d.shape == (*shape[:-1], N) and d.dtype == x.dtype and d.is_contiguous()
    assert_close(d, x, w)


@pytest.mark.parametrize("shape", [(0, K), (2, 0, K), (0, 3, K)])
def test_no_tokens(w, x, bias, shape):
    empty = x.new_empty(shape)
    assert linear(empty, w, bias).shape == (*shape[:-1], N)
    out = x.new_empty((*shape[:-1], N))
    assert linear(empty, w, out=out) is out


def test_bias_and_out(w, x, bias):
    out = torch.full((2, 3, N), float("nan"), dtype=x.dtype, device=x.device)
    assert linear(x, w, bias, out=out) is out
    assert_close(out, x, w, bias)
    assert torch.equal(out, linear(x, w, bias))


def fused(x, w, activation="gelu") -> dict:
    """One of each that an epilogue has."""
    columns = Epilogue(activation).columns(w.n)
    residual = torch.randn(*x.shape[:-1], columns, generator=torch.Generator().manual_seed(2)).to(x.device)
    return {"alpha": 1.5, "activation": activation, "residual": residual, "out_dtype": torch.float32}


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_the_formula(w, x, activation):
    """Equal to PyTorch's functions one after the other."""
    functional = torch.nn.functional
    y = 1.5 * (x.double() @ w.dequantize().double().T) - 1
    gate, up = y[..., ::2], y[..., 1::2]
    expected = {
        None: y,
        "relu": functional.relu(y),
        "relu2": functional.relu(y) ** 2,
        "gelu": functional.gelu(y),
        "gelu_tanh": functional.gelu(y, approximate="tanh"),
        "silu": functional.silu(y),
        "silu_mul": functional.silu(gate) * up,
        "gelu_mul": functional.gelu(gate) * up,
        "gelu_tanh_mul": functional.gelu(gate, approximate="tanh") * up,
        "swiglu_oai": gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1),
        "situ_mul": 100 * torch.tanh(gate / 4) * torch.sigmoid(gate) * torch.tanh(up / 25),
    }[activation]
    options = fused(x, w, activation)
    got = linear(x, w, -torch.ones(N, dtype=x.dtype, device=x.device), **options)
    # a GPU may round the weights to x's dtype
    tolerance = 1e-5 if x.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), expected + options["residual"], atol=tolerance, rtol=0)


def test_neutral_epilogue(w, x, bias):
    expected = linear(x, w, bias)
    zeros, one = torch.zeros_like(expected), torch.ones(1, device=x.device)
    for options in ({"alpha": 1}, {"alpha": one}, {"alpha": one[0]}, {"residual": zeros}, {"out_dtype": x.dtype}):
        assert torch.equal(linear(x, w, bias, **options), expected)


def test_over_the_residual(w, x, bias):
    options = fused(x, w)
    expected, out = linear(x, w, bias, **options), options["residual"]
    assert linear(x, w, bias, out=out, **options) is out
    assert torch.equal(out, expected)
    empty = linear(x[:0], w, **(options | {"residual": out[:0]}))
    assert empty.shape == (0, 3, N) and empty.dtype == torch.float32


def test_one_column():
    """k = 1: the stride of the last dimension says nothing."""
    w = random_weight(FORMAT, 5, 1)
    x = torch.randn(1, 7).T
    assert torch.equal(linear(x, w), x @ w.dequantize().T)


def test_config_as_object_and_string(w, x):
    problem = GemmProblem(6, N, K, x.dtype, FORMAT, w.layout, device=Device.of(x.device))
    _, kernel, config, _ = choice.explain(problem).candidates[0]
    expected = linear(x, w)
    for options in (config, str(config), f"{kernel}/{config}"):
        assert torch.equal(linear(x, w, config=options), expected)


# --- what it refuses -------------------------------------------------------------------------------------------------


def refused(error: type[Exception], *parts: str, **arguments) -> None:
    x, w = arguments.pop("x"), arguments.pop("w")
    with pytest.raises(error) as e:
        linear(x, w, **arguments)
    for part in parts:
        assert part in str(e.value), str(e.value)


def test_bad_x(w, x):
    refused(TypeError, "x: wanted a tensor", "list", x=[1.0], w=w)
    refused(ValueError, "x: wanted shape (..., k) with k 96", "(2, 3, 95)", x=x[..., :-1], w=w)
    refused(ValueError, "x: wanted shape (..., k) with k 96", "()", x=x[0, 0, 0], w=w)
    refused(TypeError, "x: wanted", "float16", "bfloat16", "got torch.float64", x=x.double(), w=w)
    refused(TypeError, "x: wanted", "got torch.int64", x=x.long(), w=w)
    refused(ValueError, "x: wanted w's device", "got meta", x=x.bfloat16().to("meta"), w=w)


def test_bad_w(w, x):
    dense = w.dequantize(x.dtype)
    refused(TypeError, "w: wanted a QuantizedWeight, got Tensor", "w4gemm.quantize", x=x, w=dense)
    refused(TypeError, "w: wanted a QuantizedWeight, got NoneType", x=x, w=None)


def test_layout_that_nothing_reads(w, x):
    other = "mma16" if x.device.type == "cpu" else "canonical"
    parts = ("no kernel can run", "cpu_mixed_gemm:", "sm90_mixed_gemm:", "w.repack()")
    refused(UnsupportedError, *parts, x=x, w=w.repack(other))


def test_bad_bias(w, x, bias):
    refused(TypeError, "bias: wanted a tensor", "list", x=x, w=w, bias=[0.0])
    refused(TypeError, "bias: wanted", "like x, got torch.float64", x=x, w=w, bias=bias.double())
    refused(ValueError, "bias: wanted shape (130,)", "(1, 130)", x=x, w=w, bias=bias[None])
    refused(ValueError, "bias: wanted shape (130,)", "(129,)", x=x, w=w, bias=bias[1:])
    refused(ValueError, "bias: wanted it contiguous", "strides (2,)", x=x, w=w, bias=bias.repeat(2)[::2])
    refused(ValueError, "bias: wanted x's device", "got meta", x=x, w=w, bias=bias.to("meta"))


def test_bad_out(w, x, bias):
    good = x.new_empty(2, 3, N)
    refused(TypeError, "out: wanted a tensor", "str", x=x, w=w, out="here")
    refused(TypeError, "out: wanted", "got torch.float64", x=x, w=w, out=good.double())
    refused(ValueError, "out: wanted shape (2, 3, 130), got (6, 130)", x=x, w=w, out=good.view(6, N))
    refused(ValueError, "out: wanted it contiguous", x=x, w=w, out=x.new_empty(2, 3, 2 * N)[..., ::2])
    refused(ValueError, "out: wanted x's device", "got meta", x=x, w=w, out=good.to("meta"))
    late = x.new_empty(good.numel() + 1)[1:].view(2, 3, N)
    refused(ValueError, f"out: wanted its data at a multiple of 16 bytes, got {x.itemsize} past", x=x, w=w, out=late)
    with pytest.raises(ValueError, match="out: wanted a tensor without requires_grad"):
        linear(x, w, out=good.clone().requires_grad_())
    memory = x.new_empty(6 * (N + K))
    inside = memory[: 6 * K].view(2, 3, K)
    overlapping = memory[4 * K : 4 * K + 6 * N].view(2, 3, N)
    refused(ValueError, "out: wanted memory of its own", "shared with x", x=inside, w=w, out=overlapping)
    refused(ValueError, "shared with bias", x=x, w=w, bias=memory[:N], out=memory[: 6 * N].view(2, 3, N))
    for i, t in enumerate(w.tensors):
        memory_of_w = torch.empty(4096 + t.nbytes, dtype=torch.uint8, device=x.device)
        inside_w = memory_of_w[1024 : 1024 + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
        other = replace(w, tensors=(*w.tensors[:i], inside_w, *w.tensors[i + 1 :]))
        out = memory_of_w[: good.nbytes].view(x.dtype).view(2, 3, N)
        refused(ValueError, "out: wanted memory of its own", "shared with w", x=x, w=other, out=out)
    beside = memory[6 * K :].view(2, 3, N)
    assert linear(inside.copy_(x), w, out=beside) is beside


def test_bad_epilogue(w, x, bias):
    residual = x.new_empty(2, 3, N)
    refused(TypeError, "alpha: wanted a number", "bool", x=x, w=w, alpha=True)
    refused(TypeError, "alpha: wanted a number", "str", x=x, w=w, alpha="1")
    refused(ValueError, "alpha: wanted a number of at most 1.8e308", "larger", x=x, w=w, alpha=10**400)
    for bad in (torch.ones(2), torch.ones((), dtype=torch.float64), torch.ones((), device="meta")):
        refused(ValueError, "alpha: wanted a number or a torch.float32 tensor of one", x=x, w=w, alpha=bad)
    refused(ValueError, "activation: wanted one of relu, relu2, gelu,", "'tanh'", x=x, w=w, activation="tanh")
    refused(ValueError, "activation: wanted one of", "relu", x=x, w=w, activation=torch.relu)
    refused(TypeError, "out_dtype: wanted torch.float32", "torch.int8", x=x, w=w, out_dtype=torch.int8)
    refused(TypeError, "residual: wanted a tensor", "float", x=x, w=w, residual=1.0)
    refused(TypeError, "residual: wanted", "like the result, got torch.float64", x=x, w=w, residual=residual.double())
    refused(TypeError, "like the result", x=x, w=w, residual=residual, out_dtype=torch.float16)
    refused(ValueError, "residual: wanted shape (2, 3, 130)", "(6, 130)", x=x, w=w, residual=residual.view(6, N))
    refused(ValueError, "residual: wanted shape (2, 3, 65)", x=x, w=w, residual=residual, activation="silu_mul")
    refused(ValueError, "residual: wanted x's device", "got meta", x=x, w=w, residual=residual.to("meta"))
    refused(ValueError, "residual: wanted it contiguous", x=x, w=w, residual=x.new_empty(3, 2, N).transpose(0, 1))
    half = {"out_dtype": torch.float16, "out": residual}
    refused(TypeError, "out: wanted torch.float16 as out_dtype", x=x, w=w, **half)
    refused(ValueError, "out: wanted shape (2, 3, 65)", x=x, w=w, out=residual, activation="silu_mul")
    memory = x.new_empty(12 * N)
    options = {"residual": memory[: 6 * N].view(2, 3, N), "out": memory[4 * N : 10 * N].view(2, 3, N)}
    refused(ValueError, "out: wanted memory of its own or all of the residual's", x=x, w=w, **options)


def test_gate_and_up_come_in_pairs(x):
    odd = random_weight(FORMAT, 5, K).to(x.device).repack()
    refused(ValueError, "activation: silu_mul wants an even n", "got n 5", x=x, w=odd, activation="silu_mul")


def test_bad_config(w, x):
    refused(TypeError, "config: wanted a GemmConfig", "int 3", x=x, w=w, config=3)
    refused(ValueError, "config: wanted <tile_m>x", "'16'", x=x, w=w, config="16")
    refused(ValueError, "is not legal", "nearest are", x=x, w=w, config="1x1x1_1x1x1_coop")
    refused(ValueError, "kernel: wanted one of", "'no'", x=x, w=w, config="no/16x128x128_1x1x1_coop")


# --- PyTorch around it -----------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_one_operator(w, x):
    with Recorder() as recorder:
        d = linear(x, w)
    assert recorder.names.count("w4gemm.linear.default") == 1
    assert torch.equal(d, linear(x, w))


def test_fake_tensors(w, x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        d = linear(mode.from_tensor(x), w)
        out = torch.empty_like(d)
        assert linear(mode.from_tensor(x), w, out=out) is out
    assert d.shape == (2, 3, N) and d.dtype == x.dtype and d.device.type == x.device.type
    out = torch.empty(2, 3, N, dtype=x.dtype, device="meta")
    assert linear(x.to("meta"), w.to("meta"), out=out) is out


def test_opcheck(w, x, bias):
    rows = x.view(-1, K)
    for part, b in ((rows, None), (rows[:0], bias), (rows[::2], bias)):
        torch.library.opcheck(torch.ops.w4gemm.linear.default, flat(part, w, b))
    tracked = flat(rows.clone().requires_grad_(), w, bias.clone().requires_grad_())
    torch.library.opcheck(torch.ops.w4gemm.linear.default, tracked)
    torch.library.opcheck(torch.ops.w4gemm.linear_dx.default, (linear(rows, w), *flat_weight(w).values()))


@pytest.mark.parametrize("activation", ["gelu", "silu_mul"])
def test_opcheck_fused(w, x, bias, activation):
    rows, options = x.view(-1, K), fused(x, w, activation)
    residual = options["residual"].flatten(0, 1)
    for alpha in (1.5, torch.ones(1, device=x.device)):
        fused_args = flat(rows, w, bias, activation, torch.float32, alpha=alpha, residual=residual)
        torch.library.opcheck(torch.ops.w4gemm.linear.default, fused_args)


def test_only_a_bias_keeps_a_linear_layers_gradients():
    """The operator would drop those of every other operand."""
    values = {"activation": "relu", "alpha": "host", "out_dtype": torch.float32}
    kept = {name for name in Epilogue._fields if Epilogue(**{name: values.get(name, True)}).linear}
    assert kept == {"bias", "out_dtype"}


def test_the_operator_alone_has_no_fused_gradients(w, x):
    rows = x.view(-1, K).clone().requires_grad_()
    d = torch.ops.w4gemm.linear(*flat(rows, w, alpha=2.0))
    with pytest.raises(NotImplementedError, match="call w4gemm.linear"):
        d.sum().backward()


@pytest.mark.parametrize("activation", ["gelu", "silu_mul"])
def test_compile_fused(w, x, bias, activation):
    torch.compiler.reset()
    options = fused(x, w, activation)

    def f(x, residual, alpha):
        return linear(x.relu(), w, bias, **(options | {"residual": residual, "alpha": alpha})) * 2

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for alpha in (1.5, torch.full((), 1.5, device=x.device)):
        assert torch.equal(compiled(x, options["residual"], alpha), f(x, options["residual"], alpha))
    tracked = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(tracked, options["residual"], 1.5).sum(), tracked)
    (got,) = torch.autograd.grad(compiled(tracked, options["residual"], 1.5).sum(), tracked)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("tracked", [False, True])
def test_compile_with_a_number_that_changes(w, x, bias, tracked):
    """From its second value on, torch.compile traces the number as an unknown one: alpha takes a graph for all of them,
    and one for an int."""
    torch.compiler.reset()
    w8, x = w.repack(activations="fp8"), x.requires_grad_(tracked)
    calls = [lambda x, alpha: linear(x, w, bias, alpha=alpha, activation="silu")]
    if not tracked:
        calls += [
            lambda x, alpha: linear(x, w8, bias, alpha=alpha),
            lambda x, eps: w4gemm.quantize_activations(x, norm_weight=x[0, 0], eps=eps)[1],
        ]
    for i, call in enumerate(calls):
        backend = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(call, fullgraph=True, backend=backend)
        for number in (1.5, 2.5, 3.25, 4.5, 2):
            torch.testing.assert_close(compiled(x, number), call(x, number))
        assert i == 2 or backend.frame_count <= 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(w, x, bias, dynamic):
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def f(x, out=None):
        return linear(x.relu(), w, bias, out=out) * 2

    for tokens in (3, 1, 2):
        part = x[:, :tokens]
        assert torch.equal(f(part), linear(part.relu(), w, bias) * 2)
    out = x.new_empty(2, 3, N)
    assert torch.equal(f(x, out), 2 * linear(x.relu(), w, bias))
    assert torch.equal(out, linear(x.relu(), w, bias))


def test_compile_refuses_as_eager_does(w, x):
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"x: wanted shape \(\.\.\., k\) with k 96"):
        torch.compile(lambda x: linear(x, w), backend="aot_eager")(x[..., 1:])


@pytest.mark.gpu
def test_compile_with_inductor(w, x):
    pytest.importorskip("triton")
    torch.compiler.reset()
    if w.device.type == "cpu":
        pytest.skip("needs a C++ compiler")
    for mode in ("default", "reduce-overhead"):
        f = torch.compile(lambda x: linear(x * 2, w) + 1, fullgraph=True, mode=mode)
        for _ in range(3):
            torch.testing.assert_close(f(x), linear(x * 2, w) + 1)


def test_gradients_flow_to_x_and_bias(w, x, bias):
    x, bias = x.requires_grad_(), bias.requires_grad_()
    d = linear(x, w, bias)
    assert d.requires_grad
    g = torch.randn_like(d)
    d.backward(g)
    dense = w.dequantize(x.dtype)
    torch.testing.assert_close(x.grad, g @ dense)
    torch.testing.assert_close(bias.grad, g.sum((0, 1)))
    with torch.no_grad():
        assert not linear(x, w, bias).requires_grad
        assert torch.equal(linear(x, w, bias), d)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_gradients_of_every_argument(w, x, bias, activation):
    """The same as of the formula on a dense weight, and the same result as without gradients."""
    options = fused(x, w, activation) | {"alpha": torch.full((), 1.5, device=x.device)}
    expected_from = [t.float().requires_grad_() for t in (x, bias, options["alpha"], options["residual"])]
    tracked = [t.clone().requires_grad_() for t in (x, bias, options["alpha"], options["residual"])]
    d = linear(tracked[0], w, tracked[1], **(options | {"alpha": tracked[2], "residual": tracked[3]}))
    sums = expected_from[0] @ w.dequantize(x.dtype).float().T
    dense = Epilogue(activation).apply(sums, EpilogueOperands(expected_from[2], expected_from[1], expected_from[3]))
    g = torch.randn_like(dense)
    if activation == "relu":  # a rounding may change the side of its edge
        g[(1.5 * sums + bias).abs() < 0.1] = 0
    tolerance = 1e-5 if x.dtype == torch.float32 else 5e-2
    for got, expected in zip(
        torch.autograd.grad(d, tracked, g), torch.autograd.grad(dense, expected_from, g), strict=True
    ):
        # alpha's gradient is a sum of terms as large as g that may cancel
        assert (got.float() - expected).norm() <= tolerance * max(expected.norm(), g.norm())
    with torch.no_grad():
        torch.testing.assert_close(linear(x, w, bias, **options), d.detach())


def test_second_derivative(w, x):
    x = x.requires_grad_()
    g = torch.ones_like(linear(x, w)).requires_grad_()
    (dx,) = torch.autograd.grad(linear(x, w), x, g, create_graph=True)
    (dg,) = torch.autograd.grad(dx.sum(), g)
    torch.testing.assert_close(dg, linear(torch.ones_like(x), w))


def test_gradients_through_compile(w, x):
    torch.compiler.reset()
    x = x.requires_grad_()
    (expected,) = torch.autograd.grad(linear(x, w).square().sum(), x)
    (got,) = torch.autograd.grad(torch.compile(lambda x: linear(x, w).square().sum(), backend="aot_eager")(x), x)
    torch.testing.assert_close(got, expected)


def test_out_and_gradients_do_not_mix(w, x):
    with pytest.raises(ValueError, match="out: wanted None where a gradient is needed"):
        linear(x.requires_grad_(), w, out=x.new_empty(2, 3, N))


def test_a_forward_derivative_by_the_residual(w, x):
    options = fused(x, w)
    residual, tangent = options["residual"], torch.randn_like(options["residual"])
    d, got = torch.func.jvp(lambda r: linear(x, w, **(options | {"residual": r})), (residual,), (tangent,))
    torch.testing.assert_close(d, linear(x, w, **options))
    assert torch.equal(got, tangent.to(got.dtype))


def test_inference_mode(w, x):
    expected = linear(x, w)
    with torch.inference_mode():
        assert torch.equal(linear(x, w), expected)


# --- calls that look like one before ----------------------------------------------------------------------------------


@pytest.fixture
def warm(w, x, bias, monkeypatch) -> dict:
    """The arguments of a call, made once, so that those that look alike are not checked again."""
    monkeypatch.setattr(product, "_bound", {})
    call = {"x": x, "w": w, "bias": bias, "activation": "relu"}
    expected = linear(**call)
    assert len(product._bound) == 1
    with monkeypatch.context() as without_checks:
        without_checks.setattr(arguments, "check", None)
        assert torch.equal(linear(**call), expected)
    return call


WRONG = {
    "dtype": ({"x": torch.randn(2, 3, K, dtype=torch.float64)}, TypeError, "x: wanted"),
    "k": ({"x": torch.randn(2, 3, K + 1)}, ValueError, "x: wanted shape"),
    "device": ({"x": torch.empty(2, 3, K, device="meta")}, (TypeError, ValueError), "x: wanted"),
    "no dimension": ({"x": torch.tensor(1.0)}, ValueError, "x: wanted shape"),
    "no tensor": ({"x": [1.0] * K}, TypeError, "x: wanted a tensor"),
    "no weight": ({"w": torch.zeros(N, K)}, TypeError, "w: wanted a QuantizedWeight"),
    "bias of another length": ({"bias": torch.zeros(N + 1)}, ValueError, "bias: wanted shape"),
    "bias of another dtype": ({"bias": torch.zeros(N, dtype=torch.float64)}, TypeError, "bias: wanted"),
    "strided bias": ({"bias": torch.zeros(N, 2)[:, 0]}, ValueError, "bias: wanted it contiguous"),
    "no bias": ({"bias": 1.0}, TypeError, "bias: wanted a tensor"),
    "activation": ({"activation": "swish"}, ValueError, "activation: wanted one of"),
    "list": ({"activation": ["relu"]}, ValueError, "activation: wanted one of"),
    "no bool": ({"batch_invariant": 0}, TypeError, "batch_invariant: wanted a bool"),
    "config": ({"config": 1}, TypeError, "config: wanted"),
    "out": ({"out": torch.zeros(1)}, ValueError, "out: wanted"),
}


@pytest.mark.parametrize("wrong, error, message", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("device", ["cpu"])
def test_a_wrong_call_after_a_right_one(warm, wrong, error, message):
    with pytest.raises(error, match=message):
        linear(**(warm | wrong))


@pytest.mark.parametrize("changed", ["to_sparse", "to_mkldnn"])
def test_another_memory_layout_after_a_dense_call(changed):
    w, x = random_weight(FORMAT, N, K).repack(), torch.randn(4, K)
    layer = W4Linear.from_weight(w)
    for call in (layer, lambda x: linear(x, w)):
        call(x)
        with pytest.raises(TypeError, match="x: wanted a dense tensor, got one of layout"):
            call(getattr(x, changed)())


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused_by_its_name(layout):
    nested = torch.nested.nested_tensor([torch.randn(2, K), torch.randn(3, K)], layout=layout)
    w = random_weight(FORMAT, N, K).repack()
    for call in (lambda x: linear(x, w), W4Linear.from_weight(w), w4gemm.quantize_activations):
        with pytest.raises(TypeError, match="x: wanted a dense tensor, got a nested one"):
            call(nested)
    with pytest.raises(TypeError, match=r"weight: wanted a floating-point tensor \(n, k\), got nested torch.float32"):
        w4gemm.quantize(nested)


def test_what_looks_alike_may_differ_in_all_else(warm, device, dtype):
    """Other tensors of the same shapes, on a weight of the same kind; rows that overlap; another weight, and size."""
    looks = len(product._bound)
    w = random_weight(FORMAT, N, K, seed=7).to(device).repack()
    x, bias = torch.randn(K, 3, 2, device=device).to(dtype).permute(2, 1, 0), warm["bias"].flip(0)
    for rows in (x, torch.randn(K, device=device).to(dtype).expand(2, 3, K)):
        torch.testing.assert_close(linear(rows, w, bias, activation="relu"), linear(rows, w, bias).relu())
    assert len(product._bound) == looks + 1, "the calls without the activation"
    wide = random_weight(FORMAT, N + 2, K).to(device).repack()
    assert_close(linear(x, wide), x, wide)


def test_a_warm_call_with_gradients(warm):
    x = warm["x"].clone().requires_grad_()
    linear(**(warm | {"x": x})).sum().backward()
    assert x.grad is not None


def test_a_warm_call_finds_the_plan_that_is_right_now(warm, monkeypatch):
    seen, choose = [], choice.plan_cache.choose
    monkeypatch.setattr(
        choice.plan_cache, "choose", lambda problem, config: seen.append(problem) or choose(problem, config)
    )
    linear(**warm)
    assert not seen
    choice.forget(N, K)
    linear(**warm)
    assert len(seen) == 1 and seen[0].epilogue == Epilogue("relu", bias=True)
    choice.forget(N, K)


def test_looks_are_not_kept_without_end(w, monkeypatch):
    monkeypatch.setattr(product, "_bound", {})
    monkeypatch.setattr(product, "_MOST_BOUND", 4)
    x = torch.zeros(1, K, dtype=torch.bfloat16, device=w.device)
    for kind in itertools.product((None, "relu", "gelu", "silu"), (torch.bfloat16, torch.float16)):
        linear(x.to(kind[1]), w, activation=kind[0])
    assert len(product._bound) == 4


def test_the_time_of_warm_calls_can_be_measured():
    command = [sys.executable, "-m", "bench.warm_call", "--device", "cpu", "--calls", "1", "--rounds", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert {"linear", "layer", "layer fp8", "grouped_linear"} <= {row["case"] for row in rows}, run.stderr
    assert all(row["kind"] == "warm_call" and row["us_min"] > 0 for row in rows)


@pytest.mark.gpu
def test_a_warm_call_costs_little(request):
    """The CPU's side of a call on a GPU, which hides behind the GPU's only if it is short: 12 us, or, on a host that is
    slow at everything, nine tenths of what PyTorch's dense linear takes there."""
    if runs_beside_others(request.config):
        pytest.skip("times mean nothing beside other processes")
    w = random_weight(FORMAT, 4096, 4096).to("cuda").repack()
    dense = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    x, rounds = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16), 20
    with torch.no_grad():
        best = min(seconds_a_call(lambda: linear(x, w)) for _ in range(rounds))
        torchs = min(seconds_a_call(lambda: torch.nn.functional.linear(x, dense)) for _ in range(rounds))
    assert best < max(12e-6, 0.9 * torchs), f"{best * 1e6:.1f} us, PyTorch's dense linear {torchs * 1e6:.1f}"


def seconds_a_call(call: Callable[[], object]) -> float:
    calls = 200
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - start) / calls
    torch.cuda.synchronize()
    return seconds
