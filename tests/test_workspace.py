"""Stream-k launches, which sum through global memory, at the same time on several streams and in several graphs."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import w4gemm
from w4gemm.kernels import workspace

pytestmark = pytest.mark.gpu

CONFIGS = ("sm90_mixed_gemm/128x128x128_1x1x1_stream", "sm80_mixed_gemm/64x128x128_1x1x1_stream")
SIZE = workspace.FLAG_BYTES + 4
N, K, M = 2048, 4096, 300  # few tiles: each is cut for several CTAs


class Product(NamedTuple):
    x: torch.Tensor
    weight: w4gemm.QuantizedWeight
    d: torch.Tensor


@pytest.fixture(params=CONFIGS)
def config(request) -> str:
    return request.param


@pytest.fixture
def product(config):
    """Function that makes a product of one shape; a seed gives its numbers."""

    def make(seed: int) -> Product:
        g = torch.Generator(device="cuda").manual_seed(seed)
        w = w4gemm.quantize(torch.randn(N, K, generator=g, device="cuda")).repack("mma16")
        x = torch.randn(M, K, generator=g, device="cuda").bfloat16()
        d = w4gemm.linear(x, w, config=config)
        expected = x.float() @ w.dequantize(torch.float32).T
        assert (d.float() - expected).norm() < 4e-3 * expected.norm()
        return Product(x, w, d)

    return make


def test_flags_are_down_after_a_launch(product):
    product(0)
    torch.cuda.synchronize()
    flags = workspace.allocated(torch.device("cuda", torch.cuda.current_device()), SIZE).flags
    assert not flags.any()


def test_a_stream_keeps_its_flags_and_shares_them_with_no_other():
    device = torch.device("cuda", torch.cuda.current_device())
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    addresses = []
    for stream in streams * 2:
        with torch.cuda.stream(stream):
            addresses.append(workspace.allocated(device, SIZE).flags.data_ptr())
    assert addresses[:3] == addresses[3:] and len(set(addresses)) == 3


def test_a_workspace_of_the_caller(product, config):
    x, w, expected = product(0)
    gemm = w4gemm.MixedGemm(w.format, x.dtype)
    size = gemm.workspace_bytes(M, N, K, config)
    workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        d = torch.full_like(expected, float("nan"))
        gemm.run(x, w.tensors, d, config=config, workspace=workspace)
        assert torch.equal(d, expected)
    with pytest.raises(ValueError, match=f"workspace: wanted at least {size} contiguous bytes"):
        gemm.run(x, w.tensors, d, config=config, workspace=workspace[1:])
    more = torch.zeros(size + 17, dtype=torch.uint8, device="cuda")
    gemm.run(x, w.tensors, d, config=config, workspace=more)
    assert torch.equal(d, expected)
    with pytest.raises(ValueError, match="workspace: wanted its data at a multiple of 16 bytes"):
        gemm.run(x, w.tensors, d, config=config, workspace=more[1:])


def test_streams_at_the_same_time(product, config):
    products = [product(seed) for seed in range(3)]
    streams = [torch.cuda.Stream() for _ in products]
    torch.cuda.synchronize()
    got = []
    for _ in range(20):
        for (x, w, _), stream in zip(products, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(w4gemm.linear(x, w, config=config))
    torch.cuda.synchronize()
    for i, d in enumerate(got):
        assert torch.equal(d, products[i % 3][2]), i


def test_graphs_at_the_same_time(product, config):
    """Captured on one and the same stream, replayed on different ones."""
    products, graphs, results = [product(seed) for seed in range(2)], [], []
    for x, w, _ in products:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append([w4gemm.linear(x, w, config=config) for _ in range(4)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for ds, (_, _, expected) in zip(results, products, strict=True):
        assert all(torch.equal(d, expected) for d in ds)


def test_flags_that_hold_anything_are_cleared(product):
    """An engine may give the memory of a model away, and get it back as it happens to be."""
    expected = product(0).d
    torch.cuda.synchronize()
    for flags in workspace._allocations:
        flags.fill_(7)
    workspace.clear()
    assert workspace._allocations and not any(flags.any() for flags in workspace._allocations)
    assert torch.equal(product(0).d, expected)
