"""Arguments of the registered operators: one list for the schema, for flattening and for gradients by name.

An operator takes flat tensors, numbers and names only. The list follows
:class:`w4gemm.core.epilogue.EpilogueOperands`, so that one more operand is in the schema without a change here.
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
"""Epilogue operands from the user; channel_scale is a tensor of the weight."""
WEIGHT = {"weight": "Tensor[]", "format": "str", "layout": "str", "n": "int", "k": "int"}
EPILOGUE = dict.fromkeys(_OPERANDS, "Tensor?") | {
    "alpha_number": "float?",
    "activation": "str?",
    "out_dtype": "ScalarType?",
}

_parse_format = functools.cache(WeightFormat.parse)


def schema(arguments: Mapping[str, str]) -> str:
    """Return an operator's signature."""
    return f"({', '.join(f'{kind} {name}' for name, kind in arguments.items())}) -> Tensor"


def named(arguments: Mapping[str, str]) -> type[Any]:
    """Return a named tuple of an operator's arguments, each None unless given."""
    return namedtuple("Arguments", arguments, defaults=[None] * len(arguments))


def flat_weight(w: QuantizedWeight) -> dict[str, Any]:
    """Return the arguments ``WEIGHT``."""
    return {"weight": list(w.tensors), **named_shape(w)}


def named_shape(w: QuantizedWeight | PackedShape) -> dict[str, Any]:
    """Return the arguments ``WEIGHT`` but for the tensors."""
    return {"format": w.format.name, "layout": w.layout, "n": w.n, "k": w.k}


def flat_epilogue(epilogue: Epilogue, operands: EpilogueOperands) -> dict[str, Any]:
    """Return the arguments ``EPILOGUE``: alpha is a tensor, or the number ``alpha_number``."""
    flat = {name: getattr(operands, name) for name in _OPERANDS}
    number = None if isinstance(operands.alpha, torch.Tensor) else operands.alpha
    flat["alpha"] = operands.alpha if number is None else None
    return flat | {"alpha_number": number, "activation": epilogue.activation, "out_dtype": epilogue.out_dtype}


def nested_weight(given: Any, experts: int = 0) -> PackedShape:
    """Return the shape of the weight in an operator's arguments."""
    return packed_shape(_parse_format(given.format), given.layout, given.n, given.k, experts)


def nested_epilogue(given: Any) -> tuple[Epilogue, EpilogueOperands]:
    """Return the epilogue and its operands in an operator's arguments."""
    operands = EpilogueOperands(**{name: getattr(given, name) for name in _OPERANDS})
    if given.alpha_number is not None:
        operands = operands._replace(alpha=given.alpha_number)
    return Epilogue.of(operands, given.activation, given.out_dtype), operands
