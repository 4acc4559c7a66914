"""The pipeline between the producer and the consumers of a CTA, and the work tiles that both go through: output tiles
or, under stream-k, k-ranges of them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, const_expr

from w4gemm.kernels.device.expert_tiles import WHOLE, ExpertTileMap, ExpertTiles, Part, TileRows
from w4gemm.kernels.device.scheduler import (
    StreamShare,
    TileCoord,
    m_tiles_per_band,
    stream_share,
    stream_tile,
    tile_coordinates,
)
from w4gemm.kernels.sm90_mixed_gemm.variant import Sm90MixedVariant
from w4gemm.ptx.memory import fence_acquire


class Pipeline(NamedTuple):
    """Shared memory of the pipeline; the arrive counts are in kernel.py."""

    full: cute.Pointer
    """One mbarrier per stage."""
    empty: cute.Pointer
    """One mbarrier per stage."""
    x: cute.Tensor
    """x of all stages, as WGMMA reads it."""
    weights: Int32
    """Address of the weights of all stages."""
    scales: Int32
    """Address of the scales of x of all stages, if each 128 columns have one."""


class SchedulerParams(NamedTuple):
    """Numbers from which a CTA enumerates its work tiles."""

    cluster: Int32
    """Number of the CTA's cluster in the grid."""
    clusters: Int32
    """Clusters of the grid."""
    m_tiles: Int32
    """Tiles of the problem along m, each as large as a cluster's."""
    n_tiles: Int32
    """Tiles of the problem along n, each as large as a cluster's."""
    first_k_slice: Int32
    k_slices: Int32
    """K-slices of an output tile that the CTA multiplies: all or, with split_k, its share."""
    tile: TileCoord | None = None
    """The output tile of a CTA that has one, if it is worked out already."""
    rank: Int32 | None = None
    """Number of the CTA in its cluster, if tiles are chained."""


class WorkTile(NamedTuple):
    """The k-slices first_k_slice .. first_k_slice + k_slices - 1 of an output tile."""

    tile: Int32
    first_k_slice: Int32
    k_slices: Int32


class ClusterCoord(NamedTuple):
    """A CTA's tile among those of its cluster, and the CTAs that it shares loads with: one bit each, by rank."""

    m: Int32 | int
    n: Int32 | int
    x_mask: Int16
    """The CTAs that get the same x."""
    weight_mask: Int16
    """The CTAs that get the same weights."""


class TileScheduler:
    """Enumerates the work tiles of a CTA, and finds the coordinates and rows of an output tile."""

    def __init__(self, variant: Sm90MixedVariant, band_tokens: int = 1024, part: Part = WHOLE):
        config = variant.config
        self.variant, self.part = variant, part
        self.expert_tile_map = ExpertTileMap(config.tile_m, part)
        self.cluster_size = config.cluster_m * config.cluster_n * config.split_k
        self.band = m_tiles_per_band(config.tile_m * config.cluster_m, band_tokens)

    def tiles(self, m: Int32, n_blocks: Int32) -> TileCoord:
        """The number of tiles of the problem along m and n, each as large as a cluster's."""
        config = self.variant.config
        m_tiles = cute.ceil_div(m, config.tile_m * config.cluster_m)
        n_tiles = cute.ceil_div(n_blocks, self.variant.blocks_n * config.cluster_n * self.variant.config.split_tiles)
        return TileCoord(m_tiles, n_tiles)

    def cta_coord_in_cluster(self, rank: Int32) -> ClusterCoord:
        """The coordinates of a CTA; (0, 0) with split_k, where all CTAs of a cluster work on one tile."""
        config = self.variant.config
        m, n = (0, 0) if config.split_k > 1 else (rank // config.cluster_n, rank % config.cluster_n)
        x_mask = Int16(Int32((1 << config.cluster_n) - 1) << (m * config.cluster_n))
        weight_mask = Int16(Int32(sum(1 << i * config.cluster_n for i in range(config.cluster_m))) << n)
        return ClusterCoord(m, n, x_mask, weight_mask)

    def cta_tile(self, tile: Int32, params: SchedulerParams, coord: ClusterCoord) -> TileCoord:
        """The output tile that a CTA computes of its cluster's ``tile``."""
        if params.tile is not None:
            return params.tile
        config, each = self.variant.config, self.variant.config.split_tiles
        if self.variant.chained:
            m_tile, chain = tile_coordinates(
                tile // each, params.m_tiles, params.n_tiles, self.band, self.variant.short
            )
            return TileCoord(m_tile, chain * each + tile % each)
        m_tile, n_tile = tile_coordinates(tile, params.m_tiles, params.n_tiles, self.band, self.variant.short)
        return TileCoord(m_tile * config.cluster_m + coord.m, n_tile * config.cluster_n + coord.n)

    def with_tile(self, params: SchedulerParams) -> SchedulerParams:
        """The same with the output tile, for a CTA that has one."""
        return params._replace(tile=self.cta_tile(params.cluster, params, self.cta_coord_in_cluster(Int32(0))))

    @cute.jit
    def rows(self, m_tile: Int32, m: Int32, expert_tiles: ExpertTiles | None, early: bool = False) -> TileRows:
        """The rows of d of an m tile, and their expert. early: see :meth:`ExpertTileMap.rows_of`."""
        rows = TileRows(Int32(0), m_tile * self.variant.config.tile_m, m)
        if const_expr(self.variant.grouped):
            rows = self.expert_tile_map.find(expert_tiles, m_tile, early)
        return rows

    @cute.jit
    def work_tiles(self, params: SchedulerParams) -> tuple[Int32 | int, StreamShare]:
        """The number of this cluster's work tiles, and its share under stream-k, else zeros. If the grid is not
        persistent the number is the compile-time constant 1, because loop-carried state would take registers."""
        tiles, share = params.m_tiles * params.n_tiles, StreamShare(Int32(0), Int32(0), Int32(0), Int32(0))
        count = 1
        if const_expr(self.variant.stream_k):
            blocks = params.k_slices // self.variant.stages_per_iteration
            share = stream_share(params.cluster, params.clusters, tiles, blocks)
            count = share.work_tiles(blocks)
        elif const_expr(self.variant.persistent):
            count = (tiles - params.cluster + params.clusters - 1) // params.clusters
        elif const_expr(self.variant.chained):
            inner = (params.rank > 0) & (params.rank < self.variant.config.split_tiles)
            count = Int32(1) + Int32(inner)
        return count, share

    @cute.jit
    def acquire(self, count: Int32 | int):
        """Make visible, to a CTA of the second of two launches that has work tiles, what was written before the first
        one waited."""
        if count > 0:
            fence_acquire()

    @cute.jit
    def work_tile(self, index: Int32, params: SchedulerParams, share: StreamShare) -> WorkTile:
        """This cluster's ``index``-th work tile."""
        tile = params.cluster + index * params.clusters
        first_k_slice, k_slices = params.first_k_slice, params.k_slices
        if const_expr(self.variant.stream_k):
            stages = self.variant.stages_per_iteration
            tile, first, stop = stream_tile(index, params.cluster, params.clusters, k_slices // stages, share)
            first_k_slice, k_slices = first * stages, (stop - first) * stages
        if const_expr(self.variant.chained):
            stages, each = self.variant.stages_per_iteration, self.variant.config.split_tiles
            rank, helps = params.rank, self.helps(index, params)
            less = k_slices // stages // (each + 1) * stages
            tile = params.cluster * each + rank - helps
            own = k_slices - (rank + 1) * less
            first_k_slice = cutlass.select_(helps == 1, k_slices - rank * less, Int32(0))
            k_slices = cutlass.select_(helps == 1, rank * less, own)
        return WorkTile(tile, first_k_slice, k_slices)

    def helps(self, index: Int32, params: SchedulerParams) -> Int32:
        """1 if a chained CTA's ``index``-th work tile is the end of the tile before, which its neighbour owns; else
        0."""
        return Int32((index == 0) & (params.rank > 0))

    def of_another(self, work_tile: WorkTile, params: SchedulerParams) -> bool:
        """True if another CTA has the tile's last k-slice, and so owns the tile under stream-k."""
        return work_tile.first_k_slice + work_tile.k_slices < params.k_slices

    def first_sharer(self, work_tile: WorkTile, params: SchedulerParams, share: StreamShare) -> Int32:
        """:meth:`StreamShare.first_sharer` of a tile that this CTA owns."""
        blocks = params.k_slices // self.variant.stages_per_iteration
        return share.first_sharer(work_tile.tile, params.clusters, blocks)

    @cute.jit
    def release(self, pipeline: Pipeline, stage: Int32, cta_rank: Int32):
        """Arrive at the stage's empty barrier, in every CTA that its x or weights came from. Every lane arrives for its
        own reads: one lane for its warp would need a warp barrier first, and measured 1 to 5 % slower where weights are
        decoded."""
        config = self.variant.config
        empty = pipeline.empty + stage
        if const_expr(self.variant.multicast_peers == 1):
            cute.arch.mbarrier_arrive(empty)
        else:
            coord = self.cta_coord_in_cluster(cta_rank)
            for i in cutlass.range_constexpr(config.cluster_n):
                cute.arch.mbarrier_arrive(empty, Int32(coord.m * config.cluster_n + i))
            for i in cutlass.range_constexpr(1, config.cluster_m):
                other = (coord.m + i) % config.cluster_m
                cute.arch.mbarrier_arrive(empty, Int32(other * config.cluster_n + coord.n))
