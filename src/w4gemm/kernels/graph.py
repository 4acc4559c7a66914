"""CUDA graphs are captured by one thread at a time, and other threads may go on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

exclusive = threading.RLock()
"""Held by the thread that captures a graph. Also to be held where a graph is deleted: PyTorch waits for the whole GPU
then, as it does before a capture, and CUDA lets no thread do so while another captures."""


@contextmanager
def capturing() -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what this thread launches in the block; yields the graph.

    Other threads may launch, allocate and wait for their own streams: by default CUDA makes that an error for them and
    ends the capture ("global" mode). What they still may not do meanwhile is wait for the whole GPU, or draw from
    PyTorch's own CUDA generator, which every capture of PyTorch takes over.
    """
    graph = torch.cuda.CUDAGraph()
    with exclusive, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        yield graph
