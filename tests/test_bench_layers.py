"""Whole layers of experts with configs forced: which are timed, and that each computes the layer. Needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from bench import layers
from bench.layers import Forced, Ours, Sizes

from w4gemm import choice
from w4gemm.core.problem import H100, Device

SMALL = layers.Layer(Sizes(experts=4, top_k=2, hidden=256, width=128), "int4_g128")


@pytest.mark.parametrize("name", layers.LAYERS)
def test_the_likeliest_configs_are_timed(name):
    gate_up, down = layers.problems(layers.LAYERS[name], 64, H100)
    actual = layers.candidates(gate_up, down, 4)
    assert actual.gathered == choice.configs(gate_up)[:1] + actual.gathered[1:] and len(actual.gathered) == 4
    assert len(actual.copied) == len(actual.down) == 2 and actual.down[0] == choice.configs(down)[0]
    combinations = actual.combinations()
    assert [len(group) for group in combinations.values()] == [4, 2, 2]
    assert combinations["copied"][actual.copied[1]] == Forced(actual.copied[1], actual.down[0], copied=True)
    assert combinations["down"][actual.down[1]] == Forced(actual.gathered[0], actual.down[1])
    assert len(set(layers.units_of(gate_up, down, actual))) >= 4


@pytest.mark.parametrize("format, activation", [("int4_g128", "silu_mul"), ("mxfp4", "swiglu_oai(limit=7)")])
def test_each_combination_computes_the_layer(format, activation, monkeypatch):
    ours = Ours(SMALL.sizes, "cpu", format, activation)
    results = []

    def time_graphs(graphs, replays):
        for calls in graphs:
            results.append([call().clone() for call in calls])
        return [SimpleNamespace(p50=float(i)) for i, _ in enumerate(graphs)]

    monkeypatch.setattr(layers, "time_graphs", time_graphs)
    actual = layers.candidates(*layers.problems(layers.Layer(SMALL.sizes, format, activation), 3, Device.of("cpu")), 1)
    us = layers.times(ours, actual, 3)
    (gathered,), (copied,), (down,) = actual
    assert us == {"chosen": 0.0, "gathered": {gathered: 1.0}, "copied": {copied: 2.0}, "down": {down: 1.0}}
    for each in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], each, strict=True)) and each[0].any()
