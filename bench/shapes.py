"""Named sets of layers, and the numbers of tokens to measure them at."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterable

Layer = tuple[int, int]
"""(n, k): output and input features."""

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
AWKWARD_TOKENS = (13, 257, 4090)

LAYERS: tuple[Layer, ...] = ((6144, 4096), (8192, 8192), (28672, 4096), (8192, 28672))
"""The four layers of the main table."""

MODELS: dict[str, tuple[Layer, ...]] = {
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "qwen2.5-7b": ((4608, 3584), (37888, 3584), (3584, 18944)),
    "qwen2.5-32b": ((7168, 5120), (5120, 5120), (55296, 5120), (5120, 27648)),
    "qwen2.5-72b": ((8192, 29568),),
    "deepseek-coder-v2-lite": ((576, 2048), (2048, 10944), (2048, 1408)),
}

EXPERTS: tuple[tuple[int, int, int], ...] = (
    *((8, 28672, 4096), (8, 4096, 14336)),
    *((128, 1536, 2048), (128, 2048, 768)),
    *((32, 4096, 7168), (32, 7168, 2048)),
)
"""(experts, n, k) of mixtures of experts, gate_up and down: Mixtral-8x7B, Qwen3-30B-A3B, DeepSeek-V3 (32 of 256)."""

FP4_EXPERTS: tuple[tuple[int, int, int], ...] = (
    *((32, 5760, 2880), (32, 2880, 2880)),
    *((128, 5760, 2880), (128, 2880, 2880)),
    *((256, 4096, 4096), (256, 4096, 2048)),
    *((64, 6144, 7168), (64, 7168, 3072)),
    *((64, 6144, 3584), (64, 3584, 3072)),
)
"""(experts, n, k) of models whose checkpoints are in MXFP4, gate_up and down: gpt-oss-20b, gpt-oss-120b,
DeepSeek-V4-Flash, DeepSeek-V4-Pro (64 of 384), Kimi-K3 (64 of 896)."""

MIXTURES = {"moe": EXPERTS, "fp4-moe": FP4_EXPERTS}

ROUTINGS = ("balanced", "random", "zipf", "hot")
"""How tokens are divided: among experts alike; each to an expert at random, all as likely; to expert e in proportion to
1 / (1 + e), in mixed order; all to one."""

AWKWARD: tuple[Layer, ...] = ((4096, 2752), (8192, 3696), (4096, 8256), (576, 2048))
"""Sizes that do not divide well; 8256 is a multiple of 64 only."""

SETS: dict[str, tuple[Layer, ...]] = {
    "layers": LAYERS,
    **MODELS,
    "models": tuple(dict.fromkeys(layer for layers in MODELS.values() for layer in layers)),
    "awkward": AWKWARD,
}


def parse_layers(text: str) -> tuple[Layer, ...]:
    """Layers of comma-separated names of ``SETS`` and sizes like ``8192x4096`` (n x k), each once.

    Raises:
        ValueError: for a name that there is not.
    """
    layers: list[Layer] = []
    for part in text.split(","):
        size = re.fullmatch(r"(\d+)x(\d+)", part)
        if size:
            layers.append((int(size[1]), int(size[2])))
        elif part in SETS:
            layers += SETS[part]
        else:
            raise ValueError(f"shapes: wanted {', '.join(SETS)} or sizes like 8192x4096 (n x k), got {part!r}")
    return tuple(dict.fromkeys(layers))


def parse_tokens(text: str) -> tuple[int, ...]:
    """Numbers of tokens from ``1,16,256``, ``all`` or ``awkward``."""
    named: dict[str, Iterable[int]] = {"all": TOKENS, "awkward": AWKWARD_TOKENS}
    try:
        return tuple(dict.fromkeys(named[text] if text in named else map(int, text.split(","))))
    except ValueError:
        raise ValueError(f"m: wanted numbers like 1,16,256, or all, or awkward, got {text!r}") from None


def parse_experts(text: str) -> tuple[tuple[int, int, int], ...]:
    """(experts, n, k) of comma-separated names of ``MIXTURES`` and sizes like ``8x28672x4096``, each once.

    Raises:
        ValueError: if a part is neither.
    """
    mixtures: list[tuple[int, int, int]] = []
    for part in text.split(","):
        sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", part)
        if part not in MIXTURES and sizes is None:
            names = ", ".join(MIXTURES)
            raise ValueError(f"shapes: wanted {names} or experts x n x k like 8x28672x4096, got {part!r}")
        mixtures += MIXTURES[part] if sizes is None else [(int(sizes[1]), int(sizes[2]), int(sizes[3]))]
    return tuple(dict.fromkeys(mixtures))


def divide(routing: str, m: int, experts: int) -> list[int]:
    """Rows of each expert, m * experts together, by one of ``ROUTINGS``."""
    if routing == "balanced":
        return [m] * experts
    if routing == "random":
        chosen = Counter(random.Random(m).choices(range(experts), k=m * experts))
        return [chosen[e] for e in range(experts)]
    share = [1 / (1 + e) if routing == "zipf" else float(e == 0) for e in range(experts)]
    parts = itertools.accumulate(s / sum(share) for s in share)
    ends = [min(m * experts, round(p * m * experts)) for p in parts]
    counts = [b - a for a, b in itertools.pairwise([0, *ends])]
    return [counts[(7 * e + 3) % experts] if math.gcd(7, experts) == 1 else counts[e] for e in range(experts)]
