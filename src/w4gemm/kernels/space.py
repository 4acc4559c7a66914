"""Which configs of a kernel are legal: :class:`Space`.

A config is legal if the kernel lists it and no rule excludes it. Each rule is a value with a name and a reason, so that
``w4gemm explain --why`` answers with it.
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
    """Called with the kernel's variant of the config."""
    of: str = "variant"
    """``"variant"`` if the rule sees a plain epilogue, whatever the problem's, so that the memory that an epilogue
    takes does not decide; ``"epilogue"`` if it sees the problem's."""


class Exclusion(NamedTuple):
    """A rule that excludes a config."""

    kind: str
    """``impossible``, ``slow`` or ``unlisted``, see :class:`Space`."""
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{KINDS[self.kind]}: {self.reason} ({self.name})"


KINDS = {"impossible": "impossible", "slow": "spills or is serialized", "unlisted": "not offered"}
"""The kinds of exclusions, in words."""


@dataclass(frozen=True, eq=False)
class Space:
    """The configs of one kernel, as a list and rules. Equal only to itself.

    Args:
        tiles: the configs that the kernel offers. Key: a config's string without tile_m; value: each tile_m.
        impossible: rules of correctness: the device code cannot run such a config, or not rightly.
        slow: rules for what was seen to spill registers, or of which ptxas serializes the WGMMAs, with CuTe DSL 4.8.1.
    """

    tiles: dict[str, str]
    impossible: tuple[Rule, ...] = ()
    slow: tuple[Rule, ...] = ()

    @functools.cached_property
    def configs(self) -> tuple[GemmConfig, ...]:
        """Every config of ``tiles``."""
        return tuple(
            GemmConfig.parse(f"{tile_m}x{others}") for others, text in self.tiles.items() for tile_m in text.split()
        )

    def rules(self) -> Iterator[tuple[str, Rule]]:
        """(kind, rule) of both lists."""
        yield from (("impossible", rule) for rule in self.impossible)
        yield from (("slow", rule) for rule in self.slow)

    def legal(self, variant: Any) -> tuple[GemmConfig, ...]:
        """Every legal config, in the order of ``tiles``. variant: of the problem; its config does not matter."""
        return _legal(self, replace(variant, config=_ANY))

    def exclusions(self, variant: Any, config: GemmConfig) -> list[Exclusion]:
        """Every rule that excludes ``config``; none if it is legal. variant: as for :meth:`legal`."""
        if config not in self.configs:
            return [Exclusion("unlisted", "tiles", self._offered(config))]
        shown = {"variant": _plain(variant, config), "epilogue": replace(variant, config=config)}
        excluding = ((kind, rule) for kind, rule in self.rules() if rule.excludes(shown[rule.of]))
        return [Exclusion(kind, rule.name, rule.reason) for kind, rule in excluding]

    def _offered(self, config: GemmConfig) -> str:
        """Return what the kernel offers in place of a config that it does not list."""
        others = str(config).partition("x")[2]
        if others in self.tiles:
            return f"of {others} the kernel offers tile_m {', '.join(self.tiles[others].split())}"
        return f"beside tile_m the kernel offers {', '.join(self.tiles)}"


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
    variants = (replace(variant, config=config) for config in space.configs)
    return tuple(v.config for v in variants if not excluded(v))


def _excluded(space: Space, of: str) -> Callable[[Any], bool]:
    """Return a function that says whether one of the rules of variants or epilogues excludes one; rules of what spills
    are asked first, because they are seen at once, while memory has to be added up."""
    rules = [rule.excludes for _, rule in space.rules() if rule.of == of][::-1]

    def excluded(shown: Any) -> bool:
        for excludes in rules:  # noqa: SIM110 any() takes a third longer
            if excludes(shown):
                return True
        return False

    return excluded
