"""The numbers of a problem, made on its device: :func:`rows_of`, :func:`operands_of`."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import torch

from fuzz.cases import FP8, Case

BLOCK = 128
"""Columns of x that share a block scale."""


class Source:
    """Random tensors of one seed on a device."""

    def __init__(self, seed: str, device: str):
        self.device = device
        self.g = torch.Generator(device).manual_seed(random.Random(seed).randrange(2**62))

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.g, device=self.device)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.g, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """low .. high."""
        return torch.randint(low, high + 1, shape, generator=self.g, device=self.device)

    def powers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.exp2(self.integers(low, high, *shape).float())

    def values(self, case: Case, spread: float, *shape: int) -> torch.Tensor:
        """Addends of sums: integers where these are to be exact."""
        return (
            self.integers(-8, 8, *shape).float() if case.numbers == "exact" else (self.uniform(*shape) - 0.5) * spread
        )


class Rows(NamedTuple):
    """Which rows of x each weight multiplies."""

    total: int
    """Rows of d."""
    spans: list[tuple[int, int]]
    """First and end of each weight's rows of d."""
    limits: list[int]
    """Offsets of experts, or the number of rows of each (masked), as the call takes them."""
    source: int
    """Rows of x."""
    indices: list[int] | None = None
    """Row of x of each row of d (gathered)."""

    def owner(self, device: torch.device | str) -> torch.Tensor:
        """int64 (total): the weight of each row of d, -1 for none."""
        owner = [-1] * self.total
        for e, (first, last) in enumerate(self.spans):
            owner[first:last] = [e] * (last - first)
        return placed(owner, device)


def placed(numbers: list[int], device: torch.device | str) -> torch.Tensor:
    """int64 (numbers), without waiting for the device. The copy reads pinned memory, which PyTorch keeps until the copy
    is done: the copy of pageable memory may still run when this returns, and that memory is freed here."""
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)


def rows_of(case: Case, r: random.Random) -> Rows:
    kind = case.variant.kind
    if kind == "dense":
        return Rows(case.m, [(0, case.m)], [], case.m)
    if kind == "masked":
        most = max(1, case.m // case.experts)
        counts = [r.choice((0, most, r.randint(0, most))) for _ in range(case.experts)]
        total = case.experts * most
        return Rows(total, [(e * most, e * most + c) for e, c in enumerate(counts)], counts, total)
    first, last = (0, case.m) if r.random() < 0.7 else sorted((r.randint(0, case.m), r.randint(0, case.m)))
    cuts = sorted(r.choices(range(first, last + 1), k=case.experts - 1))
    if r.random() < 0.2:  # all rows for one expert
        cuts = [first] * len(cuts)
    ends = [first, *cuts, last]
    rows = Rows(case.m, list(itertools.pairwise(ends)), ends, case.m)
    if kind == "grouped":
        return rows
    source = r.randint(1, 2 * case.m)
    return rows._replace(source=source, indices=[r.randrange(source) for _ in range(case.m)])


class Operands(NamedTuple):
    """Tensors of a call, on its device."""

    x: torch.Tensor
    token_scale: torch.Tensor | None
    """float32 (rows of x), or (rows of x, blocks of columns)."""
    stored_scale: torch.Tensor | None
    """The same as the call takes it."""
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    expert_scale: torch.Tensor | None
    alpha: float | torch.Tensor | None
    alpha_number: float | None
    out_dtype: torch.dtype
    """dtype of d."""


def operands_of(case: Case, rows: Rows, r: random.Random, device: str) -> Operands:
    v, source, exact = case.variant, Source(f"{case.name}", device), case.numbers == "exact"
    x = _strided(_x(case, rows.source, source), case)
    if case.bad:
        x = x.clone(memory_format=torch.contiguous_format)
        place = r.randrange(rows.source), r.randrange(case.k)
        if x.dtype == FP8:
            x.view(torch.uint8)[place] = 0x7F
        else:
            x[place] = float(case.bad)
    out_dtype = v.out_dtype or (torch.bfloat16 if x.dtype == FP8 else x.dtype)
    scale = stored = bias = residual = experts = alpha = number = None
    if x.dtype == FP8:
        shape = (rows.source, -(-case.k // BLOCK)) if v.block_scale else (rows.source,)
        powers = exact or case.scale_storage != "float32"
        scale = source.powers(-1, 1, *shape) if powers else source.uniform(*shape) + 0.5
        stored = _stored_scale(scale, case)
    if v.bias:
        beside_fp8 = torch.float16 if out_dtype == torch.float16 else torch.bfloat16
        shape = (case.experts, case.n) if case.experts else (case.n,)
        bias = source.values(case, 2, *shape).to(beside_fp8 if v.dtype == FP8 else v.dtype)
    if v.residual:
        residual = source.values(case, 2, rows.total, case.columns).to(out_dtype)
    if v.expert_scale:
        experts = source.powers(-1, 1, case.experts) if exact else source.uniform(case.experts) + 0.5
    if v.alpha:
        number = r.choice((0.5, -2.0, 4.0)) if exact else r.uniform(-2, 2)
        number = float(torch.tensor(number, dtype=torch.float32))
        alpha = number if v.alpha == "host" else torch.full((1,), number, device=device)
    return Operands(x, scale, stored, bias, residual, experts, alpha, number, out_dtype)


def _stored_scale(scale: torch.Tensor, case: Case) -> torch.Tensor:
    """Scales of fp8 x as the call takes them."""
    if case.scale_storage == "words":
        padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4), value=1.0)
        return padded.to(torch.float8_e8m0fnu).view(torch.int32)
    scale = scale if case.scale_storage == "float32" else scale.to(torch.float8_e8m0fnu)
    by_columns = case.variant.block_scale and case.strides != "plain"
    return scale.T.contiguous().T if by_columns else scale


def _x(case: Case, rows: int, source: Source) -> torch.Tensor:
    """x (rows, k) in the dtype that the caller passes."""
    k = case.k
    if case.numbers == "one_hot":
        x = torch.zeros(rows, k, device=source.device)
        x.scatter_(1, source.integers(0, k - 1, rows, 1), 2.0)
    elif case.numbers == "exact":
        x = source.integers(-2, 2, rows, k).float() * (source.uniform(rows, k) < min(1.0, 24 / k))
    else:
        x = source.normal(rows, k)
        x *= source.powers(-6, 5, rows, 1) if case.numbers == "extreme" else 1
    return x.to(torch.bfloat16 if case.variant.quantized else case.variant.dtype)


def _strided(x: torch.Tensor, case: Case) -> torch.Tensor:
    """The same numbers in other strides."""
    if case.variant.kind == "masked":
        return x
    bits = x.view(torch.uint8) if x.dtype == FP8 else x
    if case.strides == "padded":
        wide = bits.new_empty(x.shape[0], x.shape[1] + 8 * (1 + case.problem_seed % 3))
        bits = wide[:, : x.shape[1]].copy_(bits)
    elif case.strides == "transposed":
        bits = bits.t().contiguous().t()
    elif case.strides == "expanded" and x.shape[0] > 1:
        bits = bits[:1].expand(x.shape[0], -1)
    return bits.view(x.dtype) if x.dtype == FP8 and bits.stride(-1) == 1 else bits if x.dtype != FP8 else x
