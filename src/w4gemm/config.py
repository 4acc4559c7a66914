"""What is chosen for one launch: :class:`GemmConfig` and its one string form."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SCHEDULES = ("coop", "pingpong", "stream")
_CONFIG = re.compile(
    r"(?P<tile_m>\d+)x(?P<tile_n>\d+)x(?P<tile_k>\d+)_(?P<cluster_m>\d+)x(?P<cluster_n>\d+)x1_"
    r"(?P<schedule>coop|pingpong|stream)(_k(?P<split_k>\d+))?(_s(?P<stages>\d+))?"
)


@dataclass(frozen=True)
class GemmConfig:
    """Everything about a launch that is chosen, nothing that can be derived.

    Tile and cluster sizes are in the problem frame: ``tile_m`` covers tokens, ``tile_n`` output features.

    Args:
        tile_m, tile_n, tile_k: elements of m, n and k that one CTA works on at a time.
        cluster_m, cluster_n: CTAs along m (they share weights) and n (they share activations) in one cluster.
        schedule: ``"coop"`` (the consumer warpgroups share one tile), ``"pingpong"`` (each has its own) or ``"stream"``
            (as coop, and CTAs share the k range of some tiles so that all have equal work: stream-k).
        split_k: CTAs (or warps, in a decode kernel) that share one tile's k range.
        stages: pipeline depth in tiles; 0 = as many as shared memory holds.
        rest: what the features run that are left when the others fill whole waves of tiles, in a launch after them;
            None for one launch of all. It has no rest of its own.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    cluster_m: int = 1
    cluster_n: int = 1
    schedule: str = "coop"
    split_k: int = 1
    stages: int = 0
    rest: GemmConfig | None = None

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n", "split_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"config: {name} wanted a positive int, got {value!r}")
        if not isinstance(self.stages, int) or self.stages < 0:
            raise ValueError(f"config: stages wanted an int >= 0, got {self.stages!r}")
        if self.rest is not None and (not isinstance(self.rest, GemmConfig) or self.rest.rest is not None):
            raise ValueError(f"config: rest wanted a config without a rest, got {str(self.rest)!r}")
        if self.schedule not in _SCHEDULES:
            raise ValueError(f"config: schedule wanted one of {', '.join(_SCHEDULES)}, got {self.schedule!r}")

    def __str__(self) -> str:
        text = (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k}_{self.cluster_m}x{self.cluster_n}x1_{self.schedule}"
            f"{f'_k{self.split_k}' if self.split_k > 1 else ''}"
        )
        text += f"_s{self.stages}" if self.stages else ""
        return text if self.rest is None else f"{text}+{self.rest}"

    @classmethod
    def parse(cls, text: str) -> GemmConfig:
        """Inverse of ``str``.

        Raises:
            ValueError: if ``text`` is not a config string.
        """
        first, plus, rest = text.partition("+") if isinstance(text, str) else ("", "", "")
        found = _CONFIG.fullmatch(first)
        if found is None or (plus and _CONFIG.fullmatch(rest.partition("+")[0]) is None):
            raise ValueError(
                "config: wanted <tile_m>x<tile_n>x<tile_k>_<cluster_m>x<cluster_n>x1_<coop|pingpong|stream>"
                f"[_k<split_k>][_s<stages>][+<config of the rest>], for example 64x128x128_1x1x1_coop_k2, got {text!r}"
            )
        sizes = {name: int(found[name]) for name in ("tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n")}
        return cls(
            **sizes,
            schedule=found["schedule"],
            split_k=int(found["split_k"] or 1),
            stages=int(found["stages"] or 0),
            rest=cls.parse(rest) if plus else None,
        )
