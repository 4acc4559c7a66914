"""Measure mixtures of experts: ``python -m bench.grouped --shapes 8x28672x4096 --tokens 1,16 --routing balanced,zipf``.

The protocol is that of bench/run.py, for weights of several experts (experts x n x k). ``m`` of a row is the average
number of tokens per expert. Peers, if installed: Humming's grouped kernel (in W4A8 it takes bf16 x and quantizes it
within the call), and with ``--dtype float8_e4m3fn --format int4_g128,int4_g128_e4m3`` also vLLM's CUTLASS kernel. Rows
go to bench/results/grouped.jsonl.

With ``--top-k K`` each row of x is multiplied by K experts. ``w4gemm``: rows already in order of experts.
``w4gemm_gathered``: rows that the kernel reads through indices. ``w4gemm_copied``: rows that PyTorch copies first.
``w4gemm_indexed``: whichever of the last two is chosen.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench.options import command, counts, formats, typed
from bench.peers import vllm_ops
from bench.peers.base import FP8, gptq_words, missing_package, package_version, token_scales
from bench.peers.experts import Run, cutlass_grouped, humming_grouped
from bench.run import MAX_ERROR, MAX_QUANTIZED_ERROR, percentiles, random_weight
from bench.shapes import divide, parse_experts, parse_routings

import w4gemm
from w4gemm import QuantizedWeight, WeightFormat, choice
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.jit import object_code
from w4gemm.kernels import kernel_named
from w4gemm.kernels.base import selected
from w4gemm.packing.layouts import layout_for
from w4gemm.tuning import record
from w4gemm.tuning.timing import time_graphs

RESULTS = Path(__file__).parent / "results/grouped.jsonl"
TOKENS = "1,4,16,32,64,128,512,1024"
_ROTATED_BYTES = 400e6
_DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": FP8}

Prepared = tuple[list[QuantizedWeight], dict[str, Run]]
"""Copies of a weight to rotate over, and each peer's way to multiply by its own copies."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.grouped", __doc__)
    parser.add_argument(
        "--shapes",
        type=typed(parse_experts),
        default="moe",
        help="sizes like 8x28672x4096 (experts x n x k), or moe: six layers of three models (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens", type=typed(counts), default=TOKENS, help="per expert, on average (default: %(default)s)"
    )
    parser.add_argument(
        "--routing",
        type=typed(parse_routings),
        default="balanced",
        help="how tokens are divided among experts: some of balanced, zipf, hot (default: %(default)s)",
    )
    parser.add_argument(
        "--format", type=typed(formats), default="int4_g128", help="of the weights, one or more (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=_DTYPES, help="of the activations (default: %(default)s)"
    )
    parser.add_argument(
        "--top-k",
        metavar="K",
        type=int,
        default=0,
        help="experts of each row of x, read through indices, without peers (default: one)",
    )
    parser.add_argument(
        "--configs", metavar="N", type=int, default=0, help="also time the N best-ranked configs (default: none)"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further point after so long")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the rows (default: %(default)s)")
    args = parser.parse_args(argv)
    facts, started = record.facts(), time.monotonic()
    dtype = _DTYPES[args.dtype]
    if args.configs or args.top_k:
        for format in args.format:
            compile_ahead(args.shapes, args.tokens, format, dtype, args.configs, args.top_k > 0)
    for experts, n, k in args.shapes:
        prepared = [prepare(experts, n, k, format, dtype, with_peers=not args.top_k) for format in args.format]
        for m, routing in itertools.product(args.tokens, args.routing):
            if time.monotonic() - started > args.seconds:
                return
            rows = measure(prepared, m, routing, dtype, args.configs, args.top_k)
            work = "w4a8_grouped" if dtype == FP8 else "w4a16_grouped"
            common = {"kind": "time", "run": record.run_name(facts), "work": work, "m": m, "n": n, "k": k}
            common |= {"experts": experts, "routing": routing, "dtype": args.dtype}
            record.append(args.out, *(common | row | facts for row in rows))
            print(line(f"{experts}x{n}x{k}", m, routing, rows), flush=True)
        del prepared
        torch.cuda.empty_cache()


def prepare(experts: int, n: int, k: int, format: WeightFormat, dtype: torch.dtype, with_peers: bool) -> Prepared:
    words, scales, signed_words, e4m3_scales, channels = [], [], [], [], []

    def each() -> Iterator[QuantizedWeight]:
        one = random_weight(n, k, format, [dtype])
        for e in range(experts):
            codes, s, zeros, c, *_ = one.parts()
            codes = codes.roll(e, 0)
            if humming:
                words.append(gptq_words(codes))
                scales.append(s if c is None else s.float() * c[:, None])
            if cutlass:
                signed_words.append(gptq_words((codes.int() - 8) & 0xF))
                e4m3_scales.append(s.t().contiguous())
                channels.append(c)
            yield QuantizedWeight.from_codes(format, codes, s, zeros, channels=c)

    humming = with_peers and not missing_package("humming-kernels", "humming") and not format.has_zero
    cutlass = (
        with_peers and format.has_channels and format.group_size == 128 and not vllm_ops.missing("cutlass_w4a8_moe_mm")
    )
    layout = layout_for(Device.of("cuda"), format, dtype)
    w = QuantizedWeight.stack(each(), experts, layout)
    count = max(2, math.ceil(_ROTATED_BYTES / w.nbytes))
    copies = [w, *(replace(w, tensors=tuple(t.clone() for t in w.tensors)) for _ in range(count - 1))]
    peers: dict[str, Run] = {}
    if humming:
        try:
            given = torch.stack(words), torch.stack(scales).bfloat16()
            peers["humming"] = humming_grouped(*given, format.group_size, n, k, count, quantizes=dtype == FP8)
        except Exception as e:  # a peer's failure is a result, not the end of the run
            print(f"  humming: {e!r:.300}", flush=True)
    if cutlass:
        try:
            of_channels = torch.stack([c for c in channels if c is not None])
            given = torch.stack(signed_words), torch.stack(e4m3_scales)
            peers["cutlass_w4a8"] = cutlass_grouped(*given, of_channels, n, k, count)
        except Exception as e:
            print(f"  cutlass_w4a8: {e!r:.300}", flush=True)
    return copies, peers


def measure(
    prepared: list[Prepared], m: int, routing: str, dtype: torch.dtype, configs: int, top_k: int
) -> list[dict[str, Any]]:
    """Return a row for each implementation and format whose output is right, and for each config asked for."""
    counts = divide(routing, m, prepared[0][0][0].experts)
    rows: list[dict[str, Any]] = []
    graphs: list[list[Callable[[], object]]] = []
    for weights, peers in prepared:
        for row, calls in candidates(weights, peers, counts, dtype, configs, top_k):
            rows.append(row)
            graphs.append(calls)
    for row, t in zip(rows, time_graphs(graphs, replays=9 if m <= 128 else 5), strict=True):
        row |= percentiles(t)
    return rows


def candidates(
    weights: list[QuantizedWeight],
    peers: dict[str, Run],
    counts: list[int],
    dtype: torch.dtype,
    configs: int,
    top_k: int,
) -> Iterator[tuple[dict[str, Any], list[Callable[[], object]]]]:
    """Yield, for each implementation of one format, a row without times and the calls to time."""
    w = weights[0]
    offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cuda")
    total = sum(counts)
    xs = [torch.randn(total, w.k, device="cuda").to(dtype) for _ in range(2)]
    wide = [x.bfloat16() for x in xs]
    scaled = token_scales()[:total] if dtype == FP8 else None
    tokens = total // top_k if top_k else total
    of_some = None if scaled is None else scaled[:tokens]
    some = [x[:tokens] for x in xs]  # the rows that indices select from
    indices = torch.cat([r.sort().values for r in (torch.randperm(total, device="cuda") % tokens).split(counts)]).int()
    if top_k:
        xs = [selected(x, 0, indices) for x in some]
    out = torch.empty(total, w.n, device="cuda", dtype=torch.bfloat16)

    def ours(config: str | None) -> Run:
        return lambda i, x, o, d: w4gemm.grouped_linear(
            x, weights[i % len(weights)], o, token_scale=scaled, out=d, config=config
        )

    def gathered(config: str | None) -> Run:
        return lambda i, x, o, d: w4gemm.grouped_linear(
            x, weights[i % len(weights)], o, indices=indices, token_scale=of_some, out=d, config=config
        )

    def copied(i: int, x: torch.Tensor, o: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        scale = None if of_some is None else of_some.index_select(0, indices)
        return w4gemm.grouped_linear(selected(x, 0, indices), weights[i % len(weights)], o, token_scale=scale, out=d)

    plan = str(choice.plan_for(call_of(w, total, dtype)))
    runs: list[tuple[str, str, str, Run]] = [("w4gemm", w4gemm.__version__, plan, ours(None))]
    versions = {"humming": package_version("humming-kernels"), "cutlass_w4a8": vllm_ops.version()}
    runs += [(name, versions[name], "", run) for name, run in peers.items()]
    if top_k:
        (on_load,) = best(w, total, dtype, 1, True)
        chosen = str(choice.plan_for(call_of(w, total, dtype, gathered=True)))
        runs.append(("w4gemm_gathered", w4gemm.__version__, on_load, gathered(on_load)))
        runs.append(("w4gemm_indexed", w4gemm.__version__, chosen, gathered(None)))
        runs.append(("w4gemm_copied", w4gemm.__version__, plan, copied))
    tried = best(w, total, dtype, configs, top_k > 0)
    runs += [("w4gemm_config", w4gemm.__version__, c, (gathered if top_k else ours)(c)) for c in tried]
    for name, version, config, run in runs:
        layout, inputs = (offsets.long() if name in peers else offsets), (wide if name == "humming" else xs)
        if top_k and name != "w4gemm":
            inputs = some
        try:
            error = error_of(run(0, inputs[0], layout, out.fill_(torch.nan)), xs[0], w, counts)
        except Exception as e:
            print(f"  {name} {config}: {e!r:.200}", flush=True)
            continue
        if not error < (MAX_QUANTIZED_ERROR if inputs is wide and dtype == FP8 else MAX_ERROR):
            print(f"  {name} {config}, {total} rows: relative error {error:.3g}, not timed", flush=True)
            continue
        calls = range(max(2, len(weights)))
        row = {"impl": name, "impl_version": version, "config": config, "rel_error": round(error, 6)}
        row["format"] = str(w.format)
        yield row, [lambda r=run, i=i, o=layout, xs=inputs: r(i, xs[i % 2], o, out) for i in calls]  # type: ignore[misc]


def error_of(d: torch.Tensor, x: torch.Tensor, w: QuantizedWeight, counts: list[int]) -> float:
    """Relative error of d over the first, the last and the most used expert; infinite if d has a NaN."""
    ends = list(itertools.accumulate(counts, initial=0))
    looked = {0, w.experts - 1, max(range(w.experts), key=counts.__getitem__)}
    worst = float(d.isnan().any()) * torch.inf if d.isnan().any() else 0.0
    for e in looked:
        r = slice(ends[e], ends[e + 1])
        if counts[e]:
            wanted = x[r].float() @ w.expert(e).dequantize().T
            worst = max(worst, ((d[r].float() - wanted).norm() / wanted.norm()).item())
    return worst


def call_of(w: QuantizedWeight, total: int, dtype: torch.dtype, gathered: bool = False) -> choice.PlanKey:
    return choice.PlanKey.of(w, total, dtype, Epilogue(token_scale=dtype == FP8), gathered=gathered)


def best(w: QuantizedWeight, total: int, dtype: torch.dtype, count: int, gathered: bool) -> list[str]:
    """Return the ``count`` best-ranked configs, at most three per kernel and tile_m."""
    epilogue, device = Epilogue(token_scale=dtype == FP8), Device.of(w.device)
    shape = (total, w.n, w.k, dtype, w.format, w.layout)
    problem = GemmProblem(*shape, epilogue, device, experts=w.experts, gathered=gathered)
    return best_of(problem, count)


def best_of(problem: GemmProblem, count: int) -> list[str]:
    found: list[str] = []
    seen: dict[tuple[str, int], int] = {}
    for name in choice.configs(problem):
        kernel, _, config = name.partition("/")
        key = kernel, GemmConfig.parse(config).tile_m
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= 3 and len(found) < count:
            found.append(name)
    return found


def compile_ahead(
    shapes: Sequence[tuple[int, int, int]],
    tokens: Sequence[int],
    format: WeightFormat,
    dtype: torch.dtype,
    count: int,
    gathered: bool,
) -> None:
    """Compile on all cores, because one process compiles one kernel at a time."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    jobs: dict[tuple[str, bool], GemmProblem] = {}
    for (experts, n, k), m in itertools.product(shapes, tokens):
        layout, epilogue = layout_for(H200, format, dtype), Epilogue(token_scale=dtype == FP8)
        problem = GemmProblem(m * experts, n, k, dtype, format, layout, epilogue, experts=experts)
        for p in (problem, replace(problem, gathered=True)) if gathered else (problem,):
            found = best_of(p, max(1, count if p.gathered == gathered else 1))
            jobs |= {(name, p.gathered): p for name in found}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, jobs.items()))


def _compile(job: tuple[tuple[str, bool], GemmProblem]) -> None:
    name, _, config = job[0][0].partition("/")
    unit = kernel_named(name).unit(job[1], GemmConfig.parse(config))
    assert unit is not None
    object_code(unit)


def line(shape: str, m: int, routing: str, rows: list[dict[str, Any]]) -> str:
    times = {(row["impl"], row["format"]): row for row in rows if row["impl"] != "w4gemm_config"}
    tried = sorted((row["us_p50"], row["config"]) for row in rows if row["impl"] == "w4gemm_config")
    ours = [row["us_p50"] for (name, _), row in times.items() if name.startswith("w4gemm")]
    others = [(row["us_p50"], name) for (name, _), row in times.items() if not name.startswith("w4gemm")]
    ratio = f" {min(others)[1]} / w4gemm {min(others)[0] / min(ours):.2f};" if ours and others else ""
    each = ", ".join(
        f"{name} {format} {row['us_p50']} {row['config']}".strip() for (name, format), row in times.items()
    )
    text = f"{shape}, {m} tokens, {routing}:{ratio} {each}"
    return text + "".join(f"\n    {t:.1f} {c}" for t, c in tried[:4])


if __name__ == "__main__":
    main()
