"""This library's kernel for GPUs without Hopper's units, forced; its config as its model ranks them."""

from __future__ import annotations

from bench.peers.w4gemm import W4gemm

PEER = W4gemm("sm80_mixed_gemm", kernel="sm80_mixed_gemm")
