"""vLLM's settings, platform, compilation and worker, and its record of layers that are loaded anew."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import fx

from vllm_stub import VLLM

at, put = VLLM.at, VLLM.put

put("envs", VLLM_BATCH_INVARIANT=False, VLLM_DISABLED_KERNELS=[], environment_variables={})


@at("config.vllm", "config")
def get_current_vllm_config_or_none() -> Any:
    return None


@at("platforms.interface", "platforms")
class PlatformEnum(enum.Enum):
    CUDA = enum.auto()


@at("platforms.interface")
class DeviceCapability(NamedTuple):
    major: int
    minor: int


@at("platforms.interface")
class Platform:
    @property
    def pass_key(self) -> str:
        return "post_grad_custom_post_pass"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return DeviceCapability(9, 0)


put("platforms", current_platform=Platform())


# --- a step of a model -----------------------------------------------------------------------------------------------


@at("forward_context")
@dataclass
class DPMetadata:
    num_tokens_across_dp_cpu: torch.Tensor


@at("forward_context")
@dataclass
class ForwardContext:
    dp_metadata: DPMetadata | None = None


put("forward_context", _forward_context=None)


@at("forward_context")
def get_forward_context():
    import vllm.forward_context as context

    return context._forward_context


@at("forward_context")
def is_forward_context_available():
    return get_forward_context() is not None


# --- compilation -----------------------------------------------------------------------------------------------------

PASSES = "compilation.passes.inductor_pass"


@at(PASSES)
class Range(NamedTuple):
    start: int
    end: int


@at(PASSES)
class PassContext:
    def __init__(self, compile_range: Range) -> None:
        self.compile_range = compile_range


_contexts: list[PassContext] = []


@at(PASSES)
def get_pass_context() -> PassContext:
    assert _contexts
    return _contexts[-1]


@at(PASSES)
@contextmanager
def pass_context(compile_range: Range) -> Iterator[None]:
    _contexts.append(PassContext(compile_range))
    try:
        yield
    finally:
        _contexts.pop()


@at(PASSES)
class InductorPass:
    def uuid(self) -> str:
        return type(self).__name__


@at(PASSES)
class CallableInductorPass(InductorPass):
    def __init__(self, callable: Callable[[fx.Graph], None], uuid: Any | None = None) -> None:
        self.callable = callable

    def __call__(self, graph: fx.Graph) -> None:
        self.callable(graph)


@at("ir.ops")
def fused_add_rms_norm(
    x: torch.Tensor, x_residual: torch.Tensor, weight: torch.Tensor, epsilon: float, variance_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.float() + x_residual.float()
    y = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return (y.to(weight.dtype) * weight).to(x.dtype), total.to(x.dtype)


if not hasattr(torch.ops.vllm_ir, "fused_add_rms_norm"):  # the stub may be imported again
    schema = "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, int? variance_size=None) -> (Tensor, Tensor)"
    torch.library.define("vllm_ir::fused_add_rms_norm", schema)
    torch.library.impl("vllm_ir::fused_add_rms_norm", "cpu")(fused_add_rms_norm)
    torch.library.register_fake("vllm_ir::fused_add_rms_norm")(fused_add_rms_norm)


# --- loading ---------------------------------------------------------------------------------------------------------


@at("v1.worker.gpu_worker")
class Worker:
    @contextmanager
    def _scoped_allocator_max_split(self, max_split_size_mb: int) -> Iterator[None]:
        yield

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass


@at("model_executor.model_loader.reload.types")
@dataclass
class LayerReloadingInfo:
    load_numel: int = 0
    load_numel_total: int | None = None
    loaded_weights: list = field(default_factory=list)
    kernel_tensors: tuple | None = None

    def can_load(self):
        return self.load_numel_total is not None


_reloading: WeakKeyDictionary = WeakKeyDictionary()


@at("model_executor.model_loader.reload.layerwise")
def get_layerwise_info(layer):
    return _reloading.setdefault(layer, LayerReloadingInfo())
