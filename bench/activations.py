"""Measure the quantization of activations: ``python -m bench.activations --tokens 1,16 --k 4096,8192``.

For every m, k and front (nothing, RMSNorm, silu_mul): ``quantize_activations``, the kernel with other numbers of chunks
per thread, and PyTorch's operators. Each is timed in a CUDA graph over copies of x. Copies of a short x fit L2, like
data that the kernel before has just written. Rows go to bench/results/activations.jsonl.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.options import command, counts, typed
from bench.run import percentiles

import w4gemm
from w4gemm.api.activations import in_pytorch
from w4gemm.core.problem import Device
from w4gemm.jit import compiled
from w4gemm.kernels.activation_quantize.spec import ActivationQuantize
from w4gemm.tuning import record
from w4gemm.tuning.roofline import RATES
from w4gemm.tuning.timing import time_graphs

RESULTS = Path(__file__).parent / "results/activations.jsonl"
FRONTS = ("", "rms", "silu_mul")
_ROTATED_BYTES = 120e6


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.activations", __doc__)
    parser.add_argument(
        "--tokens", type=typed(counts), default="1,16,256,4096", help="rows of x (default: %(default)s)"
    )
    parser.add_argument(
        "--k", type=typed(counts), default="4096,8192,28672", help="columns of x (default: %(default)s)"
    )
    parser.add_argument(
        "--chunks",
        type=typed(counts),
        default="2,8",
        help="also try so many chunks of eight columns per thread (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the rows (default: %(default)s)")
    args = parser.parse_args(argv)
    facts = record.facts()
    for m, k, front in itertools.product(args.tokens, args.k, FRONTS):
        common = {"kind": "time", "run": record.run_name(facts), "work": "quantize_activations", "m": m, "k": k}
        common |= {"front": front, "dtype": "bfloat16"}
        rows = measure(m, k, front, args.chunks)
        record.append(args.out, *(common | row | facts for row in rows))
        moved = m * k * (2 * (2 if front == "silu_mul" else 1) + 1) + 4 * m
        least = moved / RATES["NVIDIA H200"].bytes
        times = ", ".join(f"{row['impl']} {row['config']} {row['us_p50']}" for row in rows)
        print(f"m {m}, k {k}, {front or 'plain'}: bytes {least:.1f} us; {times}", flush=True)


def measure(m: int, k: int, front: str, chunks: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each implementation."""
    columns = 2 * k if front == "silu_mul" else k
    copies = max(2, min(64, math.ceil(_ROTATED_BYTES / (m * columns * 2))))
    xs = [torch.randn(m, columns, device="cuda").bfloat16() for _ in range(copies)]
    weight = torch.randn(k, device="cuda").bfloat16() if front == "rms" else None
    gated = front == "silu_mul"
    default = quantizer(k, front)
    runs = [("w4gemm", default, lambda x: w4gemm.quantize_activations(x, norm_weight=weight, silu_mul=gated))]
    for count in chunks:
        kernel = quantizer(k, front, count)
        if kernel is not None and kernel != default:
            runs.append(("w4gemm_config", kernel, launch(kernel, m, k, weight)))
    runs.append(("torch", None, lambda x: in_pytorch(x, weight, 1e-6, gated)))
    graphs = [[lambda run=run, x=x: run(x) for x in xs] for *_, run in runs]
    rows = []
    for (name, kernel, _), t in zip(runs, time_graphs(graphs, replays=9 if m <= 256 else 5), strict=True):
        config = "{}x{}".format(*kernel.shape) if kernel else ""
        rows.append({"impl": name, "config": config} | percentiles(t))
    return rows


def quantizer(k: int, front: str, chunks: int = 4) -> ActivationQuantize | None:
    return ActivationQuantize.of(Device.of("cuda"), torch.bfloat16, k, front, True, chunks)


def launch(kernel: ActivationQuantize, m: int, k: int, weight: torch.Tensor | None) -> Callable[[torch.Tensor], object]:
    function = compiled(kernel.unit())
    x8 = torch.empty((m, k), dtype=torch.uint8, device="cuda")
    scale = torch.empty(m, device="cuda")
    return lambda x: function(x, weight, x8, scale, 1e-6)


if __name__ == "__main__":
    main()
