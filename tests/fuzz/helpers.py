"""Random problems of the small kernels beside the products, held to formulas: :func:`check`.

On the CPU, and where a kernel does not run, PyTorch's operators do the same work, and are held to the same formulas.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch

import w4gemm
from fuzz import formulas
from fuzz.cases import GATED, K, N, drawn_format
from fuzz.numbers import Source
from w4gemm.api.step import add_rms_norm, add_rms_norm_quantize, gate_halves, rms_norm
from w4gemm.integrations.decoder.attention import CachedLayer, step_attention
from w4gemm.tuning.random_weight import random_weight

DTYPES = (torch.bfloat16, torch.float16)
NORM_K = (8, 64, 100, 128, 520, 2048, 2880, 4096, 16384, 28672)
GATE_N = (8, 16, 60, 264, 1032, 2048, 14336)
ROWS = (1, 1, 2, 3, 5, 17, 64, 200)
FLOAT32 = 2.0**-18
"""Relative error allowed of a float32 chain: a sum of a few thousand squares, a root, an exponential."""


class Problem(NamedTuple):
    """Where a problem is drawn from."""

    form: random.Random
    """For what is compiled for."""
    r: random.Random
    """For all else."""
    source: Source
    dtype: torch.dtype

    @property
    def device(self) -> str:
        return self.source.device

    @property
    def unit(self) -> float:
        return self.number.unit

    @property
    def number(self) -> formulas.NumberType:
        return formulas.TYPES[str(self.dtype).removeprefix("torch.")]

    def drawn(self, *shape: int) -> torch.Tensor:
        """Numbers of very different magnitudes in a third of the problems."""
        values = self.source.normal(*shape)
        if self.r.random() < 0.3:
            values *= self.source.powers(-6, 5, shape[0], *(1 for _ in shape[1:]))
        return values.to(self.dtype)

    def spoilt(self, x: torch.Tensor) -> torch.Tensor:
        """x, in a few problems with one number that is a NaN or an infinity."""
        if self.r.random() < 0.1:
            x.view(-1)[self.r.randrange(x.numel())] = self.r.choice((math.nan, math.inf, -math.inf))
        return x


def off(d: torch.Tensor, value: torch.Tensor, error: torch.Tensor, what: str) -> list[str]:
    """Say where d is further from value (float64) than error allows; NaN must be where value's is."""
    if d.shape != value.shape:
        return [f"{what}: shape {tuple(d.shape)} for {tuple(value.shape)}"]
    largest = torch.finfo(d.dtype).max  # what may round to infinity may be infinite
    d = d.double()
    good = value.isfinite() & error.isfinite() & (value.abs() + error < largest)
    wrong = good & ~((d - value).abs() <= error) | value.isnan() & ~d.isnan()
    if not wrong.any():
        return []
    at = int(wrong.flatten().nonzero()[0])
    numbers = ", ".join(f"{name} {t.flatten()[at].item():.9g}" for name, t in (("got", d), ("for", value)))
    return [f"{what}: {int(wrong.sum())} of {d.numel()} are off, the first is number {at}: {numbers}"]


def norm(p: Problem) -> list[str]:
    k, m = p.form.choice(NORM_K), p.r.choice(ROWS)
    x, weight, eps = p.spoilt(p.drawn(m, k)), p.drawn(k), p.r.choice((0.0, 1e-6, 1e-5, 0.1))
    if p.r.random() < 0.2:
        x[0] = 0.0
    if p.r.random() < 0.5:
        return added_norm(p, x, weight, eps)
    return normed(p, x, weight, eps, [rms_norm(x.view(m, 1, k), weight, eps).view(m, k) for _ in range(2)])


def added_norm(p: Problem, x: torch.Tensor, weight: torch.Tensor, eps: float) -> list[str]:
    """The norm of a sum, alone and with quantization."""
    residual = p.drawn(*x.shape)
    expected = (x.float() + residual.float()).to(x.dtype)
    both = [add_rms_norm(x, residual, weight, eps) for _ in range(2)]
    x8, scale, total = add_rms_norm_quantize(x, residual, weight, eps)
    quantized = w4gemm.quantize_activations(expected, norm_weight=weight, eps=eps)
    wrong = [line for t in (both[0][1], both[1][1], total) for line in same(t, expected)]
    wrong += same(x8, quantized[0]) + same(scale, quantized[1])
    return wrong + normed(p, expected, weight, eps, [y for y, _ in both])


def normed(p: Problem, x: torch.Tensor, weight: torch.Tensor, eps: float, both: list[torch.Tensor]) -> list[str]:
    """Compare the norm of x from two calls with its formula."""
    total = x.double().square().mean(1, keepdim=True) + eps
    value = x.double() / total.sqrt() * weight.double()
    error = value.abs() * (2.02 * p.unit + FLOAT32) + p.number.smallest_step * (1 + weight.double().abs())
    value = torch.where(total < 2.0**-100, 0.0, value)  # zeros without an epsilon: 0 / 0, or 0 times an infinity
    error = torch.where(total < 2.0**-100, torch.inf, error)
    return off(both[0], value, error, "rms_norm") + same(*both)


def halves(p: Problem) -> list[str]:
    n, m, activation = p.form.choice(GATE_N), p.r.choice(ROWS), p.form.choice(GATED)
    x = p.spoilt(p.drawn(m, 2 * n))
    both = [gate_halves(x, activation) for _ in range(2)]
    pairs = torch.stack(x.double().chunk(2, 1), -1).flatten(1)
    value = formulas.activated(activation, pairs)
    _, up = formulas.gated(activation, pairs)
    error = value.abs() * (1.01 * p.unit + FLOAT32) + FLOAT32 * up.abs() + p.number.smallest_step
    error = torch.where(pairs.isfinite().unflatten(1, (-1, 2)).all(2), error, torch.inf)
    wrong = off(both[0], torch.where(error.isfinite(), value, 0), error, f"gate_halves {activation}")
    return wrong + same(*both)


def attention(p: Problem) -> list[str]:
    """One new token of each sequence, into caches whose other slots must stay."""
    dim, group = p.form.choice((64, 128, 256, 96)), p.form.choice((1, 2, 3, 4, 7, 8))
    length = p.form.choice((64, 200, 256, 1000, 4096))
    if p.device == "cpu":
        length = min(length, 1000)  # there it takes PyTorch alone, and a second
    batch, kv_heads = p.r.choice((1, 1, 2, 3, 8)), p.r.choice((1, 2, 3, 8))
    slot = p.r.choice((0, length - 1, p.r.randrange(length)))
    window = p.r.choice((2**30, 2**30, 1, 7, p.r.randint(1, 2 * length)))
    heads = kv_heads * group
    both = p.source.normal(batch, heads + 2 * kv_heads, dim).to(p.dtype)
    q, k, v = both.split((heads, kv_heads, kv_heads), 1)
    angle = p.source.normal(batch, dim // 2).repeat(1, 2)
    cos, sin = angle.cos().to(p.dtype), angle.sin().to(p.dtype)
    keys, values = (p.source.normal(batch, kv_heads, length, dim).to(p.dtype) for _ in range(2))
    first = torch.tensor([p.r.randint(0, slot) for _ in range(batch)], dtype=torch.int32, device=p.device)
    slots = torch.tensor([slot], device=p.device)
    scale, outs, layers = dim**-0.5, [], []
    for _ in range(2):
        layers.append(CachedLayer(keys.clone(), values.clone(), slots, first))
        outs.append(step_attention(q, k, v, (cos, sin), layers[-1], scale, window))
    turned_q, turned_k = (_rotated(t, cos, sin) for t in (q, k))
    exact_k, exact_v = keys.double(), values.double()
    exact_k[:, :, slot], exact_v[:, :, slot] = layers[0].keys[:, :, slot].double(), v.double()
    wrong = off(
        layers[0].keys[:, :, slot], turned_k, turned_k.abs() * 1.01 * p.unit + FLOAT32, "step_attention: the new key"
    )
    others = torch.arange(length, device=p.device) != slot
    for name, ours, before in (("keys", layers[0].keys, keys), ("values", layers[0].values, values)):
        if not torch.equal(ours[:, :, others], before[:, :, others]):
            wrong.append(f"step_attention: other slots of the cached {name} changed")
    scores = (turned_q * scale).unflatten(1, (kv_heads, group)) @ exact_k.mT
    slots = torch.arange(length, device=p.device)
    seen = (slots <= slot) & (slots > slot - window) & (slots >= first[:, None])
    shares = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
    value = (shares @ exact_v).flatten(1, 2)
    spread = (shares @ exact_v.abs()).flatten(1, 2)
    error = value.abs() * 1.01 * p.unit + 2.0**-14 * (1 + scores.abs().amax()) * spread + p.number.smallest_step
    return wrong + off(outs[0], value, error, "step_attention") + same(*outs)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.double().chunk(2, -1)
    return x.double() * cos.double()[:, None] + torch.cat((-high, low), -1) * sin.double()[:, None]


def routing(p: Problem) -> list[str]:
    """The order of choices by expert, and the sum of their rows."""
    experts, terms = p.form.choice((1, 3, 8, 32, 128, 257)), p.form.choice((1, 2, 4, 6, 8, 16))
    mapped, ids_dtype = p.form.random() < 0.4, p.form.choice((torch.int32, torch.int64))
    tokens, n = p.r.choice((1, 2, 7, 64, 333, 1000)), p.r.choice((8, 16, 100, 520, 2880))
    here = 2 * experts if mapped else experts
    ids = p.source.integers(-1, here, tokens, terms).to(ids_dtype)
    if p.r.random() < 0.3:  # nearly all to one expert
        ids = torch.where(p.source.uniform(tokens, terms) < 0.9, ids.new_zeros(()), ids)
    if p.r.random() < 0.3:
        ids = ids.t().contiguous().t()
    expert_map = None
    if mapped:
        order = p.source.uniform(here).argsort()
        expert_map = torch.where(order < experts, order, -1).int()
    routed = w4gemm.route(ids, experts, expert_map)
    known = ids.tolist() if expert_map is None else _mapped(ids.tolist(), expert_map.tolist())
    choices = [(e, t, j) for t, row in enumerate(known) for j, e in enumerate(row) if 0 <= e < experts]
    choices.sort(key=lambda choice: choice[0])  # a stable sort: tokens, then choices, in their order
    rows = [[-1] * terms for _ in range(tokens)]
    for at, (_, t, j) in enumerate(choices):
        rows[t][j] = at
    wrong = []
    counts = [0] * (experts + 1)
    for e, *_ in choices:
        counts[e + 1] += 1
    ends = torch.tensor(counts).cumsum(0).tolist()
    if routed.m_offsets.tolist() != ends:
        wrong.append("route: other offsets")
    if routed.tokens.tolist()[: len(choices)] != [t for _, t, _ in choices]:
        wrong.append("route: other tokens")
    if not all(0 <= t < tokens for t in routed.tokens.tolist()):
        wrong.append("route: a token that there is not")
    if routed.row_of_choice.tolist() != rows:
        wrong.append("route: other rows of choices")
    return wrong + _combined(p, routed.row_of_choice, n)


def _mapped(ids: list[list[int]], expert_map: list[int]) -> list[list[int]]:
    return [[expert_map[e] if 0 <= e < len(expert_map) else -1 for e in row] for row in ids]


def _combined(p: Problem, rows: torch.Tensor, n: int) -> list[str]:
    total, terms = rows.numel(), rows.shape[1]
    d, weights = p.drawn(total, n), p.source.uniform(*rows.shape)
    d[int(rows.amax()) + 1 :] = math.nan  # rows of experts elsewhere, which nothing may read
    weights = weights.to(p.r.choice((torch.float32, p.dtype)))
    both = [w4gemm.combine(d, rows, weights, settled=settled) for settled in (False, True)]
    value = torch.zeros(len(rows), n, dtype=torch.float64, device=p.device)
    size = torch.zeros_like(value)
    for j in range(terms):
        row = torch.where(rows[:, j, None] >= 0, d.double()[rows[:, j].clamp(min=0).long()], 0.0)
        term = weights[:, j, None].double() * row
        value, size = value + term, size + term.abs()
    error = value.abs() * 1.01 * p.unit + 2.0**-20 * size + p.number.smallest_step
    return off(both[0], value, error, "combine") + same(*both)


def quantized(p: Problem) -> list[str]:
    """x in fp8, of an RMSNorm or of gates and ups."""
    k, front = p.form.choice((1, 8, 100, 577, 2048, 5120, 8192)), p.form.choice(("", "rms", "silu_mul"))
    m = p.r.choice(ROWS)
    wide = p.drawn(m, (2 * k if front == "silu_mul" else k) + 8 * p.r.choice((0, 0, 1)))
    x = wide[:, : 2 * k if front == "silu_mul" else k]
    weight, eps = (p.drawn(k) if front == "rms" else None), p.r.choice((1e-6, 1e-5))
    both = [w4gemm.quantize_activations(x, norm_weight=weight, eps=eps, silu_mul=front == "silu_mul") for _ in (0, 1)]
    (x8, scale), y = both[0], x.double()
    wrong = same(*(t.view(torch.uint8) for t, _ in both)) + same(*(t for _, t in both))
    if front == "":
        wanted8, expected = formulas.token_quantized(y)
        wrong += off(scale, expected, torch.zeros_like(expected), "quantize_activations: scales")
        return wrong + off(x8, wanted8, torch.zeros_like(wanted8), "quantize_activations")
    if front == "silu_mul":
        gate, up = y.chunk(2, 1)
        y, loose = gate / (1 + torch.exp(-gate)) * up, FLOAT32 * up.abs()
    else:
        assert weight is not None
        y = y / (y.square().mean(1, keepdim=True) + eps).sqrt() * weight.double()
        loose = torch.zeros_like(y)
    top = y.abs().amax(1, keepdim=True).clamp(min=2.0**-100)
    once = y.abs() * (1.01 * p.unit + FLOAT32) + loose + p.number.smallest_step
    least = once.amax(1, keepdim=True) / 448
    zeros = y.abs().amax(1, keepdim=True) < once.amax(1, keepdim=True)  # perhaps, as rounded; then the scale is 1
    least = torch.where(zeros, torch.inf, least)
    wrong += off(scale, top[:, 0] / 448, least[:, 0] + 1e-30, "quantize_activations: scales")
    rounding = y.abs() * 2.0**-4 + top / 448 * 2.0**-10 + once
    return wrong + off(x8.double() * scale.double()[:, None], y, 1.01 * rounding, f"quantize_activations {front}")


def looked_up(p: Problem) -> list[str]:
    """Rows of a packed embedding; on a GPU those of ids that there are not are NaN."""
    format = w4gemm.WeightFormat.parse(drawn_format(p.form, p.dtype, p.device))
    n, k, ids_dtype = p.r.choice(N), p.r.choice(K), p.form.choice((torch.int32, torch.int64))
    w = random_weight(format, n, k, p.r.randrange(2**31), device=p.device)
    shape = p.r.choice(((), (0,), (1,), (7,), (2, 33), (300,)))
    ids = p.source.integers(0, n - 1, *shape).to(ids_dtype)
    expected, packed = w.dequantize(p.dtype)[ids.long()], w.repack()
    if p.device == "cuda" and ids.numel() and p.r.random() < 0.3:
        ids.view(-1)[-1] = p.r.choice((-1, n, 2**31 - 1))
        expected.view(-1, k)[-1] = math.nan
    both = [w4gemm.embedding(ids, packed, p.dtype) for _ in range(2)]
    if both[0].shape != expected.shape:
        return [f"embedding: shape {tuple(both[0].shape)} for {tuple(expected.shape)}"]
    return [f"embedding of {format}: {line}" for rows in both for line in same(rows, expected)]


def same(first: torch.Tensor, second: torch.Tensor) -> list[str]:
    """Say if another call gave other bits. Only those of a NaN may differ: PyTorch's operators on the CPU give it two
    patterns, by where it lies in memory."""
    different = first.view(torch.uint8) != second.view(torch.uint8)
    different = different.view(*first.shape, first.element_size()).any(-1)
    if first.is_floating_point():
        different &= ~(first.float().isnan() & second.float().isnan())
    return ["another call gave other bits"] if different.any() else []


HELPERS: dict[str, Callable[[Problem], list[str]]] = {
    "rms_norm": norm,
    "gate_halves": halves,
    "step_attention": attention,
    "routing": routing,
    "activation_quantize": quantized,
    "embedding_rows": looked_up,
}
EVERY = 12
"""One of so many variants is a helper's."""


def drawn(seed: int) -> str | None:
    """The helper of a variant's seed, or None if it is one of products."""
    return random.Random(f"h{seed}").choice(list(HELPERS)) if random.Random(f"k{seed}").random() < 1 / EVERY else None


def check(name: str, form_seed: int, seed: int, device: str) -> list[str]:
    """Run a problem twice or more and say what is wrong with it."""
    form, r = random.Random(f"{name} {form_seed}"), random.Random(f"{name} {seed}")
    dtype = form.choice(DTYPES)
    return HELPERS[name](Problem(form, r, Source(f"{name} {seed}", device), dtype))
