"""Activations in 8 bits."""

import torch

from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape


class QuantFP8(CustomOp):
    def __init__(self, static: bool, group_shape: GroupShape) -> None:
        super().__init__()
        assert not static and group_shape == GroupShape.PER_TOKEN

    def forward_native(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (x.abs().amax(dim=-1).unsqueeze(-1).float() / 448).clamp(min=1 / (448 * 512))
        return (x.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn), scale
