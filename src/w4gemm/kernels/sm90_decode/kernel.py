"""d.T (n, m) = w (n, k) @ x.T (k, m) on Hopper for few tokens: bound by the bytes of w, so built around their stream.

mma.sync m16n8k16 with the weight as A, decoded from 4 bits in registers, and x as B: eight tokens a matrix
instruction. The transpose of d is computed; only this file knows.

Every warp works alone: warp i of W takes the k blocks (128 columns) i, i + W, ... of a tile of tile_n features, and has
a ring of its own for them, filled by the warp itself:

    slot    weights  one bulk copy per 64 rows (three per part of 64 rows): codes, scales, zero points
            x        two TMA boxes of 64 columns x tile_m tokens, or as many as there are, 128-byte swizzle
    full    an mbarrier per slot: 1 arrival (expect_tx) and the slot's bytes. There is no empty barrier: the warp that
            refills a slot is the one that has read it

    wait full -> words and x fragments into registers -> refill the slot -> decode and multiply -> scale and add up

The codes are multiplied as exact integers u - z; a group's products meet its scale in float32 (acc += s * sum), so
scales of either dtype are exact too. A float zero point needs the sum of x over the group: one more matrix instruction
with A = 1.

Two schedules: ``coop``, one CTA a multiprocessor, and ``pingpong``, two, so that one streams while the other sums up.

At the end of a tile the warps' accumulators meet in shared memory and are summed in a fixed order: over the warps, and
with split_k over the CTAs of the cluster through distributed shared memory. The rings run on meanwhile: the grid is
persistent, and a warp has already requested its first blocks of the next tile.

Programmatic dependent launch: weights are requested before ``griddepcontrol.wait``, see sm90_mixed_gemm/kernel.py, as
is what grouped means. Gathered, a warp copies its rows of x by cp.async (device/row_gather.py), whose 32 arrivals at
the full barrier join the one; ldmatrix needs no fence before it reads them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from w4gemm.kernels.device.decode import Decoder
from w4gemm.kernels.device.formula import Formula
from w4gemm.kernels.device.groups import Groups, extras_of, first_rows, most_tiles, weight_of
from w4gemm.kernels.device.ptx import (
    bulk_copy,
    cluster_address,
    load_matrix,
    load_shared,
    load_shared_cluster,
    mma_sync,
    shared_address,
    store_shared_f32,
    store_shared_f32x4,
)
from w4gemm.kernels.device.row_gather import RowGather
from w4gemm.kernels.device.scheduler import tile_coordinates
from w4gemm.kernels.gpu import MAX_EXPERTS
from w4gemm.kernels.sm90_decode.variant import Variant
from w4gemm.packing.block import HALF_BYTES

_DTYPES = {"f16": cutlass.Float16, "bf16": cutlass.BFloat16}
_ONES = {"f16": 0x3C003C00, "bf16": 0x3F803F80}


class Decode:
    """The kernel for one :class:`Variant`; an instance is what ``cute.compile`` is given."""

    def __init__(self, variant: Variant):
        self.v = variant
        self.dtype = _DTYPES[variant.kind]
        self.decoder = Decoder(variant.kind, variant.scale_kind, variant.zero)
        self.experts = Groups(variant.config.tile_m)
        self.row_gather = RowGather(variant.config.tile_m, 2, variant.itemsize, warps=1)
        self.formula = Formula(variant.epilogue, variant.kind, variant.out_kind, variant.vector)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        out: cute.Tensor,
        alpha: Float32 | cute.Tensor | None,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        token_scale: None,
        channels: None,
        starts: cute.Tensor | None,
        ends: cute.Tensor | None,
        indices: cute.Tensor | None,
        partials: None,
        flags: None,
        max_clusters: Int32,
        stream: Any,
    ):
        """As MixedGemm.__call__ of sm90_mixed_gemm, for 16-bit x, without a schedule that needs partials and flags."""
        v, c = self.v, self.v.config
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        x_layout = cute.tile_to_shape(atom, (c.tile_m, 64, 2 * v.slots * v.warps), order=(0, 1, 2))
        tma, tma_x = None, x
        if const_expr(not v.gathered):
            box = cute.make_composed_layout(x_layout.inner, 0, cute.make_layout((v.tokens, 64), stride=(64, 1)))
            tma, tma_x = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, box, (v.tokens, 64))
        m_tiles = cute.ceil_div(out.shape[0], v.tokens)
        if const_expr(v.grouped):
            m_tiles = most_tiles(out.shape[0], starts.shape[0], v.tokens)
        tiles = m_tiles * cute.ceil_div(self.features(out), c.tile_n)
        self.kernel(tma, tma_x, x_layout, weight, out, alpha, bias, residual, starts, ends, indices).launch(
            grid=[cutlass.min(tiles, max_clusters) * c.split_k, 1, 1],
            block=[v.warps * 32, 1, 1],
            cluster=[c.split_k, 1, 1],
            min_blocks_per_mp=v.occupancy,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        tma: cute.CopyAtom | None,
        tma_x: cute.Tensor,
        x_layout: cute.ComposedLayout,
        weight: cute.Tensor,
        out: cute.Tensor,
        alpha: Float32 | cute.Tensor | None,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        starts: cute.Tensor | None,
        ends: cute.Tensor | None,
        indices: cute.Tensor | None,
    ):
        v, c = self.v, self.v.config
        extras = (alpha, bias, residual, None, None)
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = cutlass.memory.SmemAllocator()
        s_x = smem.allocate_tensor(self.dtype, x_layout.outer, byte_alignment=1024, swizzle=x_layout.inner)
        s_weight = smem.allocate_array(Int32, v.warps * v.slots * v.weight_bytes // 4, byte_alignment=128)
        s_sums = smem.allocate_array(Float32, v.reduction_bytes // 4, byte_alignment=16)
        full = smem.allocate_array(Int64, v.warps * v.slots, byte_alignment=8) + warp * v.slots
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(v.slots):
                cute.arch.mbarrier_init(full + i, 33 if v.gathered else 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

        if const_expr(not v.gathered):
            if warp == 0:
                cpasync.prefetch_descriptor(tma)
        groups = None
        if const_expr(v.grouped):
            groups = (smem.allocate_tensor(Int32, cute.make_layout(MAX_EXPERTS)), (starts, ends))
            cute.arch.griddepcontrol_wait()
            if warp == 0:
                self.experts.fill(*groups)
            cute.arch.sync_threads()

        cta = cute.arch.block_idx()[0]
        rank, cluster, clusters = cta % c.split_k, cta // c.split_k, cute.arch.grid_dim()[0] // c.split_k
        m_tiles, n_tiles = cute.ceil_div(out.shape[0], v.tokens), cute.ceil_div(self.features(out), c.tile_n)
        n_blocks = weight.shape[0]
        if const_expr(v.grouped):
            m_tiles, n_blocks = groups[0][starts.shape[0] - 1], n_blocks // starts.shape[0]
        # this warp's k blocks: first, first + W, ... of the CTA's range
        k_blocks = weight.shape[1]
        begin, end = k_blocks * rank // c.split_k, k_blocks * (rank + 1) // c.split_k
        first = begin + warp
        units = (end - first + v.warps - 1) // v.warps
        tiles = (m_tiles * n_tiles - cluster + clusters - 1) // clusters
        total = units * tiles
        ring = (full, s_x, shared_address(s_weight) + warp * (v.slots * v.weight_bytes), warp)
        walk = (clusters, m_tiles, n_tiles, first, units, groups, n_blocks, indices)

        # The cursor runs ahead of the multiplication by the depth of the ring: (tile, its m tile or, grouped, its first
        # token, its n tile, k block, k blocks left, expert, gathered rows). It is stepped, not computed: integer
        # divisions in the loop would cost a tenth of its instructions.
        early = cutlass.min(total, v.slots)
        ahead = self.start_tile(cluster, walk)
        for i in cutlass.range(cutlass.min(early, v.early_slots), unroll=1):
            self.load_weight(weight, n_blocks, ring, ahead, i)
            ahead = self.step(ahead, walk)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        x_parts = tma_x, s_x
        if const_expr(not v.grouped):  # gathered ones are grouped, too
            x_parts = self.partition(tma, *x_parts)
        ahead = self.start_tile(cluster, walk)
        for i in cutlass.range(early, unroll=1):
            if i >= v.early_slots:
                self.load_weight(weight, n_blocks, ring, ahead, i)
            self.load_x(tma, x_parts, ring, ahead, i)
            ahead = self.step(ahead, walk)

        acc = cute.make_rmem_tensor((4, v.token_blocks, v.row_blocks), Float32)
        left, slot, phase = total - early, Int32(0), Int32(0)
        for tile in cutlass.range(cluster, m_tiles * n_tiles, clusters, unroll=1):
            acc.fill(0.0)
            for _ in cutlass.range(units, unroll=1):
                cute.arch.mbarrier_wait(full + slot, phase)
                x_fragments = self.read_x(ring, slot, thread % 32)
                for part in cutlass.range_constexpr(v.parts):
                    words, scales = self.read_weight(ring, slot, part, thread % 32)
                    if const_expr(v.scales_in_registers and part == v.parts - 1):
                        ahead, left = self.refill(tma, x_parts, weight, ring, walk, ahead, left, slot)
                    self.multiply(acc, part, words, scales, x_fragments)
                if const_expr(not v.scales_in_registers):
                    ahead, left = self.refill(tma, x_parts, weight, ring, walk, ahead, left, slot)
                slot += 1
                if slot == v.slots:
                    slot = Int32(0)
                    phase = phase ^ 1
            m_tile, n_tile = tile_coordinates(tile, m_tiles, n_tiles, 1)
            token0, own_out, own_extras = m_tile * v.tokens, out, extras
            if const_expr(v.grouped):
                expert, token0, end = self.experts.find(*groups, m_tile)
                own_out, own_extras = first_rows(out, end), extras_of(extras, expert, end)
            addends = self.load_addends(own_extras, token0, n_tile, rank, thread)
            for i in cutlass.range_constexpr(len(v.folds)):
                self.fold(acc, shared_address(s_sums), warp, thread % 32, v.folds[i])
            if warp < v.parked_warps:
                self.park(acc, shared_address(s_sums), warp, thread % 32)
            self.tile_barrier()
            self.finish(shared_address(s_sums), own_out, addends, token0, n_tile, rank, thread)
            self.tile_barrier()  # the sums have been read, by the neighbours too

    def features(self, out):
        """n, of which d has a column each, or a column for two."""
        return out.shape[1] * 2 if self.v.epilogue.gated else out.shape[1]

    @cute.jit
    def tile_barrier(self):
        if const_expr(self.v.config.split_k > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    # ------------------------------------------------------------------------------------------------- the ring

    @cute.jit
    def start_tile(self, tile, walk):
        """The cursor at this warp's first unit of a tile."""
        _, m_tiles, n_tiles, first, units, groups, _, indices = walk
        m_tile, n_tile = tile_coordinates(tile, m_tiles, n_tiles, 1)
        expert, rows = Int32(0), Int32(0)
        if const_expr(self.v.grouped):
            expert, m_tile, end = self.experts.find(*groups, m_tile)
            if const_expr(self.v.gathered):
                rows = self.row_gather.indices(indices, m_tile, end, 0)[0]
        return tile, m_tile, n_tile, first, units, expert, rows

    @cute.jit
    def step(self, cursor, walk):
        tile, m_tile, n_tile, k_block, left, expert, rows = cursor
        k_block += self.v.warps
        left -= 1
        if left == 0:
            tile, m_tile, n_tile, k_block, left, expert, rows = self.start_tile(tile + walk[0], walk)
        return tile, m_tile, n_tile, k_block, left, expert, rows

    @cute.jit
    def refill(self, tma, x_parts, weight, ring, walk, ahead, left, slot):
        """The slot has been read by all lanes: request what comes next into it."""
        cute.arch.sync_warp()
        if left > 0:
            self.load_weight(weight, walk[6], ring, ahead, slot)
            self.load_x(tma, x_parts, ring, ahead, slot)
            ahead = self.step(ahead, walk)
            left -= 1
        return ahead, left

    @cute.jit
    def load_weight(self, weight, n_blocks, ring, cursor, slot):
        v, rows = self.v, self.v.config.tile_n
        full, _, s_weight, _ = ring
        _, _, n_tile, k_block, _, expert, _ = cursor
        own = weight_of(weight, expert, n_blocks) if const_expr(v.grouped) else weight
        with cute.arch.elect_one():
            barrier = shared_address(full + slot)
            target = s_weight + slot * v.weight_bytes
            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, v.weight_bytes + v.fetched_x_bytes)
            for b in cutlass.range_constexpr(max(1, rows // 64)):
                # a tile of several blocks may reach past the last one: then that one again, whose rows are not stored
                block = cutlass.min(n_tile * rows // 64 + b, own.shape[0] - 1)
                source = own.iterator.toint() + (Int64(block) * weight.shape[1] + k_block) * v.block_bytes
                if const_expr(rows >= 64):
                    bulk_copy(target + b * v.block_bytes, source, Int32(v.block_bytes), barrier)
                else:
                    self.load_part_of_block(source, n_tile * rows % 64, target, barrier)

    @cute.jit
    def load_part_of_block(self, source, row, target, barrier):
        """tile_n < 64 rows of a block: a run of each chunk, and the scales, one run a group."""
        v, rows = self.v, self.v.config.tile_n
        size = rows * 32
        for chunk in cutlass.range_constexpr(2):
            bulk_copy(target + chunk * size, source + chunk * HALF_BYTES + row * 32, Int32(size), barrier)
        groups = 128 // v.scale_group
        group_bytes = v.scale_bytes // groups
        part = group_bytes * rows // 64
        for g in cutlass.range_constexpr(groups):
            bulk_copy(
                target + 2 * size + g * part,
                source + 2 * HALF_BYTES + g * group_bytes + Int64(row * (group_bytes // 64)),
                Int32(part),
                barrier,
            )

    @cute.jit
    def load_x(self, tma, x_parts, ring, cursor, slot):
        full, _, _, warp = ring
        _, m_tile, _, k_block, _, _, rows = cursor
        t_s, t_g = x_parts
        if const_expr(self.v.gathered):
            x, s_x = x_parts
            target = shared_address(s_x.iterator) + (warp * self.v.slots + slot) * self.v.x_bytes
            self.row_gather.copy(x, [rows], k_block, target, 0)
            cute.arch.cp_async_mbarrier_arrive_noinc(full + slot)
        elif const_expr(self.v.grouped):  # boxes from any token on
            tma_x, s_x = x_parts
            t_s, t_g = self.partition(tma, cute.domain_offset((m_tile, 0), tma_x), s_x)
            m_tile = 0
        for h in cutlass.range_constexpr(0 if self.v.gathered else 2):
            cute.copy(
                tma,
                t_g[(None, m_tile, k_block * 2 + h)],
                t_s[(None, (warp * self.v.slots + slot) * 2 + h)],
                tma_bar_ptr=full + slot,
            )

    def partition(self, tma, tma_x, s_x):
        """The boxes of x in shared memory and, by (token tile, 64 columns), in global memory."""
        v, group = self.v, cute.group_modes
        boxes = cute.make_layout((v.tokens, 64, 2 * v.slots * v.warps), stride=(64, 1, 64 * v.config.tile_m))
        s_x = cute.make_tensor(s_x.iterator, boxes)
        g_x = cute.local_tile(tma_x, (v.tokens, 64), (None, None))
        return cpasync.tma_partition(tma, 0, cute.make_layout(1), group(s_x, 0, 2), group(g_x, 0, 2))

    def read_weight(self, ring, slot, part, lane):
        """The part-th 64 rows of a slot: code words [row block][8 steps], and a function of row block and group that
        gives the scale words."""
        v = self.v
        rows = min(64, v.config.tile_n)  # that lie together in a block, or in a part of one
        width = self.decoder.words_per_scale
        block = ring[2] + slot * v.weight_bytes + part * v.block_bytes
        words = []
        for rb in range(rows // 16):
            halves = [load_shared(block + h * (rows * 32) + rb * 512 + lane * 16, 4) for h in range(2)]
            words.append(halves[0] + halves[1])

        def load_scale(rb, g):
            return load_shared(block + rows * 64 + (rb * 8 + lane // 4 + g * (rows // 2)) * (4 * width), width)

        if not v.scales_in_registers:
            return words, load_scale
        loaded = [[load_scale(rb, g) for g in range(128 // v.scale_group)] for rb in range(rows // 16)]
        return words, lambda rb, g: loaded[rb][g]

    def read_x(self, ring, slot, lane):
        """A slot's x fragments [token block][8 steps], two registers each."""
        v = self.v
        _, s_x, _, warp = ring
        base = shared_address(s_x.iterator) + (warp * v.slots + slot) * v.x_bytes
        row = lane % 8
        fragments = []
        for tb in range(v.token_blocks):
            steps: list = []
            for quarter in range(4):  # of 32 columns: four 8 x 8 matrices, the fragments of two steps
                swizzled = (quarter % 2 * 4 + lane // 8) ^ row
                r = load_matrix(base + quarter // 2 * (v.x_bytes // 2) + tb * 1024 + row * 128 + swizzled * 16)
                steps += [(r[0], r[1]), (r[2], r[3])]
            fragments.append(steps)
        return fragments

    # --------------------------------------------------- arithmetic (no control flow of the device: plain Python)

    def multiply(self, acc, part, words, scales, x_fragments):
        """acc += these rows' weights @ x.T."""
        v = self.v
        steps = v.scale_group // 16
        for g in range(128 // v.scale_group):
            x_sums = [self.sum_x(x_fragments[tb], g * steps, steps) for tb in range(v.token_blocks)]
            for rb in range(len(words)):
                scale_words = scales(rb, g)
                offsets = self.decoder.offsets(scale_words)
                sums = [[Float32(0.0)] * 4 for _ in range(v.token_blocks)]
                for step in range(g * steps, (g + 1) * steps):
                    a = self.decoder.decode_exact(words[rb][step], offsets)
                    for tb in range(v.token_blocks):
                        sums[tb] = mma_sync(v.kind, sums[tb], a, x_fragments[tb][step])
                values = self.decoder.scales_and_zeros(scale_words)
                for tb in range(v.token_blocks):
                    for i in range(4):
                        scale, zero = values[i // 2]
                        total = acc[i, tb, part * 4 + rb] + scale * sums[tb][i]
                        acc[i, tb, part * 4 + rb] = total if zero is None else total + zero * x_sums[tb][i]

    def sum_x(self, fragments, first, count):
        """The sum of x over the steps of a group, for float zero points: a product with ones."""
        sums = [Float32(0.0)] * 4
        if self.v.zero == "float":
            ones = [Int32(_ONES[self.v.kind])] * 4
            for step in range(first, first + count):
                sums = mma_sync(self.v.kind, sums, ones, fragments[step])
        return sums

    # ----------------------------------------------------------------------------------- reduction and epilogue

    @cute.jit
    def fold(self, acc, s_sums, warp, lane, counts):
        """Of the first ``active`` warps, those from ``left`` on hand their accumulators to the first ones, so that the
        reduction buffer need not hold those of all warps."""
        v = self.v
        active, left = counts
        count = v.row_blocks * v.token_blocks
        flat = cute.make_tensor(acc.iterator, cute.make_layout(4 * count))
        place = warp - left if warp >= left else warp
        at = s_sums + place * v.parked_bytes + lane * 16
        if warp >= left and warp < active:
            for i in cutlass.range_constexpr(count):
                store_shared_f32x4(at + i * 512, [flat[4 * i + j] for j in range(4)])
        cute.arch.sync_threads()
        if warp < active - left:
            for i in cutlass.range_constexpr(count):
                other = load_shared_cluster(at + i * 512)
                for j in cutlass.range_constexpr(4):
                    flat[4 * i + j] = flat[4 * i + j] + other[j]
        cute.arch.sync_threads()

    def park(self, acc, s_sums, warp, lane):
        """This warp's accumulators into the reduction buffer [warp][token][feature]."""
        v = self.v
        for tb in range(v.token_blocks):
            for rb in range(v.row_blocks):
                for i in range(4):
                    token = tb * 8 + lane % 4 * 2 + i % 2
                    feature = rb * 16 + lane // 4 + i // 2 * 8
                    index = (warp * v.config.tile_m + token) * v.reduction_row + feature
                    store_shared_f32(s_sums + index * 4, acc[i, tb, rb])

    @property
    def turns(self) -> int:
        """Quads, four features of one token, that a thread finishes."""
        c = self.v.config
        return -(-c.tile_n // c.split_k // 4 * self.v.tokens // (self.v.warps * 32))

    def quad(self, turn, rank, thread):
        """(token, first feature) in the tile of a thread's turn-th quad; the last turn's may be none of the tile."""
        share = self.v.config.tile_n // self.v.config.split_k
        index = turn * (self.v.warps * 32) + thread
        return index // (share // 4), rank * share + index % (share // 4) * 4

    def load_addends(self, extras, token0, n_tile, rank, thread):
        """(alpha, biases, residuals) of each of a thread's quads: on their way while the sums meet."""
        c, formula = self.v.config, self.formula
        alpha, found = formula.load_alpha(extras), []
        for turn in range(self.turns):
            token, feature = self.quad(turn, rank, thread)
            row, feature = token0 + token, n_tile * c.tile_n + feature
            biases = [formula.load_bias(extras, feature + i) for i in range(4)]
            found.append((alpha, biases, formula.load_residual(extras, row, feature)))
        return found

    @cute.jit
    def finish(self, s_sums, out, addends, token0, n_tile, rank, thread):
        """Sum over warps and ranks, four features of one token a thread; each rank stores its share of the features."""
        v, c = self.v, self.v.config
        for turn in cutlass.range_constexpr(self.turns):
            token, feature = self.quad(turn, rank, thread)
            row, column = token0 + token, n_tile * c.tile_n + feature
            if token < v.tokens and row < out.shape[0] and column < self.features(out):
                sums = [Float32(0.0)] * 4
                for r in cutlass.range_constexpr(c.split_k):
                    base = cluster_address(s_sums, Int32(r)) if const_expr(c.split_k > 1) else s_sums
                    for w in cutlass.range_constexpr(v.parked_warps):
                        at = base + ((w * c.tile_m + token) * v.reduction_row + feature) * 4
                        part = load_shared_cluster(at)
                        sums = [sums[i] + part[i] for i in range(4)]
                self.formula.store_quad(sums, addends[turn], out, row, column)
