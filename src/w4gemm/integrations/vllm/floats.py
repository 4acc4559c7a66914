"""Linear layers with floats of 4 and 6 bits, NVFP4, MXFP4 and MXFP6, whichever producer packed them: kernels in vLLM's
lists.

They multiply 16-bit activations, as vLLM's Marlin does on Hopper, also where a checkpoint wants them in 4 or 6 bits. If
weights have 4 bits, they multiply fp8 ones by choice (``W4GEMM_NVFP4``, ``W4GEMM_MXFP4``) or where a checkpoint in
MXFP4 wants these (W4A8) with a scale for each token. vLLM chooses a kernel before it says a layer's sizes: a layer that
none of ours runs gets vLLM's next kernel when its weights are loaded.

vLLM asks no list for three kinds of layers. For NVFP4 checkpoints of 16-bit activations (NVFP4A16, W4A16_NVFP4) it
names Marlin, and for NVFP4 with VLLM_BATCH_INVARIANT an emulation in PyTorch's operators, in whose places
:func:`replace_named_kernel` puts ours. vLLM 0.26 emulates Quark's MXFP4 and MXFP6 with amd-quark, where
:func:`replace_emulation` gives layers our kernel.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import _POSSIBLE_MXFP4_KERNELS, _POSSIBLE_NVFP4_KERNELS
from vllm.model_executor.kernels.linear.mxfp4 import MxFp4LinearKernel, MxFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearKernel
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.platforms import PlatformEnum

from w4gemm.checkpoints import packed_floats
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.packed_floats import MXFP4, MXFP6, MXFP6_E3M2, NVFP4
from w4gemm.core import environment
from w4gemm.integrations.engines.loading import check_known
from w4gemm.integrations.vllm import takeover
from w4gemm.integrations.vllm.configs import add_hook
from w4gemm.integrations.vllm.linear_kernel import FloatsKernel

CONFIGS = ("compressed-tensors", "modelopt_fp4", "modelopt_mixed")
"""Names of vLLM's quantization configs for which it may name a kernel of NVFP4."""
EMULATED = ("quark",)
"""Names of configs for which it may emulate MXFP4 and MXFP6."""

_PARTS = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale")
"""Parameters that hold 4-bit floats, as vLLM's methods load them; it brings them to other names."""
_NAMED = ("MarlinNvFp4LinearKernel", "HummingNvFp4LinearKernel", "EmulationNvFp4LinearKernel")
"""Kernels that vLLM names on Hopper: for 16-bit activations, and the last one for VLLM_BATCH_INVARIANT."""


def install() -> None:
    """Put our kernels first in vLLM's lists for NVIDIA GPUs, and in the place of kernels that it names."""
    W4GemmNvFp4LinearKernel.put_first()
    W4GemmMxFp4LinearKernel.put_first()
    W4GemmMxFp6LinearKernel.put_first()
    add_hook(replace_named_kernel, CONFIGS)
    add_hook(replace_emulation, EMULATED)


def replace_named_kernel(method: Any, layer: Any) -> Any:
    """Return vLLM's method for a layer, which replaces the kernel that vLLM named by ours when it makes the layer's
    parameters."""
    if not isinstance(method, LinearMethodBase):
        return method
    make = method.create_weights

    def create_weights(layer: Any, *args: Any, **kwargs: Any) -> None:
        make(layer, *args, **kwargs)
        holder: Any
        for holder in (method, getattr(layer, "scheme", None)):
            named: Any = getattr(holder, "kernel", None)
            if type(named).__name__ in _NAMED and _may_run(W4GemmNvFp4LinearKernel, "nvfp4", named.config):
                holder.kernel = W4GemmNvFp4LinearKernel(named.config, named)

    method.create_weights = create_weights
    return method


def replace_emulation(method: Any, layer: Any) -> Any:
    """Return vLLM's method for a layer; one in MXFP4 or MXFP6 that vLLM would emulate gets a scheme whose kernel is
    ours."""
    scheme: Any = getattr(layer, "scheme", None)
    if isinstance(method, LinearMethodBase) and type(scheme).__name__ == "QuarkOCP_MX":
        emulated = getattr(scheme, "emulate", False) and not scheme.dynamic_mxfp4_quant and scheme.input_dtype != "fp8"
        element = scheme.weight_dtype
        ours: Any = {"mxfp4": W4GemmMxFp4LinearKernel}.get(element, W4GemmMxFp6LinearKernel)
        config: Any = MxFp4LinearLayerConfig() if element == "mxfp4" else SimpleNamespace(weight_quant_key=element)
        if emulated and _may_run(ours, element.partition("_")[0], config):
            layer.scheme = _PackedScheme(scheme, ours(config, scheme))
    return method


def _may_run(ours: Any, quantization: str, config: Any) -> bool:
    """Return whether a kernel of ours may run a layer for which vLLM asks no list."""
    if ours.__name__ in envs.VLLM_DISABLED_KERNELS:
        return False
    if backend := takeover.linear_backend(quantization):
        takeover.refuse(ours.kind, f"--linear-backend {backend} was asked for")
        return False
    return bool(ours.is_supported()[0] and ours.can_implement(config)[0])


class _PackedScheme:
    """A scheme of Quark's whose parameters vLLM makes and loads, and which a kernel of ours multiplies by."""

    def __init__(self, scheme: Any, kernel: Any) -> None:
        self.create_weights = scheme.create_weights
        self.kernel = kernel
        self.process_weights_after_loading = kernel.process_weights_after_loading
        self.apply_weights = kernel.apply_weights


class _Floats(FloatsKernel):
    """Base of the kernels of all formats."""

    kind = "linear layers of 4-bit floats"
    names: tuple[str, ...] = ("weight", "weight_scale")
    """Parameters of a layer that go when it is packed; the first holds the codes."""
    format = ""
    """Name of a format that may multiply fp8 x."""

    @classmethod
    def takes_fp8(cls) -> bool:
        return bool(cls.format) and environment.takes_fp8(cls.format, False)

    def __init__(self, config: Any, named: Any = None) -> None:
        """named: the kernel that vLLM named for the layer; None if it asked its list."""
        super().__init__(config)
        self.left = named
        asked = _is_fp8_by_token(getattr(config, "activation_quant_key", None))
        self.activations = "fp8" if self.format and environment.takes_fp8(self.format, asked) else None

    def parameters(self, layer: Any) -> list[str]:
        return [name for name in _PARTS if name in layer._parameters]

    def weight_names(self, layer: Any) -> list[str]:
        return [*self.names]

    def numbers(self, layer: Any) -> Numbers:
        check_known(layer, {"bias", "input_scale", "input_scale_2", *self.names})
        return self.floats(layer)

    def floats(self, layer: Any) -> Numbers:
        """Return the numbers of a layer whose parameters are known."""
        raise NotImplementedError


class W4GemmNvFp4LinearKernel(_Floats, NvFp4LinearKernel):
    """e2m1 weights with e4m3 scales of 16 columns and a float32 one that multiplies all."""

    possible, format = _POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA], "nvfp4"
    names = (
        *("weight", "weight_scale", "weight_global_scale", "alpha"),
        *("input_global_scale", "input_global_scale_inv"),
    )
    factors: torch.Tensor | None = None
    """What multiplies each row, until it is packed. Parts of a merged layer have numbers of their own, of which vLLM's
    methods keep the largest for all."""

    def note(self, layer: Any) -> None:
        multiplies = layer._parameters.get("weight_scale_2")
        each = 1 / layer.weight_global_scale.data if multiplies is None else multiplies.data
        self.factors = each.repeat_interleave(torch.tensor(layer.logical_widths, device=each.device))

    def floats(self, layer: Any) -> Numbers:
        factors, self.factors = self.factors, None
        factors = layer.weight_global_scale.data if factors is None else factors
        return packed_floats.numbers(layer.weight.data, layer.weight_scale.data, NVFP4, factors)


class W4GemmMxFp4LinearKernel(_Floats, MxFp4LinearKernel):
    """e2m1 weights with a power of two for each 32 columns."""

    possible, format = _POSSIBLE_MXFP4_KERNELS[PlatformEnum.CUDA], "mxfp4"

    def floats(self, layer: Any) -> Numbers:
        return packed_floats.numbers(layer.weight.data, layer.weight_scale.data, MXFP4)

    @classmethod
    def _supports_quant_scheme(cls, weight_key: Any, activation_key: Any) -> bool:
        """Return whether the kernel may run a layer for which vLLM wants such activations. A checkpoint that wants fp8
        with a scale for each group of columns gets 16 bits; a user who says how x is quantized, nothing else."""
        asked = takeover.activations_asked_for("linear")
        if asked and not _is_fp8_by_token(activation_key):
            takeover.refuse(cls.kind, f"{asked} says how x is quantized")
            return False
        return super()._supports_quant_scheme(weight_key, None if _is_fp8(activation_key) else activation_key)

    def may_run(self, cls: Any) -> bool:
        return super().may_run(cls) and self._takes_activations(cls)

    def _takes_activations(self, cls: Any) -> bool:
        """True if a kernel of vLLM's is for activations as the layer's config wants them."""
        supports = getattr(cls, "_supports_quant_scheme", None)
        if supports is None:  # of a vLLM in which all take the same
            return True
        from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static

        return bool(supports(kMxfp4Static, self.config.activation_quant_key))


class _Configured:
    """A kernel's base where vLLM has none."""

    def __init__(self, config: Any) -> None:
        self.config = config


class W4GemmMxFp6LinearKernel(_Floats, getattr(linear, "MxFp6LinearKernel", _Configured)):  # type: ignore[misc]
    """e2m3 or e3m2 weights with a power of two for each 32 columns; x has 16 bits."""

    kind = "linear layers of 6-bit floats"
    possible = getattr(linear, "_POSSIBLE_MXFP6_KERNELS", {PlatformEnum.CUDA: []})[PlatformEnum.CUDA]
    """Empty in vLLM 0.26, which emulates them."""

    def floats(self, layer: Any) -> Numbers:
        key = self.config.weight_quant_key  # vLLM 0.26 has a name alone
        format = MXFP6 if "e2m3" in str(getattr(key, "dtype", key)) else MXFP6_E3M2
        return packed_floats.numbers(layer.weight.data, layer.weight_scale.data, format)


def _is_fp8(key: Any) -> bool:
    """True if vLLM's key of activations says e4m3 with scales of the tokens that come; None is for 16 bits."""
    return key is not None and key.dtype == torch.float8_e4m3fn and not key.scale.static


def _is_fp8_by_token(key: Any) -> bool:
    """True if each token has one scale there."""
    return _is_fp8(key) and bool(key.scale.group_shape.is_per_token())
