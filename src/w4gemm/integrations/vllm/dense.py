"""Linear layers of GPTQ, AWQ and compressed-tensors models: a kernel in vLLM's list of mixed-precision ones."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.kernels.linear import (
    _POSSIBLE_KERNELS,
    MPLinearKernel,
    MPLinearLayerConfig,
)
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

from w4gemm.api.activations import quantized
from w4gemm.checkpoints import compressed_tensors
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.formats import PER_COLUMN, WeightFormat
from w4gemm.core.problem import GemmProblem
from w4gemm.integrations.engines.engine import LEAST
from w4gemm.integrations.engines.loading import NOTHING_LOADED, check_known
from w4gemm.integrations.engines.supports import product, why_no_kernel
from w4gemm.integrations.engines.warmup import LinearUse, linear_need
from w4gemm.integrations.engines.weights import SCALES, check_unused_zeros, int4_format
from w4gemm.integrations.vllm import fusion, takeover
from w4gemm.integrations.vllm.configs import take_configs
from w4gemm.integrations.vllm.fallback import Fallback, own_kernels
from w4gemm.integrations.vllm.packed_layer import PackedLayer

CONFIGS = (
    *("gptq", "gptq_marlin", "auto_gptq", "awq", "awq_marlin", "auto_awq"),
    *("compressed-tensors", "inc", "quark", "modelopt_mixed"),
)
"""Names of vLLM's quantization configs that may have such layers."""

_KIND = "linear layers of GPTQ, AWQ and compressed-tensors"
_FP8 = torch.float8_e4m3fn
_UNUSED = ("weight_shape", "qzeros", "g_idx", "weight_g_idx", "weight_zero_point")
"""Parameters that vLLM's methods make and that the numbers do not need, of symmetric layers and of columns in order."""


def install() -> None:
    """Put :class:`W4GemmLinearKernel` first in vLLM's list for NVIDIA GPUs, and watch what its layers load."""
    take_configs(CONFIGS)
    kernels = _POSSIBLE_KERNELS[PlatformEnum.CUDA]
    if W4GemmLinearKernel not in kernels:
        kernels.insert(0, W4GemmLinearKernel)


def why_not(c: MPLinearLayerConfig) -> str:
    """Return why a layer is left to vLLM's own kernels, or the empty string."""
    fp8 = c.act_type == _FP8
    capability = current_platform.get_device_capability()
    if reason := takeover.why_not_here(None if capability is None else tuple(capability), fp8):
        return reason
    types = (scalar_types.int4,) if fp8 else (scalar_types.uint4b8, scalar_types.uint4)
    if c.weight_type not in types:
        return f"their weights are {c.weight_type}, wanted {' or '.join(map(str, types))} beside {c.act_type}"
    dtype = out_dtype(c)
    if dtype not in SCALES or (not fp8 and c.act_type != dtype):
        return f"their activations are {c.act_type} and results {dtype}, wanted float16, bfloat16, or float8_e4m3fn"
    if c.zero_points and (fp8 or c.weight_type != scalar_types.uint4):
        return f"they have zero points beside {c.weight_type} weights and {c.act_type} activations"
    if c.group_size != PER_COLUMN and (c.group_size < 32 or c.group_size % 32):
        return f"their groups are {c.group_size} columns, wanted a multiple of 32 or one group a row"
    k, full_k = c.partition_weight_shape[0], c.full_weight_shape[0]
    if c.group_size != PER_COLUMN and k % c.group_size:
        return f"their {k} input features on this GPU are not whole groups of {c.group_size}"
    if getattr(c, "has_g_idx", False) and k != full_k:
        return "they are in act-order (desc_act), and their input features are divided among GPUs"
    return why_no_kernel(_problem(c))


def _format(c: MPLinearLayerConfig) -> WeightFormat:
    """Return the format in which the layer's weight, loaded with scales of the model's dtype, is multiplied."""
    loaded = WeightFormat(c.group_size, "int" if c.zero_points else "none", SCALES[out_dtype(c)])
    return takeover.VLLM.multiplied(loaded, "fp8" if c.act_type == _FP8 else None)


def out_dtype(c: MPLinearLayerConfig) -> torch.dtype:
    """Return the dtype of the results, which is the model's."""
    return c.out_type or (torch.bfloat16 if c.act_type == _FP8 else c.act_type)


def _epilogue(c: MPLinearLayerConfig, bias: bool) -> Epilogue:
    plain = Epilogue(bias=bias)
    return plain.of_quantized(out_dtype(c)) if c.act_type == _FP8 else plain


def _problem(c: MPLinearLayerConfig) -> GemmProblem:
    k, n = c.partition_weight_shape
    return product(_device(), _format(c), n, k, out_dtype(c), fp8=c.act_type == _FP8)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class W4GemmLinearKernel(Fallback, MPLinearKernel):
    """x @ w.T + bias by :class:`PackedLayer`. The packed weight is the layer's parameter that held its codes; those of
    scales, zero points and groups are removed, because the packed weight holds these numbers."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 10 * LEAST[0] + LEAST[1]

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        try:
            reason = why_not(c)
        except AttributeError as e:
            reason = f"this version of vLLM is not known: {e}"
        if reason:
            takeover.refuse(_KIND, reason)
        return not reason, reason or None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given = args, kwargs
        """Arguments of the class of every kernel."""
        self.quantizes = self.config.act_type == _FP8
        fusion.install()
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.most_tokens = takeover.most_tokens()
        self.expect()

    def parameters(self, layer: torch.nn.Module) -> list[str]:
        c = self.config
        zeros = self.w_zp_name if c.zero_points else None
        g_idx = self.w_gidx_name if getattr(c, "has_g_idx", False) else None
        return [name for name in (self.w_q_name, self.w_s_name, zeros, g_idx) if name]

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Replace the layer's parameters by the packed weight; leave a layer that cannot be packed to vLLM."""
        if self.load_anew(layer):
            return
        activations = "fp8" if self.quantizes else None
        try:
            if not self.is_loaded:
                raise ValueError(NOTHING_LOADED)
            check_known(layer, {*self.parameters(layer), "bias", *_UNUSED})
            unused = layer._parameters.get("qzeros")
            if unused is not None and not self.config.zero_points:
                check_unused_zeros(unused)
            numbers = self._numbers(layer)
            w = numbers.packed(activations, takeover.VLLM.multiplied(numbers.format, activations))
        except (TypeError, ValueError) as e:
            self.leave(layer, _KIND, str(e))
            return
        replaced = filter(None, (self.w_s_name, self.w_zp_name, getattr(self, "w_gidx_name", None)))
        epilogue = _epilogue(self.config, False)
        self.packed = PackedLayer(layer, w, self.w_q_name, replaced, epilogue, self.batch_invariant)
        call = functools.partial(self.apply_weights, layer)
        use = LinearUse(out_dtype(self.config), call, self.most_tokens, self.batch_invariant, fused=True)
        takeover.WARMUP.loaded(self, linear_need("4-bit linear layers", w, getattr(layer, "bias", None), use))

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x (..., k) @ w.T + bias; traced by torch.compile."""
        if self.vllm_kernel is not None:
            return self.vllm_kernel.apply_weights(layer, x, bias)
        # the pass that fuses silu(gate) * up with the quantization looks for no reshape between them
        rows, token_scale = x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), None
        if self.quantizes:
            rows, token_scale = quantized(rows)
        d = self.packed(layer, rows, bias, token_scale)
        return d.view(*x.shape[:-1], d.shape[-1])

    def next_kernel(self) -> Any:
        capability = current_platform.get_device_capability()
        for cls in own_kernels(_POSSIBLE_KERNELS[PlatformEnum.CUDA], envs.VLLM_DISABLED_KERNELS):
            runs = capability is None or cls.get_min_capability() <= 10 * capability[0] + capability[1]
            if runs and cls.can_implement(self.config)[0]:
                args, kwargs = self.given
                return cls(*args, **kwargs)
        raise ValueError(f"no kernel of vLLM runs these {_KIND}")

    def _numbers(self, layer: torch.nn.Module) -> Numbers:
        """Return the numbers that the layer has loaded: words of eight neighbouring columns (input features) of a row,
        and those of zero points of eight rows, as those of compressed-tensors."""
        c = self.config
        held = {"weight_packed": self.w_q_name, "weight_scale": self.w_s_name}
        if c.zero_points and self.w_zp_name:
            held["weight_zero_point"] = self.w_zp_name
        if getattr(c, "has_g_idx", False):
            held["weight_g_idx"] = self.w_gidx_name
        tensors = {name: _rows_first(layer, each) for name, each in held.items()}
        format = int4_format(c.group_size, c.zero_points, tensors["weight_scale"].dtype)
        return compressed_tensors.numbers(tensors, format)


def _rows_first(layer: torch.nn.Module, name: str) -> torch.Tensor:
    """Return the numbers of a parameter with the output features first; it says which dimension they are."""
    parameter = getattr(layer, name)
    return parameter.data if getattr(parameter, "output_dim", 0) == 0 else parameter.data.t()
