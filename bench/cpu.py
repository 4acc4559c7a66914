"""The CPU kernel beside PyTorch's: ``python -m bench.cpu``.

Each point is a layer, a dtype of x and m tokens: the config that is chosen, the methods of the kernel (``--methods``),
torch.nn.functional.linear with the weight in x's dtype, and PyTorch's ``_weight_int4pack_mm_for_cpu`` for bf16 x where
it holds the format exactly. Every result is compared with float64. Calls rotate over copies of the weight, where these
exceed the caches. Times are the least of many, of the processor time of one thread, which other programs disturb less
than the clock. Rows go to bench/results/cpu.jsonl; ``--report`` writes the tables of docs/cpu.md.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench import markdown
from bench.options import add_formats, add_out, add_shapes, command, typed
from bench.rows import Row, read
from bench.shapes import parse_tokens

from w4gemm import QuantizedWeight, WeightFormat, choice, linear, quantize
from w4gemm.choice.table import device_facts
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.kernels.cpu.spec import METHODS, CpuMixedGemm
from w4gemm.kernels.cpu.tile_product import has_pairs
from w4gemm.packing.layouts import layout_named
from w4gemm.tuning import record

RESULTS = Path(__file__).parent / "results/cpu.jsonl"
PAGE = Path(__file__).parents[1] / "docs/cpu.md"
DTYPES = (torch.float32, torch.bfloat16)
_SHOWN = (1, 4, 16, 64, 256)
"""Numbers of tokens of the page's tables."""
_NOT_SHOWN = ((576, 576), (576, 1536), (256, 640), (1024, 640), (2048, 640), (640, 2048), (1024, 4096))
"""Layers (n, k) whose times lie between those of others."""
_ROTATED_BYTES = 200e6
_MOST_COPIES = 8
_SUM_TOKENS = 4
"""Largest m for which the method "sum" is timed."""
_TURNS = 4
_CALLS = 100
_LEAST_CALLS = 2
"""Calls of a turn, at most and at least."""
_SECONDS = 0.06
"""Time of a point's calls, in all turns."""
_MOST_ERROR = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
"""Relative errors: of sums in float32, and of results rounded to bf16."""

Calls = Sequence[Callable[[], torch.Tensor]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.cpu", __doc__)
    add_shapes(parser, "4096x4096")
    parser.add_argument(
        "--m", type=typed(parse_tokens), default="1,16,256", help="as of bench.run (default: %(default)s)"
    )
    add_formats(parser)
    parser.add_argument("--methods", action="store_true", help="time each method, not only the one that is chosen")
    parser.add_argument("--report", action="store_true", help="write the page's tables from the rows, and time nothing")
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    if args.report:
        PAGE.write_text(with_tables(PAGE.read_text(), read(args.out)))
        return
    torch.set_num_threads(1)
    processor, threads = device_facts(Device("cpu"))
    facts = record.facts() | {"processor": processor, "threads": threads, "instructions": instructions()}
    print(f"{processor}, {facts['instructions']}; microseconds of a call")
    for n, k in args.shapes:
        for format in args.format:
            for row in points(n, k, format, args.m, args.methods):
                record.append(args.out, {"kind": "cpu", "run": record.run_name(facts)} | row | facts)
                times = ", ".join(
                    f"{name.removesuffix('_us')} {us:.0f}" for name, us in row.items() if name.endswith("us")
                )
                print(f"{n}x{k} {format}, m {row['m']}, {row['dtype']}: {times}", flush=True)


def instructions() -> str:
    """Return the widest vectors that PyTorch uses here, and what the processor has for bf16."""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    of_bf16 = ", AMX" if has_amx else ", AVX512_BF16" * has_pairs()
    return torch.backends.cpu.get_cpu_capability() + of_bf16


def points(n: int, k: int, format: WeightFormat, tokens: Sequence[int], methods: bool) -> Iterator[Row]:
    """Yield a row of times for each dtype and number of tokens."""
    weight = quantize(torch.randn(n, k) * 0.02, format)
    numbers = weight.dequantize(torch.float32)
    packed = weight.repack()
    copies = [replace(packed, tensors=tuple(t.clone() for t in packed.tensors)) for _ in _copies(packed.nbytes)]
    for dtype in DTYPES:
        plains = [numbers.to(dtype).clone() for _ in _copies(n * k * dtype.itemsize)]
        int4pack = [_int4pack(weight) for _ in _copies(packed.nbytes)] if _has_int4pack(format, dtype, k) else []
        for m in tokens:
            x = torch.randn(m, k).to(dtype)
            exact = x.double() @ numbers.double().T
            variants: dict[str, Calls] = {
                "us": [functools.partial(linear, x, w) for w in copies],
                "dense_us": [functools.partial(torch.nn.functional.linear, x, w) for w in plains],
            }
            if int4pack:
                product = torch.ops.aten._weight_int4pack_mm_for_cpu
                variants["int4pack_us"] = [functools.partial(product, x, *operands) for operands in int4pack]
            for name, config in (
                _methods(GemmProblem(m, n, k, dtype, format, "cpu", device=Device("cpu"))) if methods else ()
            ):
                variants[f"{name}_us"] = [functools.partial(linear, x, w, config=config) for w in copies]
            plan = choice.plan_for(choice.PlanKey.of(packed.packed, m, dtype, packed.device))
            row: Row = {"m": m, "n": n, "k": k, "format": str(format), "dtype": str(dtype).removeprefix("torch.")}
            row |= {"config": str(plan), "clock": "processor"}
            yield row | {name: round(us, 1) for name, us in least_us(variants, exact, dtype).items()}


def _methods(problem: GemmProblem) -> Iterator[tuple[str, str]]:
    """Yield the methods that are timed, and the config of each."""
    for config in CpuMixedGemm().configs(problem):
        name = METHODS[config.tile_m][0] if config.tile_m in METHODS else "dequantized"
        if name != "sum" or problem.m <= _SUM_TOKENS:
            yield name, f"{CpuMixedGemm.name}/{config}"


def _has_int4pack(format: WeightFormat, dtype: torch.dtype, k: int) -> bool:
    plain = format.element == "int4" and format.zero == "none" and format.scale_dtype == torch.bfloat16
    return plain and dtype == torch.bfloat16 and format.group_size in (32, 64, 128, 256) and k % format.group_size == 0


def _int4pack(weight: QuantizedWeight) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Return a symmetric weight as PyTorch's operator takes it: codes, group, and scales with zero points of 0."""
    parts = layout_named("canonical").unpack(weight.tensors, weight.format, weight.n, weight.k)
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(parts.codes.int(), 8)
    scales = parts.scales.T
    return codes, weight.format.group_size, torch.stack((scales, torch.zeros_like(scales)), -1).contiguous()


def least_us(variants: dict[str, Calls], exact: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Return the least processor time of each variant's calls, which do equal work. Variants take turns, so that a
    clock that drops for a while slows all of them down.

    Raises:
        RuntimeError: if a result is wrong.
    """
    for calls in variants.values():
        error = (calls[0]().double() - exact).norm() / exact.norm()
        if not error < _MOST_ERROR[dtype]:
            raise RuntimeError(f"a result of {tuple(exact.shape)} in {dtype} is off by {error:.2g}")
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(1, _TURNS + 1):
        for name, calls in variants.items():
            _time(calls, times[name], turn)
    return {name: min(of_calls) for name, of_calls in times.items()}


def _time(calls: Calls, times: list[float], turn: int) -> None:
    """Append the microseconds of a turn's calls."""
    end = time.process_time() + _SECONDS / _TURNS
    while len(times) < turn * _LEAST_CALLS or (len(times) < turn * _CALLS and time.process_time() < end):
        started = time.process_time()
        calls[len(times) % len(calls)]()
        times.append(1e6 * (time.process_time() - started))


def _copies(size: int) -> range:
    return range(max(2, min(_MOST_COPIES, int(_ROTATED_BYTES // size))))


def with_tables(page: str, rows: list[Row]) -> str:
    """Return the page with a table for each processor: w4gemm's time of a call in the newest rows, and PyTorch's as
    multiples of it."""
    newest: dict[tuple[str, str], dict[tuple[Any, ...], dict[int, Row]]] = {}
    for row in rows:
        if "instructions" in row and row["m"] in _SHOWN and (row["n"], row["k"]) not in _NOT_SHOWN:
            layers = newest.setdefault((row["processor"], row["instructions"]), {})
            layers.setdefault((row["n"], row["k"], row["format"], row["dtype"]), {})[row["m"]] = row
    lines: list[str] = []
    for (processor, kind), layers in newest.items():
        dates = sorted({row["utc"][:10] for points_of in layers.values() for row in points_of.values()})
        lines += [f"{processor} ({kind}), {' and '.join(dates)}:", ""]
        ordered = sorted(layers.items(), key=lambda item: (*item[0][:3], item[0][3] != "float32"))
        cells = (
            (f"{n} x {k}, {format}, {dtype}", *(_cell(points_of[m]) if m in points_of else "-" for m in _SHOWN))
            for (n, k, format, dtype), points_of in ordered
        )
        lines += [*markdown.table(("tokens", *_SHOWN), cells, right=True), ""]
    return markdown.with_parts(page, "bench.cpu", lambda name: lines[:-1])


def _cell(row: Row) -> str:
    others = [f"{row[name] / row['us']:.2f}" for name in ("dense_us", "int4pack_us") if name in row]
    return f"{row['us']:,.0f} ({', '.join(others)})"


if __name__ == "__main__":
    main()
