"""Weights as compressed-tensors stores them: pack-quantized integers of 2 to 6 and 8 bits, MXFP4, MXFP6, and e4m3; and
the names of a model's published files (:func:`in_files`).

transformers gives some modules other names than these files have, such as ``mlp.experts.gate_up_proj`` to what Mixtral
has as ``block_sparse_moe.experts.0.w1`` and ``w3``. It renames them when it loads and saves a model; other programs,
vLLM among them, know only the names in the files.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from w4gemm.checkpoints.account import Naming
from w4gemm.checkpoints.base import Checkpoint, Module, Renamed
from w4gemm.checkpoints.compressed_tensors import CompressedTensors
from w4gemm.checkpoints.experts import GATE_UP, as_in_models, roles_of
from w4gemm.checkpoints.hugging_face import outline
from w4gemm.core.errors import FormatError
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.packing.bits import pack
from w4gemm.weights.weight import QuantizedWeight

_MX = {WeightFormat.parse(name): f"{name}-pack-quantized" for name in ("mxfp4", "mxfp6")}
"""compressed-tensors' format by ours, of floats with e8m0 scales."""
_FP8 = {WeightFormat.parse("e4m3_col_fp32"): "channel", WeightFormat.parse("e4m3_g128_b128"): "block"}
"""Strategy of compressed-tensors by a format in fp8."""
_HEAD = "lm_head"
METHOD = "compressed-tensors"
"""``quant_method`` of these folders."""
WRITER = "written_by"
"""Key of the quantization_config by which a program that has w4gemm opens the folder with it, unasked."""


class CompressedTensorsWriter:
    """A :class:`w4gemm.checkpoints.writing.WeightWriter`. Bits stay the same, experts are written one by one, under the
    names of the model's published files. What compressed-tensors cannot hold is refused: biases of experts, float zero
    points, codebooks, float32 scales of channels, act-order, k that is no multiple of 8 or of the group size."""

    name = METHOD
    packs_embeddings = False  # its readers take packed linear layers alone
    marks = CompressedTensors.marks

    def check(self, module: Module, act_order: bool) -> None:
        if act_order:
            raise ValueError("compressed-tensors from 0.20 on does not hold weights in act-order; --to w4gemm does")
        if module.experts and module.bias:
            raise ValueError("compressed-tensors has no biases of experts; --to w4gemm has")
        if module.format in _FP8 and module.experts:
            raise ValueError("experts in fp8 are not written in compressed-tensors; --to w4gemm holds them")
        format = module.format
        integers = format.element_rule.counts and format.zero != "float" and format.scale in ("bf16", "fp16")
        if format not in (*_MX, *_FP8) and not integers:
            raise ValueError(f"compressed-tensors does not hold {format}; --to w4gemm does")
        if module.pre_quant_scale:
            raise ValueError("compressed-tensors has no factors of x (pre_quant_scale); --to w4gemm has")
        if module.k % (whole := 32 // math.gcd(32, format.bits)):
            raise ValueError(f"compressed-tensors wants k to be a multiple of {whole} in {format}, got {module.k}")
        if format not in _FP8 and format.group_size != PER_COLUMN and module.k % format.group_size:
            raise ValueError(
                f"compressed-tensors wants k to be a multiple of the group size {format.group_size}, got {module.k}; "
                "--to w4gemm holds a shorter last group"
            )

    def tensors(self, checkpoint: Checkpoint, name: str, w: QuantizedWeight) -> dict[str, torch.Tensor]:
        if not w.experts:
            return {f"{name}.{leaf}": t for leaf, t in self._leaves(w).items()}
        owner, roles = name.rpartition(".")[0], roles_of(checkpoint.modules, name)
        tensors: dict[str, torch.Tensor] = {}
        for e in range(w.experts):
            expert = w.expert(e)
            for i, role in enumerate(roles):  # every tensor has a row for each of the weight's, those of roles in turn
                rows = tuple(t[i :: len(roles)].contiguous() for t in expert.tensors)
                part = replace(expert, n=w.n // len(roles), tensors=rows)
                tensors |= {f"{owner}.{e}.{role}.{leaf}": t for leaf, t in self._leaves(part).items()}
        return tensors

    def _leaves(self, w: QuantizedWeight) -> dict[str, torch.Tensor]:
        """Tensors of one module by the last parts of their names."""
        assert w.perm is None, "checked by its index tensor"
        packed, scales, *zeros = w.tensors
        if w.format in _MX:
            return {"weight_packed": packed, "weight_scale": scales.view(torch.uint8)}
        if w.format in _FP8:
            rows = scales if w.format.group_size == PER_COLUMN else scales[::2].contiguous()  # even and odd rows' alike
            return {"weight": packed.view(torch.float8_e4m3fn), "weight_scale": rows}
        leaves = {
            "weight_packed": _words(packed),  # little-endian: the canonical order
            "weight_scale": scales,
            "weight_shape": torch.tensor([w.n, w.k], device="cpu"),
        }
        if zeros:
            leaves["weight_zero_point"] = _words(pack(zeros[0].mT.contiguous(), w.format.bits)).mT.contiguous()
        return leaves

    def named(self, checkpoint: Checkpoint) -> Checkpoint:
        return in_files(checkpoint)

    def config(self, checkpoint: Checkpoint) -> dict[str, Any]:
        assert isinstance(checkpoint, Renamed)
        kinds: dict[tuple[WeightFormat, str | None], list[str]] = {}
        for name, module in checkpoint.modules.items():
            kinds.setdefault((module.format, module.activations), []).append(_target(checkpoint, name))
        ordered = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
        groups = {
            f"group_{i}": _group(*kind, ["Linear"] if i == 0 else names) for i, (kind, names) in enumerate(ordered)
        }
        formats = {group["format"] for group in groups.values()}
        has_zero = any(module.format.has_zero for module in checkpoint.modules.values())
        matrices = [name for name, shape in checkpoint.tensors.items() if len(shape) == 2]
        both = [each for name in matrices for each in (name, checkpoint.own[name])]  # readers ask for either
        dense = list(dict.fromkeys(name.removesuffix(".weight") for name in both))
        if _HEAD not in checkpoint.modules and _HEAD not in dense:
            dense.append(_HEAD)  # tied to the embedding, so without a tensor; a linear layer to compressed-tensors
        return {
            "quant_method": METHOD,
            WRITER: "w4gemm",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": dense,
            # by default transformers allocates zero points unpacked, and refuses the packed ones by their size
            **({"dequantize": True} if has_zero and not transformers_refusal(checkpoint) else {}),
        }


def transformers_refusal(checkpoint: Checkpoint) -> str:
    """Return why transformers 5.24 with compressed-tensors 0.20 refuses a folder of :class:`CompressedTensorsWriter`;
    the empty string if it loads it."""
    modules = checkpoint.modules.values()
    if any(module.experts and module.format.has_zero for module in modules):
        return "it reads no zero points of experts"
    if len({(module.format, module.activations) for module in modules}) > 1 and any(m.format.has_zero for m in modules):
        return (
            "it reads zero points only if all layers have one format"  # with dequantize it reads the first group alone
        )
    return ""


def _target(checkpoint: Checkpoint, name: str) -> str:
    """Return what names a module, or those of all its experts, in a config group."""
    if not checkpoint.modules[name].experts:
        return name
    owner, roles = re.escape(name.rpartition(".")[0]), roles_of(checkpoint.modules, name)
    return rf"re:{owner}\.\d+\.({'|'.join(roles)})$"


def _group(format: WeightFormat, activations: str | None, targets: list[str]) -> dict[str, Any]:
    strategy = _FP8.get(format, "channel" if format.group_size == PER_COLUMN else "group")
    weights = {
        "num_bits": format.bits,
        "type": "int" if format.element_rule.counts else "float",
        "symmetric": not format.has_zero,
        "strategy": strategy,
        "group_size": format.group_size if strategy == "group" else None,
        "dynamic": False,
        **({"scale_dtype": "torch.uint8"} if format in _MX else {}),
        **({"block_structure": [128, 128]} if strategy == "block" else {}),
    }
    packing = "float-quantized" if format in _FP8 else _MX.get(format, "pack-quantized")
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": fp8 if activations == "fp8" else None,
        "output_activations": None,
        "format": packing,
    }


def _words(packed: torch.Tensor) -> torch.Tensor:
    """Return bytes (..., bytes) as int32 (..., ceil(bytes / 4)), the last word filled up with zeros."""
    words = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % 4))
    # a transposed dimension of 1 keeps its stride by contiguous(), and cannot be viewed as words then
    return words.clone(memory_format=torch.contiguous_format).view(torch.int32)


# --- names in the files -----------------------------------------------------------------------------------------------

_EXPERT = re.compile(r"(?P<owner>.+)\.\d+\.(?P<role>\w+)\.weight")
"""Name in a file of the weight of a single expert's module."""


def in_files(source: Checkpoint, model: nn.Module | None = None) -> Renamed:
    """Return a checkpoint whose modules and tensors have the names of its model's published files.

    Args:
        source: the checkpoint, whose names may be those of the model in transformers.
        model: the checkpoint's model, without numbers; None to make it of the checkpoint's config.
    """
    model = _model(source) if model is None else model
    state = {} if model is None else model.state_dict()
    naming = None if model is None else Naming(model)

    def saved_as(name: str) -> list[str]:
        return _saved_as(model, name, state[name]) if name in state else [name]

    weights, modules = dict[str, str](), dict[str, Module]()
    for name, module in source.modules.items():
        if module.experts:
            known = as_in_models(source.modules, name)
            # a saved W4Experts has the name that its owner has in the files
            in_model = naming(known) if naming and known != name and known not in state else known
            weights[name], modules[name] = _experts(known, module, saved_as(in_model))
        else:
            saved = saved_as(f"{name}.weight")  # else its weight is no tensor of its own in the files
            own_tensor = len(saved) == 1 and saved[0].endswith(".weight")
            weights[name], modules[name] = saved[0] if own_tensor else f"{name}.weight", module
    tensors = {name: saved[0] if len(saved := saved_as(name)) == 1 else name for name in source.tensors}
    times = Counter((*weights.values(), *tensors.values()))  # several of what is one tensor in the files
    own: dict[str, str] = {}
    in_file: dict[str, Module] = {}
    for name, module in modules.items():
        file_name = weights[name] if times[weights[name]] == 1 or module.experts else f"{name}.weight"
        file_name = file_name if module.experts else file_name.removesuffix(".weight")
        own[file_name], in_file[file_name] = name, module
    own |= {name if times[saved] > 1 else saved: name for name, saved in tensors.items()}
    return Renamed(source, own, in_file)


def _model(checkpoint: Checkpoint) -> nn.Module | None:
    """Return the checkpoint's model without numbers; None if transformers is not installed or makes none. None for a
    GGUF file, too, because its models have the same names everywhere."""
    folder, options, *_ = checkpoint.pretrained()
    if options:
        return None
    try:
        return outline(folder)
    except (ImportError, FormatError):
        return None


def _saved_as(model: nn.Module | None, name: str, parameter: torch.Tensor) -> list[str]:
    """Return the names that transformers saves a parameter under."""
    from transformers.core_model_loading import revert_weight_conversion

    return list(revert_weight_conversion(model, {name: parameter}))


def _experts(name: str, module: Module, names: list[str]) -> tuple[str, Module]:
    """Return the name and module of all experts of a layer, whose tensors have ``names`` in the files. If these are not
    names of single experts, both stay."""
    matches = [_EXPERT.fullmatch(each) for each in names]
    owner_roles = {(match["owner"], match["role"]) for match in matches if match is not None}
    owners, product = {owner for owner, _ in owner_roles}, name.rpartition(".")[2]
    if None in matches or len(owners) != 1:
        return name, module
    if product == GATE_UP:
        roles = tuple(dict.fromkeys(match["role"] for match in matches if match is not None))
        module = replace(module, fused=roles if len(roles) == 2 else module.fused)
    return f"{owners.pop()}.{product}", module
