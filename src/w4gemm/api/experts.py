"""Layers for mixtures of experts: :class:`W4Experts`, and :class:`W4GroupedLinear`, of which it has two."""

from __future__ import annotations

from typing import Any

import torch

from w4gemm.api.grouped import grouped_linear
from w4gemm.api.modes import autocast
from w4gemm.api.nn import W4Linear
from w4gemm.api.routing import combine, route
from w4gemm.weights.weight import QuantizedWeight


class W4GroupedLinear(W4Linear):
    """:func:`w4gemm.grouped_linear` as a layer: x (total_m, k) sorted by expert, or rows of x that indices (total_m)
    name, and m_offsets (experts + 1) to (total_m, n). Made with :meth:`from_weight`; the bias is (experts, n)."""

    grouped = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("W4GroupedLinear: made with from_weight alone")

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, m_offsets: torch.Tensor, indices: torch.Tensor | None = None
    ) -> torch.Tensor:
        x, bias = autocast(x, self._parameters["bias"])
        return grouped_linear(x, self._weight, m_offsets, bias, indices=indices, activation=self.activation)


class W4Experts(torch.nn.Module):
    """The experts of a mixture, each with 4-bit weights: down @ (silu(gate @ x) * (up @ x)), weighted and summed.

    All data stays on the device, and the launches are the same whatever the router chose, so that a CUDA graph can
    capture them. A token's terms are added in the order of its choices. Inference only. If a weight's ``activations``
    is "fp8", its product quantizes x; gate_up and down each say their own, and a state dict keeps it.

    Args:
        gate_up: (2 * hidden, features) per expert, gates and ups in pairs: :meth:`QuantizedWeight.interleave`.
        down: (features, hidden) per expert.
        dtype: dtype to advertise, as for :meth:`W4Linear.from_weight`.
        activations: "fp8" or None for both products; "same" for what each weight says.

    Raises:
        TypeError, ValueError: for weights without experts, or of sizes that do not match.
    """

    def __init__(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        *,
        dtype: torch.dtype | None = None,
        activations: str | None = "same",
    ) -> None:
        super().__init__()
        self.gate_up = W4GroupedLinear.from_weight(gate_up, dtype=dtype)
        self.down = W4GroupedLinear.from_weight(down, dtype=dtype)
        if (down.experts, down.n, 2 * down.k) != (gate_up.experts, gate_up.k, gate_up.n):
            raise ValueError(
                f"down: wanted {gate_up.experts} experts with n {gate_up.k} and k {gate_up.n / 2:g} for {gate_up!r}, "
                f"got {down!r}"
            )
        self.gate_up.activation = "silu_mul"
        if activations != "same":
            self.gate_up.activations = self.down.activations = activations

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        """x (tokens, features); expert_ids int32 or int64 and expert_weights floating point (tokens, top k), what the
        router chose: (tokens, features). Ids of experts that are not here add nothing."""
        routing = route(expert_ids, self.gate_up.weight.experts)
        if isinstance(x, torch.Tensor) and expert_ids.shape[:1] != x.shape[:1]:
            raise ValueError(f"expert_ids: wanted {len(x)} rows, one for each of x, got {tuple(expert_ids.shape)}")
        hidden = self.gate_up(x, routing.m_offsets, routing.tokens)
        return combine(self.down(hidden, routing.m_offsets), routing.row_of_choice, expert_weights)
