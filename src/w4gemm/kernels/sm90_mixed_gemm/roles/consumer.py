"""The consumers: a warpgroup's way through its tiles, from the first slot to the stored result."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from w4gemm.kernels.device.epilogue import Epilogue
from w4gemm.kernels.device.groups import cut_off, extras_of, first_rows
from w4gemm.kernels.device.pipeline import PipelineState
from w4gemm.kernels.device.ptx import load_shared_cluster, shared_address, store_shared_f32x4
from w4gemm.kernels.device.scheduler import tile_coordinates
from w4gemm.kernels.device.split_k import Reduction
from w4gemm.kernels.device.stream_k import StreamSum
from w4gemm.kernels.sm90_mixed_gemm.roles.mainloop import MainLoop

_EPILOGUE_BARRIER = 2  # named barriers from here on, one per consumer warpgroup
_CONSUMER_BARRIER = 1
_TURN_BARRIER = 6  # and 7


class Consumer(MainLoop):
    epilogue: Epilogue
    stream_sum: StreamSum

    @cute.jit
    def consume(self, mma, ring, work, rank, out, extras, parked, groups, memory):
        """memory: staging and its boxes, k sets' sums, the decoder's table."""
        v, c = self.v, self.v.config
        staging, s_fold, decode_table = memory
        full, empty, s_x, _ = ring
        m_tiles, n_tiles, slots = work[2], work[3], work[5]
        thread = cute.arch.thread_idx()[0]
        wg, t = cute.arch.make_warp_uniform(thread // 128 % v.row_groups), thread % 128
        k_set, turn = cute.arch.make_warp_uniform(thread // (128 * v.row_groups)), Int32(0)
        if const_expr(v.turns > 1):
            k_set, turn = Int32(0), k_set
        thread = thread % (128 * v.row_groups)
        thr = mma.get_slice(thread)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((c.tile_n, c.tile_m)), Float32)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        x_fragments = self.x_operands(mma, thr, s_x)
        fragment = cute.make_rmem_tensor(thr.partition_shape_A((64 * v.row_groups, 2 * v.chunk_k)), self.dtype)
        packed = cute.make_rmem_tensor((self.code_words + self.groups * v.block.words_per_scale,), Int32)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        cute.arch.griddepcontrol_wait()
        next = PipelineState.consumer()
        rank_m, rank_n = self.place_in_cluster(rank)
        who = (wg, k_set, t, rank)
        operands = (self.by_row_block(acc, flat), fragment, x_fragments[0], packed, decode_table)
        if const_expr(v.decode_table_bytes > 0):  # while the first slots are on their way
            self.decoder.fill_table(decode_table, cute.arch.thread_idx()[0], 128 * v.warpgroups)
            self.consumer_barrier()
        sums = []
        if const_expr(v.scales_on_sums):  # two sets: the sums of a group, and its scales of rows g and g + 8
            shape = thr.partition_shape_C((c.tile_n, c.tile_m // v.token_parts))
            sums = [(cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor((2,), Float32)) for _ in range(2)]
            sums.append(cute.make_rmem_tensor((2 * self.groups,), Float32))  # scales of the chunk that was decoded
            operands = (flat, fragment, x_fragments, packed, decode_table)
        if const_expr(v.turns > 1):
            # A warpgroup must not wait for a slot more than one round ahead, whose parity looks like one that is past:
            # it starts a tile when the other has seen all slots of the tile before.
            next = next.after_several(turn * slots, v.stages)
            if turn == 1:
                cute.arch.barrier_arrive(barrier_id=_TURN_BARRIER, number_of_threads=256)
        count, stream = self.pieces(work)
        for index in cutlass.range(turn, count, v.turns, unroll=1):
            tile, first_slot, slots = self.piece(index, work, stream)
            m_tile, n_tile = tile_coordinates(tile, m_tiles, n_tiles, self.band, v.short)
            m_tile, n_tile = m_tile * c.cluster_m + rank_m, n_tile * c.cluster_n + rank_n
            acc.fill(0.0)
            if const_expr(any(v.prefetches)):
                _, own_extras, place = self.store_place((m_tile, n_tile, wg, t), out, extras, groups)
                for own in self.places(place):
                    self.epilogue.prefetch(own_extras, own, *v.prefetches)
            if const_expr(v.turns > 1):
                cute.arch.barrier(barrier_id=_TURN_BARRIER + turn, number_of_threads=256)
            if slots > 0:
                self.wait_full(full + next.stage, next.phase)
                if const_expr(v.scales_on_sums):
                    self.begin_groups(operands, ring, sums, next.stage, who)
                else:
                    self.load_part(packed, ring, next.stage, 0, who)
            previous = next.stage
            for i in cutlass.range(slots // self.v.slots_per_step, unroll=1):
                for part in cutlass.range_constexpr(self.v.slots_per_step):
                    current, next = next.stage, next.after(v.stages)
                    done = i * self.v.slots_per_step + part
                    state = (current, next.stage, next.phase, previous, done > 0, done + 1 < slots)
                    if const_expr(v.scales_on_sums):
                        self.multiply_groups(mma, ring, operands, sums, state, who)
                    else:
                        self.multiply_slot(mma, ring, operands, state, who, part)
                    previous = current
            if const_expr(v.turns > 1):
                cute.arch.barrier_arrive(barrier_id=_TURN_BARRIER + 1 - turn, number_of_threads=256)
            loaded = None
            if const_expr(v.loads_early):
                own_out, own_extras, place = self.store_place((m_tile, n_tile, wg, t), out, extras, groups)
                loaded = self.epilogue.load(own_extras, place, own_out.shape[0])
            if const_expr(not v.scales_on_sums):
                warpgroup.wait_group(0)
                if slots > 0:
                    self.release(empty, previous, rank)
            if const_expr(not v.loads_early):
                own_out, own_extras, place = self.store_place((m_tile, n_tile, wg, t), out, extras, groups)
            if const_expr(v.k_sets > 1):
                self.fold(flat, shared_address(s_fold), k_set, thread)
            if const_expr(c.split_k > 1):
                self.reduce(flat, place, ring, rank, k_set, thread, own_out, own_extras, staging, wg)
            elif const_expr(v.stream):
                if first_slot > 0:
                    self.stream_sum.park(flat, *parked, work[0], (wg, t), _EPILOGUE_BARRIER + wg)
                else:
                    if slots < work[5]:
                        self.gather(flat, tile, work, stream, parked, (wg, t))
                    self.finish(flat, own_out, own_extras, place, staging, wg)
            elif const_expr(v.k_sets == 1):
                self.finish(flat, own_out, own_extras, place, staging, wg + turn, loaded)
                if const_expr(v.turns > 1):
                    next = next.after_several(slots, v.stages)
            else:
                if k_set == 0:
                    self.finish(flat, own_out, own_extras, place, staging, wg, loaded)
        self.epilogue.drain()

    def store_place(self, tile, out, extras, groups):
        """Where a warpgroup's part of a tile goes: out and extras of its expert, and its first token and feature.
        Grouped, it is found anew when it is needed, since to keep it while the tile is multiplied would take
        registers."""
        m_tile, n_tile, wg, t = tile
        expert, token, end = self.find(m_tile, out.shape[0], groups)
        place = (token, n_tile * self.v.config.tile_n + wg * (64 * self.v.row_blocks), t)
        if self.v.grouped:
            out, extras = first_rows(out, end), extras_of(extras, expert, end)
        return out, extras, place

    def places(self, place):
        """Of each of a warpgroup's row blocks, (first token, first feature, thread)."""
        token, feature, t = place
        return [(token, feature + 64 * r, t) for r in range(self.v.row_blocks)]

    @cute.jit
    def gather(self, flat, tile, work, stream, parked, place):
        """Add what the next CTAs multiplied of this tile."""
        cluster, clusters, slots = work[0], work[1], work[5]
        blocks = slots // self.v.slots_per_step
        other, cut = cluster + 1, stream[1] * blocks
        while other * cut // clusters < (tile + 1) * blocks:
            self.stream_sum.add(flat, *parked, other, place, _EPILOGUE_BARRIER + place[0])
            other += 1

    @cute.jit
    def fold(self, flat, s_fold, k_set, thread):
        """All k sets but the first hand their accumulators to it, through memory that nothing else uses until all have
        come here again: that of the drained pipeline, or, where the next tile is on its way into it, its own."""
        v = self.v
        line = v.row_groups * 128 * 16  # bytes of one block of four accumulators, all threads of a set
        size = cute.size(flat) // 4
        self.consumer_barrier()  # the pipeline is drained, and the last tile's sums have been read
        if k_set > 0:
            for i in cutlass.range_constexpr(size):
                at = s_fold + ((k_set - 1) * size + i) * line + thread * 16
                store_shared_f32x4(at, [flat[4 * i + j] for j in range(4)])
        self.consumer_barrier()
        if k_set == 0:
            for s in cutlass.range_constexpr(v.k_sets - 1):
                for i in cutlass.range_constexpr(size):
                    other = load_shared_cluster(s_fold + (s * size + i) * line + thread * 16)
                    for j in cutlass.range_constexpr(4):
                        flat[4 * i + j] = flat[4 * i + j] + other[j]

    @cute.jit
    def reduce(self, flat, place, ring, rank, k_set, thread, out, extras, staging, wg):
        """Sum over the cluster and store this rank's share of the tokens."""
        v, c = self.v, self.v.config
        reduction = Reduction(c.tile_m, v.stored_tokens // 8, c.split_k, v.row_groups * 128)
        if const_expr(v.k_sets == 1):
            self.consumer_barrier()  # the pipeline is drained
        parked = shared_address(ring[2].iterator) + (v.k_sets - 1) * v.tile_bytes + thread * 16
        if k_set == 0:
            reduction.store_partials(flat, parked)
        self.cluster_barrier()
        if const_expr(v.stored_tokens * c.split_k > c.tile_m):  # the last share reaches past the tile
            end = cutlass.min(place[0] + c.tile_m, out.shape[0])
            out, extras = first_rows(out, end), cut_off(extras, end)
        if k_set == 0:
            first, mine = reduction.sum(flat, parked, rank)
            if mine:
                share = cute.make_tensor(flat.iterator, cute.make_layout(v.stored_tokens // 2))
                self.finish(share, out, extras, (place[0] + first, place[1], place[2]), staging, wg)
        self.cluster_barrier()  # the neighbours have read what this CTA parked

    @cute.jit
    def finish(self, flat, out, extras, place, staging, wg, loaded=None):
        """Store a warpgroup's row blocks. loaded: what the sums of the first meet, if that was asked for before."""
        if const_expr(loaded is None):
            loaded = self.epilogue.load(extras, place, out.shape[0])
        alpha, biases, channels, token_scales = loaded
        features, (address, boxes) = [(biases, channels)], staging
        memory = (address + wg * self.v.staging_bytes, _EPILOGUE_BARRIER + wg, (*boxes, 2 * wg))
        places, size = self.places(place), cute.size(flat) // self.v.row_blocks
        if const_expr(not self.v.quads):  # as quads there are no registers for them yet
            features += [self.epilogue.load_features(extras, own) for own in places[1:]]
        for r in cutlass.range_constexpr(self.v.row_blocks):
            if const_expr(r == len(features)):
                features.append(self.epilogue.load_features(extras, places[r]))
            sums = cute.make_tensor(flat.iterator + r * size, cute.make_layout(size))
            self.epilogue.store(sums, out, extras, places[r], (alpha, *features[r], token_scales), memory)

    @cute.jit
    def consumer_barrier(self):
        cute.arch.barrier(barrier_id=_CONSUMER_BARRIER, number_of_threads=128 * self.v.warpgroups)
