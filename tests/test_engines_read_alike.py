"""The plugins of vLLM and SGLang read a layer's tensors as ``load`` reads a folder's, and refuse what it refuses.

Both run on stubs of the engines, whose methods are not asked to load: parameters are what the folder holds.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from sglang_layers import SCHEMES, Drawn, K, N, config, created, on_hopper, registered, resolved  # noqa: F401
from test_sglang_floats import LINEAR, Floats
from vllm_parts import vllm_stub
from w4gemm import QuantizedWeight
from w4gemm.checkpoints import open_checkpoint
from w4gemm.integrations.engines.formats import ExpertsSettings
from w4gemm.integrations.sglang.experts_formats import METHODS
from w4gemm.integrations.vllm import experts_formats

NAME = "model.layers.0.mlp.down_proj"
GROUP = 64
Tensors = dict[str, torch.Tensor]


class Case(NamedTuple):
    """A checkpoint's format, and how each engine holds it."""

    quantization: dict[str, Any]
    tensors: Callable[[], Tensors]
    vllm: Callable[[Any, Tensors, dict[str, Any]], tuple[Any, Tensors]] | None = None
    """Makes a kernel of a quantization_config, and gives the tensors as vLLM's method hands them to it."""
    sglang: Callable[[dict[str, Any]], Any] | None = None
    """Makes SGLang's scheme of a quantization_config."""


def gptq(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, **settings}


def awq() -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def compressed(symmetric: bool = True, kind: str = "int", **settings: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": kind, "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
    group = {"targets": ["Linear"], "weights": {**weights, **settings}}
    packing = {"int": "pack-quantized", "mxfp4": "mxfp4-pack-quantized", "nvfp4": "nvfp4-pack-quantized"}[kind]
    group["weights"]["type"] = "int" if kind == "int" else "float"
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "config_groups": {"group_0": group},
        "version": "0.14",
    }


def group_size(quantization: dict[str, Any]) -> int:
    groups = quantization.get("config_groups")
    return quantization["group_size"] if groups is None else groups["group_0"]["weights"]["group_size"]


def with_int4(kernels: Any, tensors: Tensors, quantization: dict[str, Any], k: int = K) -> tuple[Any, Tensors]:
    """vLLM's kernel for integers. compressed-tensors' parameters say that rows come first, GPTQ's that they do not."""
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.scalar_type import ScalarType

    by_gptq = quantization["quant_method"] == "gptq"
    settings = quantization if by_gptq else quantization["config_groups"]["group_0"]["weights"]
    asymmetric, bits = not by_gptq and not settings["symmetric"], settings["bits" if by_gptq else "num_bits"]
    kind = ScalarType(0, bits, False, 0 if asymmetric else 2**bits // 2)
    size, act_order = group_size(quantization), bool(quantization.get("desc_act"))
    c = MPLinearLayerConfig((k, N), (k, N), kind, torch.bfloat16, size, asymmetric, act_order)
    leaves = ("qweight", "scales", "qzeros", "g_idx") if by_gptq else tuple(f"weight_{leaf}" for leaf in COMPRESSED)
    unused = () if act_order or by_gptq else ("weight_g_idx",)
    unused += () if asymmetric or by_gptq else ("weight_zero_point",)
    kernel = kernels["dense"].W4GemmLinearKernel(c, *leaves)
    return kernel, {name: t for name, t in tensors.items() if name not in unused}


COMPRESSED = ("packed", "scale", "zero_point", "g_idx")


def with_floats(kernels: Any, tensors: Tensors, quantization: dict[str, Any]) -> tuple[Any, Tensors]:
    """vLLM's kernel for floats, for which it renames codes, and inverts the factor of compressed-tensors."""
    nvfp4 = "weight_scale_2" in tensors or "weight_global_scale" in tensors
    made = dict(tensors)
    if "weight_packed" in made:
        made["weight"] = made.pop("weight_packed")
    if "weight_global_scale" in made:
        made["weight_global_scale"] = 1 / made["weight_global_scale"].max()
    if "weight_scale_2" in made:
        made["weight_global_scale"] = made.pop("weight_scale_2").max()
    part = kernels["floats"]
    return (part.W4GemmNvFp4LinearKernel if nvfp4 else part.W4GemmMxFp4LinearKernel)(None), made


def sglang_compressed(quantization: dict[str, Any]) -> Any:
    weights = quantization["config_groups"]["group_0"]["weights"]
    actorder = weights.get("actorder")
    return resolved(SCHEMES["ct"])("group", weights["num_bits"], weights["group_size"], weights["symmetric"], actorder)


def with_zeros(drawn: Drawn, symmetric: bool) -> Tensors:
    """compressed-tensors' tensors without those that a symmetric weight in order lacks."""
    unused = ("weight_zero_point", "weight_g_idx") if symmetric else ("weight_g_idx",)
    return {name: t for name, t in drawn.compressed().items() if name not in unused}


def sglang_gptq(quantization: dict[str, Any]) -> Any:
    marlin = quantization["sym"] and quantization["bits"] in (4, 8)
    settings = {key: quantization[key] for key in ("group_size", "desc_act")}
    return resolved(SCHEMES["gptq" if marlin else "gptq other"])(config(weight_bits=quantization["bits"], **settings))


CASES = {
    "GPTQ": Case(gptq(), lambda: Drawn(1, N, K, False).gptq(), with_int4, sglang_gptq),
    "GPTQ in act-order": Case(
        gptq(desc_act=True), lambda: Drawn(2, N, K, False, act_order=True).gptq(), with_int4, sglang_gptq
    ),
    "GPTQ of 8 bits": Case(gptq(bits=8), lambda: Drawn(9, N, K, False, bits=8).gptq(), with_int4, sglang_gptq),
    "GPTQ of 3 bits": Case(gptq(bits=3), lambda: Drawn(10, N, K, False, bits=3).gptq(), None, sglang_gptq),
    "asymmetric GPTQ of 2 bits": Case(
        gptq(bits=2, sym=False, zero_stored_as_3=4), lambda: Drawn(11, N, K, True, bits=2).gptq(), None, sglang_gptq
    ),
    "int8": Case(
        compressed(num_bits=8), lambda: with_zeros(Drawn(12, N, K, False, bits=8), True), with_int4, sglang_compressed
    ),
    "asymmetric int3": Case(
        compressed(False, num_bits=3), lambda: with_zeros(Drawn(13, N, K, True, bits=3), False), with_int4
    ),
    "AWQ": Case(
        awq(),
        lambda: Drawn(3, N, K, True).awq(),
        None,  # vLLM brings it to another order first
        lambda quantization: resolved(SCHEMES["awq"])(config(group_size=quantization["group_size"])),
    ),
    "int4": Case(compressed(), lambda: with_zeros(Drawn(4, N, K, False), True), with_int4, sglang_compressed),
    "asymmetric int4": Case(
        compressed(False), lambda: with_zeros(Drawn(5, N, K, True), False), with_int4, sglang_compressed
    ),
    "NVFP4": Case(
        compressed(kind="nvfp4", group_size=16),
        lambda: Floats("nvfp4", 6, N, K, (N,)).compressed(),
        with_floats,
        lambda quantization: LINEAR["compressed-tensors"][0](),
    ),
    "ModelOpt's NVFP4": Case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        lambda: Floats("nvfp4", 7, N, K, (N,)).modelopt(),
        with_floats,
        lambda quantization: LINEAR["modelopt"][0](),
    ),
    "MXFP4": Case(compressed(kind="mxfp4", group_size=32), lambda: mxfp4(), with_floats),
}


def mxfp4(seed: int = 8) -> Tensors:
    drawn = Floats("mxfp4", seed, N, K)
    return {"weight_packed": drawn.codes, "weight_scale": drawn.scales.view(torch.uint8)}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """vLLM's parts of the plugin, beside a stub of vLLM."""
    with vllm_stub(monkeypatch, "dense"):
        yield {name: importlib.import_module(f"w4gemm.integrations.vllm.{name}") for name in ("dense", "floats")}


def by_load(folder: Path, quantization: dict[str, Any], tensors: Tensors) -> torch.Tensor:
    folder.mkdir()
    save_file({f"{NAME}.{leaf}": t.contiguous() for leaf, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return open_checkpoint(folder).weight(NAME).dequantize(torch.float64)


def layer_of(tensors: Tensors, dims: dict[str, int], layer: torch.nn.Module | None = None) -> torch.nn.Module:
    layer = torch.nn.Module() if layer is None else layer
    for name in [name for name in layer._parameters if name not in tensors]:
        delattr(layer, name)
    for name, t in tensors.items():
        parameter = torch.nn.Parameter(t, requires_grad=False)
        vars(parameter).update(dims)
        layer.register_parameter(name, parameter)
    layer.params_dtype, layer.logical_widths = torch.bfloat16, [N]
    return layer


def by_vllm(case: Case, kernels: Any, quantization: dict[str, Any], tensors: Tensors) -> torch.Tensor:
    assert case.vllm is not None
    kernel, made = case.vllm(kernels, tensors, quantization)
    kernel.next_kernel = lambda: refuses("vLLM")
    layer = layer_of(made, {"output_dim": int("qweight" in made)})
    kernel.process_weights_after_loading(layer)
    packed, shapes = kernel.packed[0].packed, kernel.packed[0].names
    held = tuple(getattr(layer, name) for name in shapes)
    w = QuantizedWeight(packed.format, packed.n, packed.k, packed.layout, held, getattr(layer, "w4gemm_perm", None))
    return w.dequantize(torch.float64)


def by_sglang(case: Case, quantization: dict[str, Any], tensors: Tensors) -> torch.Tensor:
    assert case.sglang is not None
    scheme = case.sglang(quantization)
    layer = layer_of(tensors, {}, created(scheme))
    scheme.process_weights_after_loading(layer)
    if not hasattr(layer, "w4gemm_weight"):
        refuses("SGLang")
    return layer.w4gemm_weight[0].dequantize(torch.float64)


def refuses(engine: str) -> Any:
    raise ValueError(f"left to {engine}")


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_load(name: str, kernels: dict[str, Any], tmp_path: Path) -> None:
    case = CASES[name]
    expected = by_load(tmp_path / "folder", case.quantization, case.tensors())
    for got in readers(case, kernels, case.quantization, case.tensors()):
        assert torch.equal(got(), expected)


def readers(
    case: Case, kernels: Any, quantization: dict[str, Any], tensors: Tensors
) -> list[Callable[[], torch.Tensor]]:
    actual: list[Callable[[], torch.Tensor]] = []
    if case.vllm is not None:
        actual.append(lambda: by_vllm(case, kernels, quantization, dict(tensors)))
    if case.sglang is not None:
        actual.append(lambda: by_sglang(case, quantization, dict(tensors)))
    assert actual
    return actual


def _scales(tensors: Tensors) -> str:
    return next(name for name in tensors if name in ("scales", "weight_scale"))


def _codes(tensors: Tensors) -> str:
    return next(name for name in tensors if name in ("qweight", "weight_packed", "weight"))


def fewer(of: Callable[[Tensors], str], dim: int) -> Callable[[Tensors, Any], None]:
    def change(tensors: Tensors, quantization: Any) -> None:
        name = of(tensors)
        tensors[name] = tensors[name].narrow(dim, 0, tensors[name].shape[dim] // 2)

    return change


def cast(of: Callable[[Tensors], str], dtype: torch.dtype) -> Callable[[Tensors, Any], None]:
    def change(tensors: Tensors, quantization: Any) -> None:
        tensors[of(tensors)] = tensors[of(tensors)].to(dtype)

    return change


def regroup(tensors: Tensors, quantization: Any) -> None:
    """Say another group size than that of the scales."""
    where = quantization if "config_groups" not in quantization else quantization["config_groups"]["group_0"]["weights"]
    where["group_size"] *= 2


def not_a_number(tensors: Tensors, quantization: Any) -> None:
    stored = tensors[_scales(tensors)].clone(memory_format=torch.contiguous_format)
    stored.view(torch.uint8)[1] = 255
    tensors[_scales(tensors)] = stored


def without(of: Callable[[Tensors], str]) -> Callable[[Tensors, Any], None]:
    return lambda tensors, quantization: tensors.__delitem__(of(tensors))


def odd_zeros(tensors: Tensors, quantization: Any) -> None:
    tensors["qzeros"] = tensors["qzeros"] + 1


def far_group(tensors: Tensors, quantization: Any) -> None:
    name = next(name for name in tensors if name.endswith("g_idx"))
    tensors[name] = tensors[name] + 1


INTEGERS = ("GPTQ", "GPTQ in act-order", "GPTQ of 8 bits", "GPTQ of 3 bits", "AWQ", "int4", "asymmetric int4", "int8")
EVERY = tuple(CASES)
MUTATIONS: dict[str, tuple[tuple[str, ...], Callable[[Tensors, Any], None]]] = {
    "scales of half of the rows": (EVERY, fewer(_scales, 0)),
    "scales of half of the columns": (EVERY, fewer(_scales, 1)),
    "codes of half of the rows": (EVERY, fewer(_codes, 0)),
    "codes of half of the columns": (EVERY, fewer(_codes, 1)),
    "codes in other words": (EVERY, cast(_codes, torch.int64)),
    "scales in float64": (EVERY, cast(_scales, torch.float64)),
    "another group size": (INTEGERS, regroup),
    "a scale that is not a number": (EVERY, not_a_number),
    "no scales": (EVERY, without(_scales)),
    "no codes": (EVERY, without(_codes)),
    "zero points of a symmetric weight": (("GPTQ", "GPTQ of 8 bits"), odd_zeros),
    "a group that is not there": (("GPTQ in act-order",), far_group),
}


@pytest.mark.parametrize(
    ("name", "mutation"), [(name, mutation) for mutation, (names, _) in MUTATIONS.items() for name in names]
)
def test_all_refuse_alike(name: str, mutation: str, kernels: dict[str, Any], tmp_path: Path) -> None:
    case, change = CASES[name], MUTATIONS[mutation][1]
    tensors, quantization = case.tensors(), json.loads(json.dumps(case.quantization))
    change(tensors, quantization)
    refusals: list[str] = []
    plugins = readers(case, kernels, quantization, tensors)
    for read in (lambda: by_load(tmp_path / "folder", quantization, tensors), *plugins):
        try:
            read()
        except (AttributeError, TypeError, ValueError, RuntimeError) as e:
            refusals.append(str(e))
        else:
            refusals.append("")
    assert all(refusals), refusals


# --- experts ---------------------------------------------------------------------------------------------------------

EXPERTS = 3
DOWN = "model.layers.0.mlp.experts.down_proj"


def pairs(seed: int) -> Tensors:
    """W4AFP8's tensors of an expert; scales are of 128 columns."""
    return {**Drawn(seed, N, K, False, 128).pairs(), "input_scale": torch.ones(())}


MIXTURES: dict[str, tuple[dict[str, Any], Callable[[int], Tensors], str, str]] = {
    "GPTQ": (gptq(), lambda e: Drawn(e, N, K, False).gptq(), "AutoGPTQMoEMethod", "GPTQ's experts"),
    "AWQ": (awq(), lambda e: Drawn(e, N, K, True).awq(), "AutoAWQMoEMethod", "AWQ's experts"),
    "int4": (
        compressed(False),
        lambda e: with_zeros(Drawn(e, N, K, True), False),
        "CompressedTensorsWNA16MoEMethod",
        "compressed-tensors' experts",
    ),
    "ModelOpt's NVFP4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        lambda e: Floats("nvfp4", e, N, K, (N,)).modelopt(),
        "ModelOptNvFp4FusedMoE",
        "ModelOpt's experts of NVFP4",
    ),
    "W4AFP8": ({"quant_method": "w4afp8"}, pairs, "", "W4AFP8's experts"),
    "gpt-oss": ({"quant_method": "mxfp4"}, lambda e: mxfp4(e), "GptOssMxfp4MoEMethod", "experts of MXFP4"),
}
"""quantization_config, the tensors of an expert, and the methods of vLLM and SGLang that hold them stacked."""


@pytest.mark.parametrize("name", MIXTURES)
def test_numbers_of_experts_are_those_of_load(name: str, tmp_path: Path) -> None:
    quantization, tensors_of, vllm, sglang = MIXTURES[name]
    each = [tensors_of(e) for e in range(EXPERTS)]
    stacked = {leaf: torch.stack([tensors[leaf] for tensors in each]) for leaf in each[0]}
    names = [DOWN.replace("experts", f"experts.{e}") for e in range(EXPERTS)]
    stored = {f"{names[e]}.{leaf}": t for e in range(EXPERTS) for leaf, t in each[e].items()}
    if name == "gpt-oss":
        blocks = stacked["weight_packed"].unflatten(-1, (-1, 16))
        stored = {f"{DOWN}_blocks": blocks, f"{DOWN}_scales": stacked["weight_scale"]}
        stacked = {"weight": stacked["weight_packed"], "weight_scale": stacked["weight_scale"]}
    save_file({key: t.contiguous() for key, t in stored.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    expected = open_checkpoint(tmp_path).weight(DOWN).dequantize()
    asymmetric = name in ("AWQ", "int4")
    named = {"ModelOpt's NVFP4": "nvfp4", "gpt-oss": "mxfp4"}.get(name, "")
    settings = ExpertsSettings(4, 128 if name == "W4AFP8" else GROUP, asymmetric, named=named)
    by_sglang = next(method.format for method in METHODS if method.kind == sglang)
    for format in [by_sglang] + ([experts_formats.METHODS[vllm][1]] if vllm else []):
        layer = torch.nn.Module()
        for leaf, t in stacked.items():
            lies = t.mT if format.transposed and format.packing == "rows" and "qweight" not in stacked else t
            parameter = torch.nn.Parameter(lies, requires_grad=False)
            if format is not by_sglang:
                parameter.is_transposed = "qweight" in stacked  # as vLLM marks GPTQ's and AWQ's
            layer.register_parameter(f"w2_{leaf}", parameter)
        assert torch.equal(format.numbers(layer, "w2", settings).packed().dequantize(), expected)
