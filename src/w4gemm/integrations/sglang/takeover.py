"""SGLang as an engine: whether w4gemm takes over layers here, how it hooks methods, and what is ready before it serves.
Importing this imports no SGLang."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from w4gemm.core import environment
from w4gemm.integrations.engines import routes
from w4gemm.integrations.engines.engine import OFFLOADED, PACKED_BEFORE, Capability, Engine
from w4gemm.integrations.engines.warmup import Warmup
from w4gemm.weights.weight import QuantizedWeight

SGLANG = Engine(
    name="SGLang",
    variable="W4GEMM_SGLANG",
    switch=environment.sglang,
    logger="sglang.srt.w4gemm",
    distributions=("sglang",),
    group="sglang.srt.plugins",
    plugins="SGLANG_PLUGINS",
    tested=("0.5.23", "0.5.23"),
    folds_scales=False,
)
WARMUP = Warmup(SGLANG)
QUANTIZATION = "sglang.srt.layers.quantization"
"""SGLang's package of quantization methods."""
_UPDATES = (
    f"w4gemm has packed weights, and holds SGLang's parameters no longer; {SGLANG.variable}=off lets weights be updated"
)
"""Why weights of a loaded model cannot be updated: what SGLang answers then."""
_DERIVED = (
    f"w4gemm has packed kv_b_proj, of which SGLang derived other weights; {SGLANG.variable}=off lets weights be updated"
)
_MERGED = (
    "SGLang merges weights of Kimi-K3 anew when new ones are loaded, and CUDA graphs read the old ones; "
    "--disable-cuda-graph lets weights be updated"
)
"""The same where SGLang itself does not say so."""
_MERGES = ("_merge_front_weights", "_merge_bfa_weights")
"""Methods of SGLang's modules that do it."""
REFUSES_UPDATES = "_derived_weight_cache_error"
"""Attribute of a module that has SGLang refuse an update, in place of one that passes parameters over it lacks."""
UPDATES = "w4gemm_updates"
"""Attribute of a packed layer that takes new weights: its updates."""
ERRORS: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("w4gemm_errors", default=None)
"""Collects the errors of layers in a call of an update, which must not end SGLang's process; None outside of one."""
_dummy = contextvars.ContextVar("w4gemm_dummy", default=False)
"""True while SGLang loads random numbers (--load-format dummy): it leaves integers as their memory was."""
_packed_before = contextvars.ContextVar("w4gemm_packed_before", default=False)
"""True while SGLang loads weights that a running engine has written, or sends: it packs a layer while its memory holds
anything, or never, and copies what comes over the parameters that it finds by name."""


class Hook(NamedTuple):
    """A function that runs in place of a method of SGLang's."""

    target: str
    """Dotted name of the method."""
    parameters: tuple[str, ...]
    """Names of the first parameters that the method must have."""
    around: Callable[..., Any]
    """Called with the method and what the method is called with."""


def hook(hooks: Sequence[Hook]) -> None:
    """Give hooks to SGLang, which puts them around their methods when all plugins are loaded.

    Raises:
        ImportError, AttributeError: if this SGLang lacks one of the methods, or it takes other parameters. Then none is
            given.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, parameters, _ in hooks:
        names = tuple(inspect.signature(pkgutil.resolve_name(target)).parameters)
        if names[: len(parameters)] != parameters:
            raise AttributeError(f"{target} takes ({', '.join(names)}), wanted ({', '.join(parameters)})")
    for target, _, around in hooks:
        HookRegistry.register(target, around, HookType.AROUND)


def why_not_here(fp8: bool = False, device: torch.device | None = None) -> str:
    """Return why no layers are taken over of the engine that makes them now, or the empty string.

    Args:
        fp8: as for :meth:`w4gemm.integrations.engines.engine.Engine.why_not_here`.
        device: of the layers; None for the current GPU.
    """
    return SGLANG.why_not_here(capability(device), fp8) or (OFFLOADED if _offloads() else "") or packed_before()


def packed_before() -> str:
    """Return why the weights that are loaded now cannot be packed, or the empty string."""
    return PACKED_BEFORE if _packed_before.get() else ""


def dummy() -> bool:
    """True if SGLang makes up the weights that are loaded now."""
    return _dummy.get()


def _offloads() -> bool:
    from sglang.srt.runtime_context import get_exec

    settings = get_exec().offload
    return settings.cpu_offload_gb > 0 or settings.offload_group_size > 0


def capability(device: torch.device | None = None) -> Capability | None:
    """Compute capability of a GPU, None for the current one; None if there is none."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return None
    return torch.cuda.get_device_capability(device)


def deterministic() -> bool:
    """True if answers must not depend on the batch (``--enable-deterministic-inference``)."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def speculative() -> bool:
    """True if a draft model runs beside the model (``--speculative-algorithm``)."""
    from sglang.srt.runtime_context import get_spec

    return bool(get_spec().speculative_algorithm)


def experts_elsewhere() -> str:
    """Return why not all experts of a layer are where its parameters are, or the empty string."""
    from sglang.srt.runtime_context import get_exec, get_parallel

    if get_parallel().dwdp_size > 1:
        return "GPUs fetch experts from one another by the names of SGLang's parameters (--dwdp-size)"
    moe = getattr(get_exec(), "moe", None)
    if getattr(moe, "enable_paged_experts", False):
        return "experts come from the host's memory into SGLang's parameters (--enable-paged-experts)"
    return "" if getattr(moe, "kt_weight_path", None) is None else "the CPU has some experts (--kt-weight-path)"


def adapters() -> bool:
    """True if LoRA adapters may be loaded (``--enable-lora``)."""
    from sglang.srt.runtime_context import get_lora

    return bool(get_lora().enable_lora)


def load_model(own: Callable[..., Any], self: Any) -> Any:
    """Load a model as SGLang does; then prepare what its layers launch, before SGLang measures its memory and captures
    graphs.

    Raises:
        UnsupportedError: if a kernel cannot be compiled.
    """
    WARMUP.expect(self)
    result = own(self)
    refuse_derived(self.model)
    route_loads(self.model)
    WARMUP.settle(self)
    return result


def route_loads(model: Any) -> None:
    """Have tensors that come for a loaded model go past SGLang's loaders once their ways are known, until experts move
    (EPLB); SGLang loads some models in several threads, in which none are learned."""
    own, known, places = getattr(model, "load_weights", None), routes.Routes(), _expert_places()
    if own is None:
        return

    def load_weights(*args: Any, **options: Any) -> Any:
        nonlocal places
        if (now := _expert_places()) != places:
            known.clear()
            places = now
            for layer in model.modules():
                for update in getattr(layer, UPDATES, ()):
                    with errors_told():
                        update.refuse_part("experts moved (EPLB)")
        with errors_told(ValueError):
            return routes.route(own, known, *args, **options)[0]

    model.load_weights = load_weights


@contextlib.contextmanager
def errors_told(kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """Have an error of a layer be the answer to the call of an update, if SGLang is in one; else raise it."""
    try:
        yield
    except kind as e:
        if (errors := ERRORS.get()) is None:
            raise
        errors.append(str(e))


def _expert_places() -> bytes:
    """Return which expert is at each place of each layer, by which SGLang's loaders go."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    return b"" if metadata is None else bytes(metadata.physical_to_logical_map_cpu.numpy().tobytes())


def refuse_derived(model: torch.nn.Module) -> None:
    """Have SGLang refuse updates of a model of which it keeps weights that were derived from packed ones, or whose CUDA
    graphs read others than those that come."""
    for module in model.modules():
        if any(hasattr(module, name) for name in _MERGES) and _captures_graphs():
            setattr(module, REFUSES_UPDATES, _MERGED)
        projection = getattr(module, "kv_b_proj", None)
        if hasattr(projection, "w4gemm_weight"):
            setattr(projection, REFUSES_UPDATES, _DERIVED)


def _captures_graphs() -> bool:
    from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled

    return not cuda_graph_fully_disabled()


def _marks(flag: contextvars.ContextVar[bool]) -> Callable[..., Any]:
    """A hook around a method that loads weights: ``flag`` is true while SGLang's method runs."""

    def load(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        token = flag.set(True)
        try:
            return own(self, *args, **kwargs)
        finally:
            flag.reset(token)

    return load


_LOADERS = "sglang.srt.model_loader.loader"
LOADING = (
    Hook("sglang.srt.model_executor.model_runner.ModelRunner.load_model", ("self",), load_model),
    Hook(f"{_LOADERS}.ShardedStateLoader.load_model", ("self",), _marks(_packed_before)),
    Hook(f"{_LOADERS}.PreshardedModelLoader.load_model", ("self",), _marks(_packed_before)),
    Hook(f"{_LOADERS}.RemoteInstanceModelLoader.load_model", ("self",), _marks(_packed_before)),
    Hook(f"{_LOADERS}.DummyModelLoader.load_model", ("self",), _marks(_dummy)),
    Hook(f"{_LOADERS}.RemoteModelLoader._load_model_from_remote_kv", ("self",), _marks(_packed_before)),
)


@functools.cache
def hook_loading() -> None:
    """Put hooks around what loads a model, once in each process, for every part that takes over layers.

    Raises:
        ImportError, AttributeError: as from :func:`hook`.
    """
    hook(LOADING)


def exchange(layer: torch.nn.Module, old: Sequence[str], name: str, w: QuantizedWeight) -> QuantizedWeight:
    """Remove parameters of a layer and make a weight's tensors its parameters ``name_0``, ...; return that weight.

    Parameters, because SGLang moves, counts and rebalances a layer's parameters. A model of SGLang's may have a second
    name for an old one, which would keep its memory. The order of columns is a buffer, which SGLang keeps while it has
    given back the memory of weights (--enable-memory-saver).
    """
    tensors = {id(getattr(layer, each)) for each in old if hasattr(layer, each)}
    for each in {*old, *(each for each, p in layer._parameters.items() if id(p) in tensors)}:
        if hasattr(layer, each):
            delattr(layer, each)
    parameters = tuple(torch.nn.Parameter(t, requires_grad=False) for t in w.tensors)
    for i, parameter in enumerate(parameters):
        layer.register_parameter(f"{name}_{i}", parameter)
    if w.perm is not None:
        layer.register_buffer(f"{name}_perm", w.perm, persistent=False)
    setattr(layer, REFUSES_UPDATES, _UPDATES)
    return replace(w, tensors=parameters)
