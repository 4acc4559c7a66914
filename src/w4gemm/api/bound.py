"""The fast way of a warm call: :class:`BoundLinear`, a linear of which all but the number of x's rows is fixed and
checked."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from w4gemm.api import arguments, boundary
from w4gemm.api.activations import quantize_activations
from w4gemm.api.gather import gather_columns
from w4gemm.api.modes import is_eager
from w4gemm.choice import PlanKey, plan_cache, plan_for, plan_m
from w4gemm.core.epilogue import NO_OPERANDS, EpilogueOperands
from w4gemm.core.errors import require_dense
from w4gemm.kernels import Operands
from w4gemm.weights.weight import QuantizedWeight

Launch = Callable[[Operands], None]


class BoundLinear:
    """The function act(x @ w.T + bias) for every w and bias of the same shapes, dtypes, devices and activation.

    It holds no tensors. It keeps one plan for each m that plans are chosen for, until plans are forgotten, so that
    tuning anew or moving a weight leaves nothing stale in it. It may be called only if
    :func:`w4gemm.api.modes.is_eager` is true.
    """

    __slots__ = ("columns", "device", "dtype", "facts", "generation", "key", "launches", "quantizes")

    def __init__(self, call: boundary.Call, facts: tuple[Hashable, ...]) -> None:
        """Bind to every call like ``call``, which was checked and has no residual, alpha, token_scale and config.

        Args:
            facts: :func:`argument_facts` of the call's arguments.
        """
        self.facts = facts
        self.key = PlanKey.of(call.w, 1, call.x.dtype, call.epilogue, call.batch_invariant)
        self.device = self.key.device
        self.columns, self.dtype = call.shape[-1], call.dtype
        self.quantizes = call.epilogue.token_scale
        self.generation = -1
        self.launches: dict[int, Launch] = {}

    def __call__(self, x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the result for x (..., k) of the bound dtype, which is quantized here if the weight asks for that."""
        shape = x.shape
        flat = len(shape) == 2
        rows = x if flat else x.reshape(-1, shape[-1])
        operands = NO_OPERANDS if bias is None else EpilogueOperands(None, bias)
        if self.quantizes:
            rows, token_scale = quantize_activations(rows)
            operands = EpilogueOperands(None, bias, None, token_scale)
        if w.perm is not None:
            rows = gather_columns(rows, w.perm)
        m = shape[0] if flat else rows.shape[0]
        # plain numbers take two thirds of the time of a tuple with a dtype
        alike, columns = x.dtype is self.dtype, self.columns
        d = x.new_empty(m, columns) if alike else x.new_empty((m, columns), dtype=self.dtype)
        if m:
            launches = self.launches if self.generation == plan_cache.generation else self._forget()
            at = plan_m(m)
            launch = launches.get(at) or self._choose(at, launches)
            boundary.launch(launch, Operands(rows, w.tensors, d, operands), self.device)
        return d if flat else d.view(*shape[:-1], columns)

    def _forget(self) -> dict[int, Launch]:
        self.launches = {}
        self.generation = plan_cache.generation
        return self.launches

    def _choose(self, at: int, launches: dict[int, Launch]) -> Launch:
        key = self.key._replace(m=at)
        found = plan_for(key)
        if plan_cache.is_kept(key, found):
            launches[at] = found.launch
        return found.launch


def argument_facts(
    x: torch.Tensor, bias: torch.Tensor | None, activation: str | None, batch_invariant: bool
) -> tuple[Hashable, ...]:
    """Return all that the checks of a call look at besides the weight and the number of x's rows."""
    try:
        shape = x.shape
    except RuntimeError:  # of a nested tensor
        require_dense("x", x)
        raise
    of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device, bias.is_contiguous())
    return shape[-1] if shape else None, x.dtype, x.device, x.layout, of_bias, activation, batch_invariant


def bind(
    w: QuantizedWeight,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    batch_invariant: bool = False,
) -> BoundLinear:
    """Return :func:`w4gemm.linear` with these arguments, as a function of x of ``dtype`` on w's device.

    Raises:
        TypeError, ValueError: for arguments that linear refuses.
    """
    x = torch.empty(0, w.k, dtype=dtype, device=w.device)
    arguments.check(x, w)
    call = boundary.checked(x, w, EpilogueOperands(bias=bias), activation, None, batch_invariant=batch_invariant)
    return BoundLinear(call, argument_facts(x, bias, activation, batch_invariant))


# --- calls of the function -------------------------------------------------------------------------------------------

_bound: dict[tuple[Hashable, ...], BoundLinear] = {}
"""Bound linears by everything that the checks and plans of a call depend on, except the number of x's rows."""
_MOST_BOUND = 4096


def find(
    x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, activation: str | None, batch_invariant: bool
) -> BoundLinear | None:
    """Return the bound linear for a call; None unless it is a plain eager call like one that passed the checks
    before."""
    if w.__class__ is not QuantizedWeight or not is_eager(x, bias):
        return None
    if (activation is not None and activation.__class__ is not str) or batch_invariant.__class__ is not bool:
        return None
    facts = argument_facts(x, bias, activation, batch_invariant)
    return _bound.get((w.packed, w.activations, w.tensors[0].device, facts))


def remember(call: boundary.Call, x: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> None:
    """Bind every later call like ``call``, which was checked. x is the user's, before it was quantized."""
    if len(_bound) >= _MOST_BOUND:
        _bound.clear()
    w, facts = call.w, argument_facts(x, bias, activation, call.batch_invariant)
    _bound[w.packed, w.activations, w.tensors[0].device, facts] = BoundLinear(call, facts)
