"""The cost model: data that no compiled kernel depends on, of legal configs only, scaled by what a GPU's rates are."""

from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench.constants_file import HOPPER, legal_names
from bench.engine.models import model_named
from bench.rows import read, timings_of
from bench.shapes import FP4_EXPERTS

from w4gemm import choice
from w4gemm.choice import cost, explain
from w4gemm.choice.cost import constants, predicted_us
from w4gemm.choice.cost.constants import Scale, copy_us
from w4gemm.choice.cost.experts import Width, of_tile, random_and_zipf_rows, random_m_tiles, unevenness
from w4gemm.choice.model import ranked
from w4gemm.choice.plan import resolve_gather
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import GPUS, H100, H200, Device, GemmProblem
from w4gemm.jit import disk
from w4gemm.kernels import KERNELS, config_named, kernel_named
from w4gemm.packing.layouts import layout_for
from w4gemm.tuning import record

ROOT = Path(__file__).resolve().parent.parent

RESULTS = ROOT / "bench/results"
H20 = Device("cuda", "NVIDIA H20", (9, 0), 78, 232448)
MEASURED = tuple(constants.measured().values())
H100_PCIE = Device("cuda", "NVIDIA H100 PCIe", (9, 0), 114, 232448)


def problem_of(name: str, m: int = 64, format: str = "int4_g128", **changes) -> GemmProblem:
    kernel, scales_of_x = kernel_named(name), Epilogue(token_scale=name == "sm90_fp8_gemm")
    if name == "sm90_fp8_block_gemm":
        format, scales_of_x = "e4m3_g128_b128", Epilogue(block_scale=True)
    made = GemmProblem(m, 8192, 8192, kernel.dtypes[-1], WeightFormat.parse(format), kernel.layout, scales_of_x, H200)
    return replace(made, **changes)


def test_refitting_compiles_nothing_anew(monkeypatch):
    """Neither the fingerprint of compiled kernels nor the hash of the tested ones reads what the model is made of."""
    read = []
    bytes_of = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or bytes_of(path))
    disk.source_hash(*disk._SOURCES)
    record.kernels_hash()
    assert any(path.name == "spec.py" for path in read)
    assert not [path for path in read if constants.FOLDER.parent in path.parents or path.suffix != ".py"]


@pytest.mark.parametrize("device", MEASURED, ids=lambda device: device.name)
def test_every_constant_belongs_to_a_legal_config(device):
    assert set(constants.constants_for(device).configs) <= legal_names()


@pytest.mark.parametrize("device", MEASURED, ids=lambda d: d.name)
def test_every_gpus_file_has_the_same_models_and_terms(device: Device) -> None:
    of_reference, of_device = constants.reference().models, constants.constants_for(device).models
    assert {name: set(terms) for name, terms in of_device.items()} == {
        name: set(terms) for name, terms in of_reference.items()
    }


@pytest.mark.parametrize("device", MEASURED, ids=lambda d: d.name)
@pytest.mark.parametrize("format", ["int4_g128", "nf4_g64", "nf4_g64_fp32", "iq4_g32_fp16", "q4_k", "mxfp4", "nvfp4"])
def test_something_is_chosen_for_every_format_on_every_measured_gpu(format: str, device: Device) -> None:
    parsed = WeightFormat.parse(format)
    layout = layout_for(device, parsed, torch.bfloat16)
    for m in (1, 32, 100, 1000):
        problem = GemmProblem(m, 4096, 4096, torch.bfloat16, parsed, layout, device=device)
        assert ranked(KERNELS, problem)[0].us > 0


@pytest.mark.parametrize("device", MEASURED, ids=lambda device: device.name)
def test_no_term_is_zero(device):
    """A term that a fit found to be nothing is left out of the file."""
    for line in constants.path_of(device.name).read_text().splitlines():
        assert 0.0 not in json.loads(line).values(), line


def test_configs_that_nobody_measured_rank_behind_their_own():
    """Clusters of two along m, of W4A16: behind the same tiles without one, and not behind all."""
    known = constants.reference()
    unmeasured = legal_names() - set(known.configs)
    pairs = [(timed_as, GemmConfig.parse(text)) for timed_as, _, text in (name.rpartition("/") for name in unmeasured)]
    alone_of_its_kind = [(timed_as, config) for timed_as, config in pairs if not known._between(timed_as, config)]
    clusters = [(timed_as, c) for timed_as, c in alone_of_its_kind if c.cluster_m > 1 and "fp8" not in timed_as]
    assert clusters
    for kernel_name, config in clusters:
        kernel = kernel_named(kernel_name)
        for m in (128, 256, 1000, 4096):
            problem = problem_of(kernel_name, m)
            us, alone = predicted_us(kernel, problem, config), replace(config, cluster_m=1, cluster_n=1)
            assert 1.0 < us / predicted_us(kernel, problem, alone) < 1.6
            assert us < ranked([kernel], problem)[-1][0]


def test_a_config_between_measured_ones_has_times_between_theirs():
    all_known, names = constants.reference(), [f"sm90_mixed_gemm/{m}x128x128_1x1x1_coop" for m in (112, 128)]
    below, above = (all_known.configs[name] for name in names)
    known = replace(all_known, configs={names[0]: below, names[1]: above}, _estimated={})
    actual = known.times("sm90_mixed_gemm", GemmConfig(120, 128, 128))
    assert actual == pytest.approx([(a + b) / 2 for a, b in zip(below, above, strict=True)])
    assert known.times("sm90_mixed_gemm", GemmConfig(112, 128, 128)) == below


def test_a_kernel_without_a_model_is_ranked():

    class New:
        name = "sm100_mixed_gemm"

    assert 0 < predicted_us(New(), problem_of("sm90_mixed_gemm"), GemmConfig(64, 64, 64)) < math.inf
    assert {kernel.name for kernel in KERNELS} == set(cost._TIMERS), "all of ours have one"


@pytest.mark.parametrize("device", MEASURED, ids=lambda device: device.name)
def test_a_measured_gpu_is_taken_as_it_is(device):
    assert constants.constants_for(device).device == device
    assert constants.scale_of(device) == Scale(1.0, 1.0, 1.0, 1.0)


def test_explain_says_where_predictions_come_from():
    said = {device.name: str(explain(problem_of("sm90_mixed_gemm", device=device))) for device in (*MEASURED, H20)}
    assert [name for name, text in said.items() if "predicted by" in text] == [H20.name]
    assert "times of an NVIDIA H200, scaled by clock" in said[H20.name]
    assert "none was measured on this architecture" in str(
        explain(problem_of("sm80_mixed_gemm", device=GPUS["sm_100a"]))
    )


def test_other_gpus_are_scaled_from_the_most_similar():
    """By clock, and bandwidth and matrix instructions per multiprocessor."""
    hopper = {gpu: Device("cuda", f"NVIDIA {gpu}", (9, 0), 132, 232448) for gpu in ("H800", "H200 NVL", "H100 NVL")}
    hopper |= {"H20": H20, "H100 PCIe": H100_PCIE}
    most_similar = {gpu: constants.constants_for(device).device for gpu, device in hopper.items()}
    assert most_similar["H200 NVL"] == most_similar["H20"] == H200
    assert set(most_similar.values()) <= set(MEASURED)
    for gpu, device in hopper.items():
        of_file, scale = most_similar[gpu], constants.scale_of(device)
        assert scale.memory == pytest.approx(of_file.bandwidth / device.bandwidth)
        assert scale.clock == pytest.approx(of_file.clock / device.clock)


def test_other_architectures_are_ranked_by_the_constants_as_they_are():
    others = [device for device in GPUS.values() if device.capability != (9, 0)]
    assert {constants.scale_of(device) for device in (*others, Device("cpu"))} == {Scale()}


@pytest.mark.parametrize("device", [H20, H100_PCIE], ids=["H20", "H100 PCIe"])
@pytest.mark.parametrize("name", HOPPER)
def test_no_gpu_is_faster_than_its_data_sheet(device, name):
    """Few tokens wait for memory, many for the tensor cores, which are an H20's weakest part."""
    kernel = kernel_named(name)
    assert 0 < device.clock <= 1980 and device.bandwidth < H200.bandwidth and device.operations < H200.operations
    for m in (1, 16, 128, 1024, 8192):
        here, there = problem_of(name, m, device=device), problem_of(name, m)
        operations = 2 * m * 8192 * 8192 / device.operations / (2 if kernel.layout == "mma8" else 1)
        for config in kernel.configs(here):
            us = predicted_us(kernel, here, config)
            assert config.tail or us > predicted_us(kernel, there, config) / 1.15, "an H20 is never hot"
            assert us > 0.99 * max(operations, 8192 * 8192 / 2 / device.bandwidth)


def test_a_throttled_gpu_has_another_best_config():
    """On an H20 the matrix instructions are what counts of many tokens, on an H200 the decoding beside them."""
    kernel, tokens = kernel_named("sm90_mixed_gemm"), range(64, 2048, 64)
    on_h200, on_h20 = (
        [ranked([kernel], problem_of(kernel.name, m, device=device))[0][2] for m in tokens] for device in (H200, H20)
    )
    assert on_h200 != on_h20


def test_rates_of_a_gpu_that_is_not_known():
    """They come from the driver; without that nothing is scaled."""
    unknown = Device("cuda", "NVIDIA H4242", (9, 0), 132, 232448)
    assert unknown.clock == unknown.bandwidth == unknown.operations == 0
    assert constants.scale_of(unknown) == Scale()
    half = replace(unknown, bandwidth=H200.bandwidth / 2)
    slower = constants.constants_for(half).device.bandwidth / half.bandwidth
    assert slower > 1 and constants.scale_of(half) == Scale(memory=slower, contention=slower)


def points(path: Path) -> dict[str, dict[GemmProblem, dict[str, float]]]:
    """Times of the legal configs of each problem in a file of bench/sweep.py, by run."""
    actual: dict[str, dict[GemmProblem, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    legal = functools.cache(lambda name, problem: frozenset(map(str, kernel_named(name).configs(problem))))
    for row in timings_of(path):
        name, _, text = row["config"].partition("/")
        if name not in HOPPER:
            continue
        experts = row.get("experts", 0)
        m = row["m"] * max(1, experts)
        problem = problem_of(name, m, row["format"], n=row["n"], k=row["k"], experts=experts)
        if text in legal(name, problem):
            actual[row["run"]][problem][row["config"]] = row["us"]
    return {run: {problem: t for problem, t in own.items() if len(t) >= 4} for run, own in actual.items()}


def predicted(problem: GemmProblem, name: str) -> float:
    kernel, config = config_named(name)
    return predicted_us(kernel, problem, config)


def test_the_first_guess_is_about_the_fastest_of_what_was_measured():
    """Over every stored run of timings, each of one machine: time of the best guess over that of the fastest."""
    logs = []
    for run, own in (pair for path in sorted(RESULTS.glob("configs*.jsonl")) for pair in points(path).items()):
        regrets = []
        for problem, times in own.items():
            us = {name: predicted(problem, name) for name in times}
            guess = min(us, key=us.__getitem__)
            regrets.append(math.log(times[guess] / min(times.values())))
        if len(regrets) > 2:  # fewer points say nothing of a mean
            assert sum(regrets) / len(regrets) < math.log(1.05), run
        logs += regrets
    assert len(logs) > 500 and sum(logs) / len(logs) < math.log(1.02)


def test_the_last_wave_shows_if_full_waves_wait_for_memory():
    """The H100's memory is so slow that few tokens of large layers wait for it: two launches, whose waves are full,
    were faster there than one with the same time of multiprocessors."""
    times: dict[tuple[str, int, int, int, str], dict[str, float]] = defaultdict(dict)
    for file in ("configs_h100.jsonl", "configs_fp8_h100.jsonl"):
        for row in timings_of(RESULTS / file):
            if row["run"] in ("configs_h100_5", "configs_fp8_h100_4") and row["n"] >= 28672:
                times[file, row["n"], row["k"], row["m"], row["format"]][row["config"]] = row["us"]
    regrets: dict[str, list[float]] = defaultdict(list)
    for (file, n, k, m, format), us in times.items():
        problem = problem_of(next(iter(us)).partition("/")[0], m, format, n=n, k=k, device=H100)
        guess = min(us, key=lambda name: predicted(problem, name))
        regrets[file].append(us[guess] / min(us.values()))
    for own in regrets.values():
        assert len(own) > 20 and sum(own) / len(own) < 1.006


@pytest.mark.parametrize(
    "k, us",
    [
        (4096, {"8x16x128_1x1x1_coop_k2": 2.30, "8x16x128_1x1x1_coop": 2.63, "8x48x128_1x1x1_coop_k2": 2.92}),
        (14336, {"8x16x128_1x1x1_coop_k2": 4.42, "8x32x128_1x1x1_coop_k2": 5.48, "8x16x128_1x1x1_coop": 6.60}),
    ],
)
def test_a_narrow_layer_of_few_tokens_takes_the_time_of_a_ctas_warps(k, us):
    """1024 features and one token, as k and v have them: the order of an H200's times, and about their ratios."""
    problem = GemmProblem(1, 1024, k, torch.bfloat16, WeightFormat(128), "mma16", device=H200)
    predicted = {c: predicted_us(kernel_named("sm90_decode"), problem, GemmConfig.parse(c)) for c in us}
    assert sorted(us, key=predicted.__getitem__) == list(us)
    ratios = [predicted[c] / us[c] for c in us]
    assert max(ratios) / min(ratios) < 1.15**2


def test_decoding_once_is_predicted_for_small_k_too():
    """With 16-bit x: the time to store results counts if k is small. It was the fastest at no measured point."""
    ratios: dict[bool, list[float]] = defaultdict(list)
    for row in read(RESULTS / "configs.jsonl"):
        times = row["us"]
        if not (decoded := [name for name in times if name.startswith("dequantize_gemm")]):
            continue
        problem = problem_of("sm90_mixed_gemm", row["m"], row["format"], n=row["n"], k=row["k"])
        us = {name: predicted(problem, name) for name in times if not name.startswith("sm80")}
        ratios[row["k"] <= 2048] += [times[name] / us[name] for name in decoded]
        assert not min(us, key=us.__getitem__).startswith("dequantize_gemm"), (row["run"], str(problem))
    assert sum(map(len, ratios.values())) == 53
    for actual in ratios.values():
        assert abs(sum(actual) / len(actual) - 1) < 0.01


@pytest.mark.parametrize(
    ("n", "k", "m", "fastest"),
    [
        (2432, 2816, 1024, "192x128x128_1x1x1_coop"),  # 24.6 us, with stages of 64 columns 26.3
        (2560, 2560, 256, "256x64x64_1x1x1_coop_k2"),  # 10.0 us, 96x64x128 10.7
    ],
)
def test_k_quants_take_long_stages_and_not_one_warpgroup(n: int, k: int, m: int, fastest: str) -> None:
    problem = problem_of("sm90_mixed_gemm", m, "q4_k", n=n, k=k)
    assert str(ranked(KERNELS, problem)[0].config) == fastest


def test_rows_of_experts_at_random_make_more_tiles_than_even_ones():
    experts, g = 128, random.Random(0)
    problem = problem_of("sm90_mixed_gemm", experts=experts)
    for mean, tile in ((4, 8), (8, 8), (8, 16), (16, 16), (32, 32)):
        counts = Counter(g.randrange(experts) for _ in range(mean * experts))
        drawn = sum(-(-rows // tile) for rows in counts.values())
        assert random_m_tiles(replace(problem, m=mean * experts), Width(tile)) == pytest.approx(drawn, rel=0.08)
    assert random_m_tiles(replace(problem, m=8), Width(8)) == 8  # of as many experts
    assert random_m_tiles(replace(problem, m=experts), Width(8)) == experts


def test_a_choice_for_experts_goes_by_random_and_by_zipf_rows():
    """12, 6, 4, 3, 2, 2, 2 and 1 rows make nine tiles of eight, where even rows make eight."""
    problem = problem_of("sm90_mixed_gemm", 4 * 8, experts=8)
    asked: list[float] = []
    mean = random_and_zipf_rows(problem, [Width(8)], lambda m_tiles: asked.append(m_tiles) or 10.0 * len(asked))
    assert asked == [pytest.approx(8.1, abs=0.2), 9]
    assert mean == pytest.approx(10**0.6 * 20**0.4)
    assert (
        random_and_zipf_rows(replace(problem, m=257 * 8), [Width(256)], lambda m_tiles: m_tiles) == 16
    )  # even rows, of many


def test_an_expert_with_two_tiles_makes_no_second_wave():
    """On an H200, tiles of 8 x 256: 112 us with Zipf rows, 62 with even ones: 128 CTAs are one wave, 144 are two."""
    problem = problem_of("sm90_mixed_gemm", 4 * 8, n=4096, k=14336, experts=8)
    assert choice.choose(problem).config.tile_m == 16


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_experts_with_few_rows_have_tiles_of_256_features(rows):
    """As timed on an H200: with 192 a layer of Qwen3-30B-A3B takes 1.03 to 1.05 of the time."""
    problem = problem_of("sm90_mixed_gemm", rows * 128, n=1536, k=2048, experts=128)
    gate_up = replace(problem, gathered=True, epilogue=Epilogue("silu_mul"))
    for product in (gate_up, replace(problem, n=2048, k=768)):
        chosen = choice.choose(product).config
        assert (chosen.tile_m, chosen.tile_n) == (8, 256)


def test_a_second_launch_that_has_no_rows_fills_no_wave_of_the_first():
    """On an H200, 32 random rows for each of 32 experts: 187 us in tiles of 48 tokens, which make four waves. Those of
    40 make five, 213 us with a second launch, which Zipf rows need: 272 us by one launch, 214 by two."""
    chosen = choice.choose(problem_of("sm90_mixed_gemm", 32 * 32, n=4096, k=7168, experts=32)).config
    assert chosen.tile_m == 48 and chosen.tail is not None


def gate_up_of(config: dict, format: str, tokens: int) -> GemmProblem:
    """The first product of a model's experts, which gathers rows of x."""
    experts = next(config[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in config)
    n, k = 2 * config.get("moe_intermediate_size", config["intermediate_size"]), config["hidden_size"]
    rows = choice.plan_rows(tokens * config["num_experts_per_tok"], experts)
    changes = {"n": n, "k": k, "dtype": torch.bfloat16, "epilogue": Epilogue("silu_mul"), "device": H100}
    return problem_of("sm90_mixed_gemm", rows, format, experts=experts, gathered=True, **changes)


def test_rows_are_gathered_or_copied_as_whole_layers_were_fastest():
    """On an H100. The exceptions: 256 tokens of DeepSeek-V3, 512 of gpt-oss-20b, 1024 of Qwen3-30B-A3B."""
    right, models = {}, {"deepseek-v3": "deepseek-v3-5-layers"}
    for row in read(RESULTS / "layers.jsonl"):
        if row["copied"] and "variant" not in row:
            gate_up = gate_up_of(
                model_named(models.get(row["model"], row["model"])).config, row["format"], row["tokens"]
            )
            copied = min(row["copied"].values()) < min(row["gathered"].values())
            right[row["model"], row["tokens"]] = resolve_gather(gate_up).gathered is not copied
    assert len(right) == 27 and sum(right.values()) >= 24


def test_a_box_of_x_that_reaches_past_the_rows_of_all_experts_is_slow():
    """On an H100, one row for each of 8 experts: 355 us in tiles of 32 rows, 165 in tiles of 8."""
    problem = problem_of("sm90_mixed_gemm", 8, n=28672, k=4096, experts=8, device=H100)
    slow, fast = (
        predicted(problem, f"sm90_mixed_gemm/{c}") for c in ("32x64x256_1x1x1_pingpong", "8x256x128_1x1x1_coop")
    )
    assert slow > 1.2 * fast
    many = replace(problem, m=8 * 16)
    assert predicted(many, "sm90_mixed_gemm/32x64x256_1x1x1_pingpong") < slow


@pytest.mark.parametrize("tile_m", [128, 256])
def test_many_uneven_rows_of_experts_fill_large_tiles_worse(tile_m):
    """Half a tile for each expert, and half of that counts."""
    problem = problem_of("sm90_mixed_gemm", 512 * 64, "nvfp4", experts=64)
    assert unevenness(problem, tile_m) == pytest.approx(1 + tile_m / 2 / 512 / 2)
    others = (
        {"m": 256 * 64},
        {"experts": 0},
        {"format": WeightFormat.parse("int4_g128")},
        {"dtype": torch.float8_e4m3fn},
    )
    assert {unevenness(replace(problem, **other), tile_m) for other in others} == {1}
    even = [replace(problem, m=rows * 64) for rows in (300, 600, 1000)]
    assert all(1 <= unevenness(p, tile_m) <= 1.25 for p in even)


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_experts_in_4_bit_floats_take_tiles_of_128_tokens_for_512(format):
    """256 x 64 was chosen in NVFP4: behind Humming at 8 of 20 points."""
    for experts, n, k in FP4_EXPERTS:
        problem = problem_of("sm90_mixed_gemm", 512 * experts, format, n=n, k=k, experts=experts)
        assert choice.choose(problem).config.tile_m == 128


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_experts_in_4_bit_floats_take_three_warpgroups_for_512(format):
    """128 x 256 was chosen: 1.02 times as long as 128 x 192 at 16 points."""
    problem = problem_of("sm90_mixed_gemm", 512 * 64, format, n=6144, k=3584, experts=64)
    config = choice.choose(problem).config
    assert (config.tile_m, config.tile_n) == (128, 192)
    others = (problem, replace(problem, m=256 * 64), replace(problem, format=WeightFormat.parse("int4_g128")))
    wide = [of_tile(p, replace(config, tile_n=256)) for p in others]
    assert wide == [1.02, 1, 1] and of_tile(problem, config) == 1


def test_scales_of_tokens_are_copied_by_a_launch_of_their_own():
    problem = GemmProblem(64, 4096, 4096, torch.float8_e4m3fn, WeightFormat(), "mma8", device=H200)
    scaled = replace(problem, epilogue=Epilogue(token_scale=True))
    launch = constants.constants_for(H200).models["copy"]["launch_us"]
    assert launch > 0 and copy_us(scaled) - copy_us(problem) == pytest.approx(launch)
