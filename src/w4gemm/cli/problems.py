"""What several commands take: a device, a dtype, a format, layers, numbers of tokens."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from w4gemm import choice
from w4gemm.checkpoints import open_checkpoint
from w4gemm.cli import report
from w4gemm.epilogue import Epilogue
from w4gemm.errors import FormatError
from w4gemm.formats import WeightFormat
from w4gemm.packing.layouts import layout_for
from w4gemm.problem import H200, Device, GemmProblem

SIMULATED = {"h200": H200}
"""Devices that need not be there, for what only chooses and compiles."""
WIDE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Of a model's activations."""
DTYPES = WIDE_DTYPES | {"float8_e4m3fn": torch.float8_e4m3fn}
_RANGE = re.compile(r"(\d+)(\.\.(\d*))?")


@dataclass(frozen=True)
class Layer:
    """A linear layer with n output and k input features, or one of ``experts`` experts."""

    n: int
    k: int
    format: WeightFormat
    bias: bool = False
    experts: int = 0


def positive(text: str) -> int:
    """What an option that counts something is read with."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"wanted an integer >= 1, got {text}")
    return value


def add_device_arguments(parser: argparse.ArgumentParser, simulated: bool = False) -> None:
    also = ", or h200, which need not be there" if simulated else ""
    parser.add_argument("--device", help=f"cpu, cuda or cuda:N{also} (default: cuda if a kernel runs there, else cpu)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the activations (default: bfloat16 on a GPU, float32 on the CPU)"
    )


def add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="PATH", help="a GGUF file, or a folder with one or a Hugging Face model")
    which.add_argument(
        "--shapes",
        metavar="FILE",
        help="lines of N K [FORMAT] [bias] (output features, input features); or sizes like 6144x4096,4096x4096",
    )
    parser.add_argument("--format", help="of layers that say none (default: int4_g128)")
    parser.add_argument(
        "--m",
        default="1..8192",
        metavar="M",
        help="tokens: numbers and ranges like 1..64,512 or 1.. (default: %(default)s)",
    )


def choose_device(name: str | None) -> tuple[torch.device, str]:
    """The device to run on, and a note if a GPU is there but cannot be used."""
    if name is not None:
        try:
            device = torch.device(name)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"--device: wanted cpu, cuda or cuda:N, got {name!r}")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device: {name!r} is not there; PyTorch sees {torch.cuda.device_count()} CUDA devices")
        return device, ""
    if not torch.cuda.is_available():
        return torch.device("cpu"), ""
    reasons = report.refusals(torch.device("cuda"))
    if not reasons:
        return torch.device("cuda"), ""
    return torch.device("cpu"), f"using the CPU, since no kernel runs on {device_name('cuda')}: {reasons}"


def device_name(device: torch.device | str) -> str:
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def described_device(name: str | None) -> Device:
    """The device to choose for, which need not be there if it is one of ``SIMULATED``.

    Raises:
        ValueError: for a name that is none, or of a device that is not there.
    """
    if name is not None and name.lower() in SIMULATED:
        return SIMULATED[name.lower()]
    return chosen_device(name)[0]


def chosen_device(name: str | None) -> tuple[Device, torch.device]:
    """The device to run on.

    Raises:
        ValueError: for a name that is none, or of a device that is not there.
    """
    if name is not None and name.lower() in SIMULATED:
        raise ValueError(f"--device: {name} need not be there for `explain` alone; wanted cpu, cuda or cuda:N")
    device, note = choose_device(name)
    if note:
        report.say(note)
    return Device.of(device), device


def chosen_dtype(name: str | None, device: Device) -> torch.dtype:
    return DTYPES[name or ("float32" if device.kind == "cpu" else "bfloat16")]


def device_line(device: Device) -> str:
    if device.kind != "cuda":
        return "the CPU" if device.kind == "cpu" else device.kind
    capability = ".".join(map(str, device.capability))
    return f"{device.name}, compute capability {capability}, {device.sms} multiprocessors"


def problems(
    layers: list[Layer], tokens: list[int], device: Device, dtype: torch.dtype, batch_invariant: bool = False
) -> list[GemmProblem]:
    """Return a problem for each layer and interval of m."""
    scaled = dtype == torch.float8_e4m3fn  # as linear calls it that quantizes x
    return [
        GemmProblem(m, layer.n, layer.k, dtype, layer.format, layout, epilogue, device, batch_invariant, layer.experts)
        for layer in layers
        for layout in (layout_for(device, layer.format, dtype),)
        for epilogue in (Epilogue(bias=layer.bias, token_scale=scaled),)
        for m in tokens
    ]


def parse_tokens(text: str) -> list[int]:
    """The numbers of tokens that stand for the intervals of ``1..64,512``, or ``4096..`` without an end.

    Raises:
        ValueError: for anything else.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        if match is None or first < 1:
            raise ValueError(f"--m: wanted numbers from 1 and ranges like 1..64,512 or 1.., got {text!r}")
        last = first if match[2] is None else int(match[3]) if match[3] else choice.BOUNDS[-1] + 1
        if last < first:
            raise ValueError(f"--m: wanted ranges that go up, got {part!r}")
        intervals = range(choice.interval(first), choice.interval(last) + 1)
        found |= {choice.representative(choice.BOUNDS[i - 1] + 1 if i else 1) for i in intervals}
    return sorted(found)


def parse_layers(args: argparse.Namespace) -> list[Layer]:
    """The layers of ``--model`` or ``--shapes``, each once.

    Raises:
        FileNotFoundError, FormatError, ValueError: if they cannot be read.
    """
    format = WeightFormat.parse(args.format) if args.format else WeightFormat()
    if args.model is not None:
        found = _layers_of_model(args.model)
    elif Path(args.shapes).is_file():
        found = [
            _parse_line(line, f"{args.shapes}:{number}", format)
            for number, text in enumerate(Path(args.shapes).read_text().splitlines(), 1)
            if (line := text.partition("#")[0].strip())
        ]
    else:
        found = [_parse_size(part, format) for part in args.shapes.split(",")]
    if not found:
        raise FormatError(f"{args.model or args.shapes}: no 4-bit layers")
    return list(dict.fromkeys(found))


def _layers_of_model(path: str) -> list[Layer]:
    modules = open_checkpoint(path).modules.values()
    return [Layer(m.n, m.k, m.format, m.bias, m.experts) for m in modules]


def _parse_line(line: str, where: str, format: WeightFormat) -> Layer:
    words = line.split()
    bias = words[-1] == "bias"
    words = words[: len(words) - bias]
    if len(words) not in (2, 3) or not all(word.isdigit() and int(word) for word in words[:2]):
        raise ValueError(f"{where}: wanted N K [FORMAT] [bias], got {line!r}")
    return Layer(int(words[0]), int(words[1]), WeightFormat.parse(words[2]) if len(words) == 3 else format, bias)


def _parse_size(text: str, format: WeightFormat) -> Layer:
    size = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if size is None:
        raise FileNotFoundError(f"--shapes: wanted a file or sizes like 6144x4096 (n x k), got {text!r}")
    return Layer(int(size[1]), int(size[2]), format)
