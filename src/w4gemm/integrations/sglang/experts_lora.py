"""Experts of SGLang's with LoRA adapters, several in a step: :func:`with_adapters`.

SGLang's hooks add in place what adapters contribute to rows in the order of the tokens' choices: before the activation,
and to the weighted results of the second product. So the first product has no activation in its epilogue, and PyTorch's
operators bring rows from one order to the other. The launches do not depend on which adapters a step has.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.utils import get_moe_runner_backend

from w4gemm.api.experts import W4Experts, W4GroupedLinear
from w4gemm.api.routing import by_expert, combined, route
from w4gemm.core.activation import parse
from w4gemm.integrations.sglang.takeover import SGLANG, deterministic
from w4gemm.packing.repack import rows_in_pairs


def why_not(takes_adapters: bool) -> str:
    """Return why experts with adapters cannot be taken over, or the empty string.

    Args:
        takes_adapters: as of :class:`~w4gemm.integrations.sglang.experts_formats.Method`.
    """
    backend = get_moe_runner_backend().value
    if SGLANG.switch() != "on" and (takes_adapters or backend != "auto"):
        return f"--enable-lora is on, with which w4gemm was not timed; {SGLANG.variable}=on takes over"
    if deterministic():
        return "--enable-lora is on, whose sums may depend on the batch, and --enable-deterministic-inference"
    if backend.startswith(("lora", "experimental")):
        return f"--enable-lora is on, and --moe-runner-backend {backend} runs experts and adapters"
    return ""


def with_adapters(
    experts: W4Experts,
    first: W4GroupedLinear,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    hooks: Any,
    in_pairs: bool,
) -> torch.Tensor:
    """Return the weighted sum (tokens, features) of each token's experts and adapters.

    Args:
        first: ``experts.gate_up`` without its activation.
        ids, weights: (tokens, top k), of the router.
        hooks: SGLang's LoRAHooks.
        in_pairs: True if SGLang's rows of gates and ups alternate, as ours do; else all gates come first.
    """
    routing, formula = route(ids, experts.gate_up.weight.experts), parse(experts.activation)
    rows = first(x, routing.m_offsets, routing.tokens)[routing.row_of_choice.flatten().clamp(min=0)]
    if hooks is not None and hooks.after_gate_up is not None:
        in_halves = formula.formula.gated and not in_pairs
        sent = rows.unflatten(1, (-1, 2)).mT.flatten(1) if in_halves else rows
        hooks.after_gate_up(x, sent.view(*ids.shape, -1), weights, ids)
        rows = rows_in_pairs(sent) if in_halves else sent
    hidden = formula.apply(rows.float()).to(rows.dtype)
    d = experts.down(by_expert(hidden, routing.row_of_choice), routing.m_offsets)
    total = combined(d, routing.row_of_choice, weights, None, settled=True)
    if hooks is not None and hooks.after_down is not None:
        contributions = d.new_zeros(*ids.shape, d.shape[1])
        hooks.after_down(hidden, contributions, weights, ids)  # times the weights
        total = total + contributions.sum(1)
    return total
