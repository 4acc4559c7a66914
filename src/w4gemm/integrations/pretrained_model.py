"""What transformers' models do with quantized layers wherever they came from. Importing this file does it.

``save_pretrained`` refuses a model whose config does not know of its quantized layers, because only a part of the model
was quantized or a layer was put there by hand: transformers would load the folder with random layers.
``num_parameters`` counts the numbers of packed weights, which are no parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from w4gemm.api.nn import W4Embedding
from w4gemm.api.packed_module import PackedModule
from w4gemm.integrations.wrapping import wrap


def packed_numbers(model: nn.Module, embeddings: bool = True) -> int:
    """Return how many numbers the packed weights of a model stand for."""
    layers = [
        m for m in model.modules() if isinstance(m, PackedModule) and (embeddings or not isinstance(m, W4Embedding))
    ]
    return sum(layer.weight.shape.numel() for layer in layers)


def _save_pretrained(own: Callable[..., Any], model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    config = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    if getattr(config, "quant_method", None) != "w4gemm":  # else its quantizer compares config and layers
        name = next((name for name, layer in model.named_modules() if isinstance(layer, PackedModule)), None)
        if name is not None:
            raise ValueError(
                f"the model's config does not know of its quantized layers, such as {name}: call "
                "w4gemm.integrations.transformers.describe(model), then save"
            )
    return own(model, *args, **kwargs)


def _num_parameters(
    own: Callable[..., int], model: PreTrainedModel, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    packed = 0 if only_trainable else packed_numbers(model, not exclude_embeddings)
    return own(model, only_trainable, exclude_embeddings) + packed


wrap(PreTrainedModel, "save_pretrained", _save_pretrained)
wrap(PreTrainedModel, "num_parameters", _num_parameters)
