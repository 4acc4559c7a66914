"""Write the tables of what runs where into README.md and docs/support.md: ``python -m bench.support``.

They are made of what every kernel's ``supports`` says."""

from __future__ import annotations

import functools
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench.markdown import table, with_parts
from bench.options import command

from w4gemm.core.epilogue import Epilogue
from w4gemm.core.format_names import ALIASES
from w4gemm.core.formats import PER_COLUMN, SCALES, ZEROS, WeightFormat
from w4gemm.core.problem import GPUS, H200, Device, GemmProblem
from w4gemm.integrations.sglang.takeover import SGLANG
from w4gemm.integrations.vllm.takeover import VLLM
from w4gemm.kernels import KERNELS, Kernel
from w4gemm.packing.codecs import CODECS
from w4gemm.packing.layouts import LAYOUTS, layout_for

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs/support.md")
"""Documents with tables of these names."""

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
RUN_ON = {"H100, H200, H800, H20 (9.0)": "H100, H200", "CPU": "x86-64 CPUs with AVX2, AVX-512 and AMX"}
"""Models of a device that w4gemm has run on."""
FP8 = torch.float8_e4m3fn
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float8_e4m3fn": FP8}
GROUPS = (16, 32, 64, 96, 128, 256, PER_COLUMN)

FORMATS = tuple(
    WeightFormat(*which)
    for which in itertools.product((32, 64, 128, 256, PER_COLUMN), ("none", "int", "float"), ("bf16", "fp16"))
)
"""The formats of the table by device and dtype."""
FP8_FORMATS = (
    *FORMATS,
    *(WeightFormat(group_size, "none", "e4m3") for group_size in (32, 64, 128, 256, PER_COLUMN)),
)
"""For fp8 activations; docs/support.md says so above the table."""

PARTIAL = "dequantize_gemm"
"""Takes a single weight without an epilogue, and not all formats; the documents say so below the table."""


def problem(device: Device, format: WeightFormat, dtype: torch.dtype, experts: int = 0) -> GemmProblem:
    """A product in the layout that the device's fastest kernel reads."""
    layout = layout_for(device, format, dtype)
    return GemmProblem(64, 4096, 4096, dtype, format, layout, device=device, experts=experts)


def kernels_by_device() -> list[str]:
    """By device and dtype of x the kernels that take every format, dense (experts 0) and grouped."""
    cells = {name: tuple(_cell(device, dtype) for dtype in DTYPES.values()) for name, device in DEVICES.items()}
    return table(("device", *DTYPES), _alike(cells))


def _alike(cells: dict[str, tuple[str, ...]]) -> Iterable[tuple[str, ...]]:
    """Return rows of a table by device, devices with the same cells in one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, own in cells.items():
        rows.setdefault(own, []).append(name)
    return (("; ".join(names), *own) for own, names in rows.items())


def evidence() -> list[str]:
    """A list: what w4gemm has run on, what it supports beside that, and what it does not."""
    run, compiled, refused = [], [], []
    for name, device in DEVICES.items():
        if all(_cell(device, dtype) == "-" for dtype in DTYPES.values()):
            refused.append(name)
        elif name in RUN_ON:
            run.append(RUN_ON[name])
            models, _, capability = name.partition(" (")
            others = [model for model in models.split(", ") if model not in RUN_ON[name].split(", ")]
            compiled += [f"{', '.join(others)} ({capability}"] if capability else []
        else:
            compiled.append(name)
    lines = {"Run on": run, "Compiled for by the tests, never run on": compiled, "Not supported": refused}
    items = (f"- {what}: {'; '.join(names)}." for what, names in lines.items())
    return [line for item in items for line in textwrap.wrap(item, 120, subsequent_indent="  ")]


@functools.cache
def _cell(device: Device, dtype: torch.dtype) -> str:
    formats = FP8_FORMATS if dtype == FP8 else FORMATS
    problems = [problem(device, format, dtype, experts) for format in formats for experts in (0, 8)]
    names = [kernel.name for kernel in KERNELS if all(kernel.supports(p) for p in problems)]
    some = {kernel.name for kernel in KERNELS if any(kernel.supports(p) for p in problems)}
    assert some - set(names) <= {PARTIAL}, f"{some} take some formats only: the table must say which"
    return ", ".join(f"`{name}`" for name in names) or "-"


def families() -> dict[str, list[WeightFormat]]:
    """Formats of all group sizes by element, zero rule and scale rule, under a string with ``g*`` for the group.
    Elements without a codec run on CPUs only."""
    families: dict[str, list[WeightFormat]] = {}
    elements = dict.fromkeys(codec.element for codec in CODECS)
    for element, zero, scale, group_size in itertools.product(elements, ZEROS, SCALES, GROUPS):
        try:
            format = WeightFormat(group_size, zero, scale, element)
        except ValueError:  # no such combination
            continue
        families.setdefault(str(replace(format, group_size=128)).replace("_g128", "_g*"), []).append(format)
    return families


def _taken(device: Device, formats: list[WeightFormat]) -> str:
    """Words for the activations beside which a device runs formats, dense and experts, with the smallest group of
    each."""
    least: dict[str, int] = {}
    for name, dtypes in {"16-bit": (torch.float16, torch.bfloat16), "fp8": (FP8,)}.items():
        runs = [
            format.group_size
            for format in formats
            if all(_runs(device, format, dtype, experts) for dtype in dtypes for experts in (0, 8))
        ]
        if runs:
            least[name] = min(size for size in runs if size != PER_COLUMN)
            sizes = [f.group_size for f in formats if f.group_size == PER_COLUMN or f.group_size >= least[name]]
            assert runs == sizes, f"{formats[0]} with {name}: the table must say which groups"
    return ", ".join(f"{name} ({size})" for name, size in least.items()) or "-"


def formats_by_device() -> list[str]:
    """By format and device the activations; devices with equal columns are one column, formats with equal rows one
    row, and those that no GPU takes have no names."""
    columns: dict[tuple[str, ...], list[Device]] = {}
    labels = families()
    by_kind: dict[tuple[Any, ...], list[Device]] = {}
    for device in DEVICES.values():
        by_kind.setdefault((device.kind, device.rocm, device.capability, device.shared_memory), []).append(device)
    for alike in by_kind.values():
        cells = tuple(_taken(alike[0], formats) for formats in labels.values())
        if any(cell != "-" for cell in cells):
            columns.setdefault(cells, []).extend(alike)
    heads = [_capabilities(devices) for devices in columns.values()]
    rows: dict[tuple[str, ...], list[str]] = {}
    for label, *cells in zip(labels, *columns, strict=True):
        names = rows.setdefault(tuple(cells), [])
        if any(cell != "-" for head, cell in zip(heads, cells, strict=True) if head != "CPU"):
            names.append(label)
    in_order = sorted(rows.items(), key=lambda row: not row[1])
    return table(("format", *heads), ((_names(labels), *cells) for cells, labels in in_order))


def _capabilities(devices: Iterable[Device]) -> str:
    """Compute capabilities of GPUs in order, or CPU."""
    capabilities = sorted({device.capability for device in devices if device.kind == "cuda"})
    return ", ".join(f"{major}.{minor}" for major, minor in capabilities) or "CPU"


def _names(labels: list[str]) -> str:
    """Words for families of formats: elements with the same zero and scale rules together, then names in use."""
    rules: dict[str, list[str]] = {}
    for label in labels:
        element, rest = label.split("_", 1)
        rules.setdefault(element, []).append(f"`_{rest}`")
    alike: dict[str, list[str]] = {}
    for element, own in rules.items():
        alike.setdefault(", ".join(own), []).append(f"`{element}`")
    words = "; ".join(f"{', '.join(elements)}: {own}" for own, elements in alike.items()) or "all others"
    aliases = [f"`{name}`" for name, string in ALIASES.items() if re.sub(r"_g\d+", "_g*", string) in labels]
    return words + (f" (among them {', '.join(aliases)})" if aliases else "")


def features_by_kernel() -> list[str]:
    """By kernel the dtypes of x, layouts, and what it takes besides one weight and rows with one scale."""
    return table(
        ("kernel", "compute capability", "x", "layout", "experts", "reads rows of x by index", "scales of 128 columns"),
        (_features(kernel) for kernel in KERNELS),
    )


@functools.cache
def _problems() -> list[GemmProblem]:
    """A product of each family on each device, with each dtype of x and layout."""
    # a group size of each, 128 if it has that
    formats = [max(formats, key=lambda format: format.group_size == 128) for formats in families().values()]
    return [
        GemmProblem(64, 4096, 4096, dtype, format, layout, device=device)
        for device, format, dtype, layout in itertools.product(DEVICES.values(), formats, DTYPES.values(), LAYOUTS)
    ]


def _features(kernel: Kernel) -> tuple[str, ...]:
    in_blocks = [replace(p, epilogue=Epilogue(block_scale=True)) for p in _problems() if p.dtype == FP8]
    runs_in_blocks = [p for p in in_blocks if kernel.supports(p)]
    runs = [p for p in _problems() if kernel.supports(p)] or runs_in_blocks
    one = runs[0]
    taken = {p.dtype for p in runs}
    layouts = dict.fromkeys(p.layout for p in runs)
    return (
        f"`{kernel.name}`",
        _capabilities(p.device for p in runs),
        ", ".join(name for name, dtype in DTYPES.items() if dtype in taken),
        ", ".join(f"`{name}`" for name in layouts),
        _yes(kernel.supports(replace(one, experts=8))),
        _yes(kernel.supports(replace(one, experts=8, gathered=True))),
        _yes(runs_in_blocks),
    )


def _yes(answer: object) -> str:
    return "yes" if answer else "-"


def engines_by_device() -> list[str]:
    """By device the layers that the plugins of engines take over, for each value of their switch."""
    format, rows = WeightFormat(), {}
    for name, device in DEVICES.items():
        cells = []
        for switch, engine in itertools.product(("auto", "on"), (VLLM, SGLANG)):
            here = replace(engine, switch=lambda switch=switch: switch)
            capability = device.capability if device.kind == "cuda" and not device.rocm else None
            kinds = {
                "W4A16": not here.why_not_here(capability) and _runs(device, format, torch.bfloat16),
                "W4A8": not here.why_not_here(capability, fp8=True) and _runs(device, format, FP8),
            }
            cells.append(", ".join(kind for kind, taken in kinds.items() if taken) or "-")
        assert cells[::2] == cells[1::2], "engines differ: the table must say which"
        rows[name] = tuple(cells[::2])
    return table(("device", "`auto`", "`on`"), _alike(rows))


def _runs(device: Device, format: WeightFormat, dtype: torch.dtype, experts: int = 0) -> bool:
    product = problem(device, format, dtype, experts)
    return any(kernel.supports(product) for kernel in KERNELS)


TABLES: dict[str, Callable[[], list[str]]] = {
    "evidence": evidence,
    "kernels": kernels_by_device,
    "formats": formats_by_device,
    "features": features_by_kernel,
    "engines": engines_by_device,
}
"""By the name in a document's comment."""


def written(text: str) -> str:
    """A document with its tables as they are now."""
    return with_parts(text, "bench.support", lambda name: TABLES[name]())


def main(argv: Sequence[str] | None = None) -> None:
    command("bench.support", __doc__).parse_args(argv)
    for page in PAGES:
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()
