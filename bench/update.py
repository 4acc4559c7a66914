"""Measure :func:`w4gemm.update_` on the layers of a model: ``python -m bench.update``. It needs a Hopper GPU.

Each layer's bits are held against those of ``quantize``. A time is of a call with its check of the numbers, which waits
for the GPU: the mean of ``--calls`` calls. Rows go to bench/results/update.jsonl, one a layer and format; each format
ends with a line of the time of all layers of the model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from bench.options import add_formats, add_out, command

from w4gemm import QuantizedWeight, WeightFormat, quantize, update_
from w4gemm.tuning import record

RESULTS = Path(__file__).parent / "results/update.jsonl"
MODELS = {
    "llama-3-8b": (32, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))),
    "qwen3-30b-a3b": (48, ((5120, 2048), (2048, 4096), (128, 1536, 2048), (128, 2048, 768))),
}
"""Blocks, and shapes of a block's weights: (n, k), of experts (experts, n, k)."""
FORMATS = "int4_g128,int4_g32,int4_g128_zint,mxfp4,nvfp4,int8_g128,int8_col,e4m3_col_fp32,e4m3_g128_b128,mxfp8"


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.update", __doc__)
    add_formats(parser)
    parser.set_defaults(format=FORMATS)
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b", help="whose layers (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=32, help="of each layer (default: %(default)s)")
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    facts, (blocks, layers) = record.facts(), MODELS[args.model]
    same = {"kind": "update", "run": record.run_name(facts), "dtype": "bfloat16", "calls": args.calls}
    for format in args.format:
        total, all_equal = 0.0, True
        for shape in layers:
            dense = (torch.randn(shape, device="cuda") / 50).bfloat16()
            made, w = (packed(numbers, format) for numbers in (dense, torch.zeros_like(dense)))
            update_(w, dense)
            equal = all(torch.equal(a, b) for a, b in zip(w.tensors, made.tensors, strict=True))
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(args.calls):
                update_(w, dense)
            us = 1e6 * (time.perf_counter() - start) / args.calls
            total, all_equal = total + us, all_equal and equal
            sizes = dict(zip(("k", "n", "experts"), reversed(shape), strict=False))
            own = {"format": str(format), **sizes, "equal": equal, "us": round(us, 1)}
            record.append(args.out, same | own | facts)
        print(f"{format}: {blocks * total / 1e3:.1f} ms, bits {'equal' if all_equal else 'DIFFER'}", flush=True)


def packed(dense: torch.Tensor, format: WeightFormat) -> QuantizedWeight:
    """Return a weight (n, k), or a stack of experts' (experts, n, k)."""
    if dense.dim() == 2:
        return quantize(dense, format).repack()
    return QuantizedWeight.stack((quantize(each, format) for each in dense), len(dense))


if __name__ == "__main__":
    main()
