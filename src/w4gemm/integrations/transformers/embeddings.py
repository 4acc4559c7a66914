"""Token embeddings of a model that stay packed: :class:`AwaitedEmbedding`, :class:`TiedEmbedding`, and which layers
they may take the place of, :func:`packable`."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from w4gemm.api.lookup import embedding
from w4gemm.api.nn import W4Embedding, W4Linear
from w4gemm.checkpoints import Module
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.core.epilogue import FLOATS
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device
from w4gemm.integrations.transformers.awaited import AwaitedLinear
from w4gemm.integrations.transformers.sharding import Local
from w4gemm.kernels.helpers.embedding_rows import can_look_up
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SCALED = "super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)"
"""What Gemma's embeddings return."""
_SHARED = ("builtins", "torch.", "transformers.", "w4gemm.")
"""Begin of the names of Python modules that hold no model's own code."""
_FACTS = ("device", "dtype", "shape")
"""What a packed weight tells of itself as a dense one does."""


# --- which layers ----------------------------------------------------------------------------------------------------


def factor_of(layer: nn.Module | None) -> float | None:
    """Return the number that an embedding multiplies its rows by, rounded to their dtype: 1 for torch.nn.Embedding,
    Gemma's own for its class; None for any other layer."""
    if not isinstance(layer, nn.Embedding) or layer.max_norm is not None or "forward" in vars(layer):
        return None
    if type(layer) is nn.Embedding:
        return 1.0
    factor = getattr(layer, "scalar_embed_scale", None)
    return factor if isinstance(factor, float) and _returns(type(layer)) == _SCALED else None


def packable(
    model: PreTrainedModel, target: str, layer: nn.Module | None, module: Module, device: Device, *, of_head: bool
) -> bool:
    """True if packed rows of a checkpoint's module may take the place of ``layer``, the embedding ``target`` of a
    model. of_head: True if a head has the same numbers, so that a tie to it loses nothing."""
    if factor_of(layer) is None or module.bias or module.pre_quant_scale or module.experts:
        return False
    if not of_head and any(f"{target}.weight" in pair for pair in model.all_tied_weights_keys.items()):
        return False  # the model takes its numbers for other layers too
    assert isinstance(layer, nn.Embedding)
    if not can_look_up(device, layer.weight.dtype, module.format, module.k):
        return False
    return not reads_weight(model, target.rpartition(".")[2])


def _returns(kind: type[nn.Module]) -> str:
    """Return the expression that a subclass of torch.nn.Embedding returns; "" if its forward does anything else."""
    if kind.__bases__ != (nn.Embedding,):
        return ""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(kind.forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    body = function.body if isinstance(function, ast.FunctionDef) else []
    alone = body[0] if len(body) == 1 else None
    return ast.unparse(alone.value) if isinstance(alone, ast.Return) and alone.value is not None else ""


def reads_weight(model: nn.Module, leaf: str) -> bool:
    """True if the model's code reads the dense weight of its embedding, not only rows of it. leaf: last part of the
    embedding's name."""
    files = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    files = {file for file in files if not file.startswith(_SHARED) or file.startswith("transformers.models.")}
    names = {leaf, "get_input_embeddings"}
    return any(not names.isdisjoint(_with_weight_read(file)) for file in files)


@functools.cache
def _with_weight_read(module: str) -> frozenset[str]:
    """Names of attributes and methods whose ``weight`` a Python module reads, beside facts such as its dtype."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, SyntaxError, KeyError):
        return frozenset()
    of_facts = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in _FACTS}
    owners = (
        n.value.func if isinstance(n.value, ast.Call) else n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and n.attr == "weight" and id(n) not in of_facts
    )
    return frozenset(owner.attr for owner in owners if isinstance(owner, ast.Attribute))


# --- what takes their place ------------------------------------------------------------------------------------------


class _Factor:
    """What an embedding multiplies its rows by, rounded to each dtype."""

    def __init__(self, dense: nn.Embedding) -> None:
        number = factor_of(dense)
        assert number is not None
        self.number = number
        self.rounded = {dtype: torch.tensor(number, dtype=dtype, device="cpu").item() for dtype in FLOATS}

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.number == 1 else rows * self.rounded[rows.dtype]


class ScaledEmbedding(W4Embedding):
    """A packed embedding whose rows are multiplied by a number, as Gemma's are."""

    factor: _Factor
    dense_kind: type[nn.Embedding]
    """The class that was here."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.factor.times(super().forward(ids))


class TiedEmbedding(nn.Module):
    """An embedding that reads the packed weight of the model's head. It has no tensors of its own, and what moves,
    converts, saves or loads the head does so for both.

    Args:
        head: the layer, or the one that becomes it.
        dense: the embedding that was here.
    """

    def __init__(self, head: nn.Module, dense: nn.Embedding) -> None:
        super().__init__()
        self.__dict__["head"] = head  # not a child: it has its place in the model
        self.padding_idx, self.factor, self.dense_kind = dense.padding_idx, _Factor(dense), type(dense)
        self.num_embeddings, self.embedding_dim = dense.num_embeddings, dense.embedding_dim

    @property
    def weight(self) -> Any:
        """The head's."""
        return self.__dict__["head"].weight

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        dtype: torch.dtype = self.__dict__["head"].dtype
        return dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        w = self.weight
        return self.factor.times(embedding(ids.to(w.device), w, self.dtype)).to(ids.device)

    def apart(self) -> ScaledEmbedding:
        """Return an embedding with the rows that the head has now, whatever becomes of the head."""
        own = ScaledEmbedding.from_weight(self.weight, self.padding_idx, dtype=self.dtype)
        assert isinstance(own, ScaledEmbedding)
        own.factor, own.dense_kind = self.factor, self.dense_kind
        return own

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, of the head"


class AwaitedEmbedding(AwaitedLinear):
    """An embedding whose quantized weight is still to come; :meth:`fill` makes it a :class:`ScaledEmbedding`."""

    cls_to_become = ScaledEmbedding

    def __init__(self, dense: nn.Embedding, format: WeightFormat) -> None:
        self._await(dense.embedding_dim, dense.num_embeddings, format, dense.weight.dtype)
        self.padding_idx, self.factor, self.dense_kind = dense.padding_idx, _Factor(dense), type(dense)

    def pack(self, numbers: Numbers) -> QuantizedWeight:
        """Return the weight of numbers in the layout that the embedding reads."""
        return numbers.weight() if numbers.device.type == "cpu" else numbers.packed()

    def fill(self, local: Local, activations: str | None) -> None:
        super().fill(local, None)  # its rows are never multiplied


Packed = (ScaledEmbedding, TiedEmbedding)
"""The embeddings whose rows are packed."""


def dense_embedding(packed: ScaledEmbedding | TiedEmbedding, dtype: torch.dtype) -> nn.Embedding:
    """Return a dense embedding of the class that was here, with the same rows."""
    weight, factor = packed.weight.dequantize(dtype), packed.factor.number
    extra: dict[str, Any] = {} if packed.dense_kind is nn.Embedding else {"embed_scale": factor}
    with torch.device("meta"):
        dense = packed.dense_kind(packed.num_embeddings, packed.embedding_dim, packed.padding_idx, **extra)
    dense.weight = nn.Parameter(weight, requires_grad=False)
    if extra:
        dense.embed_scale = torch.tensor(factor, device=weight.device)
    return dense


def tied_to_heads(model: nn.Module) -> dict[str, str]:
    """Return the names of a model's embeddings that read a head, and of their heads."""
    names = {module: name for name, module in model.named_modules() if isinstance(module, W4Linear)}
    embeddings = ((name, m) for name, m in model.named_modules() if isinstance(m, TiedEmbedding))
    return {name: names[m.__dict__["head"]] for name, m in embeddings if m.__dict__["head"] in names}
