"""A function in two processes of torch.distributed on the CPU (gloo)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

PROCESSES = 2


def in_two_processes(function: Callable[..., None], *arguments: Any) -> None:
    """Run function(rank, *arguments) in both; raise what one of them raises."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_joined, (port, function, arguments), PROCESSES)


def _joined(rank: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in facts.items()}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    function(rank, *arguments)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # gloo's threads may still free tensors, which aborts a process whose Python is being finalized (pytorch#179291)
    os._exit(0)
