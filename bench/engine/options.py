"""Options of ``python -m bench.engine``, and the models and formats that they name."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bench.engine.implementations import DEFAULT, KNOWN, OURS
from bench.engine.launch import RESULTS
from bench.engine.models import MODELS, Model, cut, model_named, tiny
from bench.engine.packing import Packing

from w4gemm.console.options import positive

_DESCRIPTION = """\
Write checkpoints of random numbers in the shapes of published models, and time vLLM serving each with several
implementations of its 4-bit layers, one after the other. Needs vLLM and a GPU."""
_EXAMPLES = """examples:
  python -m bench.engine --model llama-3-8b --impl default w4gemm --batch 1 8 64
  python -m bench.engine --model qwen3-30b-a3b=ct-int4-g128-fp8 mixtral-8x7b=gptq-int4-g128 --layers 2 --no-compile
  python -m bench.engine --serve --model llama-3-8b --impl default w4gemm --batch 8 64
  python -m bench.engine --tiny --eager --batch 2 --prefill 0        a short trial of an installation
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m bench.engine",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_served(p.add_argument_group("what is served"))
    _add_measured(p.add_argument_group("what is measured"))
    _add_engine(p.add_argument_group("how engines run"))
    _add_limits(p.add_argument_group("limits and files"))
    return p


def add_models(group: argparse._ActionsContainer) -> None:
    """Add the options that :func:`pairs_of` reads."""
    group.add_argument(
        "--model",
        nargs="+",
        default=["llama-3-8b"],
        metavar="NAME[=FORMAT]",
        help=f"models, of {', '.join(MODELS)}; with a format of its own or those of --format (default: llama-3-8b)",
    )
    group.add_argument(
        "--format",
        nargs="+",
        default=["gptq-int4-g128"],
        help="formats, such as gptq-int4-g128, awq-int4-g64, ct-int4-g128-fp8 (W4A8), ct-nvfp4; an unknown one is "
        "answered with their list (default: gptq-int4-g128)",
    )
    group.add_argument("--layers", type=int, default=0, metavar="N", help="only the first N layers of each model")
    group.add_argument("--tiny", action="store_true", help="two small layers of each model, for trials")


def _add_served(group: argparse._ArgumentGroup) -> None:
    add_models(group)
    group.add_argument(
        "--impl",
        nargs="+",
        default=[DEFAULT, OURS, "marlin", "humming"],
        help=f"implementations: {DEFAULT}, what vLLM chooses without w4gemm, or one of {', '.join(KNOWN)}; "
        f"machete+marlin: the first for linear layers, the second for experts (default: {DEFAULT} {OURS} marlin "
        "humming)",
    )


def _add_measured(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch", nargs="+", type=int, default=[1, 8, 64, 256], metavar="N", help="requests at a time (1 8 64 256)"
    )
    group.add_argument("--tokens-in", type=int, default=128, metavar="N", help="of each request (%(default)s)")
    group.add_argument("--tokens-out", type=int, default=128, metavar="N", help="of each request (%(default)s)")
    group.add_argument(
        "--prefill",
        type=int,
        default=8192,
        metavar="N",
        help="tokens of a prompt timed alone; 0: none (%(default)s)",
    )
    group.add_argument(
        "--repeat",
        type=positive,
        default=3,
        metavar="N",
        help="times a point is measured, besides the two runs that end its warm-up; more if they differ (%(default)s)",
    )
    group.add_argument("--serve", action="store_true", help="vllm serve under load, in place of LLM.generate")
    group.add_argument("--in-order", action="store_true", help="run --impl as given, not in mixed order")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--no-compile", action="store_true", help="CUDA graphs of decode steps alone: starts sooner")
    group.add_argument("--eager", action="store_true", help="neither compilation nor CUDA graphs")
    group.add_argument("--gpus", type=int, default=1, metavar="N", help="tensor parallel size (%(default)s)")
    group.add_argument(
        "--expert-parallel", action="store_true", help="each of --gpus has some experts whole, not a part of each"
    )
    group.add_argument(
        "--rebalance",
        type=int,
        default=0,
        metavar="N",
        help="with --expert-parallel: vLLM moves experts between GPUs (EPLB) every N steps (default: it does not)",
    )
    group.add_argument("--memory", type=float, default=0.85, metavar="PART", help="of a GPU's for vLLM (%(default)s)")
    group.add_argument("--dtype", default="bfloat16", help="of activations (%(default)s)")
    group.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="further arguments of vllm.LLM")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--seconds", type=float, default=300, metavar="S", help="limit of each engine (%(default)s)")
    group.add_argument(
        "--budget", type=float, default=1e9, metavar="S", help="start no further engine after so many seconds in all"
    )
    group.add_argument("--turn", type=Path, metavar="FILE", help="locked while there is load on a server")
    group.add_argument("--work", type=Path, metavar="DIR", help="models and caches, kept (default: a temporary folder)")
    group.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="rows (bench/results/engine.jsonl)")
    group.add_argument("--logs", type=Path, metavar="DIR", help="what engines print, and profiles")


def pairs_of(text: str, packings: Sequence[Packing], args: argparse.Namespace) -> list[tuple[Model, Packing]]:
    """Return what ``text``, a model's name or name=format, is to be served as; the formats of a name are ``packings``.

    Raises:
        ValueError: for a name or format that there is not, or a model that is not published in it.
    """
    name, _, own = text.partition("=")
    model = model_named(name)
    model = tiny(model) if args.tiny else model
    model = cut(model, args.layers) if args.layers else model
    return formats_of(model, [Packing.parse(own)] if own else packings)


def formats_of(model: Model, packings: Sequence[Packing]) -> list[tuple[Model, Packing]]:
    """Return a model with each of the formats that it is published in.

    Raises:
        ValueError: if there is none.
    """
    reasons = {packing: packing.refusal(model) for packing in packings}
    pairs = [(model, packing) for packing, reason in reasons.items() if not reason]
    if not pairs:
        raise ValueError("; ".join(reasons.values()))
    return pairs
