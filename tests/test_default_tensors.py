"""PyTorch's default device and dtype, which scripts and engines set, change nothing of what w4gemm makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import w4gemm
from tiny_model import write_gguf
from w4gemm.checkpoints.gguf.file import GGUFFile
from w4gemm.kernels.cpu import kernel
from w4gemm.tuning.random_weight import random_weight

FORMATS = ("int4_g32", "int4_g32_zint", "int4_g64_zfloat_fp32", "int4_g128_e4m3", "mxfp4", "nvfp4", "nf4", "q4_k")


@pytest.fixture
def bf16():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("format", [*FORMATS, w4gemm.WeightFormat(64, element=w4gemm.codebook(range(-120, 136, 16)))])
def test_the_default_dtype_changes_no_code(format, bf16):
    dense = torch.randn(256, 256, dtype=torch.float32)
    actual = w4gemm.quantize(dense, format)
    torch.set_default_dtype(torch.float32)
    expected = w4gemm.quantize(dense, format)
    assert all(torch.equal(a, b) for a, b in zip(actual.tensors, expected.tensors, strict=True))


@pytest.mark.parametrize("format", FORMATS)
def test_the_default_dtype_changes_no_random_weight(format, bf16):
    """The tuner multiplies them in a caller's process."""
    dtypes = [t.dtype for t in random_weight(w4gemm.WeightFormat.parse(format), 64, 256).tensors]
    torch.set_default_dtype(torch.float32)
    assert dtypes == [t.dtype for t in random_weight(w4gemm.WeightFormat.parse(format), 64, 256).tensors]


def test_a_state_dict_made_on_the_meta_device_says_its_format():
    layer = w4gemm.W4Linear.from_linear(torch.nn.Linear(64, 32), "int4_g32")
    with torch.device("meta"):
        state = layer.state_dict()
        other = w4gemm.W4Linear(64, 32, format="int4_g32")
    assert bytes(state["_extra_state"].tolist()) == b"int4_g32"
    other.load_state_dict(state, assign=True)
    assert torch.equal(other.weight.dequantize(), layer.weight.dequantize())


def test_a_gguf_file_is_read_to_the_device_that_is_named(tmp_path: Path):
    pytest.importorskip("gguf")
    from w4gemm.checkpoints import open_checkpoint

    path = write_gguf(tmp_path / "tiny.gguf")
    name = "model.layers.0.self_attn.q_proj"
    expected, dense = open_checkpoint(path).weight(name), GGUFFile(path).dense("token_embd.weight")
    with torch.device("meta"):
        actual, other = open_checkpoint(path).weight(name), GGUFFile(path).dense("token_embd.weight")
    assert torch.equal(actual.dequantize(), expected.dequantize()) and torch.equal(other, dense)


def test_the_default_device_does_not_hide_fbgemm():
    """The first call's finding is kept."""
    kernel.has_code_sums.cache_clear()
    expected = kernel.has_code_sums(8)
    kernel.has_code_sums.cache_clear()
    with torch.device("meta"):
        assert kernel.has_code_sums(8) == expected
