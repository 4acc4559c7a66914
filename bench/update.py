"""Measure :func:`w4gemm.update_` on the layers of Llama-3-8B: ``python -m bench.update``. It needs a Hopper GPU.

Each layer's bits are held against those of ``quantize``. A time is of a call with its check of the numbers, which waits
for the GPU: the mean of ``--calls`` calls. One row of JSON a layer and format.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch
from bench.options import command

from w4gemm import quantize, update_
from w4gemm.tuning import record

LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
FORMATS = ("int4_g128", "int4_g32", "int4_g128_zint", "mxfp4", "nvfp4")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.update", __doc__)
    parser.add_argument("--calls", type=int, default=32, help="of each layer (default: %(default)s)")
    args = parser.parse_args(argv)
    facts = record.facts()
    same = {"kind": "update", "run": record.run_name(facts), "dtype": "bfloat16", "calls": args.calls}
    for format in FORMATS:
        for n, k in LAYERS:
            dense = (torch.randn(n, k, device="cuda") / 50).bfloat16()
            made = quantize(dense, format).repack()
            w = quantize(torch.zeros_like(dense), format).repack()
            update_(w, dense)
            equal = all(torch.equal(a, b) for a, b in zip(w.tensors, made.tensors, strict=True))
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(args.calls):
                update_(w, dense)
            us = 1e6 * (time.perf_counter() - start) / args.calls
            print(json.dumps(same | {"format": format, "n": n, "k": k, "equal": equal, "us": round(us, 1)} | facts))


if __name__ == "__main__":
    main()
