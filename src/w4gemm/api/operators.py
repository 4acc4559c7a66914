"""The operators of products, ``torch.ops.w4gemm.linear`` and ``grouped_linear``, and of their gradients to x.

An operator takes only tensors, numbers and strings, no values of several fields. One list of its arguments makes its
schema, flattens a call and names its gradients. It follows the fields of
:class:`w4gemm.core.epilogue.EpilogueOperands`, so that a new operand is in the schema without a change here.

The gradient to x is grad @ w, of experts grad[r] @ w[e] for the rows r of each expert e. A kernel for that would have
to read the weight across its packed order. So the weight is dequantized instead, experts a few at a time, and
multiplied by matmuls. The memory beyond the result stays below :data:`_DENSE_BYTES`, or what one expert takes. For
experts the host reads the bounds of the rows, which synchronizes, so a CUDA graph cannot capture a backward pass.

If something multiplies a product's sums, such as alpha, their gradient is float32 and may be far too small or too large
for float16. So with float16 x it stays float32 as long as PyTorch computes with it (:func:`narrowed`). Tensor cores
multiply it by float16 weights as float16 rows, each with a power of two of its own (:func:`halved`), and give float32.
"""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from w4gemm.api.arguments import FP8
from w4gemm.api.call import Call
from w4gemm.api.modes import refuse_fp8_gradients
from w4gemm.api.product import launch
from w4gemm.core.autocast import without_autocast
from w4gemm.core.epilogue import NO_OPERANDS, PLAIN, Epilogue, EpilogueOperands, replaced
from w4gemm.core.formats import WeightFormat
from w4gemm.kernels import Operands
from w4gemm.kernels.arguments import NO_ROWS, ExpertRows
from w4gemm.kernels.cpu.matmul import matmul
from w4gemm.packing.packed_shape import PackedShape, packed_shape
from w4gemm.weights.weight import QuantizedWeight

# --- arguments -------------------------------------------------------------------------------------------------------

_OPERANDS = tuple(name for name in EpilogueOperands._fields if name in Epilogue._fields)
"""The epilogue's operands that a caller passes: all but channel_scale, which is a tensor of the weight."""
_WEIGHT = {"weight": "Tensor[]", "format": "str", "layout": "str", "n": "int", "k": "int"}
"""The arguments that a weight becomes, with their types in a schema."""
_EPILOGUE = dict.fromkeys(_OPERANDS, "Tensor?") | {
    "alpha_number": "float?",
    "activation": "str?",
    "out_dtype": "ScalarType?",
}
"""The arguments that an epilogue and its operands become."""
_BOUNDS = {"starts": "Tensor", "ends": "Tensor"}
_ROWS = {**_BOUNDS, "indices": "Tensor?", "settled": "int"}
"""The arguments that the rows of experts become."""
_LINEAR = {"x": "Tensor", **_WEIGHT, **_EPILOGUE, "config": "str", "batch_invariant": "bool"}
_PLAN = {"config": "str", "expected": "int", "batch_invariant": "bool"}
_GROUPED = {"x": "Tensor", **_ROWS, **_WEIGHT, **_EPILOGUE, **_PLAN}
FLOAT32 = Epilogue(out_dtype=torch.float32)

_parse_format = functools.cache(WeightFormat.parse)


def _named(arguments: Mapping[str, str]) -> type[Any]:
    """Return the class of a named tuple of an operator's arguments. Their default is None."""
    return namedtuple("Arguments", arguments, defaults=[None] * len(arguments))


_Linear, _Grouped = _named(_LINEAR), _named(_GROUPED)


def flat_weight(w: QuantizedWeight) -> dict[str, Any]:
    """Return a weight as arguments."""
    return {"weight": list(w.tensors), "format": w.format.name, "layout": w.layout, "n": w.n, "k": w.k}


def flat_epilogue(epilogue: Epilogue, operands: EpilogueOperands) -> dict[str, Any]:
    """Return an epilogue as arguments: a number as alpha becomes ``alpha_number``."""
    flat = {name: getattr(operands, name) for name in _OPERANDS}
    number = None if isinstance(operands.alpha, torch.Tensor) else operands.alpha
    flat["alpha"] = operands.alpha if number is None else None
    return flat | {"alpha_number": number, "activation": epilogue.activation, "out_dtype": epilogue.out_dtype}


def _packed(arguments: Any, experts: int) -> PackedShape:
    """Return the packed shape of the weight in an operator's arguments."""
    return packed_shape(_parse_format(arguments.format), arguments.layout, arguments.n, arguments.k, experts)


def _nested_epilogue(arguments: Any) -> tuple[Epilogue, EpilogueOperands]:
    """Return the epilogue and its operands in an operator's arguments."""
    operands = EpilogueOperands(**{name: getattr(arguments, name) for name in _OPERANDS})
    if arguments.alpha_number is not None:
        operands = operands._replace(alpha=arguments.alpha_number)
    return Epilogue.of(operands, arguments.activation, arguments.out_dtype), operands


def product(call: Call, x: torch.Tensor, epilogue: Epilogue, operands: EpilogueOperands) -> torch.Tensor:
    """Return the operator's product (m, columns) of x (m, k) and a call's weight, with this epilogue and its
    operands."""
    flat = {**flat_weight(call.w), **flat_epilogue(epilogue, operands), "config": call.config}
    if not call.w.experts:
        return torch.ops.w4gemm.linear(*_Linear(x, **flat, batch_invariant=call.batch_invariant))
    plan = {"expected": call.expected, "batch_invariant": call.batch_invariant}
    return torch.ops.w4gemm.grouped_linear(*_Grouped(x, *call.rows, **flat, **plan))


# --- gradients of experts' products ----------------------------------------------------------------------------------


def differentiable(call: Call) -> torch.Tensor:
    """Return the result of a call of experts that needs gradients. PyTorch's operators compute the epilogue. Rows of no
    expert are zero and give no gradients.

    Raises:
        NotImplementedError: if x is fp8.
    """
    if call.x.dtype == FP8:
        refuse_fp8_gradients(call.x, call.operands)
    x = call.x.reshape(-1, call.w.k)
    if call.epilogue.is_plain:
        return product(call, x, call.epilogue, call.operands).view(call.shape)
    sums = product(call, x, FLOAT32, NO_OPERANDS)
    owner, owned = _owners(call.rows.starts, call.rows.ends, sums.shape[0])
    operands = call.operands.of_expert(lambda t: t[owner])
    if operands.expert_scale is not None:
        operands = replaced(operands, expert_scale=operands.expert_scale[:, None])
    d = call.epilogue.apply(torch.where(owned, sums, 0.0), operands)
    return torch.where(owned, d, 0.0).to(call.epilogue.result_dtype(call.x.dtype)).view(call.shape)


def _owners(starts: torch.Tensor, ends: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expert of each of m rows, int64 (m,), and bool (m, 1), True for rows of an expert."""
    rows = torch.arange(m, dtype=torch.int32, device=starts.device)
    owner = (torch.searchsorted(starts, rows, right=True) - 1).clamp(min=0)
    return owner, ((rows >= starts[owner]) & (rows < ends[owner]))[:, None]


def owned_rows(starts: torch.Tensor, ends: torch.Tensor, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Return bool (*shape, 1), True for rows of an expert."""
    return _owners(starts, ends, math.prod(shape))[1].view(*shape, 1)


# --- gradients with float16 x ----------------------------------------------------------------------------------------

_TOP = 15
"""A row's largest number becomes 2**14 to 2**15, near the end of float16's range."""
_LEAST, _MOST = -126, 127
"""Smallest and largest binary exponent of float32's normal numbers."""


def narrowed(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of sums in ``dtype``, the dtype of x. For float16 x a float32 gradient stays float32."""
    return grad if (grad.dtype, dtype) == (torch.float32, torch.float16) else grad.to(dtype)


def in_halves(rows: torch.Tensor, times: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return ``times(rows)`` of gradients (m, columns), in their dtype. On a GPU it gets float32 rows in float16.

    Args:
        times: gives float32 if it gets float16 in place of float32.
    """
    if rows.dtype != torch.float32 or not rows.is_cuda:
        return times(rows)
    half, factors = halved(rows)
    return times(half) * factors


def halved(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float16 rows (m, columns) and powers of two (m, 1). Their products are the float32 ``rows``, rounded to 11
    bits. Numbers below 2**-29 of their row's largest one lose more bits. Infinities and NaN stay."""
    top = rows.abs().amax(1, keepdim=True)
    exponent = torch.frexp(top).exponent - _TOP
    usable = top.isfinite() & (top > 0)
    factors = torch.where(usable, torch.exp2(exponent.clamp(_LEAST, _MOST).float()), 1.0)
    return (rows / factors).half(), factors


# --- the operators ---------------------------------------------------------------------------------------------------

_DENSE_BYTES = 256 * 2**20
"""Largest number of bytes of experts that are dequantized together, temporaries included."""
_BYTES_PER_WEIGHT = 16
"""Upper limit of the bytes for each number of a weight while it is dequantized."""
_READS_ON_HOST = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


class _Operator:
    """The operator ``torch.ops.w4gemm.NAME`` of a product, and ``NAME_dx``, its gradient to x."""

    def __init__(self, name: str, arguments: Mapping[str, str]) -> None:
        self.bounds = tuple(bound for bound in _BOUNDS if bound in arguments)
        of_gradient = {"grad": "Tensor", **dict.fromkeys(self.bounds, "Tensor"), **_WEIGHT}
        self.name, self.arguments, self.of_gradient = name, _named(arguments), _named(of_gradient)
        tags = _READS_ON_HOST if self.bounds else ()
        self._define(name, arguments, (), self._launch, self._fake, self._backward, self._save)
        dx = self._launch_dx, self._fake_dx, self._backward_dx, self._save_dx
        self._define(f"{name}_dx", of_gradient, tags, *dx)

    @staticmethod
    def _define(
        name: str,
        arguments: Mapping[str, str],
        tags: tuple[torch.Tag, ...],
        launch: Callable[..., torch.Tensor],
        fake: Callable[..., torch.Tensor],
        backward: Callable[..., tuple[Any, ...]],
        save: Callable[..., None],
    ) -> None:
        schema = ", ".join(f"{kind} {argument}" for argument, kind in arguments.items())
        torch.library.define(f"w4gemm::{name}", f"({schema}) -> Tensor", tags=tags)
        torch.library.impl(f"w4gemm::{name}", ("cpu", "cuda"))(launch)
        torch.library.register_fake(f"w4gemm::{name}")(fake)
        torch.library.register_autograd(f"w4gemm::{name}", backward, setup_context=save)

    def _launch(self, *flat: Any) -> torch.Tensor:
        args, rows, expected = self.arguments(*flat), NO_ROWS, 0
        if self.bounds:
            rows, expected = ExpertRows(args.starts, args.ends, args.indices, args.settled), args.expected
        epilogue, operands = _nested_epilogue(args)
        out = self._empty(args, epilogue)
        launched = Operands(args.x, tuple(args.weight), out, operands, rows)
        launch(_packed(args, self._experts(args)), launched, epilogue, args.config, args.batch_invariant, expected)
        return out

    def _experts(self, args: Any) -> int:
        return len(args.starts) if self.bounds else 0

    def _fake(self, *flat: Any) -> torch.Tensor:
        args = self.arguments(*flat)
        return self._empty(args, _nested_epilogue(args)[0])

    def _empty(self, args: Any, epilogue: Epilogue) -> torch.Tensor:
        """Return an empty tensor (m, columns) for the result: a row for each of x or, if there are any, of the
        ``indices``."""
        x: torch.Tensor = args.x
        m = (x if not self.bounds or args.indices is None else args.indices).shape[0]
        return x.new_empty((m, epilogue.columns(args.n)), dtype=epilogue.result_dtype(x.dtype))

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        args = self.arguments(*inputs)
        epilogue = _nested_epilogue(args)[0]
        self._keep(ctx, args, args.indices if self.bounds else None)
        ctx.x, ctx.linear = (args.x.shape[0], args.x.dtype), epilogue.is_plain if self.bounds else epilogue.linear

    def _backward(self, ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if not ctx.linear:
            of = "without an epilogue" if self.bounds else "with a bias"
            raise NotImplementedError(f"torch.ops.w4gemm.{self.name} has gradients {of} only; call w4gemm.{self.name}")
        (m, dtype), needed = ctx.x, self.arguments(*ctx.needs_input_grad)
        arguments, indices = self._kept(ctx)
        grad, dx = narrowed(grad, dtype), None
        if needed.x:
            dx = getattr(torch.ops.w4gemm, f"{self.name}_dx")(*self.of_gradient(grad, **arguments))
            if indices is not None:  # in the order of the rows, where index_add_ would be in any order
                sums = torch.zeros((m, dx.shape[1]), dtype=torch.float32, device=dx.device)
                dx = sums.index_put((indices,), dx.float(), accumulate=True)
            dx = dx.to(dtype)
        bias = grad.sum(0) if needed.bias else None
        return self.arguments(dx, weight=[None] * len(arguments["weight"]), bias=bias)

    def _keep(self, ctx: Any, args: Any, indices: torch.Tensor | None = None) -> None:
        """Keep the weight and the bounds of rows for the backward pass, and ``indices``."""
        ctx.save_for_backward(indices, *(getattr(args, bound) for bound in self.bounds), *args.weight)
        ctx.names = {name: getattr(args, name) for name in _WEIGHT if name != "weight"}

    def _kept(self, ctx: Any) -> tuple[dict[str, Any], torch.Tensor | None]:
        """Return the arguments and the indices that :meth:`_keep` kept."""
        indices, *tensors = ctx.saved_tensors
        count = len(self.bounds)
        bounds = dict(zip(self.bounds, tensors[:count], strict=True))
        return {**bounds, "weight": tensors[count:], **ctx.names}, indices

    @without_autocast
    def _launch_dx(self, *flat: Any) -> torch.Tensor:
        args = self.of_gradient(*flat)
        grad: torch.Tensor = args.grad
        packed, weight = _packed(args, self._experts(args)), tuple(args.weight)
        w = QuantizedWeight(packed.format, packed.n, packed.k, packed.layout, weight, experts=packed.experts)
        if not self.bounds:
            return in_halves(grad, lambda rows: _times(rows, w.dequantize(rows.dtype), grad.dtype))
        bounds = torch.stack((args.starts, args.ends), 1).tolist()
        needed = [e for e, (start, end) in enumerate(bounds) if end > start]

        def times(rows: torch.Tensor) -> torch.Tensor:
            dx = grad.new_zeros((len(grad), args.k))
            for first, dense in _dequantized(w, needed, rows.dtype):
                for weight, (start, end) in zip(dense, bounds[first:], strict=False):
                    if end > start:
                        _times(rows[start:end], weight, grad.dtype, dx[start:end])
            return dx

        return in_halves(grad, times)

    def _fake_dx(self, *flat: Any) -> torch.Tensor:
        args = self.of_gradient(*flat)
        return args.grad.new_empty((args.grad.shape[0], args.k))

    def _save_dx(self, ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        self._keep(ctx, self.of_gradient(*inputs))

    def _backward_dx(self, ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        arguments, _ = self._kept(ctx)
        plan = {"config": "", "batch_invariant": False, **({"settled": 0, "expected": 0} if self.bounds else {})}

        def times(rows: torch.Tensor) -> torch.Tensor:
            epilogue = PLAIN if rows.dtype == grad.dtype else FLOAT32
            flat = self.arguments(rows, **arguments, **flat_epilogue(epilogue, NO_OPERANDS), **plan)
            d = getattr(torch.ops.w4gemm, self.name)(*flat)
            if not self.bounds:
                return d
            return torch.where(_owners(arguments["starts"], arguments["ends"], grad.shape[0])[1], d, 0.0)

        return self.of_gradient(in_halves(grad, times), weight=[None] * len(arguments["weight"]))


def _times(
    rows: torch.Tensor, dense: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return rows (m, n) @ dense (n, k) in ``dtype``: that of the rows, or float32."""
    if rows.dtype == dtype:
        return matmul(rows, dense, out)
    d = torch.mm(rows, dense, out_dtype=torch.float32)
    return d if out is None else out.copy_(d)


def _dequantized(w: QuantizedWeight, needed: list[int], dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first expert and the dense weights (count, n, k) of runs of experts. Together the runs hold every
    expert of ``needed``."""
    most = max(1, _DENSE_BYTES // (_BYTES_PER_WEIGHT * w.n * w.k))
    end = 0
    for first in needed:
        if first >= end:
            end = min(w.experts, first + most)
            some = w.as_one(first, end)
            if some is None:  # the layout pads n
                end = first + 1
                some = w.expert(first)
            yield first, some.dequantize(dtype).view(-1, w.n, w.k)


def _linear_dx_vmap(info: Any, in_dims: tuple[Any, ...], *flat: Any) -> tuple[torch.Tensor, int]:
    """Return the gradients of a batch, as ``is_grads_batched`` makes it, by one call with all of its rows."""
    grad, *others = flat
    rows = grad.movedim(in_dims[0], 0)
    return torch.ops.w4gemm.linear_dx(rows.flatten(0, 1), *others).unflatten(0, rows.shape[:2]), 0


_Operator("linear", _LINEAR)
_Operator("grouped_linear", _GROUPED)
torch.library.register_vmap("w4gemm::linear_dx", _linear_dx_vmap)
