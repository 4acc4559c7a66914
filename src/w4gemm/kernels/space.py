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


class Rule(NamedTuple):
    """One reason why a config is not legal."""

    name: str
    reason: str
    excludes: Callable[[Any], bool]
    """Called with the kernel's Variant of the config; for a kernel without variants, see its spec.py."""
    of_epilogue: bool = False
    """True if the rule looks at the problem's epilogue. Others are shown a plain one, whatever the problem's, so that
    the memory that an epilogue takes does not decide."""


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

    candidates: Callable[[], Iterator[GemmConfig]]
    sizes: str
    impossible: tuple[Rule, ...] = ()
    slow: tuple[Rule, ...] = ()
    pruned: tuple[Rule, ...] = ()

    def rules(self) -> Iterator[tuple[str, Rule]]:
        """(kind, rule) of all three lists."""
        for kind in KINDS:
            yield from ((kind, rule) for rule in getattr(self, kind))

    def legal(self, like: Any) -> tuple[GemmConfig, ...]:
        """Every legal config, in the order of the candidates. like: a variant; its config does not matter."""
        return _legal(self, replace(like, config=_ANY))

    def exclusions(self, like: Any, config: GemmConfig) -> list[Exclusion]:
        """Every rule that excludes ``config``; none if it is legal. like: a variant; its config does not matter."""
        if config not in _candidates(self):
            return [Exclusion("pruned", "sizes", f"not among the sizes that are looked at, {self.sizes}")]
        plain, whole = _plain(like, config), replace(like, config=config)
        excluding = ((kind, r) for kind, r in self.rules() if r.excludes(whole if r.of_epilogue else plain))
        return [Exclusion(kind, rule.name, rule.reason) for kind, rule in excluding]


_ANY = GemmConfig(8, 64, 128)


def _plain(like: Any, config: GemmConfig) -> Any:
    """The variant that is shown to rules that do not look at the epilogue. Scales of x, which are multiplied by in the
    main loop, are no part of it."""
    return replace(like, config=config, epilogue=PLAIN._replace(block_scale=like.epilogue.block_scale), vector=True)


@functools.cache
def _legal(space: Space, like: Any) -> tuple[GemmConfig, ...]:
    rules = [rule for _, rule in space.rules() if rule.of_epilogue]
    variants = [replace(like, config=config) for config in _legal_if_plain(space, _plain(like, _ANY))]
    return tuple(v.config for v in variants if not any(rule.excludes(v) for rule in rules))


@functools.cache
def _legal_if_plain(space: Space, like: Any) -> tuple[GemmConfig, ...]:
    """The configs that no rule excludes whatever the epilogue. like: a variant with a plain one."""
    # what is never worth it first: most candidates are not, and it is seen at once, while memory has to be added up
    rules = [rule for _, rule in space.rules() if not rule.of_epilogue][::-1]
    variants = (replace(like, config=config) for config in space.candidates())
    return tuple(v.config for v in variants if not any(rule.excludes(v) for rule in rules))


@functools.cache
def _candidates(space: Space) -> frozenset[GemmConfig]:
    return frozenset(space.candidates())


def listed(sizes: Any) -> str:
    """Sizes in words: ``8, 16, 32``."""
    return ", ".join(map(str, sizes))
