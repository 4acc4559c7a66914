"""The order of choices by expert: with a map of global experts, by PyTorch's operators and by the kernel."""

from __future__ import annotations

import pytest
import torch

from sass import disassemble
from w4gemm import route
from w4gemm.core.problem import H200, Device
from w4gemm.jit import object_code
from w4gemm.kernels.helpers.base import LayerFacts
from w4gemm.kernels.helpers.experts import MOST_CHOICES, ExpertRoute


def in_python(ids: list[list[int]], experts: int, expert_map: list[int] | None = None) -> tuple[list, list, list]:
    """m_offsets, tokens of rows that have an expert, and row_of_choice."""

    def local(e: int) -> int:
        if expert_map is not None:
            e = expert_map[e] if 0 <= e < len(expert_map) else -1
        return e if 0 <= e < experts else -1

    choices = [(local(e), t, j) for t, row in enumerate(ids) for j, e in enumerate(row)]
    rows = sorted((c for c in choices if c[0] >= 0), key=lambda c: c[0])
    places = {(t, j): i for i, (_, t, j) in enumerate(rows)}
    offsets = [sum(e < bound for e, _, _ in rows) for bound in range(experts + 1)]
    return (
        offsets,
        [t for _, t, _ in rows],
        [[places.get((t, j), -1) for j in range(len(row))] for t, row in enumerate(ids)],
    )


def assert_right(ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None = None) -> None:
    actual = route(ids, experts, expert_map)
    offsets, tokens, rows = in_python(ids.tolist(), experts, None if expert_map is None else expert_map.tolist())
    assert actual.m_offsets.tolist() == offsets
    assert actual.tokens[: len(tokens)].tolist() == tokens
    assert actual.row_of_choice.tolist() == rows
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in actual) and len(actual.tokens) == ids.numel()
    if ids.numel():
        assert int(actual.tokens.min()) >= 0 and int(actual.tokens.max()) < len(ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mapped", [False, True], ids=["local", "mapped"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [(1, 1, 1), (1, 8, 128), (3, 2, 4), (33, 8, 128), (64, 6, 160), (700, 8, 128), (40, 4, 1024), (0, 2, 4)],
)
def test_every_choice_has_its_row(device: str, dtype: torch.dtype, mapped: bool, tokens: int, top_k: int, experts: int):
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-2, 2 * experts + 3, (tokens, top_k), generator=g, dtype=dtype)
    expert_map = None
    if mapped:  # of 2 * experts, some are here in any order
        expert_map = torch.full((2 * experts,), -1, dtype=torch.int32)
        expert_map[torch.randperm(2 * experts, generator=g)[:experts]] = torch.arange(experts, dtype=torch.int32)
        expert_map = expert_map.to(device)
    assert_right(ids.to(device), experts, expert_map)


def test_uneven_choices(device: str) -> None:
    """All of one expert, none here, no choice, and ids that do not lie contiguously."""
    assert_right(torch.full((50, 4), 3, device=device), 8)
    assert_right(torch.full((50, 4), 9, device=device), 8)
    assert_right(torch.zeros(2, 0, dtype=torch.int32, device=device).T, 4)
    ids = torch.arange(48, device=device).view(6, 8) % 5
    for strided in (ids.T, ids.repeat(1, 2)[:, :8], ids.repeat_interleave(2, 0)[::2], ids[:, :1].expand(6, 3)):
        assert not strided.is_contiguous()
        assert_right(strided, 4)


@pytest.mark.gpu
def test_the_kernel_gives_what_pytorch_gives_for_very_many_choices() -> None:
    g = torch.Generator().manual_seed(0)
    for tokens in (5000, MOST_CHOICES // 8, MOST_CHOICES // 8 + 1):
        ids = torch.randint(-1, 128, (tokens, 8), generator=g, dtype=torch.int32)
        on_cpu, here = route(ids, 128), route(ids.cuda(), 128)
        rows = int(on_cpu.m_offsets[-1])
        assert torch.equal(here.m_offsets.cpu(), on_cpu.m_offsets)
        assert torch.equal(here.tokens[:rows].cpu(), on_cpu.tokens[:rows])
        assert torch.equal(here.row_of_choice.cpu(), on_cpu.row_of_choice)


@pytest.mark.gpu
def test_a_graph_sorts_other_choices() -> None:
    ids = torch.zeros(16, 8, dtype=torch.int32, device="cuda")
    route(ids, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = route(ids, 64)
    for seed in range(3):
        ids.copy_(torch.randint(0, 64, ids.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        offsets, tokens, rows = in_python(ids.tolist(), 64)
        assert (actual.m_offsets.tolist(), actual.tokens.tolist(), actual.row_of_choice.tolist()) == (
            offsets,
            tokens,
            rows,
        )


def test_a_map_is_checked() -> None:
    ids = torch.zeros(3, 2, dtype=torch.int64)
    for expert_map in (torch.zeros(4), torch.zeros(4, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32), [0, 1]):
        with pytest.raises((TypeError, ValueError), match=r"expert_map: wanted (torch.int32|shape|a tensor).* got"):
            route(ids, 4, expert_map)
    with pytest.raises(ValueError, match="expert_map: wanted expert_ids' device cpu, got meta"):
        route(ids, 4, torch.zeros(4, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize("choices", [1, MOST_CHOICES])
@pytest.mark.parametrize("mapped", [False, True], ids=["local", "mapped"])
def test_the_kernel_compiles(mapped: bool, choices: int) -> None:
    pytest.importorskip("cutlass")
    actual = ExpertRoute.of(H200, torch.int32, 128, mapped, choices)
    assert actual is not None
    sass = disassemble(object_code(actual.unit()))
    assert sass.count("LDL") == sass.count("STL") == sass.stack == 0
    assert sass.count("VOTE.ANY") >= 2 * 8  # for each bit of 0 .. 128, in two walks


def test_where_the_kernel_runs() -> None:
    pytest.importorskip("cutlass")
    assert ExpertRoute.of(H200, torch.int32, 1025, False, 8) is None
    assert ExpertRoute.of(H200, torch.int32, 8, False, MOST_CHOICES + 1) is None
    assert ExpertRoute.of(H200, torch.int16, 8, False, 8) is None
    assert ExpertRoute.of(Device("cpu"), torch.int32, 8, False, 8) is None
    facts = LayerFacts(256, torch.bfloat16, top_k=8, experts=64)
    assert len(tuple(ExpertRoute.needed(H200, facts))) == 8
    assert not tuple(ExpertRoute.needed(H200, facts._replace(top_k=0)))
