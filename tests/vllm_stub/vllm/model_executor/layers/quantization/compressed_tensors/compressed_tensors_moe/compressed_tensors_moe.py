"""The choice of a method of experts."""

from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase


class CompressedTensorsMoEMethod(FusedMoEMethodBase):
    @staticmethod
    def get_moe_method(quant_config, layer, layer_name):
        from .compressed_tensors_moe_w4a4_mxfp4 import CompressedTensorsW4A4Mxfp4MoEMethod
        from .compressed_tensors_moe_w4a4_nvfp4 import CompressedTensorsW4A4Nvfp4MoEMethod
        from .compressed_tensors_moe_w4a8_fp8 import CompressedTensorsW4A8Fp8MoEMethod
        from .compressed_tensors_moe_w4a8_mxfp4 import CompressedTensorsW4A8Mxfp4MoEMethod
        from .compressed_tensors_moe_wna16 import CompressedTensorsWNA16MoEMethod

        scheme = quant_config.target_scheme_map["Linear"]
        weights, activations = scheme["weights"], scheme["input_activations"]
        if weights.type == "float" and activations is not None:
            return CompressedTensorsW4A8Mxfp4MoEMethod(layer.moe_config)
        if weights.type == "float":
            floats = {16: CompressedTensorsW4A4Nvfp4MoEMethod, 32: CompressedTensorsW4A4Mxfp4MoEMethod}
            return floats[weights.group_size](layer.moe_config)
        cls = CompressedTensorsWNA16MoEMethod if activations is None else CompressedTensorsW4A8Fp8MoEMethod
        return cls(weights, activations, layer.moe_config)
