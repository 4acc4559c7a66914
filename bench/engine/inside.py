"""Layers of a vLLM engine in this process: their errors, new weights for them, and their times. See pair.py."""

from __future__ import annotations

import functools
import gc
import itertools
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.engine.models import Model
from bench.engine.modules import Matrix, Stack
from bench.engine.rows import spread
from bench.rows import Row

import w4gemm
from w4gemm.checkpoints import Checkpoint, open_checkpoint
from w4gemm.checkpoints.gguf import GGUFCheckpoint
from w4gemm.tuning.timing import time_graphs
from w4gemm.weights.weight import QuantizedWeight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_STACKS = ("gate_up_proj", "down_proj")
_LAYER = re.compile(r"layers\.\d+\.")
_ROUNDS = 3
PARTS = "linear", "experts"
"""Kinds of layers."""
Layers = dict[int, list[tuple[str, Any]]]
"""Names and modules by the number of their decoder layer."""
Calls = list[Callable[[], object]]


def layers_of(model: torch.nn.Module) -> tuple[Layers, Layers]:
    """Return a model's quantized linear layers between attention and norms, and its layers of experts."""
    linear, experts = defaultdict(list), defaultdict(list)
    for name, module in model.named_modules():
        number = re.search(r"layers\.(\d+)\.", name)
        if number is None or not hasattr(module, "quant_method") or "w4gemm_shards" in name:
            continue
        if type(module).__name__.endswith("RoutedExperts"):  # gpt-oss has a class of its own
            experts[int(number[1])].append((name, module))
        elif name.endswith("_proj") and not type(module.quant_method).__name__.startswith("Unquantized"):
            linear[int(number[1])].append((name, module))
    return linear, experts


def quantized(model: Model) -> dict[str, Matrix | Stack]:
    """Return a model's quantized matrices by their whole names."""
    return {
        f"{model.prefix}{i}.{m.name}": m
        for i in range(model.layers)
        for m in model.layer(i)
        if isinstance(m, Stack) or (isinstance(m, Matrix) and m.quantized)
    }


def _all(layers: Layers) -> Iterator[tuple[str, Any]]:
    return (pair for of_layer in layers.values() for pair in of_layer)


def _parts(name: str) -> list[str]:
    """Return the checkpoint's names of the modules of a linear layer."""
    parent, _, last = name.rpartition(".")
    return [f"{parent}.{part}" for part in _FUSED.get(last, (last,))]


def _prefix(name: str) -> str:
    """Return the checkpoint's name of a layer of experts."""
    return name.removesuffix(".routed_experts")


# --- errors -----------------------------------------------------------------------------------------------------------


def errors(model: torch.nn.Module, folder: Path) -> Row:
    """Return the largest relative error of linear layers' products, and of expert layers' results, in the first two
    decoder layers, beside those of the checkpoint's numbers in float32."""
    checkpoint, largest = open_checkpoint(folder), dict[str, float]()
    linear, experts = layers_of(model)
    for kind, layers, results in (("linear_error", linear, _linear), ("experts_error", experts, _experts)):
        for name, module in _all({i: layers[i] for i in sorted(layers)[:2]}):
            parts = _parts(name) if kind == "linear_error" else [f"{_prefix(name)}.{leaf}" for leaf in _STACKS]
            if not checkpoint.modules.keys() >= set(parts):  # DeepSeek-V4 as published
                parts = [part.removeprefix("model.") for part in parts]
            other = kind == "experts_error" and module.activation.value != "silu"
            if checkpoint.modules.keys() >= set(parts) and not other:
                weights = [_as_vllm_loads(checkpoint, part) for part in parts]
                result, exact = results(module, weights)
                error = ((result.float() - exact).norm() / exact.norm()).item()
                largest[kind] = max(largest.get(kind, 0.0), round(error, 5))
    return dict(largest)


def _as_vllm_loads(checkpoint: Checkpoint, name: str) -> QuantizedWeight:
    """Return a module's weight. vLLM's GGUF plugin keeps the file's order of rows, in which q's and k's of a Llama are
    not in the model's."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return checkpoint.file.weight(checkpoint.stored_names(name)[0]).to(DEVICE)
    return checkpoint.weight(name, DEVICE)  # a CPU takes minutes for DeepSeek-V3's experts


def _linear(module: Any, weights: list[QuantizedWeight]) -> tuple[torch.Tensor, torch.Tensor]:
    w = torch.cat([part.dequantize(torch.float32) for part in weights])
    x = torch.randn(16, w.shape[1], device=DEVICE).bfloat16()
    return module.quant_method.apply(module, x), x.float() @ w.T


def _experts(module: Any, weights: list[QuantizedWeight]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of two tokens with two experts each."""
    gate_up, down = weights
    x = torch.randn(2, module.hidden_size, device=DEVICE).bfloat16()
    ids = torch.tensor([[0, 3], [gate_up.experts - 1, 3]], dtype=torch.int32, device=DEVICE)
    scores = torch.tensor([[0.75, 0.25], [0.5, 0.5]], device=DEVICE)
    exact = torch.zeros(x.shape, device=DEVICE)
    for token, choice in ((token, choice) for token in range(2) for choice in range(2)):
        first, last = (w.expert(int(ids[token, choice])).dequantize(torch.float32) for w in (gate_up, down))
        gate, up = (first @ x[token].float()).view(-1, 2).T
        exact[token] += scores[token, choice] * (last @ (torch.nn.functional.silu(gate) * up))
    return module.forward_modular(x, scores, ids), exact


# --- new weights for the engine in use --------------------------------------------------------------------------------


def update(
    llm: Any,
    model: torch.nn.Module,
    matrices: dict[str, Matrix | Stack],
    by_reload: bool,
    seed: int,
    compared: int | None = None,
) -> Row:
    """Send dense weights of all quantized matrices to the running engine, by ``load_weights`` or ``reload_weights``;
    return the seconds, and whether the packed bits are those of ``quantize``. All decoder layers get the same numbers,
    so that there is room for them.

    Args:
        compared: the number of weights whose bits are compared; None for all.
    """
    g = torch.Generator(DEVICE).manual_seed(seed)
    of_one, dense = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, m in matrices.items():
        if (own := _LAYER.sub("", name)) not in of_one:
            shape = (m.experts, m.k, m.n) if isinstance(m, Stack) else (m.n, m.k)
            of_one[own] = (torch.randn(shape, device=DEVICE, generator=g) * m.gain * m.k**-0.5).bfloat16()
        dense[name] = of_one[own]
    # a list, as trainers' buckets come: of an iterator each tensor would be copied before the next one is made
    send = [(name if t.dim() == 3 else f"{name}.weight", t) for name, t in dense.items()]
    _wait()
    start = time.perf_counter()
    if by_reload:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": send})
    else:
        model.load_weights(send)  # type: ignore[operator]
    _wait()
    seconds = time.perf_counter() - start
    pairs = itertools.islice(_packed(model, dense), compared)
    return {"seconds": seconds, "equal": all(_is_fresh(w, rows) for w, rows in pairs)}


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def allocated() -> int:
    """Return the bytes of the GPU's memory that PyTorch's tensors hold."""
    gc.collect()
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


def _packed(model: torch.nn.Module, dense: dict[str, torch.Tensor]) -> Iterator[tuple[QuantizedWeight, torch.Tensor]]:
    """Generate packed weights, and what this GPU's parts of them were made of; of experts three."""
    from w4gemm.integrations.vllm.linear_kernel import LinearKernel

    linear, experts = layers_of(model)
    for name, module in _all(linear):
        if name.endswith("_proj") and (parts := _parts(name))[0] in dense:
            owners = filter(None, (module.quant_method, getattr(module, "scheme", None)))
            values = (value for owner in owners for value in vars(owner).values())
            kernel = next(value for value in values if isinstance(value, LinearKernel))
            tensors = module._parameters | module._buffers
            w = kernel.weight(tensors)
            dim, rank, count = (
                int(w.k < module.input_size),
                getattr(module, "tp_rank", 0),
                getattr(module, "tp_size", 1),
            )
            yield w, torch.cat([dense[part].chunk(count, dim)[rank] for part in parts])
    places = {id(runner.routed_experts): runner for runner in _runners(model)}
    for name, module in _all(experts):
        gate_up, down = (product.weight for product in module.quant_method.products)
        rank, count = module.moe_config.tp_rank, module.moe_config.tp_size
        for slot in (0, 1, gate_up.experts - 1):
            e = _number(places.get(id(module)), module, slot, gate_up.experts)
            if (stack := dense.get(f"{_prefix(name)}.gate_up_proj")) is not None:
                yield gate_up.expert(slot), stack[e].T
                yield down.expert(slot), dense[f"{_prefix(name)}.down_proj"][e].T
                continue
            own = f"{_prefix(name)}.{e}"
            leaves = ("w1", "w3", "w2") if f"{own}.w1" in dense else ("gate_proj", "up_proj", "down_proj")
            gate, up, last = (dense[f"{own}.{leaf}"] for leaf in leaves)
            pair = [half.chunk(count)[rank] for half in (gate, up)]
            yield gate_up.expert(slot), torch.stack(pair, 1).flatten(0, 1)
            yield down.expert(slot), last.chunk(count, 1)[rank]


def _number(runner: Any, module: Any, slot: int, slots: int) -> int:
    """Return which of a layer's experts this GPU has at a place."""
    moved = getattr(getattr(runner, "eplb_state", None), "logical_to_physical_map", None)
    if moved is not None:
        physical = module.moe_config.moe_parallel_config.ep_rank * slots + slot
        return int((moved == physical).any(-1).nonzero())
    here = getattr(module, "expert_map", None)
    return slot if here is None else int((here == slot).nonzero())


def _is_fresh(w: QuantizedWeight, dense: torch.Tensor) -> bool:
    dense = dense.contiguous()
    made = w4gemm.quantize(dense if w.perm is None else dense[:, w.perm], w.format).repack(w.layout)
    pairs = zip(w.tensors, made.tensors, strict=True)
    return all(torch.equal(a.data.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


# --- times ------------------------------------------------------------------------------------------------------------


def warm_up(
    models: dict[str, torch.nn.Module], tokens: Sequence[int], config: Any, parts: Sequence[str] = PARTS
) -> None:
    """Call what :func:`timed` times, which takes the same arguments: Humming compiles kernels when they are called, and
    vLLM's workspace grows, here one of no engine, because CUDA graphs hold the memory of those."""
    from vllm.v1.worker import workspace

    if workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device(DEVICE))
    for _, m, variants in _points(models, tokens, parts):
        with forward_context(config, m):
            for call in itertools.chain.from_iterable(variants):
                call()


def timed(
    models: dict[str, torch.nn.Module], tokens: Sequence[int], config: Any, parts: Sequence[str] = PARTS
) -> Iterator[Row]:
    """Time the layers of several models by turns, in three rounds; generate a row for each kind of layer in ``parts``,
    number of tokens and model. config: one of the engines' VllmConfig."""
    for phase, m, variants in _points(models, tokens, parts):
        with forward_context(config, m):
            rounds = [[t.p50 for t in time_graphs(variants, replays=7)] for _ in range(_ROUNDS)]
        for name, times in zip(models, zip(*rounds, strict=True), strict=True):
            yield {"phase": phase, "batch": m, "impl": name, **spread("us", times)}


def _points(
    models: dict[str, torch.nn.Module], tokens: Sequence[int], parts: Sequence[str]
) -> Iterator[tuple[str, int, list[Calls]]]:
    """Generate each kind of layer, number of tokens, and the calls of each model."""
    linear, experts = zip(*(layers_of(model) for model in models.values()), strict=True)
    for m in tokens if linear[0] and PARTS[0] in parts else ():
        yield PARTS[0], m, [_linear_products(layers, m) for layers in linear]
    modules = [[module for _, module in _all(layers)] for layers in experts]
    runners = [_runners(model) for model in models.values()]
    routes = any(module.quant_method.is_monolithic for module in itertools.chain.from_iterable(modules))
    for m in tokens if experts[0] and PARTS[1] in parts else ():
        yield PARTS[1], m, [_expert_products(own, m, routes) for own in runners]


def forward_context(config: Any, m: int) -> Any:
    """Return vLLM's context of a step of m tokens, which Humming's experts ask for."""
    from vllm.forward_context import set_forward_context

    return set_forward_context(None, config, num_tokens=m)


def _linear_products(layers: Layers, m: int) -> Calls:
    columns = {module.input_size for _, module in _all(layers)}
    xs = {k: torch.randn(m, k, device=DEVICE).bfloat16() for k in columns}

    def call(modules: list[tuple[str, Any]]) -> None:
        for _, module in modules:
            module.quant_method.apply(module, xs[module.input_size])

    return [lambda modules=modules: call(modules) for modules in layers.values()]  # type: ignore[misc]


def _runners(model: torch.nn.Module) -> list[Any]:
    """Return what calls the router and the experts, of each layer of experts."""
    return [module for module in model.modules() if hasattr(module, "routed_experts") and hasattr(module, "router")]


def _expert_products(runners: list[Any], m: int, routes: bool) -> Calls:
    """Several calls of each layer: few tokens choose few experts, whose weights would stay in L2. routes: from the
    router's logits on, because one of the compared engines has kernels that choose experts themselves."""
    calls: Calls = []
    for draw in range(24 if m <= 4 else 12 if m <= 16 else 4):
        for runner in runners:
            module = runner.routed_experts
            g = torch.Generator(DEVICE).manual_seed(draw)
            x = torch.randn(m, module.hidden_size, device=DEVICE, generator=g).bfloat16()
            scores = torch.rand(m, module.global_num_experts, device=DEVICE, generator=g)
            if routes:
                calls.append(functools.partial(_routed, runner, x, scores.bfloat16()))
            else:
                weights, ids = scores.topk(module.top_k)
                calls.append(functools.partial(module.forward_modular, x, weights, ids.int()))
    return calls


def _routed(runner: Any, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    experts = runner.routed_experts
    if experts.quant_method.is_monolithic:
        return experts.forward_monolithic(x, logits)
    dtype = experts.quant_method.topk_indices_dtype
    return experts.forward_modular(x, *runner.router.select_experts(x, logits, topk_indices_dtype=dtype))
