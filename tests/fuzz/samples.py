"""Small whole files of every format that is read, for :mod:`fuzz.files` to damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from engine_tensors import AWQ_ORDER, words
from fuzz import gguf_samples
from w4gemm import QuantizedWeight, WeightFormat
from w4gemm.checkpoints.w4gemm import settings
from w4gemm.tuning.random_weight import random_weight

N, K, GROUP = 32, 64, 32
BLOCK = [2, 2]
"""Rows and columns of the weights in fp8 that share a scale. Since a weight's last blocks may be cut off, other sizes
would often fit as many scales; instead of these none do."""


class Sample(NamedTuple):
    """A whole file or folder."""

    damaged: Path
    """The file of it that is damaged."""
    path: Path
    """The path that is opened."""


class Numbers(NamedTuple):
    """Random numbers of a module."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    @classmethod
    def of(cls, seed: int) -> Numbers:
        g = torch.Generator().manual_seed(seed)
        groups = N, K // GROUP
        codes = torch.randint(0, 16, (N, K), generator=g, dtype=torch.uint8)
        scales = (torch.rand(groups, generator=g) / 50 + 0.01).half()
        return cls(codes, scales, torch.randint(1, 16, groups, generator=g, dtype=torch.uint8))


def _folder(
    folder: Path, quantization: dict[str, Any], tensors: dict[str, torch.Tensor], texts: dict[str, str] | None = None
) -> Path:
    """``texts``: metadata of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "hidden_size": K, "num_hidden_layers": 1, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    dense = {"model.norm.weight": torch.ones(K).half(), "model.a.bias": torch.zeros(N).half()}
    save_file({name: t.contiguous() for name, t in (dense | tensors).items()}, folder / "model.safetensors", texts)
    return folder


def _modules(stored: Callable[[Numbers], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        f"model.{name}.{leaf}": t
        for seed, name in enumerate(("a", "b"))
        for leaf, t in stored(Numbers.of(seed)).items()
    }


def _gptq(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        g_idx = (torch.arange(K) // GROUP).int()
        zeros = words(m.zeros.T - 1)
        return {"qweight": words(m.codes).T, "qzeros": zeros, "scales": m.scales.T, "g_idx": g_idx}

    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
    return _folder(folder, config, _modules(stored))


def _gptq_planes(folder: Path) -> Path:
    """Of 6 bits: words of four, then of two, for each 32 codes."""

    def planes(codes: torch.Tensor) -> torch.Tensor:
        low = words((codes & 15).view(len(codes), -1, 32)).view(len(codes), -1, 4)
        twos = (codes >> 4).view(len(codes), -1, 2, 16).long() << torch.arange(0, 32, 2)
        high = torch.where((sums := twos.sum(-1)) >= 2**31, sums - 2**32, sums).int()
        return torch.cat((low, high), -1).flatten(1)

    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        codes, zeros = m.codes | m.codes.flip(0) << 4 & 48, m.zeros.T | 16
        return {"qweight": planes(codes).T, "qzeros": planes(zeros), "scales": m.scales.T}

    config = {"quant_method": "gptq", "bits": 6, "group_size": GROUP, "sym": False, "checkpoint_format": "gptq_p"}
    return _folder(folder, config, _modules(stored))


def _awq(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        codes, zeros = (words(t.T, AWQ_ORDER) for t in (m.codes, m.zeros))
        return {"qweight": codes, "qzeros": zeros, "scales": m.scales.T}

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return _folder(folder, config, _modules(stored))


def _compressed(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        zeros, shape = words(m.zeros.T).T, torch.tensor([N, K])
        return {
            "weight_packed": words(m.codes),
            "weight_scale": m.scales,
            "weight_shape": shape,
            "weight_zero_point": zeros,
        }

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": []}
    return _folder(folder, config, _modules(stored))


def _integers(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        return {"weight": m.codes.to(torch.int8) - 8, "weight_scale": m.scales, "weight_shape": torch.tensor([N, K])}

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    groups = {"group_0": {"targets": ["re:.*"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups, "ignore": []}
    return _folder(folder, config, _modules(stored))


def _compressed_floats(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        return {
            "weight_packed": _pairs(m.codes),
            "weight_scale": _e4m3_scales(),
            "weight_global_scale": torch.tensor([2.0**14]),
        }

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 4}}}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    return _folder(folder, config, _modules(stored))


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4


def _e4m3_scales() -> torch.Tensor:
    return (torch.rand(N, K // 16, generator=torch.Generator().manual_seed(3)) * 400).to(torch.float8_e4m3fn)


def _modelopt(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        return {"weight": _pairs(m.codes), "weight_scale": _e4m3_scales(), "weight_scale_2": torch.tensor(2.0**-14)}

    return _folder(folder, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, _modules(stored))


def _modelopt_integers(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        smooth = torch.rand(K, generator=torch.Generator().manual_seed(4)) + 0.5
        packed = m.codes[::2] | m.codes[1::2] << 4
        return {"weight": packed, "weight_scale": m.scales, "pre_quant_scale": smooth.half()}

    return _folder(
        folder, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": GROUP}, _modules(stored)
    )


def _modelopt_w4a8(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        scales = {"weight_scale": m.scales.float(), "weight_scale_2": torch.tensor(0.5), "input_scale": torch.ones(1)}
        return {"weight": m.codes[::2] | m.codes[1::2] << 4} | scales

    config = {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ", "group_size": GROUP}
    return _folder(folder, config, _modules(stored))


def _experts(stored: Callable[[Numbers], dict[str, torch.Tensor]], roles: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Two experts, one by one; N is half of K, so that gate and up are as large as down."""
    names = [f"model.layers.0.mlp.experts.{e}.{role}" for e in range(2) for role in roles]
    each = {name: stored(Numbers.of(seed)) for seed, name in enumerate(names)}
    return {f"{name}.{leaf}": t for name, parts in each.items() for leaf, t in parts.items()}


def _in_mx(m: Numbers) -> dict[str, torch.Tensor]:
    return {"weight_packed": _pairs(m.codes), "weight_scale": torch.full((N, K // 32), 120, dtype=torch.uint8)}


def _in_fp8(scale: str) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    weight = torch.randn(N, K, generator=g).to(torch.float8_e4m3fn)
    powers = torch.exp2(torch.randint(-5, -1, (N // BLOCK[0], K // BLOCK[1]), generator=g).float())
    return {"model.fp8.weight": weight, f"model.fp8.{scale}": powers.to(torch.float8_e8m0fnu)}


def _w4afp8(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        scales = {"weight_scale_inv": m.scales.float(), "input_scale": torch.ones(1)}
        return {"weight": _pairs(m.codes).view(torch.int8)} | scales

    config = {"quant_method": "w4afp8", "group_size": GROUP, "weight_block_size": BLOCK}
    roles = ("gate_proj", "up_proj", "down_proj")
    return _folder(folder, config, _experts(stored, roles) | _in_fp8("weight_scale_inv"))


def _deepseek_v4(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        exponents = torch.randint(118, 124, (N, K // 32), generator=torch.Generator().manual_seed(int(m.codes[0, 0])))
        return {"weight": _pairs(m.codes).view(torch.int8), "scale": exponents.byte().view(torch.float8_e8m0fnu)}

    config = {"quant_method": "fp8", "expert_dtype": "fp4", "weight_block_size": BLOCK}
    return _folder(folder, config, _experts(stored, ("w1", "w3", "w2")) | _in_fp8("scale"))


def _kimi(folder: Path) -> Path:
    """Experts in MXFP4 of a model that is a part of another one, whose config is part of the other's too."""

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": groups}
    tensors = {f"language_model.{name}": t for name, t in _experts(_in_mx, ("w1", "w3", "w2")).items()}
    _folder(folder, config, tensors)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    return folder


def _mxfp4(folder: Path) -> Path:
    """Experts as gpt-oss has them."""
    g, experts = torch.Generator().manual_seed(6), 2
    tensors: dict[str, torch.Tensor] = {}
    for name in ("gate_up_proj", "down_proj"):
        at = f"model.layers.0.mlp.experts.{name}"
        tensors[f"{at}_blocks"] = torch.randint(0, 256, (experts, N, K // 32, 16), generator=g, dtype=torch.uint8)
        tensors[f"{at}_scales"] = torch.randint(118, 124, (experts, N, K // 32), generator=g, dtype=torch.uint8)
        tensors[f"{at}_bias"] = torch.rand(experts, N, generator=g).bfloat16()
    return _folder(folder, {"quant_method": "mxfp4"}, tensors)


def _hqq(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        rows = m.codes.view(-1, GROUP)
        numbers = {"shape": [N, K], "nbits": 4, "group_size": GROUP, "axis": 1, "packing": [*b"4bit_u8"]}
        settings = {leaf: torch.tensor(value, dtype=torch.int32) for leaf, value in numbers.items()}
        scales, zeros = m.scales.reshape(-1, 1), m.zeros.reshape(-1, 1).half() + 0.25
        return {"W_q": rows[: len(rows) // 2] << 4 | rows[len(rows) // 2 :], "scale": scales, "zero": zeros} | settings

    return _folder(folder, {"quant_method": "hqq"}, _modules(stored))


def _quark(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        codes, zeros = (words(t.T, AWQ_ORDER) for t in (m.codes, m.zeros))
        return {"weight": codes, "weight_zero_point": zeros, "weight_scale": m.scales.T}

    weight = {"dtype": "uint4", "qscheme": "per_group", "ch_axis": -1, "group_size": GROUP, "symmetric": False}
    export = {"pack_method": "reorder", "kv_cache_group": []}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}, "export": export, "exclude": []}
    return _folder(folder, config, _modules(stored))


def _torchao(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        factors = {"_weight_scale": m.scales.T, "_weight_zero_point": m.zeros.T.half() / 100}
        return {"_weight_qdata": _pairs(m.codes).view(torch.int8)} | factors

    about = {"_type": "Int4Tensor", "_data": {"block_size": [1, GROUP], "shape": [N, K]}}
    texts = {f"model.{name}.weight": json.dumps(about) for name in ("a", "b")}
    return _folder(folder, {"quant_method": "torchao"}, _modules(stored), texts)


def _quark_int8(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        return {"weight": m.codes.to(torch.int8) * 16, "weight_scale": m.scales[:, 0].clone()}

    weight = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": []}
    return _folder(folder, config | {"export": {"pack_method": "reorder"}}, _modules(stored))


def _torchao_fp8(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        return {"_weight_qdata": m.codes.float().to(torch.float8_e4m3fn), "_weight_scale": m.scales[:, :1].float()}

    texts = {f"model.{name}.weight": {"_type": "Float8Tensor", "_data": {"block_size": [1, K]}} for name in ("a", "b")}
    about = {name: json.dumps(text) for name, text in texts.items()}
    return _folder(folder, {"quant_method": "torchao"}, _modules(stored), about)


def _auto_round(folder: Path) -> Path:
    """MXINT4: signs and numbers of quarters."""

    config = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}
    return _folder(folder, config | {"data_type": "mx_int", "bits": 4, "group_size": 32}, _modules(_in_mx))


def _bitsandbytes(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        pairs, state = m.codes.view(-1, 2), {"blocksize": GROUP, "shape": [N, K], "quant_type": "nf4"}
        return {
            "weight": pairs[:, :1] << 4 | pairs[:, 1:],
            "weight.absmax": m.scales.float().flatten(),
            "weight.quant_map": torch.linspace(-1, 1, 16),
            "weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
        }

    return _folder(folder, {"quant_method": "bitsandbytes", "load_in_4bit": True}, _modules(stored))


def _llm_int8(folder: Path) -> Path:
    def stored(m: Numbers) -> dict[str, torch.Tensor]:
        format = torch.tensor(0, dtype=torch.uint8)
        return {"weight": m.codes.to(torch.int8), "SCB": m.scales[:, 0].float(), "weight_format": format}

    return _folder(folder, {"quant_method": "bitsandbytes", "load_in_8bit": True}, _modules(stored))


def _weights() -> dict[str, QuantizedWeight]:
    formats = {"model.a": "int4_g32_zint", "model.b": "mxfp4", "model.c": "q4_k", "model.d": "nf4_g32_fp32"}
    return {name: random_weight(WeightFormat.parse(f), N, K, seed) for seed, (name, f) in enumerate(formats.items())}


def _own(folder: Path) -> Path:
    made = _weights()
    tensors = {f"{name}.{leaf}": t for name, w in made.items() for leaf, t in w.named_tensors().items()}
    return _folder(folder, settings(made.items()), tensors)


def _weight_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    _weights()["model.a"].save(folder / "weight.safetensors")
    return folder / "weight.safetensors"


FORMATS: dict[str, Callable[[Path], Path]] = {
    "gptq": _gptq,
    "gptq-planes": _gptq_planes,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "compressed-integers": _integers,
    "compressed-nvfp4": _compressed_floats,
    "modelopt": _modelopt,
    "modelopt-integers": _modelopt_integers,
    "modelopt-w4a8": _modelopt_w4a8,
    "mxfp4": _mxfp4,
    "w4afp8": _w4afp8,
    "deepseek-v4": _deepseek_v4,
    "kimi": _kimi,
    "hqq": _hqq,
    "quark": _quark,
    "quark-int8": _quark_int8,
    "torchao": _torchao,
    "torchao-fp8": _torchao_fp8,
    "bitsandbytes": _bitsandbytes,
    "llm-int8": _llm_int8,
    "w4gemm": _own,
    "gguf": gguf_samples.tensors,
    "gguf-experts": gguf_samples.experts,
    "weight": _weight_file,
}


def samples(name: str, folder: Path) -> list[Sample]:
    """Make a whole file or folder; one sample for each of its files."""
    path = FORMATS[name](folder)
    return [Sample(path, path)] if path.is_file() else [Sample(file, path) for file in sorted(path.iterdir())]
