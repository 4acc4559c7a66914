"""The flags of stream-k: a warp for each consumer warpgroup raises its flag and waits for those of other CTAs."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from w4gemm.kernels.arguments import StreamWorkspace
from w4gemm.kernels.device.stream_k import StreamSum
from w4gemm.kernels.sm90_mixed_gemm.roles.tile_scheduler import SchedulerParams, TileScheduler
from w4gemm.ptx.memory import barrier_of_roles

_STORED_BARRIER = 8  # and 9: named barriers of a warpgroup and its warp here
_READY_BARRIER = 10  # and 11
_THREADS = 128 + 32


class StreamFlags:
    """Handles the flags for the consumers of one CTA. A consumer warpgroup arrives at a barrier behind its stores, and
    goes on while they reach L2. It meets its warp at another barrier in front of its loads; the warp is there first if
    the other CTA was in time, so no consumer waits for a flag to arrive from L2."""

    def __init__(self, scheduler: TileScheduler, stream_sum: StreamSum):
        self.scheduler, self.stream_sum = scheduler, stream_sum

    @cute.jit
    def run(self, workspace: StreamWorkspace, params: SchedulerParams, warpgroup: Int32):
        """Serve all work tiles of a consumer warpgroup. Run by one warp."""
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_wait()  # the launch before may still use the workspace
        work_tiles = self.scheduler.work_tiles(params)
        for index in cutlass.range(work_tiles.count, unroll=1):
            work_tile = self.scheduler.work_tile(index, params, work_tiles.share)
            if work_tile.first_k_slice > 0:
                cute.arch.barrier(barrier_id=_STORED_BARRIER + warpgroup, number_of_threads=_THREADS)
                if lane == 0:
                    self.stream_sum.raise_flag(workspace, params.cluster, warpgroup)
            elif work_tile.k_slices < params.k_slices:
                other = params.cluster + 1
                while other < self.scheduler.end_of_sharers(work_tile, params, work_tiles.share):
                    if lane == 0:
                        self.stream_sum.await_flag(workspace, other, warpgroup)
                    cute.arch.sync_warp()
                    self.partials_ready(warpgroup)
                    other += 1

    def partials_stored(self, warpgroup: Int32) -> None:
        """Tell the warp that this consumer thread has stored its partials."""
        cute.arch.barrier_arrive(barrier_id=_STORED_BARRIER + warpgroup, number_of_threads=_THREADS)

    def partials_ready(self, warpgroup: Int32) -> None:
        """Meet the other side, behind which the next CTA's partials may be read: called by the warp when their flag is
        up, and by the consumers in front of their loads."""
        barrier_of_roles(_READY_BARRIER + warpgroup, _THREADS)
