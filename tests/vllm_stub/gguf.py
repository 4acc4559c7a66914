"""vLLM's GGUF plugin 0.0.5: parameters that hold raw blocks, those of a merged layer apart."""

from torch.nn.parameter import UninitializedParameter

from vllm_stub import GGUF
from vllm_stub.configs import QuantizationConfig
from vllm_stub.experts import FusedMoEMethodBase, RoutedExperts
from vllm_stub.linear import LinearMethodBase, VocabParallelEmbedding

at = GGUF.at("quantization")


@at
class GGUFConfig(QuantizationConfig):
    def get_quant_method(self, layer, prefix):
        if isinstance(layer, RoutedExperts):
            return GGUFMoEMethod(self, layer.moe_config)
        return GGUFEmbeddingMethod() if isinstance(layer, VocabParallelEmbedding) else GGUFLinearMethod()


@at
class GGUFLinearMethod(LinearMethodBase):
    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra_weight_attrs,
    ):
        self.params_dtype = params_dtype
        blocks, types = (UninitializedParameter(requires_grad=False) for _ in range(2))
        blocks.tensor_shape = sum(output_partition_sizes), input_size_per_partition
        blocks.data_container, blocks.shard_id, blocks.shard_id_map = [], [], {}
        types.weight_type, types.shard_weight_type = 0, {}
        blocks.weight_loader, types.weight_loader = store, store_type
        layer.register_parameter("qweight", blocks)
        layer.register_parameter("qweight_type", types)

    def process_weights_after_loading(self, layer):
        layer.processed = True

    def apply(self, layer, x, bias=None):
        return x + 1


@at
class GGUFMoEMethod(FusedMoEMethodBase):
    """Without the loader, which is vLLM's."""

    def __init__(self, quant_config, moe):
        super().__init__(moe)
        self.quant_config = quant_config

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
    ):
        for product in ("w13", "w2"):
            blocks, types = (UninitializedParameter(requires_grad=False) for _ in range(2))
            types.shard_weight_type = {}
            layer.register_parameter(f"{product}_qweight", blocks)
            layer.register_parameter(f"{product}_qweight_type", types)

    def process_weights_after_loading(self, layer):
        layer.processed = True


@at
class GGUFEmbeddingMethod(GGUFLinearMethod):
    pass


def store(param, loaded_weight, shard_id=None):
    if shard_id is None:
        param.materialize(tuple(loaded_weight.shape), dtype=loaded_weight.dtype)
        param.data.copy_(loaded_weight)
        return
    param.shard_id_map[shard_id] = len(param.data_container)
    param.data_container.append(loaded_weight)
    param.shard_id.append(shard_id)


def store_type(param, loaded_weight, shard_id=None):
    if shard_id is None:
        param.weight_type = int(loaded_weight)
    else:
        param.shard_weight_type[shard_id] = int(loaded_weight)
