"""Programmatic dependent launch: a kernel starts while the launch before it still runs, whose writes it cannot see yet.

So before its ``griddepcontrol.wait`` (ACQBULK in SASS) a kernel loads nothing that the launch before can have written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import w4gemm
from sass import disassemble
from w4gemm.api.step import add_rms_norm, add_rms_norm_quantize, gate_halves, rms_norm
from w4gemm.core.epilogue import PLAIN
from w4gemm.core.problem import H200, GemmProblem
from w4gemm.jit import object_code
from w4gemm.kernels import config_named
from w4gemm.kernels.helpers.activation_quantize import FRONTS, ActivationQuantize
from w4gemm.kernels.helpers.embedding_rows import EmbeddingRows
from w4gemm.kernels.helpers.experts import AdaptedRows, ExpertRoute, RowCombine
from w4gemm.kernels.helpers.row_sums import RowSums
from w4gemm.kernels.helpers.rows import ColumnGather, GateHalves, RmsNorm
from w4gemm.kernels.helpers.step_attention import StepAttention
from w4gemm.packing.packed_shape import packed_shape

FP8 = torch.float8_e4m3fn
CONFIGS = {
    "sm90_decode/8x64x128_1x1x1_pingpong": torch.bfloat16,
    "sm90_mixed_gemm/64x128x128_1x1x1_coop": torch.bfloat16,
    "sm80_mixed_gemm/64x128x128_1x1x1_coop": torch.bfloat16,
    "sm90_fp8_gemm/64x128x256_1x1x1_coop": FP8,
}
"""dtype of x by config."""
ROUNDS = 400


def queue_up(round: int) -> None:
    """Let the GPU wait now and then, so that launches follow each other without a gap."""
    if round % 40 == 0:
        torch.cuda._sleep(10_000_000)


class Operators(TorchDispatchMode):
    """The names of the operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("perm", [False, True])
def test_a_weight_is_made_with_a_last_launch_that_writes_nothing_of_it(perm: bool) -> None:
    shape = packed_shape(w4gemm.WeightFormat.parse("int4_g128"), "mma16", 64, 128, 0)
    with FakeTensorMode():
        tensors = shape.empty(torch.device("cuda"))
        order = torch.empty(128, dtype=torch.int32, device="cuda") if perm else None
        with Operators() as operators:
            w = w4gemm.QuantizedWeight(shape.format, 64, 128, "mma16", tensors, order)
            assert operators.names == ["new_zeros"]
            replace(w, n=64)
    assert operators.names == ["new_zeros"] * 2


@pytest.mark.parametrize(
    "helper",
    [
        RmsNorm.of(H200, torch.bfloat16, 4096),
        RmsNorm.of(H200, torch.bfloat16, 4096, add=True),
        ActivationQuantize.of(H200, torch.bfloat16, 4096, "rms", True),
        ActivationQuantize.of(H200, torch.bfloat16, 4096, "add_rms", True),
    ],
    ids=["norm", "added norm", "quantized norm", "quantized added norm"],
)
def test_a_norms_weight_is_loaded_behind_the_wait(helper: Any) -> None:
    """Before it the weight is at most brought into L2, where what is written later arrives too."""
    pytest.importorskip("cutlass")
    text = disassemble(object_code(helper.unit())).text
    before, instruction, behind = text.partition("ACQBULK")
    chunks = helper.chunks if isinstance(helper, RmsNorm) else helper.shape.chunks
    assert instruction and "LDG" not in before and before.count("CCTL.E.PF2") == chunks
    added = helper.add if isinstance(helper, RmsNorm) else helper.front == "add_rms"
    assert behind.count("LDG") == (3 if added else 2) * chunks, "of x, of the residual and of the weight"


BETWEEN_PRODUCTS = (
    RmsNorm.of(H200, torch.bfloat16, 4096),
    RmsNorm.of(H200, torch.bfloat16, 4096, add=True),
    ActivationQuantize.of(H200, torch.bfloat16, 4096, "add_rms", True),
    GateHalves.of(H200, torch.bfloat16, "silu_mul"),
    StepAttention.of(H200, torch.bfloat16, 128, 4, 2),
)
OTHERS = (
    *(ActivationQuantize.of(H200, torch.bfloat16, 4096, front, True) for front in FRONTS),
    ColumnGather.of(H200, torch.bfloat16, 4096),
    ExpertRoute.of(H200, torch.int32, 128, False, 8),
    *(RowCombine.of(H200, torch.bfloat16, 8, added) for added in (False, True)),
    AdaptedRows.of(H200, torch.bfloat16, "silu_mul", True),
    RowSums.of(H200, 64),
    EmbeddingRows.of(H200, torch.bfloat16, "q4_k", 4096),
)


def product_unit(name: str) -> Any:
    (kernel, config), dtype = config_named(name), CONFIGS[name]
    epilogue = PLAIN._replace(token_scale=dtype == FP8)
    format = w4gemm.WeightFormat.parse("int4_g128")
    problem = GemmProblem(8, 512, 512, dtype, format, kernel.layout, epilogue, H200)
    return kernel.unit(problem, config)


@pytest.mark.parametrize("launched", [*BETWEEN_PRODUCTS, *OTHERS, *CONFIGS], ids=lambda launched: str(launched)[:60])
def test_when_a_launch_lets_the_next_one_start(launched: Any) -> None:
    """At once (PREEXIT in SASS) only where a product is in front: what another launch lets start behind its wait may
    rely on the launch before that (``settled``, weights)."""
    pytest.importorskip("cutlass")
    unit = product_unit(launched) if launched in CONFIGS else launched.unit()
    text = disassemble(object_code(unit)).text
    assert text.count("PREEXIT") == 1
    assert (text.index("PREEXIT") < text.index("ACQBULK")) == (launched in BETWEEN_PRODUCTS)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [512, 4096])
@pytest.mark.parametrize(
    ("config", "normed"), [*((c, False) for c in CONFIGS), *((c, True) for c, dtype in CONFIGS.items() if dtype != FP8)]
)
def test_a_weight_that_was_just_made(config: str, normed: bool, size: int) -> None:
    """A kernel of PyTorch writes the packed tensor of another weight before each product, or before the norm of x in
    front of it."""
    g, dtype = torch.Generator("cuda").manual_seed(0), CONFIGS[config]
    dense = torch.randn(2, size, size, generator=g, device="cuda")
    made = [w4gemm.quantize(w, "int4_g128").repack(activations="fp8" if dtype == FP8 else None) for w in dense]
    x = torch.randn(8, size, generator=g, device="cuda").to(dtype)
    scale = torch.ones(8, device="cuda") if dtype == FP8 else None
    factors = torch.ones(size, device="cuda").to(dtype)

    def product(w: w4gemm.QuantizedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
        rows = rms_norm(x, factors, 1e-6) if normed else x
        return w4gemm.linear(rows, w, token_scale=scale, config=config, out=out)

    expected = [product(w) for w in made]
    assert not torch.equal(*expected)
    packed = made[0].tensors[0].clone()
    outs = torch.full((ROUNDS, *expected[0].shape), torch.nan, dtype=expected[0].dtype, device="cuda")
    for i, out in enumerate(outs):
        queue_up(i)
        torch.add(made[i % 2].tensors[0], 0, out=packed)
        product(replace(made[0], tensors=(packed,)), out)
    assert all(torch.equal(out, expected[i % 2]) for i, out in enumerate(outs))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [64, 4096, 28672 // 2])
def test_a_norms_weight_that_was_just_written(k: int) -> None:
    """The launch before computes 1 + a parameter, as Gemma's norms have it."""
    g = torch.Generator("cuda").manual_seed(0)
    x, *parameters = (torch.randn(*shape, generator=g, device="cuda").bfloat16() for shape in ((3, k), (k,), (k,)))
    factors = [1 + parameter for parameter in parameters]
    torch.cuda.synchronize()
    norms = [rms_norm(x.view(3, 1, k), weight, 1e-6) for weight in factors]
    quantized = [w4gemm.quantize_activations(x, norm_weight=weight)[0].view(torch.uint8) for weight in factors]
    weight, got = torch.empty_like(factors[0]), []
    for i in range(ROUNDS):
        queue_up(i)
        torch.add(parameters[i % 2], 1, out=weight)
        d = rms_norm(x.view(3, 1, k), weight, 1e-6)
        torch.add(parameters[i % 2], 1, out=weight.zero_())
        got.append((d, w4gemm.quantize_activations(x, norm_weight=weight)[0].view(torch.uint8)))
    for i, (d, x8) in enumerate(got):
        assert torch.equal(d, norms[i % 2]) and torch.equal(x8, quantized[i % 2])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 100])
@pytest.mark.parametrize("fp8", [False, True])
def test_products_with_kernels_between_them(fp8: bool, m: int) -> None:
    """Each product, norm and gate has the bits that it has behind a pause, in whatever is still running."""
    g, n = torch.Generator("cuda").manual_seed(0), 2048
    shapes = {"gate_up": (2 * n, n), "down": (n, n)}
    dense = {name: torch.randn(3, *shape, generator=g, device="cuda") / 45 for name, shape in shapes.items()}
    activations = "fp8" if fp8 else None
    weights = {
        name: [w4gemm.quantize(each, "int4_g128").repack(activations=activations) for each in many]
        for name, many in dense.items()
    }
    x = torch.randn(m, n, generator=g, device="cuda").bfloat16()
    factors = torch.rand(n, generator=g, device="cuda").bfloat16()

    def layers(pause: bool) -> list[torch.Tensor]:
        steps, d, total = [], x, x
        for i in range(3 if pause else 60):
            y, *scale, total = (add_rms_norm_quantize if fp8 else add_rms_norm)(d, total, factors, 1e-6)
            steps.append(y)
            halves = w4gemm.linear(y, weights["gate_up"][i % 3], token_scale=scale[0] if fp8 else None)
            gated = gate_halves(halves, "silu_mul")
            d = w4gemm.linear(gated, weights["down"][i % 3])
            steps += [total, halves, gated, d]
            if pause:
                torch.cuda.synchronize()
            if i % 3 == 2:
                d, total = x, x
        return steps

    expected, got = layers(pause=True), layers(pause=False)
    for i, step in enumerate(got):
        assert torch.equal(step.view(torch.uint8), expected[i % len(expected)].view(torch.uint8))
