"""Layers that vLLM makes of a checkpoint's modules: neighbours fused, and divided among GPUs. Importing this imports no
vLLM."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from w4gemm.checkpoints import (
    FORMATS,
    Checkpoint,
    CheckpointFormat,
    Module,
    compressed_tensors,
    dense,
    find_checkpoint,
    gguf,
)
from w4gemm.checkpoints.gguf.architectures import ARCHITECTURES
from w4gemm.checkpoints.hugging_face import quantization_config, read_config, stated_dtype
from w4gemm.core import environment
from w4gemm.core.activation import canonical
from w4gemm.core.errors import FormatError
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.engines.formats import SCALES
from w4gemm.integrations.vllm.takeover import VLLM

_NAMES = (
    *("gptq", "awq", "compressed-tensors", "modelopt", "mxfp4", "quark", "auto-round", "deepseek-v4"),
    gguf.FORMAT.name,
)
TAKEN_OVER = tuple(format for format in FORMATS if format.name in _NAMES)
"""Checkpoints whose layers are taken over; of ModelOpt's those in NVFP4, of AutoRound's floats those in MXFP4."""
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Last parts of the names of modules that vLLM loads into one layer."""
KEYS_AND_VALUES = ("k_proj", "v_proj")
"""Modules whose heads are copied if there are fewer than GPUs."""
DIVIDED_INPUTS = ("o_proj", "out_proj", "down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h")
"""Modules whose input features are divided among GPUs; other modules' output features are."""
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")
"""Modules that each GPU has whole."""
VOCABULARY_STEP = 64
"""vLLM rounds the vocabulary up to a multiple of it."""
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_k", "moe_top_k", "moe_topk")
"""Names of the number of experts of a token in configs: most models', Kimi's, gpt-oss', ERNIE's, Step's, LongCat's."""
_GATED = {"gelu": "gelu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}
"""Activation that experts have between their products, by ``hidden_act`` of a config."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.([^.]+)")


class Model(NamedTuple):
    """A model as vLLM runs it on each of several GPUs."""

    layers: tuple[Module, ...]
    """Each shape and format once; with and without a bias if it has one, because one GPU adds it."""
    dtype: torch.dtype
    """dtype of the activations, and of scales that are not folded."""
    act_order: bool = False
    """True if columns may be in act-order."""
    activation: str = ""
    """Activation between the products of experts, if not silu_mul, or the empty string."""
    top_k: int = 0
    """Number of experts of a token; 0 if the model has none in 4 bits."""


def read_model(path: str, tensor_parallel: int = 1, dtype: torch.dtype | None = None) -> Model:
    """Return the quantized layers of a checkpoint by its headers; nothing else is read.

    Args:
        tensor_parallel: number of GPUs that share each layer.
        dtype: of the model; None for config.json's.

    Raises:
        FileNotFoundError, FormatError: if there is no such checkpoint, or vLLM's layers for it are not taken over.
        ValueError: if a layer cannot be divided among so many GPUs.
    """
    source, folder = find_checkpoint(path)
    if source not in TAKEN_OVER:
        hint = f"; `w4gemm convert {path} OUTPUT` makes one" if source is dense.FORMAT else ""
        raise FormatError(f"{path}: wanted a model of {' or '.join(_NAMES)}, got {source.contents}{hint}")
    checkpoint = source.open(folder, None)
    config = _config_of_gguf(checkpoint) if isinstance(checkpoint, gguf.GGUFCheckpoint) else read_config(folder)
    text = config.get("text_config") or config
    model_dtype = dtype or (torch.float16 if stated_dtype(config) == "float16" else torch.bfloat16)
    quantization = quantization_config(folder) or {}
    layers: dict[Module, None] = {}
    for module in _fused(checkpoint, text, tensor_parallel):
        taken = _of_gguf(module) if source == gguf.FORMAT else _of_folder(source, module, model_dtype, quantization)
        if taken is not None:
            each = replace(taken, fused=())
            layers |= dict.fromkeys((each,) if each.experts else (replace(each, bias=False), each))
    if not layers:
        raise FormatError(f"{path}: its quantized layers are left to vLLM's own kernels")
    act_order = _in_act_order(quantization)
    if not any(layer.experts for layer in layers):
        return Model(tuple(layers), model_dtype, act_order)
    activation = "swiglu_oai" if source.name == "mxfp4" else _activation(text)
    counts = (text.get(name) for name in _TOP_K)  # a list of one for each layer would be none
    top_k = next((count for count in counts if isinstance(count, int)), 0)
    return Model(tuple(layers), model_dtype, act_order, activation, top_k)


def _of_folder(
    source: CheckpointFormat, module: Module, dtype: torch.dtype, quantization: Mapping[str, Any]
) -> Module | None:
    """Return a fused module of a quantized folder as it is multiplied; None if it is left to vLLM.

    Args:
        dtype: of the model.
        quantization: the folder's quantization_config.
    """
    format, activations = module.format, module.activations
    if module.k % format.group_length(module.k):
        return None
    integers = format.element_rule.counts
    if format.bits != 4 and (module.experts or not (integers or _in_16_bits(source, format, quantization))):
        return None  # which our plugin does not take over
    if format.bits == 6 and not integers and source.name != "quark":
        return None  # which vLLM does not load
    if source.name == "quark" and activations and not module.experts:
        return None  # for which vLLM has no list of kernels
    if source.name == "auto-round" and format.scale != "e8m0":
        return None  # which vLLM does not load
    if integers and source.name == "modelopt":
        return None  # which vLLM does not load
    if integers:
        format = replace(format, scale=SCALES[dtype])
    else:
        activations = _activations_of_floats(module, source.name == "compressed-tensors") if format.bits == 4 else None
    return replace(module, format=VLLM.multiplied(format, activations), activations=activations)


def _of_gguf(module: Module) -> Module | None:
    """Return a fused module of a GGUF file, or None if it is left to vLLM: a head that is the table of embeddings,
    NVFP4, experts with biases, and blocks that are divided between two GPUs."""
    format = module.format
    block = 256 if format.scale_rule.factor_columns or format.scale == "fp32" else format.group_size
    left = module.shared or format.has_channels or (module.experts and module.bias) or module.k % block
    return None if left else module


def _config_of_gguf(checkpoint: gguf.GGUFCheckpoint) -> dict[str, Any]:
    """Return the config.json beside a GGUF file, which vLLM reads, with counts that the file's header has in its place.

    Raises:
        FormatError: for an architecture whose names of tensors are not known.
    """
    if checkpoint.architecture not in ARCHITECTURES:
        legal = ", ".join(ARCHITECTURES)
        raise FormatError(f"{checkpoint.path}: architecture: wanted one of {legal}, got {checkpoint.architecture!r}")
    folder = checkpoint.path.parent
    config = read_config(folder) if (folder / "config.json").is_file() else {}
    text = config.pop("text_config", None) or {}
    keys = {"num_key_value_heads": "attention.head_count_kv", "num_experts_per_tok": "expert_used_count"}
    counts = {name: checkpoint.file.metadata.get(f"{checkpoint.architecture}.{key}") for name, key in keys.items()}
    return {name: count for name, count in counts.items() if isinstance(count, int)} | config | text


def _activations_of_floats(module: Module, asks: bool) -> str | None:
    """Return the activations of a module in 4-bit floats. asks: True if vLLM heeds that it asks for fp8."""
    named = "mxfp4" if module.format.scale == "e8m0" else "nvfp4"
    asked = asks and named == "mxfp4" and module.activations == "fp8"
    return "fp8" if environment.takes_fp8(named, asked) else None


def _activation(config: Mapping[str, Any]) -> str:
    """Return the activation between the products of a model's experts, if not silu_mul, or the empty string. config: of
    the language model."""
    name, limit = str(config.get("mlp_hidden_act") or config.get("hidden_act")), config.get("swiglu_limit")
    if name == "swigluoai":  # MiniMax-M3
        constants = {"alpha": config.get("swiglu_alpha"), "beta": config.get("swiglu_beta"), "limit": limit}
    elif name == "situ":  # Kimi-K3
        constants = {part: config.get(f"activation_situ_{part}") for part in ("beta", "linear_beta")}
    else:
        constants = {"limit": limit} if name == "silu" else {}
    named = {"swigluoai": "swiglu_oai", "situ": "situ_mul", "silu": "silu_mul", "relu2": "relu2"} | _GATED
    arguments = ",".join(f"{part}={value!r}" for part, value in constants.items() if isinstance(value, (int, float)))
    activation = canonical(f"{named[name]}({arguments})" if arguments else named[name]) if name in named else ""
    return "" if activation in (None, "silu_mul") else str(activation)


def _in_16_bits(source: CheckpointFormat, format: WeightFormat, config: Mapping[str, Any]) -> bool:
    """True if vLLM multiplies weights in fp8 by activations in 16 bits on Hopper."""
    if format.scale == "e8m0":
        return True
    groups = (config.get("config_groups") or {}).values()
    return source.name == "compressed-tensors" and not any(group.get("input_activations") for group in groups)


def _in_act_order(config: Mapping[str, Any]) -> bool:
    """True if a quantization_config, of GPTQ or compressed-tensors, lets columns be in act-order."""
    weights = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
    return bool(config.get("desc_act")) or any(w.get("actorder") in compressed_tensors.ACT_ORDERS for w in weights)


def _fused(checkpoint: Checkpoint, config: Mapping[str, Any], gpus: int) -> list[Module]:
    """Return one GPU's modules, fused. config: of the language model."""
    families: dict[str, dict[str, Module]] = defaultdict(dict)
    experts: dict[tuple[str, str], int] = defaultdict(int)
    for name, module in checkpoint.modules.items():
        if (match := _EXPERT.fullmatch(name)) is not None:
            parent, last = match[1], match[3]
            experts[parent, last] += 1
        else:
            parent, _, last = name.rpartition(".")
        families[parent][last] = _divided(name, last, module, config, gpus)
    layers = []
    for parent, family in families.items():
        for names in FUSED:
            together = [family[name] for name in names if name in family]
            runs = [list(run) for _, run in itertools.groupby(together, lambda m: (m.k, m.format, m.activations))]
            if len(together) != len(names) or (len(runs) > 1 and not isinstance(checkpoint, gguf.GGUFCheckpoint)):
                continue
            for name in names:  # GGUF's neighbours of one type are a product, others one each
                del family[name]
            for name, run in zip(names, runs, strict=False):
                family[name] = replace(run[0], n=sum(m.n for m in run))
        layers += [replace(m, experts=m.experts or experts[parent, last]) for last, m in family.items()]
    return layers


def _divided(name: str, last: str, module: Module, config: Mapping[str, Any], gpus: int) -> Module:
    """Return a module's part on one of several GPUs."""
    n, k = module.n, module.k
    if last == "lm_head":
        n = -(-n // VOCABULARY_STEP) * VOCABULARY_STEP
    heads = config.get("num_key_value_heads")
    if last in DIVIDED_INPUTS:
        return replace(module, k=_part(name, "input", k, gpus))
    if last in WHOLE:
        return module
    if last in KEYS_AND_VALUES and heads and heads < gpus:
        return replace(module, n=_part(name, "output", n, heads))
    return replace(module, n=_part(name, "output", n, gpus))


def _part(name: str, what: str, size: int, gpus: int) -> int:
    if size % gpus:
        raise ValueError(f"--tensor-parallel: {name} has {size} {what} features, which do not divide by {gpus}")
    return size // gpus
