"""The parameters of a launch that are chosen, and their string: :class:`GemmConfig`."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from w4gemm.core.words import nearest

_SCHEDULES = ("coop", "pingpong", "stream", "chain")
_CONFIG = re.compile(
    r"(?P<tile_m>[0-9]+)x(?P<tile_n>[0-9]+)x(?P<tile_k>[0-9]+)_(?P<cluster_m>[0-9]+)x(?P<cluster_n>[0-9]+)x1_"
    r"(?P<schedule>coop|pingpong|stream|chain)(_k(?P<split_k>[0-9]+))?"
)
_SIZES = ("tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n", "split_k")


@dataclass(frozen=True)
class GemmConfig:
    """The parameters of a launch that are chosen, and none that can be derived from them.

    Its string is ``<tile_m>x<tile_n>x<tile_k>_<cluster_m>x<cluster_n>x1_<schedule>``, then ``_k<split_k>`` unless that
    is 1, then ``+`` and the tail's string if there is one. Tiles and clusters are in the problem's frame: ``tile_m``
    covers tokens, ``tile_n`` output features.

    Args:
        tile_m, tile_n, tile_k: elements of m, n and k that a CTA works on at a time.
        cluster_m, cluster_n: CTAs of a cluster along m, which share weights, and along n, which share activations.
        schedule: "coop" (cooperative): all warps of a CTA work on one output tile. "pingpong": a multiprocessor has two
            output tiles, of which one is multiplied while the other is stored; they belong to two CTAs or, in the sm90
            GEMM kernels with tile_m > 128, to two consumer warpgroups of one CTA. "stream" (stream-k): cooperative,
            and the CTAs divide some tiles along k, so that all have equal work. "chain": the split_k CTAs of a cluster
            share one tile fewer: each adds the end of the tile before to what its neighbour has.
        split_k: CTAs of a cluster that divide k of one output tile.
        tail: config of a second launch, for the output features beyond the last full wave of the first launch, or of
            the tiles of experts with many rows, in the same launch if both take the same warps; None without either. A
            tail has no tail.

    Raises:
        ValueError: for a size that is no positive int, an unknown schedule, or a tail with a tail.

    Examples:
        >>> config = w4gemm.GemmConfig.parse("64x128x128_1x1x1_coop_k2")
        >>> config.tile_m, config.split_k, str(config)
        (64, 2, '64x128x128_1x1x1_coop_k2')
    """

    tile_m: int
    tile_n: int
    tile_k: int
    cluster_m: int = 1
    cluster_n: int = 1
    schedule: str = "coop"
    split_k: int = 1
    tail: GemmConfig | None = None

    def __post_init__(self) -> None:
        sizes = self.tile_m, self.tile_n, self.tile_k, self.cluster_m, self.cluster_n, self.split_k
        for name, value in zip(_SIZES, sizes, strict=True):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config: {name} wanted a positive int, got {value!r}")
        if self.tail is not None and (not isinstance(self.tail, GemmConfig) or self.tail.tail is not None):
            raise ValueError(f"config: tail wanted a config without a tail, got {str(self.tail)!r}")
        if not isinstance(self.schedule, str) or self.schedule not in _SCHEDULES:
            close = nearest(self.schedule, _SCHEDULES)
            raise ValueError(f"config: schedule wanted one of {', '.join(_SCHEDULES)}, got {self.schedule!r}{close}")

    @property
    def split_tiles(self) -> int:
        """Output tiles that the ``split_k`` CTAs of a cluster share."""
        return max(1, self.split_k - 1) if self.schedule == "chain" else 1

    def __str__(self) -> str:
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        text = (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k}_{self.cluster_m}x{self.cluster_n}x1_{self.schedule}"
            f"{f'_k{self.split_k}' if self.split_k > 1 else ''}"
        )
        return text if self.tail is None else f"{text}+{self.tail}"

    @classmethod
    def parse(cls, text: str) -> GemmConfig:
        """Return the config of a string; the inverse of ``str``.

        Raises:
            ValueError: if ``text`` is no config's string.
        """
        texts = text.split("+") if isinstance(text, str) else []
        matches = [_CONFIG.fullmatch(t) for t in texts]
        if not 1 <= len(matches) <= 2 or None in matches:
            raise ValueError(
                "config: wanted <tile_m>x<tile_n>x<tile_k>_<cluster_m>x<cluster_n>x1_<coop|pingpong|stream|chain>"
                "[_k<split_k>][+<config of the tail launch>], for example 64x128x128_1x1x1_coop_k2, "
                f"got {text!r:.200}"
            )
        tail = None
        for match in reversed([f for f in matches if f is not None]):
            sizes = {name: int(match[name] or 1) for name in _SIZES}
            tail = cls(**sizes, schedule=match["schedule"], tail=tail)
        assert tail is not None
        return tail
