"""Measure what choosing a config takes on the host: ``python -m bench.first_choice``; needs no GPU.

Each case runs in processes of its own, which describe an H200, and prints one row of JSON: the milliseconds of the
first choice of a process, of the first at another layer of that process, and of a new number of tokens there (the
median of many). Kernels are neither compiled nor loaded. The least of ``--rounds`` processes is the number to compare.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

CASES = {
    "few tokens, in the shipped table": (16, 4096, "int4_g128", "bfloat16"),
    "few tokens": (16, 4864, "int4_g128", "bfloat16"),
    "many tokens": (1000, 4864, "int4_g128", "bfloat16"),
    "few tokens, W4A8 exact": (16, 4864, "int4_g128", "float8_e4m3fn"),
    "many tokens, W4A8 folded": (1000, 4864, "int4_g128_e4m3", "float8_e4m3fn"),
    "few tokens, NF4 as bitsandbytes has it": (16, 4864, "nf4_g64_fp32", "bfloat16"),
    "many tokens, NF4 as bitsandbytes has it": (1000, 4864, "nf4_g64_fp32", "bfloat16"),
    "few tokens, Q4_K": (16, 4864, "q4_k", "bfloat16"),
    "few tokens, MXFP4": (16, 4864, "mxfp4", "bfloat16"),
}
"""(m, n, format, dtype of x)."""
_K, _OTHER_N = 4096, 6720
_TOKENS = range(300, 8000, 61)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.first_choice", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="processes of each case (default: %(default)s)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        print(json.dumps(measured(*CASES[args.case])))
        return
    for case in CASES:
        command = [sys.executable, "-m", "bench.first_choice", "--case", case]
        found = [json.loads(subprocess.check_output(command, text=True)) for _ in range(args.rounds)]
        print(
            json.dumps(
                {"kind": "first_choice", "case": case} | {name: min(ms[name] for ms in found) for name in found[0]}
            )
        )


def measured(m: int, n: int, format: str, dtype: str) -> dict[str, float]:
    """Milliseconds of CPU time in this process."""
    started = time.process_time()
    import torch  # what the package's import takes is counted beyond it

    torch_s = time.process_time() - started
    import w4gemm
    from w4gemm import choice

    imported = time.process_time()
    of = getattr(torch, dtype), w4gemm.WeightFormat.parse(format)
    layout = "mma8" if of[0] == torch.float8_e4m3fn else "mma16"

    def choose(m: int, n: int) -> float:
        """Milliseconds of a choice."""
        before = time.process_time()
        choice.decide(w4gemm.GemmProblem(choice.planned(m), n, _K, *of, layout))
        return 1e3 * (time.process_time() - before)

    found = {
        "import_ms": 1e3 * (imported - started - torch_s),
        "first_ms": choose(m, n),
        "next_layer_ms": choose(m, _OTHER_N),
    }
    if m > choice.WAVES_FROM:
        found["new_m_ms"] = statistics.median(choose(tokens, _OTHER_N) for tokens in _TOKENS)
    return {name: round(ms, 2) for name, ms in found.items()}


if __name__ == "__main__":
    main()
