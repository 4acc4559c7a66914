"""Weights that come for packed layers of a running vLLM: :class:`ReloadedUpdate`, of experts :class:`ExpertsUpdate`.

Models are loaded anew in two ways. ``model.load_weights`` alone finds the packed layer. Between ``start_weight_update``
and ``finish_weight_update``, and in ``reload_weights``, vLLM's layerwise reloading has put the packed tensors aside;
afterwards it processes every layer that has loaded something, and puts them back. Then :func:`end_reload` says that
they are up to date.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from w4gemm.integrations.engines import routes
from w4gemm.integrations.engines.copies import is_wrapper
from w4gemm.integrations.engines.updates import DenseUpdate, Tensors
from w4gemm.integrations.vllm.moving import moving, placement, stop_moves
from w4gemm.integrations.wrapping import wrap
from w4gemm.weights.weight import QuantizedWeight

_OFF = "W4GEMM_VLLM=off leaves the layer to vLLM"
_came: weakref.WeakSet[Any] = weakref.WeakSet()
"""Layers that got dense numbers while vLLM had put their tensors aside."""


class ReloadedUpdate(DenseUpdate):
    """Dense numbers of one parameter of a layer, which vLLM may be loading anew. Arguments as of its base."""

    hint = "; quantized numbers are loaded by reload_weights, or after start_weight_update"
    asked_dtype = torch.uint8
    """As vLLM's NVFP4 has it. MLA makes what it has kept of earlier chunks of a prompt the dtype of ``kv_b_proj``'s
    weight: int32 too, in vLLM 0.26 and in 0.33's dots3-note, but not uint8."""

    def __init__(self, name: str, what: str, weight: Callable[[Tensors], QuantizedWeight], gated: bool = False) -> None:
        super().__init__(name, what, weight, gated, _dense_parameter)
        self.reload: Any = None
        """The tensors that vLLM had put aside when the newest dense numbers came; None if it had not."""
        _route_loads()
        _end_reloads()

    def begin(self, layer: Any) -> None:
        """As that of the base.

        Raises:
            ValueError: also if vLLM has NaN stand for numbers that stay as they are (its transfer of sparse weights).
        """
        if getattr(torch.Tensor.copy_, "__name__", "") == "copy_non_nan_":
            raise ValueError(f"{self.what}: {self.name}: wanted all numbers of a tensor, got a sparse patch; {_OFF}")
        info = _reloading(layer)
        aside = None if info is None else info.kernel_tensors
        if aside is not self.reload:
            self.forget()
            self.reload = aside
        parameters, buffers = (layer._parameters, layer._buffers) if aside is None else aside
        self.begin_with(layer, parameters | buffers)
        if info is not None:
            info.load_numel = max(info.load_numel, 1)  # so that vLLM processes the layer
            _came.add(layer)

    def load(self, layer: Any, loaded: torch.Tensor, *args: Any, **options: Any) -> Any:
        """As that of the base.

        Raises:
            ValueError: also for a tensor without memory of its own, by which vLLM finds out what a layer's loader
                copies where (its transfer of shards by Ray): the parameter that this one fills is gone afterwards.
        """
        if is_wrapper(loaded):
            kind = type(loaded).__name__
            raise ValueError(f"{self.what}: {self.name}: wanted a tensor with its own memory, got a {kind}; {_OFF}")
        with _disable_current_modes():  # vLLM counts what is copied into parameters, and this is not one of the layer's
            result = super().load(layer, loaded, *args, **options)
        if (info := _reloading(layer)) is not None:  # vLLM would keep them to load them once more
            kept = [one for one in info.loaded_weights if one[1].arguments.get("loaded_weight") is not loaded]
            info.loaded_weights[:] = kept
        return result


class ExpertsUpdate(ReloadedUpdate):
    """Dense numbers of a product of experts.

    Args:
        padding: as the attribute of this name.
        moves: True if experts move (EPLB).
        stacked: True for gpt-oss, whose tensors hold all experts, (experts, k, n), or, in vLLM 0.33, one, (k, n), and
            which vLLM's model takes apart as if they were packed.
    """

    def __init__(
        self,
        name: str,
        what: str,
        weight: Callable[[Tensors], QuantizedWeight],
        gated: bool,
        padding: Callable[[torch.Tensor], Iterable[torch.Tensor]],
        moves: bool,
        stacked: bool,
    ) -> None:
        super().__init__(name, what, weight, gated)
        self.padding, self.moves, self.stacked = padding, moves, stacked

    places: list[list[int]] | None = None
    """Where each expert is, if experts have moved."""

    def begin_with(self, layer: Any, tensors: Tensors) -> None:
        """As that of the base.

        Raises:
            RuntimeError: if experts have moved since a part of the numbers came.
        """
        super().begin_with(layer, tensors)
        if self.moves and (moved := moving(layer)) is not None:
            places = moved.places()
            if self.numbers and places != self.places:
                self.forget()
                raise RuntimeError(f"{self.what}: {self.name}: experts moved (EPLB) when a part of it had come")
            self.places = places

    def loader(self, layer: Any) -> Callable[..., Any]:
        own = functools.partial(self._load_stacked, layer) if self.stacked else super().loader(layer)
        return own if self.places is None else functools.partial(self._load_where_it_is, own)

    def _load_where_it_is(
        self,
        own: Callable[..., Any],
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        *args: Any,
        expert_id: int | None = None,
        **options: Any,
    ) -> bool:
        """Load an expert to all of its places. expert_id: its place at the start, which is its number or, for further
        places, larger than all of these.

        Raises:
            ValueError: for a tensor of all experts, of which vLLM's model has taken those that were here at the start.
        """
        assert self.places is not None
        if expert_id is None:
            raise ValueError(f"{self.what}: {self.name}: experts have moved (EPLB): send them one by one")
        options["return_success"] = True
        places = self.places[expert_id] if expert_id < len(self.places) else []
        count = sum(own(param, loaded_weight, *args, expert_id=place, **options) for place in places)
        self.numbers += max(0, count - 1) * loaded_weight.numel()
        return count > 0

    def _load_stacked(
        self,
        layer: Any,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str = "",
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool:
        """Load all experts of this GPU, or one.

        Raises:
            ValueError: if tensor parallelism has divided the tensor of all experts, whose numbers vLLM's model had
                viewed in another shape before.
        """
        experts, n, k = param.shape
        if expert_id is not None:
            local = layer._map_global_expert_id_to_local_expert_id(expert_id)
            if local >= 0:
                layer._load_unquantized_expert(param.data[local], loaded_weight, shard_id)
            return bool(local >= 0)
        if loaded_weight.numel() != param.numel():
            raise ValueError(
                f"{self.what}: {self.name}: wanted {experts} whole experts of {n} x {k} numbers, got a part of them, "
                f"{tuple(loaded_weight.shape)}: use --enable-expert-parallel, or send experts one by one"
            )
        param.data.copy_(loaded_weight.reshape(experts, k, n).mT)
        return True


def _end_reloads() -> None:
    """Have layers that got dense numbers alone take back what vLLM put aside, before vLLM processes all layers.

    vLLM would make their quantized parameters, and copy packed tensors over themselves. An error is raised when all
    layers have their tensors back, so that the model can go on."""
    try:
        from vllm.model_executor.model_loader.reload import layerwise

        place = layerwise._place_kernel_tensors
    except (ImportError, AttributeError):
        return

    def finalize(own: Callable[..., None], model: torch.nn.Module, *args: Any, **options: Any) -> None:
        errors: list[Exception] = []
        layers: list[Any] = [module for module in model.modules() if module in _came]
        for layer in layers:
            _came.discard(layer)
            info = _reloading(layer)
            if info is None or info.loaded_weights:  # such as a bias, which vLLM loads once more
                continue
            try:
                layer.quant_method.process_weights_after_loading(layer)
            except (RuntimeError, ValueError) as e:
                errors.append(e)
            place(layer, info)
            info.reset()
        own(model, *args, **options)
        if errors:
            raise errors[0]

    wrap(layerwise, "finalize_layerwise_processing", finalize)


def _dense_parameter() -> Any:
    from vllm.model_executor.parameter import ModelWeightParameter

    return ModelWeightParameter


def end_reload(layer: Any, updates: Collection[ReloadedUpdate], packed: Collection[str]) -> bool:
    """Have a layer take back what vLLM put aside to load it anew, if dense numbers came instead; return whether.

    Args:
        packed: names of the parameters that quantized numbers are loaded into.

    Raises:
        RuntimeError: if only a part of the dense numbers has come, or quantized ones have come too.
    """
    info = _reloading(layer)
    came = [] if info is None else [update for update in updates if update.reload is info.kernel_tensors]
    if info is None or not came:
        return False
    loaded = {name for name, _ in info.loaded_weights}
    if both := sorted(loaded & set(packed)):
        raise RuntimeError(f"{came[0].what}: {both[0]}: wanted dense or quantized numbers, got both")
    for own, held in zip((layer._parameters, layer._buffers), info.kernel_tensors, strict=True):
        for name in [name for name, t in own.items() if t is not None and name not in loaded]:
            del own[name]
        own.update((name, t) for name, t in held.items() if name not in loaded)
    for update in came:
        update.reload = None
        update.end()
    return True


def _route_loads() -> None:
    """Have the tensors of a model's ``load_weights`` go past vLLM's loaders once their ways are known, until experts
    move."""
    try:
        from vllm.model_executor.models.utils import AutoWeightsLoader
    except ImportError:
        return
    wrap(AutoWeightsLoader, "load_weights", _load_weights)


def _load_weights(
    own: Callable[..., set[str]], loader: Any, weights: routes.Weights, *args: Any, **options: Any
) -> set[str]:
    of_model = vars(loader.module)
    known = of_model.setdefault("w4gemm_routes", routes.Routes())
    if routes.current() is None:
        stop_moves()
        if of_model.get("w4gemm_placement") != (now := placement()):
            known.clear()
            of_model["w4gemm_placement"] = now
    loaded, names = routes.route(functools.partial(own, loader), known, weights, *args, **options)
    return set(loaded) | names


def _reloading(layer: torch.nn.Module) -> Any:
    """Return vLLM's record of a layer that it is loading anew; None if it is not, or this version cannot."""
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError:
        return None
    info = get_layerwise_info(layer)
    return info if info.can_load() and info.kernel_tensors is not None else None
