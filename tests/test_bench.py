"""Parts of bench that need no GPU: shapes, peers, files of rows, tables of what runs where."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench import cpu, support
from bench import rows as bench_rows
from bench.peers.base import unsupported
from bench.peers.w4gemm import W4gemm
from bench.shapes import LAYERS, ROUTINGS, divide, parse_layers, parse_tokens

import w4gemm
from w4gemm import QuantizedWeight, WeightFormat, choice
from w4gemm.checkpoints import FORMATS, METHODS
from w4gemm.core.problem import GemmProblem
from w4gemm.kernels import KERNELS
from w4gemm.packing.layouts import native_layout

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"


def test_shapes_by_name_and_by_size():
    assert parse_layers("layers,8192x8192,96x64") == (*LAYERS, (96, 64))
    assert parse_tokens("1,16") == (1, 16) and 4090 in parse_tokens("awkward")
    with pytest.raises(ValueError, match="shapes: wanted layers.*got 'layer'"):
        parse_layers("layer")
    with pytest.raises(ValueError, match="m: wanted numbers"):
        parse_tokens("1,two")


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


def test_what_other_libraries_multiply():
    """Symmetric integers of the widths and the floats that an adapter names, and no scales of two levels."""

    def reason(format: str, **limits: object) -> str:
        return unsupported(256, 512, WeightFormat.parse(format), torch.bfloat16, groups=(-1, 128), **limits)

    assert not reason("int4_g128") and "does not cover int8_g128" in reason("int8_g128")
    assert not reason("int8_col_fp32", bits=(4, 8)) and not reason("int3_g128", bits=(3,))
    assert "does not cover int6_g16_s8x256" in reason("q6_k", bits=(6,))
    assert "symmetric" in reason("int8_g128_zint", bits=(8,)) and "output channels" in reason("int4_g128_e4m3")
    assert not reason("mxfp8", floats=("mxfp8",)) and "does not cover e4m3_col_fp32" in reason(
        "e4m3_col_fp32", floats=("mxfp8",)
    )
    assert "no partial group" in unsupported(256, 448, WeightFormat(), torch.bfloat16, groups=(128,))


@pytest.mark.parametrize("m, experts", [(1, 128), (16, 8), (1024, 32)])
def test_all_tokens_go_to_some_expert(m, experts):
    alike, random, zipf, hot = (divide(routing, m, experts) for routing in ROUTINGS)
    for counts in (alike, random, zipf, hot):
        assert len(counts) == experts and sum(counts) == m * experts and min(counts) >= 0
    assert max(alike) == m < max(random) < max(zipf) < max(hot) == m * experts
    assert random == divide("random", m, experts)
    # expert e in proportion to 1 / (1 + e), in a mixed order: the second has half of what the first has
    assert sorted(zipf)[-2] == pytest.approx(max(zipf) / 2, abs=1)


def test_every_stored_row_can_be_read():
    """And names what was measured; of benchmarks also the GPU and the commit."""
    for path in RESULTS.glob("*.jsonl"):
        rows = bench_rows.read(path)
        assert rows, path.name
        if path.name.startswith("configs"):
            rows = list(bench_rows.timings_of(path))
            assert all(row["us"] > 0 and row["n"] > 0 and row["k"] > 0 and row["m"] > 0 for row in rows), path.name
            assert {str(WeightFormat.parse(row["format"])) for row in rows} == {row["format"] for row in rows}
        elif not path.name.startswith("grouped_configs"):
            assert all({"kind", "gpu", "commit", "dirty"} <= row.keys() for row in rows), path.name


def test_a_file_of_rows_is_stored_compactly(tmp_path):
    """A line a run, a line a point; a benchmark appends whole rows."""
    common = {"kind": "time", "run": "a", "gpu": "G", "work": "w4a16"}
    expected = [
        common | {"m": m, "impl": impl, "impl_version": version, "us_p50": us} | ours
        for m, impl, version, us, ours in (
            (1, "w4gemm", "2", 1.5, {"configs": 8, "best_config_us": 1.0}),
            (1, "marlin", "3", 2.5, {}),
            (2, "w4gemm", "2", 1.7, {}),
        )
    ]
    path = tmp_path / "rows.jsonl"
    more = {"us_p20": 1.0, "us_p80": 2.0, "rel_error": 1e-3, "config": "c"}
    forced = expected[0] | {"impl": "w4gemm_config"}
    path.write_text("".join(json.dumps(row | more) + "\n" for row in (*expected[:2], forced, expected[2])))
    bench_rows.main([str(path)])
    assert len(path.read_text().splitlines()) == 1 + 2 and bench_rows.read(path) == expected
    with open(path, "a") as file:
        file.write(json.dumps(expected[2] | {"m": 3}) + "\n")
    bench_rows.main([str(path)])
    assert len(path.read_text().splitlines()) == 1 + 3 and len(bench_rows.read(path)) == 4


def test_rows_of_one_format_are_stored_as_a_part(tmp_path):
    """Also rows without a format after rows with one."""
    path = tmp_path / "rows.jsonl"
    formats = ["int4_g32"] * 4 + ["mxfp4"] * 4 + [""] * 2
    rows = [{"kind": "cpu", "run": "a", "m": m} | ({"format": f} if f else {}) for m, f in enumerate(formats)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bench_rows.main([str(path)])
    assert path.read_text().count("mxfp4") == 1 and bench_rows.read(path) == rows


def test_a_row_of_a_stored_file_is_of_the_run_before_it_or_of_the_one_it_names(tmp_path):
    path = tmp_path / "rows.jsonl"
    facts = [{"kind": "run", "run": run, "all": {"gpu": gpu}} for run, gpu in (("a", "G"), ("b", "H"))]
    lines = [*facts, {"m": 1}, {"run": "a", "m": 2}, {"run": "c", "m": 3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = [{"gpu": "H", "run": "b", "m": 1}, {"gpu": "G", "run": "a", "m": 2}, {"run": "c", "m": 3}]
    assert bench_rows.read(path) == expected


def test_timings_of_configs_are_a_line_for_each_problem(tmp_path):
    """In the order in which they were measured; a config that was timed again begins another line. Stored by kernel."""
    rows = [
        {"n": 64, "k": 128, "m": m, "config": f"kernel/{config}", "us": us}
        for m, config, us in ((1, "a", 2.0), (1, "b", 3.0), (2, "a", 4.0), (2, "a", 5.0), (1, "a", 6.0))
    ]
    lines = list(bench_rows.by_problem(rows))
    times = [{"a": 2.0, "b": 3.0}, {"a": 4.0}, {"a": 5.0}, {"a": 6.0}]
    assert [line["us"] for line in lines] == [{f"kernel/{c}": us for c, us in own.items()} for own in times]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(bench_rows.timings_of(file)) == rows
    bench_rows.main([str(file)])
    assert [json.loads(line)["us"] for line in file.read_text().splitlines()[1:]] == [{"kernel": t} for t in times]
    assert list(bench_rows.timings_of(file)) == rows


def test_a_cluster_of_one_cta_is_not_stored(tmp_path):
    """Nor that of a tail."""
    stored = {
        "64x128x128_1x1x1_coop": "64x128x128_coop",
        "128x64x128_1x2x1_pingpong": "128x64x128_1x2x1_pingpong",
        "128x256x128_2x1x1_coop_k2+64x64x256_1x1x1_coop": "128x256x128_2x1x1_coop_k2+64x64x256_coop",
    }
    file = tmp_path / "rows.jsonl"
    row = {"n": 64, "k": 128, "m": 1, "us": {f"kernel/{config}": 1.0 for config in stored}}
    file.write_text(json.dumps(row) + "\n")
    bench_rows.main([str(file)])
    assert json.loads(file.read_text().splitlines()[1])["us"] == {"kernel": dict.fromkeys(stored.values(), 1.0)}
    assert bench_rows.read(file) == [row]


def test_the_stored_rows_stay_small_and_are_described():
    files = list(RESULTS.glob("*.jsonl"))
    assert sum(file.stat().st_size for file in files) < 1.5e6, "keep the newest run; older ones are in git's history"
    words = (RESULTS / "README.md").read_text()
    assert not [file.name for file in files if f"`{file.name}`" not in words]
    assert not [name for name in re.findall(r"`(\w+\.jsonl)`", words) if not (RESULTS / name).exists()]


@pytest.mark.parametrize("page", support.PAGES, ids=lambda page: page.name)
def test_the_tables_of_what_runs_where_are_current(page):
    text = page.read_text()
    assert "<!-- made by python -m bench.support: " in text
    assert support.written(text) == text, "run python -m bench.support"


def test_the_table_of_oracles_has_all_stored_rows():
    """A run with ``--out`` writes the table of its own rows alone into the page."""
    pytest.importorskip("gguf")
    from bench import oracles

    page, rows = oracles.PAGE.read_text(), bench_rows.read(oracles.RESULTS)
    assert "bench.oracles" in page and oracles.with_table(page, rows) == page, "run python -m bench.oracles --table"


def test_the_table_of_checkpoints_has_every_format():
    table = (ROOT / "docs/support.md").read_text().rpartition("\n\n|")[2].split("\n\n")[0]
    rows = [line.strip("| ").partition("|")[0].lower() for line in table.splitlines()]
    expected = {*(format.name for format in FORMATS), *METHODS} - {"w4gemm"}
    missing = [name for name in expected if not any(name.replace("-", "") in row.replace("-", "") for row in rows)]
    assert not missing, f"add a row for each of {missing} to the last table of docs/support.md"


@pytest.mark.parametrize("name", ["T4 (7.5) and older", "AMD GPUs"])
def test_a_device_without_a_kernel_gets_a_sentence(name):
    """It says what is wanted, what there is, and nothing that depends on the device's name."""
    device = support.DEVICES[name]
    problem = GemmProblem(16, 512, 512, torch.bfloat16, WeightFormat(), native_layout(device), device=device)
    with pytest.raises(w4gemm.UnsupportedError) as e:
        choice.choose(problem)
    assert "needs an NVIDIA GPU" in str(e.value) if device.rocm else device.name in str(e.value)
    if not device.rocm:
        assert f"needs compute capability 9.0 (H100, H200, H800, H20), {device.name} has " in str(e.value)
        assert f"needs compute capability 8.0 or newer (A100, RTX 30 and later), {device.name} has " in str(e.value)
        assert ".".join(map(str, device.capability)) in str(e.value)
    nameless = replace(problem, device=replace(device, name=""))
    assert all(bool(k.supports(nameless)) == bool(k.supports(problem)) for k in KERNELS)


def test_the_page_of_cpus_has_the_stored_rows():
    page = cpu.PAGE.read_text()
    assert cpu.with_tables(page, bench_rows.read(cpu.RESULTS)) == page and "4096 x 4096, int4_g128, bfloat16" in page


def test_a_point_of_a_cpu_has_checked_times(monkeypatch):
    monkeypatch.setattr(cpu, "_SECONDS", 0)
    rows = list(cpu.points(64, 64, WeightFormat(32), (1, 5), True))
    assert [(row["dtype"], row["m"]) for row in rows] == [(d, m) for d in ("float32", "bfloat16") for m in (1, 5)]
    assert all(row["us"] > 0 < row["dense_us"] and "dequantized_us" in row for row in rows)
    assert ["int4pack_us" in row for row in rows] == [False, False, True, True]
    with pytest.raises(RuntimeError, match="a result of"):
        cpu.least_us({"us": [lambda: torch.ones(2, 2)]}, torch.zeros(2, 2).double() + 1.1, torch.float32)
