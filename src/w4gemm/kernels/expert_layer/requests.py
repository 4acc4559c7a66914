"""Requests of weights, ahead of the steps that multiply them: :class:`Requests`."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from w4gemm.kernels.expert_layer.shares import Shares, divided, quotient
from w4gemm.kernels.expert_layer.spec import STRIPS, ExpertLayer
from w4gemm.kernels.expert_layer.values import Cursor, Memory, Share, Tensors
from w4gemm.packing.block import STRIP_N
from w4gemm.ptx.memory import copy_async


class Requests:
    """Requests the weights of a warp's steps, one after another."""

    def __init__(self, layer: ExpertLayer, shares: Shares) -> None:
        self.layer = layer
        self.shares = shares

    def first_step(self, share: Share, rank: Int32) -> Cursor:
        """The cursor at the first step of a warp, without addresses."""
        none = Cursor(Int64(0), Int64(0), Int32(0), Int32(0), Int32(0), Int32(0), Int32(-1))
        return self.next_round(share, none, rank)

    @cute.jit
    def next_round(self, share: Share, cursor: Cursor, rank: Int32) -> Cursor:
        """The cursor at the warp's first step of the next round that has any, without addresses."""
        layer = self.layer
        round, left, first = cursor.round, Int32(0), Int32(0)
        while left == 0 and round < share.rounds:
            round += 1
            steps = self.shares.steps_of(share, round, rank)
            left, first = steps.count, steps.first
        slot, strip, k_left = Int32(0), Int32(0), Int32(0)
        if left > 0:
            if round < share.rounds:
                unit, k_step = divided(first, layer.steps_up)
                slot, strip = divided(share.first + round * share.chunk + unit, layer.strips_up)
                k_left = layer.steps_up - k_step
            else:
                per_column = self.shares.steps_of_column(share.active)
                column, rest = divided(share.skipped + first, per_column)
                slot, k_step = divided(rest, layer.steps_down)
                k_left = layer.steps_down - k_step
                strip = share.column + column * self.shares.column_stride
        return Cursor(Int64(0), Int64(0), k_left, slot, strip, left, round)

    @cute.jit
    def at_row(self, t: Tensors, memory: Memory, share: Share, cursor: Cursor) -> Cursor:
        """The cursor with the addresses of its k block of its expert's strip."""
        layer, block, lane = self.layer, self.layer.weight.block, cute.arch.lane_idx()
        codes, k_block = Int64(0), Int32(0)
        if cursor.left > 0:
            expert = memory.choices.experts[cursor.slot]
            if cursor.round < share.rounds:
                k_block = (layer.steps_up - cursor.k_left) * layer.step_blocks
                index = (expert * layer.blocks_up + quotient(cursor.strip, STRIPS)) * layer.k_blocks_up + k_block
                codes = t.gate_up.iterator.toint() + Int64(index) * block.stride
            else:
                k_block = (layer.steps_down - cursor.k_left) * layer.step_blocks
                index = (expert * layer.blocks_down + quotient(cursor.strip, STRIPS)) * layer.k_blocks_down + k_block
                codes = t.down.iterator.toint() + Int64(index) * block.stride
        strip, pair = divided(cursor.strip, STRIPS).rest, block.pair_bytes // 2 * STRIP_N
        per_run = pair // 16
        second, part = divided(lane, layer.scale_lanes)  # lanes of the first block, then of the second
        run, vector = divided(part, per_run)
        of_scales = second * block.stride + block.code_bytes + strip * pair + run * block.run_bytes + vector * 16
        start = block.codes_from(k_block)
        scales = codes + Int64(of_scales + start)
        if const_expr(block.lead):  # the last lanes copy factors
            shift = cutlass.select_(run == block.runs, block.factors_from(k_block) - block.factors_at, start)
            scales = codes + Int64(of_scales + shift)
        codes = codes + Int64(strip * block.strip_bytes + lane * 16 + start)
        return cursor._replace(codes=codes, scales=scales)

    @cute.jit
    def request(self, t: Tensors, memory: Memory, share: Share, cursor: Cursor, stage: Int32, rank: Int32) -> Cursor:
        """Request a step's weights into a stage that all lanes have read, as a group of cp.async, which is empty if no
        step is left. Return the cursor one step on."""
        layer, lane, scales = self.layer, cute.arch.lane_idx(), Int32(self.layer.step_blocks * self.layer.scale_lanes)
        if cursor.left > 0:
            target, whole = memory.stages + stage * layer.stage_bytes, Boolean(True)
            if const_expr(layer.ragged_up or layer.ragged_down):
                whole = self.is_whole(cursor.k_left, cursor.round < share.rounds)
                scales = cutlass.select_(whole, scales, Int32(layer.scale_lanes))
            self.request_codes(target, cursor.codes)
            if const_expr(layer.step_blocks == 2):
                if whole:
                    self.request_codes(target + layer.stage_block.bytes, cursor.codes + layer.weight.block.stride)
            block, part = divided(lane, layer.scale_lanes)
            if lane < scales:
                to = target + block * layer.stage_block.bytes + layer.stage_block.code_bytes + part * 16
                copy_async(to, cursor.scales, Int32(16))
            cursor = self.after(t, memory, share, cursor, rank)
        cute.arch.cp_async_commit_group()
        return cursor

    def is_whole(self, k_left: Int32, is_up: Boolean) -> Boolean:
        """If a step has two blocks."""
        layer, last = self.layer, k_left == 1
        if layer.ragged_up and layer.ragged_down:
            return ~last
        return ~(last & is_up) if layer.ragged_up else ~(last & ~is_up)

    @cute.jit
    def request_codes(self, target: Int32, source: Int64) -> None:
        """Request the codes of a block, of which this lane copies from ``source`` on."""
        block, lane = self.layer.weight.block, cute.arch.lane_idx()
        for half in cutlass.range_constexpr(2):
            for first in cutlass.range_constexpr(0, block.strip_bytes // 16, 32):
                to = target + (half * block.strip_bytes + first * 16 + lane * 16)
                at = source + (half * block.half_bytes + first * 16)
                if const_expr((first + 32) * 16 <= block.strip_bytes):
                    copy_async(to, at, Int32(16))
                else:
                    if lane < block.strip_bytes // 16 - first:
                        copy_async(to, at, Int32(16))

    @cute.jit
    def after(self, t: Tensors, memory: Memory, share: Share, cursor: Cursor, rank: Int32) -> Cursor:
        """The cursor one step on."""
        block, lane = self.layer.weight.block, cute.arch.lane_idx()
        size: Int32 | int = block.stride * self.layer.step_blocks
        of_scales = size
        if const_expr(block.lead):  # from one block of a pair to the other, which share factors, or to the next pair
            odd = cursor.k_left % 2
            size = block.stride + block.lead - odd * (2 * block.lead)
            per_run = block.pair_bytes // 2 * STRIP_N // 16
            of_scales = cutlass.select_(lane // per_run == block.runs, odd * (2 * block.stride), size)
        cursor = cursor._replace(
            left=cursor.left - 1, k_left=cursor.k_left - 1, codes=cursor.codes + size, scales=cursor.scales + of_scales
        )
        if cursor.left == 0:
            cursor = self.at_row(t, memory, share, self.next_round(share, cursor, rank))
        elif cursor.k_left == 0:
            slot, strip, k_left = cursor.slot, cursor.strip, Int32(self.layer.steps_down)
            if cursor.round < share.rounds:
                strip, k_left = strip + 1, Int32(self.layer.steps_up)
                if strip == self.layer.strips_up:
                    strip, slot = Int32(0), slot + 1
            else:
                slot += 1
                if slot == share.active:
                    slot, strip = Int32(0), strip + self.shares.column_stride
            cursor = self.at_row(t, memory, share, cursor._replace(slot=slot, strip=strip, k_left=k_left))
        return cursor
