"""``w4gemm compile``: fill a folder with the compiled kernels that a model needs, on a machine without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from w4gemm.choice import store
from w4gemm.choice.records import Record
from w4gemm.cli.needs import Use, chosen, helpers_of, problems_of
from w4gemm.cli.problems import ALL_TOKENS, Layer, add_layer_arguments, layers_of, parse_layers
from w4gemm.console.devices import SIMULATED, device_line
from w4gemm.console.errors import require_folder
from w4gemm.console.options import DTYPES, named_path, parse_tokens, positive
from w4gemm.console.progress import counted, progress_bar, say
from w4gemm.core import environment, trust
from w4gemm.core.activation import canonical
from w4gemm.core.errors import UnsupportedError, nearest
from w4gemm.core.gpu_rates import capability_of, known_names
from w4gemm.core.problem import GPUS, Device
from w4gemm.integrations.vllm.models import read_model
from w4gemm.jit import Unit, disk
from w4gemm.jit.pool import CompilePool
from w4gemm.kernels.row_combine.spec import MOST_TERMS

_ARCH = "sm_90a"
"""The target unless one is named."""
NAME = "compile"
HELP = "compile ahead of time what a model needs, without a GPU"
DESCRIPTION = (
    "Compile what linear, grouped_linear and masked_linear will choose for a model's layers into a folder, with the "
    "small kernels around them and the tuned configs that decided. On the GPU machine set W4GEMM_CACHE_DIR to the "
    "folder, which may be read-only, and W4GEMM_COMPILE=off to make sure that nothing is compiled there. Both machines "
    "need the same versions of w4gemm and of CuTe DSL."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layer_arguments(
        parser,
        vllm="the layers that vLLM makes of a folder quantized by GPTQ, AWQ, AutoRound, compressed-tensors, ModelOpt "
        "(NVFP4) or Quark, or of gpt-oss in MXFP4, some fused: in the dtype of its config.json, unless --dtype says "
        "another, and for any number of tokens",
    )
    parser.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="N", help="with --vllm: GPUs that share each layer"
    )
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=named_path, required=True, help="folder to fill, made if needed"
    )
    parser.add_argument("--workers", type=positive, metavar="N", help="processes (default: one for each processor)")
    _add_gpu_arguments(parser.add_argument_group("the GPU to compile for"))
    _add_call_arguments(parser.add_argument_group("how the layers are called, which decides what is compiled"))


def _add_gpu_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--arch", choices=GPUS, help=f"target of the compiler (default: {_ARCH})")
    group.add_argument(
        "--gpu",
        metavar="NAME",
        help="the GPU's exact name, by which tuned configs are found, or h100 or h200 (default: a GPU of the target, "
        "H200 of sm_90a). A GPU that is not known needs --arch and --sms as well",
    )
    group.add_argument(
        "--sms",
        type=positive,
        metavar="N",
        help="the GPU's number of multiprocessors (default: of that GPU; 132 on an H100 or H200)",
    )


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
        help=f"experts of a token: also the kernel that adds up their results, of at most {MOST_TERMS}",
    )
    group.add_argument("--batch-invariant", action="store_true", help="compile linear(..., batch_invariant=True)")
    group.add_argument(
        "--top",
        type=positive,
        default=1,
        metavar="N",
        help="configs to compile for each product: the chosen one and the N - 1 of least predicted time (default: "
        "%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    if not environment.may_compile():
        raise ValueError("W4GEMM_COMPILE: wanted on, or the variable unset, to compile; got off")
    require_folder("--output", args.output)
    device = target_device(args.arch, args.gpu, args.sms)
    task = _task_of_vllm(args) if args.vllm is not None else _task_of_layers(args)
    layers, tokens = task.layers, parse_tokens(task.m)
    uses = [
        Use(
            device,
            dtype,
            fp8=args.activations == "fp8" or args.dtype == "float8_e4m3fn",
            epilogue_activations=tuple(canonical(name) or "" for name in (*args.activation, *task.activations)),
            residual=args.residual,
            expert_scale=args.expert_scale,
            act_order=args.act_order or task.act_order,
            top_k=args.top_k or task.top_k,
            batch_invariant=args.batch_invariant,
            fused=args.vllm is not None,
        )
        for dtype in task.dtypes
    ]
    needed = [problem for use in uses for layer in layers for problem in problems_of(layer, tokens, use)]
    say(f"{device_line(device)}; {counted(len(needed), 'problem')}")
    if any(layer.experts for layer in layers):
        _say_of_sums(args.top_k or task.top_k)
    elif args.top_k:
        raise ValueError(f"--top-k: wanted only beside layers of experts, got {args.top_k} without one")
    elif args.expert_scale:
        raise ValueError("--expert-scale: wanted only beside layers of experts, got it without one")
    units, records = chosen(needed, args.top)
    for use in uses:
        units |= dict.fromkeys(unit for layer in layers for unit in helpers_of(layer, use))
    started = time.perf_counter()
    size = fill(args.output, units, args.workers)
    if records:
        _add_records(args.output / store.USER_FILE, records)
    for path in (*disk.stored(), *disk.libraries()):  # for whoever runs them, who may be another user
        with contextlib.suppress(PermissionError):  # it was there before, and is root's
            path.chmod(0o644)
    seconds = time.perf_counter() - started
    print(
        f"{args.output}: {counted(len(units), 'kernel')}, {size / 2**20:.1f} MiB, in {seconds:.1f} s; "
        f"{counted(len(records), 'tuned config')}"
    )
    return 0


def _add_records(path: Path, records: list[Record]) -> None:
    """Add tuned configs to the folder's table. Its records of other layers stay, because the folder may hold several
    models, or be the cache folder itself."""
    store.add_missing(path, records)
    with contextlib.suppress(PermissionError):  # it was there before, and is root's
        path.chmod(0o644)


def _say_of_sums(top_k: int) -> None:
    """Say so if no kernel is compiled for the sum over the ``top_k`` experts of a token."""
    if not top_k:
        say("without --top-k the sum over the experts of a token is left out")
    elif top_k > MOST_TERMS:
        say(f"--top-k: PyTorch adds up the results of {top_k} experts; the kernel for it takes at most {MOST_TERMS}")


def target_device(arch: str | None, name: str | None, sms: int | None) -> Device:
    """Return the GPU to compile for.

    Args:
        arch: target of the compiler, a key of ``GPUS``; None for sm_90a.
        name: name of a GPU of that target, or h100 or h200. Configs are chosen by its rates. None for the GPU in
            ``GPUS``.
        sms: number of multiprocessors; None for the number in ``GPUS``.

    Raises:
        ValueError: if the GPU of that name has another target, where nothing would be loaded, or if it is not known and
            ``arch`` or ``sms`` is None.
    """
    device = GPUS[arch or _ARCH]
    if name is not None:
        if simulated := SIMULATED.get(name.lower()):  # measured choices are found by the exact name
            name = simulated.name
        capability = capability_of(name)
        if capability is None and not (name and arch and sms):
            close = nearest(re.sub("nvidia |geforce ", "", name, flags=re.IGNORECASE), known_names())
            expected = "a known GPU, such as 'NVIDIA H200', or --arch and --sms beside the name of another"
            raise ValueError(f"--gpu: wanted {expected}, got {name!r}{close}")
        if capability not in (None, device.capability):
            other = next((f"--arch {a}" for a, gpu in GPUS.items() if gpu.capability == capability), "no --arch")
            raise ValueError(
                f"--gpu: wanted the name of a GPU of --arch {arch or _ARCH}, such as {device.name!r}, got {name!r}, "
                f"for which {other} compiles"
            )
        device = replace(device, name=name, clock=0.0, bandwidth=0.0, operations=0.0)  # 0: those of the name
    return replace(device, sms=sms or device.sms)


class _Task(NamedTuple):
    """Layers to compile for, and how they are called."""

    layers: list[Layer]
    dtypes: tuple[torch.dtype, ...]
    """16-bit dtypes of the activations."""
    m: str
    """Numbers of tokens, as --m says them."""
    act_order: bool = False
    activations: tuple[str, ...] = ()
    top_k: int = 0


def _task_of_layers(args: argparse.Namespace) -> _Task:
    if args.tensor_parallel != 1:
        raise ValueError("--tensor-parallel: wanted it with --vllm only; --shapes can say the sizes of one GPU")
    dtype = args.dtype or "bfloat16"
    return _Task(parse_layers(args), _HALVES if dtype == "float8_e4m3fn" else (DTYPES[dtype],), args.m)


def _task_of_vllm(args: argparse.Namespace) -> _Task:
    dtype = DTYPES[args.dtype] if args.dtype else None
    if dtype is not None and dtype not in _HALVES:
        raise ValueError(f"--dtype: wanted float16 or bfloat16 with --vllm, got {args.dtype}")
    model = read_model(args.vllm, args.tensor_parallel, dtype)
    m = "1.." if args.m == ALL_TOKENS else args.m  # LLM(...) takes up to 16384 tokens a step
    activations = (model.activation,) if model.activation else ()
    return _Task(layers_of(model.layers), (model.dtype,), m, model.act_order, activations, model.top_k)


def fill(folder: Path, units: Collection[Unit], workers: int | None = None) -> int:
    """Compile units into a folder, which becomes the cache folder of this process; return their bytes.

    Raises:
        OSError: if they cannot be stored, or if others could change what is in the folder.
        UnsupportedError: if the compiler fails.
    """
    environment.set_cache_dir(folder)
    trust.make_folder(folder, 0o755)
    size = missing = 0
    with CompilePool(workers) as pool, progress_bar() as progress:
        for done, (unit, future) in enumerate(zip(units, pool.submit(units), strict=True)):
            progress(done, len(units), "compiling")
            name = disk.entry_name(unit)
            try:
                code = future.result()
            except RuntimeError as e:
                raise UnsupportedError(f"{name} cannot be compiled: {e}") from e
            size += len(code)
            # only this process logs why an object cannot be written
            missing += disk.read(name) is None and not disk.write(name, code)
    if missing:
        raise OSError(f"{folder}: {missing} of {counted(len(units), 'kernel')} could not be stored")
    return size


_HALVES = (torch.float16, torch.bfloat16)
