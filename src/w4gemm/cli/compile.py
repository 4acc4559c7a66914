"""``w4gemm compile``: fill a folder with the compiled kernels that a model needs, on a machine without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from w4gemm import choice, environment, trust
from w4gemm.choice import store
from w4gemm.cli.problems import add_layer_arguments, parse_layers, problems
from w4gemm.console.devices import device_line
from w4gemm.console.options import DTYPES, parse_tokens, positive
from w4gemm.console.progress import progress_bar, say
from w4gemm.errors import UnsupportedError
from w4gemm.jit import Unit, disk
from w4gemm.jit.pool import CompilePool
from w4gemm.kernels import HELPERS, kernel_named
from w4gemm.kernels.helper import LayerFacts
from w4gemm.problem import GPUS, GemmProblem

NAME = "compile"
HELP = "compile ahead of time what a model needs, without a GPU"
DESCRIPTION = (
    "Compile what linear will choose for a model's layers into a folder, with the tuned configs that decided. On the "
    "GPU machine set W4GEMM_CACHE_DIR to the folder, which may be read-only, and W4GEMM_COMPILE=off to make sure that "
    "nothing is compiled there. Both machines need the same versions of w4gemm and of CuTe DSL."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layer_arguments(parser)
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="the folder, made if needed")
    parser.add_argument("--arch", choices=GPUS, default="sm_90a", help="(default: %(default)s)")
    parser.add_argument(
        "--gpu", metavar="NAME", help="its exact name, by which tuned configs are found (default: one of the target's)"
    )
    parser.add_argument(
        "--sms",
        type=positive,
        metavar="N",
        help="its multiprocessors (default: that GPU's; 132 on an H100 or H200)",
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float8_e4m3fn"), default="bfloat16", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--top", type=positive, default=1, metavar="N", help="also the N best guesses (default: %(default)s)"
    )
    parser.add_argument("--act-order", action="store_true", help="also the gather of weights in act-order")
    parser.add_argument("--batch-invariant", action="store_true", help="for linear(..., batch_invariant=True)")
    parser.add_argument("--workers", type=positive, metavar="N", help="processes (default: one a processor)")


def run(args: argparse.Namespace) -> int:
    device = GPUS[args.arch]
    device = replace(device, name=args.gpu or device.name, sms=args.sms or device.sms)
    layers, dtype = parse_layers(args), DTYPES[args.dtype]
    wanted = problems(layers, parse_tokens(args.m), device, dtype, args.batch_invariant)
    say(f"{device_line(device)}; {len(wanted)} problems")
    units, records = choices(wanted, args.top)
    fp8 = dtype == torch.float8_e4m3fn
    for half in _HALVES if fp8 else (dtype,):
        for layer in layers:
            facts = LayerFacts(layer.k, half, fp8, args.act_order)
            units |= {helper.unit(): None for kind in HELPERS for helper in kind.needed(device, facts)}
    environment.set_cache_dir(args.output)
    trust.make_folder(args.output, 0o755)
    started = time.perf_counter()
    size = 0
    with CompilePool(args.workers) as pool, progress_bar() as progress:
        for done, future in enumerate(pool.submit(units)):
            progress(done, len(units), "compiling")
            size += len(future.result())
    if records:
        store.replace_table(args.output / store.USER_FILE, records)
    for path in disk.stored():  # for whoever runs them, who may be another user
        with contextlib.suppress(PermissionError):  # it was there before, and is root's
            path.chmod(0o644)
    seconds = time.perf_counter() - started
    print(
        f"{args.output}: {len(units)} kernels, {size / 2**20:.1f} MiB, in {seconds:.1f} s; {len(records)} tuned configs"
    )
    return 0


_HALVES = (torch.float16, torch.bfloat16)


def choices(wanted: Iterable[GemmProblem], top: int) -> tuple[dict[Unit, None], list[store.Record]]:
    """Return the units to compile, each once, and the user's records that decided.

    Raises:
        UnsupportedError: if nothing runs one of the problems.
    """
    units: dict[Unit, None] = {}
    records = []
    for problem in wanted:
        found = choice.explain(problem)
        if found.chosen is None:
            raise UnsupportedError(str(found))
        for name, config in dict.fromkeys((found.chosen, *((name, c) for _, name, c in found.ranking[: top - 1]))):
            if (unit := kernel_named(name).unit(found.problem, config)) is not None:
                units[unit] = None
        decided = choice.recorded(problem)
        if decided is not None and decided[0] == "tuned":
            records.append(decided[1])
    return units, records
