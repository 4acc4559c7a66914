"""What the stub has that is no layer: plugins and loaders."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch

from stub_modules import StubModules

SGLANG = StubModules("sglang.srt")
at = SGLANG.at


def parameter(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


@at("layers.parameter")
class ModelWeightParameter(torch.nn.Parameter):
    def __new__(cls, **kwargs):
        return super().__new__(cls, kwargs["data"], requires_grad=False)

    def __init__(self, output_dim, **kwargs):
        self.output_dim, self.weight_loader = output_dim, kwargs["weight_loader"]


@at("plugins.hook_registry")
class HookType(Enum):
    AROUND = "around"


@at("plugins.hook_registry")
class HookRegistry:
    _hooks: ClassVar[dict[str, list[Any]]] = defaultdict(list)
    _patched: ClassVar[set[str]] = set()

    @classmethod
    def register(cls, target, hook, hook_type=None, *, source=None):
        cls._hooks[target].append(hook)

    @classmethod
    def apply_hooks(cls):
        for target in cls._hooks.keys() - cls._patched:
            module, name, method = target.rsplit(".", 2)
            owner = getattr(sys.modules[module], name)
            for hook in cls._hooks[target]:
                setattr(owner, method, _around(hook, getattr(owner, method)))
            cls._patched.add(target)


def _around(hook, own):
    @functools.wraps(own)
    def hooked(*args, **kwargs):
        return hook(own, *args, **kwargs)

    return hooked


@at("model_executor.model_runner")
class ModelRunner:
    def load_model(self):
        self.load()


class _Loader:
    def load_model(self, *, model_config, device_config):
        return self.load()


@at("model_loader.loader")
class ShardedStateLoader(_Loader):
    pass


@at("model_loader.loader")
class DummyModelLoader(_Loader):
    pass


@at("model_loader.loader")
class PreshardedModelLoader(_Loader):
    pass


@at("model_loader.loader")
class RemoteInstanceModelLoader(_Loader):
    pass


@at("model_loader.loader")
class RemoteModelLoader:
    def _load_model_from_remote_kv(self, model, model_config, client):
        self.load()


@at("eplb.expert_location")
def get_global_expert_location_metadata():
    return None


class Named(NamedTuple):
    """A backend of SGLang's by its name."""

    value: str

    def is_none(self):
        return self.value == "none"

    def is_marlin(self):
        return self.value == "marlin"


class Asked:
    """What has weights. ``asked`` lists what was asked of it."""

    asked: list[str]

    def process_weights_after_loading(self, layer):
        self.asked.append("process")


@at("utils.torch_memory_saver_adapter")
class _TorchMemorySaverAdapterReal:
    def pause(self, tag):
        sys.modules[type(self).__module__]._memory_saver.pause(tag=tag)


@at("model_executor.cuda_graph_config")
def cuda_graph_fully_disabled():
    return False
