"""A function in two processes of torch.distributed on the CPU (gloo)."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

PROCESSES = 2


def in_two_processes(function: Callable[..., None], *arguments: Any) -> None:
    """Run function(rank, *arguments) in both; raise what one of them raises.

    Both are forked from a process that has imported all and runs no threads: importing in both takes 7 s.
    """
    multiprocessing.set_forkserver_preload(["w4gemm.integrations.transformers", function.__module__])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_joined, (folder, function, arguments), PROCESSES, start_method="forkserver")


def _joined(rank: int, folder: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=PROCESSES)
    function(rank, *arguments)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # gloo's threads may still free tensors, which aborts a process whose Python is being finalized (pytorch#179291)
    os._exit(0)
