"""Rows of a packed weight by their ids: :func:`w4gemm.embedding` and :class:`w4gemm.W4Embedding`."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from conformance.cases import FORMATS, random_weight
from w4gemm import W4Embedding, embedding
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device
from w4gemm.kernels.helpers.embedding_rows import EmbeddingRows
from w4gemm.packing.layouts import LAYOUTS
from w4gemm.weights.weight import QuantizedWeight

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
N, K = 205, 288
IDS = torch.tensor([[0, 204, 64, 127], [128, 5, 5, 200]])


def layouts_of(format: WeightFormat) -> list[str]:
    return [name for name, layout in LAYOUTS.items() if not layout.supports(format)]


def rows_of(w: QuantizedWeight, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return w.dequantize(dtype).cpu()[ids.cpu().long()]


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_bit_is_that_of_dequantize(format: WeightFormat) -> None:
    w = random_weight(format, N, K)
    packed = {layout: w.repack(layout) for layout in layouts_of(format)}
    for dtype in DTYPES:
        expected = rows_of(w, IDS, dtype)
        for layout, own in packed.items():
            rows = embedding(IDS, own, dtype)
            assert rows.is_contiguous() and rows.dtype == dtype and torch.equal(rows, expected), layout


def test_act_order_and_ids_of_32_bits() -> None:
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(1)).int()
    plain = random_weight(WeightFormat.parse("int4_g32"), N, K)
    w = QuantizedWeight(plain.format, N, K, plain.layout, plain.tensors, perm)
    assert torch.equal(embedding(IDS.int(), w, torch.float32), rows_of(w, IDS, torch.float32))
    assert embedding(IDS[:0], w).shape == (0, 4, K) and embedding(IDS[0, 0], w).shape == (K,)


def test_few_rows_are_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("w4gemm.packing.layouts.mma._ELEMENTS", 3 * 64 * K)
    w = random_weight(WeightFormat.parse("e4m3_g128_b128"), N, K).repack("mma16")
    assert torch.equal(embedding(IDS, w, torch.bfloat16), rows_of(w, IDS, torch.bfloat16))


def test_refusals() -> None:
    w = random_weight(WeightFormat(), N, K)
    for wrong in (-1, N):
        with pytest.raises(IndexError, match=rf"ids: wanted ids of 0 .. 204, got {wrong}"):
            embedding(torch.tensor([3, wrong]), w)
    with pytest.raises(TypeError, match="ids: wanted a tensor of int32 or int64, got"):
        embedding(torch.tensor([1.0]), w)
    with pytest.raises(TypeError, match="ids: wanted a tensor of int32 or int64, got"):
        embedding([1], w)
    with pytest.raises(TypeError, match="dtype: wanted torch.float32 or"):
        embedding(IDS, w, torch.float64)
    with pytest.raises(ValueError, match="ids: wanted them on cpu like w, got meta"):
        embedding(IDS.to("meta"), w)
    for layout, kind in ((IDS.to_sparse(), "one of layout"), (torch.nested.as_nested_tensor([*IDS]), "a nested one")):
        with pytest.raises(TypeError, match=f"ids: wanted a dense tensor, got {kind}"):
            embedding(layout, w)
    for other in (w.dequantize(), QuantizedWeight.stack([w, w])):
        with pytest.raises(TypeError, match="w: wanted a QuantizedWeight without experts, got"):
            embedding(IDS, other)


def layer_of(format: str = "q4_k", dtype: torch.dtype = torch.bfloat16) -> W4Embedding:
    return W4Embedding.from_weight(random_weight(WeightFormat.parse(format), N, K), 7, dtype=dtype)


def same(a: W4Embedding, b: W4Embedding) -> bool:
    return torch.equal(a.weight.dequantize(), b.weight.dequantize()) and torch.equal(a(IDS), b(IDS))


def test_module() -> None:
    layer = layer_of()
    assert (layer.num_embeddings, layer.embedding_dim, layer.padding_idx) == (N, K, 7)
    assert torch.equal(layer(IDS), rows_of(layer.weight, IDS, torch.bfloat16)) and not layer(IDS).requires_grad
    assert layer.weight.dtype == layer.dtype == torch.bfloat16 and layer.weight.layout == "canonical"
    layer.half()
    assert torch.equal(layer(IDS), rows_of(layer.weight, IDS, torch.float16))
    assert "205, 288, padding_idx=7, format=int4_g32_zfloat_u8x256" in repr(layer)
    assert not list(layer.parameters())


def test_module_takes_no_fp8_layout() -> None:
    w = random_weight(WeightFormat(), N, K).repack(activations="fp8")
    layer = W4Embedding.from_weight(w)
    assert layer.activations is None and layer.weight.activations is None


def test_copies_and_state_dicts() -> None:
    layer = layer_of()
    assert same(copy.deepcopy(layer), layer) and same(pickle.loads(pickle.dumps(layer)), layer)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = W4Embedding(N, K, format="q4_k", dtype=torch.bfloat16)
    assert not other(IDS).any()
    other.load_state_dict(torch.load(buffer))
    assert same(other, layer) and {*layer.state_dict()} == {"codes", "scales", "zeros", "factors", "_extra_state"}
    with pytest.raises(RuntimeError, match="wanted a weight in"):
        W4Embedding(N, K, format="int4_g32").load_state_dict(layer.state_dict())


def test_compile() -> None:
    layer = layer_of()
    compiled = torch.compile(lambda ids: layer(ids) * 2, fullgraph=True, backend="aot_eager")
    for ids in (IDS, IDS[:1]):
        assert torch.equal(compiled(ids), layer(ids) * 2)


def test_vmap() -> None:
    """As per-sample gradients of a model with adapters need it; of ids in any dimension."""
    layer = layer_of()
    assert torch.equal(torch.vmap(layer)(IDS), layer(IDS))
    assert torch.equal(torch.vmap(torch.vmap(layer), in_dims=1)(IDS), layer(IDS.T))
    state = {name: torch.stack([t, t]) for name, t in layer.named_buffers()}
    with pytest.raises(NotImplementedError, match="w: vmap over the tensors of several weights"):
        torch.vmap(lambda state: torch.func.functional_call(layer, state, (IDS,)))(state)


def test_operator() -> None:
    w = random_weight(WeightFormat(), N, K)
    facts = list(w.tensors), w.format.name, w.layout, w.n, w.k, torch.float32
    torch.library.opcheck(torch.ops.w4gemm.embedding, (IDS, *facts))


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_gpu_gives_the_bits_of_the_cpu(format: WeightFormat, dtype: torch.dtype) -> None:
    w = random_weight(format, N, K)
    some, many = (
        torch.tensor([3, -1, N, 2**40, 5]),
        torch.randint(N, (600,), generator=torch.Generator().manual_seed(1)),
    )
    for layout in layouts_of(format):
        on_gpu = w.to("cuda").repack(layout)
        for ids in (many, many[:1]):
            assert torch.equal(embedding(ids.cuda(), on_gpu, dtype).cpu(), rows_of(w, ids, dtype)), layout
        rows = embedding(some.cuda(), on_gpu, dtype).cpu()
        assert rows[1:4].isnan().all() and torch.equal(rows[::4], rows_of(w, some[::4], dtype)), layout


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("format", ["q4_k", "q6_k", "int4_g32", "nf4", "int8_g128"])
def test_graph(format: str, kind: torch.dtype) -> None:
    """A kernel runs, without synchronizing, and reads ids anew in each replay."""
    w = random_weight(WeightFormat.parse(format), 1000, 640)
    on_gpu, ids = w.to("cuda").repack(), torch.zeros(9, dtype=kind, device="cuda")
    assert EmbeddingRows.of(Device.of("cuda"), torch.bfloat16, w.format, w.k, kind == torch.int64) is not None
    embedding(ids, on_gpu, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows = embedding(ids, on_gpu, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(3):
        new = torch.randint(1000, (9,), generator=torch.Generator().manual_seed(seed))
        ids.copy_(new)
        graph.replay()
        assert torch.equal(rows.cpu(), rows_of(w, new, torch.bfloat16))


@pytest.mark.gpu
def test_module_moves_to_a_gpu_and_back() -> None:
    layer, before = layer_of(), layer_of()(IDS)
    layer.cuda()
    assert layer.weight.layout == "mma16" and torch.equal(layer(IDS.cuda()).cpu(), before)
    layer.cpu()
    assert layer.weight.layout == "canonical" and torch.equal(layer(IDS), before)
