"""Which configs of a kernel are legal, as rules in three lists: :class:`Space`.

A config is legal if it is one of the kernel's candidates and no rule excludes it. Each rule is a value with a name and
a reason, so that ``w4gemm explain --why`` answers with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import PLAIN


class Sizes(NamedTuple):
    """The fields of a config without a tail: a candidate, of which there are thousands and few are legal, and which is
    made far faster than a config."""

    tile_m: int
    tile_n: int
    tile_k: int
    cluster_m: int = 1
    cluster_n: int = 1
    schedule: str = "coop"
    split_k: int = 1

    @classmethod
    def of(cls, config: GemmConfig) -> Sizes:
        return cls(*(getattr(config, name) for name in cls._fields))


class Rule(NamedTuple):
    """One reason why a config is not legal."""

    name: str
    reason: str
    excludes: Callable[[Any], bool]
    """Called with what the rule looks at."""
    of: str = "variant"
    """The subject of the rule: ``"sizes"``, a config's :class:`Sizes` alone; ``"variant"``, the kernel's Variant of the
    config (for a kernel without variants, see its spec.py) with a plain epilogue, whatever the problem's, so that the
    memory that an epilogue takes does not decide; or ``"epilogue"``, the Variant with the problem's."""


class Exclusion(NamedTuple):
    """A rule that excludes a config."""

    kind: str
    """``impossible``, ``slow`` or ``pruned``, see :class:`Space`."""
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{KINDS[self.kind]}: {self.reason} ({self.name})"


KINDS = {"impossible": "impossible", "slow": "spills or is serialized", "pruned": "never worth it"}
"""The three kinds of rules, in words."""


@dataclass(frozen=True, eq=False)
class Space:
    """The configs of one kernel, as candidates and rules. Equal only to itself.

    Args:
        candidates: makes every combination of sizes that is looked at.
        sizes: which sizes those are, in words.
        impossible: rules of correctness: the device code cannot run such a config, or not rightly.
        slow: rules for what was seen to spill registers, or of which ptxas serializes the WGMMAs, with CuTe DSL 4.8.1.
        pruned: rules for what would run, and was never the fastest where it was measured, or is thought not to be.
    """

    candidates: Callable[[], Iterator[Sizes]]
    sizes: str
    impossible: tuple[Rule, ...] = ()
    slow: tuple[Rule, ...] = ()
    pruned: tuple[Rule, ...] = ()

    def rules(self) -> Iterator[tuple[str, Rule]]:
        """(kind, rule) of all three lists."""
        for kind in KINDS:
            yield from ((kind, rule) for rule in getattr(self, kind))

    def legal(self, variant: Any) -> tuple[GemmConfig, ...]:
        """Every legal config, in the order of the candidates. variant: of the problem; its config does not matter."""
        return _legal(self, replace(variant, config=_ANY))

    def exclusions(self, variant: Any, config: GemmConfig) -> list[Exclusion]:
        """Every rule that excludes ``config``; none if it is legal. variant: as for :meth:`legal`."""
        sizes = Sizes.of(config)
        if config.tail is not None or sizes not in _candidates(self):
            return [Exclusion("pruned", "sizes", f"not among the sizes that are looked at, {self.sizes}")]
        shown = {
            "sizes": sizes,
            "variant": _plain(variant, config),
            "epilogue": replace(variant, config=config),
        }
        excluding = ((kind, rule) for kind, rule in self.rules() if rule.excludes(shown[rule.of]))
        return [Exclusion(kind, rule.name, rule.reason) for kind, rule in excluding]


_ANY = GemmConfig(8, 64, 128)


def _plain(variant: Any, config: GemmConfig) -> Any:
    """The variant that is shown to rules that do not look at the epilogue. Scales of x, which are multiplied by in the
    main loop, are no part of it."""
    return replace(
        variant, config=config, epilogue=PLAIN._replace(block_scale=variant.epilogue.block_scale), vector=True
    )


@functools.cache
def _legal(space: Space, variant: Any) -> tuple[GemmConfig, ...]:
    excluded = _excluded(space, "epilogue")
    variants = [replace(variant, config=config) for config in _legal_if_plain(space, _plain(variant, _ANY))]
    return tuple(v.config for v in variants if not excluded(v))


@functools.cache
def _legal_if_plain(space: Space, variant: Any) -> tuple[GemmConfig, ...]:
    """The configs that no rule excludes whatever the epilogue. variant: one with a plain epilogue."""
    excluded = _excluded(space, "variant")
    variants = (replace(variant, config=config) for config in _legal_sizes(space))
    return tuple(v.config for v in variants if not excluded(v))


@functools.cache
def _legal_sizes(space: Space) -> tuple[GemmConfig, ...]:
    """The configs that no rule excludes by their sizes alone, which are few."""
    excluded = _excluded(space, "sizes")
    return tuple(GemmConfig(*sizes) for sizes in space.candidates() if not excluded(sizes))


def _excluded(space: Space, of: str) -> Callable[[Any], bool]:
    """Return a function that says whether one of the rules of sizes, variants or epilogues excludes one; rules of what
    is never worth it are asked first, because they are seen at once, while memory has to be added up."""
    rules = [rule.excludes for _, rule in space.rules() if rule.of == of][::-1]

    def excluded(shown: Any) -> bool:
        for excludes in rules:  # noqa: SIM110 any() takes a third longer
            if excludes(shown):
                return True
        return False

    return excluded


@functools.cache
def _candidates(space: Space) -> frozenset[Sizes]:
    return frozenset(space.candidates())


def listed(sizes: Any) -> str:
    """Sizes in words: ``8, 16, 32``."""
    return ", ".join(map(str, sizes))
