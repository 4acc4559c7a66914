"""The layer of experts in one launch: the compiled kernel, run by the emulator, beside a reference in float64."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.cases import random_weight
from emulator.races import RaceChecker
from expert_layers import (
    CTAS,
    Layer,
    emulated,
    faults,
    fresh_flags,
    inputs,
    launched_as_it_is,
    layer_of,
    program_of,
    reference,
    spec_of,
)
from fuzz.experts import CHOOSING, FORMS, GROUPED, SPLIT, TINY, WIDE, draw, fuzz
from sass import local_memory, spilled_in_flight
from w4gemm import (
    QuantizedWeight,
    Router,
    UnsupportedError,
    W4Experts,
    W4GroupedLinear,
    WeightFormat,
    choose_experts,
)
from w4gemm.api.expert_layer import ByIds, ByLogits, Experts, LayerKey, expert_layer, one_launch
from w4gemm.core import activation
from w4gemm.core.problem import H100, H200, Device
from w4gemm.jit import object_code
from w4gemm.kernels.expert_layer.spec import EPOCHS_AT, ExpertLayer
from w4gemm.kernels.helpers.experts import ExpertChoice
from w4gemm.packing.codecs import weight_operand
from w4gemm.packing.packed_shape import packed_shape

pytest.importorskip("cutlass")

SMALL = spec_of(4, experts=8, width=64)
"""Two rounds of gate_up, if eight experts are chosen."""
CASES = {
    "one token, sixteen warps": (spec_of(1, warps=16), 1, "int4_g128"),
    "one token, several steps of down, MXFP4": (
        spec_of(1, width=288, format="mxfp4", split=True, activation="swiglu_oai", down_bias=True),
        1,
        "mxfp4",
    ),
    "one token, steps of one": (spec_of(1, features=320, width=448, step_blocks=1), 1, "int4_g128"),
    "three of four tokens, biases, MXFP4": (
        spec_of(4, width=96, format="mxfp4", activation="swiglu_oai", gate_up_bias=True, down_bias=True),
        3,
        "mxfp4",
    ),
    "eight tokens, scales, fp16": (
        spec_of(8, width=96, dtype=torch.float16, gate_up_scale=True, down_scale=True, ids=torch.int32, top_k=3),
        8,
        "int4_g128",
    ),
    "no gates": (spec_of(2, activation="relu2", width=160, gate_up_bias=True), 2, "int4_g128"),
    "small groups, float zeros, a map": (
        spec_of(2, width=96, format="int4_g32_zfloat", mapped=True),
        2,
        "int4_g32_zfloat",
    ),
    "three blocks along k, steps of two": (spec_of(2, features=320, width=288), 1, "int4_g128"),
    "four and three": (spec_of(2, features=448, width=288, top_k=3), 1, "int4_g128"),
    "three and four, steps of one": (spec_of(2, features=320, width=448, step_blocks=1), 1, "int4_g128"),
    "factors of pairs of blocks": (spec_of(2, features=448, format="q4_k"), 1, "q4_k"),
    "NVFP4, scales, biases": (
        spec_of(4, format="nvfp4", gate_up_scale=True, down_scale=True, gate_up_bias=True, down_bias=True),
        3,
        "nvfp4",
    ),
    "NVFP4, fp16, no gates": (
        spec_of(2, features=320, width=288, format="nvfp4", dtype=torch.float16, activation="relu2"),
        2,
        "nvfp4",
    ),
    "zero points of small groups, twelve warps": (spec_of(1, format="int4_g32_zint", warps=12), 1, "int4_g32_zint"),
}


@pytest.mark.parametrize("name", CASES)
def test_layers(name: str) -> None:
    spec, m, format = CASES[name]
    layer, (x, chosen) = layer_of(spec, format), inputs(spec, m)
    if spec.mapped:
        expert_map, ids = torch.tensor([-1, 3, 0, -1, 1, 9], dtype=torch.int32), torch.tensor([[1, 6], [4, 0]])
        out = emulated(layer, x, chosen._replace(expert_ids=ids), expert_map)
        chosen = chosen._replace(expert_ids=torch.tensor([[3, -1], [1, -1]]))
    else:
        out = emulated(layer, x, chosen)
    assert not faults(out, reference(layer, x, chosen))


@pytest.mark.parametrize(
    "changes", [{"format": "int4_g128"}, {"format": "mxfp4", "gate_up_bias": True, "down_bias": True}], ids=str
)
def test_sums_in_order(changes: dict[str, Any]) -> None:
    """A token has the same bits alone, tallied by each warp, and among others. It may choose an expert twice, and one
    that is elsewhere."""
    specs = [spec_of(t, experts=8, width=160, features=192, top_k=3, in_order=True, **changes) for t in (1, 8)]
    alone, among = (layer_of(spec, changes["format"]) for spec in specs)
    x, chosen = inputs(among.spec, 7, seed=3)
    ids, weights = chosen
    ids[2, 2], ids[4, 0] = ids[2, 0], -1
    out = emulated(among, x, ByIds(ids, weights))
    assert not faults(out, reference(among, x, ByIds(ids, weights)))
    for t in range(len(x)):
        own = slice(t, t + 1)
        assert torch.equal(emulated(alone, x[own], ByIds(ids[own], weights[own])), out[own]), t


@pytest.mark.parametrize("power", [-20, 20])
def test_numbers_without_their_powers(power: int) -> None:
    """MXFP4's numbers are multiplied as 2**-126 times theirs, and x and the activated rows as 2**64 times theirs."""
    layer = layer_of(spec_of(1, format="mxfp4"), "mxfp4")
    x, chosen = inputs(layer.spec, 1)
    x = x * 2.0**power
    assert not faults(emulated(layer, x, chosen), reference(layer, x, chosen))


def repeated(routing: list[list[int]], more: int) -> torch.Tensor:
    ids = torch.tensor(routing)
    return torch.cat((ids, ids[:, :1].expand(-1, more)), 1)


@pytest.mark.parametrize("more", [0, 3], ids=["each warp tallies", "all warps tally"])
def test_routings(more: int) -> None:
    """Experts elsewhere, one expert for all, the same one twice, none at all; NaN of a token or a weight elsewhere.
    Each launch finds the flags and the rows that the last one left. more: choices of a token, which repeat others."""
    layer = layer_of(replace(SMALL, top_k=2 + more))
    assert (layer.spec.tallies == 1) == bool(more)
    x, (_, weights) = inputs(layer.spec, 4)
    routings = [
        [[1, 10], [-1, 2], [0, 4], [9, 9]],
        [[3, 3], [3, 3], [3, 3], [3, 3]],
        [[8, 8], [-1, 8], [10, 9], [8, -9]],
        [[0, 1], [6, 7], [2, 3], [4, 5]],
    ]
    routings = routings[1:3] if more else routings  # the tally is other code, what follows it is not
    flags, hidden = fresh_flags(), torch.full((layer.spec.scratch_bytes // 4,), -1, dtype=torch.int32)
    for number, routing in enumerate(routings):
        chosen = ByIds(repeated(routing, more), weights)
        out = emulated(layer, x, chosen, flags=flags, hidden=hidden)
        assert not faults(out, reference(layer, x, chosen))
        assert flags[:CTAS].tolist() == [2 * number + 2] * CTAS
    x[1] = torch.nan
    weights[0, 1] = torch.nan
    chosen = ByIds(repeated([[1, 10], [3, 2], [0, 4], [3, 1]], more), weights)
    out = emulated(layer, x, chosen, flags=flags, hidden=hidden)
    assert out.isnan().all(1).tolist() == [False, True, False, False]
    assert out.isnan().any(1).tolist() == [False, True, False, False]


def test_choices_by_logits() -> None:
    """The bits of a launch that is given the same experts and weights."""
    x = inputs(CHOOSING, 3)[0]
    logits, bias = torch.randn(3, 12).bfloat16(), torch.randn(12)
    expert_map = torch.tensor([4, -1, 0, -1, 1, 9, 2, -1, -1, 3, -1, -1], dtype=torch.int32)
    out = emulated(layer_of(CHOOSING), x, ByLogits(logits, GROUPED.router, bias), expert_map)
    ids, weights = torch.zeros(3, 3, dtype=torch.int32), torch.zeros(3, 3)
    RaceChecker(program_of(GROUPED), 1).run(logits, bias, ids, weights)
    assert torch.equal(ids, GROUPED.router.choose(logits, bias)[0])
    assert torch.equal(out, emulated(layer_of(TINY), x, ByIds(expert_map[ids].long(), weights)))


def test_a_slice_of_the_fuzzer() -> None:
    assert not fuzz(range(9), "emulator", ((TINY, "int4_g128"), (CHOOSING, "int4_g128"), (SPLIT, "int4_g128")))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *(("largest router", 8), ("q4_k", 0), ("mxfp4", 0), ("mxfp4, one token", 0), ("nvfp4", 0)),
        *(("nvfp4, one token", 0), ("zero points", 0), ("odd, zero points", 0), ("float zero points", 0)),
    ],
)
def test_registers_are_hardly_spilled(name: str, most: int) -> None:
    """A CTA of 512 threads has 128 for each. None that a load fills is, because the load would be waited for. most:
    bytes."""
    choice = ExpertChoice(Router(8, "sigmoid", scale=2.5), 384, torch.bfloat16, True)
    forms = {
        "largest router": key_of(2, *KIMI, choice=choice),
        "q4_k": key_of(8, "q4_k", 128, 2048, 768, 8),
        "mxfp4": key_of(8, "mxfp4", 64, 4096, 2048, 6),
        "mxfp4, one token": key_of(1, "mxfp4", 64, 4096, 2048, 6),
        "nvfp4": key_of(8, "nvfp4", 64, 4096, 2048, 6, operands=(True,) * 4),
        "nvfp4, one token": key_of(1, "nvfp4", 128, 2048, 768, 8),
        "zero points": key_of(1, "int4_g32_zint", 128, 2048, 768, 8),
        "odd, zero points": key_of(4, "int4_g32_zint", 128, 4096, 1408, 8),
        "float zero points": key_of(8, "int4_g64_zfloat", 128, 4096, 1408, 8),
    }
    layer = ExpertLayer.of(H100, *forms[name].parameters())
    assert layer is not None and local_memory(code := object_code(layer.unit())) <= most
    assert not spilled_in_flight(code)


@pytest.mark.parametrize(
    ("tokens", "layer", "blocks"),
    [
        (1, ("int4_g128", 128, 2048, 768, 8), 2),
        (2, ("int4_g128", 128, 4096, 1408, 8), 1),  # eleven blocks of down
        (3, ("int4_g128", 128, 4096, 1408, 8), 2),
        (1, ("mxfp4", 128, 2880, 2880, 4), 2),
        (8, ("mxfp4", 128, 2880, 2880, 4), 2),
        (1, ("nvfp4", 128, 2880, 2880, 4), 2),
        (8, ("int4_g32", 384, 7168, 2048, 8), 2),  # in two stages
        (8, ("int4_g32", 384, 8192, 2048, 8), 1),  # no room for two of them
        (1, ("q4_k", 128, 2048, 768, 8), 1),
        (8, ("nvfp4", 256, 7168, 2048, 8), 2),  # in two stages
    ],
)
def test_blocks_of_a_step(tokens: int, layer: tuple[Any, ...], blocks: int) -> None:
    made = ExpertLayer.of(H200, *key_of(tokens, *layer).parameters())
    assert made is not None and made.step_blocks == blocks


@pytest.mark.parametrize(
    ("format", "width", "warps"),
    [
        *(("int4_g128", 768, 16), ("int4_g128_zint", 768, 16), ("int4_g64_zint", 768, 12)),
        *(("int4_g64_zint", 640, 16), ("int4_g64_zfloat", 640, 12), ("q4_k", 768, 12)),
    ],
)
def test_warps(format: str, width: int, warps: int) -> None:
    made = ExpertLayer.of(H200, *key_of(1, format, 128, 2048, width, 8).parameters())
    assert made is not None and made.warps == warps


# --- from gate_up to down


@functools.cache
def all_at_once() -> torch.Tensor:
    return emulated(layer_of(SMALL), *inputs(SMALL, 4))


@pytest.mark.parametrize(
    "order",
    [
        {"seed": 1},
        {"resident": 1},
        {"resident": 1, "order": (2, 0, 1)},
        {"resident": 2, "order": (2, 1, 0), "seed": 2},
    ],
    ids=str,
)
def test_ctas_that_do_not_run_at_once(order: dict[str, Any]) -> None:
    """A CTA that waits computes what no CTA has begun; one that begins late computes it once more. The bits are those
    of CTAs that run side by side."""
    layer, (x, chosen) = layer_of(SMALL), inputs(SMALL, 4)
    assert not faults(all_at_once(), reference(layer, x, chosen))
    assert torch.equal(emulated(layer, x, chosen, **order), all_at_once())


def test_warps_that_begin_late() -> None:
    """The first warp comes to the first barrier before others begin. The flags of more than 32 CTAs have two warps that
    wait for them: each must know this launch's epoch, not the next one's, for which it would wait for ever."""
    layer = layer_of(spec_of(1, features=64, width=32, ctas=33))
    assert layer.spec.pollers == 2 and layer.spec.tallies > 1
    x, chosen = inputs(layer.spec, 1)
    assert not faults(emulated(layer, x, chosen, together=32), reference(layer, x, chosen))


@pytest.mark.parametrize("epoch", [2**30 - 1, 2**31 - 1])
def test_epochs_that_wrap(epoch: int) -> None:
    """A stream of 5000 launches a second is there after three days: numbers are compared for equality alone."""
    flags = fresh_flags()
    last = torch.tensor([2 * epoch]).to(torch.int32)  # cut to 32 bits
    flags[:CTAS], flags[EPOCHS_AT : EPOCHS_AT + CTAS] = last, epoch
    out = emulated(layer_of(SMALL), *inputs(SMALL, 4), flags=flags)
    assert torch.equal(out, all_at_once()) and torch.equal(flags[:CTAS], (last + 2).expand(CTAS))


def test_strips_of_down_that_are_divided() -> None:
    """Each is of two or three CTAs. Whoever comes last adds up, and the bits are the same. The parts of a token without
    experts are zeros."""
    layer, (x, chosen) = layer_of(SPLIT), inputs(SPLIT, 2)
    flags, scratch = fresh_flags(), torch.full((SPLIT.scratch_bytes // 4,), -1, dtype=torch.int32)
    orders: tuple[dict[str, Any], ...] = (
        {},
        {"resident": 1},
        {"resident": 2, "order": (9, 2, 0, 1, 8, 5, 4, 7, 3, 6), "seed": 2},
    )
    outs = [emulated(layer, x, chosen, flags=flags, hidden=scratch, **order) for order in orders]
    assert not faults(outs[0], reference(layer, x, chosen))
    assert all(torch.equal(out, outs[0]) for out in outs)
    chosen.expert_ids[1] = -1
    assert not emulated(layer, x, chosen, flags=flags, hidden=scratch)[1].any()


def test_experts_are_added_in_ascending_order() -> None:
    """(y + 2^25 y) - 2^25 y is 0 in float32, and y in any other order. Each expert's y comes from another warp."""
    layer = layer_of(TINY)
    alike = ([w.expert(0)] * TINY.experts for w in (layer.gate_up, layer.down))
    layer = Layer(TINY, *(QuantizedWeight.stack(w, TINY.experts, "mma16") for w in alike), None, None, None, None)
    x, ids = inputs(TINY, 1)[0], torch.tensor([[4, 0, 2]])
    one = emulated(layer, x, ByIds(ids, torch.tensor([[0.0, 1.0, 0.0]])))
    assert (one != 0).float().mean() > 0.5
    out = emulated(layer, x, ByIds(ids, torch.tensor([[-(2.0**25), 1.0, 2.0**25]])))
    assert (out == 0).all()


def test_nothing_is_accessed_before_the_launch_in_front_has_ended() -> None:
    """Behind it the next launch may begin at once: it waits too."""
    code = [".".join(i.opcode) for i in program_of(SMALL).code]
    wait = code.index("griddepcontrol.wait")
    assert not any("global" in name for name in code[:wait]) and "griddepcontrol.launch_dependents" not in code[:wait]


# --- whether it is chosen


def key_of(tokens: int, format: str, experts: int, features: int, width: int, top_k: int, **others: Any) -> LayerKey:
    rows = (1 + activation.is_gated(others.get("activation", "silu_mul"))) * width
    shapes = (
        packed_shape(WeightFormat.parse(format), "mma16", n, k, experts)
        for n, k in ((rows, features), (features, width))
    )
    return LayerKey(tokens, *shapes, torch.bfloat16, "silu_mul", top_k, torch.int32)._replace(**others)


QWEN, GPT_OSS, KIMI, DEEPSEEK = (
    ("int4_g128", 128, 2048, 768, 8),
    ("mxfp4", 128, 2880, 2880, 4),
    ("int4_g32", 384, 7168, 2048, 8),
    ("int4_g128", 256, 7168, 2048, 8),
)


@pytest.mark.parametrize("device", [H100, H200], ids=lambda device: device.name)
@pytest.mark.parametrize(
    "layer, chosen",
    [
        (QWEN, {1: True, 2: True, 4: True, 8: True}),
        (GPT_OSS, {1: True, 2: True, 4: True}),
        (KIMI, {1: True}),
        (DEEPSEEK, {1: True}),
        (("nvfp4", 128, 2048, 768, 8), {1: True, 2: True, 4: True, 8: True}),
        (("nf4", 128, 2048, 768, 8), {1: False}),
    ],
)
def test_one_launch_where_it_was_faster(layer: tuple[Any, ...], chosen: dict[int, bool], device: Device) -> None:
    """As measured (bench/results/expert_layer.jsonl)."""
    decisions = {tokens: one_launch(key_of(tokens, *layer), device) for tokens in chosen}
    assert {tokens: not decision.slower for tokens, decision in decisions.items()} == chosen
    assert not any(decision.refusal for decision in decisions.values())


@pytest.mark.parametrize("tokens", [2, 4, 8])
@pytest.mark.parametrize(
    "layer", [KIMI, DEEPSEEK, ("nvfp4", *DEEPSEEK[1:])], ids=["kimi-k2", "deepseek-v3", "deepseek-v3 in nvfp4"]
)
def test_large_layers(layer: tuple[Any, ...], tokens: int) -> None:
    """As measured on an H200; on an H100 their bytes take longer than those of any timed layer."""
    on_h200, on_h100 = (one_launch(key_of(tokens, *layer), device).slower for device in (H200, H100))
    assert on_h200 == "" and "no layer above 112 was timed" in on_h100


def test_experts_without_gates_are_chosen() -> None:
    nemotron = ("int4_g128", 128, 2688, 1856, 6)
    decisions = [one_launch(key_of(tokens, *nemotron, activation="relu2"), H200) for tokens in (1, 2, 4, 8)]
    assert not any(d.slower or d.refusal for d in decisions)


@pytest.mark.parametrize(
    "key, reason",
    [
        (key_of(9, *QWEN), "takes 1 to 8 tokens, got 9"),
        (key_of(1, *QWEN, dtype=torch.float8_e4m3fn), "16-bit x"),
        (key_of(8, *QWEN[:4], 17), "128 choices"),
        (key_of(1, *QWEN, choice=ExpertChoice(Router(8), 256, torch.float32, False)), "a logit for each expert here"),
        (key_of(1, *QWEN, choice=ExpertChoice(Router(8, groups=5), 128, torch.float32, False)), "a multiple of 5"),
        (key_of(1, "int4_g128", 8, 2080, 768, 2), "features are a multiple of 64"),
        (key_of(8, "int4_g128", 8, 14336, 768, 2), "no room for stages of three"),
        (key_of(1, "e4m3_col_fp32", 8, 2048, 768, 2), "whose scales all lie beside their blocks"),
    ],
)
def test_what_it_cannot(key: LayerKey, reason: str) -> None:
    assert reason in one_launch(key, H100).refusal


def test_devices() -> None:
    assert "compute capability 9.0" in one_launch(key_of(1, *QWEN), Device("cuda", "NVIDIA A100", (8, 0), 108)).refusal
    assert "needs an NVIDIA GPU" in one_launch(key_of(1, *QWEN), Device("cpu")).refusal


def test_w4_experts_say_how_they_run() -> None:
    layer = layer_of(spec_of(2))
    experts = W4Experts(layer.gate_up, layer.down)
    assert experts.explain(2, 2).startswith("four launches: needs an NVIDIA GPU")
    experts.one_launch = True
    with pytest.raises(UnsupportedError, match="one_launch: wanted a layer and call that run in one launch, but needs"):
        experts(torch.randn(2, 192).bfloat16(), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))
    experts.one_launch = False
    assert experts.explain(2, 2) == "four launches: one_launch is False"


# --- on a GPU


@pytest.mark.gpu
def test_a_slice_of_the_fuzzer_on_the_gpu() -> None:
    """All kernels are compiled first, side by side."""
    assert not fuzz(range(330), "cuda", (*FORMS, *WIDE))


def experts_on_gpu() -> W4Experts:
    """A layer of 16 experts with ragged k blocks."""
    products = []
    for n, k in ((2 * 416, 704), (704, 416)):
        weights = (random_weight(WeightFormat.parse("int4_g128"), n, k, seed) for seed in range(16))
        stack = QuantizedWeight.stack(weights, 16, "mma16").to("cuda")
        products.append(W4GroupedLinear.from_weight(stack, dtype=torch.bfloat16))
    experts = W4Experts(*products)
    experts.one_launch = True
    return experts


def drawn_call(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random experts for four tokens, some elsewhere, some twice; of some seeds one for all, or none."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, 18, (4, 4), generator=g)
    if seed % 5 == 0:
        ids.fill_(seed % 17)
    x = torch.randn(4, 704, generator=g).bfloat16()
    return x.cuda(), ids.cuda(), torch.rand(4, 4, generator=g).cuda()


@pytest.mark.gpu
def test_graphs_streams_and_maps() -> None:
    """A graph that is replayed with other routings, while other streams launch the same layer."""
    experts = experts_on_gpu()
    calls = [drawn_call(seed) for seed in range(40)]
    expected = [experts(*call) for call in calls]
    static = [t.clone() for t in calls[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = [experts(*static) for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    for call, one in zip(calls, expected, strict=True):
        for to, t in zip(static, call, strict=True):
            to.copy_(t)
        torch.cuda.synchronize()
        graph.replay()
        others = []
        for stream in streams:
            with torch.cuda.stream(stream):
                others += [experts(*call) for _ in range(4)]
        torch.cuda.synchronize()
        assert all(torch.equal(out, one) for out in (*replayed, *others))
    expert_map = torch.randperm(20, dtype=torch.int32).cuda() - 4
    x, _, weights = calls[1]
    ids = torch.randint(-1, 21, (4, 4)).cuda()
    here = torch.where((ids >= 0) & (ids < 20), expert_map[ids.clamp(0, 19)], -1).int()
    products = Experts(experts.gate_up.weight), Experts(experts.down.weight)
    mapped = expert_layer(x, ByIds(ids, weights), *products, "silu_mul", expert_map)
    assert torch.equal(mapped, experts(x, here, weights))


@pytest.mark.gpu
def test_logits_on_the_gpu() -> None:
    """A launch that chooses gives the bits of one that is given the choices."""
    experts, router = experts_on_gpu(), Router(4, "sigmoid", groups=4, top_groups=2, scale=2.5)
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        x, logits = torch.randn(4, 704, generator=g).bfloat16().cuda(), torch.randn(4, 16, generator=g).cuda()
        bias = torch.randn(16, generator=g).cuda()
        ids, weights = choose_experts(logits, router, bias)
        assert torch.equal(ids.cpu(), router.choose(logits.cpu(), bias.cpu())[0])
        assert torch.equal(experts.of_logits(x, logits, router, bias), experts(x, ids, weights))


MANY = spec_of(4, experts=8, features=2048, width=416, top_k=4, ctas=256, warps=16)
"""As many CTAs as there are flags for. Each has so many registers that a multiprocessor has room for one."""


@pytest.mark.gpu
@pytest.mark.parametrize("split", [False, True], ids=["whole strips", "split strips"])
@pytest.mark.parametrize("format", ["int4_g128", "nvfp4", "mxfp4"])
def test_more_ctas_than_multiprocessors(format: str, split: bool) -> None:
    """Those that run first compute what those that begin late should have, which compute it once more. Launches side by
    side take one another's multiprocessors."""
    facts = torch.cuda.get_device_properties(0)
    weight = weight_operand(WeightFormat.parse(format), torch.bfloat16)
    spec = replace(MANY, weight=weight, split=split)
    assert spec.ctas > facts.multi_processor_count and 2 * spec.threads * 128 > 65536
    layer = layer_of(spec, format)
    there = layer.to("cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    memory = [
        (fresh_flags().cuda(), torch.full((spec.scratch_bytes // 4,), -1, dtype=torch.int32, device="cuda"))
        for _ in streams
    ]
    for number in range(30):
        problem = draw(spec, number)
        moved, outs = problem.to("cuda"), []
        torch.cuda.synchronize()
        for _ in range(2):
            for stream, (flags, hidden) in zip(streams, memory, strict=True):
                with torch.cuda.stream(stream):
                    outs.append(launched_as_it_is(there, moved.x, moved.choices, flags, hidden))
        torch.cuda.synchronize()
        assert all(torch.equal(out.view(torch.int16), outs[0].view(torch.int16)) for out in outs)
        assert not faults(outs[0].cpu(), problem.sums(layer))
    assert all(flags[: spec.ctas].eq(2 * 60).all() for flags, _ in memory)


def sums_of_many() -> list[int]:
    """The sum of the bits of what ten problems of ``MANY`` give, three launches of each in a row."""
    layer = layer_of(MANY)
    there, flags = layer.to("cuda"), fresh_flags().cuda()
    hidden, sums = torch.full((MANY.scratch_bytes // 4,), -1, dtype=torch.int32, device="cuda"), []
    for number in range(10):
        problem = draw(MANY, number)
        moved = problem.to("cuda")
        outs = [launched_as_it_is(there, moved.x, moved.choices, flags, hidden) for _ in range(3)]
        assert not faults(outs[0].cpu(), problem.sums(layer))
        sums += [int(out.view(torch.int16).long().sum()) for out in outs]
    return sums


@pytest.mark.gpu
def test_processes_that_share_the_gpu_by_mps(tmp_path: Path) -> None:
    """Each of three has a part of the multiprocessors, and CTAs of all run at once."""
    if (daemon := shutil.which("nvidia-cuda-mps-control")) is None:
        pytest.skip("no nvidia-cuda-mps-control")
    expected = f"{sums_of_many()}\n"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path),
        "CUDA_MPS_LOG_DIRECTORY": str(tmp_path),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
    }
    command = sys.executable, "-c", "from test_expert_layer import sums_of_many as sums; print(sums())"
    subprocess.run([daemon, "-d"], env=environment, check=True)
    try:
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
        assert [process.communicate(timeout=150)[0] for process in processes] == [expected] * 3
        assert "NEW CLIENT" in "".join(file.read_text() for file in tmp_path.glob("*.log"))
    finally:
        subprocess.run([daemon], input="quit\n", env=environment, text=True, check=True)


_FOREVER = """
import torch
from test_expert_layer import drawn_call, experts_on_gpu
experts, call = experts_on_gpu(), drawn_call(1)
while True:
    print(int(experts(*call).view(torch.int16).long().sum()), flush=True)
"""


@pytest.mark.gpu
def test_a_process_that_is_killed_leaves_nothing_to_others() -> None:
    """Flags and scratch memory are a process's own: it starts anew with zeros, whatever another one left half done."""
    experts, call = experts_on_gpu(), drawn_call(1)
    expected = experts(*call)
    bits = int(expected.view(torch.int16).long().sum())
    for seconds in (0.0, 0.3):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = sys.executable, "-c", _FOREVER
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert process.stdout is not None and int(process.stdout.readline()) == bits
            time.sleep(seconds)
        finally:
            process.kill()
            process.wait()
        assert torch.equal(experts(*call), expected)
