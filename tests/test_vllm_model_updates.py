"""Dense weights for a whole model of vLLM's, by its own loader: with ``VLLM_SOURCES``, see vllm_sources.py."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

if "VLLM_SOURCES" not in os.environ:
    pytest.skip("VLLM_SOURCES does not name vLLM's sources", allow_module_level=True)

from test_vllm_sources import (  # noqa: F401
    Packing,
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


@pytest.mark.parametrize("as_fused", [False, True])
@pytest.mark.parametrize("format", ["gptq-int4-g64", "ct-nvfp4"])
def test_tensors_pass_vllms_loaders_once_their_ways_are_known(
    format: str, as_fused: bool, tmp_path: Path, seen: list[str]
) -> None:
    """By turns in a session of vLLM's reloading and without; the last ones in two calls, and all in another order."""
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
        elif i % 2:
            tree.again(lambda items=items: tree.load_weights(items))
        else:
            assert {f"{LAYER}.self_attn.qkv_proj.weight", f"{EXPERTS}.w2_weight"} <= tree.load_weights(items)
        assert bool(seen) == (i == 0), "vLLM has loaded a tensor that it had loaded before"
        seen.clear()
        assert {name: p.data_ptr() for name, p in tree.named_parameters()} == addresses
        for name, w in tree.packed().items():
            pairs = zip(w.tensors, fresh(name, matrices, w.format).tensors, strict=True)
            assert all(torch.equal(a.data.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs), (i, name)


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
