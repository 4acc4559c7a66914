"""The vLLM plugin's merged layers of several formats, and GPTQ of other widths, against a stub of vLLM, on the CPU."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine_tensors import words
from test_gptq import planes
from vllm_parts import vllm_stub
from w4gemm.checkpoints import open_checkpoint
from w4gemm.integrations.vllm import takeover

K, SIZES = 128, (64, 96)
PARENT, SHARDS = "model.layers.0.mlp", ("gate_proj", "up_proj")


@pytest.fixture(autouse=True)
def part(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with vllm_stub(monkeypatch, "gptq"):
        importlib.import_module("w4gemm.integrations.vllm.dense").install()
        yield


def stored(n: int, bits: int, symmetric: bool = True, form: str = "gptq") -> dict[str, torch.Tensor]:
    """Random tensors of a module of GPTQ in groups of 64. form: the checkpoint_format."""
    g = torch.Generator().manual_seed(n + bits)
    codes = torch.randint(0, 2**bits, (n, K), generator=g)
    zeros = torch.randint(1, 2**bits, (n, K // 64), generator=g)
    zeros = torch.full_like(zeros, 2**bits // 2) if symmetric else zeros
    scales = (torch.rand(K // 64, n, generator=g) / 50 + 0.001).bfloat16()
    if form == "gptq_p":
        parts = {"qweight": planes(codes.numpy().T, 0, bits), "qzeros": planes(zeros.numpy().T, 1, bits)}
        return {**parts, "scales": scales}
    return {
        "qweight": words(codes, bits=bits).T.contiguous(),
        "scales": scales,
        "qzeros": words(zeros.T if form == "gptq_v2" else zeros.T - 1, bits=bits),
    }


def config_of(settings: dict[str, Any]) -> Any:
    from vllm.model_executor.layers.quantization import get_quantization_config

    values = settings["bits"], 64, False, settings["sym"], False, settings.get("dynamic"), settings
    config = get_quantization_config("gptq")(*values)
    config.packed_modules_mapping = {"gate_up_proj": list(SHARDS)}
    return config


def merged(settings: dict[str, Any], bias: bool = False) -> Any:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    config = config_of(settings)
    return MergedColumnParallelLinear(K, list(SIZES), bias, quant_config=config, prefix=f"{PARENT}.gate_up_proj")


def load(layer: Any, shards: list[dict[str, torch.Tensor]]) -> None:
    if hasattr(layer, "w4gemm_shards"):
        for i, tensors in reversed([*enumerate(shards)]):
            for name, t in tensors.items():
                parameter = layer._parameters[name]
                parameter.weight_loader(parameter, t, i)
    else:
        for name in shards[0]:
            layer._parameters[name].data.copy_(torch.cat([tensors[name] for tensors in shards], 1))
    for module in layer.modules():
        module.quant_method.process_weights_after_loading(module) if hasattr(module, "quant_method") else None


def by_load(folder: Path, settings: dict[str, Any], shards: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    names = [f"{PARENT}.{shard}" for shard in SHARDS]
    tensors = {
        f"{name}.{leaf}": t.contiguous() for name, each in zip(names, shards, strict=True) for leaf, t in each.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    checkpoint = open_checkpoint(folder)
    return torch.cat([checkpoint.weight(name).dequantize(torch.float64) for name in names])


def settings_of(bits: int, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 64, "sym": symmetric, "desc_act": False, **more}


CASES = {
    "3 bits": (settings_of(3), (3, 3)),
    "2 bits with zero points": (settings_of(2, False, zero_stored_as_3=4), (2, 2)),
    "8 bits with zero points, version 2": (settings_of(8, False, checkpoint_format="gptq_v2"), (8, 8)),
    "5 bits in planes": (settings_of(5, False, checkpoint_format="gptq_p"), (5, 5)),
    "4 and 8 bits": (settings_of(4, dynamic={r"+:.*\.up_proj": {"bits": 8}}), (4, 8)),
    "3 and 4 bits": (settings_of(3, dynamic={r"+:.*\.up_proj": {"bits": 4}}), (3, 4)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_a_merged_layer_has_the_numbers_of_load(name: str, bias: bool, tmp_path: Path) -> None:
    settings, bits = CASES[name]
    form = settings.get("checkpoint_format", "gptq")
    shards = [stored(n, width, settings["sym"], form) for n, width in zip(SIZES, bits, strict=True)]
    layer = merged(settings, bias)
    assert hasattr(layer, "w4gemm_shards") == (len({*bits}) == 2)
    load(layer, shards)
    x = torch.randn(3, 5, K, dtype=torch.bfloat16)
    product = x.double() @ by_load(tmp_path, settings, shards).T
    product = product + layer.bias.double() if bias else product
    assert (layer(x)[0].double() - product).norm() < 0.004 * product.norm()


def test_a_shard_that_is_not_loaded_is_named() -> None:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    layer = merged(CASES["4 and 8 bits"][0])
    assert isinstance(layer, MergedColumnParallelLinear)
    tensors = stored(SIZES[1], 8)
    del tensors["scales"]
    with pytest.raises(RuntimeError, match=r"mlp\.up_proj: scales: 100.00% of its shape"):
        load(layer, [stored(SIZES[0], 4), tensors])
    parameter = layer._parameters["qweight"]
    with pytest.raises(ValueError, match="wanted a qweight of each, got one of None"):
        parameter.weight_loader(parameter, tensors["qweight"])


def test_what_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has no kernel in the place of ours: for numbers that cannot be packed, and where ours runs nothing."""
    tensors = [stored(n, 3) for n in SIZES]
    tensors[0]["scales"][0, 0] = float("inf")
    with pytest.raises(ValueError, match="gate_up_proj: w4gemm cannot run it, and vLLM has no kernel"):
        load(merged(settings_of(3)), tensors)
    layer: Any = torch.nn.Module()
    layer.moe_config = None
    with pytest.raises(ValueError, match="config of experts: bits=3, sym=True"):
        config_of(settings_of(3)).get_quant_method(layer, "model.layers.0.mlp.experts")
    monkeypatch.setenv("W4GEMM_VLLM", "off")
    with pytest.raises(ValueError, match=r"bits=3, sym=True: vLLM has no kernel for it, .* W4GEMM_VLLM is off"):
        merged(settings_of(3))
    with pytest.raises(ValueError, match="no kernel: .'W4GEMM_VLLM is off'"):  # of the stub, which has none
        merged(CASES["4 and 8 bits"][0])


def test_auto_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM's own methods stay those of 4 and 8 symmetric bits, of AWQ's packing, and of all where ours run nothing."""
    from vllm.model_executor.layers.quantization.inc.schemes.inc_wna16_scheme import INCWna16Scheme

    def method(bits: int, symmetric: bool, is_gptq: bool = True) -> Any:
        of_layer = SimpleNamespace(bits=bits, sym=symmetric, group_size=64, is_gptq=is_gptq)
        config = SimpleNamespace(packing_format="auto_round:auto_gptq")
        return INCWna16Scheme().get_linear_method(config, torch.nn.Module(), f"{PARENT}.gate_up_proj", of_layer)

    for bits, symmetric, is_gptq in ((4, True, True), (8, True, True), (5, True, True), (3, True, False)):
        assert method(bits, symmetric, is_gptq) == "vLLM's own"
    layer: Any = torch.nn.Module()
    layer.quant_method = method(3, False)
    layer.quant_method.create_weights(layer, K, list(SIZES), K, sum(SIZES), torch.bfloat16)
    shards = [stored(n, 3, False) for n in SIZES]
    load(layer, shards)
    settings = settings_of(3, False, quant_method="auto-round", packing_format="auto_round:auto_gptq")
    x = torch.randn(5, K, dtype=torch.bfloat16)
    product = x.double() @ by_load(tmp_path, settings, shards).T
    assert (layer.quant_method.apply(layer, x).double() - product).norm() < 0.004 * product.norm()
    with monkeypatch.context() as asked:
        asked.setattr(takeover, "linear_backend", lambda quantization: "humming")
        assert method(3, False) == "vLLM's own"
    monkeypatch.setenv("W4GEMM_VLLM", "off")
    assert method(3, False) == "vLLM's own"


def test_vllms_reloading_puts_no_loader_around_a_place() -> None:
    """It tells its own by their name, and takes the inner one out of them."""
    for place in merged(CASES["4 and 8 bits"][0])._parameters.values():
        if place is not None:
            loader: Any = place.weight_loader
            assert loader.__name__ == "online_process_loader" != loader.__wrapped__.__name__
