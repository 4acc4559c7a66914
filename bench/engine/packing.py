"""Formats of quantized checkpoints: :class:`Packing`, the tensors and the config that a format's producers write."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from bench.engine.models import Model
from bench.engine.modules import Matrix, Module, Stack

from w4gemm.core.formats import PER_COLUMN

DTYPE = torch.bfloat16
"""dtype of models."""
ZERO_WORDS = {4: 0x77777777, 8: 0x7F7F7F7F}
"""Zero points of symmetric codes by bits: GPTQ stores 8 as 7, and 128 as 127."""
_RMS = {"symmetric": 4.18, "asymmetric": 6.52, "signed": 4.64, "e2m1": 2.93, "e4m3": 16.0, "int3": 2.35, "int8": 73.9}
_RMS |= {"e2m3": 3.37, "e3m2": 9.17}
"""Root mean square of random codes: u - 8, where a u of 0 became 8; u - z; two's complements; the numbers of
e2m1, e2m3 and e3m2; normal numbers that are rounded to e4m3; u - 4 and u - 128."""


_NVFP4_SCALE = 64.0
"""About the scale of 16 columns in e4m3."""


class Numbers(NamedTuple):
    """Values of a tensor: random bits (codes), the same with 8 for each 4-bit 0 (balanced), ``value`` times a normal or
    a uniform (0.5 to 1.5) number, ``value`` everywhere, the group of each column for groups of ``value``, in order or
    in an order that depends on the number of columns alone (shuffled), random exponents of about ``value``, or
    ``numbers``."""

    kind: Literal["codes", "balanced", "normal", "uniform", "constant", "groups", "shuffled", "exponents", "numbers"]
    value: float = 0.0
    numbers: tuple[int, ...] = ()


class Tensor(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    numbers: Numbers

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


_OPTIONS = {"fp8": "ct", "act": "gptq", "head": "gptq", "dynamic": "gptq"}
"""The method of int4 that may be followed by each option."""
_WIDE = ("q_proj", "down_proj")
"""Modules of 8 bits where the others have 4: a part of a merged layer, and a whole one."""
_FLOATS = {
    f"{method}-{element}{f'-{option}' if option else ''}": (method, element, option)
    for method, element, option in (
        *(("ct", "nvfp4", ""), ("ct", "nvfp4", "a16"), ("ct", "mxfp4", ""), ("ct", "mxfp4", "fp8")),
        *(("ct", "e4m3", ""), ("ct", "e4m3", "block"), ("ct", "mxfp8", "")),
        *(("modelopt", "nvfp4", ""), ("modelopt", "nvfp4", "a16"), ("modelopt", "nvfp4", "mixed")),
        *(("quark", "nvfp4", ""), ("quark", "mxfp4", ""), ("quark", "mxfp6", ""), ("quark", "e3m2", "")),
        ("auto-round", "mxfp4", ""),
    )
}
"""Method, element and option of formats of floats, by name."""
_IN_FP8 = re.compile(
    r"(self_attn\.(q|k|v|o|q_b)|mlp\.(shared_experts?\.)?(gate|up|down)|linear_attn\.out"
    r"|mixer\.(q|k|v|o|in|out|shared_experts\.(up|down)))_proj"
)
"""Modules in fp8 beside experts in NVFP4."""
_GROUPS = {"nvfp4": 16, "mxfp4": 32, "mxfp6": 32, "e3m2": 32, "mxfp8": 32, "e4m3": PER_COLUMN}
_MX = {"mxfp4": ("e2m1", "fp4", 4), "mxfp6": ("e2m3", "fp6_e2m3", 6), "e3m2": ("e3m2", "fp6_e3m2", 6)}
"""Codes, Quark's dtype and bits of the elements that have a power of two for each 32 columns, and bytes of codes."""


@dataclass(frozen=True)
class Packing:
    """Format of a checkpoint.

    Attributes:
        element: of the weights; floats have a group size of their own.
        option: "fp8" if the engine quantizes activations to e4m3 for each token, as compressed-tensors' W4AFP8 wants;
            "act" for columns in act-order (desc_act); "head" for an lm_head in 4 bits; "dynamic" for 8 bits of some
            modules; "a16" for NVFP4 whose config wants 16-bit activations; "mixed" for experts in NVFP4 beside most
            other modules in fp8, with a scale for each tensor (ModelOpt's MIXED_PRECISION); "block" for a scale for
            each 128 x 128.
    """

    method: Literal[
        "gptq",
        "auto-round",
        "awq",
        "ct",
        "modelopt",
        "quark",
        "mxfp4",
        "deepseek-v4",
        "gguf-q4_k_m",
        "gguf-q5_k_m",
        "bf16",
    ]
    group_size: int = 0
    element: Literal["int3", "int4", "int8", "nvfp4", "mxfp4", "mxfp6", "e3m2", "e4m3", "mxfp8"] = "int4"
    option: Literal["", "fp8", "act", "head", "dynamic", "a16", "mixed", "block"] = ""

    @classmethod
    def parse(cls, text: str) -> Packing:
        """Return the packing that :meth:`__str__` names.

        Raises:
            ValueError: if there is none.
        """
        if text in ("mxfp4", "gguf-q4_k_m", "gguf-q5_k_m", "bf16"):
            return cls(text)  # type: ignore[arg-type]
        if text == "deepseek-v4":
            return cls(text, 32, "mxfp4")
        if text in _FLOATS:
            method, element, option = _FLOATS[text]
            group_size = 128 if option == "block" else _GROUPS[element]
            return cls(method, group_size, element, option)  # type: ignore[arg-type]
        if match := re.fullmatch(r"(gptq(?=-int8)|ct)-(int[38])-g(32|64|128)", text):
            return cls(match[1], int(match[3]), match[2])  # type: ignore[arg-type]
        match = re.fullmatch(rf"(gptq|auto-round|awq|ct|quark)-int4-g(32|64|128)(?:-({'|'.join(_OPTIONS)}))?", text)
        if not match or (match[3] and match[1] != _OPTIONS[match[3]]):
            options = ", ".join(f"{method}-int4-g128-{option}" for option, method in _OPTIONS.items())
            raise ValueError(
                "format: wanted gptq-int4-g128, auto-round-int4-g128, awq-int4-g128, ct-int4-g128, quark-int4-g128, "
                f"gptq-int8-g128, ct-int3-g128, {options} (or g32, g64), {', '.join(_FLOATS)}, mxfp4, deepseek-v4, "
                f"gguf-q4_k_m, gguf-q5_k_m or bf16, got {text!r}"
            )
        return cls(match[1], int(match[2]), option=match[3] or "")  # type: ignore[arg-type]

    def __str__(self) -> str:
        if not self.group_size or self.method == "deepseek-v4":
            return self.method
        numbers = f"{self.element}-g{self.group_size}" if self.bits else self.element
        return f"{self.method}-{numbers}" + (f"-{self.option}" if self.option else "")

    @property
    def bits(self) -> int:
        """Bits of integers; 0 for floats."""
        return int(self.element.removeprefix("int")) if self.element.startswith("int") else 0

    def refusal(self, model: Model) -> str:
        """Return why there are no such checkpoints of a model, or the empty string."""
        own = self.method if self.method in ("mxfp4", "deepseek-v4") else ""
        if self.method == "bf16" or own == model.own_format:
            return ""
        return f"format: {model.name} wants {model.own_format or 'a format of int4'}, got {self}"

    def config(self, model: Model) -> dict[str, Any] | None:
        """Return quantization_config of config.json; None for dense weights."""
        inner = [m for i in range(model.layers) for m in model.layer(i) if isinstance(m, Matrix)]
        dense = list(dict.fromkeys(m.name for m in inner if not m.quantized))
        if self.method == "bf16":
            return None
        if self.method == "mxfp4":
            ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
            return {"quant_method": "mxfp4", "modules_to_not_convert": ignored}
        if self.method == "deepseek-v4":
            return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
                    "weight_block_size": [128, 128]}  # fmt: skip
        if self.method == "gptq":
            quantized = [re.sub(r"experts\.\d+\.", "experts.0.", m.name) for m in inner if m.quantized]
            quantized += ["lm_head"] if self.option == "head" else []
            config = {"quant_method": "gptq", "bits": self.bits, "group_size": self.group_size, "sym": True}
            config |= {"desc_act": self.option == "act", "lm_head": self.option == "head"}
            if self.option == "dynamic":
                config["dynamic"] = {rf"+:.*\.({'|'.join(_WIDE)})$": {"bits": 8}}
            return {**config, "modules_in_block_to_quantize": [list(dict.fromkeys(quantized))]}
        if self.method == "awq":
            config = {"quant_method": "awq", "bits": 4, "group_size": self.group_size, "zero_point": True}
            return {**config, "version": "gemm", "modules_to_not_convert": ["lm_head", *dense]}
        if self.option == "mixed":
            layers = ((f"model.layers.{i}.{m.name}", m) for i in range(model.layers) for m in model.layer(i))
            algorithms = {name: self._algorithm(m) for name, m in layers if isinstance(m, Matrix)}
            config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
            quantized = {name: {"quant_algo": each} for name, each in algorithms.items() if each}
            return {**config, "exclude_modules": ["lm_head"], "quantized_layers": quantized}
        if self.method == "modelopt":
            algorithm = "W4A16_NVFP4" if self.option == "a16" else "NVFP4"
            config = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": self.group_size}
            return {**config, "kv_cache_quant_algo": None, "ignore": ["lm_head", *(f"*{name}" for name in dense)]}
        if self.method in ("auto-round", "quark"):
            names = [f"model.layers.{i}.{name}" for i in range(model.layers) for name in dense]
            return self._quark(names) if self.method == "quark" else self._auto_round(names)
        return self._compressed_tensors(dense)

    def _auto_round(self, dense: list[str]) -> dict[str, Any]:
        kind = {"packing_format": "auto_round:auto_gptq", "data_type": "int"}
        if self.element == "mxfp4":
            kind = {"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp", "act_bits": 4}
            kind |= {"act_data_type": "mx_fp", "act_group_size": 32, "act_dynamic": True}
        config = {"quant_method": "auto-round", **kind, "bits": 4, "group_size": self.group_size, "sym": True}
        config |= {"block_name_to_quantize": "model.layers"}
        return {**config, "extra_config": {name: {"bits": 16, "data_type": "float"} for name in dense}}

    def _quark(self, dense: list[str]) -> dict[str, Any]:
        group = {"qscheme": "per_group", "ch_axis": -1, "group_size": self.group_size, "is_dynamic": False}
        dtype = _MX[self.element][1] if self.element in _MX else "fp4"
        weight: Any = {**group, "dtype": dtype, "scale_format": "e8m0"}
        activations: Any = {**weight, "is_dynamic": True}
        if self.element == "int4":
            weight, activations = {**group, "dtype": "int4", "symmetric": True}, None
        elif self.element == "nvfp4":
            tensor = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "is_scale_quant": True}
            weight, activations = ([{**each, "scale_format": "float32"}, tensor] for each in (weight, activations))
        return {
            "quant_method": "quark",
            "global_quant_config": {"weight": weight, "input_tensors": activations, "output_tensors": None},
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "exclude": ["lm_head", *dense],
            "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        }

    def _compressed_tensors(self, dense: list[str]) -> dict[str, Any]:
        format = {"e4m3": "float-quantized", "mxfp8": "mxfp8-quantized"}.get(self.element)
        format = format or ("pack-quantized" if self.bits else f"{self.element}-pack-quantized")
        bits = self.bits or (8 if self.element in ("e4m3", "mxfp8") else 4)
        kind = {"num_bits": bits, "type": "int" if self.bits else "float", "symmetric": True}
        kind |= {"strategy": "tensor_group" if self.element == "nvfp4" else "group", "group_size": self.group_size}
        if self.element == "e4m3":
            blocks = {"strategy": "block", "block_structure": [128, 128]}
            kind |= {"group_size": None} | (blocks if self.option == "block" else {"strategy": "channel"})
        if self.element == "mxfp8":
            kind["scale_dtype"] = "torch.uint8"
        activations: dict[str, Any] | None = None
        if self.option == "fp8":
            activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
        elif self.element == "nvfp4" and self.option != "a16":
            activations = {**kind, "dynamic": "local", "observer": "minmax"}
        group = {"targets": ["Linear"], "weights": {**kind, "dynamic": False, "observer": "minmax"}, "format": format}
        return {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "ignore": ["lm_head", *(f"re:.*{re.escape(name)}$" for name in dense)],
            "config_groups": {"group_0": {**group, "input_activations": activations, "output_activations": None}},
        }

    def _algorithm(self, module: Matrix) -> str:
        """Return a module's format in a mixed checkpoint, or the empty string."""
        if ".experts." in module.name:
            return "NVFP4"
        return "FP8" if _IN_FP8.fullmatch(module.name) else ""

    def tensors(self, module: Module) -> Iterator[Tensor]:
        """Tensors of a module, as the format's producers name and shape them."""
        if isinstance(module, Stack):
            yield from _mxfp4(module)
        elif isinstance(module, Matrix):
            if module.bias:
                yield Tensor(f"{module.name}.bias", DTYPE, (module.n,), Numbers("normal", 0.1))
            if self.option == "mixed" and (algorithm := self._algorithm(module)) != "NVFP4":
                module = module._replace(quantized=algorithm == "FP8")
            if self.group_size and (module.quantized or (self.option == "head" and module.name == "lm_head")):
                yield from self._quantized(module)
            else:
                std = module.gain * module.k**-0.5
                yield Tensor(f"{module.name}.weight", DTYPE, (module.n, module.k), Numbers("normal", std))
        else:
            dtype = getattr(torch, module.dtype) if module.dtype else DTYPE
            numbers = Numbers("normal", module.std) if module.std else Numbers("constant", 1.0)
            yield Tensor(module.name, dtype, module.shape, numbers)

    def _quantized(self, module: Matrix) -> Iterator[Tensor]:
        if self.method == "gptq" or (self.method == "auto-round" and self.bits):
            wide = self.option == "dynamic" and module.name.endswith(_WIDE)
            return _gptq(module, self.group_size, 8 if wide else self.bits, act_order=self.option == "act")
        if self.method == "awq":
            return _awq(module, self.group_size)
        if self.method == "deepseek-v4":
            return _deepseek4(module)
        if self.method == "quark" and self.element == "int4":
            return _quark_integers(module, self.group_size)
        if self.bits:
            return _compressed(module, self.group_size, self.bits)
        if self.option == "mixed" and self._algorithm(module) == "FP8":
            return _scaled_bytes(module)
        return (_bytes if self.element in ("e4m3", "mxfp8") else _floats)(module, self)


def _scale(module: Matrix, codes: str) -> Numbers:
    return Numbers("uniform", module.gain * module.k**-0.5 / _RMS[codes])


def _codes(bits: int) -> tuple[Numbers, str]:
    """Return how codes of symmetric integers are drawn, and the name of what they stand for."""
    return (Numbers("balanced"), "symmetric") if bits == 4 else (Numbers("codes"), f"int{bits}")


def _gptq(module: Matrix, group_size: int, bits: int, act_order: bool) -> Iterator[Tensor]:
    name, n, k = module.name, module.n, module.k
    codes, numbers = _codes(bits)
    zero = Numbers("constant", ZERO_WORDS[bits])
    yield Tensor(f"{name}.qweight", torch.int32, (k * bits // 32, n), codes)
    yield Tensor(f"{name}.qzeros", torch.int32, (k // group_size, n * bits // 32), zero)
    yield Tensor(f"{name}.scales", DTYPE, (k // group_size, n), _scale(module, numbers))
    yield Tensor(f"{name}.g_idx", torch.int32, (k,), Numbers("shuffled" if act_order else "groups", group_size))


def _awq(module: Matrix, group_size: int) -> Iterator[Tensor]:
    name, n, k = module.name, module.n, module.k
    yield Tensor(f"{name}.qweight", torch.int32, (k, n // 8), Numbers("codes"))
    yield Tensor(f"{name}.qzeros", torch.int32, (k // group_size, n // 8), Numbers("codes"))
    yield Tensor(f"{name}.scales", DTYPE, (k // group_size, n), _scale(module, "asymmetric"))


def _compressed(module: Matrix, group_size: int, bits: int) -> Iterator[Tensor]:
    name, n, k = module.name, module.n, module.k
    codes, numbers = _codes(bits)
    yield Tensor(f"{name}.weight_packed", torch.int32, (n, k * bits // 32), codes)
    yield Tensor(f"{name}.weight_scale", DTYPE, (n, k // group_size), _scale(module, numbers))
    yield Tensor(f"{name}.weight_shape", torch.int64, (2,), Numbers("numbers", numbers=(n, k)))


def _bytes(module: Matrix, packing: Packing) -> Iterator[Tensor]:
    """e4m3 with a scale for each row or block, or a power of two for 32 columns."""
    name, n, k = module.name, module.n, module.k
    yield Tensor(f"{name}.weight", torch.float8_e4m3fn, (n, k), Numbers("normal", _RMS["e4m3"]))
    if packing.element == "e4m3":
        shape = (n // 128, k // 128) if packing.option == "block" else (n, 1)
        yield Tensor(f"{name}.weight_scale", DTYPE, shape, _scale(module, "e4m3"))
    else:
        exponent = 127 + round(math.log2(module.gain * k**-0.5 / _RMS["e4m3"]))
        yield Tensor(f"{name}.weight_scale", torch.uint8, (n, k // 32), Numbers("exponents", exponent))


def _scaled_bytes(module: Matrix) -> Iterator[Tensor]:
    """e4m3 with a scale for the tensor, and one for the activations."""
    yield Tensor(f"{module.name}.weight", torch.float8_e4m3fn, (module.n, module.k), Numbers("normal", _RMS["e4m3"]))
    scale = module.gain * module.k**-0.5 / _RMS["e4m3"]
    yield Tensor(f"{module.name}.weight_scale", torch.float32, (), Numbers("constant", scale))
    yield Tensor(f"{module.name}.input_scale", torch.float32, (), Numbers("constant", 1 / 64))


def _quark_integers(module: Matrix, group_size: int) -> Iterator[Tensor]:
    """Two's complements, with zero points of 0."""
    name, n, k = module.name, module.n, module.k
    yield Tensor(f"{name}.weight", torch.int32, (k, n // 8), Numbers("codes"))
    yield Tensor(f"{name}.weight_zero_point", torch.int32, (k // group_size, n // 8), Numbers("constant", 0))
    yield Tensor(f"{name}.weight_scale", DTYPE, (k // group_size, n), _scale(module, "signed"))


def _floats(module: Matrix, packing: Packing) -> Iterator[Tensor]:
    """NVFP4, whose weights compressed-tensors divides and others multiply by a scale of the tensor, equal for modules
    that an engine fuses; or MXFP4 or MXFP6."""
    name, n, k = module.name, module.n, module.k
    codes, _, bits = _MX.get(packing.element, _MX["mxfp4"])
    groups, scale = (n, k // packing.group_size), module.gain * k**-0.5 / _RMS[codes]
    divides, packed = packing.method == "ct", packing.method in ("ct", "auto-round")
    yield Tensor(f"{name}.weight{'_packed' * packed}", torch.uint8, (n, k * bits // 8), Numbers("codes"))
    if packing.element in _MX:
        exponent = 127 + round(math.log2(scale))
        yield Tensor(f"{name}.weight_scale", torch.uint8, groups, Numbers("exponents", exponent))
        return
    yield Tensor(f"{name}.weight_scale", torch.float8_e4m3fn, groups, Numbers("uniform", _NVFP4_SCALE))
    if divides:
        yield Tensor(f"{name}.weight_global_scale", torch.float32, (1,), Numbers("constant", _NVFP4_SCALE / scale))
    else:
        yield Tensor(f"{name}.weight_scale_2", torch.float32, (), Numbers("constant", scale / _NVFP4_SCALE))
    if packing.option == "a16":
        return
    if divides:
        yield Tensor(f"{name}.input_global_scale", torch.float32, (1,), Numbers("constant", 256.0))
    else:
        leaf = "input_scale_2" if packing.method == "quark" else "input_scale"
        yield Tensor(f"{name}.{leaf}", torch.float32, (), Numbers("constant", 1 / 256))


def _deepseek4(module: Matrix) -> Iterator[Tensor]:
    """Experts in MXFP4; others in e4m3 with a power of two for each 128 x 128."""
    name, n, k, scale = module.name, module.n, module.k, module.gain * module.k**-0.5
    if ".experts." in name:
        yield Tensor(f"{name}.weight", torch.int8, (n, k // 2), Numbers("codes"))
        grid, codes = (n, k // 32), "e2m1"
    else:
        yield Tensor(f"{name}.weight", torch.float8_e4m3fn, (n, k), Numbers("normal", _RMS["e4m3"]))
        grid, codes = (-(-n // 128), -(-k // 128)), "e4m3"
    exponent = Numbers("exponents", 127 + round(math.log2(scale / _RMS[codes])))
    yield Tensor(f"{name}.scale", torch.float8_e8m0fnu, grid, exponent)


def _mxfp4(stack: Stack) -> Iterator[Tensor]:
    """gpt-oss's layout: blocks of 32 numbers along k, two a byte, with an e8m0 scale each."""
    shape = stack.experts, stack.n, stack.k // 32
    exponent = 127 + round(math.log2(stack.gain * stack.k**-0.5 / _RMS["e2m1"]))
    yield Tensor(f"{stack.name}_blocks", torch.uint8, (*shape, 16), Numbers("codes"))
    yield Tensor(f"{stack.name}_scales", torch.uint8, shape, Numbers("exponents", exponent))
    yield Tensor(f"{stack.name}_bias", DTYPE, shape[:2], Numbers("normal", 0.1))
