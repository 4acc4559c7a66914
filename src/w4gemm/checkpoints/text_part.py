"""The language model of a checkpoint that has others beside it, such as a vision tower: :class:`TextPart`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from w4gemm.checkpoints.base import Checkpoint, Module, Pretrained
from w4gemm.weights.weight import QuantizedWeight

PREFIX = "language_model."
"""Begin of the names of a language model inside another model, in Kimi-K2.5's folders and other ones of their time."""


class TextPart:
    """The modules and tensors under :data:`PREFIX` of a checkpoint, without it: themselves a checkpoint."""

    def __init__(self, whole: Checkpoint) -> None:
        self.path, self._whole = whole.path, whole

    @property
    def modules(self) -> Mapping[str, Module]:
        return {name[len(PREFIX) :]: m for name, m in self._whole.modules.items() if name.startswith(PREFIX)}

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        return {name[len(PREFIX) :]: s for name, s in self._whole.tensors.items() if name.startswith(PREFIX)}

    def stored_type(self, name: str) -> str:
        return self._whole.stored_type(PREFIX + name)

    def weight(self, name: str, device: torch.device | str = "cpu") -> QuantizedWeight:
        return self._whole.weight(PREFIX + name, device)

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self._whole.dense(PREFIX + name, dtype)

    def pretrained(self) -> Pretrained:
        return self._whole.pretrained()
