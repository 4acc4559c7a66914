"""SGLang's plugin: new weights of a running engine. As test_sglang_plugin.py."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_layers import (  # noqa: F401 (two are fixtures)
    EXPERTS,
    HIDDEN,
    MIXTURES,
    QUANTIZATION,
    SOURCES,
    WIDTH,
    Drawn,
    K,
    N,
    created,
    experts_layer,
    fill,
    on_hopper,
    packed,
    registered,
    resolved,
)
from test_sglang_floats import LINEAR, PARTS, SITU, Floats, choose_marlin, runs
from test_sglang_plugin import DENSE
from w4gemm import QuantizedWeight, quantize
from w4gemm.integrations.sglang import takeover, updates

ROWS = slice(PARTS[0]), slice(PARTS[0], None)


class Layer(torch.nn.Module):
    """A merged linear layer's loader of an unquantized weight."""

    def weight_loader(self, param: Any, loaded_weight: torch.Tensor, shard: int) -> None:
        param.data[ROWS[shard]].copy_(loaded_weight)


def with_loaders(layer: Any, loader: Any) -> Any:
    """Give a layer's parameters a loader, as SGLang's own layers do."""
    for parameter in layer.parameters():
        vars(parameter)["_weight_loader"] = loader
        if not isinstance(getattr(type(parameter), "weight_loader", None), property):
            parameter.weight_loader = loader
    return layer


def whole(param: Any, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)


def send(layer: torch.nn.Module, tensors: dict[str, Any]) -> None:
    """Load tensors as SGLang's models do; of a weight's name a part for each shard."""
    for name, loaded in tensors.items():
        parameter: Any = dict(layer.named_parameters()).get(name)
        if parameter is not None:
            for shard in loaded if isinstance(loaded, dict) else ():
                parameter.weight_loader(parameter, loaded[shard], shard)
            if not isinstance(loaded, dict):
                parameter.weight_loader(parameter, loaded)


def linear(name: str, seed: int) -> tuple[Any, Any, Any]:
    """A scheme of SGLang's, its stored numbers, and what of them are its tensors."""
    if name in LINEAR:
        make, stored = LINEAR[name]
        return make(), Floats("nvfp4", seed, N, K, PARTS), stored
    make, drawn, stored = DENSE[name]
    facts = {"zero": bool((drawn.zeros != drawn.zeros[0, 0]).any()), "bits": drawn.bits}
    group = K // drawn.scales.shape[1]
    facts |= {"group": group, "act_order": not torch.equal(drawn.g_idx, torch.arange(K) // group)}
    return make(), Drawn(seed, N, K, **facts), stored


@pytest.mark.parametrize("name", [*DENSE, *LINEAR])
def test_linear_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in LINEAR:
        choose_marlin(monkeypatch)
    scheme, drawn, stored = linear(name, 50)
    layer = with_loaders(created(scheme), whole)
    layer.__class__ = Layer
    fill(layer, stored(drawn))
    scheme.process_weights_after_loading(layer)
    assert not hasattr(layer, takeover.REFUSES_UPDATES)
    (w,) = layer.w4gemm_weight
    kept = {t.data_ptr() for t in layer.buffers()}  # while SGLang has given the memory of weights back
    assert w.perm is None or w.perm.data_ptr() in kept
    places = {each: p.data_ptr() for each, p in packed(layer).items()}
    for i in range(2):
        dense = torch.randn(N, K, generator=torch.Generator().manual_seed(i)).bfloat16()
        send(layer, {"weight": {i: dense[ROWS[i]]}})
        assert torch.equal(w.dequantize(torch.float64), drawn.dense)  # until all of it has come
        send(layer, {"weight": {1 - i: dense[ROWS[1 - i]]}})
        scheme.process_weights_after_loading(layer)
        in_order = dense if w.perm is None else dense[:, w.perm]
        fresh = quantize(in_order, w.format).repack(w.layout)
        assert all(torch.equal(*pair) for pair in zip(w.tensors, fresh.tensors, strict=True))
        _, drawn, _ = linear(name, 60 + i)
        send(layer, stored(drawn))
        scheme.process_weights_after_loading(layer)
        assert torch.equal(w.dequantize(torch.float64), drawn.dense)
    assert places == {each: p.data_ptr() for each, p in packed(layer).items()}


def test_tensors_of_a_model_pass_its_loaders_once_their_ways_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, drawn, stored = linear("gptq", 50)
    layer = with_loaders(created(scheme), whole)
    layer.__class__, calls = Layer, []
    fill(layer, stored(drawn))
    scheme.process_weights_after_loading(layer)
    model: Any = torch.nn.ModuleDict({"proj": layer})

    def load_weights(weights: Any) -> None:
        for shard, tensor in weights:
            calls.append(shard)
            send(layer, {"weight": {int(shard): tensor}})

    model.load_weights = load_weights
    takeover.route_loads(model)
    for i in range(3):
        dense = torch.randn(N, K, generator=torch.Generator().manual_seed(i)).bfloat16()
        model.load_weights(weights=[(str(shard), dense[ROWS[shard]]) for shard in (1, 0)])
        (w,) = layer.w4gemm_weight
        fresh = quantize(dense if w.perm is None else dense[:, w.perm], w.format).repack(w.layout)
        assert all(torch.equal(*pair) for pair in zip(w.tensors, fresh.tensors, strict=True))
    assert calls == ["1", "0"]


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_fp8(strategy: str) -> None:
    """Its codes have the name of a dense weight."""
    scheme = resolved(f"{QUANTIZATION}.compressed_tensors.schemes.CompressedTensorsW8A16Fp8")(strategy, False)
    layer: Any = with_loaders(created(scheme), whole)
    layer.__class__, layer.params_dtype = Layer, torch.bfloat16
    codes, scales = torch.randn(N, K).to(torch.float8_e4m3fn), layer.weight_scale.data.uniform_(0.01, 0.02).clone()
    layer.weight.data.copy_(codes)
    scheme.process_weights_after_loading(layer)
    (w,) = layer.w4gemm_weight
    first, dense = w.dequantize(), torch.randn(N, K).bfloat16()
    for i, rows in enumerate(ROWS):
        send(layer, {"weight": {i: dense[rows]}})
    assert torch.equal(w.dequantize(), quantize(dense, w.format).dequantize())
    send(layer, {"weight": codes, "weight_scale": scales})
    scheme.process_weights_after_loading(layer)
    assert torch.equal(w.dequantize(), first)


def test_parts_and_numbers_that_are_not_taken() -> None:
    scheme, drawn, stored = linear("awq", 50)
    layer = with_loaders(created(scheme), whole)
    layer.__class__ = Layer
    fill(layer, stored(drawn))
    scheme.process_weights_after_loading(layer)
    send(layer, {"weight": {0: torch.zeros(PARTS[0], K).bfloat16()}})
    with pytest.raises(RuntimeError, match=r"AWQ's linear layers: weight: 66.67% of its shape \(192, 256\) was not"):
        scheme.process_weights_after_loading(layer)
    scheme.process_weights_after_loading(layer)
    send(layer, {"qweight": stored(drawn)["qweight"]})
    with pytest.raises(RuntimeError, match="AWQ's linear layers: scales: 100.00% of its shape"):
        scheme.process_weights_after_loading(layer)
    with pytest.raises(ValueError, match="linear layers: weight: wanted dense numbers, got torch.int32: the layer is"):
        send(layer, {"weight": {0: torch.zeros(PARTS[0], K, dtype=torch.int32)}})
    with pytest.raises(ValueError, match="AWQ's linear layers: scales"):
        send(layer, stored(drawn) | {"scales": torch.full_like(stored(drawn)["scales"], torch.inf)})
    assert torch.equal(layer.w4gemm_weight[0].dequantize(torch.float64), drawn.dense)


def test_models_that_take_none() -> None:
    """Of heads SGLang reads the weight itself, and of kv_b_proj it has made others."""
    scheme, drawn, stored = linear("awq", 50)
    head = created(scheme, kind="ParallelLMHead")
    fill(head, stored(drawn))
    scheme.process_weights_after_loading(head)
    assert "W4GEMM_SGLANG=off" in getattr(head, takeover.REFUSES_UPDATES)
    model, layer = torch.nn.Module(), with_loaders(created(scheme), whole)
    fill(layer, stored(drawn))
    scheme.process_weights_after_loading(layer)
    model.attention = torch.nn.Module()
    model.attention.kv_b_proj = layer
    takeover.refuse_derived(model)
    assert "SGLang derived other weights" in getattr(layer, takeover.REFUSES_UPDATES)


@pytest.mark.parametrize("graphs", [True, False])
def test_kimi_k3_takes_none_beside_graphs(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang merges weights of its layers anew each time it loads some, and graphs read the old ones."""
    config = resolved("sglang.srt.model_executor.cuda_graph_config")
    monkeypatch.setattr(config, "cuda_graph_fully_disabled", lambda: not graphs)
    layer: Any = torch.nn.Module()
    layer._merge_front_weights = None
    takeover.refuse_derived(layer)
    assert ("Kimi-K3" in getattr(layer, takeover.REFUSES_UPDATES, "")) == graphs


class Experts(torch.nn.Module):
    """SGLang's loader of experts, of which each GPU has all."""

    flips = False
    """Whether it transposes what it loads."""

    def weight_loader(self, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int) -> None:
        rows = param.data[expert_id]
        loaded = loaded_weight.t() if self.flips else loaded_weight
        (rows if shard_id == "w2" else rows.chunk(2)[shard_id == "w3"]).copy_(loaded)


SIZES = {"w13": (2 * WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}


def load_experts(layer: Any, drawn: dict[str, list[Drawn]], stored: Any) -> None:
    """Load experts under the names of the checkpoint's tensors, both shards of a product at once."""
    for product, each in drawn.items():
        for e, numbers in enumerate(each):
            for key, tensor in stored(numbers).items():
                parameter: Any = layer._parameters.get(f"{product}_{key}")
                if parameter is not None and (not parameter.numel() or parameter[e].shape == tensor.shape):
                    parameter.weight_loader(parameter, tensor, f"{product}_{key}", shard_id="w1", expert_id=e)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts(name: str) -> None:
    make, zero, stored, _ = MIXTURES[name]
    method = make()
    layer = experts_layer(method)
    layer.__class__, layer.flips = Experts, name.startswith("ct") and name != "ct fp8"
    with_loaders(layer, lambda param, loaded, weight_name, shard_id, expert_id: param.data[expert_id].copy_(loaded))
    method.create_moe_runner(layer, layer.moe_runner_config)

    def quantized(seed: int) -> dict[str, list[Drawn]]:
        drawn = {p: [Drawn(seed + e, *shape, zero) for e in range(EXPERTS)] for p, shape in SIZES.items()}
        load_experts(layer, drawn, stored)
        return drawn

    def check(drawn: dict[str, list[Drawn]]) -> None:
        for held, each in ((experts.gate_up.weight, drawn["w13"]), (experts.down.weight, drawn["w2"])):
            for e, numbers in enumerate(each):
                dense = numbers.dense if held is experts.down.weight else in_pairs(numbers.dense)
                assert torch.equal(held.expert(e).dequantize(torch.float64), dense)

    first, names = quantized(20), set(layer._parameters)
    method.process_weights_after_loading(layer)
    experts = layer.w4gemm_experts.experts
    check(first)
    assert names <= set(layer._parameters)  # SGLang looks up a parameter for each tensor of a checkpoint
    places = {each: p.data_ptr() for each, p in packed(layer).items()}
    if restore := getattr(method, "restore_weights_before_loading", None):
        restore(layer)
    dense = {p: torch.randn(EXPERTS, *shape).bfloat16() for p, shape in SIZES.items()}
    for e in range(EXPERTS):
        gate, up = dense["w13"][e].chunk(2)
        for product, shard, loaded in (("w13", "w1", gate), ("w2", "w2", dense["w2"][e]), ("w13", "w3", up)):
            parameter: Any = layer._parameters[f"{product}_weight"]
            parameter.weight_loader(parameter, loaded, f"{product}_weight", shard_id=shard, expert_id=e)
    method.process_weights_after_loading(layer)
    for held, rows in ((experts.gate_up.weight, in_pairs(dense["w13"])), (experts.down.weight, dense["w2"])):
        fresh = QuantizedWeight.stack([quantize(each, held.format) for each in rows])
        assert torch.equal(held.dequantize(), dataclasses.replace(fresh, activations=held.activations).dequantize())
    check(quantized(80))
    method.process_weights_after_loading(layer)
    assert places == {each: p.data_ptr() for each, p in packed(layer).items()}


class PaddedExperts(Experts):
    """SGLang's loader into parameters that may have more rows and columns than what comes."""

    def weight_loader(self, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int) -> None:
        rows = param.data[expert_id] if shard_id == "w2" else param.data[expert_id].chunk(2)[shard_id == "w3"]
        n, k = loaded_weight.shape
        rows[:n, :k].copy_(loaded_weight)


@pytest.mark.parametrize(("width", "padded"), [(192, False), (224, True)])
def test_experts_of_kimi_k3(width: int, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take new weights, unless SGLang has padded them: no tensor brings these zeros."""
    runs(monkeypatch, "triton_kernel")
    of = resolved(f"{QUANTIZATION}.mxfp4.Mxfp4MoEMethod")("model.layers.0.mlp.experts")
    layer = experts_layer(of, width, **SITU)
    layer.__class__ = PaddedExperts
    with_loaders(layer, layer.weight_loader)
    of.create_moe_runner(layer, layer.moe_runner_config)

    def load(seed: int) -> dict[str, list[Floats]]:
        sizes = {"w1": (width, HIDDEN), "w2": (HIDDEN, width), "w3": (width, HIDDEN)}
        drawn = {s: [Floats("mxfp4", seed + e, *size) for e in range(EXPERTS)] for s, size in sizes.items()}
        for shard, each in drawn.items():
            for e, numbers in enumerate(each):
                for leaf, tensor in (("weight", numbers.codes), ("weight_scale", numbers.scales.view(torch.uint8))):
                    name = f"w{'2' if shard == 'w2' else '13'}_{leaf}"
                    parameter: Any = layer._parameters[name]
                    parameter.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=e)
        of.process_weights_after_loading(layer)
        return drawn

    def check(drawn: dict[str, list[Floats]]) -> None:
        for e in range(EXPERTS):
            gate, down, up = (each[e].dense for each in drawn.values())
            for held, rows in ((experts.gate_up.weight, in_pairs(torch.cat([gate, up]))), (experts.down.weight, down)):
                assert torch.equal(held.expert(e).dequantize(torch.float64), rows)

    first = load(20)
    assert hasattr(layer, takeover.REFUSES_UPDATES) == padded
    if padded:
        return
    experts = layer.w4gemm_experts.experts
    check(first)
    places = {each: p.data_ptr() for each, p in packed(layer).items()}
    check(load(60))
    dense = {s: torch.randn(EXPERTS, n, k).bfloat16() for s, (n, k) in
             {"w1": (width, HIDDEN), "w2": (HIDDEN, width), "w3": (width, HIDDEN)}.items()}  # fmt: skip
    for shard, each in dense.items():
        name = "w2_weight" if shard == "w2" else "w13_weight"
        for e, rows in enumerate(each):
            parameter: Any = layer._parameters[name]
            parameter.weight_loader(parameter, rows, name, shard_id=shard, expert_id=e)
    of.process_weights_after_loading(layer)
    gates_and_ups = in_pairs(torch.cat([dense["w1"], dense["w3"]], 1))
    for held, rows in ((experts.gate_up.weight, gates_and_ups), (experts.down.weight, dense["w2"])):
        for e in range(EXPERTS):
            assert torch.equal(held.expert(e).dequantize(), quantize(rows[e], held.format).dequantize())
    assert places == {each: p.data_ptr() for each, p in packed(layer).items()}


class MovingExperts(Experts):
    """Those of which another one may be at each place."""

    metadata: Any

    def weight_loader(self, param: Any, loaded_weight: Any, weight_name: str, shard_id: str, expert_id: int) -> None:
        place = self.metadata.physical_to_logical_map_cpu[0].tolist().index(expert_id)
        super().weight_loader(param, loaded_weight, weight_name, shard_id, place)


def test_tensors_go_where_experts_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's loader asks where an expert is now (EPLB), which the way that a tensor has come before does not."""
    make, zero, stored, _ = MIXTURES["awq"]
    method = make()
    layer: Any = experts_layer(method)
    layer.__class__ = MovingExperts
    layer.metadata = metadata = SimpleNamespace(physical_to_logical_map_cpu=torch.arange(EXPERTS)[None])
    monkeypatch.setattr("sglang.srt.eplb.expert_location.get_global_expert_location_metadata", lambda: metadata)
    with_loaders(layer, lambda param, loaded, weight_name, shard_id, expert_id: param.data[expert_id].copy_(loaded))
    method.create_moe_runner(layer, layer.moe_runner_config)
    load_experts(layer, {p: [Drawn(e, *s, zero) for e in range(EXPERTS)] for p, s in SIZES.items()}, stored)
    method.process_weights_after_loading(layer)
    calls: list[str] = []

    def load_weights(weights: Any) -> None:
        for name, tensor in weights:
            calls.append(name)
            expert, shard = name.split(".")
            parameter: Any = layer._parameters["w2_weight" if shard == "w2" else "w13_weight"]
            parameter.weight_loader(parameter, tensor, "", shard_id=shard, expert_id=int(expert))

    model: Any = torch.nn.ModuleDict({"experts": layer})
    model.load_weights = load_weights
    takeover.route_loads(model)
    held, moved = layer.w4gemm_experts.experts, torch.arange(EXPERTS)
    for i in range(4):
        if i == 2:
            moved = moved.roll(1)
            metadata.physical_to_logical_map_cpu[0].copy_(moved)
        dense = {p: torch.randn(EXPERTS, *shape).bfloat16() for p, shape in SIZES.items()}
        shards = [(f"{e}.w{2 * s + 1}", rows) for e, w in enumerate(dense["w13"]) for s, rows in enumerate(w.chunk(2))]
        model.load_weights([*shards, *((f"{e}.w2", w) for e, w in enumerate(dense["w2"]))])
        for w, rows in ((held.gate_up.weight, in_pairs(dense["w13"])), (held.down.weight, dense["w2"])):
            fresh = QuantizedWeight.stack([quantize(rows[e], w.format) for e in moved.tolist()])
            assert torch.equal(w.dequantize(), dataclasses.replace(fresh, activations=w.activations).dequantize())
    assert len(calls) == 2 * 3 * EXPERTS  # of the first call, and of the first one after experts have moved
    model.load_weights([("0.w2", dense["w2"][0])])
    metadata.physical_to_logical_map_cpu[0].copy_(moved.roll(1))
    with pytest.raises(RuntimeError, match=r"experts moved \(EPLB\) when a part"):
        model.load_weights([(f"{e}.w2", w) for e, w in enumerate(dense["w2"])])
    method.process_weights_after_loading(layer)  # what came before is gone


def in_pairs(rows: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True},
        }
    },
}


class Shards(torch.nn.Module):
    """A model of a merged layer, to which tensors come under its shards' names."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, t in tensors:
            parameter: Any = dict(self.layer.named_parameters())["weight"]
            parameter.weight_loader(parameter, t, ("gate", "up").index(name))


def updated_in_a_session(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send one shard a call, between SGLang's ``begin_weight_update`` and ``end_weight_update``; then only one."""
    from sglang.srt.managers.scheduler_components import weight_updater as scheduler
    from sglang.srt.model_executor.model_runner_components import weight_updater as runner

    rank = SimpleNamespace(tp_rank=0, tp_group=SimpleNamespace(cpu_group=None))
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    for module in (scheduler, runner):
        monkeypatch.setattr(module, "get_parallel", lambda: rank)
        monkeypatch.setattr(module, "get_model", lambda: SimpleNamespace(weight_cache_mode="off"))
    model, (w,) = Shards(layer), layer.w4gemm_weight
    others = dict.fromkeys(("model_config", "update_model_fields", "recapture_cuda_graph", "get_model_runner"))
    here: Any = {"tp_rank": 0, "device": "cpu", "gpu_id": 0, "custom_weight_loaders": {}, "get_model": lambda: model}
    updater = SimpleNamespace(weight_updater=runner.WeightUpdater(**here, **others))
    worker = SimpleNamespace(
        weight_update_runners=lambda: [("target", updater)], deserialize_own_rank=lambda tensors: tensors
    )
    manager = scheduler.SchedulerWeightUpdaterManager(
        tp_worker=worker,
        draft_worker=None,
        memory_saver_adapter=None,
        flush_cache=lambda empty_cache: True,
        is_fully_idle=lambda: True,
        scheduler=SimpleNamespace(record_weight_version_change=lambda new_version: None),
    )

    def send_shards(*tensors: tuple[str, torch.Tensor]) -> Any:
        facts = {"selector": "all", "load_format": None, "weight_version": None, "flush_cache": True}
        request = SimpleNamespace(serialized_named_tensors=tensors, torch_empty_cache=False, **facts)
        return manager.update_weights_from_tensor(request)

    dense, places = torch.randn(N, K).bfloat16(), [t.data_ptr() for t in w.tensors]
    shards = [(name, dense[rows]) for name, rows in zip(("gate", "up"), ROWS, strict=True)]
    before = w.dequantize()
    assert not send_shards(*shards).success and torch.equal(w.dequantize(), before)
    assert manager.begin_weight_update(SimpleNamespace(selector="all")).success
    assert all(send_shards(each).success for each in shards)
    assert manager.end_weight_update(None).success
    assert torch.equal(w.dequantize(), quantize(dense, w.format).dequantize())
    assert places == [t.data_ptr() for t in w.tensors]
    manager.begin_weight_update(SimpleNamespace(selector="all"))
    assert send_shards(("up", dense[ROWS[1]] * 2)).success
    answer = updates.answer_with_errors(type(manager).end_weight_update, manager, None)
    assert not answer.success and "weight: 33.33% of its shape" in answer.message and manager._session is None
    assert torch.equal(w.dequantize(), quantize(dense, w.format).dequantize())
    manager.begin_weight_update(SimpleNamespace(selector="all"))
    assert all(send_shards(each).success for each in shards)
    assert updates.answer_with_errors(type(manager).end_weight_update, manager, None).message == "Success"


@pytest.mark.skipif(not SOURCES, reason="SGLANG_SOURCES names no sources of SGLang")
def test_sglangs_own_layers_load_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merged layer and its loaders, dense and quantized, in the order in which SGLang's models call them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    config = resolved(f"{QUANTIZATION}.compressed_tensors.compressed_tensors.CompressedTensorsConfig")
    layer = resolved("sglang.srt.layers.linear.MergedColumnParallelLinear")(
        K,
        list(PARTS),
        bias=False,
        params_dtype=torch.bfloat16,
        quant_config=config.from_config(COMPRESSED),
        prefix="model.layers.0.mlp.gate_up_proj",
        parallel_group="replicated",
    )

    def load(seed: int) -> torch.Tensor:
        """Send both shards quantized; return their numbers."""
        drawn = [Drawn(seed + i, n, K, False) for i, n in enumerate(PARTS)]
        for i, each in enumerate(drawn):
            for name, t in each.compressed().items():
                parameter: Any = dict(layer.named_parameters()).get(name)
                if parameter is not None:
                    parameter.weight_loader(parameter, t, i)
        layer.quant_method.process_weights_after_loading(layer)
        return torch.cat([each.dense for each in drawn])

    first, (w,) = load(0), layer.w4gemm_weight
    assert torch.equal(w.dequantize(torch.float64), first)
    updated_in_a_session(layer, monkeypatch)
    dense = torch.randn(N, K).bfloat16()
    for i, rows in enumerate(ROWS):
        parameter: Any = dict(layer.named_parameters())["weight"]
        parameter.weight_loader(parameter, dense[rows], i)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(w.dequantize(), quantize(dense, w.format).dequantize())
    assert torch.equal(load(5), w.dequantize(torch.float64))


@pytest.mark.skipif(not SOURCES, reason="SGLANG_SOURCES names no sources of SGLang")
@pytest.mark.parametrize("name", ["ct", "gptq", "w4afp8"])
def test_sglangs_own_loader_of_experts(name: str) -> None:
    """It transposes each matrix of some methods, also dense ones."""
    make, zero, stored, _ = MIXTURES[name]
    method = make()
    layer: Any = experts_layer(method)
    layer.__class__ = resolved("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE")
    layer.quant_method = method if name == "w4afp8" else resolved(f"{QUANTIZATION}.base_config.FusedMoEMethodBase")
    layer.quant_config, layer.uses_expert_location, layer._expert_storage_rank = None, False, 0
    layer._num_local_routed = layer._num_global_routed = EXPERTS
    layer._has_fused_shared, layer.use_flashinfer_trtllm_moe, layer.use_triton_kernels = False, False, False
    layer.moe_tp_rank, layer.use_presharded_weights = 0, False
    layer.num_fused_shared_experts = 0
    with_loaders(layer, lambda param, loaded, weight_name, shard_id, expert_id: param.data[expert_id].copy_(loaded))
    method.create_moe_runner(layer, layer.moe_runner_config)
    load_experts(layer, {p: [Drawn(e, *s, zero) for e in range(EXPERTS)] for p, s in SIZES.items()}, stored)
    method.process_weights_after_loading(layer)
    dense = {p: torch.randn(EXPERTS, *shape).bfloat16() for p, shape in SIZES.items()}
    for e in range(EXPERTS):
        gate, up = dense["w13"][e].chunk(2)
        for product, shard, loaded in (("w13", "w1", gate), ("w2", "w2", dense["w2"][e]), ("w13", "w3", up)):
            parameter: Any = dict(layer.named_parameters())[f"{product}_weight"]
            parameter.weight_loader(parameter, loaded, f"{product}_weight", shard_id=shard, expert_id=e)
    method.process_weights_after_loading(layer)
    held = layer.w4gemm_experts.experts
    for w, rows in ((held.gate_up.weight, in_pairs(dense["w13"])), (held.down.weight, dense["w2"])):
        for e in range(EXPERTS):
            assert torch.equal(w.expert(e).dequantize(), quantize(rows[e], w.format).dequantize())


def test_numbers_that_are_refused_are_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's process ends with an exception in a call that brings tensors."""
    scheme, drawn, stored = linear("awq", 50)
    layer = with_loaders(created(scheme), whole)
    layer.__class__ = Layer
    fill(layer, stored(drawn))
    scheme.process_weights_after_loading(layer)
    model: Any = torch.nn.ModuleDict({"proj": layer})
    model.load_weights = lambda weights: [send(layer, {"weight": {i: t}}) for i, t in weights]
    takeover.route_loads(model)
    dense = torch.randn(N, K).bfloat16()
    dense[3, 5] = torch.nan
    parts = [(i, dense[rows]) for i, rows in enumerate(ROWS)]

    def update(self: Any, recv_req: Any) -> Any:
        model.load_weights(recv_req)
        return SimpleNamespace(success=True, message="Success")

    answer = updates.answer_with_errors(update, SimpleNamespace(tp_cpu_group=None), parts)
    assert not answer.success and "AWQ's linear layers: weight: " in answer.message and "finite" in answer.message
    with pytest.raises(ValueError, match="finite"):
        model.load_weights(parts)
    assert updates.answer_with_errors(update, None, [(i, torch.zeros_like(t)) for i, t in parts]).success


def test_nothing_is_copied_over_the_parameters_of_packed_layers() -> None:
    """Which are empty, so that SGLang's process would end."""
    scheme, drawn, stored = linear("awq", 51)
    layer = with_loaders(created(scheme), whole)
    layer.__class__ = Layer
    fill(layer, stored(drawn))
    model = torch.nn.ModuleDict({"proj": layer})
    updater = SimpleNamespace(get_model=lambda: model)

    def update(self: Any, named_tensors: Any, load_format: str | None) -> tuple[bool, str]:
        return True, f"{len(named_tensors)} {load_format}"

    assert updates.refuse_direct(update, updater, [1], "direct") == (True, "1 direct")
    scheme.process_weights_after_loading(layer)
    success, message = updates.refuse_direct(update, updater, [1], "direct")
    assert not success and "load_format='direct'" in message
    for load_format in (None, "flattened_bucket"):
        assert updates.refuse_direct(update, updater, [1], load_format) == (True, f"1 {load_format}")


def test_an_error_on_any_rank_is_one_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an error that is none of a layer's goes on."""
    here, there = "down: 50% was not loaded", "up: 50% was not loaded"

    def gather(into: list[Any], errors: list[str], group: Any) -> None:
        into[:] = [[there], errors]

    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda *group, value=value: value)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    manager = SimpleNamespace(tp_cpu_group="ranks")
    for own, told in ((SimpleNamespace(success=True, message="Success"), there),
                      (SimpleNamespace(success=False, message=here), f"{there}; {here}")):  # fmt: skip
        answer = updates.answer_with_errors(lambda self, recv_req, own=own: own, manager, None)
        assert (answer.success, answer.message) == (False, told)

    def fail(self: Any, recv_req: Any) -> Any:
        raise ValueError("another")

    with pytest.raises(ValueError, match="another"):
        updates.answer_with_errors(fail, manager, None)


def test_memory_is_taken_away_when_the_gpu_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang itself takes it away while the GPU may still copy from it."""
    adapter, order = resolved("sglang.srt.utils.torch_memory_saver_adapter"), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("done"))
    saver = SimpleNamespace(pause=lambda tag: order.append(tag))
    monkeypatch.setattr(adapter, "_memory_saver", saver, raising=False)
    adapter._TorchMemorySaverAdapterReal().pause("weights")
    assert order == ["done", "weights"]
