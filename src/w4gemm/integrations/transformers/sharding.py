"""The shard of a quantized weight that a process holds under transformers' tensor and expert parallelism.

transformers wraps a layer's forward by the style that the model's ``tp_plan`` names, and leaves its tensors to us: a
colwise layer holds some of the rows (output features), a rowwise layer some of the columns, and adds up afterwards.
Experts, of which transformers wraps the forward too, are split alike, or each process holds some of them.
:func:`local_numbers` and :class:`Split` do both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from w4gemm.checkpoints.numbers import Numbers, WeightNumbers
from w4gemm.integrations.tensor_parallel import SumResults
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS = ("colwise", "colwise_rep", "colwise_gather_output", "local_colwise")
_COLUMNS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "local_rowwise")
_FUSED_ROWS = "packed_colwise"
"""A weight of two layers, one after the other: each process holds some rows of both."""
_WHOLE = (None, "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "sequence_parallel", "all_reduce")


class Local(NamedTuple):
    """The tensors of a quantized layer that a process holds."""

    weight: QuantizedWeight
    bias: torch.Tensor | None = None
    pre_quant_scale: torch.Tensor | None = None


def local_numbers(model: PreTrainedModel, name: str, w: Numbers) -> Numbers:
    """Return this process's part of the weight of the layer ``name``, lossless; all of it without parallelism.

    Raises:
        ValueError: if it does not split into equal parts, or the style is unknown.
    """
    if not w.experts:
        return local_shard(model, name, w)
    owner, _, product = name.rpartition(".")
    if (split := Split.of(model, owner)) is None:
        return w
    if product == "down":
        add_up(model, model.get_submodule(owner))
    try:
        return split.numbers(w, product == "down")
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from e


def local_shard(model: PreTrainedModel, name: str, w: Numbers) -> Numbers:
    """Return this process's shard of the weight of a layer, lossless; the whole weight without tensor parallelism. If
    columns are split, the layer keeps its factors of x for them.

    Raises:
        ValueError: if the weight does not split into equal shards, or the style is unknown.
    """
    count = getattr(model, "tp_size", None) or 1
    if count == 1:
        return w
    index, style = _tp_group(model).rank(), _style(model, name)
    try:
        if style in _ROWS:
            return w.shard(0, index, count)
        if style in _COLUMNS:
            part, layer = w.shard(1, index, count), model.get_submodule(name)
            if (scale := getattr(layer, "pre_quant_scale", None)) is not None:
                layer.pre_quant_scale = scale[index * part.k : (index + 1) * part.k].clone()
            return part
        if style == _FUSED_ROWS:
            return WeightNumbers(_rows_of_both(w, index, count))
    except (ValueError, RuntimeError) as e:
        raise ValueError(f"{name}: cannot be split over {count} processes ({style}): {e}") from e
    if style in _WHOLE:
        return w
    raise ValueError(f"{name}: the tensor parallel style {style!r} is unknown; wanted one of {(*_ROWS, *_COLUMNS)}")


@dataclass(frozen=True)
class Split:
    """The part of experts that a process holds."""

    index: int
    count: int
    of_experts: bool
    """True for some of the experts; False for some features of each."""

    @classmethod
    def of(cls, model: PreTrainedModel, experts: str) -> Split | None:
        """Return how transformers splits a module of experts; None if every process is to hold it whole."""
        config = getattr(model.config, "distributed_config", None)
        if (count := getattr(config, "ep_size", None) or 1) > 1:
            return cls(model._mesh_manager.get_mesh("ep").get_local_rank(), count, True)
        count = getattr(model, "tp_size", None) or 1
        if count == 1 or _style(model, experts) is None:
            return None
        # transformers 5.17: the plan of experts goes over the processes of tensor parallelism
        return cls(_tp_group(model).rank(), count, bool(getattr(config, "enable_expert_parallel", False)))

    def numbers(self, w: Numbers, down: bool) -> Numbers:
        """Return this process's part of one product of experts.

        Args:
            down: True for the second product, whose results are added up over processes that hold some features of
                each expert.

        Raises:
            ValueError: if there are no equal parts.
        """
        if not self.of_experts:
            return w.shard(int(down), self.index, self.count)
        if w.experts % self.count:
            raise ValueError(f"{w.experts} experts cannot be split evenly over {self.count} processes")
        each = w.experts // self.count
        return w.select(self.index * each, each)

    def bias(self, whole: torch.Tensor, down: bool) -> torch.Tensor:
        """Return this process's part of a bias (experts, n). If results of a product are added up over processes, the
        first one alone has its bias."""
        if down and not self.of_experts:
            return whole if self.index == 0 else torch.zeros_like(whole)
        return whole.chunk(self.count, 0 if self.of_experts else 1)[self.index].clone()

    def factors(self, whole: torch.Tensor, down: bool) -> torch.Tensor:
        """Return this process's part of the factors of x (k)."""
        return whole.chunk(self.count)[self.index].clone() if down and not self.of_experts else whole


@torch.no_grad()
def fill(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    """Copy ``whole`` into a dense parameter; into one that is sharded, this process's shard."""
    from transformers.distributed.sharding_utils import DtensorShardOperation

    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(DtensorShardOperation(parameter).shard_tensor(whole))
    else:
        parameter.copy_(whole)


def whole_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict with whole tensors in place of those that FSDP2 has sharded. Every process has to call it."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def add_up(model: PreTrainedModel, experts: nn.Module) -> None:
    """Let a process's part of experts be added up over processes where transformers does not: 5.17 does for parameters
    that are DTensors only."""
    from transformers.distributed.tensor_parallel import MoeExpertsParallel

    if "install_forward" in vars(MoeExpertsParallel):
        group = _tp_group(model)
        experts.register_forward_hook(lambda _, args, y: SumResults.apply(y, group))


def _tp_group(model: PreTrainedModel) -> ProcessGroup:
    mesh = model._device_mesh
    return mesh.get_group("tp" if mesh.ndim > 1 else 0)  # not mesh["tp"]: PyTorch 2.8 slices no slice of a mesh


def _style(model: PreTrainedModel, name: str) -> str | None:
    """The style of a module in the model's plan, which may name it with "*" for a layer's number."""
    plan = model.tp_plan
    return plan.get(name, plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)))


def _rows_of_both(w: Numbers, index: int, count: int) -> QuantizedWeight:
    """A process's rows of the first half of a weight's rows, then its rows of the second half; in the canonical
    layout."""
    first, second = (w.shard(0, half, 2).shard(0, index, count).weight() for half in (0, 1))
    tensors = tuple(map(torch.cat, zip(first.tensors, second.tensors, strict=True)))
    return replace(first, n=first.n + second.n, tensors=tensors)
