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
from w4gemm.config import GemmConfig
from w4gemm.console.devices import device_line
from w4gemm.console.options import DTYPES, parse_tokens, positive
from w4gemm.console.progress import progress_bar, say
from w4gemm.errors import UnsupportedError
from w4gemm.jit import disk
from w4gemm.jit.pool import CompilePool, Job
from w4gemm.kernels import kernel_named
from w4gemm.kernels.activation_quantize.spec import ActivationQuantize
from w4gemm.kernels.base import Compilable
from w4gemm.kernels.column_gather.spec import ColumnGather
from w4gemm.problem import GPUS, H200, GemmProblem

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
    jobs, records = choices(wanted, args.top)
    helpers: list[tuple[Compilable, GemmProblem]] = []
    # elsewhere, and columns of fp8, PyTorch gathers
    if args.act_order and device.capability == H200.capability and dtype != torch.float8_e4m3fn:
        helpers += [(ColumnGather(), problem) for problem in wanted]
    if dtype == torch.float8_e4m3fn:  # what linear does to 16-bit x
        helpers += [(kernel, replace(p, dtype=d)) for p in wanted for kernel in quantizers(p) for d in _HALVES]
    for kernel, problem in helpers:
        jobs[kernel.name, kernel.compile_key(problem, _NO_CONFIG)] = (kernel, problem, _NO_CONFIG)
    environment.set_cache_dir(args.output)
    trust.make_folder(args.output, 0o755)
    started = time.perf_counter()
    size = 0
    with CompilePool(args.workers) as pool, progress_bar() as progress:
        for done, future in enumerate(pool.submit(jobs.values())):
            progress(done, len(jobs), "compiling")
            size += len(future.result() or b"")
    if records:
        store.replace_table(args.output / store.USER_FILE, records)
    for path in disk.stored():  # for whoever runs them, who may be another user
        with contextlib.suppress(PermissionError):  # it was there before, and is root's
            path.chmod(0o644)
    seconds = time.perf_counter() - started
    print(
        f"{args.output}: {len(jobs)} kernels, {size / 2**20:.1f} MiB, in {seconds:.1f} s; {len(records)} tuned configs"
    )
    return 0


_NO_CONFIG = GemmConfig(1, 1, 1)
_HALVES = (torch.float16, torch.bfloat16)


def quantizers(problem: GemmProblem) -> list[ActivationQuantize]:
    """What quantizes x of this many columns, where a kernel does."""
    kernel = ActivationQuantize("", wide=problem.k % 8 == 0)
    return [kernel] if kernel.takes(problem.k, problem.device.shared_memory) else []


def choices(wanted: Iterable[GemmProblem], top: int) -> tuple[dict[object, Job], list[store.Record]]:
    """What to compile, each object once, and the user's records that decided.

    Raises:
        UnsupportedError: if nothing runs one of the problems.
    """
    jobs: dict[object, Job] = {}
    records = []
    for problem in wanted:
        found = choice.explain(problem)
        if found.chosen is None:
            raise UnsupportedError(str(found))
        for name, config in dict.fromkeys((found.chosen, *((name, c) for _, name, c in found.ranking[: top - 1]))):
            kernel = kernel_named(name)
            jobs[name, kernel.compile_key(problem, config)] = (kernel, problem, config)
        decided = choice.recorded(problem)
        if decided is not None and decided[0] == "tuned":
            records.append(decided[1])
    return jobs, records
