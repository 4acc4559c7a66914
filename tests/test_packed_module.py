"""Buffers of a layer that others move, convert or replace: PyTorch, DistributedDataParallel, accelerate."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from two_processes import in_two_processes
from w4gemm import QuantizedWeight, W4Experts, W4Linear, linear, quantize
from w4gemm.api.experts import W4GroupedLinear
from w4gemm.integrations.data_parallel import leave_out_packed

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))


def layer(format: str = "int4_g32_zint", seed: int = 0, perm: bool = False) -> W4Linear:
    numbers = torch.randn(48, 65, generator=torch.Generator().manual_seed(seed))
    w = quantize(numbers[:, 1:], format)
    if perm:
        codes, scales, zeros = w.parts()[:3]
        g_idx = torch.arange(64).roll(seed + 1) // 32
        w = QuantizedWeight.from_codes(w.format, codes, scales, zeros, g_idx=g_idx)
    return W4Linear.from_weight(w, numbers[:, 0].contiguous())


@pytest.mark.parametrize("name", ["int4_g32_zint", "int4_g32_e4m3", "nvfp4"])
def test_type_converts_what_half_does(name):
    a, b, state = layer(name), layer(name), layer(name).state_dict()
    a.type(torch.float16)
    b.half()
    assert a.dtype == b.dtype == a.bias.dtype == torch.float16
    assert torch.equal(a(X.half()), b(X.half()))
    assert all(torch.equal(a.state_dict()[key], t) for key, t in state.items() if key != "bias")


def test_what_cannot_be_converted_stays_as_it_was():
    one = layer()
    expected = one(X)

    def refused(t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, torch.nn.Parameter):
            raise RuntimeError("no memory")
        return t.half()

    with pytest.raises(TypeError, match="dtype: wanted torch.float32 or .*, got torch.int32"):
        one.type(torch.int32)
    with pytest.raises(RuntimeError, match="no memory"):
        one._apply(refused)
    assert one.dtype == torch.float32 and torch.equal(one(X), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_a_dtype_that_no_product_takes_beside_a_bias(dtype):
    """Once the layer took it, and then refused every x."""
    one, close = layer(), "; nearest is torch.float32" if dtype == torch.float64 else ""
    expected, model = one(X), torch.nn.Sequential(one)
    message = f"dtype: wanted torch.float32 or torch.float16 or torch.bfloat16, got {dtype}{close}$"
    for convert in (one.to, model.to, one.type, lambda dtype: setattr(one, "dtype", dtype)):
        with pytest.raises(TypeError, match=message):
            convert(dtype)
    with pytest.raises(TypeError, match=message):
        W4Linear.from_weight(one.weight, one.bias, dtype=dtype)
    assert one.dtype == one.bias.dtype == torch.float32 and torch.equal(one(X), expected)


@pytest.mark.parametrize("perm", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_functional_call_multiplies_the_buffers_it_is_given(perm, compiled):
    one, other = layer(perm=perm), layer(seed=7, perm=perm)
    own, expected = one(X), other(X)

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(one, tensors, (x,))

    tensors = {**dict(other.named_buffers()), "bias": other.bias}
    for _ in range(2):
        got = torch.compile(call, backend="eager")(X) if compiled else call(X)
        torch.testing.assert_close(got, expected)
        assert torch.equal(one(X), own), "the layer's own weight is back"
    with pytest.raises((ValueError, RuntimeError), match=r"packed0: wanted torch.uint8 \(.*\) for this layer's"):
        torch.func.functional_call(one, {"packed0": torch.zeros(3, dtype=torch.uint8)}, (X,))
    with pytest.raises(AttributeError, match="^codes: it cannot be set; .* functional_call named_parameters and named"):
        torch.func.functional_call(one, one.state_dict(), (X,))


def test_buffers_that_are_replaced_are_the_weight():
    one, other = layer(), layer(seed=7)
    for name, t in other.named_buffers():
        one._buffers[name] = t.clone()
    same = copy.deepcopy(one)
    for actual in (one, same):
        assert torch.equal(actual.weight.dequantize(), other.weight.dequantize())
        assert torch.equal(actual.state_dict()["codes"], other.state_dict()["codes"])
    torch.testing.assert_close(one(X) - one.bias, other(X) - other.bias)
    assert torch.equal(one.weight.tensors[0].view(torch.uint8), one.packed0)


def test_on_the_meta_device_there_are_shapes():
    for dtype in (torch.float32, torch.bfloat16):
        one = layer(perm=True).to("meta", dtype)
        for x in (X, X.view(3, 1, 64), X.requires_grad_()):
            for _ in range(2):
                y = one(x.to("meta", dtype))
                assert y.shape == (*x.shape[:-1], 48) and y.dtype == dtype and y.is_meta


# --- several processes ------------------------------------------------------------------------------------------------


def trained(rank: int) -> None:
    """Two processes with other numbers each: the first one's are the model, and both train alike."""
    torch.manual_seed(rank)
    stack = QuantizedWeight.stack([quantize(torch.randn(32, 64), "int4_g32_e4m3") for _ in range(2)])
    experts = W4GroupedLinear.from_weight(stack, expert_scale=torch.rand(2))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), layer(seed=rank, perm=True))
    model.append(torch.nn.ModuleDict({"experts": experts}))
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.layers[0](x)
            return self.layers[1](hidden).sum() + experts(hidden, offsets).sum()

    def everyones(t: torch.Tensor) -> list[torch.Tensor]:
        actual = [torch.empty_like(t) for _ in range(2)]
        torch.distributed.all_gather(actual, t)
        return actual

    left_out = leave_out_packed(torch.nn.Sequential(torch.nn.Linear(64, 64), layer(seed=rank)))
    own = left_out[1].weight.dequantize()
    wrapped = torch.nn.parallel.DistributedDataParallel(left_out)
    wrapped(X + rank).sum().backward()
    assert torch.equal(left_out[1].weight.dequantize(), own) and not torch.equal(*everyones(own))
    assert torch.equal(*everyones(left_out[0].weight.detach())) and torch.equal(*everyones(left_out[0].weight.grad))

    wrapped = torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        wrapped(X + rank).backward()
        optimizer.step()
        if step == 0:
            assert torch.equal(model[1].weight.dequantize(), layer(perm=True).weight.dequantize())
    for t in (
        model[0].weight.detach(),
        model[1].weight.dequantize(),
        experts.weight.dequantize(),
        experts.expert_scale,
    ):
        assert torch.equal(*everyones(t))


def test_distributed_data_parallel() -> None:
    in_two_processes(trained)
    with pytest.raises(ValueError, match="model: wanted one with quantized layers, got Linear without"):
        leave_out_packed(torch.nn.Linear(2, 2))


def test_what_was_left_out_before_stays_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), layer())
    model._ddp_params_and_buffers_to_ignore = {"0.bias"}
    left_out = leave_out_packed(model)._ddp_params_and_buffers_to_ignore
    assert {"0.bias"} | {f"1.{name}" for name, _ in model[1].named_buffers()} <= left_out
    assert {name for name, _ in model.named_parameters()} & left_out == {"0.bias"}


# --- accelerate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_offload(offload: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), layer())
    expected = model(X).detach()
    tensors = {"offload_dir": tmp_path} if offload == "disk_offload" else {}
    getattr(accelerate, offload)(model, execution_device="cpu", **tensors)
    for _ in range(2):
        assert torch.equal(model(X), expected)


def test_a_checkpoint_is_loaded_and_then_dispatched(tmp_path: Path) -> None:
    """The way that docs/transformers.md names, because accelerate looks for parameters by the checkpoint's names."""
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import load_file, save_file

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), layer())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with accelerate.init_empty_weights():
        empty = torch.nn.Sequential(torch.nn.Linear(64, 64), W4Linear(64, 48, format="int4_g32_zint"))
    empty.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    dispatched = accelerate.dispatch_model(empty, device_map={"0": "cpu", "1": "cpu"}, force_hooks=True)
    assert torch.equal(dispatched(X), model(X))


def test_scales_that_come_as_parameters_stay_buffers() -> None:
    scale = torch.rand(64) + 0.5
    layer = W4Linear.from_linear(torch.nn.Linear(64, 32))
    layer.pre_quant_scale = scale
    expected = layer(X)
    layer.pre_quant_scale = torch.nn.Parameter(scale)
    assert "pre_quant_scale" in dict(layer.named_buffers()) and torch.equal(layer(X), expected)
    state = {name: torch.nn.Parameter(t) if name == "pre_quant_scale" else t for name, t in layer.state_dict().items()}
    other = W4Linear.from_linear(torch.nn.Linear(64, 32))
    other.load_state_dict(state, assign=True)
    assert torch.equal(other(X), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_scale_of_experts_is_not_converted(dtype: torch.dtype) -> None:
    scale = torch.tensor([1.0, 2.0, 3.0])
    stack = QuantizedWeight.stack([quantize(torch.randn(32, 64)) for _ in range(3)])
    layer = W4GroupedLinear.from_weight(stack, expert_scale=scale)
    layer.type(dtype)
    assert layer.expert_scale is not None and torch.equal(layer.expert_scale, scale) and layer.dtype == dtype


def test_a_memory_format_changes_no_packed_tensor() -> None:
    stack = QuantizedWeight.stack([quantize(torch.randn(32, 64)) for _ in range(4)])
    layer = W4GroupedLinear.from_weight(stack)
    offsets = torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32)
    expected = layer(X, offsets)
    assert torch.equal(layer.to(memory_format=torch.channels_last)(X, offsets), expected)


@pytest.mark.parametrize("x", [torch.randn(3, 1), torch.randn(()), torch.randn(3, 63)], ids=lambda x: str(x.shape))
def test_a_scale_of_x_broadcasts_nothing(x: torch.Tensor) -> None:
    layer = W4Linear.from_linear(torch.nn.Linear(64, 32))
    layer.pre_quant_scale = torch.rand(64)
    with pytest.raises(ValueError, match=r"x: wanted shape \(\.\.\., k\) with k 64 like w, got"):
        layer(x)
    layer.weight = quantize(torch.randn(32, 128))
    with pytest.raises(ValueError, match=r"pre_quant_scale: wanted shape \(128,\), k of the weight, got \(64,\)"):
        layer(torch.randn(3, 128))


def test_settings_of_experts_do_something_or_are_refused() -> None:
    stack = QuantizedWeight.stack([quantize(torch.randn(64, 64)) for _ in range(3)])
    layer = W4GroupedLinear.from_weight(stack)
    with pytest.raises(TypeError, match="batch_invariant: wanted a bool, got str 'yes'"):
        layer.batch_invariant = "yes"
    mixture = W4Experts(stack, QuantizedWeight.stack([quantize(torch.randn(64, 32)) for _ in range(3)]))
    assert mixture.activations is None
    mixture.activations = "fp8"
    assert (mixture.gate_up.activations, mixture.down.activations, mixture.activations) == ("fp8",) * 3
    mixture.down.activations = None
    with pytest.raises(ValueError, match="activations: wanted one for both products, got 'fp8' of gate_up, None of"):
        _ = mixture.activations


def called_meanwhile(
    call: Callable[[], torch.Tensor], change: Callable[[int], object]
) -> list[torch.Tensor | Exception]:
    """Return what three threads get of a layer while it is changed, again and again, for half a second."""
    results: list[torch.Tensor | Exception] = []
    done, interval = threading.Event(), sys.getswitchinterval()

    def run() -> None:
        while not done.is_set():
            try:
                results.append(call())
            except Exception as e:
                results.append(e)

    threads = [threading.Thread(target=run) for _ in range(3)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        end, i = time.monotonic() + 0.5, 0
        while time.monotonic() < end or not results:
            change(i := i + 1)
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    return results


def test_a_weight_that_is_replaced_while_other_threads_call():
    """Each result is one weight's: neither old tensors in the new format, nor buffers of both, nor an error."""
    dense, x = torch.randn(64, 128), torch.randn(2, 128)
    weights = [quantize(dense, format).repack() for format in ("int4_g128", "e2m1_g128_fp16", "int4_g32_zint")]
    expected, layer = [linear(x, w) for w in weights], W4Linear.from_weight(weights[0])
    results = called_meanwhile(lambda: layer(x), lambda i: setattr(layer, "weight", weights[i % 3]))
    wrong = [y for y in results if isinstance(y, Exception) or not any(torch.equal(y, d) for d in expected)]
    assert not wrong, f"{len(wrong)} of {len(results)}, such as {wrong[0]!r}"


def test_experts_keep_their_scales_while_they_are_moved():
    x, offsets = torch.randn(4, 128), torch.tensor([0, 2, 4], dtype=torch.int32)
    stack = QuantizedWeight.stack([quantize(torch.randn(64, 128)) for _ in range(2)])
    layer = W4GroupedLinear(stack, expert_scale=torch.tensor([2.0, 3.0]))
    expected = [layer.to(dtype)(x, offsets) for dtype in (torch.bfloat16, torch.float32)]
    dtypes = torch.bfloat16, torch.float32
    results = called_meanwhile(lambda: layer(x, offsets), lambda i: layer.to(dtypes[i % 2]))
    wrong = [y for y in results if isinstance(y, Exception) or not any(torch.equal(y, d) for d in expected)]
    assert not wrong, f"{len(wrong)} of {len(results)}, such as {wrong[0]!r}"
