"""Weights that come for packed layers of a running engine, as reinforcement learning sends them: :class:`DenseUpdate`.

An engine's models find a parameter by the name of each tensor that comes, and call its ``weight_loader``. A packed
layer has an empty parameter of each such name. Its loader has the engine put this GPU's part of the tensor into a
parameter that holds it until all parts have come. Then they are packed into the layer's own tensors, to which CUDA
graphs point, and let go: one layer is held twice at a time, if a layer's tensors come together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch

from w4gemm.api.update import update_
from w4gemm.integrations.engines.loading import mark, unloaded
from w4gemm.weights.weight import QuantizedWeight

Tensors = Mapping[str, torch.Tensor]


class Update:
    """Numbers of a layer on their way into its packed weight.

    Args:
        what: the layer, for errors.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.coming = torch.nn.Module()
        """Has the parameters of which a part is loaded; none between updates."""
        self.lock = threading.RLock()
        """SGLang loads experts in several threads."""

    def expect(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Wait for all of these parameters."""
        for name, parameter in parameters.items():
            self.coming.register_parameter(name, parameter)
        mark(self.coming, parameters)

    def taken_if_whole(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters, which are waited for no longer, if all of them are loaded; else none."""
        parameters: dict[str, Any] = dict(self.coming._parameters)
        # engines load whole rows: of many experts that come one by one, the first column is looked at alone
        if any(unloaded(p.data[..., :1].contiguous()) or unloaded(p) for p in parameters.values()):
            return {}
        self.coming = torch.nn.Module()
        return parameters

    def end(self) -> None:
        """Let go of what has come. Called when the engine says that an update is at its end.

        Raises:
            RuntimeError: if that is a part of the parameters.
        """
        parameters, self.coming = self.coming._parameters, torch.nn.Module()
        for name, parameter in parameters.items():
            if parameter is not None and (share := unloaded(parameter)):
                raise RuntimeError(
                    f"{self.what}: {name}: {share:.2%} of its shape {tuple(parameter.shape)} was not loaded, wanted "
                    "all of it"
                )


class DenseUpdate(Update):
    """Dense numbers of one parameter of a layer, which are quantized in the layer's own format.

    Args:
        name: of the parameter that an unquantized layer would have.
        what: the layer, for errors.
        weight: returns the packed weight of the layer's tensors by name; raises ValueError if dense numbers cannot take
            its place.
        gated: True if all gates lie before all ups; packed rows are pairs of them.
        parameter: returns the engine's class of parameters of unquantized weights.
    """

    hint = ""
    """How quantized numbers are loaded, for the error if some come."""

    def __init__(
        self,
        name: str,
        what: str,
        weight: Callable[[Tensors], QuantizedWeight],
        gated: bool,
        parameter: Callable[[], Any],
    ) -> None:
        super().__init__(what)
        self.name, self.weight, self.gated, self.parameter = name, weight, gated, parameter
        self.padding: Callable[[torch.Tensor], Iterable[torch.Tensor]] = lambda dense: ()
        """Returns the parts of the layer's dense numbers that come in no tensor, and are zeros."""
        self.numbers = 0
        """Numbers that have come, on all GPUs."""

    def open(self, layer: torch.nn.Module) -> None:
        """Have the layer's parameter take dense numbers; make an empty one if there is none."""
        parameter: Any = layer._parameters.get(self.name)
        if parameter is None:
            device = next((p.device for p in layer.parameters(recurse=False)), torch.get_default_device())
            # int32, as codes have it, because engines ask a weight for its dtype
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
                    f"{self.what}: {self.name}: wanted dense numbers, got {loaded_weight.dtype}: the layer is packed"
                    f"{self.hint}"
                )
            return loader(*([layer] if bound else []), param, loaded_weight, *args, **options)

        parameter.weight_loader = MethodType(_load_dense_or_own, layer)

    def close(self, layer: torch.nn.Module) -> None:
        """Remove the parameter if it is empty."""
        parameter = layer._parameters.get(self.name)
        if parameter is not None and not parameter.numel():
            delattr(layer, self.name)

    def load(self, layer: Any, loaded: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Load dense numbers by the engine's own loader, whose other arguments ``args`` and ``options`` are; quantize
        them if they are the last ones.

        Raises:
            ValueError: if they cannot take the place of the packed ones.
        """
        return self.fill(layer, layer._parameters | layer._buffers, loaded, *args, **options)

    def fill(self, layer: Any, tensors: Tensors, loaded: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Do as :meth:`load`, for a layer whose packed tensors are ``tensors``."""
        try:
            w = self.weight(tensors)
        except ValueError as e:
            raise ValueError(f"{self.what}: {self.name}: dense numbers came for it, but {e}") from e
        loader = self.loader(layer)
        with self.lock:
            is_new = self.name not in self.coming._parameters
            if is_new:
                data = torch.empty(w.shape, dtype=loaded.dtype, device=w.device)
                dense = self.parameter()(data=data, input_dim=1, output_dim=0, weight_loader=loader)
                for name in ("tp_rank", "tp_size"):
                    if hasattr(dense, name) and hasattr(layer, name):
                        setattr(dense, name, getattr(layer, name))
                self.expect({self.name: dense})
                self.numbers = 0
                for part in self.padding(dense.data):
                    self.numbers += part.zero_().numel()
            held = self.coming.get_parameter(self.name)
            result = loader(held, loaded, *args, **options)
            self.numbers += 0 if result is False else loaded.numel()
            if result is False and is_new:  # an expert of other GPUs
                self.coming = torch.nn.Module()
            elif self.numbers >= held.numel():  # else a part is not there, without asking the GPU, which takes a while
                self._quantize(w)
        return result

    def loader(self, layer: Any) -> Callable[..., Any]:
        """Return what puts this GPU's part of a tensor into a parameter."""
        loader: Callable[..., Any] = getattr(layer, "weight_loader_v2", layer.weight_loader)
        return loader

    def _quantize(self, w: QuantizedWeight) -> None:
        """Quantize the dense numbers if all of them are loaded."""
        for parameter in self.taken_if_whole().values():
            rows: Any = parameter.data
            if self.gated:
                rows = tuple(half.contiguous() for half in rows.chunk(2, -2))
            try:
                update_(w, rows)
            except ValueError as e:
                raise ValueError(f"{self.what}: {self.name}: {e}") from e
