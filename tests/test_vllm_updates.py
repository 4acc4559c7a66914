"""Dense weights that come for packed layers of a running vLLM, against a stub of its interfaces, on the CPU.

``test_vllm_sources.py`` does the same with vLLM's own loaders and reloading.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch

import w4gemm
from test_vllm_dense import Case, in_words, make
from vllm_experts import CASES, EXPERTS, GPT_OSS, HIDDEN, MXFP4, WIDTH, inputs, mixture
from vllm_parts import part_fixture
from w4gemm import QuantizedWeight, quantize
from w4gemm.integrations.engines import updates as updating
from w4gemm.integrations.vllm.updates import ReloadedUpdate
from w4gemm.kernels import workspace
from w4gemm.tuning.random_weight import random_components

N, K = 64, 128
BFLOAT16 = torch.bfloat16

dense = part_fixture("dense")
experts = part_fixture("experts")


class Layer(torch.nn.Module):
    """A gate and an up projection, on the second of two GPUs."""

    def weight_loader(self, param: Any, loaded_weight: torch.Tensor, shard: int) -> None:
        param.data.chunk(2)[shard].copy_(loaded_weight.chunk(2)[1])


def made(pack: bool = True) -> tuple[Any, Layer]:
    """A layer of GPTQ as vLLM makes and loads it, and its method."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    layer, config = Layer(), get_quantization_config("gptq")(4, 128, False, True)
    method = config.get_quant_method(layer, "mlp.gate_up_proj")
    method.create_weights(layer, K, [N // 2, N // 2], K, 2 * N, BFLOAT16)
    load_quantized(layer)
    if pack:
        method.process_weights_after_loading(layer)
    return method, layer


def load_quantized(layer: Layer) -> None:
    codes, scales, *_ = random_components(Case("gptq").format, N, K, 0)
    tensors = {
        "qweight": in_words(codes).t(),
        "scales": scales.t(),
        "qzeros": torch.full((1, N // 8), 0x77777777).int(),
    }
    for name, t in tensors.items():
        getattr(layer, name).data.copy_(t)


def send(layer: Layer, parts: torch.Tensor, *shards: int) -> None:
    """Load dense parts as vLLM's models do. parts: (2, N, K), of both GPUs."""
    for shard in shards:
        parameter = dict(layer.named_parameters())["weight"]
        parameter.weight_loader(parameter, parts[shard], shard)


def fresh(parts: torch.Tensor) -> QuantizedWeight:
    """The weight of this GPU, quantized anew."""
    return quantize(parts[:, N // 2 :].flatten(0, 1), "int4_g128").repack()


def numbers(i: int) -> torch.Tensor:
    return torch.randn(2, N, K, generator=torch.Generator().manual_seed(i), dtype=BFLOAT16)


def test_two_hundred_updates(dense: ModuleType) -> None:
    """Each is what is multiplied by as soon as its last part has come; tensors stay where they are."""
    method, layer = made()
    held, x = dict(layer.named_parameters()), torch.randn(3, K, dtype=BFLOAT16)
    addresses = {name: p.data_ptr() for name, p in held.items()}
    for i in range(200):
        parts, before = numbers(i), method.kernel.apply_weights(layer, x)
        send(layer, parts, i % 2)
        assert torch.equal(method.kernel.apply_weights(layer, x), before)
        send(layer, parts, 1 - i % 2)
        assert torch.equal(method.kernel.apply_weights(layer, x), w4gemm.linear(x, fresh(parts)))
    now = dict(layer.named_parameters())
    assert now.keys() == held.keys() and all(p is held[name] for name, p in now.items())
    assert addresses == {name: p.data_ptr() for name, p in now.items()}


class Reload:
    """vLLM's layerwise reloading of a layer, in its steps."""

    def __init__(self, method: Any, layer: Layer, unpacked: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        self.method, self.layer, self.info = method, layer, get_layerwise_info(layer)
        self.info.kernel_tensors = dict(layer._parameters), dict(layer._buffers)
        self.info.load_numel, self.info.load_numel_total = 0, sum(p.numel() for p in unpacked.values())
        self.replace(unpacked)

    def replace(self, parameters: dict[str, torch.Tensor]) -> None:
        for name in [*self.layer._parameters, *self.layer._buffers]:
            delattr(self.layer, name)
        for name, parameter in parameters.items():
            self.layer.register_parameter(name, parameter)

    def send(self, parts: torch.Tensor, *shards: int) -> None:
        for shard in shards:
            parameter, part = dict(self.layer.named_parameters())["weight"], parts[shard]
            arguments = inspect.signature(parameter.weight_loader).bind(parameter, part, shard)
            self.info.loaded_weights.append(("weight", arguments))
            parameter.weight_loader(parameter, part, shard)

    def finish(self) -> None:
        if self.info.load_numel:
            self.method.process_weights_after_loading(self.layer)
        held, self.info.load_numel_total = self.info.kernel_tensors[0], None
        for name, parameter in held.items():
            parameter.data.copy_(getattr(self.layer, name))
        self.replace(held)
        self.info.kernel_tensors = None


def unpacked(layer: Layer) -> dict[str, Any]:
    """The parameters that a layer is loaded into, as vLLM makes them for a reload."""
    copies = {}
    for name, parameter in layer._parameters.items():
        copies[name] = torch.nn.Parameter(torch.empty_like(parameter.data), requires_grad=False)
        copies[name].__class__ = type(parameter)
        vars(copies[name]).update(vars(parameter))
    return copies


def test_updates_in_vllms_reloading(dense: ModuleType) -> None:
    method, layer = made(pack=False)
    form = unpacked(layer)
    method.process_weights_after_loading(layer)
    held, x = dict(layer.named_parameters()), torch.randn(3, K, dtype=BFLOAT16)
    first = method.kernel.apply_weights(layer, x)
    for i in range(3):
        reload = Reload(method, layer, form)
        reload.send(numbers(i), 0, 1)
        assert not reload.info.loaded_weights, "vLLM would keep the model's dense numbers until the end"
        reload.finish()
        assert all(p is held[name] for name, p in layer.named_parameters())
        assert torch.equal(method.kernel.apply_weights(layer, x), w4gemm.linear(x, fresh(numbers(i))))
    reload = Reload(method, layer, form)  # quantized numbers again
    load_quantized(layer)
    reload.info.load_numel = 1
    reload.finish()
    assert torch.equal(method.kernel.apply_weights(layer, x), first)


def test_a_part_alone_is_an_error_at_the_end_of_a_reload(dense: ModuleType) -> None:
    method, layer = made(pack=False)
    form = unpacked(layer)
    method.process_weights_after_loading(layer)
    held, x = dict(layer.named_parameters()), torch.randn(3, K, dtype=BFLOAT16)
    before = method.kernel.apply_weights(layer, x)
    reload = Reload(method, layer, form)
    reload.send(numbers(0), 1)
    with pytest.raises(RuntimeError, match=r"mlp.gate_up_proj: weight: 50.00% of its shape \(64, 128\) was not loaded"):
        reload.finish()
    assert dict(layer.named_parameters()).keys() == held.keys()
    assert torch.equal(method.kernel.apply_weights(layer, x), before)
    reload = Reload(method, layer, form)
    reload.send(numbers(0), 0)
    reload.info.loaded_weights.append(("qweight", None))
    with pytest.raises(RuntimeError, match="mlp.gate_up_proj: qweight: wanted dense or quantized numbers, got both"):
        reload.finish()


def test_what_is_refused(dense: ModuleType) -> None:
    _, layer = made(pack=False)
    with pytest.raises(ValueError, match="mlp.gate_up_proj: weight: dense numbers came .* it holds 0 packed weights"):
        send(layer, numbers(0), 0)
    _, layer = made()
    with pytest.raises(ValueError, match=r"mlp.gate_up_proj: weight: wanted dense numbers, got torch.int32: the layer"):
        send(layer, torch.zeros(2, N, K, dtype=torch.int32), 0)
    parts = numbers(0)
    parts[1, N - 1, 3] = torch.nan
    with pytest.raises(ValueError, match="mlp.gate_up_proj: weight: weight: wanted finite values"):
        send(layer, parts, 0, 1)


def test_a_packed_layer_that_is_processed_again(dense: ModuleType) -> None:
    """As verl has vLLM do when all numbers have come, for what attention derives from weights."""
    method, layer = made()
    kept = dict(layer.named_parameters())
    parts = numbers(1)
    for count in range(2):
        send(layer, parts, *range(2 * count))
        method.process_weights_after_loading(layer)
        assert dict(layer.named_parameters()).keys() == kept.keys() and layer.qweight is kept["qweight"]
    assert torch.equal(method.kernel.weight(layer._parameters).dequantize(), fresh(parts).dequantize())
    send(layer, numbers(2), 0)
    with pytest.raises(RuntimeError, match=r"mlp.gate_up_proj: weight: 50.00% .* was not loaded"):
        method.process_weights_after_loading(layer)
    assert torch.equal(method.kernel.weight(layer._parameters).dequantize(), fresh(parts).dequantize())


def test_a_packed_layer_is_in_no_cache_of_weights(dense: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 hands what one process has packed to others."""
    own = type(made(pack=False)[0])
    monkeypatch.setattr(own, "supports_pre_processed_weights", True, raising=False)
    method, _ = made()
    assert not method.supports_pre_processed_weights and own.supports_pre_processed_weights
    assert isinstance(method, own) and type(method).__name__ == own.__name__


@pytest.mark.parametrize("side", ["input", "output"])
def test_a_layer_whose_x_is_rotated_takes_no_dense_numbers(
    dense: ModuleType, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    """compressed-tensors rotates weights too, which a trainer does not know."""
    method, _ = made(pack=False)
    monkeypatch.setattr(type(method), f"{side}_tfms", {0: "hadamard"}, raising=False)
    _, layer = made()
    with pytest.raises(ValueError, match="mlp.gate_up_proj: weight: dense numbers came for it, but vLLM transforms"):
        send(layer, numbers(0), 0)


def test_a_layer_that_is_left_to_vllm_has_no_parameter_more(dense: ModuleType) -> None:
    method, layer = made(pack=False)
    own = type("Own", (), {"process_weights_after_loading": lambda self, layer: seen.append(set(layer._parameters))})()
    seen: list[set[str]] = []
    method.kernel.next_kernel = lambda: own
    method.kernel.numbers = lambda layer: (_ for _ in ()).throw(ValueError("no"))
    method.process_weights_after_loading(layer)
    assert seen == [{"qweight", "scales", "qzeros"}] == [set(layer._parameters)]


def test_act_order_after_a_sleep_that_kept_no_weights(dense: ModuleType) -> None:
    """vLLM's level 2 keeps buffers, of which the order of columns is one."""
    kernel, layer, w = make(Case("gptq", 64, act_order=True))
    kernel.process_weights_after_loading(layer)
    layer.weight_loader = lambda param, loaded: param.data.copy_(loaded)
    ReloadedUpdate("weight", "proj", kernel.weight).open(layer)
    for parameter in layer.parameters():
        parameter.data.fill_(-1)
    dense_numbers = torch.randn(w.shape, dtype=BFLOAT16)
    layer.weight.weight_loader(layer.weight, dense_numbers)
    now = kernel.weight(layer._parameters | layer._buffers)
    assert w.perm is not None and torch.equal(now.perm, w.perm)
    assert torch.equal(now.dequantize()[:, w.perm], quantize(dense_numbers[:, w.perm], "int4_g64").dequantize())


def test_experts_of_this_gpu(experts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert comes, one part at a time; vLLM's loader takes those that are here. What it copies is known, so that
    no look at the GPU's memory is needed."""
    looks: list[torch.Tensor] = []
    monkeypatch.setattr(updating.DenseUpdate, "unloaded", staticmethod(looks.append))
    here = EXPERTS // 2
    expert_map = torch.tensor([-1] * (EXPERTS - here) + list(range(here)), dtype=torch.int32)
    layer = mixture(CASES[0], num_local_experts=here, expert_map=expert_map).layer
    method = layer.quant_method
    updates = method.dense_updates("experts")

    def weight_loader(param: Any, loaded: torch.Tensor, name: str, shard_id: str, expert_id: int) -> bool:
        local = int(expert_map[expert_id])
        if local >= 0:
            rows = param.data[local]
            (rows if shard_id == "w2" else rows.chunk(2)[shard_id == "w3"]).copy_(loaded)
        return local >= 0

    layer.weight_loader = weight_loader
    for update in updates:
        update.open(layer)
    shapes = {"w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}
    parts = {shard: torch.randn(EXPERTS, *shape, dtype=BFLOAT16) for shard, shape in shapes.items()}
    for shard in parts:
        for e in range(EXPERTS):
            name = "w2_weight" if shard == "w2" else "w13_weight"
            parameter = getattr(layer, name)
            took = parameter.weight_loader(parameter, parts[shard][e], name, shard_id=shard, expert_id=e)
            assert took == (e >= EXPERTS - here)
    assert not looks
    method.process_weights_after_loading(layer)  # as verl has vLLM do
    pairs = torch.stack((parts["w1"], parts["w3"]), 2).flatten(1, 2)
    for product, rows in zip(method.products, (pairs, parts["w2"]), strict=True):
        for e in range(here):
            expected = quantize(rows[EXPERTS - here + e], "int4_g128").dequantize()
            assert torch.equal(product.weight.expert(e).dequantize(), expected)
    x, weights, ids = inputs(BFLOAT16)
    assert layer.forward_modular(x, weights, ids).isfinite().all()


def rounded(dense: torch.Tensor) -> torch.Tensor:
    """The numbers of experts in MXFP4."""
    return torch.stack([quantize(one, "mxfp4").dequantize() for one in dense])


@pytest.mark.parametrize("one_by_one", [False, True])
def test_experts_of_gpt_oss(experts: ModuleType, one_by_one: bool) -> None:
    """vLLM's model views dense numbers as if they were packed, and biases stay rows in pairs."""
    layer = mixture(GPT_OSS).layer
    method = layer.quant_method
    for update in method.dense_updates("experts"):
        update.open(layer)
    layer._map_global_expert_id_to_local_expert_id = lambda e: e
    layer._load_unquantized_expert = lambda data, loaded, shard_id: data.copy_(loaded.t())
    bias = layer.w13_bias.clone()
    sizes = {"w13": (HIDDEN, 2 * WIDTH), "w2": (WIDTH, HIDDEN)}
    dense = {product: torch.randn(EXPERTS, *size, dtype=BFLOAT16) for product, size in sizes.items()}
    for product, t in dense.items():
        parameter = getattr(layer, f"{product}_weight")
        load = functools.partial(parameter.weight_loader, parameter, weight_name=f"{product}_weight")
        if one_by_one:
            for e in range(EXPERTS):
                assert load(t[e], shard_id=f"gpt_oss_{product}", expert_id=e, return_success=True)
        else:
            shape = (EXPERTS, 2 * WIDTH, -1) if product == "w13" else (EXPERTS, -1, WIDTH // 2)
            load(t.view(shape), shard_id=None, expert_id=None)
    for product, t in zip(method.products, dense.values(), strict=True):
        assert torch.equal(product.weight.dequantize(), rounded(t.mT.contiguous()))
    assert torch.equal(layer.w13_bias, bias)
    half = dense["w13"].view(EXPERTS, 2 * WIDTH, -1)[:, WIDTH:]  # of the second of two GPUs
    with pytest.raises(ValueError, match=r"experts: w13_weight: wanted \d whole experts of .* use --enable-expert"):
        layer.w13_weight.weight_loader(layer.w13_weight, half, weight_name="", shard_id=None, expert_id=None)


def test_experts_with_features_that_a_model_adds(experts: ModuleType) -> None:
    layer, loaded = mixture(MXFP4).layer, WIDTH - 32
    method = layer.quant_method
    layer.moe_config.intermediate_size_per_partition_unpadded = loaded
    for update in method.dense_updates("experts"):
        update.open(layer)

    def weight_loader(param: Any, loaded_weight: torch.Tensor, shard: str, expert_id: int) -> None:
        rows = param.data[expert_id]
        part = rows[:, :loaded] if shard == "w2" else rows.chunk(2)[shard == "w3"][:loaded]
        part.copy_(loaded_weight)

    layer.weight_loader = weight_loader
    shapes = {"w1": (loaded, HIDDEN), "w3": (loaded, HIDDEN), "w2": (HIDDEN, loaded)}
    parts = {shard: torch.randn(EXPERTS, *shape, dtype=BFLOAT16) for shard, shape in shapes.items()}
    for shard, t in parts.items():
        parameter = layer.w2_weight if shard == "w2" else layer.w13_weight
        for e in range(EXPERTS):
            parameter.weight_loader(parameter, t[e], shard, e)
    pairs = torch.stack((parts["w1"], parts["w3"]), 2).flatten(1, 2)
    both, down = (product.weight.dequantize() for product in method.products)
    assert torch.equal(both[:, : 2 * loaded], rounded(pairs))
    assert torch.equal(down[..., :loaded], rounded(parts["w2"]))
    assert not both[:, 2 * loaded :].any() and not down[..., loaded:].any()


def test_flags_of_either_mode_are_cleared(monkeypatch):
    with torch.inference_mode():
        made = torch.ones(4, dtype=torch.int32)
    monkeypatch.setattr(workspace, "_allocations", [made, torch.ones(4, dtype=torch.int32)])
    workspace.clear()
    assert not any(flags.any() for flags in workspace._allocations)


def test_scales_of_a_cache_when_all_layers_are_processed_once_more(dense: ModuleType) -> None:
    """As verl has vLLM do behind dense numbers; vLLM's method of compressed-tensors looks for what it has deleted."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    layer: Any = torch.nn.Module()
    layer.k_scale = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)
    method = get_quantization_config("compressed-tensors")({}).get_quant_method(layer, "model.layers.0.self_attn.attn")
    for _ in range(2):
        method.process_weights_after_loading(layer)
    assert layer._k_scale == 2 and not hasattr(layer, "k_scale")
