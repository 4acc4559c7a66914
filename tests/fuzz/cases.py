"""Draw a random problem from three seeds: :func:`draw`.

A variant's seed says what is compiled (kind, format, dtypes, epilogue, which of the legal configs), a weight's seed its
sizes and its numbers, a problem's seed the tokens, so that many problems share a kernel and some share a weight.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass

import torch

from w4gemm.core.elements import ELEMENTS, codebook
from w4gemm.core.formats import SCALES, ZEROS, WeightFormat
from w4gemm.packing.layouts import layout_named

FP8 = torch.float8_e4m3fn
KINDS = ("dense", "dense", "dense", "grouped", "gathered", "masked")
GROUPS = (32, 64, 96, 128, 160, 256, 512, -1)
CODEBOOKS = ("iq4", "nf4", "any")
ANY_FORMAT = {"cpu": 0.2, "cuda": 0.5}
"""How often a format is of any width and rule."""
WITH_16_BITS = (*("", "_zint", "_zfloat", "codebook") * 2, "e8m0", "e4m3_row", "levels")
"""Rules of formats beside x that is not fp8."""
DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16, FP8), "cuda": (torch.bfloat16, torch.float16, FP8)}
ACTIVATIONS = (None, None, None, None, "relu", "relu2", "silu", "gelu", "gelu_tanh", "gated")
GATED = ("silu_mul", "silu_mul(limit=3)", "gelu_mul", "gelu_tanh_mul", "swiglu_oai", "swiglu_oai(limit=2)", "situ_mul")
N = (1, 2, 3, 7, 16, 31, 64, 65, 100, 128, 130, 192, 200, 257, 320, 500, 513, 1000, 2050)
K = (1, 2, 5, 16, 31, 32, 33, 64, 96, 100, 128, 129, 192, 256, 300, 384, 512, 777, 1024, 1536, 2048, 4100)
M = (1, 1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 24, 31, 33, 40, 63, 64, 65, 100, 128, 129, 200, 257, 300, 600)
NUMBERS = ("exact", "exact", "normal", "normal", "one_hot", "extreme")
EXPERTS = (1, 2, 3, 5, 8, 17)
WAYS = {"cpu": ("twice",), "cuda": (*("twice",) * 8, "streams", "graph")}
LARGEST = {"cpu": 2**22, "cuda": 2**23}
"""Numbers of all experts' weights, at most; a single weight has as many as its sizes say."""
TOKENS_OF_A_WEIGHT = 4
"""How many m the problems of a weight have, each of which may want a plan of its own."""


@dataclass(frozen=True)
class Variant:
    """All that is compiled for."""

    seed: int
    kind: str
    format: str
    dtype: torch.dtype
    """dtype of x as the kernel sees it."""
    quantized: bool
    """True if x comes in 16 bits and is quantized on the way."""
    block_scale: bool
    """True if fp8 x comes with a scale for each 128 columns, not for each row."""
    out_dtype: torch.dtype | None
    activation: str | None
    alpha: str | None
    bias: bool
    residual: bool
    expert_scale: bool
    forced: bool
    config: str
    """Pattern of a forced config, or the empty string."""
    batch_invariant: bool

    @property
    def grouped(self) -> bool:
        return self.kind != "dense"

    @property
    def has_long_numbers(self) -> bool:
        """True if no sum of products with the codes' numbers is exact in float32."""
        return self.format.startswith("codebook") or (self.format.startswith("nf4") and self.dtype.itemsize != 2)


@dataclass(frozen=True)
class Case:
    """One problem; everything but the numbers."""

    variant: Variant
    weight_seed: int
    problem_seed: int
    n: int
    k: int
    experts: int
    act_order: bool
    numbers: str
    """"exact": integers whose sums are exact, so that every bit is known; "normal"; "one_hot"; "extreme"."""
    m: int
    strides: str
    bad: str | None
    """Kind of one bad number of x: "nan", "inf", or None."""
    way: str
    """How it is called: "twice", on two "streams" at once, or in a "graph"."""
    scale_storage: str
    """How scales of fp8 x come: in "float32", in "ue8m0", or four of those in "words"."""
    settled: bool
    """True if the call says that another launch came after what wrote its offsets and indices."""

    @property
    def columns(self) -> int:
        """Columns of d."""
        return self.n // 2 if self.variant.activation in GATED else self.n

    @property
    def name(self) -> str:
        """Its three seeds, as ``fuzz.run --only`` takes them."""
        return f"{self.variant.seed}:{self.weight_seed}:{self.problem_seed}"


def draw(variant_seed: int, weight_seed: int, problem_seed: int, device: str, config: str = "") -> Case:
    """The case of three seeds. config: pattern of a forced config, or the empty string."""
    variant = drawn_variant(variant_seed, device, config)
    # a choice of the library's own is compiled for each n, k and m: few of them
    sizes = random.Random(f"w{weight_seed}" if variant.forced or device == "cpu" else f"own{variant_seed}")
    n, k, tokens = sizes.choice(N), sizes.choice(K), sizes.choices(M, k=TOKENS_OF_A_WEIGHT)
    w, p = random.Random(f"x{weight_seed}"), random.Random(f"p{problem_seed}")
    n += n % 2 if variant.activation in GATED else 0
    experts = min(w.choice(EXPERTS), max(1, LARGEST[device] // (n * k))) if variant.grouped else 0
    m = p.choice(tokens)
    bad = p.choice(("nan", "inf")) if p.random() < 0.1 else None
    return Case(
        variant,
        weight_seed,
        problem_seed,
        n=n,
        k=k,
        experts=experts,
        act_order=w.random() < 0.15 and not (variant.grouped or variant.block_scale),
        numbers=w.choice(NUMBERS[2:] if variant.has_long_numbers else NUMBERS),
        m=min(m, 65) if n * k > 2**21 else m,
        strides=p.choice(("plain", "plain", "padded", "transposed", "expanded")),
        bad="nan" if variant.dtype == FP8 and not variant.quantized and bad else bad,
        way=p.choice(WAYS[device]),
        scale_storage=p.choice(("float32", "float32", "ue8m0", "words" if variant.block_scale else "ue8m0")),
        settled=p.random() < 0.5 and variant.kind in ("grouped", "gathered"),
    )


def drawn_variant(seed: int, device: str, config: str = "") -> Variant:
    """The variant of a seed, with arguments as for :func:`draw`."""
    v = random.Random(f"v{seed}")
    dtype, kind = v.choice(DTYPES[device]), v.choice(KINDS)
    activation = v.choice(ACTIVATIONS)
    quantized = dtype == FP8 and v.random() < 0.4
    forced = v.random() < 0.9 or config != ""  # a choice of the library's own is of up to four configs
    format = drawn_format(v, dtype, device)
    in_blocks = dtype == FP8 and not quantized and v.random() < 0.5
    return Variant(
        seed,
        kind,
        format,
        dtype,
        quantized,
        block_scale=in_blocks and not (device == "cuda" and "_zfloat" in format),
        out_dtype=v.choice((None, None, torch.float32, torch.bfloat16, torch.float16)),
        activation=v.choice(GATED) if activation == "gated" else activation,
        alpha=v.choice((None, None, None, "host", "device")),
        bias=v.random() < 0.4,
        residual=v.random() < 0.3,
        expert_scale=kind != "dense" and v.random() < 0.3,
        forced=forced,
        config=config,
        batch_invariant=not forced and v.random() < 0.3,
    )


def drawn_format(v: random.Random, dtype: torch.dtype, device: str) -> str:
    """The string of a format that may stand beside x of a dtype."""
    if v.random() < ANY_FORMAT[device]:
        return any_format(v, dtype, device)
    group = sized(v.choice(GROUPS))
    rules = ("", "", "_zint", "_zfloat", "_e4m3", "_e4m3", "e8m0") if dtype == FP8 else WITH_16_BITS
    rule, scale = v.choice(rules), v.choice(("", "_fp16", "_fp32"))
    if rule in ("e8m0", "e4m3_row"):
        own = "g32" if rule == "e8m0" else "g16"  # of mxfp4 and nvfp4
        return f"e2m1_{v.choice((own, group))}_{rule}"
    element, rule = (v.choice(CODEBOOKS), "") if rule == "codebook" else ("int4", rule)
    if element == "any":
        element = codebook([*(v.uniform(-4, 4) for _ in range(14)), -v.uniform(0.1, 4), v.uniform(0.1, 4)])
    if rule == "levels":
        element, rule, scale = "int4", "_zfloat", v.choice(("_u8x256", "_u8x128"))
        group = v.choice(("g32", "g64", "g128"))
    expected = f"{element}_{group}{rule}"
    if rule == "_e4m3" or (device == "cuda" and not held(f"{expected}{scale}", dtype)):
        return expected
    return f"{expected}{scale}"


def any_format(v: random.Random, dtype: torch.dtype, device: str) -> str:
    """The string of any combination of an element, a scale rule, a zero rule and a group size that a device takes."""
    while True:
        element, zero, scale = (v.choice(tuple(of)) for of in (ELEMENTS, ZEROS, SCALES))
        with contextlib.suppress(ValueError):
            format = str(WeightFormat(v.choice((16, 48, *GROUPS)), zero, scale, element))
            if device == "cpu" or held(format, dtype):
                return format


def held(format: str, dtype: torch.dtype) -> bool:
    """True if a GPU's layout beside x of a dtype can hold a format."""
    return not layout_named("mma8" if dtype == FP8 else "mma16").supports(WeightFormat.parse(format))


def sized(group: int) -> str:
    return "col" if group < 0 else f"g{group}"
