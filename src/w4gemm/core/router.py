"""How a mixture's router chooses experts by its logits: :class:`Router`, and the choice by PyTorch's operators."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from w4gemm.core.errors import require_bool, require_int
from w4gemm.core.function_names import require_scoring

MOST_TOP_K = 32
MOST_GROUPS = 32
LEAST_SUM = 1e-20
"""Added to the sum of weights that divides them."""
LOWEST, LOWEST_NUMBER = -(2**31), -(2**31) + 1
"""Keys of what may not be chosen, and of NaN, which is chosen last."""


@dataclass(frozen=True)
class Router:
    """The rule by which a token's experts follow from the logits of a router.

    score = softmax(logits) or sigmoid(logits), in float32, and choice = score + bias. The experts are divided into
    ``groups`` of consecutive ones. A group's value is its largest choice or, with a bias, the sum of its two largest.
    Of the ``top_groups`` groups of largest value, the ``top_k`` experts of largest choice are chosen, in descending
    order. Of equal ones the lower number comes first. A weight is the expert's score, divided by the sum of the chosen
    ones if ``renormalize``, times ``scale``.

    Args:
        top_k: experts of a token, 1 to 32.
        scoring: "softmax" (Mixtral, Qwen3; gpt-oss with ``renormalize``) or "sigmoid" (DeepSeek-V3, GLM-4.5).
        renormalize: True if a token's weights add up to ``scale``.
        groups, top_groups: 1 to 32 groups, and how many of them a token's experts may come from.
        scale: factor of all weights (``routed_scaling_factor``).

    Raises:
        TypeError, ValueError: for another value; the message names the argument.

    Examples:
        >>> w4gemm.Router(8, "sigmoid", groups=8, top_groups=4, scale=2.5)  # DeepSeek-V3
        Router(top_k=8, scoring='sigmoid', renormalize=True, groups=8, top_groups=4, scale=2.5)
    """

    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        require_int("top_k", self.top_k, 1, MOST_TOP_K)
        require_int("groups", self.groups, 1, MOST_GROUPS)
        require_int("top_groups", self.top_groups, 1, self.groups)
        require_bool("renormalize", self.renormalize)
        require_scoring(self.scoring)
        if isinstance(self.scale, bool) or not isinstance(self.scale, (int, float)):
            raise TypeError(f"scale: wanted a float, got {self.scale!r}")
        if not math.isfinite(self.scale):
            raise ValueError(f"scale: wanted a finite float, got {self.scale}")

    def refusal(self, experts: int, biased: bool) -> str:
        """Return why the rule does not fit a number of experts; the empty string if it does."""
        if experts % self.groups:
            return f"wanted a multiple of {self.groups} groups, got {experts} experts"
        if experts // self.groups * self.top_groups < self.top_k:
            groups = f"{self.top_groups} of {self.groups} groups"
            return f"wanted {self.top_k} experts or more in {groups}, got {experts} in all"
        if self.groups > 1 and biased and experts < 2 * self.groups:
            return f"wanted two experts or more in each of {self.groups} groups, got {experts} in all"
        return ""

    def choose(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return experts int32 and weights float32, both (tokens, top k), by PyTorch's operators.

        Args:
            logits: floating point (tokens, experts), of a number of experts that the rule fits.
            bias: float32 (experts,) or None.
        """
        logits = logits.float()
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        keys = _ordered((scores if bias is None else scores + bias).detach())
        if self.groups > 1:
            tops = keys.unflatten(1, (self.groups, -1)).topk(1 if bias is None else 2).values
            values = _ordered(_number(tops).sum(-1))
            best = values.sort(dim=1, descending=True, stable=True).indices[:, : self.top_groups]
            taken = torch.zeros_like(values, dtype=torch.bool).scatter(1, best, True)
            keys = keys.masked_fill(~taken.repeat_interleave(keys.shape[1] // self.groups, 1), LOWEST)
        experts = keys.sort(dim=1, descending=True, stable=True).indices[:, : self.top_k]
        weights = scores.gather(1, experts)
        if self.renormalize:
            weights = weights / (weights.sum(1, keepdim=True) + LEAST_SUM)
        return experts.int(), weights * self.scale


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """Return int32 keys in the order of float32 values."""
    bits = values.contiguous().view(torch.int32)
    return torch.where(values.isnan(), LOWEST_NUMBER, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _number(keys: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of keys."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)
