"""The search of tests/legality.py, with a made-up compiler."""

import json

import pytest

import legality
from legality import Cell, Compiled, Finding, findings_of, search, tasks_of
from w4gemm.kernels.space import NOT_COMPILED

KERNEL = "sm90_fp8_gemm"
TILES = [16, 32, 64, 128, 144, 160, 192, 256]
DECODER = next(name for name in legality.decoders(KERNEL) if name + legality.BLOCK_SCALES in legality.decoders(KERNEL))
CELL = Cell(KERNEL, "128x128_1x1x1_coop", "dense", DECODER)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(legality, "known", {})
    monkeypatch.setattr(legality, "files", {})
    monkeypatch.setattr(Cell, "possible", lambda *_: TILES)
    legality.before.cache_clear()
    yield
    legality.before.cache_clear()


@pytest.fixture
def compiled(monkeypatch):
    """Configs that were compiled; 144 and 160 tokens spill."""
    configs = []

    def flaw(variant: legality.Variant) -> str:
        configs.append(variant.config)
        return "spills" * variant.config.startswith(("144x", "160x"))

    monkeypatch.setattr(legality.Variant, "flaw", flaw)
    return configs


def excluded(pressure: legality.Pressure) -> dict[int, str]:
    """What the findings exclude, by tile_m."""
    return {m: f.seen for f in findings_of(CELL)[0] if pressure.covers(f.pressure) for m in f.tile_m}


@pytest.mark.parametrize("spilling", [(), (144,), (64, 160, 256), (128, 144, 160, 192, 256)])
@pytest.mark.parametrize("possible_elsewhere", [[], [128], TILES])
@pytest.mark.parametrize("epilogue", [0, 2, 4])
def test_what_spills_is_said_and_nothing_else(monkeypatch, spilling, possible_elsewhere, epilogue):
    """Tiles between clean ones may spill. Under the pressure of most registers no tile_m, or few, may be possible."""
    least = CELL.pressures[0].scale_bytes

    def possible(_: Cell, pressure: legality.Pressure) -> list[int]:
        return TILES if pressure.scale_bytes == least else possible_elsewhere

    def flaw(variant: legality.Variant) -> str:
        return "spills" * (int(variant.config.partition("x")[0]) in spilling and variant.epilogue >= epilogue)

    monkeypatch.setattr(Cell, "possible", possible)
    monkeypatch.setattr(legality.Variant, "flaw", flaw)
    for task in tasks_of(CELL, everything=False):
        search(task)
    for pressure in CELL.pressures:
        expected = {m for m in CELL.possible(pressure) if m in spilling and pressure.epilogue >= epilogue}
        assert expected == set(excluded(pressure)) & set(CELL.possible(pressure)), pressure


def test_what_no_file_has_is_not_legal_until_it_is_compiled(compiled):
    assert excluded(CELL.pressures[0]) == dict.fromkeys(TILES, NOT_COMPILED)
    for task in tasks_of(CELL, everything=False):
        search(task)
    assert excluded(CELL.pressures[0]) == {144: "spills", 160: "spills"}


def test_what_is_not_compiled_stays_as_the_file_has_it(compiled):
    """By itself the search compiles what the file calls not compiled, and with everything=True the rest."""
    kernel = legality.kernel_named(KERNEL)
    findings = [
        Finding(CELL.tiles, *row)
        for row in (((160, 192), CELL.pressures[0], NOT_COMPILED), ((256,), CELL.pressures[0], "spills"))
    ]
    tiles = {CELL.tiles: " ".join(map(str, TILES))}
    legality.files[KERNEL] = Compiled("", tiles, legality.sizes_of(kernel), {}, tuple(findings))
    tasks = tasks_of(CELL, everything=False)
    assert [task.tile_m for task in tasks] == [(192,), (160,)]
    assert excluded(CELL.pressures[0]) == {160: NOT_COMPILED, 192: NOT_COMPILED, 256: "spills"}
    assert findings_of(CELL)[1] == 5 * len(CELL.pressures)
    for task in tasks:
        search(task)
    assert excluded(CELL.pressures[0]) == {160: "spills", 256: "spills"}
    assert {int(config.partition("x")[0]) for config in compiled} == {160, 192}
    for task in tasks_of(CELL, everything=True):
        search(task)
    assert excluded(CELL.pressures[-1]) == {144: "spills", 160: "spills"}
    assert findings_of(CELL)[1] == 0


def test_of_a_form_that_the_file_has_only_a_new_tile_m_is_compiled(compiled):
    kernel = legality.kernel_named(KERNEL)
    tiles = {CELL.tiles: " ".join(str(m) for m in TILES if m != 128)}
    legality.files[KERNEL] = Compiled("", tiles, legality.sizes_of(kernel), {}, ())
    assert [task.tile_m for task in tasks_of(CELL, everything=False)] == [(128,)]
    assert excluded(CELL.pressures[0]) == {128: NOT_COMPILED}


def test_beside_block_scales_of_x_each_pressure_is_compiled(monkeypatch):
    """What is clean with many registers may spill with fewer there; what spills does so with more, to be safe."""
    cell = CELL._replace(decoder=f"{CELL.decoder}{legality.BLOCK_SCALES}")
    spilling = cell.pressures[len(cell.pressures) // 2]
    monkeypatch.setattr(legality.Variant, "flaw", lambda v: "spills" * (v.place[1:] == (64, spilling)))
    for task in tasks_of(cell, everything=False):
        search(task)
    (finding,) = findings_of(cell)[0]
    assert finding == (cell.tiles, (64,), spilling, "spills")


def test_a_config_is_legal_that_is_clean_with_the_ptxas_of_both_wheels(compiled, monkeypatch, tmp_path):
    """The installed one is asked of all, whatever the other made of it; only what either spills is excluded."""
    others = [(variant, "") for variant in CELL.variants(16, CELL.pressures[-1])]
    others += [(CELL.variants(m, CELL.pressures[0])[0], "spills" * (m == 64)) for m in (64, 128)]
    file = tmp_path / "other.jsonl"
    file.write_text("".join(f"{json.dumps([*variant, seen])}\n" for variant, seen in others))
    run = legality.Run(1, None, ("13.4", str(file)), 1e6)
    assert excluded(CELL.pressures[-1]) == dict.fromkeys(TILES, NOT_COMPILED)
    monkeypatch.setattr(run, "map", lambda function, tasks: [function(task) for task in tasks] != [])
    monkeypatch.setattr(legality, "cells_of", lambda _: [CELL])
    run.kernel(legality.kernel_named(KERNEL), everything=True, checks=0, out=tmp_path)
    assert excluded(CELL.pressures[-1]) == {64: "spills", 144: "spills", 160: "spills"}
    table = Compiled.read(tmp_path / KERNEL / "legality.jsonl")
    assert table.compiler == f"{legality.compiler()} or 13.4"
    assert {m for f in table.findings for m in f.tile_m} == {64, 144, 160}
