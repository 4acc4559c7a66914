"""From checked tensors to a launch.

Functions, operators, layers, experts, engines and :class:`w4gemm.MixedGemm` all launch through a :class:`Product`. A
:class:`BoundLinear` is a warm call of ``linear``: a Product, and the steps before its launch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch

from w4gemm.api.activations import quantize_rows
from w4gemm.api.gather import gather_columns
from w4gemm.api.modes import current_gpu, is_eager
from w4gemm.choice import Plan, PlanKey, plan_cache, plan_for, plan_m, plan_rows
from w4gemm.core.epilogue import NO_OPERANDS, PLAIN, Epilogue, EpilogueOperands
from w4gemm.core.errors import require_dense
from w4gemm.kernels import Operands
from w4gemm.kernels.cpu.compiled import Direct
from w4gemm.kernels.cpu.matmul import may_round_float32
from w4gemm.kernels.cpu.tile_product import multiplies_bf16
from w4gemm.kernels.gpu import takes_rows
from w4gemm.packing.packed_shape import PackedShape
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from w4gemm.api.call import Call

_FEW, _SMALL = 4, 3 * 2**19
"""A product of at most so many float32 tokens, or of fewer multiplications, stays float32 even if x may be rounded to
bf16. Rounding would take longer: 8.9 in place of 3.2 us for 8 tokens of 64 x 64, 14.2 in place of 10.1 of 192 x 576; it
gains from 16 tokens of 192 x 576 and some 12 of 256 x 640 on (EPYC with AVX512_BF16, one thread, 2026-11-29)."""
Launch = Callable[[Operands], None]


class Product:
    """The function act(alpha * token_scale * (x @ w.T) + bias) + residual of checked tensors. It serves all weights of
    one packed shape, with one epilogue, dtype of x and device.

    It holds no tensors. It caches one launch for each m that plans are chosen for, and drops them when plans are
    forgotten, so that no launch is stale after tuning.

    Args:
        batch_invariant, config: as for :func:`w4gemm.linear`; config "" for the tuned or predicted one.
    """

    __slots__ = (
        "_direct",
        "_generation",
        "_key",
        "_launches",
        "_rounds_from",
        "columns",
        "device",
        "epilogue",
        "experts",
        "out_dtype",
    )

    def __init__(
        self,
        weight: PackedShape,
        epilogue: Epilogue,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
        config: str = "",
    ) -> None:
        self._key = PlanKey(0, weight, dtype, epilogue, device, config, batch_invariant)
        self.device, self.epilogue, self.experts = device, epilogue, weight.experts
        self.columns, self.out_dtype = epilogue.columns(weight.n), epilogue.result_dtype(dtype)
        is_single = device.type == "cpu" and not (weight.experts or config or batch_invariant)
        may_round = is_single and dtype == torch.float32 and multiplies_bf16(weight.format, weight.k)
        self._rounds_from = max(_FEW + 1, -(-_SMALL // (weight.n * weight.k))) if may_round else sys.maxsize
        self._generation = -1
        self._launches: dict[int, Launch] = {}  # by m of the plan; by -m if the kernel gathers rows of x
        self._direct: dict[int, Direct | None] = {}  # by m

    def plan(self, m: int) -> Plan:
        """Return the plan for m rows of x."""
        return plan_for(self._key._replace(m=plan_rows(m, self.experts)))

    def empty_result(self, x: torch.Tensor, m: int) -> torch.Tensor:
        """Return an empty tensor (m, columns) for a result, on x's device."""
        if x.dtype is self.out_dtype:  # plain numbers take two thirds of the time of a tuple with a dtype
            return x.new_empty(m, self.columns)
        return x.new_empty((m, self.columns), dtype=self.out_dtype)

    def launch(self, operands: Operands, m: int) -> None:
        """Launch the plan for m rows of x, of all experts together; ``operands.out`` has at least one row. x's GPU need
        not be the current one."""
        if m >= self._rounds_from and may_round_float32():
            return self._rounded(operands, m)
        if not self.experts:
            at = plan_m(m)
        else:
            at = plan_rows(m, self.experts)
            if operands.rows.indices is not None:
                if self.device.type != "cuda" or _is_gathered_in_place(operands):
                    at = -at
                else:
                    operands = operands.gathered_first()
        launches = self._launches if self._generation == plan_cache.generation else self._forget()
        launch = launches.get(at) or self._choose(at)
        x = operands.x
        if not x.is_contiguous() and not _is_matrix(x):
            operands = operands._replace(x=torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x))
        if _several_gpus() and self.device.type == "cuda" and self.device.index != current_gpu():
            with torch.cuda.device(self.device):
                launch(operands)
        else:
            launch(operands)

    def _rounded(self, operands: Operands, m: int) -> None:
        """Launch the product of x rounded to bf16, with a result in float32."""
        epilogue = self.epilogue._replace(out_dtype=self.out_dtype)
        product = product_of(self._key.weight, epilogue, torch.bfloat16, self.device)
        product.launch(operands._replace(x=operands.x.bfloat16()), m)

    def direct(self, m: int) -> Direct | None:
        """Return the launch for m rows of x without :class:`Operands`, which take as long as a small layer's product on
        a CPU; None if the plan has none, or if x is rounded first."""
        if m >= self._rounds_from and may_round_float32():
            return None
        if self._generation == plan_cache.generation:
            try:
                return self._direct[m]
            except KeyError:  # asked first, another thread may forget it in between
                pass
        launches, at = self._launches if self._generation == plan_cache.generation else self._forget(), plan_m(m)
        of = getattr(launches.get(at) or self._choose(at), "direct", None)
        direct = None if of is None else of(m)
        if at in self._launches:
            if len(self._direct) >= _MOST_BOUND:
                self._direct.clear()
            self._direct[m] = direct
        return direct

    def _forget(self) -> dict[int, Launch]:
        self._launches, self._direct, self._generation = {}, {}, plan_cache.generation
        return self._launches

    def _choose(self, at: int) -> Launch:
        key = self._key._replace(m=abs(at), gathered=at < 0)
        plan = plan_for(key)
        if plan_cache.is_kept(key, plan):
            self._launches[at] = plan.launch
        return plan.launch


product_of = functools.lru_cache(maxsize=4096)(Product)
"""The :class:`Product` of these arguments, made once."""


def launch(
    weight: PackedShape,
    operands: Operands,
    epilogue: Epilogue,
    config: str = "",
    batch_invariant: bool = False,
    expected: int = 0,
) -> None:
    """Launch the product of these operands; nothing if the result has no rows.

    Args:
        expected: number of rows of all experts that the plan is chosen for; 0 for the number of rows of the result.
    """
    x, m = operands.x, operands.out.shape[0]
    if m:
        product = product_of(weight, epilogue, x.dtype, x.device, batch_invariant, config)
        product.launch(operands, expected or m)


def _is_gathered_in_place(operands: Operands) -> bool:
    x = operands.x
    return operands.epilogue.block_scale is None and x.stride(1) == 1 and takes_rows(x)


def _is_matrix(x: torch.Tensor) -> bool:
    """True if the columns of x (m, k) are contiguous and its rows do not overlap; after ``expand`` rows overlap."""
    row, column = x.stride()
    return column == 1 and (row >= x.shape[1] or x.shape[0] == 1)


@functools.cache
def _several_gpus() -> bool:
    """True if several GPUs are visible, so that x may be on a GPU that is not current. It guards the query of the
    current device, which takes about 1 us."""
    return torch.cuda.device_count() > 1


# --- warm calls of linear --------------------------------------------------------------------------------------------


class BoundLinear:
    """The function act(x @ w.T + bias) for every w and bias with the shapes, dtypes, devices and activation of a
    checked call. It may be called only if :func:`w4gemm.api.modes.is_eager` is true."""

    __slots__ = ("facts", "is_bare", "product", "quantizes")

    def __init__(self, call: Call, facts: tuple[Hashable, ...]) -> None:
        """Bind to every call like ``call``, which has no residual, alpha, token_scale or config.

        Args:
            facts: :func:`argument_facts` of the call's arguments.
        """
        w, self.facts, self.quantizes = call.w, facts, call.epilogue.token_scale
        self.product = product_of(w.packed, call.epilogue, call.x.dtype, w.device, call.batch_invariant)
        self.is_bare = call.epilogue == PLAIN and w.device.type == "cpu"

    def __call__(self, x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the result for x (..., k) of the bound dtype. x is quantized here if the weight's activations are
        fp8."""
        product, shape = self.product, x.shape
        flat = len(shape) == 2
        if self.is_bare and w.perm is None and x.is_contiguous():
            m = shape[0] if flat else x.numel() // shape[-1]
            if m and (direct := product.direct(m)) is not None:
                d = x.new_empty(m, product.columns) if flat else x.new_empty(*shape[:-1], product.columns)
                direct(x, w.tensors, d)
                return d
        rows = x if flat else x.reshape(-1, shape[-1])
        operands = NO_OPERANDS if bias is None else EpilogueOperands(None, bias)
        if self.quantizes:
            rows, token_scale = quantize_rows(rows)
            operands = EpilogueOperands(None, bias, None, token_scale)
        if w.perm is not None:
            rows = gather_columns(rows, w.perm)
        m = shape[0] if flat else rows.shape[0]
        d = product.empty_result(x, m)
        if m:
            product.launch(Operands(rows, w.tensors, d, operands), m)
        return d if flat else d.view(*shape[:-1], product.columns)


def argument_facts(
    x: torch.Tensor, bias: torch.Tensor | None, activation: str | None, batch_invariant: bool
) -> tuple[Hashable, ...]:
    """Return the facts that the checks of a call depend on, except the weight and the number of x's rows."""
    try:
        shape = x.shape
    except RuntimeError:  # of a nested tensor
        require_dense("x", x)
        raise
    of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device, bias.is_contiguous())
    return shape[-1] if shape else None, x.dtype, x.device, x.layout, of_bias, activation, batch_invariant


_bound: dict[tuple[Hashable, ...], BoundLinear] = {}
"""Bound linears by everything that the checks and plans of a call depend on, except the number of x's rows."""
_MOST_BOUND = 4096


def bound_linear(
    x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None, activation: str | None, batch_invariant: bool
) -> BoundLinear | None:
    """Return the bound linear of a call; None unless it is a plain eager call like an earlier, checked one."""
    if w.__class__ is not QuantizedWeight or not is_eager(x, bias):
        return None
    if (activation is not None and activation.__class__ is not str) or batch_invariant.__class__ is not bool:
        return None
    facts, newest = argument_facts(x, bias, activation, batch_invariant), w._bound
    if newest is None or newest.facts != facts:  # comparing takes 0.2 us less than the key
        newest = _bound.get((w.packed, w.activations, w.tensors[0].device, facts))
        object.__setattr__(w, "_bound", newest)
    return newest


def bind_calls_like(call: Call, x: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> None:
    """Bind every later call like ``call``. x is the caller's, not quantized yet."""
    if len(_bound) >= _MOST_BOUND:
        _bound.clear()
    w, facts = call.w, argument_facts(x, bias, activation, call.batch_invariant)
    _bound[w.packed, w.activations, w.tensors[0].device, facts] = BoundLinear(call, facts)
