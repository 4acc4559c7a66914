"""Act-order: a weight whose groups' columns lie anywhere, from g_idx to linear, files, layers and gradients."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import w4gemm
from conformance.cases import assert_close, random_weight
from reference import grouped_reference
from sass import disassemble
from w4gemm import FormatError, QuantizedWeight, W4Experts, W4GroupedLinear, W4Linear, WeightFormat, linear
from w4gemm.api import gather
from w4gemm.api.gather import gather_columns, gather_columns_of_experts
from w4gemm.core.problem import H200
from w4gemm.jit import object_code
from w4gemm.kernels.helpers.rows import ColumnGather
from w4gemm.packing.layouts import LAYOUTS

N, K = 130, 576
FORMATS = ["int4_g32", "int4_g64_zint_fp16", "int4_g128_zfloat", "int4_g256_zint"]  # 128 and 256: a short last group


def random_g_idx(format: WeightFormat, k: int = K) -> torch.Tensor:
    """Groups of the right size, their columns anywhere."""
    groups = torch.arange(k, dtype=torch.int32) // format.group_length(k)
    return groups[torch.randperm(k, generator=torch.Generator().manual_seed(0))]


def acted(name: str = "int4_g32", n: int = N, k: int = K) -> tuple[QuantizedWeight, torch.Tensor]:
    """A weight in act-order, and its numbers from the definition: column j has the scales of group g_idx[j]."""
    format = WeightFormat.parse(name)
    codes, scales, zeros, *_ = random_weight(format, n, k).parts()
    g_idx = random_g_idx(format, k)
    u, s = codes.double(), scales.double()[:, g_idx]
    if zeros is None:
        exact = s * (u - 8)
    else:
        z = zeros.double()[:, g_idx]
        exact = s * (u - z) if format.zero == "int" else s * u + z
    return QuantizedWeight.from_codes(format, codes, scales, zeros, g_idx), exact


def tokens(w: QuantizedWeight, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, w.k, generator=torch.Generator().manual_seed(1)).to(w.device, dtype)


# --- the weight ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dequantize_is_in_the_original_order(name, dtype):
    w, exact = acted(name)
    assert torch.equal(w.dequantize(), exact.float())
    assert w.perm is not None and torch.equal(w.perm.sort().values, torch.arange(K, dtype=torch.int32))
    packed = w.parts()
    again = QuantizedWeight.from_codes(w.format, *packed)
    assert again.perm is None and torch.equal(again.dequantize(), exact.float()[:, w.perm])
    by_hand = QuantizedWeight.from_codes(
        w.format, packed.codes[:, torch.argsort(w.perm)], *packed[1:3], random_g_idx(w.format).to(dtype)
    )
    assert torch.equal(by_hand.dequantize(), w.dequantize())


@pytest.mark.parametrize("name", [*FORMATS, "int4_col_zint"])
def test_groups_in_order_keep_no_perm(name):
    plain = random_weight(WeightFormat.parse(name), N, K)
    g_idx = torch.arange(K) // plain.format.group_length(K)
    w = QuantizedWeight.from_codes(plain.format, *plain.parts()[:3], g_idx)
    assert w.perm is None and torch.equal(w.dequantize(), plain.dequantize())


def test_columns_of_a_group_keep_their_order():
    w, _ = acted()
    assert w.perm is not None and (w.perm.view(-1, 32).diff(dim=1) > 0).all()


G = torch.arange(300, dtype=torch.int32) // 128


@pytest.mark.parametrize(
    "g_idx, error, message",
    [
        ([0] * 300, TypeError, r"g_idx: wanted integers \(k\) or None, got list"),
        (G.float(), TypeError, "g_idx: wanted integers .* got torch.float32"),
        (G[:299], ValueError, r"g_idx: wanted shape \(300,\), k of codes, got \(299,\)"),
        (G.to("meta"), ValueError, "g_idx: wanted device cpu like codes, got meta"),
        (G + 1, ValueError, "g_idx: wanted groups 0..2 for k 300 in int4_g128, got 3"),
        (G - 1, ValueError, "g_idx: wanted groups 0..2 .* got -1"),
        (2 - G, ValueError, "g_idx: group 0 wants 128 columns in int4_g128 with k 300, got 44"),
        (torch.where(G == 1, 2, G), ValueError, "g_idx: group 1 wants 128 columns .* got 0; .* cannot be packed"),
        (torch.cat((G[1:], G[:1] + 2)), ValueError, "g_idx: group 0 wants 128 columns .* got 127"),
    ],
)
def test_from_codes_refuses(g_idx, error, message):
    w = random_weight(WeightFormat(), 4, 300)
    with pytest.raises(error, match=message):
        QuantizedWeight.from_codes(w.format, *w.parts()[:3], g_idx)


@pytest.mark.parametrize(
    "perm, message",
    [
        (torch.arange(K), r"perm: wanted torch.int32 \(576,\) or None, got torch.int64 \(576,\)"),
        (torch.arange(K - 1, dtype=torch.int32), r"perm: wanted .* got torch.int32 \(575,\)"),
        ([0], "perm: wanted .* got list"),
        (torch.arange(2 * K, dtype=torch.int32)[::2], "perm: wanted it contiguous on cpu, .* stride 2"),
        (torch.arange(K, dtype=torch.int32, device="meta"), "perm: wanted it contiguous on cpu, got it on meta"),
    ],
)
def test_constructor_refuses(perm, message):
    with pytest.raises(ValueError, match=message):
        replace(acted()[0], perm=perm)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repack_move_and_shard_keep_the_order(layout, device):
    w, exact = acted()
    there = w.repack(layout).to(device)
    assert there.perm is not None and there.perm.device.type == device
    assert torch.equal(there.dequantize().cpu(), exact.float())
    assert there.nbytes == sum(t.nbytes for t in there.tensors) + 4 * K
    assert "act-order" in repr(there)
    halves = [there.shard(0, i, 2) for i in range(2)]
    assert torch.equal(torch.cat([h.dequantize() for h in halves]).cpu(), exact.float())
    assert torch.equal(there.shard(1, 0, 1).dequantize().cpu(), exact.float())


def test_parts_of_k_are_refused_and_what_helps_does():
    w, exact = acted()
    with pytest.raises(ValueError, match=r"dim: .* act-order .* split dim 0, or .* order of w.perm"):
        w.shard(1, 0, 2)
    x = torch.randn(3, K)
    folded = replace(w, perm=None)
    halves = [x[:, w.perm].chunk(2, dim=1)[i] @ folded.shard(1, i, 2).dequantize().T for i in range(2)]
    torch.testing.assert_close(halves[0] + halves[1], x @ exact.float().T)


def test_file_round_trip(tmp_path):
    w, exact = acted()
    w.repack("mma16").save(tmp_path / "w")
    back = QuantizedWeight.load(tmp_path / "w")
    assert torch.equal(back.perm, w.perm) and torch.equal(back.dequantize(), exact.float())


def test_load_refuses_a_perm_that_is_none(tmp_path):
    w, _ = acted()
    meta = {"kind": "w4gemm.weights.weight", "version": "1", "format": str(w.format), "n": N, "k": K}
    for perm, message in ((w.perm.clamp(min=1), "each of 0..575 once"), (w.perm.long(), "perm: wanted torch.int32")):
        tensors = {**w.named_tensors(), "perm": perm}
        save_file(tensors, tmp_path / "w", metadata={"w4gemm": json.dumps(meta)})
        with pytest.raises(FormatError, match=message):
            QuantizedWeight.load(tmp_path / "w")


# --- linear ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_one_hot_gives_the_dequantized_weight(name, device, dtype):
    w, _ = acted(name)
    w = w.to(device).repack()
    assert torch.equal(linear(torch.eye(K, dtype=dtype, device=device), w).T, w.dequantize(dtype))


@pytest.mark.parametrize("n, k", [(N, K), (7, 333), (64, 100)])
def test_products_are_those_of_the_dequantized_weight(device, dtype, n, k):
    w, _ = acted("int4_g32", n, k)
    w = w.to(device).repack()
    bias = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    for m in (0, 1, 2, 17, 257):
        x = tokens(w, dtype, m)
        assert_close(linear(x, w), x, w)
        out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
        assert linear(x, w, bias, out=out) is out
        assert_close(out, x, w, bias)
    x = tokens(w, dtype, 2, 3)
    for strided in (x, x.transpose(0, 1), x[0, 0], x[..., :1, :].expand(2, 3, k)):
        torch.testing.assert_close(linear(strided, w), linear(strided.contiguous(), w))


def test_out_may_not_be_x(device, dtype):
    w, _ = acted("int4_g32", K, K)
    w, memory = w.to(device).repack(), torch.zeros(4, K, dtype=dtype, device=device)
    with pytest.raises(ValueError, match="shared with x"):
        linear(memory, w, out=memory)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_graph_gives_the_same_numbers(device, dtype, dynamic):
    torch.compiler.reset()
    w, _ = acted()
    w = w.to(device).repack()
    f = torch.compile(lambda x: linear(x.relu(), w) * 2, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (3, 1, 20):
        x = tokens(w, dtype, m)
        assert torch.equal(f(x), linear(x.relu(), w) * 2)


@pytest.mark.gpu
def test_compile_with_inductor():
    pytest.importorskip("triton")
    torch.compiler.reset()
    w = acted()[0].to("cuda").repack()
    x = tokens(w, torch.bfloat16, 6)
    for mode in ("default", "reduce-overhead"):
        f = torch.compile(lambda x: linear(x * 2, w) + 1, fullgraph=True, mode=mode)
        for _ in range(3):
            torch.testing.assert_close(f(x), linear(x * 2, w) + 1)


def test_gradients_are_in_the_original_order(device, dtype):
    torch.compiler.reset()
    w, _ = acted()
    w = w.to(device).repack()
    x = tokens(w, dtype, 2, 3).requires_grad_()
    d = linear(x, w)
    g = torch.randn_like(d)
    (dx,) = torch.autograd.grad(d, x, g)
    torch.testing.assert_close(dx, g @ w.dequantize(dtype))
    torch.testing.assert_close(linear(x.detach(), w), d.detach())  # on the CPU bits depend on where x lies
    (compiled,) = torch.autograd.grad(torch.compile(lambda x: linear(x, w), backend="aot_eager")(x), x, g)
    assert torch.equal(compiled, dx)
    g.requires_grad_()
    (dx,) = torch.autograd.grad(linear(x, w), x, g, create_graph=True)
    (dg,) = torch.autograd.grad(dx.sum(), g)
    torch.testing.assert_close(dg, linear(torch.ones_like(x), w))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 300])
def test_cuda_graph_and_another_stream(m):
    w = acted()[0].to("cuda").repack()
    x = tokens(w, torch.bfloat16, m)
    linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d = linear(x, w)
    for seed in range(3):
        x.copy_(torch.randn(m, K, generator=torch.Generator().manual_seed(seed)))
        d.fill_(float("nan"))
        graph.replay()
        assert torch.equal(d, linear(x, w))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = linear(x, w)
    stream.synchronize()
    assert torch.equal(other, d)


# --- the gather ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [8, 136, 577, 4096, 8200, 28672, 116192, 116200])
def test_gather_columns(device, k):
    perm = torch.randperm(k, generator=torch.Generator().manual_seed(0)).int().to(device)
    most = 300 if k < 10000 or device == "cuda" else 20
    for m, dtype in ((0, torch.bfloat16), (1, torch.float16), (3, torch.bfloat16), (most, torch.bfloat16)):
        x = torch.randn(m, k + 8, device=device).to(dtype)
        for part in (
            x[:, :k],
            x[:, 3 : k + 3],
            x[:, :k].contiguous(),
            x.T.contiguous().T[:, :k],
            x[:1, :k].expand(m, k),
        ):
            got = gather_columns(part, perm)
            assert got.is_contiguous() and torch.equal(got, part.index_select(1, perm))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1024, 1025, 5001])
def test_gather_columns_of_many_rows(m):
    perm = torch.randperm(4104).int().cuda()
    x = torch.randn(m, 4104, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(gather_columns(x, perm), x.index_select(1, perm))


def test_gather_compiles():
    pytest.importorskip("cutlass")
    gather = ColumnGather.of(H200, torch.bfloat16, 8192)
    assert gather is not None
    sass = disassemble(object_code(gather.unit()))
    assert sass.stack == 0 and sass.registers <= 64, "eight CTAs of 256 threads must fit a multiprocessor"
    assert sass.count("UBLKCP") == 1 and sass.count("LDS") >= 8


@pytest.mark.parametrize("indexed", [False, True])
def test_gather_columns_of_experts(indexed, device):
    """Rows and columns; some experts have no rows, and the last rows have no expert."""
    for k, dtype in ((8, torch.bfloat16), (136, torch.float16), (577, torch.bfloat16), (4104, torch.bfloat16)):
        perm = torch.stack([torch.randperm(k) for _ in range(70)]).int().to(device)
        starts = torch.arange(70, dtype=torch.int32, device=device).sub(3).clamp(0, 40) * 2
        x, m = torch.randn(100, k, device=device).to(dtype), 90
        rows = torch.randint(0, 100, (m,), device=device) if indexed else torch.arange(m, device=device)
        got = gather_columns_of_experts(x if indexed else x[:m], perm, starts, rows if indexed else None)
        owner = torch.searchsorted(starts, torch.arange(m, device=device).int(), right=True) - 1
        assert torch.equal(got, x[rows[:, None], perm[owner].long()])


@pytest.mark.parametrize("indexed", [False, True])
def test_the_kernel_of_experts(indexed):
    """Emulated."""
    pytest.importorskip("cutlass")
    from emulator.kernel import Emulator
    from emulator.ptx import parse, ptx_of

    gather = ColumnGather.of(H200, torch.bfloat16, 136, True, indexed)
    assert gather is not None
    perm = torch.stack([torch.randperm(136) for _ in range(40)]).int()
    starts = torch.arange(40, dtype=torch.int32).sub(2).clamp(0, 30)
    x = torch.randn(50, 136).bfloat16()
    rows = torch.randint(0, 50, (33,), dtype=torch.int32) if indexed else torch.arange(33, dtype=torch.int32)
    out = torch.zeros(33, 136).bfloat16()
    rows_in = x if indexed else x[:33]
    Emulator(parse(ptx_of(gather.unit())), 2 * 33).run(rows_in, perm, starts, *([rows] if indexed else []), out, 2)
    owner = torch.searchsorted(starts, torch.arange(33).int(), right=True) - 1
    assert torch.equal(out, x[rows[:, None].long(), perm[owner].long()])


# --- the layer -------------------------------------------------------------------------------------------------------


def layer(device: str, dtype: torch.dtype) -> W4Linear:
    return W4Linear.from_weight(acted()[0], torch.randn(N)).to(device, dtype)


def test_layer_forward_copies_and_moves(device, dtype):
    first = layer(device, dtype)
    x = tokens(first.weight, dtype, 5)
    expected = first(x)
    assert_close(expected.detach(), x, first.weight, first.bias.detach())
    file = io.BytesIO()
    torch.save(first, file)
    file.seek(0)
    copies = (copy.deepcopy(first), copy.deepcopy(first).cpu().to(device), torch.load(file, weights_only=False))
    for other in copies:
        assert torch.equal(other(x), expected)
        assert sum(b.nbytes for b in other.buffers()) == other.weight.nbytes
    assert torch.equal(first.to(torch.bfloat16).weight.perm, copies[0].weight.perm)
    assert first.to("meta").weight.perm.device.type == "meta"


@pytest.mark.parametrize("target", ["cpu", "meta"])
def test_layer_state_dict(target, device, dtype, tmp_path):
    first = layer(device, dtype)
    state = first.state_dict()
    assert set(state) == {"bias", "_extra_state", "codes", "scales", "perm"}
    save_file({name: t.contiguous() for name, t in state.items()}, tmp_path / "state")
    other = W4Linear(K, N, True, "int4_g32", dtype=dtype, device=target)
    missing, unexpected = other.load_state_dict(load_file(tmp_path / "state"), assign=target == "meta")
    assert not missing and not unexpected
    assert torch.equal(other.weight.dequantize(), first.weight.dequantize().cpu())
    plain = W4Linear(K, N, True, "int4_g32").state_dict()
    other.load_state_dict(plain)
    assert other.weight.perm is None


def test_layer_refuses_bad_state():
    state = layer("cpu", torch.float32).state_dict()
    other = W4Linear(K, N, True, "int4_g32")
    with pytest.raises(RuntimeError, match=r"perm: wanted torch.int32 \(576,\)"):
        other.load_state_dict(state | {"perm": state["perm"].long()})
    with pytest.raises(RuntimeError, match="perm: wanted each of 0..575 once"):
        other.load_state_dict(state | {"perm": state["perm"] * 0})
    assert other.weight.perm is None


def test_compiled_layer(device, dtype):
    torch.compiler.reset()
    model = torch.nn.Sequential(layer(device, dtype), torch.nn.ReLU()).requires_grad_(False)
    x = tokens(model[0].weight, dtype, 5)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


def test_gate_and_up_in_pairs_have_one_order_of_columns():
    w = QuantizedWeight.from_codes("int4_g32", torch.zeros(8, 96, dtype=torch.uint8), torch.ones(8, 3).bfloat16())
    first, other = (
        replace(w, perm=torch.randperm(96, generator=torch.Generator().manual_seed(i)).int()) for i in (1, 2)
    )
    assert torch.equal(QuantizedWeight.interleave(first, first).perm, first.perm)
    for up in (other, w):
        with pytest.raises(ValueError, match="up: wanted format, n, k, device, activations and perm of gate"):
            QuantizedWeight.interleave(first, up)


# --- experts ---------------------------------------------------------------------------------------------------------

E = 4


def experts(name: str = "int4_g32", n: int = N, k: int = K) -> QuantizedWeight:
    """Experts whose columns are in different orders; the first one's are in order."""
    format, each = WeightFormat.parse(name), []
    for e in range(E):
        codes, scales, zeros, *_ = random_weight(format, n, k, e).parts()
        groups = torch.arange(k) // format.group_length(k)
        order = torch.randperm(k, generator=torch.Generator().manual_seed(e)) if e else torch.arange(k)
        each.append(QuantizedWeight.from_codes(format, codes, scales, zeros, groups[order]))
    return QuantizedWeight.stack(each)


@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_a_stack_of_weights(name, tmp_path, device):
    w = experts(name)
    assert w.perm is not None and w.perm.shape == (E, K) and torch.equal(w.perm[0], torch.arange(K, dtype=torch.int32))
    each = torch.stack([w.expert(e).dequantize() for e in range(E)])
    assert torch.equal(w.dequantize(), each) and torch.equal(w.repack("mma16").dequantize(), each)
    assert torch.equal(w.shard(0, 1, 2).dequantize(), each[:, N // 2 :])
    w.save(tmp_path / "w.safetensors")
    assert torch.equal(QuantizedWeight.load(tmp_path / "w.safetensors").dequantize(), each)
    assert torch.equal(w.to(device).repack().dequantize().cpu(), each)
    with pytest.raises(ValueError, match=r"perm: wanted torch.int32 \(4, 576\) or None, got torch.int32 \(576,\)"):
        replace(w, perm=w.perm[0])


@pytest.mark.parametrize("activations", [None, "fp8"])
@pytest.mark.parametrize("indexed", [False, True])
def test_products_of_experts(indexed, activations, device, monkeypatch):
    """A few rows at a time, sorted, by their indices and padded, also traced."""
    monkeypatch.setattr(gather, "_INDICES", 5 * K)
    w = experts("int4_g64_zint").to(device).repack(activations=activations)
    offsets = torch.tensor([0, 3, 3, 9, 13], dtype=torch.int32, device=device)
    indices = torch.randperm(20, device=device)[:13] if indexed else None
    x = tokens(w, torch.bfloat16, 20 if indexed else 13)
    sorted_x = x if indices is None else x[indices]
    fused = {"bias": torch.linspace(-1, 1, E * N, device=device).view(E, N).bfloat16(), "activation": "silu_mul"}
    expected = grouped_reference(sorted_x, w, offsets, **fused).double()

    def product(x: torch.Tensor) -> torch.Tensor:
        return w4gemm.grouped_linear(x, w, offsets, indices=indices, **fused)

    def error(d: torch.Tensor) -> float:
        return ((d.double() - expected).norm() / expected.norm()).item()

    d, bound = product(x), 0.05 if activations else 0.01
    assert error(d) < bound
    padded, counts = x.new_zeros(E, 6, K), offsets.diff()
    for e in range(E):
        padded[e, : counts[e]] = sorted_x[offsets[e] : offsets[e + 1]]
    apart = w4gemm.masked_linear(padded, w, counts, **fused)
    assert error(torch.cat([apart[e, : counts[e]] for e in range(E)])) < bound
    assert w4gemm.grouped_linear(x[:0], w, torch.zeros_like(offsets)).shape == (0, N)
    if device == "cpu" and indexed:
        torch.compiler.reset()
        assert torch.equal(torch.compile(product, fullgraph=True, backend="aot_eager")(x), d)


def test_layers_of_experts(device):
    """W4Experts: gradients, a state dict, and new numbers in place."""
    up, down = experts("int4_g32", 2 * 96, 64), experts("int4_g32", 64, 96)
    made = W4Experts(up.to(device), down.to(device), dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    x = torch.randn(7, 64, device=device).to(made.gate_up.dtype).requires_grad_()
    weights, ids = torch.rand(7, E, device=device).topk(2)
    y = made(x, ids, weights)
    exact = torch.zeros(7, 64, dtype=torch.float64, device=device)
    dense = x.detach().double().requires_grad_()
    for t, j in [(t, j) for t in range(7) for j in range(2)]:
        gate, up_ = (up.dequantize()[ids[t, j]].double().to(device) @ dense[t]).view(-1, 2).T
        hidden = torch.nn.functional.silu(gate) * up_
        row = weights[t, j].double() * (down.dequantize()[ids[t, j]].double().to(device) @ hidden)
        exact = exact + torch.nn.functional.one_hot(torch.tensor(t, device=device), 7)[:, None] * row
    bound = {"rtol": 1e-4, "atol": 1e-4} if device == "cpu" else {"rtol": 0.05, "atol": 0.3}
    torch.testing.assert_close(y.double(), exact, **bound)
    (grad,), (expected,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(exact.sum(), dense)
    assert (grad.double() - expected).norm() / expected.norm() < (1e-4 if device == "cpu" else 0.05)
    again = copy.deepcopy(made)
    again.gate_up.weight = experts("int4_g32", 2 * 96, 64).to(device)
    again.gate_up.weight.perm.copy_(again.gate_up.weight.perm.flip(0))
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(x, ids, weights), y)
    stacked = made.gate_up.weight
    w4gemm.update_(stacked, up.dequantize().to(device, torch.bfloat16))
    error = (stacked.dequantize() - up.dequantize().to(device)).norm() / up.dequantize().norm()
    assert error < 0.15
    with pytest.raises(RuntimeError, match=r"perm: wanted torch.int32 \(4, 64\)"):
        W4GroupedLinear(up).load_state_dict(W4GroupedLinear(up).state_dict() | {"perm": up.perm[0]})
