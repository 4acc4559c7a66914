"""Compiled ahead of time by ``w4gemm compile``: then models run where compiling is forbidden."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from w4gemm import (
    QuantizedWeight,
    Router,
    UnsupportedError,
    W4Experts,
    W4Linear,
    WeightFormat,
    choice,
    masked_linear,
    quantize,
)
from w4gemm.api import expert_layer, gather
from w4gemm.api.expert_layer import is_compiled
from w4gemm.checkpoints import Module
from w4gemm.choice.plan import Plan
from w4gemm.cli import compile
from w4gemm.cli.__main__ import main
from w4gemm.cli.compile import target_device
from w4gemm.cli.needs import Use, chosen, helpers_of, lookups_of, one_launches_of, problems_of
from w4gemm.cli.problems import embeddings_of, parse_layers
from w4gemm.console.values import parse_router
from w4gemm.core.gpus import capability_of, known_names
from w4gemm.core.problem import GPUS, H100, H200, Device
from w4gemm.jit import Unit
from w4gemm.jit import compile as jit
from w4gemm.kernels import HELPERS, launcher
from w4gemm.kernels.helpers.activation_quantize import FRONTS, ActivationQuantize
from w4gemm.kernels.helpers.base import LayerFacts
from w4gemm.kernels.helpers.experts import ExpertChoice, RowCombine
from w4gemm.kernels.helpers.rows import ColumnGather
from w4gemm.packing.packed_shape import packed_shape

pytest.importorskip("cutlass")

EXPERTS, TOP_K, HIDDEN = 8, 2, 192
FOUR_LAUNCHES, ONE_LAUNCH = 96, 128
"""Features of a mixture of experts that cannot, or does, run in one launch."""
N, K = 512, 128
TOKENS = (1, 2, 3, 7)
FORMAT = "int4_g64"


def fill(tmp_path: Path, device: Device, activations: str | None, features: int) -> Path:
    """Compile a mixture of experts and a layer in act-order beside it, for all numbers of tokens up to TOKENS."""
    shapes, folder = tmp_path / "shapes.txt", tmp_path / "kernels"
    shapes.write_text(
        f"{EXPERTS} {2 * HIDDEN} {features} {FORMAT}\n{EXPERTS} {features} {HIDDEN} {FORMAT}\n{N} {K} {FORMAT} bias\n"
    )
    arguments = ["--shapes", str(shapes), "--m", f"1..{max(TOKENS)}", "--act-order", "--top-k", str(TOP_K)]
    arguments += [] if activations is None else ["--activations", activations]
    assert main(["compile", *arguments, "--gpu", device.name, "--sms", str(device.sms), "-o", str(folder)]) == 0
    return folder


@pytest.fixture
def forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Hide from a test what this process compiled, loaded or planned, and from other tests what it plans."""

    def clear() -> None:
        choice.forget()
        launcher.cache_clear()
        gather._gather_on.cache_clear()
        is_compiled.cache_clear()
        jit._memory.clear()

    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path / "before"))  # the command sets another one
    monkeypatch.setattr(jit, "_memory", {})
    clear()
    yield clear
    clear()


def test_a_named_gpu_has_the_rates_of_its_name():
    """There the choice must be the same."""
    pcie = target_device("sm_90a", "NVIDIA H100 PCIe", 114)
    assert pcie == replace(H200, name=pcie.name, sms=114, clock=0.0, bandwidth=0.0, operations=0.0)
    assert 0 < pcie.bandwidth < H200.bandwidth and target_device(None, None, None) == H200


@pytest.mark.parametrize("name, exact", [("h200", "NVIDIA H200"), ("H200", "NVIDIA H200"), ("h100", H100.name)])
def test_short_names_find_the_measured_choices_of_the_gpu(name, exact):
    """Once other configs were compiled for "H200" than the GPU chooses."""
    assert target_device(None, name, None).name == exact
    assert (
        target_device(None, "nvidia h100 pcie", 114).bandwidth == target_device(None, "NVIDIA H100 PCIe", 114).bandwidth
    )


def test_a_gpu_that_is_not_known_is_described():
    """Once it was taken for an H200 of another name."""
    actual = target_device("sm_89", "NVIDIA GeForce RTX 4080", 76)
    assert (actual.name, actual.capability, actual.sms) == ("NVIDIA GeForce RTX 4080", (8, 9), 76)
    assert all(capability_of(f"NVIDIA {name}") for name in known_names())


def model(device: str, activations: str | None, features: int) -> tuple[W4Experts, W4Linear]:
    """The layers that :func:`fill` compiles for."""
    torch.manual_seed(0)

    def weight(n: int, k: int) -> QuantizedWeight:
        return quantize(torch.randn(n, k) / k**0.5, FORMAT).to(device).repack(activations=activations)

    gate_up = QuantizedWeight.stack([weight(2 * HIDDEN, features) for _ in range(EXPERTS)])
    down = QuantizedWeight.stack([weight(features, HIDDEN) for _ in range(EXPERTS)])
    acted = weight(N, K)
    acted = replace(acted, perm=torch.randperm(K, dtype=torch.int32).to(acted.device))
    mixture = W4Experts(gate_up, down, dtype=torch.bfloat16)
    return mixture, W4Linear.from_weight(acted, torch.randn(N, device=device).bfloat16())


def run(mixture: W4Experts, layer: W4Linear, tokens: int, device: str) -> list[torch.Tensor]:
    """One result of everything that launches."""
    r = torch.Generator().manual_seed(tokens)
    features = mixture.gate_up.weight.k
    ids = torch.rand(tokens, EXPERTS, generator=r).argsort(1)[:, :TOP_K].to(device)
    x, weights = torch.randn(tokens, features, generator=r), torch.rand(tokens, TOP_K, generator=r).to(device)
    results = [mixture(x.to(device, torch.bfloat16), ids, weights)]
    counts = torch.full((EXPERTS,), tokens, dtype=torch.int32, device=device)
    padded = x.expand(EXPERTS, tokens, features).to(device, torch.bfloat16).contiguous()
    results.append(masked_linear(padded, mixture.gate_up.weight, counts, activation="silu_mul"))
    results.append(layer(torch.randn(tokens, K, generator=r).to(device, torch.bfloat16)))
    return results


@pytest.mark.parametrize("activations", [None, "fp8"])
def test_all_that_a_mixture_of_experts_launches_is_there(tmp_path, monkeypatch, forget, activations):
    """Its layers run here as if the CPU were an H200, up to the launches: every plan is made of what was compiled.

    Units count as compiled without being so, because tests/test_tuning_commands.py compiles some and loads them.
    """

    def count(folder: Path, units: Iterable[Unit], workers: int | None = None) -> int:
        jit._memory.update(dict.fromkeys(units, print))
        return 0

    monkeypatch.setattr(compile, "fill", count)
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(fill(tmp_path, H200, activations, FOUR_LAUNCHES)))
    monkeypatch.setenv("W4GEMM_COMPILE", "off")
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, device: H200))
    launched: list[Plan] = []
    launch = functools.cached_property(lambda plan: lambda operands: launched.append(plan))
    launch.__set_name__(Plan, "launch")
    monkeypatch.setattr(Plan, "launch", launch)
    mixture, layer = model("cpu", activations, FOUR_LAUNCHES)
    for tokens in TOKENS:
        run(mixture, layer, tokens, "cpu")
    assert len(launched) == 4 * len(TOKENS)
    assert {plan.problem.experts for plan in launched} == {EXPERTS, 0}
    assert {plan.problem.dtype for plan in launched} == {torch.float8_e4m3fn if activations else torch.bfloat16}
    assert all(plan.compiled is not None for plan in launched)
    # on the CPU PyTorch does what these do
    here = torch.device("cpu")
    assert launcher(RowCombine.of, here, torch.bfloat16, TOP_K) is not None
    if activations is None:
        assert launcher(ColumnGather.of, here, torch.bfloat16, K) is not None
    else:
        for front in FRONTS:
            for k in {FOUR_LAUNCHES, HIDDEN, K}:
                assert launcher(ActivationQuantize.of, here, torch.bfloat16, k, front, True) is not None
    with pytest.raises(UnsupportedError, match="W4GEMM_COMPILE=off forbids compiling"):
        launcher(RowCombine.of, here, torch.bfloat16, TOP_K + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("activations", [None, "fp8"])
def test_a_mixture_of_experts_serves_where_compiling_is_forbidden(tmp_path, monkeypatch, forget, activations):
    here = Device.of("cuda")
    if here.capability != H200.capability:
        pytest.skip("compiles for the default target")
    mixture, layer = model("cuda", activations, ONE_LAUNCH)
    whole = [run(mixture, layer, tokens, "cuda") for tokens in TOKENS]
    folder = fill(tmp_path, here, activations, ONE_LAUNCH)
    before = sorted(path.name for path in folder.iterdir())
    forget()
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(folder))
    monkeypatch.setenv("W4GEMM_COMPILE", "off")
    launches = {mixture.explain(tokens, TOP_K).partition(":")[0] for tokens in TOKENS}
    assert launches == {"four launches" if activations else "one launch (expert_layer)"}
    for tokens, expected in zip(TOKENS, whole, strict=True):
        for got, want in zip(run(mixture, layer, tokens, "cuda"), expected, strict=True):
            assert torch.equal(got, want)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_scales_of_experts_are_compiled_where_they_are_asked_for():
    experts, single = Module(128, 256, WeightFormat(64), experts=EXPERTS), Module(128, 256, WeightFormat(64))
    use = Use(H200, torch.bfloat16)
    for layer, expected in ((experts, {False, True}), (single, {False})):
        assert {p.epilogue.expert_scale for p in problems_of(layer, [4], use)} == {False}
        actual = list(problems_of(layer, [4], use._replace(expert_scale=True)))
        assert {p.epilogue.expert_scale for p in actual} == expected
    units, _ = chosen(problems_of(experts, [4], use._replace(expert_scale=True)))
    assert len(units) == 2 * len(chosen(problems_of(experts, [4], use))[0])


def test_layers_of_experts_in_one_launch_are_compiled_where_they_are_chosen(monkeypatch, forget):
    format = WeightFormat.parse(FORMAT)
    gate_up, down = (Module(n, k, format, experts=EXPERTS) for n, k in ((2 * HIDDEN, ONE_LAUNCH), (ONE_LAUNCH, HIDDEN)))
    layers, use = [Module(N, K, format), down, gate_up], Use(H200, torch.bfloat16, top_k=TOP_K)
    units = set(one_launches_of(layers, [1, 2], use))
    assert len(units) == 8 and {unit.name for unit in units} == {"expert_layer"}, (
        "of four numbers of tokens, two dtypes"
    )
    with_scales = use._replace(expert_scale=True, epilogue_activations=("relu2", "gelu_mul"))
    assert len(set(one_launches_of(layers, [1], with_scales))) == 4 * len(units)
    assert not list(one_launches_of(layers, [2], use)), "more rows than eight tokens have"
    assert not list(one_launches_of([gate_up, replace(down, n=2 * ONE_LAUNCH)], [1], use))
    assert not list(one_launches_of(layers, [1], use._replace(fp8=True)))
    assert not list(one_launches_of(layers, [1], use._replace(batch_invariant=True)))
    invariant = list(problems_of(down, [1, 4], use._replace(batch_invariant=True)))
    assert {p.m < p.experts for p in invariant} == {True, False} and all(p.batch_invariant for p in invariant)
    assert not list(one_launches_of(layers, [1], use._replace(top_k=0)))
    assert not list(one_launches_of([replace(gate_up, activations="fp8"), down], [1], use))
    assert not list(one_launches_of(layers, [1], use._replace(device=Device("cpu"))))
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, device: H200))
    monkeypatch.setattr(expert_layer, "is_ready", units.__contains__)
    monkeypatch.setenv("W4GEMM_COMPILE", "off")
    mixture, _ = model("cpu", None, ONE_LAUNCH)
    assert {mixture.explain(tokens, TOP_K) for tokens in range(1, 9)} == {"one launch (expert_layer)"}
    assert mixture.explain(1, TOP_K + 1).endswith("its kernel was not compiled ahead")


def test_routers_are_compiled_where_they_are_asked_for():
    format = WeightFormat.parse(FORMAT)
    layers = [
        Module(n, k, format, experts=EXPERTS) for n, k in ((2 * HIDDEN, ONE_LAUNCH), (ONE_LAUNCH, HIDDEN), (64, 64))
    ]
    use = Use(H200, torch.bfloat16, top_k=2, router=parse_router("sigmoid,groups=2,scale=2.5,bias", 2))
    helpers = [unit for unit in helpers_of(layers[0], use) if unit.name == "expert_choice"]
    assert {(unit.key[2], unit.key[3]) for unit in helpers} == {("torch.bfloat16", True), ("torch.float32", True)}
    assert len(set(one_launches_of(layers, [1], use))) == 4 * 4, "ids of two dtypes, logits of two"
    shapes = (packed_shape(format, "mma16", layer.n, layer.k, EXPERTS) for layer in layers[:2])
    by_logits = ExpertChoice(parse_router("sigmoid,groups=2,scale=2.5", 2)[0], EXPERTS, torch.float32, True)
    key = expert_layer.LayerKey(1, *shapes, torch.bfloat16, "silu_mul", 2, torch.int32, choice=by_logits)
    assert expert_layer.one_launch(key, H200).chosen.unit() in set(one_launches_of(layers, [1], use))
    assert not [unit for unit in helpers_of(Module(64, 64, format), use) if unit.name == "expert_choice"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("softmix", "scoring: wanted one of"),
        ("softmax,group=2", "wanted a scoring, then any of groups=..."),
        ("softmax,scale=much", "got 'scale=much'"),
        ("sigmoid,renormalize=maybe", "got 'renormalize=maybe'"),
        ("softmax,groups=64", "groups: wanted"),
    ],
)
def test_routers_that_are_none(text, reason):
    with pytest.raises(ValueError, match=f"^--router: .*{re.escape(reason)}"):
        parse_router(text, 2)
    assert parse_router("softmax", 4) == (Router(4), False)
    assert parse_router("softmax,renormalize=off", 4) == (Router(4, renormalize=False), False)


def test_a_helper_says_what_a_layer_needs():
    """Whatever is in the registry is compiled ahead of time by being there."""
    for kind in HELPERS:
        (nothing,) = {tuple(kind.needed(H200, LayerFacts(K, torch.bfloat16)))}
        assert nothing == ()
    layer = LayerFacts(K, torch.bfloat16, act_order=True, top_k=8)
    assert [h.unit().name for kind in HELPERS for h in kind.needed(H200, layer)] == ["column_gather", "row_combine"]
    quantized = [h for kind in HELPERS for h in kind.needed(H200, layer._replace(fp8=True))]
    assert [h.name for h in quantized] == ["row_combine", *["activation_quantize"] * 3]
    assert not any(tuple(kind.needed(Device("cpu"), layer._replace(fp8=True))) for kind in HELPERS)


def test_a_packed_embedding_is_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was compiled and tuned as one."""
    format = WeightFormat.parse("int8_g32_fp16")
    modules = {"model.embed_tokens": Module(512, 64, format), "lm_head": Module(256, 64, format)}
    monkeypatch.setattr("w4gemm.cli.problems.open_checkpoint", lambda *_: SimpleNamespace(modules=modules))
    args = argparse.Namespace(model="folder", format=None)
    assert [layer.n for layer in parse_layers(args, H200)] == [256] and [m.n for m in embeddings_of(args)] == [512]


def test_rows_of_a_packed_embedding(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tiny_model import write_gguf

    model = str(write_gguf(tmp_path / "tiny.gguf", "llama", "Q4_1", tied=False))
    (embedding,) = embeddings_of(argparse.Namespace(model=model, format=None))
    units = {unit for dtype in (torch.float16, torch.bfloat16) for unit in lookups_of([embedding], Use(H200, dtype))}
    assert {unit.key for unit in units} == {(f"torch.{x}", "int8_g32_fp16", True) for x in ("float16", "bfloat16")}
    assert not [*lookups_of([embedding], Use(GPUS["sm_80"], torch.float16))], "PyTorch's operators look up rows there"
    assert not embeddings_of(argparse.Namespace(model=None, shapes="64x64", format=None))
