"""The arguments of the registered operators: one list for the schema, for flattening and for gradients by name.

An operator takes only tensors, numbers and strings, no values of several fields. The list follows the fields of
:class:`w4gemm.core.epilogue.EpilogueOperands`, so that a new operand is in the schema without a change here.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import torch

from w4gemm.core.epilogue import Epilogue, EpilogueOperands
from w4gemm.core.formats import WeightFormat
from w4gemm.packing.packed_shape import PackedShape, packed_shape
from w4gemm.weights.weight import QuantizedWeight

_OPERANDS = tuple(name for name in EpilogueOperands._fields if name in Epilogue._fields)
"""The epilogue's operands that a caller passes: all but channel_scale, which is a tensor of the weight."""
WEIGHT = {"weight": "Tensor[]", "format": "str", "layout": "str", "n": "int", "k": "int"}
"""The arguments that a weight becomes, with their types in a schema."""
EPILOGUE = dict.fromkeys(_OPERANDS, "Tensor?") | {
    "alpha_number": "float?",
    "activation": "str?",
    "out_dtype": "ScalarType?",
}
"""The arguments that an epilogue and its operands become, with their types in a schema."""

_parse_format = functools.cache(WeightFormat.parse)


def schema(arguments: Mapping[str, str]) -> str:
    """Return an operator's signature, as torch.library.define takes it."""
    return f"({', '.join(f'{kind} {name}' for name, kind in arguments.items())}) -> Tensor"


def named(arguments: Mapping[str, str]) -> type[Any]:
    """Return the class of a named tuple of an operator's arguments. Their default is None."""
    return namedtuple("Arguments", arguments, defaults=[None] * len(arguments))


def flat_weight(w: QuantizedWeight) -> dict[str, Any]:
    """Return a weight as the arguments ``WEIGHT``."""
    return {"weight": list(w.tensors), **named_shape(w)}


def named_shape(w: QuantizedWeight | PackedShape) -> dict[str, Any]:
    """Return a weight as the arguments ``WEIGHT``, without the tensors."""
    return {"format": w.format.name, "layout": w.layout, "n": w.n, "k": w.k}


def flat_epilogue(epilogue: Epilogue, operands: EpilogueOperands) -> dict[str, Any]:
    """Return an epilogue as the arguments ``EPILOGUE``: a number as alpha becomes ``alpha_number``."""
    flat = {name: getattr(operands, name) for name in _OPERANDS}
    number = None if isinstance(operands.alpha, torch.Tensor) else operands.alpha
    flat["alpha"] = operands.alpha if number is None else None
    return flat | {"alpha_number": number, "activation": epilogue.activation, "out_dtype": epilogue.out_dtype}


def nested_weight(arguments: Any, experts: int = 0) -> PackedShape:
    """Return the packed shape of the weight in an operator's arguments."""
    return packed_shape(_parse_format(arguments.format), arguments.layout, arguments.n, arguments.k, experts)


def nested_epilogue(arguments: Any) -> tuple[Epilogue, EpilogueOperands]:
    """Return the epilogue and its operands in an operator's arguments."""
    operands = EpilogueOperands(**{name: getattr(arguments, name) for name in _OPERANDS})
    if arguments.alpha_number is not None:
        operands = operands._replace(alpha=arguments.alpha_number)
    return Epilogue.of(operands, arguments.activation, arguments.out_dtype), operands


def empty_result(arguments: Any, epilogue: Epilogue) -> torch.Tensor:
    """Return an empty tensor (m, columns) for an operator's result: a row for each of x or, if there are any, of the
    ``indices``."""
    x: torch.Tensor = arguments.x
    indices = getattr(arguments, "indices", None)
    m = (x if indices is None else indices).shape[0]
    return x.new_empty((m, epilogue.columns(arguments.n)), dtype=epilogue.result_dtype(x.dtype))


def keep_weight(ctx: Any, arguments: Any, *others: torch.Tensor | None) -> None:
    """Keep the arguments ``WEIGHT``, and other tensors before them, for the backward pass."""
    ctx.save_for_backward(*others, *arguments.weight)
    ctx.names = {name: getattr(arguments, name) for name in WEIGHT if name != "weight"}


def kept_weight(ctx: Any, others: int = 0) -> tuple[dict[str, Any], list[Any]]:
    """Return the arguments ``WEIGHT`` that :func:`keep_weight` kept, and that many other tensors."""
    tensors = list(ctx.saved_tensors)
    return {"weight": tensors[others:], **ctx.names}, tensors[:others]
