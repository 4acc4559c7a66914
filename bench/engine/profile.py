"""Where the time of a decode step and of a prefill goes: GPU kernels of a profile, by what they do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from bench.engine.offline import PROFILED_STEPS

_FOUR_BITS = "|".join(
    (
        *("w4gemm", "mixed_gemm", "sm90_decode", "dequantize_gemm", "marlin", "machete", "humming"),
        *("w4a8", "mixedinput", "integer_subbyte", "matmul_ogs", "mxfp4", "nvjet_sm90_qq"),
    )
)
GROUPS = (
    ("copies", r"memcpy|memset"),
    ("routing", r"topk|moe_align|moe_sum|moe_permute|count_and_sort|expert_map|expert_route|routing|row_combine"),
    ("quantization", r"(?<!de)quant"),
    ("activation", r"gate_halves"),
    ("4-bit products", _FOUR_BITS),
    ("attention", r"flash|fmha|attention|attn|reshape_and_cache|concat_and_cache|merge_state|_mla|prepare_varlen"),
    ("rope", r"rotary|_rope"),
    ("norm", r"rms_?norm|layer_?norm|_rsqrt"),
    ("activation", r"silu|act_and_mul|swiglu|gelu"),
    ("16-bit products", r"nvjet|gemm|gemv|cublas|cutlass|wgmma|splitk|dot_kernel"),
    ("sampling", r"argmax|softmax|sample|logits|top_p|gumbel|penalt|exponential|sort"),
)
"""Groups with the pattern of their kernels' names; the first that fits. What fits none is "other". ``nvjet_sm90_qq``
are cuBLAS's products of fp8, which follow dequantize_gemm's own kernel."""
GROUPS_OF_TRITON = (
    ("quantization", r"amax|abs_clamp|to_fp8|quant"),
    ("norm", r"rms_?norm|layer_?norm|_rsqrt"),
    ("activation", r"silu|gelu"),
)
"""The same for kernels of Inductor, whose names list the operators in and behind them, products too."""


def group_of(kernel: str) -> str:
    """Return the group of a kernel by its name."""
    groups = GROUPS_OF_TRITON if kernel.startswith("triton_") else GROUPS
    return next((name for name, pattern in groups if re.search(pattern, kernel, re.IGNORECASE)), "other")


def rows_of(profiles: Sequence[dict[str, Any]], prefill: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return a row of phase "profile" for each number of requests that was profiled, then one of phase
    "prefill_profile" if the prefill was.

    ``us_step`` is the time of a decode step or of the prefill; ``groups`` are kernels' times by group; ``gaps`` is when
    the GPU ran none; ``kernels_us`` the longest, with launches.
    """
    rows = [{"phase": "profile", "batch": found["batch"], **_by_group(found, PROFILED_STEPS)} for found in profiles]
    if prefill:
        rows.append({"phase": "prefill_profile", "batch": 1, **_by_group(prefill, 1)})
    return rows


def _by_group(found: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the fields of a row: microseconds of one of ``steps``, in all, by group and by kernel."""
    groups: dict[str, float] = {}
    for name, (us, _) in found["kernels"].items():
        groups[group_of(name)] = groups.get(group_of(name), 0.0) + us / steps
    step = found["span"] / steps
    ordered = sorted(found["kernels"].items(), key=lambda item: -item[1][0])
    return {
        "us_step": round(step, 1),
        "groups": {name: round(us, 1) for name, us in sorted(groups.items(), key=lambda item: -item[1]) if us >= 0.05},
        "gaps": round(max(0.0, step - sum(groups.values())), 1),
        "kernels_us": [[name[:60], round(us / steps, 2), round(n / steps, 1)] for name, (us, n) in ordered[:14]],
    }


def table(row: dict[str, Any]) -> str:
    """Return the groups of a profile's row and longest kernels as lines."""
    step = row["us_step"] or 1.0
    what = "a prefill" if row["phase"] == "prefill_profile" else f"a decode step at batch {row['batch']}"
    lines = [f"{what}, {row['us_step']:.0f} us:"]
    for name, us in (*row["groups"].items(), ("gaps", row["gaps"])):
        lines.append(f"  {name:16} {us:8.1f} us  {us / step:4.0%}")
    lines += [f"  {us:8.1f} us in {launches:5.1f} launches of {name}" for name, us, launches in row["kernels_us"]]
    return "\n".join(lines)
