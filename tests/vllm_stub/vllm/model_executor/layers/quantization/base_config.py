"""The quantization of a model."""


class QuantizationConfig:
    def get_quant_method(self, layer, prefix):
        raise NotImplementedError


class QuantizeMethodBase:
    def process_weights_after_loading(self, layer) -> None:
        layer.runs_on_vllm = True
