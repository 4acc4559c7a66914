"""Measure the quantization of activations: ``python -m bench.activations --tokens 1,16 --k 4096,8192``.

For every m, k and front (nothing, RMSNorm, silu_mul), each timed in a CUDA graph over copies of x:

- ``w4gemm``: ``quantize_activations``; ``w4gemm_config``: its kernel with other numbers of chunks per thread;
- ``inductor``: PyTorch's operators, compiled for any number of tokens, as an engine compiles a model;
- ``inductor_w4gemm``: the front compiled likewise, then ``quantize_activations`` without a front;
- ``torch``: PyTorch's operators.

Copies of a short x fit L2, like data that the kernel before has just written. Rows go to
bench/results/activations.jsonl.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.options import add_out, command, counts, typed
from bench.run import percentiles

import w4gemm
from w4gemm.api.activations import LARGEST, in_pytorch
from w4gemm.core.problem import Device
from w4gemm.jit import compiled
from w4gemm.kernels.activation_quantize.spec import FRONTS, ActivationQuantize
from w4gemm.tuning import record
from w4gemm.tuning.roofline import RATES
from w4gemm.tuning.timing import time_graphs

RESULTS = Path(__file__).parent / "results/activations.jsonl"
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
    parser.add_argument("--compiled", action="store_true", help="also time what torch.compile makes")
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    facts = record.facts()
    for m, k, front in itertools.product(args.tokens, args.k, FRONTS):
        common = {"kind": "time", "run": record.run_name(facts), "work": "quantize_activations", "m": m, "k": k}
        common |= {"front": front, "dtype": "bfloat16"}
        rows = measure(m, k, front, args.chunks, args.compiled)
        record.append(args.out, *(common | row | facts for row in rows))
        moved = m * k * (2 * (2 if front == "silu_mul" else 1) + 1) + 4 * m
        least = moved / RATES["NVIDIA H200"].bytes
        times = ", ".join(f"{row['impl']} {row['config']} {row['us_p50']}" for row in rows)
        print(f"m {m}, k {k}, {front or 'plain'}: bytes {least:.1f} us; {times}", flush=True)


def measure(m: int, k: int, front: str, chunks: Sequence[int], with_compiled: bool) -> list[dict[str, Any]]:
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
    if with_compiled:
        torch.compiler.reset()  # else another k would be taken for a size that varies
        functions = {"inductor": by_operators} | ({"inductor_w4gemm": by_both} if front else {})
        runs += [(name, None, for_any_rows(function, xs[0], weight, gated)) for name, function in functions.items()]
    runs.append(("torch", None, lambda x: in_pytorch(x, weight, 1e-6, gated)))
    graphs = [[lambda run=run, x=x: run(x) for x in xs] for *_, run in runs]
    rows = []
    for (name, kernel, _), t in zip(runs, time_graphs(graphs, replays=9 if m <= 256 else 5), strict=True):
        config = "{}x{}".format(*kernel.shape) if kernel else ""
        rows.append({"impl": name, "config": config} | percentiles(t))
    return rows


def front_of(x: torch.Tensor, weight: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """Return x behind its front, by the operators of an engine's layers."""
    if gated:
        half = x.shape[1] // 2
        return torch.nn.functional.silu(x[:, :half]) * x[:, half:]
    return x if weight is None else torch.nn.functional.rms_norm(x, (x.shape[1],), weight, 1e-6)


def by_operators(x: torch.Tensor, weight: torch.Tensor | None, gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's formula for one scale per token (QuantFP8.forward_native)."""
    y = front_of(x, weight, gated).float()
    scale = (y.abs().amax(1, keepdim=True) / LARGEST).clamp(min=1 / (512 * LARGEST))
    return (y * scale.reciprocal()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def by_both(x: torch.Tensor, weight: torch.Tensor | None, gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return w4gemm.quantize_activations(front_of(x, weight, gated))


def for_any_rows(
    function: Callable[..., object], x: torch.Tensor, weight: torch.Tensor | None, gated: bool
) -> Callable[[torch.Tensor], object]:
    """Return ``function`` compiled for any number of rows; by itself torch.compile would make a kernel for 1 row."""
    compiled_function = torch.compile(function, fullgraph=True)

    def run(x: torch.Tensor) -> object:
        torch._dynamo.decorators.mark_unbacked(x, 0)
        return compiled_function(x, weight, gated)

    run(x)
    return run


def quantizer(k: int, front: str, chunks: int = 4) -> ActivationQuantize | None:
    return ActivationQuantize.of(Device.of("cuda"), torch.bfloat16, k, front, True, chunks)


def launch(kernel: ActivationQuantize, m: int, k: int, weight: torch.Tensor | None) -> Callable[[torch.Tensor], object]:
    function = compiled(kernel.unit())
    x8 = torch.empty((m, k), dtype=torch.uint8, device="cuda")
    scale = torch.empty(m, device="cuda")
    return lambda x: function(x, None, weight, x8, scale, None, 1e-6)


if __name__ == "__main__":
    main()
