"""``w4gemm convert``: a checkpoint as a folder that w4gemm, or any reader of compressed-tensors, loads."""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path

from w4gemm.checkpoints import Checkpoint, open_checkpoint
from w4gemm.checkpoints.compressed_tensors_writer import CompressedTensorsWriter, transformers_refusal
from w4gemm.checkpoints.dense import DenseCheckpoint
from w4gemm.checkpoints.hugging_face import read_config, stated_dtype
from w4gemm.checkpoints.w4gemm import OwnWriter
from w4gemm.checkpoints.writing import WeightWriter, one_of_each, refusal, write_folder
from w4gemm.console.devices import choose_device, use_idle_cores
from w4gemm.console.progress import counted, progress_bar, progress_line, say
from w4gemm.console.values import DTYPES

MIB = 2**20
WRITERS: dict[str, WeightWriter] = {writer.name: writer for writer in (OwnWriter(), CompressedTensorsWriter())}


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    with progress_line() as line:
        line(0, 0, "reading the model")
        whole = open_checkpoint(args.path, args.format)
    how = ""
    if isinstance(whole, DenseCheckpoint):
        whole.search, (whole.device, _) = args.search, choose_device(args.device)
        use_idle_cores(whole.device)
        how = "search" if args.search else "nearest"
    elif args.format or args.search:
        raise ValueError(f"--format, --search: {args.path} is quantized already, and keeps its formats")
    elif args.device is not None:
        choose_device(args.device)  # nothing runs there, but a wrong name is a mistake all the same
    writer, why = _writer_of(whole) if args.to is None else (WRITERS[args.to], "")
    checkpoint = one_of_each(whole, writer)
    if not checkpoint.modules:
        raise ValueError(f"PATH: {args.path} holds no packed modules, and none that could be quantized")
    if not isinstance(whole, DenseCheckpoint) and importlib.util.find_spec("transformers"):
        from w4gemm.integrations.transformers.loading import require_whole

        require_whole(whole)
    unread = "" if isinstance(writer, OwnWriter) else transformers_refusal(checkpoint)
    dtype = DTYPES[args.dtype or _dtype_of(checkpoint.path)]
    with progress_bar() as progress:
        resumed = write_folder(
            checkpoint,
            args.output,
            writer,
            dtype=dtype,
            convert_floats=args.dtype is not None,
            shard_bytes=args.shard_size * MIB,
            how=how,
            progress=progress,
        )
    if resumed:
        say(f"there already: {counted(resumed, 'file')}")
    size = sum(file.stat().st_size for file in args.output.glob("*.safetensors"))
    seconds = time.perf_counter() - started
    if args.json:
        facts = {"output": str(args.output), "kind": writer.name, "why": why, "modules": len(checkpoint.modules)}
        facts |= {"dense_tensors": len(checkpoint.tensors), "bytes": size, "seconds": seconds}
        print(json.dumps(facts, indent=2))
        return 0
    say(
        f"{args.output}: a {writer.name} folder, {counted(len(checkpoint.modules), 'quantized module')}, "
        f"{counted(len(checkpoint.tensors), 'dense tensor')}, {size / MIB:.1f} MiB, in {seconds:.1f} s"
    )
    if dense := [name for name in whole.modules if name not in checkpoint.modules]:
        say(f"stays dense, like the tensor that it shares: {', '.join(dense)}")
    if why:
        say(f"only w4gemm reads it: {why}")
    elif unread:
        say(f"transformers reads it with w4gemm alone: without, {unread}")
    return 0


def _writer_of(checkpoint: Checkpoint) -> tuple[WeightWriter, str]:
    """Return compressed-tensors' writer if it holds every module bit for bit, else our own and why."""
    writer = CompressedTensorsWriter()
    why = refusal(one_of_each(checkpoint, writer), writer).partition("; --to")[0]
    return (OwnWriter(), why) if why else (writer, "")


def _dtype_of(path: Path) -> str:
    """Name of the dtype that a folder's config.json says its model has."""
    try:
        return stated_dtype(read_config(path))
    except (FileNotFoundError, NotADirectoryError):
        return "bfloat16"
