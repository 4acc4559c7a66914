"""Modes of PyTorch around a call, told by private functions of PyTorch that a version may lack."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import w4gemm
from conformance.cases import assert_close, random_weight
from w4gemm.api import modes, update

PRIVATE = (
    (torch._C, "_get_tracing_state"),
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_len_torch_function_stack"),
    (torch._C._functorch, "peek_interpreter_stack"),
    (torch.autograd.forward_ad, "_current_level"),
)


@pytest.mark.parametrize("where, name", PRIVATE, ids=[name for _, name in PRIVATE])
def test_a_pytorch_without_a_private_name_takes_the_dispatcher(monkeypatch, where, name):
    x, w = torch.randn(3, 64), random_weight(w4gemm.WeightFormat(32), 16, 64).repack()
    layer = w4gemm.W4Linear.from_weight(w)
    assert modes.is_eager(x), "a PyTorch that is supported has all names"
    spec = importlib.util.spec_from_file_location("modes_of_another_pytorch", modes.__file__)
    other = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.delattr(where, name)
        spec.loader.exec_module(other)
        assert other.is_watched() and not other.is_eager(x)
    monkeypatch.setattr(modes, "is_watched", other.is_watched)
    for d in (w4gemm.linear(x, w), layer(x)):
        assert_close(d, x, w)


def _negated(*shape: int) -> torch.Tensor:
    """Return numbers as the imaginary part of a conjugate has them: their memory holds others."""
    return torch._neg_view(torch.randn(shape))


@pytest.mark.parametrize("name", ["x", "bias", "residual", "alpha"])
def test_numbers_that_pytorch_negates_when_it_reads_them(name):
    w = random_weight(w4gemm.WeightFormat(32), 16, 64).repack()
    arguments = {
        "x": torch.randn(3, 64),
        name: _negated(*{"x": (3, 64), "bias": (16,), "residual": (3, 16)}.get(name, (1,))),
    }
    plain = {key: t.resolve_neg() for key, t in arguments.items()}
    expected = w4gemm.linear(w=w, **plain)
    for _ in range(2):  # cold and warm
        assert torch.equal(w4gemm.linear(w=w, **arguments), expected)
    layer = w4gemm.W4Linear.from_weight(w)
    layer(plain["x"])
    assert torch.equal(layer(arguments["x"]), layer(plain["x"]))


def test_negated_numbers_of_experts_and_before_quantization():
    x, offsets = _negated(4, 64), torch.tensor([0, 1, 4], dtype=torch.int32)
    stack = w4gemm.QuantizedWeight.stack([random_weight(w4gemm.WeightFormat(32), 16, 64) for _ in range(2)]).repack()
    options = {"expert_scale": _negated(2)}
    expected = w4gemm.grouped_linear(
        x.resolve_neg(), stack, offsets, expert_scale=options["expert_scale"].resolve_neg()
    )
    assert torch.equal(w4gemm.grouped_linear(x, stack, offsets, **options), expected)
    for t, own in zip(w4gemm.quantize_activations(x), w4gemm.quantize_activations(x.resolve_neg()), strict=True):
        assert torch.equal(t, own)


def test_an_update_with_negated_numbers_is_not_the_kernels(monkeypatch):
    monkeypatch.setattr(update, "launcher", None)
    w, new = (
        random_weight(w4gemm.WeightFormat(32), 16, 128).repack("mma16"),
        torch._neg_view(torch.randn(16, 128).bfloat16()),
    )
    w4gemm.update_(w, new)
    assert torch.equal(w.dequantize(), w4gemm.quantize(new.resolve_neg(), w.format).dequantize())


def test_memory_of_negated_numbers_is_neither_written_nor_handed_on():
    w = random_weight(w4gemm.WeightFormat(32), 16, 64).repack()
    with pytest.raises(ValueError, match="out: wanted a tensor of the numbers in its memory, .* copy from it"):
        w4gemm.linear(torch.randn(3, 64), w, out=_negated(3, 16))
    gemm = w4gemm.MixedGemm("int4_g32", torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"a: wanted a tensor of the numbers .* use a.resolve_neg\(\)"):
        gemm.run(_negated(3, 64), w.repack(gemm.layout).tensors, torch.empty(3, 16), n=16)


def test_a_build_without_cuda_has_no_private_name_of_the_current_gpu(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_getDevice", raising=False)
    spec = importlib.util.spec_from_file_location("modes_of_another_pytorch", modes.__file__)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    assert other.current_gpu is torch.cuda.current_device
