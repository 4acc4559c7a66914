"""Operators of several implementations."""

from typing import Any

import torch


class CustomOp(torch.nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError
