"""Pages of benchmarks: what each shows, its words, and what its ratios are of (``bench.report`` writes them)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bench.peers.base import fp4_name
from bench.shapes import divide

from w4gemm.core.formats import WeightFormat
from w4gemm.tuning import roofline

GROUPS = {"1 to 16": (1, 16), "32, 64": (32, 64), "128, 256": (128, 256), "512 to 8192": (512, 8192)}
GROUPED = {"1 to 64": (1, 64), "128 and more": (128, 1024)}
"""Ranges of tokens per expert."""
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


class Layer(NamedTuple):
    n: int
    k: int
    experts: int = 0
    """0 for a single weight."""
    routing: str = ""
    """Division of the tokens among experts, see ``bench.grouped``."""

    def __str__(self) -> str:
        sizes = f"{self.experts}x{self.n}x{self.k}" if self.experts else f"{self.n}x{self.k}"
        return sizes if self.routing in ("", "balanced") else f"{sizes} {self.routing}"


Point = tuple[Layer, int]
"""(layer, tokens; with experts, tokens per expert on average)."""
Times = dict[Point, dict[str, float]]


@dataclass(frozen=True)
class Page:
    """One page of benchmarks: its words, and what its ratios are of."""

    name: str
    """File name of the page in docs/, without an ending."""
    title: str
    what: str
    """Weights and activations, in a sentence."""
    method: tuple[str, ...]
    """Sentences on how it was measured, behind ``METHOD``; ``{file}`` is the file of the rows, ``{script}`` what made
    them, ``{peers}`` what ``peer_notes`` says of those that ran."""
    file: str
    activation_bytes: int
    not_peers: tuple[str, ...] = ()
    """Implementations that are shown, but do not count as peers in a ratio."""
    ours: str = "w4gemm"
    """Beginning of the names of our implementations."""
    groups: dict[str, tuple[int, int]] = field(default_factory=lambda: GROUPS)
    """Ranges of tokens to take means over: (first, last) by name."""
    weight_bits: float = 4 + 16 / 128
    """Bits of a weight and its part of a scale."""
    gpu: str = H200
    peer_notes: dict[str, str] = field(default_factory=dict)
    """A sentence about each peer that needs one."""

    def notes_on(self, names: Sequence[str]) -> str:
        """Return the sentences about the peers that ran."""
        return " ".join(note for name, note in self.peer_notes.items() if name in names)

    @property
    def plot(self) -> str:
        """File name of its plot in docs/plots/, without an ending."""
        return self.name.replace("benchmarks", "roofline")

    @property
    def rates(self) -> roofline.Rates:
        """The rates that large library calls reach on the GPU."""
        return roofline.RATES[self.gpu]

    @property
    def rate(self) -> float:
        """Operations per microsecond that large matmuls reach."""
        return self.rates.fp8_operations if self.activation_bytes == 1 else self.rates.operations

    def on_h100(self, file: str) -> Page:
        """Return the page of the same work on an H100, whose rows are in another file."""
        return replace(self, name=f"{self.name}-h100", title=f"{self.title}, on an H100", file=file, gpu=H100)

    def roofline_us(self, point: Point) -> float:
        """max(bytes / bandwidth, operations / rate)."""
        (n, k, experts, routing), m = point
        counts = divide(routing, m, experts) if experts else [m]
        weights = sum(count > 0 for count in counts) * n * k * self.weight_bits / 8
        size = weights + sum(counts) * (2 * n + self.activation_bytes * k)
        return max(size / self.rates.bytes, 2 * sum(counts) * n * k / self.rate)

    def ratio(self, us: dict[str, float]) -> float:
        """The best peer's time over ours."""
        peers = [t for name, t in us.items() if not name.startswith((self.ours, *self.not_peers))]
        return min(peers) / min(t for name, t in us.items() if name.startswith(self.ours))


METHOD = (
    "All implementations ran interleaved in one process (protocol: `bench/{script}.py`; rows: bench/results/{file}).",
    "Times are medians in microseconds per call, in a CUDA graph over copies of the weight that together exceed L2.",
)
_CHOICE = "w4gemm runs the config that it chooses by default."
_DENSE_NOTES = {
    "machete": "machete is vLLM's.",
    "marlin": "marlin is vLLM's.",
    "torch_int4": "torch_int4 is PyTorch's.",
    "cublas": "cublas multiplies bf16 weights.",
}
_SCALES = (
    "w4gemm, quack and humming multiply the float32 sums by bf16 group scales. With `e4m3` behind its name a library "
    "puts group scales in e4m3 into the weight instead. cutlass_w4a8 is vLLM's."
)
_QUANTIZES = "humming takes bf16 x and quantizes it within the call"
_EXPERTS = (
    "Tokens are the average per expert. Routing is balanced unless a row says zipf (expert e in proportion to "
    "1 / (1 + e)) or hot (all tokens to one expert)."
)
_NVFP4 = "NVFP4 weights (e2m1, an e4m3 scale for each 16, one float32 factor), bf16 x."
_MXFP4 = "MXFP4 weights (e2m1, a power of two for each 32)"
W4A16 = Page(
    "benchmarks",
    "W4A16 beside other libraries",
    "int4 g128 symmetric weights, bf16 x.",
    (f"{_CHOICE} {{peers}}",),
    "times.jsonl",
    2,
    peer_notes=_DENSE_NOTES,
)
W4A8 = Page(
    "benchmarks-w4a8",
    "W4A8 beside other libraries",
    "int4 g128 symmetric weights, e4m3 x with one scale per token.",
    (
        _CHOICE,
        f"{_SCALES} {_QUANTIZES}, which takes about 3 us.",
        "cublas multiplies the same numbers as an fp8 weight. It shows what large matmuls reach and is not counted as "
        "a peer.",
        "A ratio takes the faster of each library's two ways to scale.",
    ),
    "w4a8.jsonl",
    1,
    ("cublas",),
)
SM80 = Page(
    "benchmarks-sm80",
    "The kernel for GPUs before Hopper, on a Hopper GPU",
    "`sm80_mixed_gemm`, forced: W4A16, int4 g128 symmetric weights, bf16 x.",
    ("sm80_mixed_gemm runs the config that its cost model ranks first. {peers}",),
    "sm80.jsonl",
    2,
    peer_notes=_DENSE_NOTES,
    ours="sm80_mixed_gemm",
)
GROUPED_W4A16 = Page(
    "benchmarks-grouped",
    "Mixtures of experts in W4A16 beside other libraries",
    "int4 g128 symmetric weights, bf16 x.",
    (f"{_CHOICE} vLLM's CUTLASS kernel and Quack have no W4A16 for experts.", _EXPERTS),
    "grouped.jsonl",
    2,
    groups=GROUPED,
)
GROUPED_W4A8 = Page(
    "benchmarks-grouped-w4a8",
    "Mixtures of experts in W4A8 beside other libraries",
    "int4 g128 symmetric weights, e4m3 x with one scale per token.",
    (
        _CHOICE,
        f"{_SCALES} {_QUANTIZES}.",
        "A ratio takes the faster of w4gemm's two ways to scale.",
        _EXPERTS,
    ),
    "grouped.jsonl",
    1,
    groups=GROUPED,
)
MXFP4 = Page(
    "benchmarks-mxfp4",
    "MXFP4 beside other libraries",
    f"{_MXFP4}, bf16 x.",
    (f"{_CHOICE} {{peers}}",),
    "fp4.jsonl",
    2,
    peer_notes=_DENSE_NOTES,
    weight_bits=4 + 8 / 32,
)
NVFP4 = replace(
    MXFP4, name="benchmarks-nvfp4", title="NVFP4 beside other libraries", what=_NVFP4, weight_bits=4 + 8 / 16
)
MXFP4_W4A8 = Page(
    "benchmarks-mxfp4-w4a8",
    "MXFP4 with e4m3 activations, beside other libraries",
    f"{_MXFP4}, e4m3 x with one scale per token.",
    (f"{_CHOICE} {_QUANTIZES}, which takes about 3 us.",),
    "fp4.jsonl",
    1,
    weight_bits=4 + 8 / 32,
)
_PADDING_NOTES = {
    "humming": "humming pads n to a multiple of 128: 2880 becomes 2944.",
    "marlin": "marlin is vLLM's. It pads n so where k is no multiple of 128 either.",
}
GROUPED_MXFP4 = Page(
    "benchmarks-grouped-mxfp4",
    "Mixtures of experts in MXFP4 beside other libraries",
    f"{_MXFP4}, bf16 x.",
    (f"{_CHOICE} {{peers}}", _EXPERTS),
    "grouped_fp4.jsonl",
    2,
    peer_notes=_PADDING_NOTES,
    groups=GROUPED,
    weight_bits=4 + 8 / 32,
)
GROUPED_NVFP4 = replace(
    GROUPED_MXFP4,
    name="benchmarks-grouped-nvfp4",
    title="Mixtures of experts in NVFP4 beside other libraries",
    what=_NVFP4,
    weight_bits=4 + 8 / 16,
)
GROUPED_MXFP4_W4A8 = Page(
    "benchmarks-grouped-mxfp4-w4a8",
    "Mixtures of experts in MXFP4 with e4m3 activations, beside other libraries",
    f"{_MXFP4}, e4m3 x with one scale per token.",
    (f"{_CHOICE} {_QUANTIZES}. {{peers}}", _EXPERTS),
    "grouped_fp4.jsonl",
    1,
    peer_notes=_PADDING_NOTES,
    groups=GROUPED,
    weight_bits=4 + 8 / 32,
)
PAGES = {
    ("w4a16", ""): W4A16,
    ("w4a8", ""): W4A8,
    ("w4a16_grouped", ""): GROUPED_W4A16,
    ("w4a8_grouped", ""): GROUPED_W4A8,
    ("w4a16", "mxfp4"): MXFP4,
    ("w4a16", "nvfp4"): NVFP4,
    ("w4a8", "mxfp4"): MXFP4_W4A8,
    ("w4a16_grouped", "mxfp4"): GROUPED_MXFP4,
    ("w4a16_grouped", "nvfp4"): GROUPED_NVFP4,
    ("w4a8_grouped", "mxfp4"): GROUPED_MXFP4_W4A8,
}
"""Page by kind of work, see :func:`kind_of_work`."""


def kind_of_work(row: dict[str, Any]) -> tuple[str, str]:
    """Return what a row's times may be compared for: its work, and the name of its format if that is FP4."""
    return row["work"], fp4_name(WeightFormat.parse(row["format"]))


def page_of(rows: list[dict[str, Any]], file: str) -> Page | None:
    """Return the page that a file's rows of one kind of work are for; None if there is none."""
    if any(row["impl"] == SM80.ours for row in rows):
        return SM80
    page = PAGES.get(kind_of_work(rows[0]))
    return page.on_h100(file) if page and rows[0]["gpu"] == H100 else page
