"""The quantization of a model."""

_CUSTOMIZED_METHOD_TO_QUANT_CONFIG: dict[str, type] = {}


def register_quantization_config(quantization: str):
    def _wrapper(quant_config_cls):
        _CUSTOMIZED_METHOD_TO_QUANT_CONFIG[quantization] = quant_config_cls
        return quant_config_cls

    return _wrapper


def get_quantization_config(quantization: str) -> type:
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
    from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, Mxfp4Config

    method_to_config: dict[str, type] = {
        "awq": AutoAWQConfig,
        "gptq": AutoGPTQConfig,
        "compressed-tensors": CompressedTensorsConfig,
        "modelopt_fp4": ModelOptNvFp4Config,
        "moe_wna16": MoeWNA16Config,
        "mxfp4": Mxfp4Config,
        "gpt_oss_mxfp4": GptOssMxfp4Config,
    }
    method_to_config.update(_CUSTOMIZED_METHOD_TO_QUANT_CONFIG)
    if quantization not in method_to_config:
        raise ValueError(f"Invalid quantization method: {quantization}")
    return method_to_config[quantization]
