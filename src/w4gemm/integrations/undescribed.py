"""``save_pretrained`` of transformers' models whose config does not know of their quantized layers, because only a part
of the model was quantized or a layer was put there by hand, is refused: transformers would load the folder with random
layers. Importing this file does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from w4gemm.api.packed_module import PackedModule
from w4gemm.integrations.wrapping import wrap


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


wrap(PreTrainedModel, "save_pretrained", _save_pretrained)
