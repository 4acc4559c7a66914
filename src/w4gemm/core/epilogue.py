"""The operations on x @ w.T before it is stored: :class:`Epilogue` and :class:`EpilogueOperands`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from w4gemm.core.activation import canonical, is_gated, parse
from w4gemm.core.errors import require_bool

Values = TypeVar("Values", bound=tuple[Any, ...])

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)
"""dtypes of results and layers."""


def replaced(values: Values, **changes: Any) -> Values:
    """Return ``values._replace(**changes)`` of a named tuple, in a way that torch.compile of PyTorch 2.8 can trace."""
    kind: Any = type(values)
    return kind(*[changes.get(name, getattr(values, name)) for name in kind._fields])


def default_out_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of d for x of ``dtype``."""
    return torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype


def bias_dtype(dtype: torch.dtype, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the bias for x of ``dtype`` and d of ``out_dtype``: x's dtype or, if x is fp8, d's if that
    has 16 bits, else bfloat16."""
    if dtype != torch.float8_e4m3fn:
        return dtype
    return torch.float16 if out_dtype == torch.float16 else torch.bfloat16


def require_out_dtype(dtype: torch.dtype | None) -> None:
    """Raise TypeError unless ``dtype`` is one of :data:`FLOATS` or None."""
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in FLOATS):
        raise TypeError(f"out_dtype: wanted {', '.join(map(str, FLOATS))} or None, got {dtype!r}")


class EpilogueOperands(NamedTuple):
    """The operands that an :class:`Epilogue` asks for; None for the others. They are tensors of torch on the host and
    of cute in device code."""

    alpha: Any = None
    """A number, or a float32 tensor (1,)."""
    bias: Any = None
    """(n,), or (experts, n)."""
    residual: Any = None
    """(m, columns), contiguous; may be d itself, and must not overlap it otherwise."""
    token_scale: Any = None
    """float32 (m,): the factor of each row of x; (rows of x,) if rows of x are gathered."""
    expert_scale: Any = None
    """float32 (experts,): the factor of each expert's products."""
    block_scale: Any = None
    """float32 (rows of x, ceil(k / 128)), any strides: the factor of each 128 columns of a row of x."""
    channel_scale: Any = None
    """float32 (n,), or (experts, n): the factor of each output channel. The launch fills it in if the weight has one,
    and it stays the last field."""

    def of_expert(self, take: Callable[[Any], Any]) -> EpilogueOperands:
        """Return the operands of one expert, with ``take(tensor)`` for each tensor of :data:`PER_EXPERT`."""
        operands = ((name, getattr(self, name)) for name in PER_EXPERT)
        return replaced(self, **{name: take(t) for name, t in operands if t is not None})

    def of_rows(self, rows: slice) -> EpilogueOperands:
        """Return the operands of these rows of d."""
        operands = {name: getattr(self, name) for name in ("residual", "token_scale", "block_scale")}
        return replaced(self, **{name: t[rows] for name, t in operands.items() if t is not None})

    def scaled_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """Return x (m, k), float32 or float64, with each 128 columns multiplied by their block scale, if any."""
        if self.block_scale is None:
            return x
        return x * self.block_scale.to(x.dtype).repeat_interleave(SCALE_BLOCK, dim=1)[:, : x.shape[1]]


SCALE_BLOCK = 128
"""Columns of x that share a block scale."""
PER_EXPERT = ("bias", "expert_scale", "channel_scale")
"""Operands that have a leading dimension (experts) if the weight has experts."""
NO_OPERANDS = EpilogueOperands()


class Epilogue(NamedTuple):
    """The operations d = act(alpha * expert_scale * token_scale * (x @ w.T) + bias) + residual, computed in float32 and
    rounded once to d's dtype. The factors ``block_scale`` multiply x itself.

    A gated activation, such as ``silu_mul``, takes the rows of w in pairs, gate and up, so that d has n / 2 columns:
    d[:, i] = silu(y[:, 2 i]) * y[:, 2 i + 1] + residual[:, i], with y = alpha * (x @ w.T) + bias.

    An epilogue holds no tensors. It is part of a problem and of a compile key, and a tuple, because every call looks
    its plan up by it.

    Examples:
        >>> print(w4gemm.Epilogue("silu_mul", bias=True))
        silu_mul(x @ w.T + bias)
    """

    activation: str | None = None
    """An activation of :mod:`w4gemm.core.activation`, such as "silu" or "silu_mul(limit=10)", or None."""
    alpha: str | None = None
    """"host" for a number that comes with the launch, "device" for a float32 in device memory, or None."""
    bias: bool = False
    """True if a bias (n,) is added, or (experts, n) if the weight has experts."""
    residual: bool = False
    """True if a tensor of d's shape and dtype is added after the activation; d may be written over it."""
    out_dtype: torch.dtype | None = None
    """dtype of d: float32, float16 or bfloat16; None for x's dtype, or bfloat16 if x is fp8."""
    token_scale: bool = False
    """True if fp8 x has a float32 factor for each row: (m,)."""
    expert_scale: bool = False
    """True if each expert's products have a float32 factor: (experts,)."""
    block_scale: bool = False
    """True if fp8 x has a float32 factor for each 128 columns of a row: (m, ceil(k / 128))."""

    @classmethod
    def of(
        cls, operands: EpilogueOperands, activation: str | None = None, out_dtype: torch.dtype | None = None
    ) -> Epilogue:
        """Return the epilogue that asks for exactly these operands."""
        alpha, bias, residual, *scales, _ = operands
        kind = None if alpha is None else "device" if isinstance(alpha, torch.Tensor) else "host"
        scale_flags = (scale is not None for scale in scales)
        return cls(activation, kind, bias is not None, residual is not None, out_dtype, *scale_flags)

    def of_quantized(self, dtype: torch.dtype) -> Epilogue:
        """Return the epilogue of the fp8 product when x of ``dtype`` is quantized first: d keeps x's dtype."""
        out_dtype = self.result_dtype(dtype)
        stored = None if out_dtype == default_out_dtype(torch.float8_e4m3fn) else out_dtype
        return replaced(self, token_scale=True, out_dtype=stored)

    def check(self) -> None:
        """Raise ValueError or TypeError, naming the field, for an unknown activation, alpha or dtype of d, or for a
        flag that is no bool."""
        canonical(self.activation)
        require_out_dtype(self.out_dtype)
        if self.alpha not in (None, "host", "device"):
            raise ValueError(f"alpha: wanted 'host', 'device' or None, got {self.alpha!r}")
        for name, default in self._field_defaults.items():
            if default is False:
                require_bool(name, getattr(self, name))

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of d for x of ``dtype``."""
        return self.out_dtype or default_out_dtype(dtype)

    @property
    def gated(self) -> bool:
        """True if two neighbouring features make one column of d."""
        return is_gated(self.activation)

    @property
    def is_plain(self) -> bool:
        """True if d is x @ w.T and nothing else, in any dtype."""
        return replaced(self, out_dtype=None) == PLAIN

    @property
    def linear(self) -> bool:
        """True if there is at most a bias, so that a plain linear layer's gradients apply."""
        return replaced(self, bias=False, out_dtype=None) == PLAIN

    def columns(self, n: int) -> int:
        """Number of columns of d for a weight of n rows."""
        return n // 2 if self.gated else n

    def operand_shapes(
        self, dtype: torch.dtype, shape: tuple[Any, ...], n: Any, experts: Any = 0, x_rows: Any = None
    ) -> dict[str, tuple[torch.dtype, tuple[Any, ...]]]:
        """Return the dtype and shape of each contiguous tensor that the epilogue asks for, by its name in
        :class:`EpilogueOperands`. That is every tensor but ``block_scale``, which may have strides.

        Args:
            dtype: dtype of x.
            shape: shape of d, (m, columns).
            n: rows of the weight, or of one expert.
            experts: number of experts; 0 for a single weight.
            x_rows: number of rows of x if they are gathered; None for m.
        """
        tensors: dict[str, tuple[torch.dtype, tuple[Any, ...]]] = {}
        if self.alpha == "device":
            tensors["alpha"] = torch.float32, (1,)
        if self.bias:
            tensors["bias"] = bias_dtype(dtype, self.out_dtype), (n,)
        if self.residual:
            tensors["residual"] = self.result_dtype(dtype), shape
        if self.token_scale:
            tensors["token_scale"] = torch.float32, shape[:1] if x_rows is None else (x_rows,)
        if self.expert_scale:
            tensors["expert_scale"] = torch.float32, ()
        if experts == 0:
            return tensors
        return {name: (t, (experts, *size) if name in PER_EXPERT else size) for name, (t, size) in tensors.items()}

    def apply(self, sums: torch.Tensor, operands: EpilogueOperands) -> torch.Tensor:
        """Return d (m, columns) for ``sums``, x @ w.T (m, n), in the dtype of ``sums``: the formula in PyTorch.
        ``operands`` have no channel scale, because ``sums`` include it."""
        alpha, bias, residual, token_scale, expert_scale, *_ = operands
        d = sums if token_scale is None else sums * token_scale.to(sums.dtype)[:, None]
        d = d if expert_scale is None else d * expert_scale.to(d.dtype)
        d = d if alpha is None else d * alpha
        d = d if bias is None else d + bias.to(d.dtype)
        d = d if self.activation is None else parse(self.activation).apply(d)
        return d if residual is None else d + residual.to(d.dtype)

    def __str__(self) -> str:
        factors = ("alpha * " if self.alpha else "") + ("token_scale * " if self.token_scale else "")
        factors = ("expert_scale * " if self.expert_scale else "") + factors
        x = "(block_scale * x)" if self.block_scale else "x"
        text = f"{factors}{x} @ w.T" + (" + bias" if self.bias else "")
        text = f"{self.activation}({text})" if self.activation else text
        text += " + residual" if self.residual else ""
        return text if self.out_dtype is None else f"{text} as {str(self.out_dtype).removeprefix('torch.')}"


PLAIN = Epilogue()
"""x @ w.T and nothing else."""
