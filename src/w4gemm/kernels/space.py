"""Which configs of a kernel are legal: :class:`Space`.

A config is legal if the kernel lists it, no rule excludes it, and it compiles cleanly: ptxas neither spills registers
nor makes WGMMAs wait for each other. What compiles badly is data (:class:`Compiled`), which ``tests/legality.py`` reads
off machine code. ``w4gemm explain --why`` answers with rules and data.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import PLAIN


class Rule(NamedTuple):
    """One reason that excludes configs."""

    name: str
    reason: str
    excludes: Callable[[Any], bool]
    """Called with the kernel's variant of the config and a plain epilogue, so that the memory that an epilogue takes
    does not decide."""


class Exclusion(NamedTuple):
    """A reason that excludes a config."""

    kind: str
    """One of :data:`KINDS`."""
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{KINDS[self.kind]}: {self.reason} ({self.name})"


KINDS = {
    "impossible": "impossible",
    "held back": "held back",
    "badly": "compiles badly",
    "uncompiled": "not compiled",
    "unlisted": "not offered",
}
"""The kinds of exclusions, in words."""

EPILOGUES = ("plain", "gated", "activation", "residual", "ragged residual")
"""Classes of epilogues, each with more registers than the one before: at most factors and a bias; also a gated
activation, another activation, a residual; a residual in float32 or in rows that are no multiple of 16 bytes."""


class Pressure(NamedTuple):
    """Facts that decide, with a config, how many registers its code takes. They are classes, so that a few compiled
    variants speak for all."""

    decoder: str
    """:attr:`WeightOperand.register_class`, and whether x has a scale for each 128 columns, or its sums meet zero
    points."""
    rows: str
    """``dense``, ``grouped`` (by expert) or ``gathered`` (and read by their indices)."""
    scale_bytes: int
    """Bytes of scales and zero points of a weight block."""
    epilogue: int
    """Index in :data:`EPILOGUES`."""
    unscaled: int = 0
    """1 if fp8 x comes without scales: without their factor ptxas keeps other values in registers."""

    @classmethod
    def of(cls, v: Any) -> Pressure:
        """The pressure of a variant."""
        e = v.epilogue
        of_x = ", block scales of x" if e.block_scale else ", sums of x" if v.adds_zeros else ""
        decoder = v.weight.register_class + of_x
        rows = "gathered" if v.gathered else "grouped" if v.grouped else "dense"
        unscaled = v.kind == "e4m3" and not (e.token_scale or e.block_scale)
        return cls(decoder, rows, v.block.scale_bytes, _class_of(v), int(unscaled))

    def covers(self, other: Pressure) -> bool:
        """True if what compiles badly under ``other`` does so under this."""
        least = zip(self[2:], other[2:], strict=True)
        return self[:2] == other[:2] and all(own >= its for own, its in least)

    def __str__(self) -> str:
        scales = f"{self.scale_bytes} bytes of scales" + ", x without scales" * self.unscaled
        return f"{self.rows}, {EPILOGUES[self.epilogue]}, {self.decoder}, {scales}"


def _class_of(v: Any) -> int:
    """Index in :data:`EPILOGUES` of a variant's epilogue."""
    if v.epilogue.residual:
        return 3 if v.vector and v.out_kind != "f32" else 4
    return 0 if v.epilogue.activation is None else 1 if v.epilogue.gated else 2


NOT_COMPILED = ""
"""``Finding.seen`` of a config that is not legal until it is compiled."""


class Finding(NamedTuple):
    """Configs that compile badly under a pressure, and so under each one that covers it; or that were not compiled."""

    tiles: str
    """Their string without tile_m."""
    tile_m: tuple[int, ...]
    pressure: Pressure
    seen: str
    """The fault of ptxas' code for the config of the least tile_m; or :data:`NOT_COMPILED`."""


class Compiled(NamedTuple):
    """The file of JSON lines about a kernel's machine code: the first line counts what was compiled, the others are
    findings."""

    compiler: str
    """Versions of CuTe DSL and ptxas."""
    tiles: dict[str, str]
    """Tiles of the space that was compiled."""
    decoders: dict[str, list[int]]
    """Decoders that were compiled, each with its bytes of scales."""
    trusted: dict[str, int]
    """By decoder, how many configs under a pressure are legal because the file before said so, and were not compiled
    since. The first file had the answers of rules that people wrote."""
    findings: tuple[Finding, ...]

    @classmethod
    def read(cls, path: Path) -> Compiled:
        head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        findings = []
        for line in lines:
            epilogue = EPILOGUES.index(line["epilogue"])
            under = Pressure(line["decoder"], line["rows"], line["scale_bytes"], epilogue, line.get("unscaled", 0))
            findings.append(Finding(line["tiles"], tuple(line["tile_m"]), under, line.get("seen", NOT_COMPILED)))
        return cls(**head, findings=tuple(findings))

    def text(self) -> str:
        """The file's content."""
        lines: list[dict[str, Any]] = [{name: value for name, value in self._asdict().items() if name != "findings"}]
        for f in self.findings:
            line = {"tiles": f.tiles, "tile_m": f.tile_m} | f.pressure._asdict()
            line |= {"epilogue": EPILOGUES[f.pressure.epilogue], "seen": f.seen}
            lines.append({name: value for name, value in line.items() if value or name == "scale_bytes"})
        return "".join(f"{json.dumps(line)}\n" for line in lines)

    def badly(self, pressure: Pressure) -> dict[str, Finding]:
        """A finding for each config that compiles badly or was not compiled, by the config's string."""
        sizes = [size for size in self.decoders.get(pressure.decoder, ()) if size >= pressure.scale_bytes]
        assert sizes, f"{pressure}: was not compiled; python tests/legality.py does that"
        pressure = pressure._replace(scale_bytes=sizes[0])
        return {
            f"{tile_m}x{finding.tiles}": finding
            for finding in self.findings
            if pressure.covers(finding.pressure)
            for tile_m in finding.tile_m
        }


@dataclass(frozen=True, eq=False)
class Space:
    """The configs of one kernel. Equal only to itself.

    Args:
        tiles: the configs that the kernel offers. Key: a config's string without tile_m; value: each tile_m.
        table: file of :class:`Compiled`.
        impossible: rules of correctness: the device code cannot run such a config, or not rightly.
        held_back: rules for what compiles cleanly, and was slower than predicted, or was not timed where what runs
            instead was compared with other libraries.
    """

    tiles: dict[str, str]
    table: Path
    impossible: tuple[Rule, ...] = ()
    held_back: tuple[Rule, ...] = ()

    @functools.cached_property
    def configs(self) -> tuple[GemmConfig, ...]:
        """Every config of ``tiles``."""
        return tuple(
            GemmConfig.parse(f"{tile_m}x{others}") for others, text in self.tiles.items() for tile_m in text.split()
        )

    @functools.cached_property
    def compiled(self) -> Compiled:
        """The findings about the machine code."""
        return Compiled.read(self.table)

    def legal(self, variant: Any) -> tuple[GemmConfig, ...]:
        """Every legal config, in the order of ``tiles``. variant: of the problem; its config does not matter."""
        return _legal(self, _plain(variant, _ANY), Pressure.of(variant))

    def possible(self, variant: Any) -> tuple[GemmConfig, ...]:
        """Every config that the device code can run, whatever the compiler makes of it."""
        return _not_excluded(self.configs, self.impossible, _plain(variant, _ANY))

    def exclusions(self, variant: Any, config: GemmConfig) -> list[Exclusion]:
        """Everything that excludes ``config``; nothing if it is legal. variant: as for :meth:`legal`."""
        if config not in self.configs:
            return [Exclusion("unlisted", "tiles", self._offered(config))]
        plain = _plain(variant, config)
        rules = {"impossible": self.impossible, "held back": self.held_back}
        excluded = [Exclusion(kind, r.name, r.reason) for kind in rules for r in rules[kind] if r.excludes(plain)]
        finding = self.compiled.badly(Pressure.of(variant)).get(str(config))
        if finding is not None:
            seen = f"{finding.tile_m[0]}x{finding.tiles}: {finding.seen}, with {self.compiled.compiler}"
            kind, reason = ("badly", seen) if finding.seen else ("uncompiled", "python tests/legality.py does that")
            excluded.append(Exclusion(kind, str(finding.pressure), reason))
        return excluded

    def _offered(self, config: GemmConfig) -> str:
        """Return in words the configs that the kernel lists in place of one that it does not."""
        others = str(config).partition("x")[2]
        if others in self.tiles:
            return f"of {others} the kernel offers tile_m {', '.join(self.tiles[others].split())}"
        return f"beside tile_m the kernel offers {', '.join(self.tiles)}"


_ANY = GemmConfig(8, 64, 128)


def _plain(variant: Any, config: GemmConfig) -> Any:
    """The variant that is shown to rules. Scales of x, which are multiplied by in the main loop, are no part of the
    epilogue."""
    return replace(
        variant, config=config, epilogue=PLAIN._replace(block_scale=variant.epilogue.block_scale), vector=True
    )


@functools.cache
def _legal(space: Space, plain: Any, pressure: Pressure) -> tuple[GemmConfig, ...]:
    badly = space.compiled.badly(pressure)
    possible = _not_excluded(space.configs, space.impossible + space.held_back, plain)
    return tuple(config for config in possible if str(config) not in badly)


@functools.cache
def _not_excluded(configs: tuple[GemmConfig, ...], rules: tuple[Rule, ...], plain: Any) -> tuple[GemmConfig, ...]:
    def excluded(v: Any) -> bool:
        for rule in rules:  # noqa: SIM110 any() takes a third longer
            if rule.excludes(v):
                return True
        return False

    return tuple(config for config in configs if not excluded(replace(plain, config=config)))
