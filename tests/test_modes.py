"""Modes of PyTorch around a call, told by private functions of PyTorch that a version may lack."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import w4gemm
from conformance.cases import assert_close, random_weight
from w4gemm.api import modes

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


def test_a_build_without_cuda_has_no_private_name_of_the_current_gpu(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_getDevice", raising=False)
    spec = importlib.util.spec_from_file_location("modes_of_another_pytorch", modes.__file__)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    assert other.current_gpu is torch.cuda.current_device
