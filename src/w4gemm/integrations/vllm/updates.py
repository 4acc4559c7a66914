"""Dense weights for layers that hold packed ones, as reinforcement learning sends them to a running engine:
:class:`DenseUpdate`.

vLLM's models find a parameter by the name of each tensor that comes, and call its ``weight_loader``. A packed layer has
a parameter of an unquantized layer's name too, empty unless its codes have that name. Its loader has vLLM put this
GPU's part of the tensor into a dense parameter. When all of that is loaded, it is quantized into the packed tensors,
and let go: one layer is dense at a time, if a layer's tensors come together.

Models are loaded anew in two ways. ``model.load_weights`` alone finds the packed layer. Between ``start_weight_update``
and ``finish_weight_update``, and in ``reload_weights``, vLLM's layerwise reloading has put the packed tensors aside;
afterwards it processes every layer that has loaded something, and puts them back. Then :func:`end_reload` says that
they are up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from w4gemm.api.update import update_
from w4gemm.integrations.engines.loading import mark, unloaded
from w4gemm.weights.weight import QuantizedWeight


class DenseUpdate:
    """Dense numbers of one parameter of a layer on their way into its packed weight.

    Args:
        name: of the parameter that an unquantized layer would have.
        what: the layer, for errors.
        weight: returns the packed weight of the layer's tensors by name; raises ValueError if dense numbers cannot take
            its place.
        gated: True if all gates lie before all ups; packed rows are pairs of them.
    """

    def __init__(
        self,
        name: str,
        what: str,
        weight: Callable[[Mapping[str, torch.Tensor]], QuantizedWeight],
        gated: bool = False,
    ) -> None:
        self.name, self.what, self.weight, self.gated = name, what, weight, gated
        self.dense = torch.nn.Module()
        """Has a parameter of the same name, of which a part is loaded; none between updates."""
        self.reload: Any = None
        """The tensors that vLLM had put aside when the newest dense numbers came; None if it had not."""

    def open(self, layer: torch.nn.Module) -> None:
        """Have the layer's parameter take dense numbers; make an empty one if there is none."""
        parameter: Any = layer._parameters.get(self.name)
        if parameter is None:
            device = next((p.device for p in layer.parameters(recurse=False)), torch.get_default_device())
            # int32, as codes have it, because vLLM asks a weight for its dtype
            parameter = torch.nn.Parameter(torch.empty(0, dtype=torch.int32, device=device), requires_grad=False)
            layer.register_parameter(self.name, parameter)
        own: Any = getattr(parameter, "weight_loader", None)
        if getattr(own, "__name__", "") == "_load_dense_or_own":
            return
        # without the layer, because vLLM keeps loaders and lets go of a layer that only its parameters' methods know
        bound = isinstance(own, MethodType) and own.__self__ is layer
        loader = own.__func__ if bound else own

        def _load_dense_or_own(
            layer: torch.nn.Module, param: Any, loaded_weight: Any, *args: Any, **options: Any
        ) -> Any:
            if loaded_weight.is_floating_point() and loaded_weight.element_size() > 1:
                return self.load(layer, loaded_weight, *args, **options)
            if loader is None:
                raise ValueError(
                    f"{self.what}: {self.name}: wanted dense numbers, got {loaded_weight.dtype}: the layer is packed; "
                    "quantized numbers are loaded by reload_weights, or after start_weight_update"
                )
            return loader(*([layer] if bound else []), param, loaded_weight, *args, **options)

        parameter.weight_loader = MethodType(_load_dense_or_own, layer)

    def close(self, layer: torch.nn.Module) -> None:
        """Remove the parameter if it is empty."""
        parameter = layer._parameters.get(self.name)
        if parameter is not None and not parameter.numel():
            delattr(layer, self.name)

    def load(self, layer: Any, loaded: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Load dense numbers by vLLM's own loader, whose other arguments ``args`` and ``options`` are; quantize them if
        they are the last ones.

        Raises:
            ValueError: if they cannot take the place of the packed ones.
        """
        from vllm.model_executor.parameter import ModelWeightParameter

        info = _reloading(layer)
        aside = None if info is None else info.kernel_tensors
        if aside is not self.reload:
            self.dense, self.reload = torch.nn.Module(), aside
        parameters, buffers = (layer._parameters, layer._buffers) if aside is None else aside
        try:
            w = self.weight(parameters | buffers)
        except ValueError as e:
            raise ValueError(f"{self.what}: {self.name}: dense numbers came for it, but {e}") from e
        fill = getattr(layer, "weight_loader_v2", layer.weight_loader)
        with _disable_current_modes():  # vLLM counts what is copied into parameters, and this is not one of the layer's
            is_new = self.name not in self.dense._parameters
            if is_new:
                data = torch.empty(w.shape, dtype=loaded.dtype, device=w.device)
                dense: Any = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=fill)
                for name in ("tp_rank", "tp_size"):
                    if hasattr(dense, name) and hasattr(layer, name):
                        setattr(dense, name, getattr(layer, name))
                self.dense.register_parameter(self.name, dense)
                mark(self.dense, [self.name])
            result = fill(self.dense.get_parameter(self.name), loaded, *args, **options)
            if result is False and is_new:  # an expert of other GPUs
                self.dense = torch.nn.Module()
            elif info is not None:
                info.load_numel = max(info.load_numel, 1)  # so that vLLM processes the layer
            if info is not None:  # vLLM would keep them to load them once more
                kept = [one for one in info.loaded_weights if one[1].arguments.get("loaded_weight") is not loaded]
                info.loaded_weights[:] = kept
            self._settle(w)
        return result

    def _settle(self, w: QuantizedWeight) -> None:
        """Quantize the dense numbers if all of them are loaded."""
        parameter = self.dense._parameters.get(self.name)
        # engines load whole rows: of many experts that come one by one, the first column is looked at alone
        if parameter is None or unloaded(parameter.data[..., :1].contiguous()) or unloaded(parameter):
            return
        self.dense = torch.nn.Module()
        rows: Any = parameter.data
        if self.gated:
            rows = tuple(half.contiguous() for half in rows.chunk(2, -2))
        try:
            update_(w, rows)
        except ValueError as e:
            raise ValueError(f"{self.what}: {self.name}: {e}") from e


def end_reload(layer: Any, updates: Collection[DenseUpdate], packed: Collection[str]) -> bool:
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
        if (parameter := update.dense._parameters.get(update.name)) is not None:
            update.dense = torch.nn.Module()
            raise RuntimeError(
                f"{update.what}: {update.name}: {unloaded(parameter):.2%} of its shape {tuple(parameter.shape)} was "
                "not loaded, wanted all of it"
            )
    return True


def _reloading(layer: torch.nn.Module) -> Any:
    """Return what vLLM knows of a layer that it is loading anew; None if it is not, or this version cannot."""
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError:
        return None
    info = get_layerwise_info(layer)
    return info if info.can_load() and info.kernel_tensors is not None else None
