"""The methods "sum" and "dense" of ``cpu_mixed_gemm``: x (m, k) and the packed weight to (m, n), without the epilogue.

"sum", for one token x, with c the codes - h, h = 2**(bits - 1), s scales and z zero points:

    d[n] = sum over groups g of  s[g, n] * (sum over j in g of x[j] * c[j, n]  +  r[g, n] * sum of x over g)  +  t[g, n]
    r: none 0, int h - z[g, n], float h;  t: none and int 0, float z[g, n] * sum of x over g

The inner sum is PyTorch's ``embedding_bag_4bit`` (FBGEMM), or that of 2 or 8 bits, with x as the weights of the table's
rows: float32, vectorized, and the only thing that reads codes. A one-hot x gives the dequantized weight, since beside
float zero points s * u is exact in float32. (z + h * s) * sum of x would not be: where z is 2**10 times smaller than s,
it loses the last bits of z.

"dense" dequantizes a block of output features and calls matmul: the same table with bags of a single row where
possible, else :func:`w4gemm.weights.components.dequantize_parts`.
"""

from __future__ import annotations

import functools
import math

import torch

from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import PLAIN
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels.cpu.matmul import fast_dtype, whole_columns
from w4gemm.packing.bits import pack
from w4gemm.packing.layouts import layout_named
from w4gemm.packing.layouts.cpu import TABLE_N, table_bits
from w4gemm.packing.repack import Matrix, entries_of_rows
from w4gemm.weights.components import dequantize_parts, rounded_sum


def common_part(length: int) -> int:
    """The longest part of at most 256 columns that divides a group of ``length`` columns (a multiple of 16)."""
    step = math.gcd(length, 32)
    return next(part for part in range(256, 0, -step) if length % part == 0)


_OPERATORS = {bits: f"embedding_bag_{name}_rowwise_offsets" for bits, name in ((2, "2bit"), (4, "4bit"), (8, "byte"))}
"""PyTorch's operators by the bits of a table's codes."""


def code_sums(rows: torch.Tensor, starts: torch.Tensor, x: torch.Tensor | None, bits: int) -> torch.Tensor:
    """Sums of the table's rows from each start to the next, row i times x[i], as float32 (len(starts), TABLE_N).

    rows uint8 (r, row bytes) of codes of 2, 4 or 8 bits; starts int32, ascending from 0; x float32 (r) or None for
    ones. The operator reads x as it lies in memory, whatever its strides, so x must be contiguous.
    """
    assert x is None or x.is_contiguous()
    index = torch.arange(rows.shape[0], dtype=torch.int32)
    return getattr(torch.ops.quantized, _OPERATORS[bits])(
        rows, index, starts, scale_grad_by_freq=False, mode=0, pruned_weights=False, per_sample_weights=x
    )


@functools.cache
def has_code_sums(bits: int) -> bool:
    """Whether this build of PyTorch can do :func:`code_sums` (x86 builds with FBGEMM can)."""
    with torch.device("cpu"):  # whatever PyTorch's default device is
        codes = torch.arange(2 * TABLE_N, dtype=torch.uint8).view(2, -1) & 2**bits - 1
        trailer = torch.tensor([1, -(2 ** (bits - 1))], dtype=torch.float32 if bits == 8 else torch.float16)
        rows = torch.cat((pack(codes, bits), trailer.view(torch.uint8).expand(2, -1)), 1)
        x = torch.tensor([1, 2], dtype=torch.float32)
        try:
            got = code_sums(rows, torch.tensor([0], dtype=torch.int32), x, bits)
        except (RuntimeError, AttributeError, NotImplementedError):
            return False
        numbers = codes.float() - 2 ** (bits - 1)
        return torch.equal(got[0], numbers[0] + 2 * numbers[1])


def sum_linear(
    x: torch.Tensor, weight: tuple[torch.Tensor, ...], problem: GemmProblem, config: GemmConfig
) -> torch.Tensor:
    """One token x (1, k) times a weight in the ``cpu`` layout, as float32 (1, n)."""
    table, scales, *zeros = _with_factors(weight, problem.format)
    middle = problem.format.element_rule.padding_code
    chunks, k, row_bytes = table.shape
    part = config.tile_k
    parts, ragged = -(-k // part), k % part != 0
    if ragged:
        starts = (
            torch.arange(0, k, part, dtype=torch.int32) + torch.arange(0, chunks * k, k, dtype=torch.int32)[:, None]
        )
    else:
        starts = torch.arange(0, chunks * k, part, dtype=torch.int32)
    x = x[0].float()
    sums = code_sums(table.view(-1, row_bytes), starts.view(-1), x.repeat(chunks), table_bits(problem.format))
    sums = sums.view(chunks, parts, TABLE_N)
    if parts != scales.shape[1]:  # parts of a group share its scale
        group = torch.arange(parts) * part // problem.format.group_length(k)
        scales, zeros = scales[:, group], [z[:, group] for z in zeros]
    if not zeros:
        return (sums * scales).sum(1).view(1, -1)[:, : problem.n]
    if ragged:
        x = torch.nn.functional.pad(x, (0, parts * part - k))
    x_sums = x.view(parts, part).sum(-1)[:, None]
    if problem.format.zero == "int":
        sums = (sums + (middle - zeros[0].float()) * x_sums) * scales
    else:
        sums = torch.addcmul(zeros[0] * x_sums, sums + middle * x_sums, scales)
    return sums.sum(1).view(1, -1)[:, : problem.n]


def dense_linear(
    x: torch.Tensor, weight: tuple[torch.Tensor, ...], problem: GemmProblem, config: GemmConfig
) -> torch.Tensor:
    """x (m, k) times a weight in any layout that runs of ``config.tile_n`` rows can be cut from, as (m, n).

    x is multiplied in the dtype that is fast on this CPU. Before an epilogue that is float32, because PyTorch's
    matmul of 16-bit numbers would round the sums.
    """
    x = x.detach()  # or matmul takes another way, with other bits, for an x that requires a gradient
    dtype = fast_dtype(x.dtype) if problem.epilogue == PLAIN else torch.float32
    rounded, x = x.dtype, whole_columns(x.to(dtype), -1)
    out = torch.empty(x.shape[0], problem.n, dtype=dtype)
    layout, matrix = layout_named(problem.layout), Matrix(problem.format, problem.n, problem.k)
    for first in range(0, problem.n, config.tile_n):
        last = min(first + config.tile_n, problem.n)
        block = tuple(entries_of_rows(t, i, layout, matrix, first, last) for i, t in enumerate(weight))
        out[:, first:last] = _block_linear(x, block, problem, last - first, rounded)
    return out


def _block_linear(
    x: torch.Tensor, block: tuple[torch.Tensor, ...], problem: GemmProblem, n: int, rounded: torch.dtype
) -> torch.Tensor:
    """x times n rows of the weight, whose numbers are rounded to a dtype before they get that of x."""
    if problem.layout == "cpu" and has_code_sums(table_bits(problem.format)):
        w = _dequantized_chunks(block, problem.format, rounded)  # (chunks, k, TABLE_N)
        d = torch.matmul(x, whole_columns(w.to(x.dtype), -2))
        return d.transpose(0, 1).reshape(x.shape[0], -1)[:, :n]
    parts = layout_named(problem.layout).unpack(block, problem.format, n, problem.k)
    w = dequantize_parts(parts, problem.format, rounded)
    return torch.nn.functional.linear(x, whole_columns(w.to(x.dtype), -1))


def _dequantized_chunks(block: tuple[torch.Tensor, ...], format: WeightFormat, dtype: torch.dtype) -> torch.Tensor:
    """w.T (chunks, k, TABLE_N) in ``dtype``; in place, since fresh pages cost as much as the arithmetic."""
    table, scales, *zeros = _with_factors(block, format)
    middle = format.element_rule.padding_code
    chunks, k, row_bytes = table.shape
    length = format.group_length(k)
    starts = torch.arange(chunks * k, dtype=torch.int32)
    w = code_sums(table.reshape(-1, row_bytes), starts, None, table_bits(format)).view(chunks, k, TABLE_N)
    s = scales.float()[:, :, None]
    z = zeros[0].float()[:, :, None] if zeros else None
    round_once = (
        z is not None
        and format.zero == "float"
        and max(dtype.itemsize, scales.itemsize) < 4
        and not _fits_float32(scales, zeros[0], format.element_rule.largest_code)
    )
    result = torch.empty_like(w, dtype=dtype) if round_once else w
    whole = k // length * length
    for first, last in ((0, whole), (whole, k)):  # the last group may be short
        if first == last:
            continue
        groups = slice(first // length, -(-last // length))
        c = w[:, first:last].view(chunks, -1, min(length, last - first), TABLE_N)
        if z is None:
            c.mul_(s[:, groups])
        elif format.zero == "int":
            c.add_(middle - z[:, groups]).mul_(s[:, groups])
        else:
            c.add_(middle).mul_(s[:, groups])
            if round_once:
                values = rounded_sum(c, z[:, groups].expand_as(c), dtype)
                result[:, first:last] = values.view(chunks, last - first, TABLE_N)
            else:
                c.add_(z[:, groups])
    return result.to(dtype)


def _with_factors(weight: tuple[torch.Tensor, ...], format: WeightFormat) -> tuple[torch.Tensor, ...]:
    """Table, scales and zero points of a weight in the ``cpu`` layout, multiplied by their factors if there are any."""
    if not format.has_factors:
        return weight
    table, *levels, factors = weight
    superblock = torch.arange(levels[0].shape[1]) * format.group_size // format.scale_rule.factor_columns
    by_kind = factors.float().unflatten(1, (-1, format.factors))[:, superblock].unbind(2)
    return table, *(t * factor for t, factor in zip(levels, by_kind, strict=True))


def _fits_float32(scales: torch.Tensor, zeros: torch.Tensor, largest_code: int) -> bool:
    """Whether every s * u + z of 16-bit s and z and a code u is exact in float32, judged by exponents."""
    info = torch.finfo(scales.dtype)
    digits = 1 - round(math.log2(info.eps))  # of a significand: 11 in float16, 8 in bfloat16
    smallest = round(math.log2(info.smallest_normal)) - digits + 1  # exponent of a subnormal's last digit
    s, z = scales.float(), zeros.float()
    above = torch.frexp(largest_code * s.abs() + z.abs()).exponent
    last = [torch.frexp(t.abs()).exponent.masked_fill(t == 0, 999) - digits for t in (s, z)]
    last_digit = torch.minimum(*last).clamp(min=smallest)
    return bool((above - last_digit <= 24).all())
