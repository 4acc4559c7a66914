"""bench.sweep, bench.fit and bench.tune: from timings of configs to constants and the shipped table, without a GPU."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench import fit, slice_times, sweep, tune
from bench.rows import timings_of

from w4gemm import WeightFormat, choice
from w4gemm.choice import table
from w4gemm.choice.cost.constants import SliceTimes
from w4gemm.choice.table import Record, key_of
from w4gemm.core.problem import H200, GemmProblem


def rows_file(path: Path, points: dict[int, dict[str, float]]) -> Path:
    """Timings by m and config of a layer of the main table."""
    rows = [{"n": 8192, "k": 8192, "m": m, "format": "int4_g128", "us": times} for m, times in points.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_table_from_rows(tmp_path):
    """The first guess where it is within 1 % of the fastest in the mean over files, of what all have; none for an m
    inside an interval; records of other formats stay."""
    problem = GemmProblem(64, 8192, 8192, torch.bfloat16, WeightFormat(), "mma16", device=H200)
    guess, second, third = choice.configs(problem)[:3]
    file, other = tmp_path / "table.jsonl", WeightFormat.parse("int4_g32")
    kept = Record(key_of(replace(problem, format=other)), (57, 64), "k", "64x64x256_1x1x1_coop", 1.0, 1, "")
    table.replace_table(file, [kept])
    points = {64: {guess: 10.05, second: 10.0}, 128: {second: 9.0, third: 8.0}, 100: {second: 1.0}}
    first = rows_file(tmp_path / "1", points)
    tune.main(["--rows", str(first), "--table", str(file)])
    assert table.read(file)[0] == kept
    assert [(r.m, r.choice, r.us) for r in table.read(file)[1:]] == [((57, 64), guess, 10.05), ((121, 128), third, 8.0)]
    again = rows_file(tmp_path / "2", {64: {guess: 20.5, second: 20.0}, 128: {second: 9.0}})
    tune.main(["--rows", str(first), str(again), "--table", str(file)])
    assert [(r.choice, r.us) for r in table.read(file)[1:]] == [(second, 20.0), (second, 9.0)]
    with pytest.raises(
        SystemExit, match="--dtype: wanted that of the rows' activations, got torch.float8_e4m3fn, which"
    ):
        tune.main(["--rows", str(first), "--dtype", "float8_e4m3fn", "--table", str(file)])


def test_a_sweep_writes_what_the_model_is_fitted_to(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("W4GEMM_COMMIT", "0123abc")  # where git cannot be asked, as in an unpacked sdist
    rows, file = tmp_path / "rows.jsonl", tmp_path / "table.jsonl"
    sweep.main(["--shapes", "96x128", "--m", "1,5..8", "--configs", "2", "--device", "cpu", "--out", str(rows)])
    actual = list(timings_of(rows))
    assert {row["m"] for row in actual} == {1, 8} and all(row["us"] > 0 and row["commit"] for row in actual)
    assert len({(row["m"], row["config"]) for row in actual}) == len(actual) >= 3
    assert "timings" in capsys.readouterr().out
    tune.main(["--rows", str(rows), "--shapes", "layers", "--table", str(file)])
    assert not file.exists() or not file.read_text()

    grouped = tmp_path / "grouped.jsonl"
    row = actual[0] | {"impl": "w4gemm_config", "routing": "balanced", "experts": 8, "us_p50": 3.5}
    grouped.write_text("\n".join(json.dumps(row | other) for other in ({}, {"impl": "w4gemm"}, {"routing": "hot"})))
    sweep.main(["--grouped", str(grouped), "--out", str(tmp_path / "experts.jsonl")])
    (kept,) = timings_of(tmp_path / "experts.jsonl")
    assert kept["experts"] == 8 and kept["us"] == 3.5 and "impl" not in kept


def test_a_sweep_may_compile_alone_and_for_a_gpu_that_is_not_there(tmp_path, monkeypatch, capsys):
    expected = []
    monkeypatch.setattr(sweep, "prepared", lambda actual: expected.append(actual) or actual)
    arguments = ["--shapes", "4096x4096", "--m", "16", "--configs", "2", "--compile-only", "--device", "h200"]
    sweep.main([*arguments, "--out", str(tmp_path / "rows.jsonl")])
    ((problem,),) = expected
    assert problem.device == H200 and capsys.readouterr().out == "2 kernels\n"
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_sweep_leaves_out_what_is_predicted_to_be_slow():
    problem = GemmProblem(64, 8192, 8192, torch.bfloat16, WeightFormat(), "mma16", device=H200)
    what = {"format": "int4_g128", "dtype": "bfloat16", "drawn": 0, "shapes": [(8192, 8192)], "m": "64", "configs": 16}
    us = {str(each): each.us for each in choice.explain(problem).candidates[:16]}
    for within in (math.inf, 1.1, 1.0):
        (names,) = sweep.products(argparse.Namespace(**what, within=within), H200).values()
        assert names == [name for name in us if us[name] <= within * min(us.values())]
    assert 1 == len(names) < sum(time <= 1.1 * min(us.values()) for time in us.values()) < 16


def test_constants_without_new_timings_change_with_those_of_as_many_tokens():
    before = {"a/64x64x128_1x1x1_coop": (1.0, 2.0, 4.0), "a/64x128x128_1x1x1_coop": (2.0, 2.0, 0.0)}
    before |= {"a/256x128x64_1x1x1_coop": (5.0, 5.0, 5.0), "b/64x64x128_1x1x1_coop": (3.0, 3.0, 3.0)}
    now = {"a/64x64x128_1x1x1_coop": (0.9, 1.0, 4.0), "a/256x128x64_1x1x1_coop": (6.0, 5.0, 5.0)}
    actual = fit.carried(before, now)
    assert {c: actual[c] for c in now} == now and actual["b/64x64x128_1x1x1_coop"] == (3.0, 3.0, 3.0)
    assert actual["a/64x128x128_1x1x1_coop"] == pytest.approx((1.8, 1.0, 0.0))


def test_what_was_not_measured_may_stay(tmp_path, monkeypatch, capsys):
    """Two launches and dequantize_gemm are passed over; with --only, so are configs without constants."""
    one, two, written = "sm90_mixed_gemm/128x128x128_1x1x1_coop", "sm90_mixed_gemm/256x128x128_1x1x1_coop", {}
    others = {f"{two}+128x128x128_1x1x1_coop": 4.0, "dequantize_gemm/256x8192x128_1x1x1_coop": 5.0}
    rows = rows_file(tmp_path / "rows", {256: {one: 10.0, two: 11.0, **others}})
    monkeypatch.setattr(fit, "fit", lambda samples, known: known._replace(alone=known.alone * 2))
    monkeypatch.setattr(fit, "write", lambda target, times, *source, **how: written.update(times))
    known = {name: t for name, t in fit.constants.reference().configs.items() if "fp8" not in name}
    fit.main(["--adjust", "--others-stay", str(rows)])
    assert {c: t for c, t in written.items() if t != known[c]}.keys() == {one, two}
    for c in (one, two):  # the level stays, at which others are
        assert written[c].alone / written[c].tile == pytest.approx(2 * known[c].alone / known[c].tile)
        assert known[c].alone < written[c].alone < 1.3 * known[c].alone
    new = "sm90_mixed_gemm/136x128x128_1x1x1_coop"
    assert new not in known
    rows = rows_file(tmp_path / "more", {256: {one: 10.0, two: 11.0, new: 12.0}})
    fit.main(["--adjust", "--others-stay", str(rows), "--only", two])
    assert written == known | {two: known[two]._replace(alone=known[two].alone * 2)}  # is no first choice
    for options, error in (
        (["--others-stay"], "--others-stay wants --adjust"),
        (["--adjust", "--only", two], "--only wants --adjust and --others-stay"),
        (["--adjust", "--others-stay", "--only", "sm90_decode/1x2x3"], "--only: no constants of sm90_decode/1x2x3"),
    ):
        with pytest.raises(SystemExit):
            fit.main([str(rows), *options])
        assert error in capsys.readouterr().err


def test_a_slow_config_counts_in_a_fit_if_it_is_predicted_to_be_fast(monkeypatch):
    """Else nothing corrects the prediction that lets it be chosen."""
    launch = slice_times.Launch(None, None, None, None)
    monkeypatch.setattr(slice_times.Launch, "us", lambda self, times: times.alone)
    slow = slice_times.Weighted(launch, us=20.0, weight=1.0, fastest_us=10.0)
    told = {us: slow.squared_error(SliceTimes(us, 0.0, 0.0)) for us in (10.0, 19.0, 40.0)}
    assert told[10.0] == pytest.approx(math.log(2) ** 2) and told[40.0] == pytest.approx(told[10.0] / 2**6)
    assert told[19.0] < told[40.0]


def test_a_cta_alone_takes_at_least_as_long_for_more_columns():
    name, wide, split = (f"a/64x64x{rest}" for rest in ("256_1x1x1_coop", "512_1x1x1_coop", "256_1x1x1_coop_k2"))
    times = {wide: SliceTimes(0.1, 0.6, 1.0), name: SliceTimes(0.4, 0.0, 1.0), split: SliceTimes(0.01, 0.1, 2.0)}
    actual = slice_times.plausible({**times, "b/64x64x512_1x1x1_coop": times[wide]})
    assert actual[name] == times[name] and actual["b/64x64x512_1x1x1_coop"] == pytest.approx(times[wide])
    assert actual[wide] == pytest.approx((0.4, 0.3, 1.0)), "and both together as long as before"
    assert actual[split] == pytest.approx((0.11, 0.0, 2.0)), "at most both together"


def test_an_adjustment_finds_what_a_cta_takes_alone():
    """From layers with a third, half and all of the GPU busy, although by the constants before others add most."""
    pytest.importorskip("scipy", reason="bench.fit needs it")
    config = "sm90_fp8_gemm/64x64x512_1x1x1_coop"
    rows = [
        {"n": n, "k": k, "m": 64, "format": "int4_g128", "run": "rows", "us": us, "config": config}
        for n, k, us in ((4096, 14336, 18.5), (2560, 9728, 12.6), (8192, 8192, 12.5), (4096, 4096, 6.5))
    ]
    timings = fit.collected(rows)
    ((name, samples),) = timings.configs.items()
    weighted = [slice_times.Weighted(launch, us, 1.0, us) for launch, _, us in samples]
    known = SliceTimes(0.16, 0.5, 1.0)
    actual = slice_times.fit(weighted, known)
    assert actual.alone > 2 * known.alone
    before, after = (sum(each.squared_error(times) for each in weighted) for times in (known, actual))
    assert after < before / 3, name


def test_a_fit_takes_timings_of_experts_to_be_of_even_rows():
    common = {"n": 1536, "k": 2048, "m": 8, "experts": 128, "run": "rows", "us": 50.0}
    rows = [
        common | {"format": format, "config": f"sm90_mixed_gemm/{tile}x256x128_1x1x1_coop"}
        for format in ("int4_g128", "e2m1_g32_e8m0")
        for tile in (8, 16)
    ]
    times = fit.SliceTimes(2.0, 0.0, 0.0)
    (int4, mxfp4), (int4_16, _) = (
        [launch.us(times) for launch, *_ in samples] for _, samples in sorted(fit.collected(rows).configs.items())[::-1]
    )
    assert int4 == pytest.approx(int4_16)  # no second tile of 8 tokens for an expert with 8
    assert mxfp4 > 1.05 * int4  # which takes longer to decode
