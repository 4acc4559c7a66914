"""The benchmark's parts that need no GPU: shapes, roofline, report, and peers that say why they cannot run."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
sys.path.insert(0, str(ROOT))

from bench import fit, pages, report, slice_times, support, sweep, timings, tune  # noqa: E402
from bench import rows as bench_rows  # noqa: E402
from bench.drawn import page as unknown_page  # noqa: E402
from bench.peers import PEERS, bitsandbytes, peers_named  # noqa: E402
from bench.peers.w4gemm import W4gemm  # noqa: E402
from bench.shapes import (  # noqa: E402
    EXPERTS,
    LAYERS,
    ROUTINGS,
    divide,
    parse_experts,
    parse_layers,
    parse_routings,
    parse_tokens,
)

import w4gemm  # noqa: E402
from w4gemm import QuantizedWeight, WeightFormat, choice  # noqa: E402
from w4gemm.checkpoints import FORMATS, METHODS  # noqa: E402
from w4gemm.choice import store  # noqa: E402
from w4gemm.choice.cost.constants import SliceTimes  # noqa: E402
from w4gemm.choice.records import Record, key_of  # noqa: E402
from w4gemm.core.elements import ELEMENTS  # noqa: E402
from w4gemm.core.problem import H200, Device, GemmProblem  # noqa: E402
from w4gemm.kernels import KERNELS  # noqa: E402
from w4gemm.packing.layouts import native_layout  # noqa: E402

GROUPED_FP4 = pages.GROUPED_MXFP4, pages.GROUPED_NVFP4, pages.GROUPED_MXFP4_W4A8
FP4_H100, GROUPED_H100 = "fp4_h100.jsonl", "grouped_fp4_h100.jsonl"


def test_shapes_by_name_and_by_size():
    assert parse_layers("layers,8192x8192,96x64") == (*LAYERS, (96, 64))
    assert parse_tokens("1,16") == (1, 16) and 4090 in parse_tokens("awkward")
    with pytest.raises(ValueError, match="shapes: wanted layers.*got 'layer'"):
        parse_layers("layer")
    with pytest.raises(ValueError, match="tokens: wanted numbers"):
        parse_tokens("1,two", "tokens")


def test_mixtures_of_experts_by_name_and_by_size():
    assert parse_experts("moe,8x512x2048")[-1] == (8, 512, 2048) and parse_experts("moe") == EXPERTS
    assert parse_routings("hot,zipf") == ("hot", "zipf")
    with pytest.raises(
        ValueError, match="shapes: wanted moe, fp4-moe or experts x n x k like 8x28672x4096, got '28672x4096'"
    ):
        parse_experts("28672x4096")
    with pytest.raises(ValueError, match="routing: wanted some of balanced, random, zipf, hot, got 'even'"):
        parse_routings("even")


def test_peers_by_name():
    assert [p.name for p in peers_named("quack,w4gemm")] == ["quack", "w4gemm"]
    with pytest.raises(ValueError, match="got machette"):
        peers_named("machette")


def test_a_timed_call_of_ours_makes_no_weight(monkeypatch):
    """On a GPU a weight that is made launches something, which took 2.6 us of every call that was timed."""
    w = w4gemm.quantize(torch.randn(48, 128))
    prepared = W4gemm().prepare(w, torch.float32)
    weights = prepared.copies()
    made = []
    monkeypatch.setattr(QuantizedWeight, "__post_init__", lambda self: made.append(self))
    x, out = torch.randn(3, 128), torch.empty(3, 48)
    for one in weights[:2]:
        assert torch.allclose(prepared.run(one, x, out), x @ w.dequantize().T, atol=1e-4)
    assert not made


@pytest.mark.skipif(torch.cuda.is_available(), reason="says why there is no GPU")
@pytest.mark.parametrize("peer", PEERS, ids=lambda p: p.name)
def test_peers_say_why_they_cannot_run(peer):
    assert peer.available()


def test_bitsandbytes_gets_the_bytes_that_it_writes_itself(monkeypatch):
    """Codes row after row, the even column in the high nibble: what the reader of its checkpoints takes."""
    calls: list[types.SimpleNamespace] = []
    functional = types.ModuleType("bitsandbytes.functional")
    functional.get_4bit_type = lambda name, device: name
    functional.QuantState = lambda absmax, shape, code, blocksize, quant_type, dtype: types.SimpleNamespace(**locals())
    package = types.ModuleType("bitsandbytes")
    package.matmul_4bit = lambda x, packed, state: calls.append(state)
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)

    peer = bitsandbytes.PEER
    w = w4gemm.quantize(torch.randn(48, 128), "nf4_g64_fp32")
    prepared = peer.prepare(w, torch.bfloat16)
    prepared.run(prepared.weight_of(prepared.tensors), torch.ones(1, 128), torch.empty(1, 48))
    (state,), (packed, absmax) = calls, prepared.tensors
    assert (state.shape, state.blocksize, state.quant_type) == ((48, 128), 64, "nf4") and state.absmax is absmax
    codes = torch.stack((packed >> 4, packed & 15), -1).view(48, 2, 64)
    assert torch.equal((ELEMENTS["nf4"].numbers(codes) * absmax.view(48, 2, 1)).view(48, 128), w.dequantize())

    assert not peer.supports(48, 128, w.format, torch.float16)
    assert "float32 scales" in peer.supports(48, 128, WeightFormat.parse("nf4_g64"), torch.float16)
    assert "divide k" in peer.supports(48, 96, w.format, torch.float16)


def test_roofline_is_bytes_then_operations():
    layer = pages.Layer(8192, 8192)
    assert pages.W4A16.roofline_us((layer, 1)) == pytest.approx(7.7, abs=0.1)
    assert pages.W4A16.roofline_us((layer, 4096)) == pytest.approx(695.9, abs=0.5)
    assert pages.W4A8.roofline_us((layer, 4096)) == pytest.approx(354.7, abs=0.5)
    assert pages.W4A16.on_h100("").roofline_us((layer, 1)) == pytest.approx(7.7 * 4.5 / 3.07, abs=0.1)


def test_the_roofline_of_experts_counts_those_that_have_tokens():
    alike, hot = (pages.Layer(4096, 7168, 32, routing) for routing in ("balanced", "hot"))
    assert pages.GROUPED_W4A8.roofline_us((alike, 1)) == pytest.approx(106.1, rel=0.02)
    assert pages.GROUPED_W4A8.roofline_us((alike, 1024)) == pytest.approx(1241.4, abs=0.5)
    assert pages.GROUPED_W4A8.roofline_us((hot, 1)) < 4 < pages.GROUPED_W4A16.roofline_us((alike, 1))
    assert (str(alike), str(hot)) == ("32x4096x7168", "32x4096x7168 hot")


@pytest.mark.parametrize("m, experts", [(1, 128), (16, 8), (1024, 32)])
def test_all_tokens_go_to_some_expert(m, experts):
    alike, random, zipf, hot = (divide(routing, m, experts) for routing in ROUTINGS)
    for counts in (alike, random, zipf, hot):
        assert len(counts) == experts and sum(counts) == m * experts and min(counts) >= 0
    assert max(alike) == m < max(random) < max(zipf) < max(hot) == m * experts
    assert random == divide("random", m, experts)
    # expert e in proportion to 1 / (1 + e), in a mixed order: the second has half of what the first has
    assert sorted(zipf)[-2] == pytest.approx(max(zipf) / 2, abs=1)


def tables(markdown: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, the head first."""
    found: list[list[list[str]]] = [[]]
    for line in markdown.splitlines():
        if not line.startswith("|"):
            found.append([])
        elif not line.startswith("|---"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return [table for table in found if table]


@pytest.mark.parametrize(
    "file, work",
    [
        ("times.jsonl", pages.W4A16),
        ("w4a8.jsonl", pages.W4A8),
        ("sm80.jsonl", pages.SM80),
        ("grouped.jsonl", pages.GROUPED_W4A16),
        ("grouped.jsonl", pages.GROUPED_W4A8),
        ("fp4.jsonl", pages.MXFP4),
        ("fp4.jsonl", pages.NVFP4),
        ("fp4.jsonl", pages.MXFP4_W4A8),
        *(("grouped_fp4.jsonl", page) for page in GROUPED_FP4),
        *((FP4_H100, page.on_h100(FP4_H100)) for page in (pages.W4A16, pages.MXFP4, pages.NVFP4)),
        *((GROUPED_H100, page.on_h100(GROUPED_H100)) for page in GROUPED_FP4),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_stored_run_is_whole_and_its_page_has_its_numbers(file, work):
    (rows,) = [rows for rows in report.last_of_each_work(RESULTS / file) if pages.page_of(rows, file) == work]
    assert all(row["us_p20"] <= row["us_p50"] <= row["us_p80"] for row in rows)
    # Humming's W4A8 quantizes x within the call
    quantizes = [(row["impl"], row["dtype"]) == ("humming", "float8_e4m3fn") for row in rows]
    assert all(row["rel_error"] < (5e-2 if q else 1e-2) for row, q in zip(rows, quantizes, strict=True))
    assert not any(row["dirty"] for row in rows)
    assert str(WeightFormat.parse(rows[0]["format"])) == rows[0]["format"]
    times, versions = report.by_point(rows)
    assert all(work.ours in us and len(us) > 1 for us in times.values())

    text = report.text(work, rows, times, versions)
    assert text == report.text(work, rows, times, versions)
    means, points = tables(text)
    assert tables((ROOT / f"docs/{work.name}.md").read_text()) == [means, points], "run python -m bench.report"
    assert len(points) == 1 + len(times) and {len(row) for row in points} == {len(versions) + 4}


def test_every_stored_row_can_be_read():
    """And says what was measured: of benchmarks also where and of which commit."""
    for path in RESULTS.glob("*.jsonl"):
        rows = bench_rows.read(path)
        assert rows, path.name
        if path.name.startswith("configs"):
            rows = list(timings.rows_of(path))
            assert all(row["us"] > 0 and row["n"] > 0 and row["k"] > 0 and row["m"] > 0 for row in rows), path.name
            assert {str(WeightFormat.parse(row["format"])) for row in rows} == {row["format"] for row in rows}
        elif "unknown" in path.name:
            assert all({"kind", "gpu", "commit", "dirty", "us_p50"} <= row.keys() for row in rows), path.name
            page, _ = unknown_page.paths(path)
            assert page.read_text() == unknown_page.text(rows, path), "run python -m bench.report"
        elif not path.name.startswith("grouped_configs"):
            assert all({"kind", "gpu", "commit", "dirty"} <= row.keys() for row in rows), path.name


def test_what_a_run_has_in_common_is_stored_once(tmp_path):
    wanted = [
        {"run": run, "gpu": gpu, "m": m, "us_p50": 1.5} for run, gpu, m in (("a", "G", 1), ("a", "G", 2), ("b", "H", 1))
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in wanted))
    bench_rows.main([str(path)])
    assert path.read_text().count('"G"') == 1 and bench_rows.read(path) == wanted
    with open(path, "a") as file:  # a benchmark appends whole rows
        file.write(json.dumps(wanted[0] | {"m": 3}) + "\n")
    bench_rows.main([str(path)])
    assert len(path.read_text().splitlines()) == 2 + 4 and len(bench_rows.read(path)) == 4


def test_the_stored_rows_stay_small_and_are_described():
    files = list(RESULTS.glob("*.jsonl"))
    assert sum(file.stat().st_size for file in files) < 3e6, "keep the newest run; older ones are in git's history"
    words = (RESULTS / "README.md").read_text()
    assert not [file.name for file in files if f"`{file.name}`" not in words]


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
    table, other = tmp_path / "table.jsonl", WeightFormat.parse("int4_g32")
    kept = Record(key_of(replace(problem, format=other)), (57, 64), "k", "64x64x256_1x1x1_coop", 1.0, 1, "")
    store.replace_table(table, [kept])
    points = {64: {guess: 10.05, second: 10.0}, 128: {second: 9.0, third: 8.0}, 100: {second: 1.0}}
    first = rows_file(tmp_path / "1", points)
    tune.main(["--rows", str(first), "--table", str(table)])
    assert store.read(table)[0] == kept
    assert [(r.m, r.choice, r.us) for r in store.read(table)[1:]] == [
        ((57, 64), guess, 10.05),
        ((121, 128), third, 8.0),
    ]
    again = rows_file(tmp_path / "2", {64: {guess: 20.5, second: 20.0}, 128: {second: 9.0}})
    tune.main(["--rows", str(first), str(again), "--table", str(table)])
    assert [(r.choice, r.us) for r in store.read(table)[1:]] == [(second, 20.0), (second, 9.0)]
    with pytest.raises(
        SystemExit, match="--dtype: wanted that of the rows' activations, got torch.float8_e4m3fn, which"
    ):
        tune.main(["--rows", str(first), "--dtype", "float8_e4m3fn", "--table", str(table)])


def test_a_sweep_writes_what_the_model_is_fitted_to(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("W4GEMM_COMMIT", "0123abc")  # where git cannot be asked, as in an unpacked sdist
    rows, table = tmp_path / "rows.jsonl", tmp_path / "table.jsonl"
    sweep.main(["--shapes", "96x128", "--m", "1,5..8", "--configs", "2", "--device", "cpu", "--out", str(rows)])
    found = list(timings.rows_of(rows))
    assert {row["m"] for row in found} == {1, 8} and all(row["us"] > 0 and row["commit"] for row in found)
    assert len({(row["m"], row["config"]) for row in found}) == len(found) >= 3
    assert "timings" in capsys.readouterr().out
    tune.main(["--rows", str(rows), "--shapes", "layers", "--table", str(table)])
    assert not table.exists() or not table.read_text()

    grouped = tmp_path / "grouped.jsonl"
    row = found[0] | {"impl": "w4gemm_config", "routing": "balanced", "experts": 8, "us_p50": 3.5}
    grouped.write_text("\n".join(json.dumps(row | other) for other in ({}, {"impl": "w4gemm"}, {"routing": "hot"})))
    sweep.main(["--grouped", str(grouped), "--out", str(tmp_path / "experts.jsonl")])
    (kept,) = timings.rows_of(tmp_path / "experts.jsonl")
    assert kept["experts"] == 8 and kept["us"] == 3.5 and "impl" not in kept


def test_a_sweep_may_compile_alone_and_for_a_gpu_that_is_not_there(tmp_path, monkeypatch, capsys):
    wanted = []
    monkeypatch.setattr(sweep, "prepared", lambda found: wanted.append(found) or found)
    arguments = ["--shapes", "4096x4096", "--m", "16", "--configs", "2", "--compile-only", "--device", "h200"]
    sweep.main([*arguments, "--out", str(tmp_path / "rows.jsonl")])
    ((problem,),) = wanted
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


def test_a_range_of_drawn_tokens():
    assert sweep.token_range("17..333") == (17, 333) and sweep.token_range("8..8") == (8, 8)
    for wrong in ("17", "0..5", "9..8", "a..b", "1..2..3"):
        with pytest.raises(ValueError, match=re.escape(f"wanted a range of tokens like 17..333, got {wrong!r}")):
            sweep.token_range(wrong)


def test_a_sweep_goes_on_without_what_cannot_be_compiled(capsys, monkeypatch):
    def refuse(*_):
        raise OSError("no more processes")

    monkeypatch.setattr("w4gemm.jit.pool._start", refuse)
    problem = GemmProblem(64, 8192, 8192, torch.bfloat16, WeightFormat(), "mma16", device=H200)
    on_cpu = replace(problem, layout="cpu", device=Device("cpu"))
    found = {p: choice.configs(p)[:1] for p in (problem, on_cpu)}
    assert sweep.prepared(found) == {problem: [], on_cpu: found[on_cpu]}
    assert (
        f"{found[problem][0]} is left out: the compiling process ended (no more processes)" in capsys.readouterr().out
    )


def test_a_page_is_of_one_run_at_each_point():
    rows = [{"impl": name, "format": "int4_g128", "n": 64, "k": 128, "m": 1, "us_p50": 1.0} for name in ("a", "b")]
    rows = [row | {"impl_version": "1", "run": "first"} for row in rows]
    assert len(report.by_point(rows)[0]) == 1
    with pytest.raises(ValueError, match="64x128, m 1: wanted rows of one run, got some of first and second"):
        report.by_point([rows[0], rows[1] | {"run": "second"}])


def test_of_a_point_the_last_run_counts(tmp_path):
    row = {"kind": "time", "work": "w4a16", "impl": "w4gemm", "commit": "c", "format": "int4_g128", "impl_version": "1"}
    row |= {"n": 64, "k": 128, "m": 1}
    rows = [row | {"run": run, "m": m, "us_p50": us} for run, m, us in (("a", 1, 9.0), ("a", 2, 8.0), ("b", 1, 7.0))]
    rows += [r | {"impl": "peer", "us_p50": 5.0} for r in rows]
    rows = [rows[0], rows[1], rows[3], rows[4], rows[2], rows[5], row | {"run": "without peers", "us_p50": 6.0}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (kept,) = report.last_of_each_work(tmp_path / "rows.jsonl")
    own = [r for r in kept if r["impl"] == "w4gemm"]
    assert [(r["run"], r["m"], r["us_p50"]) for r in own] == [("a", 2, 8.0), ("b", 1, 7.0)]
    report.by_point(kept)


def test_constants_without_new_timings_change_with_those_of_as_many_tokens():
    before = {"a/64x64x128_1x1x1_coop": (1.0, 2.0, 4.0), "a/64x128x128_1x1x1_coop": (2.0, 2.0, 0.0)}
    before |= {"a/256x128x64_1x1x1_coop": (5.0, 5.0, 5.0), "b/64x64x128_1x1x1_coop": (3.0, 3.0, 3.0)}
    now = {"a/64x64x128_1x1x1_coop": (0.9, 1.0, 4.0), "a/256x128x64_1x1x1_coop": (6.0, 5.0, 5.0)}
    found = fit.carried(before, now)
    assert {c: found[c] for c in now} == now and found["b/64x64x128_1x1x1_coop"] == (3.0, 3.0, 3.0)
    assert found["a/64x128x128_1x1x1_coop"] == pytest.approx((1.8, 1.0, 0.0))


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
    found = slice_times.plausible({**times, "b/64x64x512_1x1x1_coop": times[wide]})
    assert found[name] == times[name] and found["b/64x64x512_1x1x1_coop"] == pytest.approx(times[wide])
    assert found[wide] == pytest.approx((0.4, 0.3, 1.0)), "and both together as long as before"
    assert found[split] == pytest.approx((0.11, 0.0, 2.0)), "at most both together"


def test_an_adjustment_finds_what_a_cta_takes_alone():
    """From layers with a third, half and all of the GPU busy, although by the constants before others add most."""
    pytest.importorskip("scipy", reason="bench.fit needs it")
    config = "sm90_fp8_gemm/64x64x512_1x1x1_coop"
    rows = [
        {"n": n, "k": k, "m": 64, "format": "int4_g128", "file": "rows", "us": us, "config": config}
        for n, k, us in ((4096, 14336, 18.5), (2560, 9728, 12.6), (8192, 8192, 12.5), (4096, 4096, 6.5))
    ]
    timings = fit.collected(rows)
    ((name, samples),) = timings.configs.items()
    weighted = [slice_times.Weighted(launch, us, 1.0, us) for launch, _, us in samples]
    known = SliceTimes(0.16, 0.5, 1.0)
    found = slice_times.fit(weighted, known)
    assert found.alone > 2 * known.alone
    before, after = (sum(each.squared_error(times) for each in weighted) for times in (known, found))
    assert after < before / 3, name


def test_a_fit_takes_timings_of_experts_to_be_of_even_rows():
    common = {"n": 1536, "k": 2048, "m": 8, "experts": 128, "file": "rows", "us": 50.0}
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


def test_fit_refuses_an_option_that_there_is_not(capsys):
    with pytest.raises(SystemExit):
        fit.main(["--ajust", "rows.jsonl"])
    assert "unrecognized arguments: --ajust" in capsys.readouterr().err


def test_the_html_page_stands_alone():
    (rows,) = report.last_of_each_work(RESULTS / "times.jsonl")
    times, versions = report.by_point(rows)
    page = report.html_page(times, rows[-1], versions)
    assert page == report.html_page(times, rows[-1], versions)
    assert "src=" not in page and "href=" not in page
    assert page.count("<svg") == 1 + len({layer for layer, _ in times})
    written = (ROOT / "docs/benchmarks.html").read_text()
    numbers = re.compile(r">(\d+\.\d+)<")
    assert numbers.findall(page) == numbers.findall(written), "run python -m bench.report"


def test_the_readme_has_the_pages_means():
    """A column of the README's tables links to the page whose means it has."""
    found = {}
    for head, *rows in tables((ROOT / "README.md").read_text()):
        for column, title in enumerate(head):
            if page := re.search(r"\]\(docs/(benchmarks[\w-]*)\.md\)", title):
                found[page[1]] = [(row[0], row[column]) for row in rows]
    works = (pages.W4A16, pages.W4A8, pages.MXFP4, pages.NVFP4, pages.GROUPED_W4A16, pages.GROUPED_W4A8, *GROUPED_FP4)
    assert found.keys() == {work.name for work in works}
    for page, means in found.items():
        _, *rows = tables((ROOT / f"docs/{page}.md").read_text())[0]
        assert means == [(row[0], row[1]) for row in rows], page


@pytest.mark.parametrize("page", support.PAGES, ids=lambda page: page.name)
def test_the_tables_of_what_runs_where_are_current(page):
    text = page.read_text()
    assert "<!-- made by python -m bench.support: " in text
    assert support.written(text) == text, "run python -m bench.support"


def test_the_table_of_oracles_has_all_stored_rows():
    """A run with ``--out`` writes the table of its own rows alone into the page."""
    pytest.importorskip("gguf")
    from bench import oracles

    rows = [json.loads(line) for line in oracles.RESULTS.read_text().splitlines()]
    table = oracles.BEGIN + oracles.table(rows) + oracles.END
    assert table in oracles.PAGE.read_text(), "run python -m bench.oracles --table"


def test_the_table_of_checkpoints_has_every_format():
    rows = [row[0].lower() for row in tables((ROOT / "docs/support.md").read_text())[-1]]
    wanted = {*(format.name for format in FORMATS), *METHODS} - {"w4gemm"}
    missing = [name for name in wanted if not any(name.replace("-", "") in row.replace("-", "") for row in rows)]
    assert not missing, f"add a row for each of {missing} to the last table of docs/support.md"


@pytest.mark.parametrize("name", ["T4 (7.5) and older", "AMD GPUs"])
def test_a_device_without_a_kernel_gets_a_sentence(name):
    """It says what is wanted, what there is, and nothing that depends on the device's name."""
    device = support.DEVICES[name]
    problem = GemmProblem(16, 512, 512, torch.bfloat16, WeightFormat(), native_layout(device), device=device)
    with pytest.raises(w4gemm.UnsupportedError) as e:
        choice.plan(problem)
    assert "needs an NVIDIA GPU" in str(e.value) if device.rocm else device.name in str(e.value)
    if not device.rocm:
        assert f"needs compute capability 9.0 (H100, H200, H800, H20), {device.name} has " in str(e.value)
        assert f"needs compute capability 8.0 or newer (A100, RTX 30 and later), {device.name} has " in str(e.value)
        assert ".".join(map(str, device.capability)) in str(e.value)
    nameless = replace(problem, device=replace(device, name=""))
    assert all(bool(k.supports(nameless)) == bool(k.supports(problem)) for k in KERNELS)


def test_timings_of_configs_are_a_line_for_each_problem(tmp_path):
    """In the order in which they were measured; a config that was timed again begins another line."""
    rows = [
        {"n": 64, "k": 128, "m": m, "config": config, "us": us}
        for m, config, us in ((1, "a", 2.0), (1, "b", 3.0), (2, "a", 4.0), (2, "a", 5.0), (1, "a", 6.0))
    ]
    lines = list(timings.by_problem(rows))
    assert [line["us"] for line in lines] == [{"a": 2.0, "b": 3.0}, {"a": 4.0}, {"a": 5.0}, {"a": 6.0}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(timings.rows_of(file)) == rows


def test_every_peer_has_a_color_of_its_own():
    others = {peer.name for peer in PEERS} - {"w4gemm", "sm80_mixed_gemm"}
    assert report.COLORS.keys() == others and len(set(report.COLORS.values())) == len(others)
