"""A kernel of linear layers in fp8."""

from abc import ABC, abstractmethod


class ScaledMMLinearKernel(ABC):
    def __init__(self, c, layer_param_names):
        assert self.can_implement(c)[0]
        assert self.is_supported()[0]
        self.config, self.layer_param_names = c, layer_param_names

    @classmethod
    @abstractmethod
    def is_supported(cls, compute_capability=None):
        raise NotImplementedError

    @classmethod
    @abstractmethod
    def can_implement(cls, c):
        raise NotImplementedError

    @abstractmethod
    def process_weights_after_loading(self, layer):
        raise NotImplementedError

    @abstractmethod
    def apply_weights(self, layer, x, bias=None):
        raise NotImplementedError


class FP8ScaledMMLinearKernel(ScaledMMLinearKernel):
    @abstractmethod
    def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape):
        raise NotImplementedError
