"""Settings of GPTQ for each layer."""

import re
from copy import deepcopy

from vllm.model_executor.layers.linear import LinearBase


def override_config(config, prefix):
    for key, name in (("bits", "weight_bits"), ("sym", "is_sym")):
        setattr(config, name, get_dynamic_override(config, prefix, key, getattr(config, name)))
    if (config.weight_bits, config.is_sym) not in config.TYPE_MAP:
        raise ValueError(f"Unsupported quantization config: bits={config.weight_bits}, sym={config.is_sym}")
    config.quant_type = config.TYPE_MAP[(config.weight_bits, config.is_sym)]


def get_dynamic_override(config, layer_name, key=None, default_value=None):
    for pattern, settings in config.dynamic.items():
        if re.match(pattern.removeprefix("+:"), layer_name):
            return settings if key is None else settings.get(key, default_value)
    return default_value


def get_linear_quant_method(config, layer, prefix, linear_method_cls):
    cloned_config = deepcopy(config)
    if isinstance(layer, LinearBase) or prefix:
        override_config(cloned_config, prefix)
    return linear_method_cls(cloned_config)
