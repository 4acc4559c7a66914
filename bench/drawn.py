"""Layers and numbers of tokens drawn from real models' sizes: :func:`draw`. The same seed gives the same points."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import NamedTuple

from bench.rows import read
from bench.shapes import SETS, Layer

from w4gemm.choice import table

ROOT = Path(__file__).resolve().parents[1]

Model = tuple[int, int, int, int]
"""hidden size, intermediate size of the MLP, output features of qkv, input features of the attention's output."""

MODELS: dict[str, Model] = {
    "qwen2.5-0.5b": (896, 4864, 1152, 896),
    "qwen3-0.6b": (1024, 3072, 4096, 2048),
    "qwen2.5-1.5b": (1536, 8960, 2048, 1536),
    "qwen3-1.7b": (2048, 6144, 4096, 2048),
    "llama-3.2-1b": (2048, 8192, 3072, 2048),
    "gemma-2-2b": (2304, 9216, 4096, 2048),
    "gemma-3-4b": (2560, 10240, 4096, 2048),
    "qwen3-4b": (2560, 9728, 6144, 4096),
    "gpt-oss": (2880, 2880, 5120, 4096),
    "llama-3.2-3b": (3072, 8192, 5120, 3072),
    "phi-3-mini": (3072, 8192, 9216, 3072),
    "gemma-2-9b": (3584, 14336, 8192, 4096),
    "gemma-3-12b": (3840, 15360, 8192, 4096),
    "llama-2-7b": (4096, 11008, 12288, 4096),
    "qwen3-8b": (4096, 12288, 6144, 4096),
    "glm-4-9b": (4096, 13696, 4608, 4096),
    "starcoder2-7b": (4608, 18432, 5632, 4608),
    "gemma-2-27b": (4608, 36864, 8192, 4096),
    "qwen2.5-14b": (5120, 13824, 7168, 5120),
    "phi-4": (5120, 17920, 7680, 5120),
    "qwen3-32b": (5120, 25600, 10240, 8192),
    "mistral-small-24b": (5120, 32768, 6144, 4096),
    "gemma-3-27b": (5376, 21504, 8192, 4096),
    "mixtral-8x22b": (6144, 16384, 8192, 6144),
    "starcoder2-15b": (6144, 24576, 7168, 6144),
    "deepseek-v3": (7168, 18432, 24576, 16384),
    "yi-34b": (7168, 20480, 9216, 7168),
    "command-r": (8192, 22528, 24576, 8192),
    "falcon-40b": (8192, 32768, 9216, 8192),
    "mistral-large": (12288, 28672, 14336, 12288),
    "command-r-plus": (12288, 33792, 14336, 12288),
    "llama-3.1-405b": (16384, 53248, 18432, 16384),
}
SHARDS = (1, 1, 2, 4, 8)
"""Processes of tensor parallelism, each as often as it stands here."""
RAGGED = 0.15
"""Part of the layers whose n and k are moved by up to 7 times 64, as pruned and odd models have them."""
MULTIPLE, N_LIMITS, K_LIMITS = 64, (512, 60_000), (512, 30_000)
MOST_WEIGHTS = 2**29
"""Largest n * k: beyond, one point takes the time of ten."""
MOST_TOKENS = 8192
TOKENS_PER_LAYER = 4
UNKNOWN_SEED, UNKNOWN_LAYERS = 7, 50
"""Seed and number of layers that bench.unknown draws."""


class Drawn(NamedTuple):
    """A layer and what it is measured at."""

    n: int
    k: int
    tokens: tuple[int, ...]


def draw(seed: int, count: int, least: int = 1, most: int = MOST_TOKENS) -> list[Drawn]:
    """``count`` layers that were neither tuned nor fitted, each with m in every quarter of log2(least .. most). Other
    seeds than bench.unknown's draw none of its layers, which so stay unknown to what is fitted to them."""
    others = set() if seed == UNKNOWN_SEED else {(layer.n, layer.k) for layer in draw(UNKNOWN_SEED, UNKNOWN_LAYERS)}
    drawn: dict[Layer, Drawn] = {}
    number = 0
    while len(drawn) < count:
        rng = random.Random(f"{seed} {number}")
        n, k = layer(rng)
        if allowed(n, k) and (n, k) not in others and (n, k) not in drawn:
            parts = ((quarter + rng.random()) / TOKENS_PER_LAYER for quarter in range(TOKENS_PER_LAYER))
            tokens = tuple(round(least * (most / least) ** part) for part in parts)
            drawn[n, k] = Drawn(n, k, tokens)
        number += 1
    return list(drawn.values())


def layer(rng: random.Random) -> Layer:
    """(n, k) of a layer of a model, or of one process' shard of it."""
    hidden, ffn, qkv, attention = MODELS[rng.choice(list(MODELS))]
    shards, kind = rng.choice(SHARDS), rng.choice(("qkv", "o", "gate_up", "up", "down"))
    n, k = {
        "qkv": (qkv // shards, hidden),
        "o": (hidden, attention // shards),
        "gate_up": (2 * ffn // shards, hidden),
        "up": (ffn // shards, hidden),
        "down": (hidden, ffn // shards),
    }[kind]
    n, k = n // MULTIPLE * MULTIPLE, k // MULTIPLE * MULTIPLE
    if rng.random() < RAGGED:
        n, k = n - MULTIPLE * rng.randrange(8), k - MULTIPLE * rng.randrange(8)
    return n, k


def allowed(n: int, k: int) -> bool:
    """True if a layer is within the limits, and nothing was fitted to it, tuned or shipped for it."""
    within = N_LIMITS[0] <= n <= N_LIMITS[1] and K_LIMITS[0] <= k <= K_LIMITS[1] and n * k <= MOST_WEIGHTS
    return within and (n, k) not in known()


@functools.cache
def known() -> frozenset[Layer]:
    """Layers of the named sets, of the timings that the cost model is fitted to, and of the shipped tables."""
    layers = {layer for layers in SETS.values() for layer in layers}
    for path in (ROOT / "bench/results").glob("*configs*.jsonl"):
        layers |= {(row["n"], row["k"]) for row in read(path)}
    for path in table.shipped_tables():
        layers |= {(record.key.n, record.key.k) for record in table.read(path)}
    return frozenset(layers)
