"""Linear layers of GPTQ, AWQ and compressed-tensors models: a kernel in vLLM's list of mixed-precision ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS, MPLinearKernel, MPLinearLayerConfig
from vllm.platforms import PlatformEnum
from vllm.scalar_type import ScalarType, scalar_types

from w4gemm.checkpoints import compressed_tensors
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.core.elements import INTEGERS
from w4gemm.core.format_names import SMALLEST_GROUP
from w4gemm.core.formats import PER_COLUMN
from w4gemm.core.problem import GemmProblem
from w4gemm.integrations.engines.engine import LEAST, layer_product, why_no_kernel
from w4gemm.integrations.engines.formats import SCALES, check_unused_zeros, integer_format
from w4gemm.integrations.engines.loading import check_known
from w4gemm.integrations.vllm import takeover
from w4gemm.integrations.vllm.configs import add_hook, take_configs
from w4gemm.integrations.vllm.linear_kernel import ListedKernel

CONFIGS = (
    *("gptq", "gptq_marlin", "auto_gptq", "awq", "awq_marlin", "auto_awq"),
    *("compressed-tensors", "inc", "quark", "modelopt_mixed"),
)
"""Names of vLLM's quantization configs that may have such layers."""

_FP8 = torch.float8_e4m3fn
_UNUSED = ("weight_shape", "qzeros", "g_idx", "weight_g_idx", "weight_zero_point")
"""Parameters that vLLM's methods make and that the numbers do not need, of symmetric layers and of columns in order."""


_BYTES = "CompressedTensorsW8A8Int8", "CompressedTensorsW4A8Int", "CompressedTensorsWNA8Int"
LEFT = {
    **dict.fromkeys(_BYTES, "their activations are 8-bit integers"),
    "CompressedTensorsWNA4Int": "their activations are 4-bit integers",
    "CompressedTensorsW8A8Fp8": "their activations are in fp8, as their weights are",
}
"""Schemes of compressed-tensors that vLLM's own kernels run, and why: their checkpoints ask for other activations."""


def install() -> None:
    """Put :class:`W4GemmLinearKernel` first in vLLM's list for NVIDIA GPUs, and watch what its layers load."""
    take_configs(CONFIGS)
    add_hook(leave, ("compressed-tensors",))
    add_hook(ask_when_batch_invariant, ("compressed-tensors", "awq", "awq_marlin", "auto_awq"))
    W4GemmLinearKernel.put_first()


def leave(method: Any, layer: torch.nn.Module) -> Any:
    """Return vLLM's method for a layer. If layers of its scheme are left to vLLM, log why, and have vLLM choose among
    its own kernels, which it does for some of them as if x had 16 bits."""
    if not (reason := why_left(getattr(layer, "scheme", None))):
        return method
    takeover.refuse("linear layers of compressed-tensors", reason)
    make = method.create_weights

    def create_weights(*args: Any, **kwargs: Any) -> None:
        with _choice_of([cls for cls in W4GemmLinearKernel.possible if cls is not W4GemmLinearKernel]):
            make(*args, **kwargs)

    method.create_weights = create_weights
    return method


def why_left(scheme: Any) -> str:
    """Return why layers of a scheme of compressed-tensors are left to vLLM, or the empty string."""
    if getattr(scheme, "is_int_quantized", False):  # vLLM makes the kernel's parameter when all is loaded
        return "their weights are stored in bytes"
    return LEFT.get(type(scheme).__name__, "")


def ask_when_batch_invariant(method: Any, layer: torch.nn.Module) -> Any:
    """Return a method for a layer that gets our kernel if that runs it. With VLLM_BATCH_INVARIANT vLLM dequantizes
    layers of AWQ in each step, and since 0.33 those of compressed-tensors, without asking its kernels."""
    scheme: Any = getattr(layer, "scheme", None)
    if getattr(scheme, "use_batch_invariant", False):
        return _asks(method, scheme)
    if envs.VLLM_BATCH_INVARIANT and type(method).__name__ == "AutoAWQLinearMethod":
        return _asks_for_awq(method)
    return method


def _asks(method: Any, scheme: Any) -> Any:
    """Return vLLM's method for a layer of compressed-tensors, which asks for our kernel when it makes parameters."""
    make = method.create_weights

    def create_weights(layer: Any, *args: Any, **kwargs: Any) -> None:
        scheme.use_batch_invariant = False
        try:
            with _choice_of([W4GemmLinearKernel]):  # others' sums depend on the batch
                make(layer, *args, **kwargs)
            scheme.kernel.left = _Dequantized(scheme)
        except ValueError:  # ours does not run it, and has said why
            scheme.use_batch_invariant = True
            make(layer, *args, **kwargs)

    method.create_weights = create_weights
    return method


class _Dequantized:
    """A scheme of vLLM's that dequantizes its layer in each step, as the kernel of a layer that ours cannot pack."""

    def __init__(self, scheme: Any) -> None:
        self.scheme, self.apply_weights = scheme, scheme.apply_weights

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.scheme.use_batch_invariant = True
        self.scheme.process_weights_after_loading(layer)


def _asks_for_awq(method: Any) -> Any:
    """Return vLLM's method for AWQ that asks its kernels, in the place of one that asks none if ours does not run the
    layer."""
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQMarlinLinearMethod

    try:
        asks = AutoAWQMarlinLinearMethod(method.quant_config)
    except ValueError:  # as Marlin takes no such groups
        return method
    make = asks.create_weights

    def create_weights(layer: Any, *args: Any, **kwargs: Any) -> None:
        try:
            with _choice_of([W4GemmLinearKernel]):  # others' sums depend on the batch
                make(layer, *args, **kwargs)
            asks.kernel.left = _Lost(asks.kernel)
        except ValueError:  # ours does not run it, and has said why
            layer.quant_method = method
            method.create_weights(layer, *args, **kwargs)

    asks.create_weights = create_weights
    return asks


class _Lost:
    """The place of a kernel for a layer of AWQ that ours cannot pack: vLLM has brought its numbers into the order of
    its kernels, whose sums depend on the batch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if self.kernel.is_loaded:
            raise ValueError("AWQ with VLLM_BATCH_INVARIANT: w4gemm cannot pack a layer, W4GEMM_VLLM=off leaves all")


@contextmanager
def _choice_of(kernels: list[Any]) -> Iterator[None]:
    """Have vLLM choose one of these kernels or raise ValueError."""
    possible = W4GemmLinearKernel.possible
    every, possible[:] = possible[:], kernels
    try:
        yield
    finally:
        possible[:] = every


def why_not(c: MPLinearLayerConfig) -> str:
    """Return why a layer is left to vLLM's own kernels, or the empty string."""
    fp8 = c.act_type == _FP8
    if reason := takeover.why_not_here(fp8):
        return reason
    if not (c.weight_type == scalar_types.int4 if fp8 else _is_integer(c.weight_type)):
        legal = str(scalar_types.int4) if fp8 else f"integers of {', '.join(map(str, sorted(INTEGERS)))} bits"
        return f"their weights are {c.weight_type}, wanted {legal} with {c.act_type}"
    dtype = out_dtype(c)
    if dtype not in SCALES or (not fp8 and c.act_type != dtype):
        return f"their activations are {c.act_type} and results {dtype}, wanted float16, bfloat16, or float8_e4m3fn"
    if c.zero_points == (fp8 or c.weight_type.bias > 0):
        return f"they have {'' if c.zero_points else 'no '}zero points with {c.weight_type} and {c.act_type}"
    if c.group_size != PER_COLUMN and (c.group_size <= 0 or c.group_size % SMALLEST_GROUP):
        return f"their groups are {c.group_size} columns, wanted a multiple of {SMALLEST_GROUP} or one group a row"
    k, full_k = c.partition_weight_shape[0], c.full_weight_shape[0]
    if c.group_size != PER_COLUMN and k % c.group_size:
        return f"their {k} input features on this GPU are not whole groups of {c.group_size}"
    if getattr(c, "has_g_idx", False) and k != full_k:
        return "they are in act-order (desc_act), and their input features are divided among GPUs"
    return why_no_kernel(problem_of(c))


def _is_integer(kind: ScalarType) -> bool:
    """True for codes of an integer, which stand for u - 2**(bits - 1), or for u with zero points."""
    legal = (0, 1 << kind.size_bits - 1)
    return kind.is_integer() and not kind.is_signed() and kind.size_bits in INTEGERS and kind.bias in legal


def out_dtype(c: MPLinearLayerConfig) -> torch.dtype:
    """Return the dtype of the results, which is the model's."""
    return c.out_type or (torch.bfloat16 if c.act_type == _FP8 else c.act_type)


def problem_of(c: MPLinearLayerConfig) -> GemmProblem:
    """Return the product of a layer that is loaded with scales of the model's dtype, with some m."""
    fp8, dtype, (k, n) = c.act_type == _FP8, out_dtype(c), c.partition_weight_shape
    loaded = integer_format(c.group_size, c.zero_points, dtype, c.weight_type.size_bits)
    format = takeover.VLLM.multiplied(loaded, "fp8" if fp8 else None)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return layer_product(device, format, n, k, dtype, fp8)


class W4GemmLinearKernel(ListedKernel, MPLinearKernel):
    """x @ w.T + bias. The packed weight takes the place of the layer's parameter of codes. The parameters of scales,
    zero points and groups are removed, because the packed weight holds these numbers."""

    kind = "linear layers of GPTQ, AWQ and compressed-tensors"
    possible = _POSSIBLE_KERNELS[PlatformEnum.CUDA]

    @classmethod
    def get_min_capability(cls) -> int:
        return 10 * LEAST[0] + LEAST[1]

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        reason = takeover.VLLM.asked(cls.kind, lambda: why_not(c))
        return not reason, reason or None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activations = "fp8" if self.config.act_type == _FP8 else None

    def model_dtype(self, layer: torch.nn.Module) -> torch.dtype:
        return out_dtype(self.config)

    def parameters(self, layer: torch.nn.Module) -> list[str]:
        c = self.config
        zeros = self.w_zp_name if c.zero_points else None
        g_idx = self.w_gidx_name if getattr(c, "has_g_idx", False) else None
        return [name for name in (self.w_q_name, self.w_s_name, zeros, g_idx) if name]

    def weight_names(self, layer: torch.nn.Module) -> list[str]:
        others = self.w_s_name, self.w_zp_name, getattr(self, "w_gidx_name", None)
        return [self.w_q_name, *filter(None, others)]

    def may_run(self, cls: Any) -> bool:
        here = takeover.capability()
        runs = here is None or cls.get_min_capability() <= 10 * here[0] + here[1]
        return bool(runs and cls.can_implement(self.config)[0])

    def numbers(self, layer: torch.nn.Module) -> Numbers:
        """Return the numbers that the layer has loaded. They lie as in compressed-tensors: words hold neighbouring
        columns (input features) of a row, words of zero points neighbouring rows."""
        c = self.config
        check_known(layer, {*self.parameters(layer), "bias", *_UNUSED})
        unused = layer._parameters.get("qzeros")
        if unused is not None and not c.zero_points:
            check_unused_zeros(unused, c.weight_type.size_bits)
        held = {"weight_packed": self.w_q_name, "weight_scale": self.w_s_name}
        if c.zero_points and self.w_zp_name:
            held["weight_zero_point"] = self.w_zp_name
        if getattr(c, "has_g_idx", False):
            held["weight_g_idx"] = self.w_gidx_name
        tensors = {name: _rows_first(layer, each) for name, each in held.items()}
        format = integer_format(c.group_size, c.zero_points, tensors["weight_scale"].dtype, c.weight_type.size_bits)
        return compressed_tensors.numbers(tensors, format, c.partition_weight_shape[0])


def _rows_first(layer: torch.nn.Module, name: str) -> torch.Tensor:
    """Return the numbers of a parameter with the output features first; it says which dimension they are."""
    parameter = getattr(layer, name)
    return parameter.data if getattr(parameter, "output_dim", 0) == 0 else parameter.data.t()
