"""The parser of commands, and the options that several share: sizes, counts, dtypes, a device. Importing this does
without PyTorch."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from w4gemm.core.format_names import LARGEST_SIZE
from w4gemm.core.function_names import require_scoring
from w4gemm.core.gpus import is_known, nearest_gpu
from w4gemm.core.words import closest, nearest

WIDE_DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes that a model's activations may have."""
DTYPES = (*WIDE_DTYPES, "float8_e4m3fn")

_LOWEST_TEMPERATURE = 1e-6
"""Logits are divided by the temperature, and have to stay in the range of float32."""
_CHOICES = re.compile(r"argument (.+?): invalid choice: '(.*)' \(choose from (.*)\)", re.DOTALL)
"""argparse's message for a word that is none of a list."""


_OTHER_COMMANDS = {
    **dict.fromkeys(("chat", "run", "ask", "complete", "completion"), "generate"),
    **dict.fromkeys(("perplexity", "ppl", "lm-eval", "lm_eval"), "eval"),
    **dict.fromkeys(("show", "ls", "dump"), "inspect"),
    **dict.fromkeys(("quantize", "quantise", "quant", "export", "save", "pack"), "convert"),
    **dict.fromkeys(("profile", "autotune", "optimize"), "tune"),
    **dict.fromkeys(("why", "plan"), "explain"),
    **dict.fromkeys(("matmul", "linear", "mm"), "gemm"),
    "serve": "vllm serve",
    **dict.fromkeys(("version", "env", "collect-env", "doctor", "list-devices"), "info"),
}
"""Commands of other programs, for messages alone."""
_OTHER_OPTIONS = {
    **dict.fromkeys(("-p", "--prompt", "--prompts"), ("PROMPT, in quotes and without an option",)),
    **dict.fromkeys(("-n", "--n-predict", "--max-tokens"), ("--max-new-tokens",)),
    "-m": ("--model", "--m", "PATH, without an option", "MODEL, without an option"),
    **dict.fromkeys(("--model", "--model-path"), ("--model", "PATH, without an option", "MODEL, without an option")),
    **dict.fromkeys(
        ("--bits", "--wbits", "--w-bit", "--group-size", "--q-group-size", "--quantization"), ("--format",)
    ),
    **dict.fromkeys(("-d", "--gpu", "--cuda"), ("--device",)),
    **dict.fromkeys(("-o", "--output", "--outfile", "--save"), ("OUTPUT, without an option",)),
}
"""Options of other programs and commands, for messages: what is meant is the first one that the command has."""
_SHORT_DTYPES = {
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    "bf16": "bfloat16",
    **dict.fromkeys(("fp8", "f8", "e4m3", "float8"), "float8_e4m3fn"),
}
"""Other names of dtypes, for messages alone."""


class CommandParser(argparse.ArgumentParser):
    """Names the nearest command, option or choice in the message about a mistyped one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.words: Sequence[str] = ()
        """What the newest call parses."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print a message in one sentence, with the command or option that was meant, if a word is another program's
        name for one or close to one, and exit with status 2."""
        if (choice := _CHOICES.search(message)) is not None:
            legal = re.findall(r"[\w-]+", choice[3])
            other = _OTHER_COMMANDS.get(choice[2].lower(), "")
            is_command = other in legal or (other and choice[1] == "COMMAND")
            dtype = _SHORT_DTYPES.get(choice[2].lower())
            word = dtype if dtype in legal else choice[2]
            close = f"; nearest is {other!r}" if is_command else nearest(word, legal)
            message = f"{choice[1]}: wanted one of {', '.join(legal)}, got {choice[2]!r}{close}"
        options = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", help_text := self.format_help()))
        for word in self.words:
            name = word.partition("=")[0]
            if not re.match("--?[a-zA-Z]", name) or any(option.startswith(name) for option in options):
                continue
            others = _OTHER_OPTIONS.get(name, ())
            meant = next((o for o in others if re.search(rf"(?<![\w-]){o.partition(',')[0]}\b", help_text)), None)
            if meant is None:
                long = f"-{name}" if f"-{name}" in options else None
                meant = closest(name, options) if name.startswith("--") else long
            message += f"; nearest to {name} is {meant}" if meant else ""
        super().error(message)


def positive(text: str) -> int:
    """Return the value of an option that counts something, an integer from 1 on."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"wanted an integer >= 1, got {text}")
    if value > LARGEST_SIZE:
        raise argparse.ArgumentTypeError(f"wanted an integer <= {LARGEST_SIZE}, got {text}")
    return value


def size(text: str) -> int:
    """Return m, n or k as it is written; :func:`three_sizes` checks its range."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted one integer, got {text}") from None


def named_path(text: str) -> Path:
    """Return the file or folder that an option names. ``~`` is the home folder, because a shell does not replace it in
    quotes or in a container's list of arguments. The empty string, as from a script's unset variable, is refused,
    because Path("") is the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("wanted a path, got an empty string")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"wanted a path, got {text!r}, and there is no such home folder") from None


_SHAPE = re.compile(r"(?:([1-9]\d*)x)?([1-9]\d*)x([1-9]\d*)")
_SIZES = {"m": "number of tokens, the rows of x", "n": "output features", "k": "input features"}


def temperature(text: str) -> float:
    """Return the value of --temperature: 0, or a number by which logits can be divided."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value == 0 or _LOWEST_TEMPERATURE <= value < math.inf):
        raise argparse.ArgumentTypeError(f"wanted 0 or a finite number >= {_LOWEST_TEMPERATURE}, got {text}")
    return value


def seed(text: str) -> int:
    """Return the value of --seed."""
    if not re.fullmatch(r"-?\d{1,20}", text) or not -(2**63) <= int(text) < 2**64:
        raise argparse.ArgumentTypeError(f"wanted an integer of 64 bits, got {text:.40}")
    return int(text)


def listed_shapes(text: str) -> list[tuple[str, str, str]] | None:
    """Return the layers that --shapes lists, such as 6144x4096 or 8x6144x4096: experts, "0" without, n and k in
    digits; None if it names a file or a pipe.

    Raises:
        ValueError, FileNotFoundError: for a size that is none.
    """
    with contextlib.suppress(OSError):  # many sizes are longer than a path may be
        path = Path(text)
        if path.exists() and not path.is_dir():
            return None
    shapes = []
    for part in text.split(","):
        shape = _SHAPE.fullmatch(part)
        if shape is None:
            error = ValueError if re.fullmatch(r"\d\w*", part) else FileNotFoundError
            raise error(f"--shapes: wanted a file or sizes like 6144x4096 (n x k), got {part!r:.80}")
        shapes.append((shape[1] or "0", shape[2], shape[3]))
    return shapes


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Add m, n and k, by position and as options. :func:`three_sizes` reads them."""
    parser.add_argument("sizes", nargs="*", metavar="M N K", type=size, help="the sizes by position instead of options")
    for name, what in _SIZES.items():
        parser.add_argument(f"--{name}", metavar=name.upper(), type=size, help=what)


def three_sizes(args: argparse.Namespace) -> list[int]:
    """Return m, n and k as they are written.

    Raises:
        ValueError: unless all three are there, in one of both ways, and are sizes of a product.
    """
    options = [size for size in (args.m, args.n, args.k) if size is not None]
    if len(args.sizes) + len(options) != 3 or (args.sizes and options):
        raise ValueError("M, N, K: wanted three sizes, as in `512 4096 4096` or `--m 512 --n 4096 --k 4096`")
    sizes: list[int] = args.sizes or options
    if not all(1 <= size <= LARGEST_SIZE for size in sizes):
        raise ValueError(f"M, N, K: wanted numbers from 1 to {LARGEST_SIZE}, got {', '.join(map(str, sizes))}")
    return sizes


def add_format_argument(parser: argparse.ArgumentParser) -> None:
    """Add --format for the weight of one product."""
    parser.add_argument(
        "--format", default="int4_g128", help="the weight's, such as int4_g64_zint, mxfp4 or nf4 (default: %(default)s)"
    )


def add_device_arguments(
    parser: argparse.ArgumentParser, described: bool = False, dtypes: Sequence[str] = DTYPES
) -> None:
    """Add --device and --dtype.

    Args:
        dtypes: names of those to choose from.
        described: True if the device is only chosen for, and need not be there.
    """
    what, also = "device to run on", ""
    if described:
        what, also = "device to choose for", ", or the name of a GPU that need not be there, such as h200 or rtx-4090"
    parser.add_argument(
        "--device", help=f"{what}: cpu, cuda or cuda:N{also} (default: cuda if a kernel runs there, else cpu)"
    )
    parser.add_argument(
        "--dtype", choices=dtypes, help="dtype of the activations (default: bfloat16 on a GPU, float32 on the CPU)"
    )


_RANGE = re.compile(r"(\d+)(\.\.(\d*))?")
_LONGEST_RANGE = 80
"""Characters."""


def token_ranges(text: str) -> list[tuple[int, int | None]]:
    """Return the first and the last number of tokens of each range in a text, None for a range without an end.

    Args:
        text: numbers and ranges such as ``1..64,512``; ``4096..`` has no end.

    Raises:
        ValueError: for any other text.
    """
    ranges: list[tuple[int, int | None]] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        too_long = len(part) > _LONGEST_RANGE  # Python refuses to read thousands of digits, in words of its own
        first = int(match[1]) if match and not too_long else 0
        if match is None or first < 1:
            raise ValueError(f"--m: wanted numbers from 1 and ranges like 1..64,512 or 1.., got {text!r:.80}")
        last = first if match[2] is None else int(match[3]) if match[3] else None
        if last is not None and last < first:
            raise ValueError(f"--m: wanted ranges that go up, got {part!r}")
        if max(first, last or 0) > LARGEST_SIZE:
            raise ValueError(f"--m: wanted numbers of at most {LARGEST_SIZE}, got {part!r}")
        ranges.append((first, last))
    return ranges


_ROUTER_VALUES: dict[str, Callable[[str], Any]] = {
    "groups": int,
    "top_groups": int,
    "scale": float,
    "renormalize": {"on": True, "off": False}.__getitem__,
}
"""How the fields of a router are read."""


def router_fields(text: str) -> tuple[dict[str, Any], bool]:
    """Return the fields of the router of a text such as ``sigmoid,groups=8,top_groups=4,scale=2.5,bias``, all but
    ``top_k``, and whether it has a bias.

    Raises:
        ValueError: for any other text.
    """
    scoring, *others = text.split(",")
    try:
        require_scoring(scoring)
    except ValueError as e:
        raise ValueError(f"--router: {e}") from None
    fields: dict[str, Any] = {"scoring": scoring}
    for other in (other for other in others if other != "bias"):
        name, _, value = other.partition("=")
        try:
            fields[name] = _ROUTER_VALUES[name](value)
        except (KeyError, ValueError):
            expected = ", ".join(f"{name}=..." for name in _ROUTER_VALUES)
            close = "" if name in _ROUTER_VALUES else nearest(name, _ROUTER_VALUES)
            got = f"{other!r:.80}{close}"
            raise ValueError(f"--router: wanted a scoring, then any of {expected}, bias, got {got}") from None
    return fields, "bias" in others


_DEVICE = re.compile(r"(cpu|cuda)(:(0|[1-9]\d?))?")
"""A device's name for PyTorch."""


def require_device(name: str, described: bool = False) -> None:
    """Raise ValueError unless ``name`` may be a device's. It need not be there.

    Args:
        described: True if it may be the name of a GPU, too.
    """
    if _DEVICE.fullmatch(name) or (described and is_known(name)):
        return
    if described:
        expected, other = "cpu, cuda, cuda:N or the name of a GPU, such as h200 or rtx-4090", nearest_gpu(name)
    else:
        expected = "cpu, cuda or cuda:N"
        other = "; GPUs by name are for `explain`, `inspect` and `compile`" if is_known(name) else ""
    raise ValueError(f"--device: wanted {expected}, got {name!r}{other}")


def unknown_target(name: str) -> ValueError:
    """Return the error for a GPU to compile for whose name is not known, without all that must be said of it."""
    expected = "a known GPU, such as h200 or 'NVIDIA H200', or --arch and --sms beside the name of another"
    return ValueError(f"--gpu: wanted {expected}, got {name!r}{nearest_gpu(name)}")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print the same as one JSON object, for programs")
