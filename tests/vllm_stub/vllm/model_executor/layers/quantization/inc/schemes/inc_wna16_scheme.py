"""AutoRound's integers."""


class INCWna16Scheme:
    def get_linear_method(self, config, layer, prefix, layer_config):
        return "vLLM's own"
