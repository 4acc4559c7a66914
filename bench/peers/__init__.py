"""The implementations that are compared: one adapter file each, registered here."""

from __future__ import annotations

from bench.peers import (
    cublas,
    cutlass_fp8,
    cutlass_w4a8,
    deep_gemm,
    humming,
    machete,
    marlin,
    quack,
    torch_int4,
    w4gemm,
)
from bench.peers.base import Peer, Prepared

PEERS: tuple[Peer, ...] = (
    w4gemm.PEER,
    humming.PEER,
    machete.PEER,
    marlin.PEER,
    quack.PEER,
    torch_int4.PEER,
    cutlass_w4a8.PEER,
    cutlass_fp8.PEER,
    deep_gemm.PEER,
    cublas.PEER,
    # our kernel for GPUs before Hopper, with the config that the cost model ranks first
    w4gemm.W4gemm("sm80_mixed_gemm", kernel="sm80_mixed_gemm"),
)
_ON_REQUEST = ("sm80_mixed_gemm",)


def peers_named(text: str) -> tuple[Peer, ...]:
    """The peers of comma-separated names, or ``all`` but the kernel that is slower than another of ours.

    Raises:
        ValueError: for a name that there is not.
    """
    by_name = {peer.name: peer for peer in PEERS}
    names = [name for name in by_name if name not in _ON_REQUEST] if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"impl: wanted all or some of {', '.join(by_name)}, got {', '.join(unknown)}")
    return tuple(by_name[name] for name in dict.fromkeys(names))


__all__ = ["PEERS", "Peer", "Prepared", "peers_named"]
