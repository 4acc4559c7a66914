"""Write a GPU's constants of the cost model, ``w4gemm/choice/cost/<gpu>.jsonl``, for bench.fit."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.peers.base import epilogue_of

from w4gemm.choice.cost import constants, waves
from w4gemm.choice.cost.constants import Scale, SliceTimes
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.kernels import kernel_named

HOPPER = ("sm90_decode", "sm90_mixed_gemm", "sm90_fp8_gemm", "sm90_fp8_block_gemm")
FORMATS = (
    *(f"int4_{group}{rest}" for group in ("g32", "g64", "g128", "col") for rest in ("", "_zint", "_zfloat", "_e4m3")),
    *("e4m3_g128_b128", "e4m3_col_fp32", "q4_k"),
)


def begin(device: Device) -> None:
    """Make a GPU's file, if it has none, of that of the most similar GPU: what holds there, scaled to this one."""
    target = constants.path_of(device.name)
    if not target.exists():
        like, scale = constants.constants_for(device).device, constants.scale_of(device)
        rows = map(json.loads, constants.path_of(like.name).read_text().splitlines())
        target.write_text("".join(json.dumps(scaled(row, like, device, scale)) + "\n" for row in rows))
        for cached in (constants.measured, constants.constants_for, constants.scale_of):
            cached.cache_clear()


_SM_TERMS = defaultdict[str, tuple[str, ...]](tuple)
_SM_TERMS |= {
    "": ("alone", "tile"),
    "waves": ("gathered_us", "row_us", "row_past_us", "expert_tile_us", "expert_start_us", "later_wave_us"),
    "cublas": ("result_us",),
    "mma_sync": ("k_slice", "decode", "operations", "read", "sums"),
}
"""Terms that are work of one multiprocessor, by model; the empty name for a config."""


def scaled(row: dict[str, Any], like: Device, device: Device, scale: Scale) -> dict[str, Any]:
    """A line of the constants of ``like`` as it is for ``device``, whose times are ``scale`` times as long."""
    if "gpu" in row:
        return {"gpu": device.name} | {fact: getattr(device, fact) for fact in ("capability", "sms", "shared_memory")}
    if "text" in row:
        return row | {"text": f"Scaled by data sheets from those of: {row['text']}"}
    rate = device.sms / like.sms / scale.mma
    factors = dict.fromkeys(_SM_TERMS[row.get("model", "")], scale.clock)
    factors |= {"shared": scale.contention, "bytes_per_us": 1 / scale.memory, "fp8_operations": rate}
    if row.get("model") == "cublas_rate" and tuple(row.get("capability", ())) == device.capability:
        return row | {"operations": row["operations"] * rate, "sms": device.sms}
    return {term: float(f"{value * factors[term]:.6g}") if term in factors else value for term, value in row.items()}


def write(target: Path, times: dict[str, SliceTimes], source: str, fp8: bool, word: str) -> None:
    """Put ``times`` in the place of those of the kernels for 16-bit x, or for fp8 x. The file then says where they are
    from: what it said, ``word`` and ``source``, or ``source`` alone if word is empty."""
    legal, of = legal_names(), "sm90_fp8_gemm" if fp8 else "sm90_decode, sm90_mixed_gemm"
    others, configs = [], {}
    for row in map(json.loads, target.read_text().splitlines()):
        if "config" in row:
            if ("sm90_fp8_" in row["config"]) != fp8:
                configs[row["config"]] = row
        elif row.get("source") == of and "text" in row:
            others.append({**row, "text": f"{row['text']} {word} {source}" if word else source})
        else:
            others.append(row)
    for name, each in times.items():
        if name in legal:
            terms = {term: round(us, 4) for term, us in zip(SliceTimes._fields, each, strict=True)}
            configs[name] = {"config": name} | {term: us for term, us in terms.items() if us}
    rows = [*others, *(configs[name] for name in sorted(configs))]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{target}: {len(configs)} configs")


def legal_names() -> set[str]:
    """``"<name>/<config>"`` of every config that is legal for some format, dense or of experts."""
    names = set()
    for kernel in (kernel_named(name) for name in HOPPER):
        for format, experts in itertools.product(FORMATS, (0, 8)):
            of = kernel.dtypes[-1], WeightFormat.parse(format), kernel.layout
            scaled_x = epilogue_of(of[1], of[0])  # some tiles are legal only so
            problem = GemmProblem(64, 4096, 4096, *of, scaled_x, H200, experts=experts)
            if not kernel.supports(problem):
                continue
            single = (c for config in kernel.configs(problem) for c in (replace(config, tail=None), config.tail) if c)
            names |= {f"{waves.timed_as(kernel, problem)}/{c}" for c in single}
    return names
