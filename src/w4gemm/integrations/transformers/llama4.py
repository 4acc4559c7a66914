"""Llama 4's mixture around packed experts: :class:`RoutedMixture`."""

from __future__ import annotations

import torch
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe


class RoutedMixture(Llama4TextMoe):
    """A mixture whose ``experts`` are a :class:`w4gemm.W4Experts`.

    Llama 4 multiplies a token by the router's weight before its expert, not the expert's result. transformers' own
    mixture gives each expert every token, most of them times 0; here each expert gets the tokens that chose it.
    """

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(x)
        factors, ids = scores.topk(self.top_k, 1)
        rows = (x.unsqueeze(1) * factors.unsqueeze(2)).flatten(0, 1)  # one for each choice
        routed = self.experts(rows, ids.view(-1, 1), torch.ones_like(factors).view(-1, 1))
        return self.shared_expert(x) + routed.view(len(x), self.top_k, -1).sum(1), logits
