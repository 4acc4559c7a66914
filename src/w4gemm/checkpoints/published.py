"""Models whose experts their makers publish in 4 bits: gpt-oss, DeepSeek-V4, and DeepSeek in W4AFP8. Other linear
layers are dense, or in fp8 with scales of blocks; folders of the method fp8 have no others.

- gpt-oss in MXFP4: a module of all experts is ``<name>_blocks`` uint8 (experts, n, k / 32, 16), two codes a byte, the
  first one in the low bits; ``<name>_scales`` uint8 (experts, n, k / 32), e8m0; and perhaps ``<name>_bias`` (experts,
  n). Rows of gate_up_proj are gate 0, up 0, gate 1, up 1, ... w = 2**(scale - 127) * e2m1(code).
- DeepSeek-V4: a module of one expert is ``weight`` int8 (n, k / 2), two codes of e2m1 a byte, the even column in the
  low nibble, and ``scale`` e8m0 (n, k / 32). Names are those of DeepSeek's own code, ``layers.0.ffn.experts.0.w1``;
  transformers knows them. config.json says the method fp8, and ``expert_dtype`` fp4. Activations stay in 16 bits.
  DeepSeek's code quantizes x to e4m3 with a scale for each 128 columns; ``activations="fp8"`` does with one for each
  token.
- W4AFP8, as TensorRT-LLM's script writes it and SGLang serves it: 4-bit integers with e4m3 activations. A module of
  one expert is ``weight`` int8 (n, k / 2), two's complements of two columns a byte, the even one in the low nibble;
  ``weight_scale_inv`` float32 (n, k / 128), which multiplies; and ``input_scale``, also under the expert's name w1, w2
  or w3 for gate_proj, down_proj or up_proj. config.json names the method "w4afp8", or hf_quant_config.json says
  MIXED_PRECISION. x is quantized with a scale for each token instead of ``input_scale`` for all. Scales become bf16, as
  both engines round them: by at most 2**-8 of themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from w4gemm.checkpoints.base import Module
from w4gemm.checkpoints.experts import fused_in
from w4gemm.checkpoints.hugging_face import TensorInfo
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.packed_floats import MXFP4, numbers
from w4gemm.checkpoints.packed_numbers import PackedMatrix, PackedNumbers
from w4gemm.checkpoints.quantized_folder import Packing
from w4gemm.checkpoints.stored import check_tensor, whole_groups
from w4gemm.core.formats import WeightFormat

_BLOCK_BYTES = MXFP4.group_size // 2
_OF_GPT_OSS = re.compile(r"(.*\bexperts\.\w+)_(blocks|scales|bias)")
_ROLES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT = re.compile(rf"(.*\bexperts\.\d+)\.({'|'.join(_ROLES)})\.(\w+)")


class GptOss(Packing):
    method = "mxfp4"
    contents = "a folder with gpt-oss in MXFP4"
    marks = ("blocks", "scales")

    @staticmethod
    def renamed(name: str) -> str:
        return f"{match[1]}.{match[2]}" if (match := _OF_GPT_OSS.fullmatch(name)) else name

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        for leaf in self.marks:
            if leaf not in stored or stored[leaf].dtype != "U8":
                came = stored[leaf].dtype if leaf in stored else "none"
                raise ValueError(f"wanted {leaf} of uint8 (U8), got {came}")
        shape, scales = stored["blocks"].shape, stored["scales"].shape
        if len(shape) != 4 or shape[3] != _BLOCK_BYTES or 0 in shape or scales != shape[:3]:
            raise ValueError(
                f"blocks have shape {shape} and scales {scales}, wanted (experts, n, k / 32, {_BLOCK_BYTES}) and "
                "(experts, n, k / 32)"
            )
        experts, n, groups = scales
        return Module(n, groups * MXFP4.group_size, MXFP4, "bias" in stored, experts, fused_in(name))

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        return numbers(tensors["blocks"].flatten(2), tensors["scales"], module.format)


class DeepSeekV4(Packing):
    method = "deepseek-v4"
    contents = "a folder with DeepSeek-V4 as published (experts in MXFP4, the rest in fp8)"
    marks = ("scale",)
    others = ("weight",)

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        n, half = check_tensor(stored, "weight", ("I8", "U8"))
        check_tensor(stored, "scale", ("F8_E8M0", "U8"), (n, whole_groups(MXFP4, 2 * half)))
        return Module(n, 2 * half, MXFP4, "bias" in stored)

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        return numbers(tensors["weight"], tensors["scale"], module.format)


class Fp8(DeepSeekV4):
    """DeepSeek-V3 and Qwen in fp8. A packed module would be as one of DeepSeek-V4."""

    method = "fp8"
    contents = "a folder in fp8 as DeepSeek and Qwen publish it"


def w4afp8_numbers(tensors: Mapping[str, torch.Tensor], format: WeightFormat) -> PackedNumbers:
    """Return the numbers of W4AFP8's ``weight`` and ``weight_scale_inv``, which may have a dimension of experts in
    front."""
    codes = PackedMatrix(tensors["weight"], along="k", signed=True, bits=format.bits)
    return PackedNumbers(
        format, codes, PackedMatrix(tensors["weight_scale_inv"]), names=("weight", "weight_scale_inv", "")
    )


class W4AFP8(Packing):
    method = "w4afp8"
    contents = "a folder with a DeepSeek model in W4AFP8 (experts in int4, the rest in fp8)"
    marks = ("weight_scale_inv",)
    others = ("weight", "input_scale")

    @staticmethod
    def renamed(name: str) -> str:
        return f"{match[1]}.{_ROLES[match[2]]}.{match[3]}" if (match := _EXPERT.fullmatch(name)) else name

    def module(self, name: str, stored: Mapping[str, TensorInfo]) -> Module:
        n, half = check_tensor(stored, "weight", ("I8",))
        format = WeightFormat(self.config.get("group_size") or 128)
        check_tensor(stored, "weight_scale_inv", ("F32", "BF16"), (n, whole_groups(format, 2 * half)))
        return Module(n, 2 * half, format, "bias" in stored, activations="fp8")

    def numbers(self, module: Module, tensors: Mapping[str, torch.Tensor]) -> Numbers:
        return w4afp8_numbers(tensors, module.format)
