"""The producer: weights by bulk copies, x by TMA or, gathered, by cp.async, into the ring of slots."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from w4gemm.kernels.device.groups import weight_of
from w4gemm.kernels.device.pipeline import PipelineState
from w4gemm.kernels.device.ptx import bulk_copy, bulk_copy_multicast, bulk_prefetch, copies_wait, shared_address
from w4gemm.kernels.device.row_gather import RowGather
from w4gemm.kernels.device.scheduler import tile_coordinates
from w4gemm.kernels.sm90_mixed_gemm.roles.work import Work

_EARLY_SLOTS = 1  # of weights, requested before x may be read; with more, the first x would queue up behind them
_PREFETCHED_SLOTS = 2  # of an expert's weights, into L2, before the rows of experts may be read


class Producer(Work):
    row_gather: RowGather

    @cute.jit
    def produce(self, source, weight, tokens, ring, work, rank):
        """source: TMA, x as it sees it and its boxes; or, gathered, x and the indices of its rows. tokens: (m, groups)
        as ``find`` takes them, and the n blocks of an expert."""
        v, c = self.v, self.v.config
        full, empty, s_x, s_weight = ring
        tma, x, box_layout, indices = source
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        m_tiles, n_tiles = work[2], work[3]
        rank_m, rank_n = self.place_in_cluster(rank)
        # those who get the same x, and those who get the same weights
        x_mask = cutlass.Int16(Int32((1 << c.cluster_n) - 1) << (rank_m * c.cluster_n))
        weight_mask = cutlass.Int16(Int32(sum(1 << i * c.cluster_n for i in range(c.cluster_m))) << rank_n)
        cast = (rank_m, weight_mask)
        count, stream = self.pieces(work)
        early = 0
        if const_expr(not v.grouped):
            early = self.load_early(weight, s_weight, full, tokens[0], work, stream, rank_n, cast)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        state = PipelineState.producer()
        for index in cutlass.range(count, unroll=1):
            tile, first_slot, slots = self.piece(index, work, stream)
            m_tile, n_tile = tile_coordinates(tile, m_tiles, n_tiles, self.band, v.short)
            m_tile, n_tile = m_tile * c.cluster_m + rank_m, n_tile * c.cluster_n + rank_n
            expert, token, end = self.find(m_tile, *tokens[:2])
            boxes = self.boxes_of(token, end)
            if const_expr(v.gathered):
                rows = self.row_gather.indices(indices, token, end, warp)
            else:
                x_parts = self.partition(tma, x, (s_x, box_layout), (token, end), rank_n)
            own = weight_of(weight, expert, tokens[2]) if const_expr(v.grouped) else weight
            for i in cutlass.range(slots, unroll=1):
                stage = state.stage
                slot = first_slot + i
                if index > 0 or i >= early:
                    cute.arch.mbarrier_wait(empty + stage, state.phase)
                    if const_expr(not v.gathered) or warp == 0:
                        self.load_weight(own, s_weight, full, n_tile, (slot, stage, boxes), cast)
                if const_expr(v.gathered):
                    target = shared_address(s_x.iterator) + stage * v.x_bytes
                    self.row_gather.copy(x, rows, slot, target, warp)
                    cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                for chunk in cutlass.range_constexpr(0 if v.gathered else self.chunks):
                    for b in cutlass.range_constexpr(v.boxes):
                        if b < boxes:
                            t_s, t_g = x_parts[b]
                            cute.copy(
                                tma,
                                t_g[(None, 0, slot * self.chunks + chunk)],
                                t_s[(None, (stage * self.chunks + chunk) * v.boxes)],
                                tma_bar_ptr=full + stage,
                                mcast_mask=x_mask,
                            )
                state = state.after(v.stages)
        if const_expr(v.gathered):
            copies_wait()
        if const_expr(v.sharers > 1):
            # Stay until the neighbours have consumed all that was sent to this CTA and by it: one round over the whole
            # ring from its oldest slot on. Slots that were never filled let the wait pass.
            for _ in cutlass.range(v.stages, unroll=1):
                cute.arch.mbarrier_wait(empty + state.stage, state.phase)
                state = state.after(v.stages)

    @cute.jit
    def prefetch_first(self, weight, experts, cta):
        """Asks L2 for the first weights of the tile that this CTA starts with if every expert has one token tile. A
        guess will do, since nothing waits for them; without it memory would idle while experts' rows are counted."""
        v, c = self.v, self.v.config
        rank_m, rank_n = self.place_in_cluster(cta % self.cluster)
        n_blocks, k_blocks = weight.shape[0] // experts, weight.shape[1]
        expert, n_tile = tile_coordinates(cta // self.cluster, experts, self.tiles(1, n_blocks)[1], self.band, v.short)
        first = expert * n_blocks + (n_tile * c.cluster_n + rank_n) * v.tile_blocks
        size = cutlass.min(_PREFETCHED_SLOTS * v.blocks, k_blocks) * v.block.bytes
        if rank_m == 0:
            with cute.arch.elect_one():
                for r in cutlass.range_constexpr(v.tile_blocks):
                    row = cutlass.min(first + r, weight.shape[0] - 1)
                    bulk_prefetch(weight.iterator.toint() + Int64(row) * k_blocks * v.block.bytes, size)

    @cute.jit
    def load_early(self, weight, s_weight, full, m, work, stream, rank_n, cast):
        """The weights of the first slots: of how many."""
        c = self.v.config
        tile, first_slot, slots = self.piece(Int32(0), work, stream)
        early = cutlass.min(slots, _EARLY_SLOTS)
        m_tile, n_tile = tile_coordinates(tile, work[2], work[3], self.band, self.v.short)
        m_tile, n_tile = m_tile * c.cluster_m + cast[0], n_tile * c.cluster_n + rank_n
        boxes = self.boxes_of(m_tile * c.tile_m, m)
        for i in cutlass.range(early, unroll=1):
            self.load_weight(weight, s_weight, full, n_tile, (first_slot + i, i, boxes), cast)
        return early

    def boxes_of(self, token, end):
        """Boxes of a tile that hold any token; the others keep what they held, which reaches no stored result."""
        v = self.v
        if v.gathered:
            return 0
        boxes = cutlass.min(cute.ceil_div(end - token, v.box_tokens), v.boxes)
        return cutlass.max(boxes, 0) if const_expr(v.config.cluster_m > 1) else boxes

    def partition(self, tma, tma_x, shared, tokens, share):
        """For each box of the tile of x with the first token and the end ``tokens``: where it goes, by chunk of k of
        the first box, and where it comes from, by (0, chunk of k). shared: (s_x, box_layout)."""
        (s_x, box_layout), (token, end), box = shared, tokens, self.v.box_tokens
        group, cluster = cute.group_modes, cute.make_layout(self.v.config.cluster_n)
        # The last box that is fetched ends at the last token, rounded up to eight: rows past m are slow, those that the
        # box before brings as well are not. By a shift, and uniform, since x waits for it.
        last, parts = cutlass.max(((end - token + 7) >> 3) - box // 8, 0), []
        for b in range(self.v.boxes):
            eights = cute.arch.make_warp_uniform(cutlass.min(b * box // 8, last)) if b > 0 else 0
            s_boxes = cute.make_tensor(s_x.iterator + eights * (8 * self.v.chunk_k), box_layout.outer)
            tokens_on = cute.domain_offset((token + eights * 8, 0), tma_x)
            g_x = cute.local_tile(tokens_on, (box, self.v.chunk_k), (None, None))
            parts.append(cpasync.tma_partition(tma, share, cluster, group(s_boxes, 0, 2), group(g_x, 0, 2)))
        return parts

    @cute.jit
    def load_weight(self, weight, s_weight, full, n_tile, place, cast):
        """A slot's weight blocks, or this CTA's part of them for all that share them. place: (slot of k, stage of the
        ring, boxes of x that will come with it). cast: (place along m in the cluster, mask of those who share)."""
        v = self.v
        slot, stage, boxes = place
        rank_m, mask = cast
        with cute.arch.elect_one():
            barrier = shared_address(full + stage)
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, v.weight_bytes + boxes * (v.x_bytes // v.boxes))
            for r in cutlass.range_constexpr(v.tile_blocks):
                # who owns rows past the last block works on that block again and stores nothing
                row = cutlass.min(n_tile * v.tile_blocks + r, weight.shape[0] - 1)
                for b in cutlass.range_constexpr(v.blocks):
                    # past the last k block: that block again, which meets the zeros that TMA puts past the end of x
                    k_block = slot // 2 if const_expr(v.halves) else slot * v.blocks + b
                    if const_expr(v.step_blocks > 1):
                        k_block = cutlass.min(k_block, weight.shape[1] - 1)
                    source = weight.iterator.toint() + (Int64(row) * weight.shape[1] + k_block) * v.block.bytes
                    target = s_weight + stage * v.weight_bytes + (r * v.blocks + b) * v.part.bytes
                    if const_expr(v.config.cluster_m == 1):
                        self.load_part_of_slot(target, source, slot, barrier, None)
                    else:
                        if r % v.config.cluster_m == rank_m:
                            self.load_part_of_slot(target, source, slot, barrier, mask)

    def load_part_of_slot(self, target, source, slot, barrier, mask):
        """A block, or half of it. mask: of the CTAs that get it, None for this one alone."""
        for copy in self.v.part.copies(half=slot % 2):
            to, start, size = target + copy.target, source + copy.source + copy.offset, Int32(copy.size)
            if mask is None:
                bulk_copy(to, start, size, barrier)
            else:
                bulk_copy_multicast(to, start, size, barrier, mask)
