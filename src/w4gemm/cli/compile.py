"""``w4gemm compile``: fill a folder with the compiled kernels that a model needs, on a machine without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from w4gemm.checkpoints import Module
from w4gemm.choice import table
from w4gemm.cli.needs import Use, chosen, helpers_of, lookups_of, one_launches_of, problems_of
from w4gemm.cli.parser import ALL_TOKENS
from w4gemm.cli.problems import embeddings_of, layers_of, parse_layers
from w4gemm.console.devices import device_line
from w4gemm.console.options import unknown_target
from w4gemm.console.progress import counted, progress_bar, say
from w4gemm.console.values import DTYPES, parse_router, parse_tokens
from w4gemm.core import environment, trust
from w4gemm.core.activation import canonical
from w4gemm.core.epilogue import HALVES
from w4gemm.core.errors import UnsupportedError
from w4gemm.core.problem import GPUS, Device, gpu_named
from w4gemm.core.router import Router
from w4gemm.integrations.vllm.models import read_model
from w4gemm.jit import Unit, disk
from w4gemm.jit.pool import CompilePool
from w4gemm.kernels.helpers.experts import MOST_TERMS
from w4gemm.kernels.requirements import missing_to_compile

_ARCH = "sm_90a"
"""The target unless one is named."""


def run(args: argparse.Namespace) -> int:
    if not environment.may_compile():
        raise ValueError("W4GEMM_COMPILE: wanted on, or the variable unset, to compile; got off")
    if reason := missing_to_compile():
        raise UnsupportedError(f"compile {reason}")
    device = target_device(args.arch, args.gpu, args.sms)
    task = _task_of_vllm(args) if args.vllm is not None else _task_of_layers(args, device)
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
            router=_router(args, task),
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
        units |= dict.fromkeys(one_launches_of(layers, tokens, use))
        units |= dict.fromkeys(lookups_of(task.embeddings, use))
    started = time.perf_counter()
    size = fill(args.output, units, args.workers)
    tables = [args.output / table.USER_FILE] if records else []
    for path in tables:  # its records of other layers stay: the folder may hold several models
        table.add_missing(path, records)
    for path in (*disk.stored(), *disk.libraries(), *tables):  # for whoever runs them, who may be another user
        with contextlib.suppress(PermissionError):  # it was there before, and is root's
            path.chmod(0o644)
    seconds = time.perf_counter() - started
    if args.json:
        counts = {"problems": len(needed), "kernels": len(units), "bytes": size, "tuned": len(records)}
        print(json.dumps({"output": str(args.output), "device": device_line(device)} | counts, indent=2))
        return 0
    print(
        f"{args.output}: {counted(len(units), 'kernel')}, {size / 2**20:.1f} MiB, in {seconds:.1f} s; "
        f"{counted(len(records), 'tuned config')}"
    )
    return 0


def _router(args: argparse.Namespace, task: _Task) -> tuple[Router, bool] | None:
    if args.router is None:
        return None
    if not (top_k := args.top_k or task.top_k):
        raise ValueError("--router: wanted --top-k beside it, got none")
    return parse_router(args.router, top_k)


def _say_of_sums(top_k: int) -> None:
    """Say so if no kernel is compiled for the sum over the ``top_k`` experts of a token."""
    if not top_k:
        say("without --top-k the sum over the experts of a token is left out")
    elif top_k > MOST_TERMS:
        say(f"--top-k: PyTorch adds up the results of {top_k} experts; the kernel for it takes at most {MOST_TERMS}")


def target_device(arch: str | None, name: str | None, sms: int | None) -> Device:
    """Return the GPU to compile for.

    Args:
        arch: target of the compiler, a key of ``GPUS``; None for that of the GPU.
        name: name of a GPU as for :func:`gpu_named`. Configs are chosen by its rates. None for the GPU in ``GPUS``.
        sms: number of multiprocessors; None for the GPU's.

    Raises:
        ValueError: if the GPU of that name has another target, where nothing would be loaded, or if it is not known and
            ``arch`` or ``sms`` is None.
    """
    if name is None:
        device = GPUS[arch or _ARCH]
    elif (gpu := gpu_named(name)) is not None:
        device = gpu
        if arch is not None and device.capability != GPUS[arch].capability:
            raise ValueError(f"--arch: wanted the target of {device.name}, or no --arch beside --gpu, got {arch}")
    elif name and arch and sms:
        device = replace(GPUS[arch], name=name, clock=0.0, bandwidth=0.0, operations=0.0)  # 0: those of the name
    else:
        raise unknown_target(name)
    return replace(device, sms=sms or device.sms)


class _Task(NamedTuple):
    """Layers to compile for, and how they are called."""

    layers: list[Module]
    dtypes: tuple[torch.dtype, ...]
    """16-bit dtypes of the activations."""
    m: str
    """Numbers of tokens, as --m says them."""
    act_order: bool = False
    activations: tuple[str, ...] = ()
    top_k: int = 0
    embeddings: Sequence[Module] = ()
    """Those that stay packed."""


def _task_of_layers(args: argparse.Namespace, device: Device) -> _Task:
    if args.tensor_parallel != 1:
        raise ValueError("--tensor-parallel: wanted it with --vllm only; --shapes can say the sizes of one GPU")
    dtype = args.dtype or "bfloat16"
    dtypes = HALVES if dtype == "float8_e4m3fn" else (DTYPES[dtype],)
    return _Task(parse_layers(args, device), dtypes, args.m, embeddings=embeddings_of(args))


def _task_of_vllm(args: argparse.Namespace) -> _Task:
    dtype = DTYPES[args.dtype] if args.dtype else None
    if dtype is not None and dtype not in HALVES:
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
    if any(disk.read(disk.entry_name(unit)) is None for unit in units):
        disk.require_writable(folder)  # before minutes of compiling
    size = 0
    with CompilePool(workers) as pool, progress_bar() as progress:
        for done, (unit, future) in enumerate(zip(units, pool.submit(units), strict=True)):
            progress(done, len(units), "compiling")
            name = disk.entry_name(unit)
            try:
                code = future.result()
            except RuntimeError as e:
                raise UnsupportedError(f"{name} cannot be compiled: {e}") from e
            size += len(code)
            # the child's error, if it could not write the object, comes here again
            if disk.read(name) is None and not disk.store(folder, name, code):
                raise OSError(f"{folder}: another process cleared it meanwhile")
    return size
