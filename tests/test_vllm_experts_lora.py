"""LoRA adapters beside the vLLM plugin's experts, against a stub of vLLM's interfaces, on the CPU."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from reference import linear_reference
from vllm_experts import (
    CASES,
    EXPERTS,
    HIDDEN,
    MXFP4,
    NVFP4,
    WIDTH,
    Case,
    assert_near,
    inputs,
    layer_arguments,
    mixture,
)
from vllm_parts import part_fixture
from w4gemm.core.activation import parse

experts = part_fixture("experts")


class Punica:
    """vLLM's wrapper of kernels for adapters of experts, in PyTorch.

    Args:
        adapters: of each token, or -1.
        shapes: of the unpacked weights, which vLLM reads.
    """

    def __init__(self, adapters: torch.Tensor, shapes: list[tuple[int, ...]]) -> None:
        self.adapters, self.shapes = adapters, shapes
        self.token_mapping_meta = SimpleNamespace(no_lora_flag_cpu=torch.tensor([bool((adapters < 0).all())]))
        self.choices: list[tuple[int, int, int]] = []

    def add_lora_w13(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: tuple[torch.Tensor, ...],
        b: tuple[torch.Tensor, ...],
        ids: torch.Tensor,
        weights: torch.Tensor,
        expert_map: torch.Tensor | None,
        w1: torch.Tensor,
        w2: torch.Tensor,
        tokens: int,
        top_k: int,
        *others: Any,
        **more: Any,
    ) -> tuple[None, ...]:
        assert not self.token_mapping_meta.no_lora_flag_cpu.item()
        assert [tuple(w1.shape), tuple(w2.shape)] == self.shapes and (tokens, top_k) == ids.shape
        here = ids if expert_map is None else torch.where(ids < 0, ids, expert_map[ids.clamp(min=0).long()])
        self.choices = [
            (t, j, int(here[t, j])) for t, j in (torch.nonzero(here >= 0)).tolist() if self.adapters[t] >= 0
        ]
        for t, j, e in self.choices:
            which = self.adapters[t]
            parts = [b_each[which, e] @ (a_each[which, e] @ x[t]) for a_each, b_each in zip(a, b, strict=True)]
            y.view(tokens, top_k, -1)[t, j] += torch.cat(parts)
        return (None,) * 4

    def add_lora_w2(
        self, y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, weights: torch.Tensor, *others: Any, **more: Any
    ) -> None:
        for t, j, e in self.choices:
            which = self.adapters[t]
            part = b[0][which, e] @ (a[0][which, e] @ x.view(*y.shape[:2], -1)[t, j])
            y[t, j] += (weights[t, j] * part).to(y.dtype)


def context_of(adapters: torch.Tensor, gated: bool, shapes: list[tuple[int, ...]], local: int = EXPERTS) -> Any:
    """vLLM's MoELoRAContext for two adapters of rank 4, and which of them each token has."""

    def matrices(n: int, k: int) -> torch.Tensor:
        return torch.randn(2, local, n, k, dtype=torch.bfloat16) / k**0.5

    slices = 1 + gated
    return SimpleNamespace(
        w13_lora_a_stacked=tuple(matrices(4, HIDDEN) for _ in range(slices)),
        w13_lora_b_stacked=tuple(matrices(WIDTH, 4) for _ in range(slices)),
        w2_lora_a_stacked=(matrices(4, WIDTH),),
        w2_lora_b_stacked=(matrices(HIDDEN, 4),),
        punica_wrapper=Punica(adapters, shapes),
        original_hidden_states=None,
    )


@pytest.mark.parametrize(
    ("case", "settings", "activation"),
    [
        (CASES[0], {}, "silu_mul"),
        (Case("compressed-tensors", fp8=True), {}, "silu_mul"),
        (MXFP4, {"swiglu_limit": 1.5, "has_bias": True}, "silu_mul(limit=1.5)"),
        (NVFP4, {"activation": "RELU2_NO_MUL"}, "relu2"),
        (CASES[3], {"num_local_experts": 2, "ep_size": 2, "ep_rank": 1, "use_ep": True}, "silu_mul"),
    ],
    ids=str,
)
def test_adapters_of_several_tokens(
    experts: ModuleType, monkeypatch: pytest.MonkeyPatch, case: Case, settings: dict[str, Any], activation: str
) -> None:
    """Two adapters and none in one step, each with its own matrices for each expert."""
    monkeypatch.setenv("W4GEMM_VLLM", "on")
    local = settings.get("num_local_experts", EXPERTS)
    expert_map = torch.tensor([-1] * (EXPERTS - 2) + [0, 1], dtype=torch.int32) if local == 2 else None
    made = mixture(case, is_lora_enabled=True, expert_map=expert_map, **settings)
    kernel = made.layer.quant_method.moe_kernel.fused_experts
    assert kernel.supports_lora()
    x, weights, ids = inputs(case.dtype, 6)
    here = ids if local == EXPERTS else torch.where(ids >= EXPERTS - local, ids, -1)
    plain = made.expected(x, weights, here, activation=activation)
    without = made.layer.forward_modular(x, weights, ids)  # a layer that no adapter can have
    assert_near(without, plain, case)
    adapters = torch.tensor([0, -1, 1, 1, 0, -1])
    gated = activation != "relu2"
    shapes = [(local, (1 + gated) * WIDTH, HIDDEN), (local, HIDDEN, WIDTH)]
    context = context_of(adapters, gated, shapes, local)
    kernel.set_lora_context(context_of(torch.full((6,), -1), gated, shapes, local))
    assert torch.equal(made.layer.forward_modular(x, weights, ids), without), "a step without adapters runs as else"
    kernel.set_lora_context(context)
    got = made.layer.forward_modular(x, weights, ids)
    expected, first = torch.zeros(x.shape, dtype=torch.float64), EXPERTS - local
    for t, j in torch.nonzero(here >= 0).tolist():
        e, which = int(here[t, j]), int(adapters[t])
        biases = [None if bias is None else bias[e].double() for bias in made.biases]
        rows = linear_reference(x[t : t + 1].double(), made.gate_up.expert(e), biases[0])[0]
        stacks = [
            [each[which, e - first].double() for each in stack]
            for stack in (
                context.w13_lora_a_stacked,
                context.w13_lora_b_stacked,
                context.w2_lora_a_stacked,
                context.w2_lora_b_stacked,
            )
        ]
        if which >= 0:
            parts = torch.stack([b @ (a @ x[t].double()) for a, b in zip(*stacks[:2], strict=True)])
            rows = rows + parts.T.flatten()
        hidden = parse(activation).apply(rows)
        d = linear_reference(hidden[None], made.down.expert(e), biases[1])[0]
        if which >= 0:
            d = d + stacks[3][0] @ (stacks[2][0] @ hidden)
        expected[t] += weights[t, j].double() * d
    assert_near(got, expected, case._replace(fp8=True) if case.fp8 else case._replace(dtype=torch.bfloat16))
    assert torch.equal(got[adapters < 0], made.layer.forward_modular(x, weights, ids)[adapters < 0])
    assert (got.double() - plain)[adapters >= 0].norm() > 0.1 * plain.norm()


def test_adapters_that_are_left_to_vllm(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    monkeypatch.setenv("W4GEMM_VLLM", "on")
    for case, settings, reason in (
        (CASES[0], {"apply_router_weight_on_input": True}, "applied on the input"),
        (CASES[0], {"all2all_backend": "deepep_low_latency"}, "in rows of experts"),
        (CASES[-2], {"dp_size": 2, "use_ep": True}, "tokens come in fp8"),
    ):
        on_input = settings.pop("apply_router_weight_on_input", False)
        layer = RoutedExperts(*layer_arguments(case, {**settings, "is_lora_enabled": True}))
        layer.apply_router_weight_on_input = on_input
        method = type(case.config()).__mro__[2].get_quant_method(case.config(), layer, "")
        assert reason in experts.why_not(method, layer)
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    assert "may depend on the batch" in experts.why_not(method, layer)
