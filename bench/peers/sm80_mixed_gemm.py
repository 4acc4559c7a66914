"""This library's kernel for GPUs before Hopper, forced, with the config that its model ranks first."""

from __future__ import annotations

from bench.peers.w4gemm import W4gemm

PEER = W4gemm("sm80_mixed_gemm", kernel="sm80_mixed_gemm")
