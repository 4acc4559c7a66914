"""The facts of a step while a model runs."""

from dataclasses import dataclass

import torch


@dataclass
class DPMetadata:
    num_tokens_across_dp_cpu: torch.Tensor


@dataclass
class ForwardContext:
    dp_metadata: DPMetadata | None = None


_forward_context: ForwardContext | None = None


def get_forward_context():
    return _forward_context


def is_forward_context_available():
    return _forward_context is not None
