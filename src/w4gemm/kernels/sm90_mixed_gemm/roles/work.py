"""Which pieces of work a CTA has: tiles of d, or parts of their k."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, const_expr

from w4gemm.kernels.device.groups import Groups
from w4gemm.kernels.device.scheduler import stream_pieces, stream_segment, stream_share
from w4gemm.kernels.sm90_mixed_gemm.variant import Variant

_TOKENS_PER_BAND = 1024  # of the tile order: x and weights then take about equal room in L2


class Work:
    """What producers and consumers agree on without a word. Their methods are given

    work    (cluster, clusters of the grid, m tiles, n tiles, first slot of k, slots of k), of a CTA
    ring    the full and the empty barriers, x's part of the slots as WGMMA sees it, the address of the weights' part
    """

    v: Variant
    experts: Groups
    cluster: int
    """CTAs."""
    chunks: int
    """Steps of 128 bytes of x along k in one slot."""

    def tiles(self, m, n_blocks):
        """(tiles along m, along n) of the problem, each as large as a cluster."""
        c = self.v.config
        return cute.ceil_div(m, c.tile_m * c.cluster_m), cute.ceil_div(n_blocks, self.v.tile_blocks * c.cluster_n)

    def place_in_cluster(self, rank):
        """(along m, along n) of a CTA's tile among those of its cluster; (0, 0) where all work on one."""
        c = self.v.config
        return (0, 0) if c.split_k > 1 else (rank // c.cluster_n, rank % c.cluster_n)

    @cute.jit
    def cluster_barrier(self):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @property
    def band(self) -> int:
        return max(1, _TOKENS_PER_BAND // (self.v.config.tile_m * self.v.config.cluster_m))

    @cute.jit
    def find(self, m_tile, m, groups):
        """(expert, first token, end of the tokens that are stored) of a token tile."""
        expert, token, end = Int32(0), m_tile * self.v.config.tile_m, m
        if const_expr(self.v.grouped):
            expert, token, end = self.experts.find(*groups, m_tile)
        return expert, token, end

    @cute.jit
    def pieces(self, work):
        """How many pieces of work this cluster has: tiles, or parts of them; and what ``piece`` needs besides. One, a
        constant, where the grid has a cluster a tile, since what a loop needs to go on would take registers."""
        cluster, clusters, m_tiles, n_tiles, _, slots = work
        tiles, stream = m_tiles * n_tiles, (Int32(0), Int32(0), Int32(0), Int32(0))
        count = 1
        if const_expr(self.v.stream):
            blocks = slots // self.v.slots_per_step
            stream = stream_share(cluster, clusters, tiles, blocks)
            count = stream[0] + stream_pieces(stream[2], stream[3], blocks)
        elif const_expr(self.v.persistent):
            count = (tiles - cluster + clusters - 1) // clusters
        return count, stream

    @cute.jit
    def piece(self, index, work, stream):
        """(tile, first slot of k, slots) of this cluster's piece of work number ``index``."""
        cluster, clusters, _, _, first_slot, slots = work
        tile = cluster + index * clusters
        if const_expr(self.v.stream):
            blocks = slots // self.v.slots_per_step
            tile, first, stop = stream_segment(index, cluster, clusters, blocks, stream)
            first_slot, slots = first * self.v.slots_per_step, (stop - first) * self.v.slots_per_step
        return tile, first_slot, slots
