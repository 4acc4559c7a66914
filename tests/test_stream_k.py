"""How stream-k divides tiles among CTAs, and where its flags come from, without a GPU."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from collections import defaultdict
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from w4gemm import GemmProblem, WeightFormat
from w4gemm.core.problem import H200
from w4gemm.kernels import kernel_named, workspace

SHAPES = [
    (tiles, blocks, ctas)
    for tiles, blocks, ctas in itertools.product(
        (1, 2, 7, 131, 132, 133, 295, 668), (1, 3, 6, 16, 23, 200), (1, 5, 132)
    )
    if ctas <= tiles * blocks < 20000
]
"""Tiles, blocks of each along k, CTAs: a launch has no more of these than blocks."""


def fresh_scheduler() -> ModuleType:
    """Return the module anew: where a kernel was traced before, its functions take the DSL's numbers only."""
    pytest.importorskip("cutlass")
    spec = importlib.util.find_spec("w4gemm.kernels.device.scheduler")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("tiles", "blocks", "ctas"), SHAPES)
def test_every_block_is_multiplied_once_and_every_partial_is_added(
    monkeypatch: pytest.MonkeyPatch, tiles: int, blocks: int, ctas: int
) -> None:
    """The traced functions, run on Python's integers; the owner's loop is that of ``Consumer.run``."""
    scheduler = fresh_scheduler()
    monkeypatch.setattr(scheduler, "cutlass", SimpleNamespace(min=min, max=max))
    share_of, tile_of = (inspect.unwrap(f) for f in (scheduler.stream_share, scheduler.stream_tile))
    done, storing, adding = defaultdict(list), defaultdict(set), {}
    for cta in range(ctas):
        share = share_of(cta, ctas, tiles, blocks)
        own, stored = 0, False
        for index in range(share.work_tiles(blocks)):
            tile, first, stop = tile_of(index, cta, ctas, blocks, share)
            assert 0 <= tile < tiles and 0 <= first < stop <= blocks
            done[tile] += range(first, stop)
            own += stop - first
            if stop < blocks:
                assert index == 0 and not stored, "a CTA stores partials once, before it waits for others'"
                stored = True
                storing[tile].add(cta)
            elif first > 0:
                other, adding[tile] = share.first_sharer(tile, ctas, blocks), set()
                while other < cta:
                    adding[tile].add(other)
                    other += 1
                assert adding[tile]
        assert abs(own - tiles * blocks / ctas) < 1, "shares are equal"
    assert {tile: sorted(actual) for tile, actual in done.items()} == {t: list(range(blocks)) for t in range(tiles)}
    assert storing == adding


def test_an_engine_s_graphs_find_flags_that_no_replay_has_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM with 80 layers: for each of 51 batch sizes a launch outside of captures, then a graph for each piece; then
    one graph of all layers for each size."""
    state = SimpleNamespace(cuda_stream=1, capture=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capture > 0)
    monkeypatch.setattr(workspace, "_capture", lambda stream: state.capture)
    for held in ("_flags", "_pools", "_allocations"):
        monkeypatch.setattr(workspace, held, type(getattr(workspace, held))())
    owners: dict[int, int] = {}
    captures = itertools.count(1)

    def launch(capture: int) -> None:
        state.capture = capture
        flags = workspace.allocated(torch.device("cpu"), workspace.FLAG_BYTES + 4).flags
        assert any(flags.untyped_storage().data_ptr() == a.untyped_storage().data_ptr() for a in workspace._allocations)
        assert owners.setdefault(flags.data_ptr(), capture) == capture, "two graphs that may overlap share flags"

    for pieces, layers in ((80, 1), (1, 80)):
        for _ in range(51):
            launch(0)
            for _ in range(pieces):
                graph = next(captures)
                for _ in range(layers):
                    launch(graph)
    assert len(owners) == 1 + 51 * 81


@pytest.mark.parametrize("name", ["sm90_mixed_gemm", "sm80_mixed_gemm"])
def test_a_gpu_with_more_multiprocessors_than_flags_has_no_streams(name: str) -> None:
    def problem_on(sms: int) -> GemmProblem:
        device = replace(H200, sms=sms)
        return GemmProblem(64, 4096, 4096, torch.bfloat16, WeightFormat.parse("int4_g128"), "mma16", device=device)

    kernel, most = kernel_named(name), problem_on(workspace.MOST_SMS)
    streams = [config for config in kernel.configs(most) if config.schedule == "stream"]
    variants = [kernel.variant.of(most, config) for config in streams]
    flags = [v.ctas_per_sm(v.config) * workspace.MOST_SMS * getattr(v, "warpgroups_n", 1) for v in variants]
    assert streams and max(flags) * 4 <= workspace.FLAG_BYTES
    larger = problem_on(workspace.MOST_SMS + 1)
    assert set(kernel.configs(larger)) == set(kernel.configs(most)) - set(streams)
    (exclusion,) = kernel.exclusions(larger, streams[0])
    assert exclusion.kind == "impossible" and "flags for 256 multiprocessors, the GPU has 257" in exclusion.reason
