"""One layer of experts alone, beside vLLM's Marlin MoE: ``python -m bench.engine.layer --tokens 1,8,64``.

Both do all that lies behind the router: order the choices of random tokens by expert, multiply by gate and up,
silu(gate) * up, multiply by down, add up the weighted rows of a token. Attention, norms and the host, which both have
alike in an engine, are left out. Several draws of tokens alternate in a CUDA graph, over two layers of weights, which
are larger than L2. Marlin's weights are random words, because its time does not depend on them; so its results are not
compared. The first Marlin call on a machine compiles for about a minute.

It needs vLLM. Rows go to bench/results/engine.jsonl, with ``phase`` "experts" and the tokens as ``batch``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from bench.engine.implementations import OURS
from bench.engine.launch import RESULTS
from bench.engine.models import Model, model_named
from bench.options import add_out, command
from bench.shapes import parse_tokens

import w4gemm
from w4gemm import QuantizedWeight, WeightFormat, combine, route
from w4gemm.api.product import launch
from w4gemm.core.epilogue import PLAIN, Epilogue, EpilogueOperands
from w4gemm.kernels import Operands
from w4gemm.kernels.arguments import ExpertRows
from w4gemm.tuning import record
from w4gemm.tuning.timing import time_graphs

GROUP = 128
_LAYERS = 2
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names that models' configs have for the number of experts."""
Call = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer."""

    experts: int
    top_k: int
    hidden: int
    width: int

    @classmethod
    def of(cls, model: Model) -> Sizes:
        """Return those of a model's mixture; KeyError if it has none."""
        c = model.config
        experts = next((name for name in _EXPERTS if name in c), _EXPERTS[0])
        width = c.get("moe_intermediate_size", c["intermediate_size"])
        return cls(c[experts], c["num_experts_per_tok"], c["hidden_size"], width)


class Forced(NamedTuple):
    """Configs of a layer's products, and where the rows of x come from, in place of what is chosen."""

    gate_up: str = ""
    """Config as :func:`w4gemm.linear` takes it, or the empty string for the choice."""
    down: str = ""
    copied: bool = False
    """True to copy the rows of x before gate_up."""


class Draw(NamedTuple):
    """Tokens and what a router chose for them."""

    x: torch.Tensor
    ids: torch.Tensor
    scores: torch.Tensor


def drawn(sizes: Sizes, tokens: int, seed: int, device: str) -> Draw:
    """Draw tokens whose experts are all equally likely."""
    g = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, sizes.hidden, device=device, generator=g).bfloat16()
    ids = torch.rand(tokens, sizes.experts, device=device, generator=g).topk(sizes.top_k).indices.int()
    return Draw(x, ids, torch.rand(tokens, sizes.top_k, device=device, generator=g))


def draws_of(tokens: int) -> int:
    """Return how many draws alternate; few tokens choose few experts, so that more draws are needed to leave L2."""
    return 24 if tokens <= 4 else 12 if tokens <= 16 else 6


class Ours:
    """w4gemm's layers, as the plugin calls them."""

    def __init__(self, sizes: Sizes, device: str, format: str = f"int4_g{GROUP}", activation: str = "silu_mul") -> None:
        self.sizes, self.device, self.gated = sizes, device, Epilogue(activation=activation)
        shapes = (2 * sizes.width, sizes.hidden), (sizes.hidden, sizes.width)
        self.layers = [
            [self._stack(*shape, WeightFormat.parse(format), device) for shape in shapes] for _ in range(_LAYERS)
        ]

    def _stack(self, n: int, k: int, format: WeightFormat, device: str) -> QuantizedWeight:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
        if format.scale == "e8m0":
            scales = torch.randint(118, 124, (n, k // format.group_size), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        else:
            scales = (torch.rand(n, k // format.group_size) * 0.01 + 0.002).bfloat16()
        one = QuantizedWeight.from_codes(format, codes, scales).to(device).repack()
        each = self.sizes.experts
        tensors = tuple(t.unsqueeze(0).repeat(each, *[1] * t.dim()) for t in one.tensors)
        return replace(one, experts=each, tensors=tensors)

    def call(self, draw: Draw, layer: int, forced: Forced = Forced()) -> Call:
        (gate_up, down), (x, ids, scores) = self.layers[layer], draw
        rows = ids.numel()
        hidden, d = (x.new_empty(rows, columns) for columns in (self.sizes.width, self.sizes.hidden))
        y = torch.empty_like(x)

        def run() -> torch.Tensor:
            routing = route(ids, self.sizes.experts)
            first, end = routing.m_offsets[:-1], routing.m_offsets[1:]
            operands = Operands(x, gate_up.tensors, hidden, rows=ExpertRows(first, end, routing.tokens))
            if forced.copied:
                operands = operands.gathered_first()
            launch(gate_up.packed, operands, self.gated, forced.gate_up)
            settled = ExpertRows(first, end, settled=1)
            operands = Operands(hidden, down.tensors, d, EpilogueOperands(), settled)
            launch(down.packed, operands, PLAIN, forced.down)
            return combine(d, routing.row_of_choice, scores, out=y, settled=True)

        return run


class Marlin:
    """vLLM's own choice for such layers on Hopper."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new

        self.sizes, e, h, w = sizes, sizes.experts, sizes.hidden, sizes.width
        self.workspace = marlin_make_workspace_new(torch.device(device, 0), 4)

        def words(*shape: int) -> torch.Tensor:
            return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device)

        def scales(*shape: int) -> torch.Tensor:
            return (torch.rand(*shape, device=device) * 0.01 + 0.002).bfloat16()

        self.layers = [
            (words(e, h // 16, 4 * w), words(e, w // 16, 2 * h), scales(e, h // GROUP, 2 * w), scales(e, w // GROUP, h))
            for _ in range(_LAYERS)
        ]

    def call(self, draw: Draw, layer: int) -> Call:
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.scalar_type import scalar_types

        (w13, w2, s13, s2), (x, ids, scores), sizes = self.layers[layer], draw, self.sizes
        rows = ids.numel()
        first, second = x.new_empty(rows * max(2 * sizes.width, sizes.hidden)), x.new_empty(rows, sizes.width)
        y = torch.empty_like(x)

        def add_up(d: torch.Tensor, out: torch.Tensor, *others: object) -> torch.Tensor:
            ops.moe_sum(d, out, *others)
            return out

        def run() -> object:
            return fused_marlin_moe(
                *(x, w13, w2, None, None, s13, s2, scores, ids, scalar_types.uint4b8.id),
                workspace=self.workspace,
                intermediate_cache13=first,
                intermediate_cache2=second,
                output=y,
                moe_sum=add_up,
            )

        return run


def main(argv: Sequence[str] | None = None) -> None:
    parser = command("bench.engine.layer", __doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b", help="(default: %(default)s)")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256", help="(default: %(default)s)")
    add_out(parser, RESULTS)
    args = parser.parse_args(argv)
    model = model_named(args.model)
    if "swiglu_limit" in model.config:
        parser.error(f"--model: wanted one whose experts have SiLU, such as qwen3-30b-a3b, got {args.model}")
    facts, sizes = record.facts(), Sizes.of(model)
    import vllm

    ours, marlin = Ours(sizes, "cuda"), Marlin(sizes, "cuda")
    for tokens in parse_tokens(args.tokens, "tokens"):
        draws = [drawn(sizes, tokens, seed, "cuda") for seed in range(draws_of(tokens))]
        graphs = [[layers.call(draw, i % _LAYERS) for i, draw in enumerate(draws)] for layers in (ours, marlin)]
        times = [round(t.p50, 2) for t in time_graphs(graphs, replays=9)]
        common = {"kind": "engine", "run": record.run_name(facts), "engine": "vllm", "engine_version": vllm.__version__}
        common |= {"model": args.model, "format": f"int4-g{GROUP}", "dtype": "bfloat16", "gpus": 1, "mode": "layer"}
        common |= {"phase": "experts", "batch": tokens}
        versions = {OURS: w4gemm.__version__, "marlin": vllm.__version__}
        for (impl, version), us in zip(versions.items(), times, strict=True):
            own = {"impl": impl, "impl_version": version, "chosen": impl == "marlin", "us": us}
            record.append(args.out, {**common, **own, **facts})
        print(f"{tokens} tokens: w4gemm {times[0]} us, Marlin {times[1]} us, {times[1] / times[0]:.2f}", flush=True)


if __name__ == "__main__":
    main()
