"""The README's table of what runs where, from every kernel's ``supports``: ``python -m bench.support`` writes it."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.core.problem import GPUS, H200, Device, GemmProblem
from w4gemm.kernels import KERNELS
from w4gemm.packing.layouts import layout_for

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- made by python -m bench.support -->\n", "<!-- end -->\n"

DEVICES: dict[str, Device] = {
    "H100, H200, H800, H20 (9.0)": H200,
    "B200, GB200 (10.0)": GPUS["sm_100a"],
    "B300 (10.3)": Device("cuda", "NVIDIA B300", (10, 3), 148, 232448),
    "RTX 5090, RTX PRO 6000 (12.0)": GPUS["sm_120a"],
    "RTX 4090, L4, L40S (8.9)": GPUS["sm_89"],
    "RTX 3090, A10, A40 (8.6)": GPUS["sm_86"],
    "A100, A30 (8.0)": GPUS["sm_80"],
    "T4 (7.5) and older": Device("cuda", "NVIDIA T4", (7, 5), 40, 65536),
    "AMD GPUs": Device("cuda", "AMD Instinct MI300X", (9, 4), 304, 65536, rocm=True),
    "CPU": Device("cpu"),
}
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
FORMATS = tuple(
    WeightFormat(*which)
    for which in itertools.product((32, 64, 128, 256, PER_COLUMN), ("none", "int", "float"), ("bf16", "fp16"))
)


FP8_FORMATS = (
    *(format for format in FORMATS if format.zero != "float"),
    *(WeightFormat(group_size, "none", "e4m3") for group_size in (32, 64, 128, 256, PER_COLUMN)),
)
"""For fp8 activations; the README says so beside the table."""

PARTIAL = "dequantize_gemm"
"""Takes a single weight without an epilogue, and not all formats; the README says so below the table."""


def table() -> str:
    """Lines of Markdown: by device and dtype of the activations the kernels that take every format, dense (experts 0)
    and grouped."""
    lines = ["| device | " + " | ".join(DTYPES) + " |", "|---" * (1 + len(DTYPES)) + "|"]
    for name, device in DEVICES.items():
        lines.append(f"| {name} | " + " | ".join(cell(device, dtype) for dtype in DTYPES.values()) + " |")
    return "\n".join(lines) + "\n"


def cell(device: Device, dtype: torch.dtype) -> str:
    problems = [
        GemmProblem(64, 4096, 4096, dtype, format, layout_for(device, format, dtype), device=device, experts=experts)
        for format in (FP8_FORMATS if dtype == torch.float8_e4m3fn else FORMATS)
        for experts in (0, 8)
    ]
    found = [kernel.name for kernel in KERNELS if all(kernel.supports(p) for p in problems)]
    some = {kernel.name for kernel in KERNELS if any(kernel.supports(p) for p in problems)}
    assert some - set(found) <= {PARTIAL}, f"{some} take some formats only: the table must say which"
    return ", ".join(f"`{name}`" for name in found) or "-"


def written(readme: str) -> str:
    """The README with the table as it is now."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
