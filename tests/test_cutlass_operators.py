"""w4gemm's provider for the CUTLASS Operator API: metadata, checks of arguments, compiling; a GPU runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import w4gemm

pytest.importorskip("cutlass.operators", reason="pip install 'w4gemm[operators]'")

from cutlass.operators import GemmArguments, Manifest, TargetSm
from cutlass.operators.providers import available_providers

from w4gemm.integrations.cutlass_operators import PackedOperand, W4gemmOperator, W4gemmProvider

M, N, K = 40, 256, 512


def arguments(
    m: int = M, dtype: torch.dtype = torch.bfloat16, out: torch.dtype | None = None, device: str = "cpu"
) -> GemmArguments:
    w = w4gemm.quantize(torch.randn(N, K, device=device), "int4_g128").repack("mma16")
    x, d = torch.randn(m, K, device=device).to(dtype), torch.empty(m, N, device=device, dtype=out or dtype)
    return GemmArguments(x, PackedOperand(w), d, accumulator_type=torch.float32)


def operators_for(args: GemmArguments, **options: Any) -> list[Any]:
    return Manifest.get_operators(args, providers=[W4gemmProvider], **options)


def test_operators_of_arguments() -> None:
    assert available_providers["w4gemm"] is W4gemmProvider
    args = arguments()
    operators = operators_for(args, target_sm="90a")
    chosen = w4gemm.explain(w4gemm.GemmProblem(M, N, K, torch.bfloat16, "int4_g128", "mma16")).chosen
    assert chosen is not None and operators[0].config == f"{chosen.kernel}/{chosen.config}"
    assert len({operator.metadata.operator_name for operator in operators}) == len(operators) > 10
    assert all(
        operator.supports(args, "90a") and operator.metadata.provider is W4gemmProvider for operator in operators
    )
    wide = operators_for(args, target_sm="90a", metadata_filter=lambda metadata: metadata.design.tile_shape[0] == 64)
    assert 0 < len(wide) < len(operators)
    assert operators_for(arguments(out=torch.float32), target_sm="90a")


def test_arguments_that_are_not_taken() -> None:
    args = arguments()
    operator = operators_for(args, target_sm="90a")[0]
    assert not operators_for(args, target_sm="100a") and not operators_for(args, target_sm="80")
    dense = GemmArguments(*(torch.zeros(8, 8).bfloat16() for _ in range(3)), accumulator_type=torch.float32)
    assert not operators_for(dense) and "PackedOperand" in str(operator.supports(dense).error)
    half = arguments(dtype=torch.float16)
    assert "Expected element type BFloat16" in str(operator.supports(half).error)
    other = w4gemm.quantize(torch.randn(N, K), "int4_g64").repack("mma16")
    args.B = PackedOperand(other)
    assert "Expected PackedShape" in str(operator.supports(args).error)
    with pytest.raises(ValueError, match="experts 2"):
        PackedOperand(w4gemm.QuantizedWeight.stack([other, other]))
    with pytest.raises(TypeError, match="weight: wanted a QuantizedWeight, got"):
        PackedOperand(torch.zeros(2, 2))


@pytest.mark.parametrize(
    ("operand", "target"),
    [
        *(("packed", target) for target in (None, "80", "90", "90a", "100f", "120f", "0")),
        *(("dense", target) for target in ("90a", "103a", "0")),
        *(("none", target) for target in ("90", "90a", "0")),  # those of newer GPUs are thousands
    ],
)
def test_what_the_api_holds_every_provider_to(operand: str, target: str | None) -> None:
    """The invariants of the API's own tests of its manifest, over all providers with this one among them: what is
    returned supports the arguments, the target and the filter, under a name of its own."""

    def is_even(metadata: Any) -> bool:
        return sum(map(ord, metadata.operator_name)) % 2 == 0

    args = None
    if operand == "packed":
        args = arguments(8)
    elif operand == "dense":
        args = GemmArguments(*(torch.zeros(2, 128, 128).half() for _ in range(3)), accumulator_type=torch.float32)
    every = Manifest.get_operators(args, target_sm=target)
    half = Manifest.get_operators(args, target_sm=target, metadata_filter=is_even)
    names = [operator.metadata.operator_name for operator in every]
    assert len(names) == len(set(names))
    assert [o.metadata.operator_name for o in half] == [o.metadata.operator_name for o in every if is_even(o.metadata)]
    for operator in every:
        assert target is None or TargetSm(target).supports_operators_from(operator.metadata.supported_targets)
        assert args is None or operator.supports(args, target_sm=target)
    ours = [operator for operator in every if isinstance(operator, W4gemmOperator)]
    assert bool(ours) == (operand == "packed" and target in (None, "90a")) and (operand != "packed" or ours == every)


def test_compile_without_a_gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path))
    args = arguments(m=8)
    operator = operators_for(args, target_sm="90a")[0]
    artifact = operator.compile(args, "90a")
    assert artifact.compiled_obj is not None and str(artifact.compiled_for) == "90a"
    assert isinstance(artifact.operator_obj, W4gemmOperator)


@pytest.mark.gpu
def test_the_product() -> None:
    args = arguments(device="cuda")
    x, out = args.A.tensor.runtime_tensor, args.out.tensor.runtime_tensor
    for operator in operators_for(args, target_sm="90a")[:4]:
        out.zero_()
        operator.run(args)
        torch.cuda.synchronize()
        expected = w4gemm.linear(x, args.B.weight, config=operator.config)
        assert torch.equal(out, expected)
