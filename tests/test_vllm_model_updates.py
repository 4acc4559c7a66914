"""Dense weights for a whole model, by vLLM's own loader, and experts that vLLM moves: with ``VLLM_SOURCES``, see
vllm_sources.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if "VLLM_SOURCES" not in os.environ:
    pytest.skip("VLLM_SOURCES does not name vLLM's sources", allow_module_level=True)

from test_vllm_sources import (  # noqa: F401
    Packing,
    SafetensorsFolder,
    fill_experts,
    kernel_in,
    loaded,
    model_named,
    plugin,
    quantization,
    reloading,
    routed_experts,
    tiny,
    write,
)
from w4gemm import quantize
from w4gemm.integrations.engines import updates
from w4gemm.integrations.vllm import moving

LAYER = "model.layers.0"
EXPERTS = f"{LAYER}.mlp.experts"


class Tree(torch.nn.Module):
    """A model as vLLM's loader sees it: linear layers and experts that a checkpoint was loaded into."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

        super().__init__()
        hidden, heads = config["hidden_size"], [config[f"num_{kind}_heads"] for kind in ("attention", "key_value")]
        options: dict[str, Any] = {"bias": False, "quant_config": quantization(folder)}
        columns = config["head_dim"] * heads[0]
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Module()])})
        block = torch.nn.Module()
        qkv = QKVParallelLinear(hidden, config["head_dim"], *heads, prefix=f"{LAYER}.self_attn.qkv_proj", **options)
        o = RowParallelLinear(columns, hidden, prefix=f"{LAYER}.self_attn.o_proj", **options)
        block.self_attn = torch.nn.ModuleDict({"qkv_proj": qkv, "o_proj": o})
        block.mlp = torch.nn.ModuleDict({"experts": routed_experts(config, options["quant_config"], EXPERTS)})
        self.model["layers"][0] = block
        self.again = reloading(self)
        loaded(qkv, folder, f"{LAYER}.self_attn", {"q_proj": "q", "k_proj": "k", "v_proj": "v"})
        loaded(o, folder, f"{LAYER}.self_attn", {"o_proj": None})
        experts = block.mlp["experts"]
        fill_experts(experts, folder, EXPERTS)
        experts.quant_method.process_weights_after_loading(experts)

    def load_weights(self, weights: Any) -> set[str]:
        from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

        stacked: dict[str, Any] = {f".{leaf}_proj": (".qkv_proj", leaf) for leaf in "qkv"}
        return AutoWeightsLoader(self).load_weights(weights, mapper=WeightsMapper(orig_to_new_stacked=stacked))

    def packed(self) -> dict[str, Any]:
        """The packed weights, by the names of the numbers that they are made of."""
        block = self.model["layers"][0]
        dense = {f"self_attn.{name[:-5]}": layer for name, layer in block.self_attn.items()}
        parts = {name: kernel_in(layer).weight(layer._parameters | layer._buffers) for name, layer in dense.items()}
        gate_up, down = (product.weight for product in block.mlp["experts"].quant_method.products)
        for e in range(gate_up.experts):
            parts |= {f"mlp.experts.{e}.gate_up": gate_up.expert(e), f"mlp.experts.{e}.down": down.expert(e)}
        return parts


def sent(config: Mapping[str, Any], i: int) -> dict[str, torch.Tensor]:
    """Dense numbers of a layer's matrices."""
    g = torch.Generator().manual_seed(i)
    hidden, width, head = (config[name] for name in ("hidden_size", "moe_intermediate_size", "head_dim"))
    rows = {"q": head * config["num_attention_heads"], **dict.fromkeys("kv", head * config["num_key_value_heads"])}
    shapes = {f"self_attn.{leaf}": (n, hidden) for leaf, n in rows.items()} | {"self_attn.o": (hidden, rows["q"])}
    for e in range(config["num_experts"]):
        shapes |= {f"mlp.experts.{e}.{leaf}": (width, hidden) for leaf in ("gate", "up")}
        shapes[f"mlp.experts.{e}.down"] = hidden, width
    return {name: torch.randn(shape, generator=g).bfloat16() for name, shape in shapes.items()}


def named(matrices: Mapping[str, torch.Tensor], as_fused: bool) -> list[tuple[str, torch.Tensor]]:
    """The tensors of an unquantized checkpoint. as_fused: all experts of a product are one."""
    experts = {name: t for name, t in matrices.items() if as_fused and ".experts." in name}
    tensors = [(f"{LAYER}.{name}_proj.weight", t) for name, t in matrices.items() if name not in experts]
    if as_fused:
        gate, up, down = (
            torch.stack([t for name, t in experts.items() if name.endswith(leaf)]) for leaf in ("gate", "up", "down")
        )
        tensors += [(f"{EXPERTS}.gate_up_proj", torch.cat((gate, up), 1)), (f"{EXPERTS}.down_proj", down)]
    return tensors


def fresh(name: str, matrices: Mapping[str, torch.Tensor], format: Any) -> Any:
    if name.endswith("qkv"):
        rows = torch.cat([matrices[f"self_attn.{leaf}"] for leaf in "qkv"])
    elif name.endswith("gate_up"):
        rows = torch.stack([matrices[name.replace("gate_up", leaf)] for leaf in ("gate", "up")], 1).flatten(0, 1)
    else:
        rows = matrices[name]
    return quantize(rows, format).repack()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which layers vLLM's own loaders have loaded numbers of."""
    calls: list[str] = []
    own = updates.DenseUpdate.load

    def load(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(self.what)
        return own(self, *args, **options)

    monkeypatch.setattr(updates.DenseUpdate, "load", load)
    return calls


@pytest.mark.parametrize(
    ("format", "as_fused", "by_reload"),
    [(f, fused, fused == (f == "gptq-int4-g64")) for f in ("gptq-int4-g64", "ct-nvfp4") for fused in (False, True)],
)
def test_tensors_pass_vllms_loaders_once_their_ways_are_known(
    format: str, as_fused: bool, by_reload: bool, tmp_path: Path, seen: list[str]
) -> None:
    """By turns in a session of vLLM's reloading and without; the last ones in two calls, and all in another order.
    by_reload: the first ones are in a session."""
    model = tiny(model_named("qwen3-30b-a3b"))
    write(model, Packing.parse(format), tmp_path)
    tree = Tree(tmp_path, model.config)
    addresses = {name: p.data_ptr() for name, p in tree.named_parameters()}
    for i in range(5):
        matrices = sent(model.config, i)
        items = named(matrices, as_fused)
        if i == 4:
            items.reverse()
            half = len(items) // 2
            assert f"{EXPERTS}.w13_weight" in tree.load_weights(items[:half]) | tree.load_weights(items[half:])
        elif i % 2 != by_reload:
            tree.again(lambda items=items: tree.load_weights(items))
        else:
            assert {f"{LAYER}.self_attn.qkv_proj.weight", f"{EXPERTS}.w2_weight"} <= tree.load_weights(items)
        assert bool(seen) == (i == 0), "vLLM has loaded a tensor that it had loaded before"
        seen.clear()
        assert {name: p.data_ptr() for name, p in tree.named_parameters()} == addresses
        for name, w in tree.packed().items():
            pairs = zip(w.tensors, fresh(name, matrices, w.format).tensors, strict=True)
            assert all(torch.equal(a.data.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs), (i, name)


def test_a_tensor_that_a_model_also_copies_elsewhere(tmp_path: Path) -> None:
    """As it is, or in a session of vLLM's reloading, into a dense parameter of a module that loads its own tensors."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    class Block(torch.nn.Module):
        def __init__(self, block: torch.nn.Module) -> None:
            super().__init__()
            self.self_attn, self.mlp = block.self_attn, block.mlp
            rows, columns = block.self_attn["o_proj"].output_size, block.self_attn["o_proj"].input_size
            self.copy = torch.nn.Parameter(torch.zeros(rows, columns).bfloat16(), requires_grad=False)

        def load_weights(self, weights: Any) -> set[str]:
            o_proj = self.self_attn["o_proj"]
            for name, tensor in weights:
                assert name == "self_attn.o_proj.weight"
                o_proj.weight.weight_loader(o_proj.weight, tensor)
                getattr(self.copy, "weight_loader", default_weight_loader)(self.copy, tensor)
            return {"self_attn.o_proj.weight", "copy"}

    model = tiny(model_named("qwen3-30b-a3b"))
    write(model, Packing.parse("gptq-int4-g64"), tmp_path)
    tree = Tree(tmp_path, model.config)
    block = tree.model["layers"][0] = Block(tree.model["layers"][0])
    again = reloading(tree)
    for i in range(4):
        dense = sent(model.config, i)["self_attn.o"]
        items = [(f"{LAYER}.self_attn.o_proj.weight", dense)]
        again(lambda items=items: tree.load_weights(items)) if i % 2 else tree.load_weights(items)
        w = tree.packed()["self_attn.o"]
        assert torch.equal(w.dequantize(), quantize(dense, w.format).dequantize())
        assert torch.equal(block.copy, dense)


def test_what_ends_an_update(tmp_path: Path) -> None:
    model = tiny(model_named("qwen3-30b-a3b"))
    write(model, Packing.parse("gptq-int4-g64"), tmp_path)
    tree, matrices = Tree(tmp_path, model.config), sent(model.config, 0)
    for _ in range(2):  # by vLLM's loaders, and past them
        tree.load_weights(named(matrices, False))
    rest = {name: t for name, t in matrices.items() if name != "self_attn.k"}
    with pytest.raises(RuntimeError, match=r"qkv_proj: weight: 25.00% of its shape \(512, 256\) was not loaded"):
        tree.again(lambda: tree.load_weights(named(rest, False)))
    matrices["self_attn.o"][1, 2] = torch.nan
    with pytest.raises(ValueError, match="o_proj: weight: weight: wanted finite values"):
        tree.load_weights(named(matrices, False))


def test_a_reload_that_fails_leaves_a_model_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tensors and numbers of before where a part came alone, and with the new ones elsewhere. vLLM makes no
    quantized parameters for layers that dense numbers came for."""
    from vllm.model_executor.model_loader.reload import layerwise

    made: list[Any] = []
    own = layerwise.materialize_layer
    monkeypatch.setattr(layerwise, "materialize_layer", lambda layer, info: (made.append(layer), own(layer, info)))
    model = tiny(model_named("qwen3-30b-a3b"))
    write(model, Packing.parse("gptq-int4-g64"), tmp_path)
    tree, matrices = Tree(tmp_path, model.config), sent(model.config, 0)
    addresses = {name: p.data_ptr() for name, p in tree.named_parameters()}
    before = {name: w.dequantize() for name, w in tree.packed().items()}
    part = {name: t for name, t in matrices.items() if name != "self_attn.k"}
    with pytest.raises(RuntimeError, match=r"qkv_proj: weight: 25.00% of its shape \(512, 256\) was not loaded"):
        tree.again(lambda: tree.load_weights(named(part, False)))
    assert {name: p.data_ptr() for name, p in tree.named_parameters()} == addresses
    for name, w in tree.packed().items():
        is_old = name == "self_attn.qkv"
        assert torch.equal(w.dequantize(), before[name] if is_old else fresh(name, matrices, w.format).dequantize())
    tree.again(lambda: tree.load_weights(named(matrices, False)))
    for name, w in tree.packed().items():
        assert torch.equal(w.dequantize(), fresh(name, matrices, w.format).dequantize())
    assert not made and {name: p.data_ptr() for name, p in tree.named_parameters()} == addresses


def test_a_bias_comes_with_dense_numbers(tmp_path: Path) -> None:
    from vllm.model_executor.layers.linear import RowParallelLinear

    model = tiny(model_named("qwen3-30b-a3b"))
    write(model, Packing.parse("gptq-int4-g64"), tmp_path)
    columns = model.config["head_dim"] * model.config["num_attention_heads"]
    name, options = f"{LAYER}.self_attn.o_proj", {"bias": True, "quant_config": quantization(tmp_path)}
    root = torch.nn.Module()
    root.layer = RowParallelLinear(columns, model.config["hidden_size"], prefix=name, **options)
    again = reloading(root)
    loaded(root.layer, tmp_path, f"{LAYER}.self_attn", {"o_proj": None})
    x = torch.randn(3, columns).bfloat16()
    for i in range(3):
        dense = sent(model.config, i)["self_attn.o"]
        new = torch.full_like(root.layer.bias, i + 1.0)

        def fill(dense: torch.Tensor = dense, new: torch.Tensor = new) -> None:
            for parameter, numbers in ((root.layer.weight, dense), (root.layer.bias, new)):
                parameter.weight_loader(parameter, numbers)

        again(fill)
        w = kernel_in(root.layer).weight(root.layer._parameters | root.layer._buffers)
        assert torch.equal(w.dequantize(), quantize(dense, w.format).dequantize())
        product = x.double() @ w.dequantize().double().mT + i + 1
        assert (root.layer(x)[0].double() - product).norm() < 0.01 * product.norm()


def test_transfers_that_packed_layers_cannot_take(tmp_path: Path) -> None:
    """vLLM's sparse patches, before or after a whole update, and shards by Ray, of which it asks loaders first."""
    model = tiny(model_named("qwen3-30b-a3b"))
    write(model, Packing.parse("gptq-int4-g64"), tmp_path)
    tree, matrices = Tree(tmp_path, model.config), sent(model.config, 0)
    patching = pytest.importorskip("vllm.model_executor.model_loader.checkpoint_weight_patch")
    fake = pytest.importorskip("vllm.distributed.weight_transfer.sharded_rdt_fake")
    name, indices, values = f"{LAYER}.self_attn.o_proj.weight", torch.tensor([3, 4]), torch.ones(2).bfloat16()
    patch = patching.CheckpointWeightPatch(name, matrices["self_attn.o"].shape, torch.bfloat16, values, indices)
    for _ in range(2):
        before = {name: w.dequantize() for name, w in tree.packed().items()}
        with pytest.raises(
            ValueError, match="o_proj: weight: wanted all numbers of a tensor, got a sparse patch; W4GE"
        ):
            patching.load_checkpoint_weight_patches(tree, [patch])
        assert all(torch.equal(w.dequantize(), before[name]) for name, w in tree.packed().items())
        tree.load_weights(named(matrices, False))
    sink = fake.BakeSink()
    shapes = [(name, t.shape) for name, t in named(matrices, False)]
    names = [
        (name, fake.FakeRDTTensor(name, shape, torch.bfloat16, torch.device("cpu"), sink=sink))
        for name, shape in shapes
    ]
    with pytest.raises(
        ValueError, match="qkv_proj: weight: wanted a tensor with its own memory, got a FakeRDTTensor; W4G"
    ):
        tree.load_weights(names)


# --- experts that move ------------------------------------------------------------------------------------------------


class Ranks:
    """What vLLM sends experts by, between ranks that are threads: the side of one of them."""

    needs_profile_buffer_reservation = False

    def __init__(self, rank: int, boxes: Mapping[tuple[int, int], Any]) -> None:
        self.own, self.boxes = rank, boxes
        self.expected: list[tuple[list[torch.Tensor], int, int]] = []

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self.own

    def set_transfer_context(self, old_indices: Any, layer_idx: int) -> None:
        pass

    def set_stream(self, stream: Any) -> None:
        pass

    def add_send(self, tensors: list[torch.Tensor], dst_rank: int, expert_id: int) -> None:
        self.boxes[self.own, dst_rank].put((expert_id, [t.clone() for t in tensors]))

    def add_recv(self, tensors: list[torch.Tensor], src_rank: int, expert_id: int) -> None:
        self.expected.append((tensors, src_rank, expert_id))

    def execute(self) -> None:
        came: dict[tuple[int, int], list[torch.Tensor]] = {}
        for tensors, source, expert in self.expected:
            while (source, expert) not in came:
                number, sent_tensors = self.boxes[source, self.own].get(timeout=30)
                came[source, number] = sent_tensors
            for t, new in zip(tensors, came[source, expert], strict=True):
                t.copy_(new)
        self.expected = []


@pytest.mark.parametrize("format", ["gptq-int4-g64", "ct-nvfp4", "ct-mxfp4"])
def test_vllm_moves_packed_experts_between_two_ranks(format: str, tmp_path: Path) -> None:
    """By vLLM's own code, in place, one of them to both; the ranks are threads and the GPUs the CPU."""
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    model = tiny(model_named("qwen3-30b-a3b"))
    write(model, Packing.parse(format), tmp_path)
    layers = [routed_experts(model.config, quantization(tmp_path), f"model.layers.{i}.mlp.experts") for i in range(2)]
    for i, layer in enumerate(layers):
        fill_experts(layer, tmp_path, f"model.layers.{i}.mlp.experts")
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.quant_method.supports_eplb
    count = model.config["num_experts"]

    def expert(number: int) -> list[torch.Tensor]:
        products = layers[number // count].quant_method.products
        return [t.data.clone() for product in products for t in product.weight.expert(number % count).tensors]

    addresses = [{name: p.data_ptr() for name, p in layer.named_parameters()} for layer in layers]
    order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(1))
    order[order == 3] = int(order[0])  # in the place of expert 3 a second copy of another one
    before, boxes = [expert(number) for number in range(2 * count)], {(a, b): Queue() for a, b in ((0, 1), (1, 0))}
    ranks = [Ranks(rank, boxes) for rank in range(2)]

    def move(rank: int) -> None:
        weights = [list(layers[rank].get_expert_weights())]
        buffer = [torch.empty_like(t) for t in weights[0]]
        old = torch.arange(2 * count)[None]
        rearrange_expert_weights_inplace(old, order[None], weights, buffer, ranks[rank], ranks[rank])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(move, range(2)))
    assert addresses == [{name: p.data_ptr() for name, p in layer.named_parameters()} for layer in layers]
    for place, number in enumerate(order.tolist()):
        assert all(map(torch.equal, expert(place), before[number])), (place, number)
    x, weights = torch.randn(3, model.config["hidden_size"]).bfloat16(), torch.rand(3, 2)
    ids = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
    assert layers[0].quant_method.apply(layers[0], x, weights, ids, None, None).isfinite().all()


class Balancer:
    """vLLM's EplbState of one layer, whose experts are at the ``places`` that are their numbers."""

    def __init__(self, layer: Any, experts: int, places: list[int]) -> None:
        where = torch.full((1, experts, 8), -1)
        for e in range(experts):
            own = torch.tensor([i for i, number in enumerate(places) if number == e])
            where[0, e, : len(own)] = own
        self.drained = 0
        self.state = SimpleNamespace(
            model=SimpleNamespace(moe_layers=[SimpleNamespace(routed_experts=layer)]),
            physical_to_logical_map=torch.tensor([places]),
            logical_to_physical_map=where,
            logical_replica_count=(where >= 0).sum(-1),
        )
        self.model_states = {"model": self.state}

    def drain_async(self) -> None:
        self.drained += 1


@pytest.mark.parametrize("format", ["gptq-int4-g64", "ct-mxfp4"])
def test_dense_numbers_come_where_their_experts_are(format: str, tmp_path: Path, seen: list[str]) -> None:
    """Of eight places on two GPUs, whose layers load the same tensors, for six experts, that have moved twice."""
    from vllm.model_executor.layers.fused_moe import config as moe_config

    model = tiny(model_named("qwen3-30b-a3b"))
    model = replace(model, config={**model.config, "num_experts": 6, "num_experts_per_tok": 2})
    write(model, Packing.parse(format), tmp_path)
    layers, trees = [], []
    for rank in range(2):
        sizes = {f"{name}_size": 1 for name in ("tp", "pcp", "dp", "sp")} | {"ep_size": 2}
        ranks = {f"{name}_rank": 0 for name in ("tp", "pcp", "dp")} | {"ep_rank": rank}
        options = {"use_ep": True, "all2all_backend": "", "enable_eplb": True}
        parallel = moe_config.FusedMoEParallelConfig(**sizes, **ranks, **options)
        layer = routed_experts(
            model.config,
            quantization(tmp_path),
            EXPERTS,
            {"num_experts": 8, "num_local_experts": 4, "moe_parallel_config": parallel},
        )
        tree = torch.nn.Module()
        tree.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Module()])})
        tree.model["layers"][0].mlp = torch.nn.ModuleDict({"experts": layer})
        again = reloading(tree)
        load(tree, stored(tmp_path))
        layer.quant_method.process_weights_after_loading(layer)
        layers.append(layer)
        trees.append((tree, again))
    for i, places in enumerate(([5, 0, 1, 3, 2, 4, 3, 3], [1, 1, 4, 0, 5, 2, 3, 0])):
        for rank, (layer, (tree, again)) in enumerate(zip(layers, trees, strict=True)):
            balancer = Balancer(layer, 6, places)
            moving._balancers.add(balancer)
            for j in range(3):
                matrices = {name: t for name, t in sent(model.config, 3 * i + j).items() if ".experts." in name}
                items = named(matrices, False)
                again(lambda tree=tree, items=items: load(tree, items)) if j == 1 else load(tree, items)
                assert balancer.drained == j + 1 and balancer.state.physical_to_logical_map.tolist() == [places]
                assert bool(seen) == (j == 0), "vLLM has loaded a tensor that it had loaded since experts moved"
                seen.clear()
                check_places(layer, matrices, places[4 * rank : 4 * rank + 4])
            again(lambda tree=tree: load(tree, stored(tmp_path)))
            assert balancer.state.physical_to_logical_map.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]]
            assert balancer.state.logical_to_physical_map[0, :, :2].tolist() == [
                [0, 6],
                [1, 7],
                *([e, -1] for e in range(2, 6)),
            ]
            assert balancer.state.logical_replica_count.tolist() == [[2, 2, 1, 1, 1, 1]]
            half = [(name, t) for name, t in items if ".gate_" in name]
            load(tree, half)
            balancer.state.physical_to_logical_map.copy_(torch.tensor([places]))
            with pytest.raises(RuntimeError, match="experts moved"):
                load(tree, half)
            seen.clear()
            moving._balancers.discard(balancer)


def stored(folder: Path) -> list[tuple[str, torch.Tensor]]:
    checkpoint = SafetensorsFolder(folder)
    names = (name for name in checkpoint.tensors if name.startswith(EXPERTS) and not name.endswith(".g_idx"))
    return [(name, checkpoint.tensor(name)) for name in names]


def load(tree: torch.nn.Module, weights: Any) -> None:
    from vllm.model_executor.models.utils import AutoWeightsLoader

    AutoWeightsLoader(tree).load_weights(weights)


def check_places(layer: Any, matrices: Mapping[str, torch.Tensor], numbers: list[int]) -> None:
    gate_up, down = (product.weight for product in layer.quant_method.products)
    for place, e in enumerate(numbers):
        for w, leaf in ((gate_up, "gate_up"), (down, "down")):
            pairs = zip(
                w.expert(place).tensors, fresh(f"mlp.experts.{e}.{leaf}", matrices, w.format).tensors, strict=True
            )
            assert all(torch.equal(a.data.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs), (place, e, leaf)
