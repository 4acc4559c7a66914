"""Experts of SGLang's with LoRA adapters, several in a step: :func:`with_adapters`.

SGLang's hooks add in place what adapters contribute to rows in the order of the tokens' choices: before the activation,
and to the weighted results of the second product. So the first product has no activation in its epilogue, and a launch
of its own adds, activates and brings rows into both orders. The launches do not depend on which adapters a step has.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.utils import get_moe_runner_backend

from w4gemm.api.experts import W4Experts, W4GroupedLinear
from w4gemm.api.routing import combined, routed
from w4gemm.integrations.engines.adapters import adapted
from w4gemm.integrations.sglang.takeover import SGLANG, deterministic


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
    routing, activation = routed(ids, experts.gate_up.weight.experts), experts.activation
    rows, halves = first(x, routing.m_offsets, routing.tokens), not in_pairs
    added, added_to_down = rows.new_zeros(*ids.shape, rows.shape[1]), x.new_zeros(*ids.shape, experts.down.weight.n)
    if hooks is not None and hooks.after_gate_up is not None:
        hooks.after_gate_up(x, added, weights, ids)
    hidden = adapted(rows, added.flatten(0, 1), routing.row_of_choice, activation, halves)
    d = experts.down(hidden.by_expert, routing.m_offsets)
    if hooks is not None and hooks.after_down is not None:
        hooks.after_down(hidden.by_choice, added_to_down, weights, ids)  # times the weights
    return combined(d, routing.row_of_choice, weights, None, settled=True, added=added_to_down.flatten(0, 1))
