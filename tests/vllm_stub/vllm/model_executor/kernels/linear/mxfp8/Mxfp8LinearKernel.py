"""A kernel of linear layers in MXFP8."""

from abc import ABC, abstractmethod


class Mxfp8LinearKernel(ABC):
    def __init__(self, c) -> None:
        assert self.can_implement(c)[0]
        assert self.is_supported()[0]
        self.config = c

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
