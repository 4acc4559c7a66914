"""Compile the configs of the GPU kernels, without a GPU, and write what ptxas does badly: kernels/*/legality*.jsonl.

    python tests/legality.py                      what the files lack or call not compiled: new tiles, new decoders
    python tests/legality.py --all sm90_fp8_gemm  one kernel anew, after its device code or the compiler changed
    python tests/legality.py --results FILE       takes up where a run with this file was stopped

A cell is all tile_m of one form of a config, with one decoder, dense, grouped or gathered. Registers grow with the
bytes of scales and with the epilogue (``space.Pressure``): each tile_m is compiled with the most, and with the fewest.
What is clean is so with fewer; what compiles badly does so with more. Beside block scales of x each pressure is
compiled, because there a config may spill that is clean with more registers. Registers need not grow with tile_m: 80
and 96 tokens may spill where 112 do not. Only of small tiles the largest stands for the others. Then ``--checks``
configs are drawn at random, of other formats and epilogues too. One that is worse than the file says is added to it.
What was not compiled when the time is up stays as the file has it, or is not legal if the file lacks it.

The DSL's wheels for CUDA 12 and 13 have a ptxas each, and these spill in different variants. The files have the
verdicts of the one that is installed, unless ``--beside`` adds those of a run with the other.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from conformance.cases import FORMATS
from sass import facts_of, flaw
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.core.problem import GPUS, Device, GemmProblem
from w4gemm.jit import object_code
from w4gemm.kernels import KERNELS, kernel_named
from w4gemm.kernels.gpu import GpuKernel
from w4gemm.kernels.space import EPILOGUES, NOT_COMPILED, Compiled, Finding, Pressure

ARCHS = {"sm80_mixed_gemm": ("sm_90a", "sm_80"), "sm89_fp8_gemm": ("sm_90a", "sm_89")}
"""Targets that a kernel's configs are compiled for, if it is not only that of Hopper."""
INSTRUCTIONS = {
    "sm80_mixed_gemm": "HMMA.16816",
    "sm89_fp8_gemm": "HMMA.16816",
    "sm90_decode": "HMMA",
    "sm90_mixed_gemm": "HGMMA",
    "sm90_fp8_gemm": "QGMMA",
    "sm90_fp8_block_gemm": "QGMMA",
}
"""Matrix instruction of each kernel on an H200."""
ROWS: dict[str, dict[str, Any]] = {"dense": {}, "grouped": {"experts": 8}, "gathered": {"experts": 8, "gathered": True}}
HEAVY: dict[str, tuple[tuple[Epilogue, int], ...]] = {
    "plain": ((Epilogue(alpha="device", bias=True), 8190), (Epilogue(), 8192)),
    "gated": ((Epilogue("swiglu_oai", "device", bias=True), 8192), (Epilogue("situ_mul", bias=True), 8190 * 2)),
    "activation": ((Epilogue("gelu", "device", bias=True), 8190),),
    "residual": ((Epilogue("gelu", "device", True, True), 8192), (Epilogue("silu_mul", "host", True, True), 8192)),
    "ragged residual": (
        (Epilogue("gelu", "device", True, True), 8190),
        (Epilogue("silu_mul", "host", True, True, torch.float32), 8192),
    ),
}
"""By class, epilogues that take many registers, and n: rows of 8190 16-bit numbers are no multiple of 16 bytes."""
BLOCK_SCALES = ", block scales of x"
SMALL = 32
"""Of tiles of at most so many tokens the largest is compiled."""


class Variant(NamedTuple):
    """One compiled variant: what is compiled, in words."""

    kernel: str
    config: str
    format: str
    rows: str
    epilogue: int
    """Index in ``HEAVY`` of the class."""
    of_class: int
    """Index of the epilogue in its class."""
    x_scales: str
    """``token``, ``block`` or ``none``."""
    arch: str

    @property
    def place(self) -> tuple[Cell, int, Pressure]:
        """The cell, tile_m and pressure that it is compiled for."""
        tile_m, _, tiles = self.config.partition("x")
        pressure = Pressure.of(cast(GpuKernel, kernel_named(self.kernel)).any_variant(self.problem))
        return Cell(self.kernel, tiles, self.rows, pressure.decoder), int(tile_m), pressure

    @property
    def problem(self) -> GemmProblem:
        epilogue, n = HEAVY[EPILOGUES[self.epilogue]][self.of_class]
        epilogue = epilogue._replace(token_scale=self.x_scales == "token", block_scale=self.x_scales == "block")
        return problem_of(self.kernel, self.format, self.rows, epilogue, n, GPUS[self.arch])

    def flaw(self) -> str:
        """What ptxas did badly; the empty string if it did not."""
        kernel, problem = kernel_named(self.kernel), self.problem
        try:
            code = object_code(kernel.unit(problem, GemmConfig.parse(self.config)))
        except Exception as e:
            return f"does not compile: {str(e).splitlines()[0][:100]}"
        # a WGMMA along k is as long as a group of 32, whose sums are waited for
        group = cast(GpuKernel, kernel).any_variant(problem).block.scale_group
        asynchronous = problem.dtype != torch.float8_e4m3fn or group > 32
        instruction = "QMMA.16832" if self.arch == "sm_89" else INSTRUCTIONS[self.kernel]
        return flaw(facts_of(code), instruction, asynchronous=asynchronous)


def problem_of(kernel: str, format: str, rows: str, epilogue: Epilogue, n: int, device: Device) -> GemmProblem:
    of: Any = kernel_named(kernel)
    parsed = WeightFormat.parse(format)
    return GemmProblem(512, n, 8192, of.dtypes[-1], parsed, of.layout, epilogue, device, **ROWS[rows])


def gpu_kernels() -> list[GpuKernel]:
    """The kernels whose configs are compiled."""
    return [kernel for kernel in KERNELS if isinstance(kernel, GpuKernel)]


def formats() -> list[WeightFormat]:
    """The formats of the conformance tests, in groups of every size that a block holds; zero points of floats come
    first, scales of another dtype than bf16 last."""
    several: dict[WeightFormat, None] = {}
    for format, group_size in itertools.product(FORMATS, (16, 32, 64, 128, PER_COLUMN)):
        with contextlib.suppress(ValueError):  # scales that take other groups
            several[replace(format, group_size=group_size)] = None
    return sorted(several, key=lambda f: (f.zero != "float", f.scale != "bf16", f.group_size < 0, len(str(f)), str(f)))


@functools.cache
def decoders(kernel: str) -> dict[str, dict[int, list[str]]]:
    """Formats by bytes of scales by decoder, of all that the kernel takes."""
    of: Any = kernel_named(kernel)
    by_decoder: dict[str, dict[int, list[str]]] = {}
    for format, epilogue in itertools.product(formats(), (Epilogue(), Epilogue(block_scale=True))):
        problem = problem_of(kernel, str(format), "dense", epilogue, 8192, GPUS["sm_90a"])
        if of.supports(problem):
            pressure = Pressure.of(of.any_variant(problem))
            by_decoder.setdefault(pressure.decoder, {}).setdefault(pressure.scale_bytes, []).append(str(format))
    return {name: dict(sorted(by_bytes.items())) for name, by_bytes in by_decoder.items()}


# --- one cell


class Cell(NamedTuple):
    kernel: str
    tiles: str
    rows: str
    decoder: str

    @property
    def pressures(self) -> list[Pressure]:
        """All that are compiled, those with few registers first."""
        unscaled = (0, 1) if kernel_named(self.kernel).layout == "mma8" and BLOCK_SCALES not in self.decoder else (0,)
        sizes = decoders(self.kernel)[self.decoder]
        several = itertools.product(unscaled, range(len(EPILOGUES)), sizes)
        return [Pressure(self.decoder, self.rows, size, epilogue, u) for u, epilogue, size in several]

    def formats(self, pressure: Pressure, every: bool = False) -> list[str]:
        """Those that speak for all of a pressure: codes of 2 and 3 bits take fewer registers than those of 4."""
        formats = decoders(self.kernel)[self.decoder][pressure.scale_bytes]
        wide = [f for f in formats if every or WeightFormat.parse(f).bits >= 4]
        return wide or formats

    def variants(self, tile_m: int, pressure: Pressure, every: bool = False) -> list[Variant]:
        """Two that stand for a config under a pressure, or every one: each format, epilogue and target takes part."""
        formats = self.formats(pressure, every)
        x_scales = "block" if BLOCK_SCALES in self.decoder else "none" if pressure.unscaled else "token"
        if kernel_named(self.kernel).layout == "mma16":
            x_scales = "none"
        epilogues = range(len(HEAVY[EPILOGUES[pressure.epilogue]]))
        archs = ARCHS.get(self.kernel, ("sm_90a",))
        if every:
            several = list(itertools.product(formats, epilogues, archs))
        else:
            ends = dict.fromkeys((formats[0], formats[-1]))
            cycles = map(itertools.cycle, (ends, epilogues, archs))
            several = list(itertools.islice(zip(*cycles, strict=False), max(len(ends), len(epilogues), len(archs))))
        config = f"{tile_m}x{self.tiles}"
        return [Variant(self.kernel, config, f, self.rows, pressure.epilogue, e, x_scales, a) for f, e, a in several]

    @functools.cache  # noqa: B019 cells live as long as the run
    def possible(self, pressure: Pressure) -> list[int]:
        """Each tile_m that no rule excludes, in ascending order."""
        problem = self.variants(8, pressure)[0].problem
        kernel: Any = kernel_named(self.kernel)
        possible = kernel.space.possible(kernel.any_variant(problem)) if kernel.supports(problem) else ()
        return sorted(c.tile_m for c in possible if str(c).partition("x")[2] == self.tiles)


Known = dict["Cell", dict[int, dict[Pressure, str]]]
known: Known = {}
"""Flaws of what was compiled, by cell, tile_m and pressure; empty if it was clean."""
files: dict[str, Compiled] = {}
"""By kernel, what its file says before the run."""


def note(variant: Variant, seen: str) -> None:
    """Add what was seen of a variant to what is known."""
    cell, tile_m, pressure = variant.place
    if seen or variant.format in cell.formats(pressure):
        by_pressure = known.setdefault(cell, {}).setdefault(tile_m, {})
        by_pressure[pressure] = by_pressure.get(pressure, "") or seen


def compiled(cell: Cell, tile_m: int, pressure: Pressure) -> str | None:
    """Return what ptxas did badly, under this pressure or one that it covers; None if nothing is known."""
    results = known.get(cell, {})
    for lighter, seen in results.get(tile_m, {}).items():
        if seen and pressure.covers(lighter):
            return seen
    if BLOCK_SCALES in cell.decoder:
        return results.get(tile_m, {}).get(pressure)
    stand_for = [by for m, by in results.items() if m == tile_m or tile_m <= m <= SMALL]
    clean = any(not seen and p.covers(pressure) for by in stand_for for p, seen in by.items())
    return "" if clean else None


@functools.cache
def before(cell: Cell, tile_m: int, pressure: Pressure) -> dict[str, str] | None:
    """Return what the file says was seen of the configs that it excludes; None if it lacks this one."""
    file = files.get(cell.kernel)
    if file is None or str(tile_m) not in file.tiles.get(cell.tiles, "").split():
        return None
    if pressure.scale_bytes not in file.decoders.get(cell.decoder, ()):
        return None
    return {config: finding.seen for config, finding in file.badly(pressure).items()}


def unknown(cell: Cell, tile_m: int, everything: bool) -> list[Pressure]:
    """Return the pressures under which a config is to be compiled: of which the file says nothing or "not compiled"."""
    waiting = [p for p in cell.pressures if tile_m in cell.possible(p) and compiled(cell, tile_m, p) is None]
    if everything:
        return waiting
    excluded = ((p, before(cell, tile_m, p)) for p in waiting)
    return [p for p, by in excluded if by is None or by.get(f"{tile_m}x{cell.tiles}") == NOT_COMPILED]


class Task(NamedTuple):
    cell: Cell
    tile_m: tuple[int, ...]
    """In descending order: one, or all small ones."""
    everything: bool


def search(task: Task) -> dict[Variant, str]:
    """Compile what is unknown of a task: with the most registers, with the fewest, then halves of what is unknown."""
    flaws: dict[Variant, str] = {}
    for tile_m in task.tile_m:
        ends = [-1, 0]
        while waiting := unknown(task.cell, tile_m, task.everything):
            pressure = waiting[ends.pop(0) if ends else len(waiting) // 2]
            variants = task.cell.variants(tile_m, pressure)
            for variant in variants if pressure == task.cell.pressures[-1] else variants[:1]:
                flaws[variant] = variant.flaw()
                note(variant, flaws[variant])
                if flaws[variant]:
                    break
    return flaws


# --- all of them


def cells_of(kernel: GpuKernel) -> list[Cell]:
    """The cells of a kernel in which something is possible."""
    several = itertools.product(kernel.space.tiles, ROWS, decoders(kernel.name))
    cells = [Cell(kernel.name, *fields) for fields in several]
    return [cell for cell in cells if cell.possible(cell.pressures[0])]


def tasks_of(cell: Cell, everything: bool) -> list[Task]:
    """What is to be compiled of a cell."""
    tiles = sorted({m for pressure in cell.pressures for m in cell.possible(pressure)}, reverse=True)
    several = [*((m,) for m in tiles if m > SMALL), tuple(m for m in tiles if m <= SMALL)]
    return [Task(cell, some, everything) for some in several if any(unknown(cell, m, everything) for m in some)]


def findings_of(cell: Cell, everything: bool = True) -> tuple[list[Finding], int]:
    """Of what was compiled, what was seen; of the rest, what the file says. And how much of that is legal. Without
    ``everything`` a flaw that the file has stays, unless the config itself was compiled under that pressure."""
    trusted = 0
    excluded: dict[int, dict[Pressure, str]] = {}
    for pressure in cell.pressures:
        for tile_m in cell.possible(pressure):
            file, config = before(cell, tile_m, pressure), f"{tile_m}x{cell.tiles}"
            seen = compiled(cell, tile_m, pressure)
            if not everything and pressure not in known.get(cell, {}).get(tile_m, {}):
                seen = (file or {}).get(config) or seen
            if seen or (seen is None and (file is None or config in file)):
                excluded.setdefault(tile_m, {})[pressure] = seen or (file or {}).get(config, NOT_COMPILED)
            elif seen is None:
                trusted += 1
    least: dict[tuple[Pressure, bool], dict[int, str]] = {}
    for tile_m, by_pressure in sorted(excluded.items()):
        for pressure, seen in by_pressure.items():
            if not any(p != pressure and pressure.covers(p) and (it or not seen) for p, it in by_pressure.items()):
                least.setdefault((pressure, bool(seen)), {})[tile_m] = seen
    rows = [(tuple(flaws), pressure, next(iter(flaws.values()))) for (pressure, _), flaws in sorted(least.items())]
    return [Finding(cell.tiles, *row) for row in rows], trusted


def table_of(kernel: GpuKernel, everything: bool) -> Compiled:
    """What is known now. Without ``everything``, what the file trusts was not looked at."""
    findings, trusted = [], dict.fromkeys(decoders(kernel.name), 0)
    for cell in cells_of(kernel):
        of_cell, count = findings_of(cell, everything)
        findings += of_cell
        trusted[cell.decoder] += count
    order = {tiles: i for i, tiles in enumerate(kernel.space.tiles)}
    findings.sort(key=lambda f: (order[f.tiles], f.pressure, f.tile_m))
    trusted = {decoder: count for decoder, count in trusted.items() if count}
    if kernel.name in files and not everything:
        trusted = files[kernel.name].trusted
    return Compiled(compiler(), dict(kernel.space.tiles), sizes_of(kernel), trusted, tuple(findings))


def drawn(kernel: GpuKernel, count: int, seed: int) -> list[tuple[Cell, int, Pressure, Variant]]:
    """Configs of a kernel under random pressures, with a random format, epilogue and target."""
    draw, cells = random.Random(seed), cells_of(kernel)
    checks = []
    for cell in (draw.choice(cells) for _ in range(count)):
        pressure = draw.choice(cell.pressures)
        if possible := cell.possible(pressure):
            tile_m = draw.choice(possible)
            checks.append((cell, tile_m, pressure, draw.choice(cell.variants(tile_m, pressure, every=True))))
    return checks


def flaw_of(variant: Variant) -> dict[Variant, str]:
    return {variant: variant.flaw()}


def compiler() -> str:
    import cutlass

    version = cutlass.CUDA_VERSION
    return f"CuTe DSL {cutlass.__version__}, ptxas of CUDA {version.major}.{version.minor}"


def read(results: Path) -> dict[Variant, str]:
    """The flaws of what a run compiled."""
    flaws = {}
    for line in results.read_text().splitlines():
        *fields, seen = json.loads(line)
        flaws[Variant(*fields)] = seen
    return flaws


class Run:
    """A run over some kernels."""

    def __init__(self, jobs: int, results: Path | None, beside: tuple[str, str] | None, seconds: float) -> None:
        self.jobs, self.results, self.end = jobs, results, time.monotonic() + seconds
        self.flaws = read(results) if results and results.exists() else {}
        self.other_cuda, other = beside or ("", None)
        self.beside = read(Path(other)) if other else {}
        for variant, seen in self.flaws.items():
            note(variant, seen)

    def map(self, function: Any, tasks: list[Any]) -> bool:
        """Note what the tasks saw, and append it to the file of results; False if the time is up before."""
        done = 0
        with multiprocessing.get_context("fork").Pool(self.jobs) as pool:
            for result in [pool.apply_async(function, (task,)) for task in tasks]:
                result.wait(max(0.0, self.end - time.monotonic()))
                if not result.ready():
                    continue
                done += 1
                print(f"\r{function.__name__} {done}/{len(tasks)}", end="", file=sys.stderr)
                for variant, seen in result.get().items():
                    self.flaws[variant] = seen
                    note(variant, seen)
                    if self.results:
                        with open(self.results, "a") as f:
                            f.write(f"{json.dumps([*variant, seen])}\n")
        print(file=sys.stderr)
        return done == len(tasks)

    def table(self, kernel: GpuKernel, everything: bool) -> Compiled:
        """What is known now, with the names of all compilers that findings may be of."""
        table = table_of(kernel, everything)
        if self.other_cuda:
            return table._replace(compiler=f"{table.compiler} or {self.other_cuda}")
        before = files.get(kernel.name)
        kept = before is not None and not everything and before.compiler.startswith(table.compiler)
        return table._replace(compiler=before.compiler) if before and kept else table

    def kernel(self, kernel: GpuKernel, everything: bool, checks: int, out: Path) -> bool:
        """Write one kernel's file; False if the time is up before."""
        path = kernel.space.table
        if path.exists():
            files[kernel.name] = Compiled.read(path)
        compiled_before = len(self.flaws)
        whole = self.map(search, [task for cell in cells_of(kernel) for task in tasks_of(cell, everything)])
        for (
            variant,
            seen,
        ) in self.beside.items():  # not before: what is clean with another ptxas may spill with this one
            note(variant, seen)
        table = self.table(kernel, everything)
        picks = drawn(kernel, checks, seed=len(table.findings))
        whole &= self.map(flaw_of, [variant for *_, variant in picks if variant not in self.flaws])
        outcome: Counter[str] = Counter()
        for _, _, pressure, variant in picks:
            seen, said = self.flaws.get(variant), variant.config in table.badly(pressure)
            if seen is not None:
                kinds = ("clean", "worse"), ("better", "badly")
                outcome[kinds[said][bool(seen)]] += 1
                if seen and not said:
                    print(f"\nworse than the file says, which has it now: {variant}: {seen}")
        table = self.table(kernel, everything)
        (out / path.parent.name).mkdir(parents=True, exist_ok=True)
        (out / path.parent.name / path.name).write_text(table.text())
        compiled = len(self.flaws) - compiled_before
        print(f"{kernel.name}: {compiled} compiled, {len(table.findings)} findings, checks {dict(outcome)}")
        return whole


def sizes_of(kernel: GpuKernel) -> dict[str, list[int]]:
    return {name: list(sizes) for name, sizes in decoders(kernel.name).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help="names of kernels (all)")
    parser.add_argument("--all", action="store_true", help="compile everything anew, not only what the files lack")
    parser.add_argument(
        "-n", "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (all cores)"
    )
    parser.add_argument("--checks", type=int, default=40, metavar="N", help="configs of a kernel drawn at random (40)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="what was compiled: read, and appended to")
    parser.add_argument(
        "--beside",
        nargs=2,
        metavar=("CUDA", "FILE"),
        help="results of a run with the ptxas of another CUDA: legal is what is clean with both",
    )
    parser.add_argument("--seconds", type=float, default=1e6, metavar="S", help="stop after this time")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the files there (beside the kernels)")
    args = parser.parse_args()

    import cutlass.cute  # once, before the forks

    assert cutlass.cute
    run = Run(args.jobs, args.results, args.beside, args.seconds)
    default = gpu_kernels()[0].space.table.parent.parent
    chosen = [kernel for kernel in gpu_kernels() if not args.kernels or kernel.name in args.kernels]
    done = [run.kernel(kernel, args.all, args.checks, args.out or default) for kernel in chosen]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
