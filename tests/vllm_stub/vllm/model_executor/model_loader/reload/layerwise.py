"""Layers that are loaded anew, one after the other."""

from weakref import WeakKeyDictionary

from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

LAYERWISE_INFO: WeakKeyDictionary = WeakKeyDictionary()


def get_layerwise_info(layer):
    return LAYERWISE_INFO.setdefault(layer, LayerReloadingInfo())
