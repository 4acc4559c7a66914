"""The small kernels of a fused step beside PyTorch's operators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import w4gemm
from sass import disassemble
from w4gemm.api.step import add_rms_norm, add_rms_norm_quantize, between_products, gate_halves, rms_norm
from w4gemm.core.activation import is_gated
from w4gemm.core.problem import H200, Device
from w4gemm.integrations.decoder.attention import CachedLayer, attention_in_torch, step_attention
from w4gemm.integrations.engines.adapters import adapted
from w4gemm.jit import object_code
from w4gemm.kernels.helpers.base import Helper, launcher
from w4gemm.kernels.helpers.rows import GateHalves, RmsNorm
from w4gemm.kernels.helpers.step_attention import StepAttention


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "kv_heads", "group", "dim", "length", "slot", "window"),
    [
        (1, 8, 4, 128, 256, 130, 2**30),
        (64, 8, 4, 128, 256, 255, 2**30),
        (3, 2, 7, 64, 512, 0, 2**30),
        (2, 1, 8, 128, 2048, 1900, 300),
        (2, 3, 1, 64, 1024, 1023, 7),
        (1, 2, 4, 256, 4096, 4095, 2**30),
        (1, 2, 3, 128, 1024, 5, 2**30),
    ],
)
def test_attention(
    batch: int,
    kv_heads: int,
    group: int,
    dim: int,
    length: int,
    slot: int,
    window: int,
    dtype: torch.dtype,
    sinks: bool,
) -> None:
    g = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=g).to(dtype)

    heads = kv_heads * group
    both = draw(batch, heads + 2 * kv_heads, dim)
    q, k, v = both[:, :heads], both[:, heads : heads + kv_heads], both[:, heads + kv_heads :]
    angle = torch.randn(batch, dim // 2, device="cuda", generator=g).repeat(1, 2)
    keys, values = draw(batch, kv_heads, length, dim), draw(batch, kv_heads, length, dim)
    first = torch.randint(0, min(slot, 4) + 1, (batch,), device="cuda", generator=g).int()
    theirs = CachedLayer(keys, values, torch.tensor([slot], device="cuda"), first)
    ours = theirs._replace(keys=keys.clone(), values=values.clone())
    inputs = q, k, v, (angle.cos().to(dtype), angle.sin().to(dtype))
    seen = dim**-0.5, window, 3 * draw(heads) if sinks else None
    out = step_attention(*inputs, ours, *seen)
    expected = attention_in_torch(*inputs, theirs, *seen)
    torch.testing.assert_close(ours.keys, keys, rtol=0.01, atol=0.01)
    torch.testing.assert_close(ours.values, values, rtol=0, atol=0)
    untouched = torch.arange(length, device="cuda") != slot
    assert torch.equal(ours.keys[:, :, untouched], keys[:, :, untouched])
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.01)
    assert torch.equal(out, step_attention(*inputs, ours, *seen))


@pytest.mark.gpu
@pytest.mark.parametrize("activation, halves", [("silu_mul", True), ("swiglu_oai", False), ("relu2", False)])
@pytest.mark.parametrize(("choices", "n"), [(1, 768), (37, 8), (512, 1032)])
def test_rows_between_experts_beside_adapters(choices: int, n: int, activation: str, halves: bool) -> None:
    rows, added = torch.randn(2, choices, n * (1 + is_gated(activation)), device="cuda", dtype=torch.bfloat16)
    places = torch.randperm(choices, device="cuda").int()
    places[::5] = -1
    hidden = adapted(rows, added, places, activation, halves)
    expected = adapted(rows.cpu(), added.cpu(), places.cpu(), activation, halves)
    torch.testing.assert_close(hidden.by_choice.cpu(), expected.by_choice, rtol=0.01, atol=1e-3)
    assert torch.equal(hidden.by_expert[places[places >= 0]], hidden.by_choice[places >= 0])


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu_mul", "gelu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize(("m", "n"), [(1, 14336), (5, 8), (64, 2048), (3, 1032)])
def test_gate_halves(m: int, n: int, activation: str) -> None:
    x = torch.randn(m, 2 * n, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(gate_halves(x, activation).cpu(), gate_halves(x.cpu(), activation), rtol=0.01, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), [(1, 4096), (64, 4096), (40, 128), (3, 2880), (2, 16384), (2, 28672)])
def test_norm(m: int, k: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(m, 1, k, device="cuda").to(dtype), torch.rand(k, device="cuda").to(dtype)
    expected = rms_norm(x.cpu(), weight.cpu(), 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).cpu(), expected, rtol=0.01, atol=1e-3)
    apart = torch.cat((x, x), -1)[..., :k]
    assert not apart.is_contiguous() or m == 1
    assert torch.equal(rms_norm(apart, weight, 1e-5), rms_norm(x, weight, 1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), [(1, 4096), (64, 4096), (40, 136), (3, 2880), (2, 16384), (2, 28672), (0, 4096)])
def test_added_norm(m: int, k: int, dtype: torch.dtype) -> None:
    """With and without quantization, which rounds to e4m3: its smallest step is 1/8 of a number."""
    arguments = [torch.randn(shape, device="cuda").to(dtype) for shape in ((m, k), (m, k), (k,))]
    on_cpu = [t.cpu() for t in arguments]
    y, total = add_rms_norm(*arguments, 1e-5)
    expected_y, expected_total = add_rms_norm(*on_cpu, 1e-5)
    assert torch.equal(total.cpu(), expected_total)
    torch.testing.assert_close(y.cpu(), expected_y, rtol=0.01, atol=1e-3)
    x8, scale, total = add_rms_norm_quantize(*arguments, 1e-5)
    expected = w4gemm.quantize_activations(expected_total.cuda(), norm_weight=arguments[2], eps=1e-5)
    assert torch.equal(total.cpu(), expected_total)
    assert torch.equal(x8.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_operators(dtype: torch.dtype) -> None:
    """Their formulas, and what compiled graphs are told of their results."""
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, 64), (5, 64), (64,)))
    total = (x.double() + residual.double()).to(dtype)
    exact = total.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    ops = torch.ops.w4gemm
    y, actual = ops.add_rms_norm(x, residual, weight, 1e-3)
    assert torch.equal(actual, total)
    torch.testing.assert_close(y.double(), exact, rtol=0.02, atol=1e-3)
    x8, scale, actual = ops.add_rms_norm_quantize(x, residual, weight, 1e-3)
    assert torch.equal(actual, total) and x8.dtype == torch.float8_e4m3fn and scale.shape == (5,)
    torch.testing.assert_close(x8.double() * scale[:, None], exact, rtol=0.07, atol=0.02)
    gate, up = (t.double() for t in torch.cat((x, residual), 1).chunk(2, 1))
    gated = ops.gate_halves(torch.cat((x, residual), 1), "silu_mul")
    torch.testing.assert_close(gated.double(), gate / (1 + (-gate).exp()) * up, rtol=0.02, atol=1e-3)
    for op, arguments in ((ops.add_rms_norm, (x, residual, weight, 1e-3)), (ops.gate_halves, (x, "silu_mul"))):
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
    opcheck = (x, residual, weight, 1e-3)
    torch.library.opcheck(ops.add_rms_norm_quantize.default, opcheck, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("dim", "sinks"), [(64, True), (128, False), (256, False)])
def test_no_registers_are_spilled(dim: int, sinks: bool) -> None:
    group = 4 if dim == 256 else 8
    helper = StepAttention.of(H200, torch.bfloat16, dim, group, 8, sinks)
    assert helper is not None
    assert disassemble(object_code(helper.unit())).stack == 0
    assert StepAttention.of(H200, torch.bfloat16, 96, 1, 1) is None


def test_splits_fill_the_gpu() -> None:
    splits = StepAttention.splits_for
    assert splits(units=8, length=256, sms=132) == 4
    assert splits(units=8, length=8192, sms=132) == 8
    assert splits(units=512, length=8192, sms=132) == 1
    assert splits(units=1, length=64, sms=132) == 1


@pytest.mark.parametrize(
    "helper",
    [
        *(GateHalves.of(H200, torch.float16, "silu_mul"), RmsNorm.of(H200, torch.bfloat16, 16384)),
        *between_products(H200, torch.bfloat16, 16384, False),
        *between_products(H200, torch.float16, 16384, True),
    ],
)
def test_the_small_kernels_compile(helper: Helper) -> None:
    assert disassemble(object_code(helper.unit())).stack == 0
    assert RmsNorm.of(H200, torch.bfloat16, 4100) is None


def test_helpers_launch_on_the_gpu_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another one is the current GPU, as between layers that accelerate spreads over several."""
    current, seen = [0], []

    @contextlib.contextmanager
    def device(expected: torch.device) -> Iterator[None]:
        before, current[0] = current[0], expected.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(Device, "of", lambda _: H200)
    monkeypatch.setattr("w4gemm.kernels.helpers.base.compiled", lambda _: lambda *args: seen.append((current[0], args)))
    for index in (1, 0):
        run = launcher.__wrapped__(RmsNorm.of, torch.device("cuda", index), torch.bfloat16, 4096)
        assert run is not None
        run("x", "weight")
    assert seen == [(1, ("x", "weight")), (0, ("x", "weight"))] and current == [0]
