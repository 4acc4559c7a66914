"""The shard of a 4-bit weight that a process holds under transformers' tensor parallelism: :func:`local_shard`.

transformers wraps a layer's forward by the style that the model's ``tp_plan`` names, and leaves its tensors to us: a
colwise layer holds some of the rows (output features), a rowwise layer some of the columns, and adds up afterwards.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROWS = ("colwise", "colwise_rep", "colwise_gather_output", "local_colwise")
_COLUMNS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "local_rowwise")
_FUSED_ROWS = "packed_colwise"
"""A weight of two layers, one after the other: each process holds some rows of both."""
_WHOLE = (None, "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "sequence_parallel", "all_reduce")


def local_shard(model: PreTrainedModel, name: str, w: QuantizedWeight) -> QuantizedWeight:
    """Return this process's shard of the weight of a layer, lossless; the whole weight without tensor parallelism.

    Raises:
        ValueError: if the weight does not split into equal shards, or the style is unknown.
    """
    count = getattr(model, "tp_size", None) or 1
    if count == 1:
        return w
    mesh = model._device_mesh
    index = (mesh["tp"] if mesh.ndim > 1 else mesh).get_local_rank()
    plan = model.tp_plan
    style = plan.get(name, plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)))
    try:
        if style in _ROWS:
            return w.shard(0, index, count)
        if style in _COLUMNS:
            if getattr(model.get_submodule(name), "pre_quant_scale", None) is not None:
                raise ValueError("its pre_quant_scale is not split yet")
            return w.shard(1, index, count)
        if style == _FUSED_ROWS:
            return _rows(w, torch.arange(w.n).view(2, count, -1)[:, index].flatten())
    except (ValueError, RuntimeError) as e:
        raise ValueError(f"{name}: cannot be split over {count} processes ({style}): {e}") from e
    if style in _WHOLE:
        return w
    raise ValueError(f"{name}: the tensor parallel style {style!r} is unknown; wanted one of {(*_ROWS, *_COLUMNS)}")


def _rows(w: QuantizedWeight, rows: torch.Tensor) -> QuantizedWeight:
    """Some rows of a weight in the canonical layout."""
    return replace(w, n=len(rows), tensors=tuple(t[rows] for t in w.tensors))
