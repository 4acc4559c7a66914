"""Weights that come for packed layers of a running SGLang, dense or quantized as the checkpoint is.

SGLang restores all layers, loads what comes, and then has every layer processed once more (``begin_weight_update`` to
``end_weight_update``, ``update_weights_from_disk``). A packed layer needs no more than the loaders of its parameters.

A layer of which only a part came keeps its weights. SGLang's process would end with an error there, or with one of
numbers that are refused, so :func:`answer_with_errors` collects these, and answers the call on all ranks with those of
any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from w4gemm.integrations.engines.updates import DenseUpdate, Update
from w4gemm.integrations.sglang.takeover import ERRORS, REFUSES_UPDATES, SGLANG, UPDATES, Hook, errors_told, hook
from w4gemm.weights.weight import QuantizedWeight

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_CALLS = (
    *("update_weights_from_tensor", "update_weights_from_distributed"),
    *("end_weight_update", "update_weights_from_disk", "update_weights_from_ipc"),
)
"""The manager's methods that bring weights, or end an update."""
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_PAUSE = "sglang.srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal.pause"
"""Method that takes memory of the GPU away until it is resumed (--enable-memory-saver)."""


class QuantizedUpdate(Update):
    """Quantized numbers of a layer on their way into its packed weights.

    Args:
        what: the layer, for errors.
        layer: as SGLang has loaded it.
        names: of the parameters whose numbers are packed.
        others: parameters that need not come anew.
        pack: returns the packed weights of the layer, whose parameters hold what has come.
        unused: parameters of which nothing is kept, because no numbers depend on them.
    """

    def __init__(
        self,
        what: str,
        layer: torch.nn.Module,
        names: Collection[str],
        others: Collection[str],
        pack: Callable[[], list[QuantizedWeight]],
        unused: Collection[str] = (),
    ) -> None:
        super().__init__(what)
        held: dict[str, Any] = {name: p for name, p in layer._parameters.items() if p is not None}
        self.pack, self.device = pack, held[next(iter(names))].device
        self.forms = {name: _like(held[name], held[name].data.to("meta")) for name in names}
        self.others = {name: held[name] for name in others if name in held and name not in names}
        self.unused = unused

    def open(self, layer: torch.nn.Module, weights: list[QuantizedWeight]) -> None:
        """Give a packed layer an empty parameter for each name.

        Args:
            weights: those that it holds, which get the new numbers.
        """
        loaders = {name: functools.partial(self.load, layer, weights, name) for name in (*self.forms, *self.others)}
        for name, loader in {**loaders, **dict.fromkeys(self.unused, _let_go)}.items():
            empty: Any = torch.nn.Parameter(torch.empty(0, dtype=torch.int32, device=self.device), requires_grad=False)
            empty.weight_loader = loader
            layer.register_parameter(name, empty)

    def load(
        self,
        layer: torch.nn.Module,
        weights: list[QuantizedWeight],
        name: str,
        param: Any,
        loaded_weight: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> None:
        """Load quantized numbers by SGLang's own loader; pack them if they are the last ones."""
        with self.lock:
            if name in self.forms and not self.coming._parameters:
                with torch.inference_mode(False):  # the rest may come outside of the mode
                    parts = {
                        each: _like(form, torch.empty_like(form.data, device=self.device))
                        for each, form in self.forms.items()
                    }
                self.expect(parts)
            own: Any = self.coming._parameters[name] if name in self.forms else self.others[name]
            own.weight_loader(own, loaded_weight, *args, **options)
            if whole := self.taken_if_whole():
                self._pack(layer, weights, whole)

    def _pack(
        self, layer: torch.nn.Module, weights: list[QuantizedWeight], whole: Mapping[str, torch.nn.Parameter]
    ) -> None:
        names = (*self.forms, *self.others)
        packed = {name: layer._parameters[name] for name in names}
        try:
            layer._parameters.update({**whole, **self.others})
            made = self.pack()
        except (TypeError, ValueError) as e:
            raise ValueError(f"{self.what}: {e}") from e
        finally:
            layer._parameters.update(packed)
        for held, new in zip(weights, made, strict=True):
            for t, numbers in zip(held.tensors, new.tensors, strict=True):
                t.data.copy_(numbers)
            if held.perm is not None and new.perm is not None:
                held.perm.copy_(new.perm)


def _let_go(param: Any, loaded_weight: torch.Tensor, *args: Any, **options: Any) -> None:
    """Load nothing."""


def _like(parameter: Any, data: torch.Tensor) -> Any:
    """Return a parameter with all that SGLang's loaders know of another one, and other data."""
    made: Any = torch.nn.Parameter(data, requires_grad=False)
    made.__class__ = type(parameter)
    vars(made).update(vars(parameter))
    return made


class _TransposedUpdate(DenseUpdate):
    """Dense numbers that SGLang's loader transposes, as it does with the quantized ones of some methods."""

    def load(self, layer: Any, loaded: torch.Tensor, *args: Any, **options: Any) -> Any:
        return super().load(layer, loaded.mT, *args, **options)


def open_updates(
    layer: Any,
    quantized: QuantizedUpdate,
    dense: Mapping[str, QuantizedWeight],
    gated: Collection[str] = (),
    transposed: bool = False,
) -> None:
    """Have a packed layer take new weights.

    Args:
        dense: the packed weights, by the names of the parameters that an unquantized layer would have.
        gated: names among them of which all gates lie before all ups, where packed rows are pairs of them.
        transposed: True if SGLang's loader transposes what it loads.
    """
    quantized.open(layer, list(dense.values()))
    updates: list[Update] = [quantized]
    kind = _TransposedUpdate if transposed else DenseUpdate
    for name, w in dense.items():
        update = kind(name, quantized.what, functools.partial(_same, w), name in gated, _parameter)
        update.open(layer)
        updates.append(update)
    setattr(layer, UPDATES, updates)
    delattr(layer, REFUSES_UPDATES)


def _same(w: QuantizedWeight, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    return w


def end_updates(layer: Any) -> None:
    """Raise RuntimeError if only a part of a layer's new weights has come; the error waits for
    :func:`answer_with_errors`, if that called."""
    for update in getattr(layer, UPDATES, ()):
        with errors_told():
            update.end()


def install_answers() -> None:
    """Put hooks around the calls of an update, and around sleep. A version of SGLang with other ones ends with their
    errors."""
    try:
        hook([Hook(f"{_MANAGER}.{name}", ("self", "recv_req"), answer_with_errors) for name in _CALLS])
        hook([Hook(f"{_UPDATER}.update_weights_from_tensor", ("self", "named_tensors", "load_format"), refuse_direct)])
    except (ImportError, AttributeError) as e:
        SGLANG.log().warning("w4gemm: SGLang ends when weights are refused, or only a part of a layer's comes: %s", e)
    try:
        hook([Hook(_PAUSE, ("self", "tag"), pause_when_done)])
    except (ImportError, AttributeError) as e:
        SGLANG.log().warning("w4gemm: SGLang may take memory away that the GPU still reads: %s", e)


def pause_when_done(own: Callable[..., Any], self: Any, tag: str) -> Any:
    """Wait for the GPU, then take memory away. SGLang 0.5.23 does not wait: it starts to copy a model's buffers, which
    it keeps asleep, and takes their memory away while the GPU may still read it (its pull request 37932)."""
    torch.cuda.synchronize()
    return own(self, tag)


def refuse_direct(own: Callable[..., Any], self: Any, named_tensors: Any, load_format: str | None = None) -> Any:
    """Answer with an error if tensors shall be copied over parameters, whatever these are loaded by: SGLang's process
    would end, as a packed layer has empty ones."""
    if load_format == "direct" and any(hasattr(module, UPDATES) for module in self.get_model().modules()):
        return False, "w4gemm has packed weights, over which load_format='direct' cannot copy"
    return own(self, named_tensors, load_format)


def answer_with_errors(own: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """Return SGLang's answer to a call of an update, on each rank; an error if there was one on any."""
    errors: list[str] = []
    token = ERRORS.set(errors)
    try:
        answer = own(self, recv_req)
    finally:
        ERRORS.reset(token)
    if not answer.success:
        errors.append(answer.message)
    distributed = torch.distributed
    if distributed.is_initialized() and (count := distributed.get_world_size(self.tp_cpu_group)) > 1:
        of_ranks: list[Any] = [None] * count
        distributed.all_gather_object(of_ranks, errors, group=self.tp_cpu_group)
        errors = [error for each in of_ranks for error in each]
    if errors:
        answer.success, answer.message = False, "; ".join(dict.fromkeys(errors))
    return answer


def _parameter() -> Any:
    from sglang.srt.layers.parameter import ModelWeightParameter

    return ModelWeightParameter
