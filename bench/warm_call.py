"""Measure the host's time of a warm call, whose plan is chosen and compiled: ``python -m bench.warm_call``.

On the CPU (``--device cpu``) the kernel's launch is replaced by nothing, so that what is left is what linear does
before it. On a GPU the call is real; it returns before the kernel ends, and the queue is emptied between rounds.

Each case runs in rounds of ``--calls`` calls, in turn with the others. us_min is the fastest round's microseconds a
call, the number to compare on a machine that does other work as well; us_p50 is the median's. One row of JSON a case.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from bench.options import command

import w4gemm
from w4gemm import QuantizedWeight, W4Linear, grouped_linear, linear, quantize
from w4gemm.kernels import kernel_named
from w4gemm.tuning import record

_N, _K, _EXPERTS = 512, 512, 4


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.warm_call", __doc__)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of the tensors (default: %(default)s)"
    )
    parser.add_argument("--calls", type=int, default=1000, help="in a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=60, help="of each call (default: %(default)s)")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cpu":
        without_launches()
    facts = record.facts()
    with torch.no_grad():
        made = cases(device)
        times: dict[str, list[float]] = {name: [] for name in made}
        for call in made.values():
            call()
        for _ in range(args.rounds):
            for name, call in made.items():
                times[name].append(microseconds(call, args.calls, device))
    for name, us in times.items():
        row = {"kind": "warm_call", "run": record.run_name(facts), "case": name, "device": device.type}
        row |= {"us_min": round(min(us), 2), "us_p50": round(statistics.median(us), 2)}
        print(json.dumps(row | facts))


def without_launches() -> None:
    """Let the CPU's kernel launch nothing."""
    type(kernel_named("cpu_mixed_gemm")).launcher = lambda *_: lambda operands: None  # type: ignore[method-assign]


def cases(device: torch.device) -> dict[str, Callable[[], object]]:
    """Return the calls to time, by name."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    w = quantize(torch.randn(_N, _K)).to(device).repack()
    experts = QuantizedWeight.stack([w] * _EXPERTS)
    x, bias = torch.randn(1, _K, dtype=dtype, device=device), torch.randn(_N, dtype=dtype, device=device)
    deep, rows = x.view(1, 1, _K), x.expand(_EXPERTS, _K).contiguous()
    residual, offsets = torch.randn(1, _N, dtype=dtype, device=device), torch.arange(_EXPERTS + 1, device=device).int()
    layer, activated = W4Linear.from_weight(w, bias), W4Linear.from_weight(w, bias)
    activated.activation = "silu"
    alone = w4gemm.MixedGemm(w.format, dtype, device)
    calls: dict[str, Callable[[], object]] = {
        "linear": lambda: linear(x, w),
        "linear bias": lambda: linear(x, w, bias),
        "linear bias silu": lambda: linear(x, w, bias, activation="silu"),
        "linear 3 dimensions": lambda: linear(deep, w),
        "linear residual": lambda: linear(x, w, residual=residual),
        "layer": lambda: layer(x),
        "layer silu": lambda: activated(x),
        "grouped_linear": lambda: grouped_linear(rows, experts, offsets),
        "MixedGemm.run": lambda: alone.run(x, w.tensors, residual),
        "torch.nn.functional.linear": lambda: torch.nn.functional.linear(x, x),
    }
    if hasattr(w, "activations"):
        fp8 = w.repack(activations="fp8")
        layer_fp8 = W4Linear.from_weight(fp8, bias)
        calls |= {"linear fp8": lambda: linear(x, fp8), "layer fp8": lambda: layer_fp8(x)}
    return calls


def microseconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Microseconds a call, in a loop."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - start) / calls


if __name__ == "__main__":
    main()
