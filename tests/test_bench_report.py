"""bench.report: the pages and plots of benchmarks are those of the stored rows."""

from __future__ import annotations

import re

import pytest
from bench import report
from bench.engine import summary
from bench.engine.page import by_turns
from bench.points import Kind, by_kind, kind_of, of_newest_seed, points_of
from bench.rows import Row, read


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_the_pages_have_the_numbers_of_the_stored_rows(page):
    points, engines = report.stored(page.gpu)
    assert page.path.read_text() == report.text(page, points, engines), "run python -m bench.report"
    assert not any(row["dirty"] for point in points for row in (point.run, *point.others))


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_the_heatmaps_have_the_numbers_of_the_stored_rows(page):
    """Their cells are text, so that matplotlib is not needed."""
    points, engines = report.stored(page.gpu)
    for what, (columns, rows) in report.heatmaps(points, engines).items():
        written = re.findall(r"<text[^>]*>([^<]*)</text>", page.plot(what).read_text())
        cells = [f"{ratio:.2f}" for row in rows.values() for ratio in row if ratio is not None]
        assert [text for text in written if re.fullmatch(r"\d\.\d\d", text)] == cells, "run python -m bench.report"
        assert {*rows} <= {*written} and {*columns} & {*written}


def test_the_readme_s_heatmap_has_the_numbers_of_both_gpus():
    panels, text = report.of_both(), report.PLOT.read_text()
    written = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    cells = [f"{r:.2f}" for rows in panels.values() for row in rows.values() for r in row if r is not None]
    assert [word for word in written if re.fullmatch(r"\d\.\d\d", word)] == cells, "run python -m bench.report"
    assert {*panels} <= {*written} and len(panels) == 2


def row(impl: str, us: float, m: int = 3, run: str = "r1", **more: object) -> Row:
    common = {"kind": "time", "work": "w4a16", "format": "int4_g128", "n": 512, "k": 1024, "experts": 0}
    return common | {"impl": impl, "impl_version": "1", "us_p50": us, "m": m, "run": run} | more


def test_times_of_two_runs_are_not_compared():
    """The ratio is of the run with more implementations, the regret of the last run that timed other configs."""
    rows = [row("w4gemm", 10.0), row("humming", 20.0), row("cublas", 15.0)]
    rows += [row("w4gemm", 8.0, run="r2", best_config_us=4.0), row("cublas", 8.8, run="r2")]
    (point,) = points_of(rows)
    assert point.ratio == pytest.approx(1.5) and point.regret == pytest.approx(2.0)
    (point,) = points_of([*rows, row("w4gemm", 6.0, run="r3"), row("a", 9.6, run="r3"), row("b", 12.0, run="r3")])
    assert point.ratio == pytest.approx(1.6), "of two runs with as many the last"


def test_what_counts_as_another_library():
    rows = [row(name, us, work="w4a8_folded") for name, us in (("w4gemm", 10.0), ("cublas", 5.0), ("quack", 12.0))]
    (point,) = points_of([*rows, row("w4gemm_config", 1.0, work="w4a8_folded"), row("w4gemm", 2.0, m=4)])
    assert point.ratio == pytest.approx(1.2) and point.regret is None
    both = [row("w4gemm", us, work="w4a8", format=f"int4_g128{scales}") for us, scales in ((4.0, ""), (3.0, "_e4m3"))]
    (point,) = points_of([*both, row("quack", 6.0, work="w4a8")])
    assert point.ratio == pytest.approx(2.0), "the faster of two ways to scale"
    assert str(point.kind) == "W4A8, int4" and str(Kind("unknown", "w4a8_exact", "int4")).endswith("scales on sums")


def test_the_limit_is_a_launch_and_bytes_or_operations():
    facts = {"gpu": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16"}
    rows = [row(impl, 10.0, m, **facts) for impl in ("w4gemm", "cublas") for m in (3, 4096)]
    few, many = points_of(rows)
    moved = 512 * 1024 / 2 + 512 * 1024 // 128 * 2 + 3 * 2 * (512 + 1024)
    assert few.over_limit == pytest.approx(10 / (moved / 3.07e6 + 2))
    assert many.over_limit == pytest.approx(10 / (2 * 4096 * 512 * 1024 / 790e6 + 2))


def test_the_limit_needs_no_other_library_and_is_of_the_newest_seed():
    rows = [row("w4gemm", 4.0, m, run, seed=seed) for run, seed, m in (("r1", 58, 3), ("r2", 7, 5), ("r2", 7, 9))]
    assert not points_of(rows)
    assert [point.m for point in of_newest_seed(points_of(rows, alone=True))] == [5, 9]


def test_other_widths_are_kinds_of_their_own():
    """cuBLAS has the same weights only beside fp8 x, and counts there; K-quants have their own name."""
    eight = [row(name, us, work="w8a8", format="e4m3_g128_b128") for name, us in (("w4gemm", 10.0), ("cublas", 9.0))]
    six = [row(name, us, work="w6a16", format="int6_g16_s8x256") for name, us in (("w4gemm", 5.0), ("cublas", 9.0))]
    three = [row(name, us, work="w3a8", format="int3_g128") for name, us in (("w4gemm", 5.0), ("humming", 6.0))]
    four = [row(name, us, format="int4_g32_zfloat_u8x256") for name, us in (("w4gemm", 5.0), ("cublas", 9.0))]
    points = {str(point.kind): point for point in points_of([*eight, *six, *three, *four])}
    assert {*points} == {"W8A8, FP8_BLOCK", "W6A16, Q6_K", "W3A8, int3_g128", "W4A16, Q4_K"}
    assert {point.kind.set for point in points.values()} == {"widths"}
    assert kind_of(three[0] | {"set": "unknown"}).set == "unknown_widths"
    assert points["W8A8, FP8_BLOCK"].ratio == pytest.approx(0.9)


def test_every_point_is_printed(capsys):
    file = report.RESULTS / "fp4.jsonl"
    report.main(["--points", str(file)])
    printed = capsys.readouterr().out
    points = points_of(read(file))
    assert len(re.findall(r"^\| \d", printed, re.MULTILINE)) == len(points) > 100
    assert len(by_kind(points)) == printed.count("| n x k |") == 3


def engine(impl: str, ms: float, run: str = "r1", **more: object) -> Row:
    common = {
        "kind": "engine",
        "engine": "vllm",
        "model": "m",
        "format": "f",
        "gpus": 1,
        "mode": "default",
        "phase": "decode",
    }
    return common | {"impl": impl, "chosen": impl == "machete", "ms_step": ms, "batch": 1, "run": run} | more


def turn(impl: str, us: float, most: float = 0.0, **more: object) -> Row:
    times = {"us": us, "us_least": us, "us_most": most or us}
    common = {"model": "m-4-layers", "mode": "layer+fp8", "phase": "experts", "engine_version": "1", "gpu": "G"}
    return engine(impl, 0.0, chosen=impl == "humming", commit="c" * 9) | common | times | more


def test_ratios_by_turns_are_marked_if_rounds_scatter_and_belong_to_the_rows_before_them():
    rows = [turn("w4gemm", 2.0), turn("humming", 3.0), turn("w4gemm", 4.0), turn("marlin", 6.0, 6.4)]
    rows += [turn("humming", 9.0, batch=8), turn("humming", 8.0, us_p20=1.0), turn("w4gemm", 1.0, model="other")]
    whole = {"phase": "prefill", "seconds": 2.0, "seconds_least": 2.0, "seconds_most": 2.0, "tokens_in": 2048}
    rows += [turn("w4gemm", 0.0, **whole), turn("marlin", 0.0, **(whole | {"seconds": 3.0, "seconds_most": 3.0}))]
    (chosen, ratios), (other, others), (_, prefill) = summary.turns_of(rows).items()
    assert (str(chosen), chosen.part, chosen.other) == ("m, 4 layers, f, fp8 x", "experts", "humming*")
    assert (ratios, other.other, others) == ({"1": "1.50"}, "marlin", {"1": "1.50 (7%)"})
    assert prefill == {"prefill of 2048": "1.50 (33%)"}
    assert "| m, 4 layers, f, fp8 x | experts | marlin | 1.50 (7%) |" in by_turns(rows)


def test_an_engine_with_fp8_x_is_a_comparison_of_its_own_beside_those_of_its_run():
    rows = [
        turn("w4gemm", 4.0, mode="layer"),
        turn("w4gemm-fp8", 2.0, mode="layer"),
        turn("humming", 3.0, mode="layer"),
    ]
    rows += [turn("w4gemm", 2.0, mode="layer", run="r2"), turn("humming", 5.0, mode="layer", run="r2")]
    ratios = {str(case): of_case for case, of_case in summary.turns_of(rows).items()}
    assert ratios == {"m, 4 layers, f": {"1": "2.50"}, "m, 4 layers, f, fp8 x": {"1": "1.50"}}


def test_a_gain_is_of_the_newest_run_with_both():
    rows = [engine("w4gemm", 2.0), engine("machete", 3.0), engine("humming", 2.6)]
    rows += [engine("w4gemm", 1.0, "r2"), engine("machete", 1.8, "r2"), engine("w4gemm", 1.0, "r3")]
    rows += [engine("w4gemm", 5.0, model="m-2-layers"), engine("machete", 6.0, model="m-2-layers")]
    rows += [engine(impl, 9.0, "r4", kind="engine_variant") for impl in ("w4gemm", "machete")]
    ((case, gains),) = summary.cases_of(rows).items()
    assert str(case) == "m, f" and str(gains["batch 1"]) == "1.80 (1.30)"


def test_a_server_under_load_is_shown_without_torch_compile_and_marked_if_its_turns_scatter():
    def served(impl: str, tokens_s: float, least: float, **more: object) -> Row:
        return engine(impl, 0.0, mode="graphs", phase="serve", streamed=True, tokens_s=tokens_s) | {
            "tokens_s_least": least,
            "tokens_s_most": tokens_s,
            **more,
        }

    rows = [served("w4gemm", 30.0, 29.0), served("machete", 20.0, 10.0)]
    rows += [served("w4gemm", 30.0, 29.0, streamed=False), served("machete", 20.0, 19.5, streamed=False)]
    ((_, gains),) = summary.cases_of(rows, ("serve",)).items()
    assert {name: str(gain) for name, gain in gains.items()} == {
        "1 at a time": "1.50 (50%)",
        "1 at a time, whole": "1.50",
    }
    assert not summary.cases_of([engine("w4gemm", 1.0, mode="graphs"), engine("machete", 1.0, mode="graphs")])
