from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import logging
import math
from dataclasses import replace

import pytest
import torch

import w4gemm
from w4gemm import choice
from w4gemm.choice.cost import predicted_us
from w4gemm.choice.model import ranked
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.errors import UnsupportedError
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import GPUS, H200, Device, GemmProblem
from w4gemm.kernels import KERNELS, kernel_named, requirements, workspace
from w4gemm.kernels.helpers.activation_quantize import ActivationQuantize
from w4gemm.kernels.helpers.experts import RowCombine
from w4gemm.kernels.helpers.rows import ColumnGather
from w4gemm.packing.packed_shape import packed_shape

CPU = Device("cpu")
FORMAT = WeightFormat.parse("int4_g32_zfloat_fp16")
PROBLEM = GemmProblem(8, 130, 96, torch.float32, FORMAT, "cpu", device=CPU)
H200_PROBLEM = GemmProblem(16, 4096, 4096, torch.bfloat16, WeightFormat(), "mma16", device=H200)
FP8_PROBLEM = replace(H200_PROBLEM, dtype=torch.float8_e4m3fn, layout="mma8")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"m": -5}, ValueError, "m: wanted an int from 1 on, got -5"),
        ({"m": 5.5}, TypeError, "m: wanted an int from 1 on, got 5.5"),
        ({"k": 0}, ValueError, "k: wanted an int from 1 on, got 0"),
        ({"dtype": "bfloat16"}, TypeError, "dtype: wanted a torch.dtype, got str 'bfloat16'"),
        ({"format": 128}, TypeError, "format: wanted a WeightFormat or its string, got int"),
        ({"layout": "sm80"}, ValueError, "layout: wanted one of .*, got 'sm80'"),
        ({"epilogue": "relu"}, TypeError, "epilogue: wanted an Epilogue, got str"),
        ({"device": "cpu"}, TypeError, "device: wanted a Device, got 'cpu'; Device.of makes one"),
        ({"batch_invariant": "off"}, TypeError, "batch_invariant: wanted a bool, got str 'off'"),
        ({"gathered": 3}, TypeError, "gathered: wanted a bool, got int 3"),
        ({"epilogue": Epilogue("swish")}, ValueError, "activation: wanted one of .*, got 'swish'"),
    ],
)
def test_what_makes_no_problem(change, error, message):
    problem = replace(GemmProblem(16, 512, 512, torch.bfloat16, WeightFormat(), "mma16"), **change)
    for ask in (w4gemm.explain, w4gemm.configs):
        with pytest.raises(error, match=message):
            ask(problem)


def test_a_problem_takes_a_formats_string_and_no_device_that_there_is_not():
    problem = GemmProblem(16, 512, 512, torch.bfloat16, "int4_g64_zint", "mma16")
    assert problem == replace(problem, format=WeightFormat(64, "int"))
    with pytest.raises(ValueError, match="got 'AWQ'; nearest is 'int4_g128_zint'"):
        WeightFormat.parse("AWQ")
    names = {"e5m2": "e5m2_col_fp32", "mxfp6_e3m2": "e3m2_g32_e8m0", "mxfp6_e2m3": "mxfp6", "fp4": "mxfp4"}
    for name, nearest in names.items():
        with pytest.raises(ValueError, match=f"got '{name}'; nearest is '{nearest}'"):
            WeightFormat.parse(name)
    with pytest.raises(ValueError, match="format: wanted .*; got 'int4_64'; nearest is 'int4_g64'"):
        replace(problem, format="int4_64")
    with pytest.raises(ValueError, match="kind: wanted 'cuda', 'cpu' or .*, got 'H200'; w4gemm.Device.of"):
        Device("H200")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device: cuda is not there; PyTorch sees no CUDA GPU"):
            Device.of("cuda")


def test_intervals_of_m():
    last = len(choice.BOUNDS)
    actual = [choice.interval(m) for m in (1, 2, 3, 4, 5, 8, 9, 16, 17, 8192, 8193, 10**6)]
    assert actual == [0, 1, 2, 2, 3, 3, 4, 4, 5, last - 1, last, last]
    assert list(choice.BOUNDS) == sorted(choice.BOUNDS)


def call(m: int, **changes) -> choice.PlanKey:
    w = {"format": FORMAT, "layout": "cpu", "n": 130, "k": 96}
    weight = packed_shape(**{name: changes.pop(name, value) for name, value in w.items()})
    return choice.PlanKey.of(weight, m, **{"dtype": torch.float32, "device": torch.device("cpu"), **changes})


@pytest.mark.parametrize("experts", [0, 1, 8, 100])
def test_rows_that_stand_for_an_interval(experts):
    """Above one row for each expert by the average; below by the number of rows, as most experts have none."""
    stands = [choice.plan_rows(m, experts) for m in range(1, 3001)]
    assert all(m <= of for m, of in enumerate(stands, 1)) and stands == sorted(stands)
    assert {choice.plan_rows(m, experts) for m in choice.first_rows(3000, experts)} == set(stands)
    assert choice.plan_rows(8, 128) == 8
    assert choice.plan_rows(127, 128) == choice.plan_rows(128, 128) == 128
    assert choice.plan_rows(3 * 128, 128) == 4 * 128
    assert choice.plan_rows(100, 0) == choice.interval_end(100) == 104


def test_many_tokens_are_planned_for_as_they_come():
    """Few plans, none for an m that is more than 1/64 away, or 16."""
    stands = [choice.plan_m(m) for m in range(1, 20_001)]
    assert stands == sorted(stands) and max(stands) == 16384
    assert all(m <= of <= max(m + 15, m * 65 / 64) for m, of in enumerate(stands[:16384], 1) if m > choice.WAVES_FROM)
    assert all(choice.plan_m(of) == of for of in set(stands))
    assert len({of for of in stands if of > choice.WAVES_FROM}) == 3 * 64 + 2 * 48 + 16 and choice.plan_m(300) == 304
    assert set(choice.BOUNDS) <= set(stands)


@pytest.mark.parametrize(
    ("m", "expected"), [(1, "m 1"), (3, "m 3 to 4"), (8192, "m 4097 to 8192"), (9999, "m from 8193")]
)
def test_intervals_in_words(m, expected):
    assert choice.span(*choice.interval_of(m)) == expected


def test_a_plan_is_resolved_once_an_interval(monkeypatch, caplog):
    monkeypatch.setattr(choice.plan_cache, "_plans", {})
    caplog.set_level(logging.DEBUG, "w4gemm")
    plans = [choice.plan_for(call(m)) for m in (7, 5, 8, 9, 16, 6)]
    assert plans[0] is plans[1] is plans[2] is plans[5]
    assert plans[3] is plans[4] is not plans[0]
    assert (plans[0].problem.m, plans[3].problem.m) == (8, 16)
    assert len([r for r in caplog.records if "m up to" in r.message]) == 2
    assert "cpu_mixed_gemm/" in caplog.text
    assert choice.plan_for(call(10**5)).problem.m == 16384


@pytest.mark.parametrize(
    "change",
    [
        *({"n": 131}, {"epilogue": Epilogue(bias=True)}, {"dtype": torch.float16}, {"layout": "canonical"}),
        {"batch_invariant": True},
    ],
    ids=str,
)
def test_what_a_plan_depends_on(change):
    assert choice.plan_for(call(1)) is not choice.plan_for(call(1, **change))


def test_the_best_guess_of_all_kernels():
    plan = choice.choose(PROBLEM)
    _, kernel, config = ranked(KERNELS, PROBLEM)[0]
    assert plan.kernel is kernel is kernel_named("cpu_mixed_gemm")
    assert plan.config == config
    assert plan.compiled is None
    assert str(plan) == f"cpu_mixed_gemm/{plan.config}"


def test_a_config_can_be_forced():
    last = kernel_named("cpu_mixed_gemm").configs(PROBLEM)[-1]
    for config in (last, str(last), f"cpu_mixed_gemm/{last}"):
        assert choice.choose(PROBLEM, config).config == last


def test_an_illegal_config_is_named_with_legal_ones():
    with pytest.raises(ValueError, match=r"config: 1x128x64_1x1x1_coop is not legal .*1x128x32_1x1x1_coop"):
        choice.choose(PROBLEM, GemmConfig(1, 128, 64))
    with pytest.raises(ValueError, match="config: wanted <tile_m>x.*got '1x2'"):
        choice.choose(PROBLEM, "1x2")
    with pytest.raises(ValueError, match="kernel: wanted one of .*cpu_mixed_gemm.*got 'nope'"):
        choice.choose(PROBLEM, "nope/1x128x32_1x1x1_coop")
    with pytest.raises(UnsupportedError, match="sm90_mixed_gemm: needs"):
        choice.choose(PROBLEM, "sm90_mixed_gemm/64x128x128_1x1x1_coop")


REFUSED = {
    "an old GPU": replace(H200_PROBLEM, device=Device("cuda", "NVIDIA T4", (7, 5), 40, 65536)),
    "a GPU that is not known yet": replace(H200_PROBLEM, device=Device("cuda", "NVIDIA X", (13, 0), 200, 232448)),
    "a GPU with little shared memory": replace(H200_PROBLEM, device=Device("cuda", "NVIDIA Y", (8, 6), 20, 65536)),
    "an AMD GPU": replace(H200_PROBLEM, device=Device("cuda", "AMD MI300X", (9, 4), 304, 65536, rocm=True)),
    "float32 on a GPU": replace(H200_PROBLEM, dtype=torch.float32),
    "fp8 on a GPU without e4m3": replace(FP8_PROBLEM, device=Device("cuda", "NVIDIA A10", (8, 6), 72, 101376)),
    "a GPU layout on the CPU": replace(PROBLEM, layout="mma16"),
    "an unknown device": replace(PROBLEM, device=Device("mps")),
}


@pytest.mark.parametrize("problem", REFUSED.values(), ids=REFUSED)
def test_no_kernel(problem):
    with pytest.raises(UnsupportedError) as e:
        choice.choose(problem)
    for kernel in KERNELS:
        assert f"{kernel.name}: {kernel.supports(problem).reason}" in str(e.value)
    explanation = choice.explain(problem)
    assert explanation.candidates == ()
    assert all(kernel.supports(problem).reason in str(explanation) for kernel in KERNELS)


OLDER_AND_NEWER = {
    "A100": GPUS["sm_80"],
    "RTX 4090": GPUS["sm_89"],
    "RTX 5090": GPUS["sm_120a"],
    "B200": GPUS["sm_100a"],
}


@pytest.mark.parametrize("device", OLDER_AND_NEWER.values(), ids=OLDER_AND_NEWER)
def test_gpus_without_hoppers_units(device, monkeypatch, caplog):
    """Every one of them runs the kernels for older GPUs within its shared memory; SM100's own tensor cores get a
    sentence."""
    monkeypatch.setattr(choice.plan, "compiled", lambda unit: unit)
    caplog.set_level(logging.WARNING, "w4gemm")
    kernel = kernel_named("sm80_mixed_gemm")
    for m in (1, 64, 4096):
        for invariant in (False, True):
            plan = choice.choose(replace(H200_PROBLEM, m=m, device=device, batch_invariant=invariant)).ready()
            by_cublas = m == 4096 and not invariant and device.capability == (10, 0)
            assert plan.kernel is (kernel_named("dequantize_gemm") if by_cublas else kernel)
    for problem in (H200_PROBLEM, replace(H200_PROBLEM, experts=8)):
        at = replace(problem, device=device)
        assert all(kernel.resources(at, c).memory <= device.shared_memory for c in kernel.configs(at))
    assert caplog.text.count("(tcgen05) does not exist yet") == (device.capability[0] == 10)


@pytest.mark.parametrize("name", ["RTX 4090", "RTX 5090", "B200"])
@pytest.mark.parametrize("format", ["int4_g128", "int4_g32_zint", "int4_g128_e4m3"])
def test_fp8_without_hoppers_units(name, format, monkeypatch):
    monkeypatch.setattr(choice.plan, "compiled", lambda unit: unit)
    at = replace(FP8_PROBLEM, device=OLDER_AND_NEWER[name], format=WeightFormat.parse(format))
    kernel = kernel_named("sm89_fp8_gemm")
    for m in (1, 64, 4096):
        for invariant in (False, True):
            assert choice.choose(replace(at, m=m, batch_invariant=invariant)).kernel is kernel
    for problem in (at, replace(at, experts=8)):
        assert all(kernel.resources(problem, c).memory <= at.device.shared_memory for c in kernel.configs(problem))


def test_fp8_without_e4m3():
    a100, t4 = OLDER_AND_NEWER["A100"], Device("cuda", "NVIDIA T4", (7, 5), 40, 65536)
    for device in (a100, t4):
        reason = kernel_named("sm89_fp8_gemm").supports(replace(FP8_PROBLEM, device=device)).reason
        assert "needs compute capability 8.9 or newer" in reason and "e4m3" in reason and device.name in reason
        assert ActivationQuantize.of(device, torch.bfloat16, 128, "", True) is None
    for device in (H200, *(d for d in OLDER_AND_NEWER.values() if d is not a100)):
        assert ActivationQuantize.of(device, torch.bfloat16, 128, "", True) is not None


def test_dequantize_gemm_keeps_to_its_workspace(monkeypatch):
    kernel, problem = kernel_named("dequantize_gemm"), replace(H200_PROBLEM, m=16384, n=57344, k=8192)
    sizes = [kernel.workspace_bytes(problem, c) for c in kernel.configs(problem)]
    assert len(sizes) > 1 and max(sizes) <= (256 << 20) + workspace.FLAG_BYTES
    monkeypatch.setenv("W4GEMM_WORKSPACE_MIB", "1000")
    assert [kernel.workspace_bytes(problem, c) for c in kernel.configs(problem)][: len(sizes)] == sizes
    assert kernel.configs(problem)[-1].tile_n > problem.n / 2
    monkeypatch.setenv("W4GEMM_WORKSPACE_MIB", "0")
    reason = kernel.supports(problem).reason
    assert "needs 33 MiB of workspace, W4GEMM_WORKSPACE_MIB allows 0" in reason
    monkeypatch.setenv("W4GEMM_WORKSPACE_MIB", "9" * 5000)  # more digits than Python makes an int of
    with pytest.raises(ValueError, match="W4GEMM_WORKSPACE_MIB: wanted a number of MiB from 0"):
        kernel.supports(problem)
    monkeypatch.setenv("W4GEMM_WORKSPACE_MIB", "lots")
    with pytest.raises(ValueError, match="W4GEMM_WORKSPACE_MIB: wanted a number of MiB from 0, got 'lots'"):
        kernel.supports(problem)


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"experts": 8}, "takes a single weight"),
        ({"epilogue": Epilogue("gelu", bias=True)}, "stores x @ w.T + bias alone"),
        ({"layout": "canonical"}, "with mma16"),
        ({"dtype": torch.float8_e4m3fn, "layout": "mma8"}, "want e4m3 group scales"),
    ],
)
def test_what_dequantize_gemm_refuses(changed, reason):
    assert reason in kernel_named("dequantize_gemm").supports(replace(H200_PROBLEM, **changed)).reason


def best_us(name: str, problem: GemmProblem) -> float:
    """Predicted time of a kernel's best guess."""
    return ranked([kernel_named(name)], problem)[0][0]


@pytest.mark.parametrize("format", ["int4_g128", "int4_g32", "int4_col_zint", "int4_g128_e4m3"])
def test_on_hopper_its_own_fp8_kernel_comes_first(format):
    """Before the one for older GPUs always, and up to 2048 tokens before decoding e4m3 weights once for cuBLAS."""
    for n, k in ((512, 512), (4096, 4096), (57344, 8192), (8192, 28672)):
        for m, experts in itertools.product((1, 8, 48, 256, 2048, 16384), (0, 8)):
            p = replace(FP8_PROBLEM, m=m, n=n, k=k, experts=experts, format=WeightFormat.parse(format))
            own = best_us("sm90_fp8_gemm", p)
            assert own < best_us("sm89_fp8_gemm", p), p
            if m <= 2048 and kernel_named("dequantize_gemm").supports(p):
                assert own < best_us("dequantize_gemm", p), p


def test_decoding_once_gains_with_tokens_and_features():
    """It writes the dense weight first: time / the fused kernel's time falls with m, and with n at the same n * k."""

    def ratio(m: int, n: int, k: int) -> float:
        p = replace(FP8_PROBLEM, m=m, n=n, k=k, format=WeightFormat.parse("int4_g128_e4m3"))
        return best_us("dequantize_gemm", p) / best_us("sm90_fp8_gemm", p)

    ratios = [ratio(m, 28672, 4096) for m in (64, 256, 1024, 4096, 8192)]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] > 2 > 1 > ratios[-1]
    assert ratio(8192, 28672, 4096) < ratio(8192, 8192, 28672)


def test_what_is_compiled_for_hopper_runs_on_hopper_only():
    """The small kernels beside the products have one target."""
    for of, size in ((ColumnGather.of, 128), (RowCombine.of, 8)):
        assert of(H200, torch.bfloat16, size) is not None and of(H200, torch.float32, size) is None
        assert not any(of(device, torch.bfloat16, size) for device in OLDER_AND_NEWER.values())


def test_repack_is_suggested_where_it_helps():
    with pytest.raises(UnsupportedError, match=r"w.repack\(\) gives cpu"):
        choice.choose(replace(PROBLEM, layout="mma16"))
    with pytest.raises(UnsupportedError) as e:
        choice.choose(replace(PROBLEM, device=Device("mps")))
    assert "w.repack()" not in str(e.value)


def test_a_cold_plan_is_logged_with_its_source(monkeypatch, caplog):
    monkeypatch.setattr(choice.plan_cache, "_plans", {})
    caplog.set_level(logging.DEBUG, "w4gemm")
    forced = choice.configs(PROBLEM)[0]
    for _ in range(2):
        choice.plan_for(call(PROBLEM.m))
        choice.plan_for(call(PROBLEM.m, config=forced))
    lines = [r.message for r in caplog.records if "ready in" in r.message]
    assert len(lines) == 2 and all(str(PROBLEM) in line and forced in line for line in lines)
    assert [("(heuristic)" in line, "(forced)" in line) for line in lines] == [(True, False), (False, True)]


def test_launches_are_named_for_a_profiler_only_if_asked(monkeypatch):
    """W4GEMM_NVTX decides when a plan is first launched, so that other calls pay nothing."""
    names = []
    monkeypatch.setattr(choice.plan, "compiled", lambda *a: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: names.append(name) or contextlib.nullcontext())
    for value in ("", "0", "1"):
        monkeypatch.setenv("W4GEMM_NVTX", value)
        plan = choice.choose(H200_PROBLEM)
        monkeypatch.setattr(plan.kernel.__class__, "launcher", lambda *a: lambda operands: names.append("launch"))
        plan.launch(None)
    assert names == ["launch", "launch", f"w4gemm {plan}", "launch"]


def test_explain():
    explanation = choice.explain(PROBLEM)
    assert list(explanation.status) == [kernel.name for kernel in KERNELS]
    _, kernel, config, _ = explanation.candidates[0]
    assert (kernel, config) == ("cpu_mixed_gemm", choice.choose(PROBLEM).config)
    assert {c.config for c in explanation.candidates} == set(kernel_named("cpu_mixed_gemm").configs(PROBLEM))
    assert f"chosen: cpu_mixed_gemm/{config}" in str(explanation)
    assert f"cpu_mixed_gemm: {len(explanation.candidates)} configs" in str(explanation)


@pytest.mark.parametrize("m", [1, 16, 4096])
def test_explain_needs_no_gpu(m):
    candidates = choice.explain(replace(H200_PROBLEM, m=m)).candidates
    assert candidates[0].kernel.startswith("sm90_")
    assert [c.us for c in candidates] == sorted(c.us for c in candidates)


@pytest.mark.parametrize("problem", [PROBLEM, H200_PROBLEM], ids=["cpu", "h200"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_the_kernel_protocol(kernel, problem):
    """configs has no duplicates and does not depend on m, its strings parse back, keys are hashable."""
    if not kernel.supports(problem):
        assert kernel.supports(problem).reason
        return
    configs = kernel.configs(problem)
    assert configs and len(set(configs)) == len(configs)
    assert [w4gemm.GemmConfig.parse(str(c)) for c in configs] == configs
    for m in (1, 64, 4096):
        at_m = replace(problem, m=m)
        assert set(kernel.configs(at_m)) == set(configs)
        assert {config for _, _, config in ranked([kernel], at_m)} == set(configs)
    for config in configs:
        assert isinstance(hash(kernel.unit(problem, config)), int)
        assert kernel.unit(problem, config) == kernel.unit(replace(problem, m=77), config)
        assert kernel.workspace_bytes(problem, config) >= 0
        us = predicted_us(kernel, problem, config)
        assert us > 0 and (us < math.inf or config.tail), "only two launches may be needless"
        order = kernel.reduction_order(problem, config)
        assert isinstance(hash(order), int) and order == kernel.reduction_order(replace(problem, m=77), config)


@pytest.fixture
def asked_again():
    """Forget before and after what was found out about the machine."""
    requirements.missing_for_dsl.cache_clear()
    yield
    requirements.missing_for_dsl.cache_clear()


@pytest.mark.parametrize(
    "lacks, reason",
    [
        ("dsl", "needs CuTe DSL (nvidia-cutlass-dsl), which is not installed; pip install '.[cuda]' in a clone of"),
        (
            "new dsl",
            "needs a newer CuTe DSL than nvidia-cutlass-dsl 4.2.1; pip install '.[cuda]' in a clone of w4gemm brings",
        ),
        ("driver", "needs a driver for CUDA 12.0 or newer, this one supports 11.8; update the driver"),
    ],
)
def test_a_machine_without_what_a_kernel_needs_gets_a_sentence(asked_again, monkeypatch, lacks, reason):
    have = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if (n, lacks) == ("cutlass", "dsl") else have(n))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "4.2.1" if lacks == "new dsl" else "4.8.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(requirements, "driver_cuda_version", lambda: (11, 8) if lacks == "driver" else (12, 0))
    if lacks != "dsl" and importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs CuTe DSL to be there, of whatever version")
    problem = GemmProblem(16, 512, 512, torch.bfloat16, WeightFormat(), "mma16")
    with pytest.raises(w4gemm.UnsupportedError) as e:
        choice.choose(problem)
    for name in ("sm90_mixed_gemm", "sm80_mixed_gemm"):
        assert f"{name}: {reason}" in str(e.value)


def test_without_a_gpu_configs_are_chosen_without_cute_dsl(asked_again, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(requirements, "_missing_dsl", lambda: "needs CuTe DSL")
    actual = choice.explain(GemmProblem(16, 512, 512, torch.bfloat16, WeightFormat(), "mma16"))
    assert actual.chosen is not None and actual.status["sm90_decode"]
    assert requirements.missing_to_compile() == "needs CuTe DSL"


def test_a_newer_dsl_runs_after_one_warning(asked_again, monkeypatch, caplog):
    requirements._warn_of_newer.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "4.10.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(requirements, "driver_cuda_version", lambda: None)
    for _ in range(2):
        assert requirements.missing_for_dsl() == ""
        requirements.missing_for_dsl.cache_clear()
    (record,) = caplog.records
    assert "nvidia-cutlass-dsl 4.10.0 is newer than 4.8.1" in record.message
    assert record.message.endswith("pip install '.[cuda]' in a clone of w4gemm brings 4.8.1")
    requirements._warn_of_newer.cache_clear()


def test_a_kernel_that_decodes_more_slowly_is_ranked_so():
    """Beside sm90_decode, sm90_mixed_gemm is at its best with bf16 and bf16 scales, and at its worst with float16 and
    other scales; with many tokens the decoding shows less."""

    def ratio(m: int, dtype: torch.dtype, format: str) -> float:
        p = replace(H200_PROBLEM, m=m, n=8192, k=8192, dtype=dtype, format=WeightFormat.parse(format))
        return best_us("sm90_mixed_gemm", p) / best_us("sm90_decode", p)

    bf16, fp16 = torch.bfloat16, torch.float16
    ratios = [ratio(16, *of) for of in ((bf16, "int4_g128"), (bf16, "int4_g128_fp16"), (fp16, "int4_g128"))]
    assert ratios == sorted(ratios) and ratios[0] < 1.05 < ratios[1]
    assert ratio(16, bf16, "int4_g128_zfloat") == pytest.approx(ratios[0], rel=1e-3)
    assert ratios[0] < ratio(16, fp16, "int4_g128_fp16") < ratios[2]
    assert ratio(4096, fp16, "int4_g128") / ratio(4096, bf16, "int4_g128") < 0.9 * ratios[2] / ratios[0]


def gathered(m: int, n: int, k: int, experts: int = 8) -> GemmProblem:
    return replace(H200_PROBLEM, m=m * experts, n=n, k=k, experts=experts, gathered=True)


def test_every_gpu_kernel_gathers_rows_of_experts():
    for base in (H200_PROBLEM, FP8_PROBLEM):
        grouped = replace(base, experts=8)
        for kernel in (k for k in KERNELS if k.supports(grouped)):
            on_load = replace(grouped, gathered=True)
            actual = kernel.configs(on_load)
            assert kernel.supports(on_load) and actual
            assert all(c.cluster_m * c.cluster_n == 1 for c in actual)
            assert kernel.unit(on_load, actual[0]) != kernel.unit(grouped, actual[0])
            assert "several experts only" in kernel.supports(replace(base, gathered=True)).reason


def test_rows_are_gathered_before_where_that_takes_less(monkeypatch):
    """Measured on an H200: few tokens of many experts are gathered in the kernel; many tokens, or few beside a long
    product, are copied first."""
    monkeypatch.setattr(choice.plan, "compiled", lambda unit: unit)
    for problem, copied in (
        (gathered(8, 1536, 2048, 128), False),
        (gathered(32, 1536, 2048, 128), False),
        (gathered(1024, 1536, 2048, 128), True),
        (gathered(1024, 28672, 4096), True),
    ):
        explanation, plan = choice.explain(problem), choice.choose(problem)
        assert explanation.copied == copied == ("of a copy of the rows" in str(explanation))
        assert plan.problem.gathered == ("gathered rows" in str(explanation)) == (not copied)
        assert (plan.kernel.name, plan.config) == explanation.chosen
    forced = choice.configs(problem)[0]
    assert choice.choose(problem, forced).problem.gathered and not choice.explain(problem, forced).copied
    with pytest.raises(ValueError, match="is not legal"):
        choice.choose(problem, "sm90_mixed_gemm/128x128x128_1x2x1_coop")


def test_a_call_of_gathered_rows_has_a_plan_of_its_own():
    weight, device = packed_shape(WeightFormat(), "cpu", 64, 64, 4), torch.device("cpu")
    keys = [choice.PlanKey.of(weight, 1, torch.float32, device, gathered=g) for g in (False, True)]
    plans = [choice.plan_for(key) for key in keys]
    assert [plan.problem.gathered for plan in plans] == [False, True]
