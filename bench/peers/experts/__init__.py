"""Implementations of products of several experts, for bench.grouped: one adapter file each, registered here."""

from __future__ import annotations

from bench.peers.experts import cutlass_w4a8, humming, marlin, triton_kernels
from bench.peers.experts.base import Experts, ExpertsPeer, Prepared, Run

PEERS: tuple[ExpertsPeer, ...] = tuple(m.PEER for m in (humming, marlin, cutlass_w4a8, triton_kernels))


__all__ = ["PEERS", "Experts", "ExpertsPeer", "Prepared", "Run"]
