"""Run a problem, and hold its result to the formulas: :func:`check`, :func:`verdict`."""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import w4gemm
from fuzz import formulas
from fuzz.cases import FP8, Case
from fuzz.numbers import BLOCK, Operands, Rows, operands_of, placed, rows_of
from fuzz.weights import Matrices
from w4gemm.api.gather import gather_columns
from w4gemm.api.packed import PackedLinear
from w4gemm.kernels import KERNELS
from w4gemm.kernels.gpu import takes_rows


class Checked(NamedTuple):
    """A case that was run."""

    case: Case
    kernel: str
    """Name of the kernel that was forced, or "own choice"."""
    verdict: torch.Tensor
    """A :class:`Verdict` as float64, on the case's device."""


def check(case: Case, device: str, matrices: Matrices | None = None) -> Checked:
    """Run a case, in its way, and hold it to the formulas.

    Raises:
        w4gemm.UnsupportedError: if no kernel takes it.
    """
    matrices = matrices or Matrices.of(case, device)
    r = random.Random(f"r{case.problem_seed}")
    rows = rows_of(case, r)
    operands = operands_of(case, rows, r, device)
    config = config_of(case, matrices.w, operands, max(rows.total, 1))
    d, *others = results(case, call_of(case, matrices.w, rows, operands, config), rows, operands)
    if config is None and (packed := packed_result(case, matrices.w, operands)) is not None:
        others.append(torch.where(packed.isnan() & d.isnan(), d, packed))  # bits of a NaN are any
    verdict = compared(case, d, others, expected_of(case, matrices, rows, operands), rows.owner(device)[:, None] >= 0)
    return Checked(case, "own choice" if config is None else config.partition("/")[0], verdict)


# --- the library's side ----------------------------------------------------------------------------------------------


def config_of(case: Case, w: w4gemm.QuantizedWeight, operands: Operands, m: int) -> str | None:
    """The same config for as many problems of a variant as may be; None for the library's own choice."""
    if not case.variant.forced:
        return None
    v, fp8 = case.variant, case.variant.dtype == FP8
    blocks = v.block_scale and case.k > BLOCK
    says_dtype = operands.out_dtype if v.quantized else v.out_dtype
    epilogue = w4gemm.Epilogue(
        v.activation, v.alpha, v.bias, v.residual, says_dtype, fp8 and not blocks, v.expert_scale, blocks
    )
    problem = w4gemm.GemmProblem(
        m,
        case.n,
        case.k,
        v.dtype,
        w.format,
        w.layout,
        epilogue,
        w4gemm.Device.of(w.device),
        experts=case.experts,
        gathered=v.kind == "gathered" and not blocks and _are_read_in_place(case, operands.x),
    )
    config = _preferred(problem, v.seed, v.config)
    if config is None:
        raise w4gemm.UnsupportedError(f"no config with {v.config!r} is legal for {problem}")
    return config


def _are_read_in_place(case: Case, x: torch.Tensor) -> bool:
    """True if a kernel can gather rows of x; of others a copy is made, for which other configs are legal."""
    if case.variant.quantized:  # into a tensor of its own
        return case.k % 16 == 0
    return x.stride(1) == 1 and takes_rows(x)


@functools.lru_cache(256)
def _preferred(problem: w4gemm.GemmProblem, seed: int, text: str) -> str | None:
    every = (f"{k.name}/{c}" for k in KERNELS if k.supports(problem) for c in k.configs(problem))
    legal = [config for config in every if re.search(text, config)]
    return max(legal, key=lambda config: hashlib.sha256(f"{seed}{config}".encode()).digest(), default=None)


def call_of(
    case: Case, w: w4gemm.QuantizedWeight, rows: Rows, operands: Operands, config: str | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that computes d into its argument, or over the residual that it holds."""
    v = case.variant
    fused: dict[str, Any] = {
        "bias": operands.bias,
        "alpha": operands.alpha,
        "activation": v.activation,
        "out_dtype": v.out_dtype,
        "token_scale": operands.stored_scale,
        "config": config,
    }
    if v.batch_invariant:
        fused["batch_invariant"] = True
    if v.kind == "dense":
        return lambda out: w4gemm.linear(
            operands.x, w, residual=out if over_residual(case) else operands.residual, out=out, **fused
        )
    fused |= {"expert_scale": operands.expert_scale, "residual": operands.residual}
    limits = placed(rows.limits, operands.x.device).int()
    if v.kind == "masked":

        def apart(t: torch.Tensor | None) -> torch.Tensor | None:
            return None if t is None else t.view(case.experts, -1, *t.shape[1:])

        expected = 1 + case.problem_seed % case.m if case.problem_seed % 2 else None
        fused |= {"residual": apart(operands.residual), "expected_m": expected}
        if operands.stored_scale is not None:
            fused["token_scale"] = operands.stored_scale.unflatten(0, (case.experts, -1))
        x = operands.x.view(case.experts, -1, case.k)
        return lambda out: w4gemm.masked_linear(x, w, limits, out=apart(out), **fused)
    indices = None if rows.indices is None else placed(rows.indices, operands.x.device).int()
    fused |= {"indices": indices, "settled": case.settled}
    return lambda out: w4gemm.grouped_linear(operands.x, w, limits, out=out, **fused)


def packed_result(case: Case, w: w4gemm.QuantizedWeight, operands: Operands) -> torch.Tensor | None:
    """d by the operator of compiled graphs, whose plan is the library's own choice; None where it has none."""
    v = case.variant
    if v.kind != "dense" or v.quantized or v.block_scale or v.alpha or v.residual or operands.x.stride(-1) != 1:
        return None
    epilogue = w4gemm.Epilogue(v.activation, bias=v.bias)
    if v.dtype == FP8:
        epilogue = epilogue.of_quantized(operands.out_dtype)
    elif v.out_dtype not in (None, v.dtype):  # linear, too, takes x's own dtype for none
        epilogue = epilogue._replace(out_dtype=v.out_dtype)
    product = PackedLinear(w.packed, epilogue, v.batch_invariant)
    x = operands.x.contiguous() if w.perm is None else gather_columns(operands.x, w.perm)
    return torch.ops.w4gemm.packed_linear(x, list(w.tensors), operands.bias, operands.token_scale, product.name)


def over_residual(case: Case) -> bool:
    """True if d is written over the residual."""
    return case.variant.residual and case.variant.kind == "dense" and case.problem_seed % 2 == 1


def results(
    case: Case, call: Callable[[torch.Tensor], torch.Tensor], rows: Rows, operands: Operands
) -> list[torch.Tensor]:
    """d (rows.total, columns) several times, each computed into an output full of NaN, or over the residual."""

    def fresh() -> torch.Tensor:
        if over_residual(case) and operands.residual is not None:
            return operands.residual.clone()
        return torch.full((rows.total, case.columns), torch.nan, dtype=operands.out_dtype, device=operands.x.device)

    outs = [fresh() for _ in range(3 if case.way == "streams" else 2)]
    call(outs[0])
    if case.way == "streams":
        _on_streams(call, outs[1:])
    elif case.way == "graph":
        _in_graph(call, outs[1], fresh)
    else:
        call(outs[1])
    return outs


def _on_streams(call: Callable[[torch.Tensor], torch.Tensor], outs: list[torch.Tensor]) -> None:
    """Call on streams of their own, at once."""
    current, streams = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in outs]
    for stream, out in zip(streams, outs, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            call(out)
    for stream in streams:
        current.wait_stream(stream)


def _in_graph(
    call: Callable[[torch.Tensor], torch.Tensor], out: torch.Tensor, fresh: Callable[[], torch.Tensor]
) -> None:
    """Capture the call in a graph and replay it twice."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # torch.cuda.graph would collect garbage and empty the cache each time
        graph.capture_begin(capture_error_mode="thread_local")
        call(out)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(2):
        out.copy_(fresh())
        graph.replay()
    torch.cuda.synchronize()  # the graph's memory is free when it is gone


# --- the formulas' side ----------------------------------------------------------------------------------------------


def expected_of(case: Case, matrices: Matrices, rows: Rows, operands: Operands) -> formulas.Sums:
    """d (rows.total, columns) and the error allowed; rows of no expert hold anything."""
    v, device = case.variant, operands.x.device
    x, token_scale = operands.x.double(), operands.token_scale
    if v.quantized:
        x, token_scale = formulas.token_quantized(x)
    x_scale = None
    if token_scale is not None and token_scale.dim() == 2:
        x_scale = token_scale.double().repeat_interleave(BLOCK, dim=1)[:, : case.k]
        x, token_scale = x * x_scale, None
    if rows.indices is not None:
        taken = placed(rows.indices, device)
        x, token_scale, x_scale = x[taken], _rows_of(token_scale, taken), _rows_of(x_scale, taken)
    value = torch.zeros(rows.total, case.n, dtype=torch.float64, device=device)
    error = torch.zeros_like(value)
    for exact, (first, last) in zip(matrices.exact, rows.spans, strict=True):
        if first < last:
            value[first:last], error[first:last] = formulas.product(
                x[first:last],
                exact,
                name_of(v.dtype),
                w_may_be_rounded=v.dtype != FP8,
                columns_at_a_time=columns_at_a_time(case),
                x_scale=None if x_scale is None else x_scale[first:last],
            )
    owner = rows.owner(device).clamp(min=0)
    bias = None if operands.bias is None else operands.bias[owner] if case.experts else operands.bias
    expert_scale = None if operands.expert_scale is None else operands.expert_scale[owner]
    return formulas.epilogue(
        formulas.Sums(value, error),
        name_of(operands.out_dtype),
        alpha=operands.alpha_number,
        scales=(token_scale, expert_scale),
        bias=bias,
        activation=v.activation,
        residual=operands.residual,
    )


def _rows_of(scales: torch.Tensor | None, taken: torch.Tensor) -> torch.Tensor | None:
    return None if scales is None else scales[taken]


def columns_at_a_time(case: Case) -> int:
    """Columns whose products with fp8 x a tensor core adds up before a kernel adds the sum to float32 ones: all of them
    where scales are in the weights."""
    v = case.variant
    return case.k if v.format.endswith(("e4m3", "e8m0")) and not v.block_scale else BLOCK


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Verdict(NamedTuple):
    """The faults of a result: numbers of elements, and the one that is most wrong."""

    other_bits: float
    """Bytes that differ in another call."""
    lost: float
    """Numbers where a NaN or an infinity of x must show."""
    written: float
    """Numbers in rows that no expert has."""
    off: float
    total: float
    index: float
    d: float
    value: float
    error: float

    def __str__(self) -> str:
        """The faults in words; empty if there are none."""
        faults = []
        if self.off:
            faults.append(
                f"{self.off:.0f} of {self.total:.0f} are off, the worst is number {self.index:.0f}: {self.d:.9g} for "
                f"{self.value:.9g}, allowed {self.error:.3g}"
            )
        if self.other_bits:
            faults.append(f"another call gave other bits in {self.other_bits:.0f} bytes")
        if self.lost:
            faults.append(f"{self.lost:.0f} numbers where a NaN or an infinity of x must show")
        if self.written:
            faults.append(f"{self.written:.0f} numbers written in rows that no expert has")
        return "; ".join(faults)


def compared(
    case: Case, d: torch.Tensor, others: list[torch.Tensor], expected: formulas.Sums, covered: torch.Tensor
) -> torch.Tensor:
    """A :class:`Verdict` as float64 (9). covered: bool (rows, 1), rows that an expert has. Does not synchronize."""
    number = formulas.TYPES[name_of(d.dtype)]
    bits = d.view(torch.uint8)
    other_bits = sum((bits != other.view(torch.uint8)).sum() for other in others)
    d, (value, error) = d.double(), expected
    lost = covered & (value.isnan() & ~d.isnan() | value.isinf() & d.isfinite())
    if case.bad == "inf" and case.variant.activation is not None:
        lost = torch.zeros_like(lost)  # what an activation makes of an infinity is its own affair
    good = covered & value.isfinite() & error.isfinite()  # relu of an infinity may be a NaN
    if case.numbers == "exact" and case.variant.activation in (None, "relu") and not case.variant.quantized:
        error = torch.zeros_like(error)
        off = good & (d != formulas.rounded(value, number))
    else:  # what may round to infinity may be infinite
        off = good & ~((d - value).abs() <= error) & (value.abs() + error < number.largest)
    excess = torch.where(off, ((d - value).abs() / error).nan_to_num(torch.inf), -1.0).flatten()
    worst = excess.argmax()
    counts = [t.sum() for t in (lost, ~covered & ~d.isnan(), off)]
    one = [t.take(worst) for t in (d, value, error)]  # an index would synchronize
    total = torch.full((), d.numel(), device=d.device)
    return torch.stack([t.double() for t in (torch.as_tensor(other_bits), *counts, total, worst, *one)])


def verdicts(sums: list[torch.Tensor]) -> list[Verdict]:
    """Return the verdicts of several problems, with one synchronization."""
    return [Verdict(*row) for row in torch.stack(sums).tolist()] if sums else []
