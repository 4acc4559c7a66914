"""Weights that come for packed layers of a running engine, as reinforcement learning sends them: :class:`DenseUpdate`.

An engine's models find a parameter by the name of each tensor that comes, and call its ``weight_loader``. A packed
layer has an empty parameter of each such name. Its loader has the engine put this GPU's part of the tensor into a
parameter that holds it until all parts have come. Then they are packed into the layer's own tensors, to which CUDA
graphs point, and let go: one layer is held twice at a time, if a layer's tensors come together.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from types import MethodType
from typing import Any

import torch

from w4gemm.api.update import Dense, check, launch_update, refusal
from w4gemm.integrations.engines import routes
from w4gemm.integrations.engines.copies import Copies, RowBlock, cover
from w4gemm.integrations.engines.loading import mark, mark_rows, unloaded, unloaded_rows
from w4gemm.weights.weight import QuantizedWeight

Tensors = Mapping[str, torch.Tensor]


class Update:
    """Numbers of a layer on their way into its packed weight.

    Args:
        what: the layer, for errors.
    """

    mark = staticmethod(mark)
    unloaded = staticmethod(unloaded)

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
        self.mark(self.coming, parameters)

    def taken_if_whole(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters, which are waited for no longer, if all of them are loaded; else none."""
        parameters: dict[str, Any] = dict(self.coming._parameters)
        if any(self.unloaded(p) for p in parameters.values()):
            return {}
        self.forget()
        return parameters

    def forget(self) -> None:
        """Let go of what has come."""
        self.coming = torch.nn.Module()

    def refuse_part(self, why: str) -> None:
        """Let go of what has come.

        Raises:
            RuntimeError: if that is a part of the parameters; ``why`` says what happened.
        """
        if self.has_part():
            self.forget()
            raise RuntimeError(f"{self.what}: {why} when a part of its new weights had come")

    def has_part(self) -> bool:
        """True if a part of the parameters has come."""
        return bool(self.coming._parameters)

    def end(self) -> None:
        """Let go of what has come. Called when the engine says that an update is at its end.

        Raises:
            RuntimeError: if that is a part of the parameters.
        """
        parameters = {name: p for name, p in self.coming._parameters.items() if p is not None}
        shares = [self.missing(p) for p in parameters.values()]
        self.forget()
        for (name, parameter), share in zip(parameters.items(), shares, strict=True):
            if share:
                raise RuntimeError(
                    f"{self.what}: {name}: {share:.2%} of its shape {tuple(parameter.shape)} was not loaded, wanted "
                    "all of it"
                )

    def missing(self, parameter: torch.nn.Parameter) -> float:
        """Return the share of a parameter that has not come."""
        return self.unloaded(parameter)


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
    asked_dtype = torch.int32
    """dtype of the empty parameter, as codes have it, because engines ask a weight for its dtype."""
    mark = staticmethod(mark_rows)
    unloaded = staticmethod(unloaded_rows)

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
        self.layer: Callable[[], Any] = lambda: None
        """Returns the layer. Weak, because vLLM's record of a layer, which has its parameters' loaders, must not keep
        it."""
        self.forget()

    def forget(self) -> None:
        super().forget()
        self.waiting: list[tuple[RowBlock, torch.Tensor]] = []
        """What has come and is not copied yet."""
        self.rows: dict[int, int] = {}
        """How many have come, by the first one's number in all experts' rows."""
        self.count = 0
        """Rows in all."""
        self.is_known = True
        """False once a loader has copied something else than whole rows."""
        self.numbers = 0
        """Numbers that have come, on all GPUs."""
        self.rows_before: dict[int, int] = {}
        self.numbers_before = 0
        """``rows`` and ``numbers`` at the start of this call of ``load_weights``."""

    def open(self, layer: torch.nn.Module) -> None:
        """Have the layer's parameter take dense numbers; make an empty one if there is none."""
        parameter: Any = layer._parameters.get(self.name)
        if parameter is None:
            device = next((p.device for p in layer.parameters(recurse=False)), torch.get_default_device())
            parameter = torch.nn.Parameter(torch.empty(0, dtype=self.asked_dtype, device=device), requires_grad=False)
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
        call = routes.current()
        if call is not None:
            with call.taking():
                call.begin(self, layer)
                return self._load(layer, call, loaded, *args, **options)
        self.begin(layer)
        return self._load(layer, None, loaded, *args, **options)

    def _load(self, layer: Any, call: routes.Loading | None, loaded: torch.Tensor, *args: Any, **options: Any) -> Any:
        with self.lock:
            is_new = not self.numbers
            held = self._memory(loaded.dtype)
            copies = Copies(held.data, loaded)
            with copies:
                result = self.loader(layer)(held, loaded, *args, **options)
            blocks = copies.blocks
            if not blocks and result is not False and not self.w.experts:  # experts of other GPUs have no rows here
                blocks = None  # copied without PyTorch's operators
            if call is not None:
                call.learn(self, layer, loaded, blocks)
            if result is False:  # an expert of other GPUs
                if is_new:
                    self.forget()
                return result
            self.numbers += loaded.numel()
            if blocks is None:
                self.is_known = False
            for block in blocks or ():
                self._note(block)
            self._quantize_if_whole()
        return result

    # --- as routes.Taker ----------------------------------------------------------------------------------------------

    def begin(self, layer: Any) -> None:
        """Take numbers of a layer whose packed tensors are its own."""
        self.begin_with(layer, layer._parameters | layer._buffers)

    def begin_with(self, layer: Any, tensors: Tensors) -> None:
        """Take numbers of a layer whose packed tensors are ``tensors``."""
        try:
            self.w = self.weight(tensors)
        except ValueError as e:
            raise ValueError(f"{self.what}: {self.name}: dense numbers came for it, but {e}") from e
        self.layer, self.k = weakref.ref(layer), self.w.k
        self.total = self.w.n * max(self.w.experts, 1)
        self.rows_before, self.numbers_before = dict(self.rows), self.numbers

    def put(self, tensor: torch.Tensor, blocks: Iterable[RowBlock]) -> None:
        with self.lock:
            for block in blocks:
                self.waiting.append((block, tensor))
                self.numbers += block.rows * self.k
                self._note(block)
            if self.count >= self.total or not self.is_known:  # asked for each of many thousands of tensors
                self._quantize_if_whole()

    def settle(self) -> None:
        with self.lock:
            if self.waiting:
                self._memory()
                self._quantize_if_whole()

    def drop(self) -> None:
        """Let go of what has come in this call, which ends with an error.

        If all tensors are sent anew, maybe newer ones in another order, the layer must not be whole before the last of
        them. Of a loader that copies something else than whole rows, what came in earlier calls is let go, too."""
        with self.lock:
            if not self.is_known or not self.rows_before:
                self.forget()
                return
            self.rows, self.numbers, self.waiting = self.rows_before, self.numbers_before, []
            self.count = sum(self.rows.values())

    def has_part(self) -> bool:
        return self.numbers > 0

    def missing(self, parameter: torch.nn.Parameter) -> float:
        count = parameter.numel() // self.k
        if not self.is_known:
            return super().missing(parameter)
        return 0.0 if cover(self.rows, count) else max(count - self.count, 1) / count

    # ------------------------------------------------------------------------------------------------------------------

    def loader(self, layer: Any) -> Callable[..., Any]:
        """Return what puts this GPU's part of a tensor into a parameter."""
        loader: Callable[..., Any] = getattr(layer, "weight_loader_v2", layer.weight_loader)
        return loader

    def _note(self, block: RowBlock) -> None:
        self.count += 0 if block.row in self.rows else block.rows
        self.rows[block.row] = block.rows

    def _memory(self, dtype: torch.dtype | None = None) -> Any:
        """Return the parameter that engines load into, after copying what has waited for it. dtype: if that is made
        now, and nothing has waited."""
        held: Any = self.coming._parameters.get(self.name)
        if held is None:
            layer = self.layer()
            dtype = self.waiting[0][1].dtype if self.waiting else dtype
            with torch.inference_mode(False):  # the rest may come outside of the mode
                data = torch.empty(self.w.shape, dtype=dtype, device=self.w.device)
                held = self.parameter()(data=data, input_dim=1, output_dim=0, weight_loader=self.loader(layer))
            for name in ("tp_rank", "tp_size"):
                if hasattr(held, name) and hasattr(layer, name):
                    setattr(held, name, getattr(layer, name))
            self.expect({self.name: held})
            for part in self.padding(held.data):
                self.numbers += part.zero_().numel()
                self.is_known = False  # these rows are not whole
        rows = held.data.view(-1, self.k)
        for block, tensor in self.waiting:
            rows[block.row : block.row + block.rows].copy_(block.numbers(tensor, self.k))
        self.waiting = []
        return held

    def _quantize_if_whole(self) -> None:
        """Quantize the dense numbers if all of them have come."""
        rows: Dense | None = None
        if self.is_known and self.count >= self.total and cover(self.rows, self.total):
            rows = self._gathered() if len(self.waiting) == len(self.rows) else self._memory().data
            self.forget()
        elif not self.is_known and self.numbers >= self.total * self.k:
            # only then the GPU is asked whether all parts are there, which takes a while
            self._memory()
            rows = getattr(self.taken_if_whole().get(self.name), "data", None)
        if rows is not None:
            self._quantize(rows)

    def _gathered(self) -> Dense:
        """Return all rows, which wait to be copied; of a gated weight all gates and all ups."""
        w, k, half = self.w, self.k, self.w.n // 2
        ordered = sorted(self.waiting, key=itemgetter(0))
        if self.gated:
            if [block for block, _ in ordered if block.row % half + block.rows > half]:
                return self._memory().data
            ups = [each for each in ordered if each[0].row // half % 2]
            ordered = [each for each in ordered if not each[0].row // half % 2] + ups
        parts = [block.numbers(tensor, k) for block, tensor in ordered]
        dtype = parts[0].dtype
        if {part.dtype for part in parts} != {dtype} or {part.device for part in parts} != {w.device}:
            parts = [part.to(w.device, dtype) for part in parts]
        if len(parts) > 1 or not parts[0].is_contiguous():
            parts = [torch.cat(parts, out=torch.empty(self.total, k, dtype=dtype, device=w.device))]
        if not self.gated:
            return parts[0].view(w.shape)
        gates, ups = parts[0].view(2, *w.shape[:-2], half, k)
        return gates, ups

    def _quantize(self, rows: Dense) -> None:
        if self.gated and isinstance(rows, torch.Tensor):
            gates, ups = (half.contiguous() for half in rows.chunk(2, -2))
            rows = gates, ups
        try:
            refused, call = launch_update(self.w, rows), routes.current()
            if refused is not None and call is not None:
                call.checks.append((refused, f"{self.what}: {self.name}: {refusal(self.w.format)}"))
            elif refused is not None:
                check(refused, self.w.format)
        except ValueError as e:
            raise ValueError(f"{self.what}: {self.name}: {e}") from e
