"""Weights as compressed-tensors stores them: pack-quantized integers of 4 bits, MXFP4, and e4m3."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from w4gemm.checkpoints.base import Checkpoint, Module
from w4gemm.checkpoints.compressed_tensors import CompressedTensors
from w4gemm.checkpoints.experts import roles_of
from w4gemm.checkpoints.file_names import FileNames
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.weights.weight import QuantizedWeight

_MXFP4 = WeightFormat.parse("mxfp4")
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
    points, codebooks, float32 scales of channels, act-order, k that is no multiple of 8."""

    name = METHOD
    marks = CompressedTensors.marks

    def check(self, module: Module, act_order: bool) -> None:
        if act_order:
            raise ValueError("compressed-tensors from 0.20 on does not hold weights in act-order; --to w4gemm does")
        if module.experts and module.bias:
            raise ValueError("compressed-tensors has no biases of experts; --to w4gemm has")
        if module.format in _FP8 and module.experts:
            raise ValueError("experts in fp8 are not written in compressed-tensors; --to w4gemm holds them")
        if module.format not in (_MXFP4, *_FP8) and (
            module.format.element != "int4"
            or module.format.zero == "float"
            or module.format.scale not in ("bf16", "fp16")
        ):
            raise ValueError(f"compressed-tensors does not hold {module.format}; --to w4gemm does")
        if module.pre_quant_scale:
            raise ValueError("compressed-tensors has no factors of x (pre_quant_scale); --to w4gemm has")
        if module.k % 8:
            raise ValueError(f"compressed-tensors wants k to be a multiple of 8, got {module.k}")

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
        if w.format == _MXFP4:
            return {"weight_packed": packed, "weight_scale": scales.view(torch.uint8)}
        if w.format in _FP8:
            rows = scales if w.format.group_size == PER_COLUMN else scales[::2].contiguous()  # even and odd rows' alike
            return {"weight": packed.view(torch.float8_e4m3fn), "weight_scale": rows}
        leaves = {
            "weight_packed": packed.contiguous().view(torch.int32),  # little-endian: the canonical order
            "weight_scale": scales,
            "weight_shape": torch.tensor([w.n, w.k], device="cpu"),
        }
        if zeros:
            leaves["weight_zero_point"] = _along_rows(zeros[0])
        return leaves

    def named(self, checkpoint: Checkpoint) -> Checkpoint:
        return FileNames(checkpoint)

    def config(self, checkpoint: Checkpoint) -> dict[str, Any]:
        assert isinstance(checkpoint, FileNames)
        kinds: dict[tuple[WeightFormat, str | None], list[str]] = {}
        for name, module in checkpoint.modules.items():
            kinds.setdefault((module.format, module.activations), []).append(_target(checkpoint, name))
        ordered = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
        groups = {
            f"group_{i}": _group(*kind, ["Linear"] if i == 0 else names) for i, (kind, names) in enumerate(ordered)
        }
        formats = {group["format"] for group in groups.values()}
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
        }


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
        "type": "int" if format.element == "int4" else "float",
        "symmetric": not format.has_zero,
        "strategy": strategy,
        "group_size": format.group_size if strategy == "group" else None,
        "dynamic": False,
        **({"scale_dtype": "torch.uint8"} if format == _MXFP4 else {}),
        **({"block_structure": [128, 128]} if strategy == "block" else {}),
    }
    packing = "float-quantized" if format in _FP8 else "mxfp4-pack-quantized" if format == _MXFP4 else "pack-quantized"
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": fp8 if activations == "fp8" else None,
        "output_activations": None,
        "format": packing,
    }


def _along_rows(zeros: torch.Tensor) -> torch.Tensor:
    """Pack codes uint8 (n, groups) as int32 (ceil(n / 8), groups), the first row of eight lowest."""
    n, groups = zeros.shape
    padded = torch.nn.functional.pad(zeros, (0, 0, 0, -n % 8)).view(-1, 4, 2, groups)
    bytes = padded[:, :, 0] | (padded[:, :, 1] << 4)
    return bytes.transpose(1, 2).contiguous().view(torch.int32).squeeze(-1)
