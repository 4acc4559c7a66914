"""CUDA graphs are captured one at a time, and other threads may go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()


@contextmanager
def capturing() -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what this thread launches in the block; yields the graph.

    Other threads may launch, allocate and wait for their own streams: by default CUDA makes that an error for them and
    ends the capture ("global" mode). Captures wait for each other, because each begins with a wait for the whole GPU,
    which CUDA allows no thread while another captures.
    """
    graph = torch.cuda.CUDAGraph()
    with _lock, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        yield graph
