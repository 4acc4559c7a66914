"""Linear layers in NVFP4."""

from vllm.model_executor.kernels.linear import init_nvfp4_linear_kernel


class CompressedTensorsW4A4Fp4:
    def __init__(self, use_a16=False):
        self.kernel = init_nvfp4_linear_kernel(use_a16=use_a16)

    def create_weights(self, layer, params_dtype, **others):
        layer.params_dtype = params_dtype
