"""Measure a whole layer of experts: ``python -m bench.experts --tokens 1,16,64,256,4096``.

The layer is gpt-oss', all of it behind the router: gathered rows, both products with their biases, SwiGLU with its
limit, and the weighted sum. The weights are random, in the checkpoint's own layout (MXFP4 blocks and scales). Peers are
transformers' own layer of the same weights, dequantized to bf16 by its own function, in its implementations
``grouped_mm`` and, for few tokens, ``batched_mm``; and FlashInfer's fused experts where it is installed. w4gemm and
FlashInfer take x in 16 bits (w4a16) or quantize it to fp8 (w4a8).

Several draws of tokens alternate in a CUDA graph. ``rel_error`` is that of the first tokens of a draw, against float32
with the exact weights. Rows go to bench/results/experts.jsonl; ``m`` is the number of tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench.options import add_out, command, counts, some_of, typed
from bench.peers.base import missing_package
from bench.peers.flashinfer import FlashInferLayer, padded
from bench.run import percentiles

import w4gemm
from w4gemm import W4Experts, W4GroupedLinear, choice
from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.mxfp4 import MXFP4Packing
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.formats import WeightFormat
from w4gemm.jit.pool import CompilePool
from w4gemm.jit.toolchain import installed_version
from w4gemm.tuning import record
from w4gemm.tuning.timing import time_graphs

RESULTS = Path(__file__).parent / "results/experts.jsonl"
DRAWS = 4
_CHECKED = 64
"""Tokens that are computed in float32 too."""
_MAX_ERROR = {"w4a16": 1e-2, "w4a8": 5e-2}
_BATCHED_ROWS = 64
"""Most rows of ``batched_mm``, which copies the weights of each."""


@dataclass(frozen=True)
class Sizes:
    experts: int
    top_k: int = 4
    hidden: int = 2880
    intermediate: int = 2880
    limit: float = 7.0


MODELS = {"gpt-oss-120b": Sizes(128), "gpt-oss-20b": Sizes(32)}


class Draw(NamedTuple):
    """Tokens and what a router chose for them."""

    x: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor


class Product(NamedTuple):
    """Tensors of one product of all experts as the checkpoint holds them."""

    blocks: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor


Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Run(NamedTuple):
    """A layer of one implementation, and what it is called with in place of a draw's tensors."""

    work: str
    impl: str
    layer: Layer
    version: str = ""
    config: str = ""
    inputs: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]] = lambda *given: given


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.experts", __doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt-oss-120b", help="whose layer (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=typed(counts), default="1,16,64,256,4096", help="of a call (default: %(default)s)"
    )
    parser.add_argument(
        "--routing",
        type=typed(some_of("uniform", "zipf")),
        default="uniform,zipf",
        help="how the router chooses experts (default: %(default)s)",
    )
    parser.add_argument(
        "--work", type=typed(some_of(*_MAX_ERROR)), default="w4a16,w4a8", help="some of both (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further point after so long")
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    facts, sizes, started = record.facts(), MODELS[args.model], time.monotonic()
    products = drawn_products(sizes, "cuda")
    ours = {work: our_layer(sizes, products, work) for work in args.work}
    theirs = their_layer(sizes, products, torch.bfloat16)
    fused = flashinfer_runs(sizes, products, args.work, args.tokens)
    compile_ahead(ours.values(), [sizes.top_k * m for m in args.tokens])
    for m, routing in itertools.product(args.tokens, args.routing):
        if time.monotonic() - started > args.seconds:
            return
        rows = measure(sizes, ours, theirs, fused, m, routing)
        common = {"kind": "time", "run": record.run_name(facts), "model": args.model, "m": m, "routing": routing}
        common |= {"n": 2 * sizes.intermediate, "k": sizes.hidden, "experts": sizes.experts, "top_k": sizes.top_k}
        record.append(args.out, *(common | row | facts for row in rows))
        print(line(f"{args.model}, {m} tokens, {routing}", rows), flush=True)


def drawn_products(sizes: Sizes, device: str) -> tuple[Product, Product]:
    """Random weights of gate_up and down, of about 1 / sqrt(k)."""
    g = torch.Generator(device).manual_seed(0)

    def product(n: int, k: int) -> Product:
        blocks, groups = (sizes.experts, n, k // 32, 16), (sizes.experts, n, k // 32)
        exponent = 127 - round(0.5 * torch.tensor(float(k)).log2().item()) - 2
        return Product(
            torch.randint(0, 256, blocks, dtype=torch.uint8, device=device, generator=g),
            torch.randint(exponent - 1, exponent + 2, groups, device=device, generator=g).to(torch.uint8),
            (0.1 * torch.randn(sizes.experts, n, device=device, generator=g)).bfloat16(),
        )

    return product(2 * sizes.intermediate, sizes.hidden), product(sizes.hidden, sizes.intermediate)


def our_layer(sizes: Sizes, products: tuple[Product, Product], work: str) -> W4Experts:
    layers = []
    for blocks, scales, bias in products:
        experts, n, groups = scales.shape
        module = Module(n, 32 * groups, WeightFormat.parse("mxfp4"), True, experts)
        w = MXFP4Packing({}).weight(module, {"blocks": blocks, "scales": scales})
        if work == "w4a8":
            w = w.repack(activations="fp8")
        layers.append(W4GroupedLinear.from_weight(w, bias))
    return W4Experts(*layers, activation=f"swiglu_oai(limit={sizes.limit!r})")


def their_layer(sizes: Sizes, products: tuple[Product, Product], dtype: torch.dtype) -> Any:
    from transformers import GptOssConfig
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = GptOssConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_local_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        swiglu_limit=sizes.limit,
    )
    with torch.device("meta"):
        layer = GptOssExperts(config)
    for name, (blocks, scales, bias) in zip(("gate_up_proj", "down_proj"), products, strict=True):
        # transformers moves to the CPU what it finds no memory for on the GPU
        weight = convert_moe_packed_tensors(blocks, scales, dtype=dtype).to(blocks.device)
        setattr(layer, name, torch.nn.Parameter(weight, requires_grad=False))
        setattr(layer, f"{name}_bias", torch.nn.Parameter(bias.to(dtype), requires_grad=False))
    layer.limit = sizes.limit  # transformers 5.17 does not take it from the config
    return layer.requires_grad_(False).eval()


def draw(sizes: Sizes, m: int, routing: str, seed: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Draw:
    g = torch.Generator(device).manual_seed(seed)
    share = 1 / torch.arange(1.0, sizes.experts + 1) if routing == "zipf" else torch.ones(sizes.experts)
    mixed = share[torch.randperm(sizes.experts, generator=torch.Generator().manual_seed(0))].to(device)
    ids = torch.multinomial(mixed.expand(m, -1), sizes.top_k, generator=g)
    scores = torch.randn(m, sizes.top_k, device=device, generator=g).softmax(-1)
    return Draw(torch.randn(m, sizes.hidden, device=device, generator=g).to(dtype), ids, scores.to(dtype))


def flashinfer_runs(
    sizes: Sizes, products: tuple[Product, Product], works: Sequence[str], tokens: Sequence[int]
) -> list[Run]:
    """FlashInfer's layers, tuned; none where it is not installed or fails."""
    runs: list[Run] = []
    if missing_package("FlashInfer", "flashinfer"):
        return runs
    gate_up, down = (padded(*product, gated=i == 0) for i, product in enumerate(products))
    for work in works:
        try:
            layer = FlashInferLayer(
                gate_up,
                down,
                limit=sizes.limit,
                top_k=sizes.top_k,
                work=work,
                tokens=tokens,
                hidden=sizes.hidden,
            )
            layer.tune(*layer.inputs(*draw(sizes, max(tokens), "uniform", 0, "cuda")))
            version = installed_version("flashinfer-python")
            runs.append(Run(work, "flashinfer", layer, version, inputs=layer.inputs))
        except Exception as e:
            print(f"  flashinfer {work}: {e!r:.300}", flush=True)
    return runs


def measure(
    sizes: Sizes, ours: dict[str, W4Experts], theirs: Any, fused: Sequence[Run], m: int, routing: str
) -> list[dict[str, Any]]:
    """Return a row for each implementation that computes the layer right."""
    draws = [draw(sizes, m, routing, seed, "cuda") for seed in range(DRAWS)]
    wanted = exact(theirs, draws[0])
    runs = [
        Run(work, "w4gemm", layer, w4gemm.__version__, plans(layer, sizes.top_k * m)) for work, layer in ours.items()
    ]
    runs += [Run("w4a16", f"transformers_{way}", peer(theirs, way)) for way in ways(sizes, m)]
    rows, graphs = [], []
    for run in (*runs, *fused):
        inputs = [run.inputs(*d) for d in draws]
        try:
            with torch.no_grad():
                error = relative(run.layer(*inputs[0]), wanted)
        except Exception as e:  # a peer's failure is a result, not the end of the run
            print(f"  {run.impl}: {e!r:.200}", flush=True)
            continue
        if not error < _MAX_ERROR[run.work]:
            print(f"  {run.impl} {run.work}, {m} tokens: relative error {error:.3g}, not timed", flush=True)
            continue
        rows.append(
            {"work": f"{run.work}_experts", "impl": run.impl, "impl_version": run.version, "config": run.config}
            | {"format": "mxfp4", "dtype": "bfloat16", "rel_error": round(error, 6)}
        )
        graphs.append([lambda layer=run.layer, given=given: layer(*given) for given in inputs])
    with torch.no_grad():
        graphs = [calls if _captured(row, calls) else [] for row, calls in zip(rows, graphs, strict=True)]
        rows = [row for row, calls in zip(rows, graphs, strict=True) if calls]
        times = time_graphs([calls for calls in graphs if calls], replays=9 if m <= 256 else 5)
    for row, t in zip(rows, times, strict=True):
        row |= percentiles(t)
    return rows


def _captured(row: dict[str, Any], calls: list[Callable[[], object]]) -> bool:
    """True if a CUDA graph can hold the calls of a row; w4gemm's has to."""
    if row["impl"] == "w4gemm":
        return True
    try:
        time_graphs([calls], replays=1)
    except Exception as e:
        print(f"  {row['impl']}: {e!r:.200}", flush=True)
        return False
    return True


def ways(sizes: Sizes, m: int) -> list[str]:
    """transformers' implementations that are measured."""
    return ["grouped_mm", *(["batched_mm"] if m * sizes.top_k <= _BATCHED_ROWS else [])]


def peer(layer: Any, way: str) -> Layer:
    def run(*given: torch.Tensor) -> torch.Tensor:
        layer.config._experts_implementation = way
        return layer(*given)

    return run


def keys(layer: W4Experts, rows: int) -> Iterator[choice.PlanKey]:
    """Keys of the plans of both products, the first of gathered rows."""
    for product, gathered in ((layer.gate_up, True), (layer.down, False)):
        epilogue, dtype = Epilogue(product.activation, bias=True), torch.bfloat16
        if product.activations == "fp8":
            dtype, epilogue = torch.float8_e4m3fn, epilogue.of_quantized(dtype)
        yield choice.PlanKey.of(product.weight, rows, dtype, epilogue, gathered=gathered)


def plans(layer: W4Experts, rows: int) -> str:
    """Configs of both products."""
    return " ".join(str(choice.plan_for(key)) for key in keys(layer, rows))


def compile_ahead(layers: Iterable[W4Experts], rows: Sequence[int]) -> None:
    """Compile on all cores, because one process compiles one kernel at a time."""
    decisions = [choice.decide(key.problem()) for layer in layers for m in rows for key in keys(layer, m)]
    units = dict.fromkeys(unit for decision in decisions if (unit := decision.unit) is not None)
    with CompilePool() as pool:
        for future in pool.submit(units):
            future.result()


def exact(layer: Any, given: Draw) -> torch.Tensor:
    """float32: the first tokens of a draw by the formula, with the weights of transformers' layer, which are exact."""
    x, ids, scores = (t[:_CHECKED] for t in given)
    total = torch.zeros(x.shape, device=x.device)
    for e in ids.unique().tolist():
        tokens, choices = torch.where(ids == e)
        both = x[tokens].float() @ layer.gate_up_proj[e].float() + layer.gate_up_proj_bias[e].float()
        gate, up = both[:, ::2].clamp(max=layer.limit), both[:, 1::2].clamp(-layer.limit, layer.limit)
        hidden = gate * torch.sigmoid(layer.alpha * gate) * (up + 1)
        d = hidden @ layer.down_proj[e].float() + layer.down_proj_bias[e].float()
        total.index_add_(0, tokens, d * scores[tokens, choices, None].float())
    return total


def relative(y: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((y[: len(wanted)].float() - wanted).norm() / wanted.norm()).item()


def line(title: str, rows: list[dict[str, Any]]) -> str:
    ours = [row["us_p50"] for row in rows if row["impl"] == "w4gemm"]
    others = [row["us_p50"] for row in rows if row["impl"] != "w4gemm"]
    ratio = f" best peer / w4gemm {min(others) / min(ours):.2f};" if ours and others else ""
    texts = (f"{row['impl']} {row['work']} {row['us_p50']} us (error {row['rel_error']:.4f})" for row in rows)
    return f"{title}:{ratio} {', '.join(texts)}"


if __name__ == "__main__":
    main()
