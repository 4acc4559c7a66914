"""Draw a random problem from two seeds, and run it: :func:`draw`, :func:`check`.

A variant's seed says what is compiled (kind, format, dtypes, epilogue, which of the legal configs), a problem's seed
the sizes, the numbers and the strides, so that many problems share a compiled kernel.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import w4gemm
from fuzz import formulas

FP8 = torch.float8_e4m3fn
KINDS = ("dense", "dense", "dense", "grouped", "gathered", "masked")
GROUPS = (32, 64, 96, 128, 160, 256, 512, -1)
DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16, FP8), "cuda": (torch.bfloat16, torch.float16, FP8)}
ACTIVATIONS = (None, None, None, "relu", "silu", "gelu", "gelu_tanh", "silu_mul")
GATED = ("silu_mul", "silu_mul(limit=3)", "gelu_mul", "gelu_tanh_mul", "swiglu_oai", "swiglu_oai(limit=2)", "situ_mul")


@dataclass(frozen=True)
class Case:
    """One problem; everything but the numbers."""

    variant_seed: int
    problem_seed: int
    kind: str
    format: str
    dtype: torch.dtype
    """dtype of x as the kernel sees it."""
    quantized: bool
    """True if x comes in 16 bits and is quantized on the way."""
    out_dtype: torch.dtype | None
    activation: str | None
    alpha: str | None
    bias: bool
    residual: bool
    forced: bool
    m: int
    n: int
    k: int
    experts: int
    numbers: str
    """"exact": integers whose sums are exact, so that every bit is known; "normal"; "one_hot"; "extreme"."""
    strides: str
    nan_row: bool

    @property
    def columns(self) -> int:
        """Columns of d."""
        return self.n // 2 if self.activation in GATED else self.n

    @property
    def name(self) -> str:
        """Its two seeds, as ``fuzz.run --only`` takes them."""
        return f"{self.variant_seed}:{self.problem_seed}"


def draw(variant_seed: int, problem_seed: int, device: str) -> Case:
    """The case of two seeds."""
    v, p = random.Random(f"v{variant_seed}"), random.Random(f"p{problem_seed}")
    dtype = v.choice(DTYPES[device])
    fp8 = dtype == FP8
    group, zero = v.choice(GROUPS), v.choice(("none", "none", "int", "float"))
    scale = v.choice(("bf16", "bf16", "fp16"))
    if fp8:
        zero = "int" if zero == "float" else zero
        if v.random() < 0.5:
            zero, scale = "none", "e4m3"
    element = "int4"
    if zero == "none" and scale != "e4m3" and not fp8:
        others = random.Random(f"e{variant_seed}")
        chance = others.random()
        element = "iq4" if chance < 0.25 else "e2m1" if chance < 0.6 else "int4"
        if element == "e2m1":
            scale, group = others.choice((("e8m0", group), ("e4m3_row", group), ("e8m0", 32), ("e4m3_row", 16)))
    format = (f"{element}_col" if group < 0 else f"{element}_g{group}") + (f"_z{zero}" if zero != "none" else "")
    format += "" if scale == "bf16" else f"_{scale}"
    kind, activation = v.choice(KINDS), v.choice(ACTIVATIONS)
    if activation == "silu_mul":
        activation = random.Random(f"a{variant_seed}").choice(GATED)
    n = p.choice((1, 2, 3, 7, 16, 31, 64, 65, 100, 128, 130, 192, 200, 257, 320, 500, 513, 1000, 2050))
    k = p.choice((1, 2, 5, 16, 31, 32, 33, 64, 96, 100, 128, 129, 192, 256, 300, 384, 512, 777, 1024, 1536, 2048, 4100))
    m = p.choice((1, 1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 24, 31, 33, 40, 63, 64, 65, 100, 128, 129, 200, 257, 300, 600))
    if n * k > 2**21:
        m = min(m, 65)
    experts = 0 if kind == "dense" else p.choice((1, 2, 3, 5, 8, 17))
    return Case(
        variant_seed,
        problem_seed,
        kind,
        format,
        dtype,
        fp8 and v.random() < 0.4,
        v.choice((None, None, torch.float32, torch.bfloat16, torch.float16)),
        activation,
        v.choice((None, None, None, "host", "device")),
        v.random() < 0.4,
        v.random() < 0.3,
        v.random() < 0.6,
        m,
        n + n % 2 if activation in GATED else n,
        k,
        experts,
        p.choice(("exact", "exact", "normal", "normal", "one_hot", "extreme")),
        p.choice(("plain", "plain", "padded", "transposed", "expanded")),
        p.random() < 0.1 and kind == "dense",
    )


class Numbers:
    """The tensors of a case, made on the CPU by one generator, then moved."""

    def __init__(self, case: Case, device: str):
        self.case, self.device = case, device
        self.g = torch.Generator().manual_seed(case.problem_seed * 1_000_003 + case.variant_seed)
        self.format = w4gemm.WeightFormat.parse(case.format)
        self.exact = case.numbers == "exact"

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.g)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """low .. high."""
        return torch.randint(low, high + 1, shape, generator=self.g)

    def weight(self) -> tuple[w4gemm.QuantizedWeight, formulas.Weight]:
        """One weight (n, k) in the canonical layout, and its exact numbers."""
        case, f = self.case, self.format
        n, k = case.n, case.k
        groups = 1 if f.group_size < 0 else -(-k // f.group_size)
        codes = self.integers(0, 15, n, k)
        sign = 1 if f.scale == "e8m0" else self.integers(0, 1, n, groups) * 2 - 1
        e4m3 = f.scale.startswith("e4m3")
        if self.exact:
            scales = sign * torch.exp2(self.integers(-2, 0, n, groups).float())
        elif case.numbers == "extreme":
            low, high = (-6, 4) if e4m3 else (-8, 3) if torch.float16 in (case.dtype, f.scale_dtype) else (-20, 12)
            scales = sign * (1 + self.uniform(n, groups)) * torch.exp2(self.integers(low, high, n, groups).float())
        else:
            scales = sign * (self.uniform(n, groups) + 0.1) * (16 if e4m3 else 1 / k**0.5)
            scales *= (self.uniform(n, groups) > 0.05) | (f.scale == "e8m0")
        if f.element == "iq4":
            scales = scales / 16  # whose numbers are about 16 times int4's
        scales = scales.to(f.scale_dtype)
        zeros = channels = None
        if f.zero == "int":
            zeros = self.integers(0, 15, n, groups).to(torch.uint8)
        elif f.zero == "float":
            zeros = self.integers(-4, 4, n, groups).float() if self.exact else self.uniform(n, groups) * 4 - 2
            zeros = (zeros * (scales.float() if self.exact else 1 / k**0.5)).to(f.scale_dtype)
        if e4m3:
            channels = torch.exp2(self.integers(-2, 1, n).float()) if self.exact else self.uniform(n) / 16 + 0.01
        w = w4gemm.QuantizedWeight.from_codes(f, codes, scales, zeros, channels=channels)
        numbers = formulas.weight(codes, scales, zeros, channels, f.group_size, f.zero, f.element, f.scale == "e4m3")
        return w, numbers

    def x(self, rows: int) -> torch.Tensor:
        """x (rows, k) in the dtype that the caller passes."""
        case = self.case
        k = case.k
        if case.numbers == "one_hot":
            x = torch.zeros(rows, k)
            x[torch.arange(rows), self.integers(0, k - 1, rows)] = 2.0
        elif self.exact:
            x = self.integers(-2, 2, rows, k).float() * (self.uniform(rows, k) < min(1.0, 24 / k))
        elif case.numbers == "extreme":
            x = torch.randn(rows, k, generator=self.g) * torch.exp2(self.integers(-6, 5, rows, 1).float())
        else:
            x = torch.randn(rows, k, generator=self.g)
        return x.to(torch.bfloat16 if case.quantized else case.dtype)

    def moved(self, t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.to(self.device)

    def strided(self, x: torch.Tensor) -> torch.Tensor:
        """The same numbers in other strides."""
        bits = x.view(torch.uint8) if x.dtype == FP8 else x
        if self.case.strides == "padded":
            wide = torch.empty(x.shape[0], x.shape[1] + 8 * (1 + self.case.problem_seed % 3), dtype=bits.dtype)
            bits = wide.to(bits.device)[:, : x.shape[1]].copy_(bits)
        elif self.case.strides == "transposed":
            bits = bits.t().contiguous().t()
        elif self.case.strides == "expanded" and x.shape[0] > 1:
            bits = bits[:1].expand(x.shape[0], -1)
        return bits.view(x.dtype) if x.dtype == FP8 and bits.stride(-1) == 1 else bits if x.dtype != FP8 else x


def config_of(case: Case, w: w4gemm.QuantizedWeight, epilogue: w4gemm.Epilogue, m: int, device: str) -> str | None:
    """The same config for as many problems of a variant as may be; None for the library's own choice."""
    if not case.forced:
        return None
    problem = w4gemm.GemmProblem(
        m,
        case.n,
        case.k,
        case.dtype,
        w.format,
        w.layout,
        epilogue,
        w4gemm.Device.of(device),
        experts=case.experts,
        gathered=case.kind == "gathered",
    )
    legal = w4gemm.configs(problem)
    return max(legal, key=lambda c: hashlib.sha256(f"{case.variant_seed}{c}".encode()).digest(), default=None)


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
    indices: torch.Tensor | None = None
    """int32 (total), rows of x (gathered)."""

    def of_d(self, t: torch.Tensor) -> torch.Tensor:
        """Rows of x, or of what comes with it, as rows of d."""
        return t if self.indices is None else t[self.indices.long().to(t.device)]


def rows_of(case: Case, r: random.Random) -> Rows:
    if case.kind == "dense":
        return Rows(case.m, [(0, case.m)], [], case.m)
    if case.kind == "masked":
        most = max(1, case.m // case.experts)
        counts = [r.choice((0, most, r.randint(0, most))) for _ in range(case.experts)]
        total = case.experts * most
        return Rows(total, [(e * most, e * most + c) for e, c in enumerate(counts)], counts, total)
    cuts = sorted(r.choices(range(case.m + 1), k=case.experts - 1))
    if r.random() < 0.2:  # all rows for one expert
        cuts = [0] * len(cuts)
    ends = [0, *cuts, case.m]
    rows = Rows(case.m, list(itertools.pairwise(ends)), ends, case.m)
    if case.kind == "grouped":
        return rows
    source = r.randint(1, 2 * case.m)
    indices = torch.tensor([r.randrange(source) for _ in range(case.m)], dtype=torch.int32)
    return rows._replace(source=source, indices=indices)


class Operands(NamedTuple):
    """Tensors of a call, on its device."""

    x: torch.Tensor
    token_scale: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    alpha: float | torch.Tensor | None
    alpha_number: float | None
    out_dtype: torch.dtype
    """dtype of d."""


def operands_of(case: Case, made: Numbers, rows: Rows, r: random.Random) -> Operands:
    x = made.x(rows.source).to(made.device)
    x = made.strided(x) if case.kind != "masked" else x
    if case.nan_row:
        x = x.clone(memory_format=torch.contiguous_format)
        bits, nan = (x.view(torch.uint8), 0x7F) if x.dtype == FP8 else (x, torch.nan)
        bits[r.randrange(rows.total), r.randrange(case.k)] = nan
    scale = bias = residual = number = alpha = None
    if case.dtype == FP8 and not case.quantized:
        scale = made.uniform(rows.source) + 0.5
        scale = torch.exp2(made.integers(-1, 1, rows.source).float()) if made.exact else scale
    out_dtype = case.out_dtype or (torch.bfloat16 if x.dtype == FP8 else x.dtype)
    if case.bias:
        shape = (case.experts, case.n) if case.experts else (case.n,)
        bias = made.integers(-8, 8, *shape) if made.exact else made.uniform(*shape) * 2 - 1
        beside_fp8 = torch.float16 if out_dtype == torch.float16 else torch.bfloat16
        bias = bias.to(made.device, beside_fp8 if case.dtype == FP8 else case.dtype)
    if case.residual:
        shape = (rows.total, case.columns)
        residual = made.integers(-8, 8, *shape) if made.exact else made.uniform(*shape) * 2 - 1
        residual = residual.to(made.device, out_dtype)
    if case.alpha:
        number = r.choice((0.5, -2.0, 4.0)) if made.exact else r.uniform(-2, 2)
        number = float(torch.tensor(number, dtype=torch.float32))
        alpha = number if case.alpha == "host" else torch.tensor([number], device=made.device)
    return Operands(x, made.moved(scale), bias, residual, alpha, number, out_dtype)


def run(case: Case, w: w4gemm.QuantizedWeight, rows: Rows, given: Operands, device: str) -> torch.Tensor:
    """d (rows.total, columns), into an output full of NaN, or over the residual."""
    out = torch.full((rows.total, case.columns), torch.nan, dtype=given.out_dtype, device=device)
    residual = given.residual
    if residual is not None and case.problem_seed % 2 and case.kind == "dense":
        residual = out.copy_(residual)
    has_scale = case.dtype == FP8
    says_dtype = given.out_dtype if case.quantized else case.out_dtype
    epilogue = w4gemm.Epilogue(case.activation, case.alpha, case.bias, case.residual, says_dtype, has_scale)
    fused: dict[str, Any] = {
        "bias": given.bias,
        "alpha": given.alpha,
        "activation": case.activation,
        "out_dtype": case.out_dtype,
        "config": config_of(case, w, epilogue, max(rows.total, 1), device),
    }
    if case.kind == "dense":
        return w4gemm.linear(given.x, w, residual=residual, token_scale=given.token_scale, out=out, **fused)
    limits = torch.tensor(rows.limits, dtype=torch.int32, device=device)
    if case.kind == "masked":

        def apart(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t.view(case.experts, -1, *t.shape[1:])

        fused |= {"residual": apart(residual), "token_scale": apart(given.token_scale), "out": apart(out)}
        w4gemm.masked_linear(given.x.view(case.experts, -1, case.k), w, limits, **fused)
        return out
    indices = None if rows.indices is None else rows.indices.to(device)
    fused |= {"residual": residual, "token_scale": given.token_scale, "out": out}
    return w4gemm.grouped_linear(given.x, w, limits, indices=indices, **fused)


def check(case: Case, device: str) -> str | None:
    """Run a case twice; what is wrong, or None.

    Raises:
        w4gemm.UnsupportedError: if no kernel takes it.
    """
    made, r = Numbers(case, device), random.Random(f"r{case.problem_seed}")
    weights = [made.weight() for _ in range(max(1, case.experts))]
    activations = "fp8" if case.dtype == FP8 and (device == "cuda" or case.quantized) else None
    packed = [w.to(device).repack(activations=activations) for w, _ in weights]
    w = packed[0] if case.kind == "dense" else w4gemm.QuantizedWeight.stack(packed, len(packed), packed[0].layout)
    rows = rows_of(case, r)
    given = operands_of(case, made, rows, r)
    d = run(case, w, rows, given, device)
    if not torch.equal(d.view(torch.uint8), run(case, w, rows, given, device).view(torch.uint8)):
        return "a second call gave other bits"

    x, scale = rows.of_d(given.x.double()), given.token_scale
    scale = None if scale is None else rows.of_d(scale)
    if case.quantized:
        x, scale = formulas.token_quantized(x)
    covered = torch.zeros(rows.total, dtype=torch.bool)
    for e, (first, last) in enumerate(rows.spans):
        part = slice(first, last)
        covered[part] = True
        exact = formulas.Weight(*(t.to(device) for t in weights[e][1]))
        sums = formulas.product(
            x[part],
            exact,
            name_of(case.dtype),
            w_may_be_rounded=case.dtype != FP8,
            columns_at_a_time=case.k if case.format.endswith("e4m3") else 128,
        )
        wanted = formulas.epilogue(
            sums,
            name_of(given.out_dtype),
            alpha=given.alpha_number,
            token_scale=None if scale is None else scale[part],
            bias=given.bias[e] if given.bias is not None and case.experts else given.bias,
            activation=case.activation,
            residual=None if given.residual is None else given.residual[part],
        )
        if problem := difference(case, d[part].double(), wanted, given.out_dtype):
            return f"rows {first} to {last}" + (f" of expert {e}" if case.experts else "") + f": {problem}"
    if case.experts and not d[~covered].isnan().all():
        return "rows that no expert has were written"
    return None


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def difference(case: Case, d: torch.Tensor, wanted: formulas.Sums, out_dtype: torch.dtype) -> str | None:
    """Where d is not what it must be."""
    number = formulas.TYPES[name_of(out_dtype)]
    nan = wanted.value.isnan()
    if not d[nan].isnan().all() and case.activation != "relu":
        return "a NaN of x is lost"
    value, error = wanted.value[~nan], wanted.error[~nan]
    d = d[~nan]
    if case.numbers == "exact" and case.activation in (None, "relu") and not case.quantized:
        off = d != formulas.rounded(value, number)
        if off.any():
            i = int(off.nonzero()[0])
            return f"{int(off.sum())} of {off.numel()} are not exact: {d[i]:.9g} for {value[i]:.9g}"
        return None
    # what may round to infinity may be infinite
    fits = value.abs() + error < number.largest
    off = ~((d - value).abs() <= error) & fits
    if off.any():
        i = int(torch.where(off, ((d - value).abs() / error).nan_to_num(torch.inf), -1.0).argmax())
        return f"{int(off.sum())} of {off.numel()} are off: {d[i]:.9g} for {value[i]:.9g}, allowed {error[i]:.3g}"
    return None
