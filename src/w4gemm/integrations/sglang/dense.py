"""Linear layers and quantized ``lm_head``s of GPTQ, AWQ, compressed-tensors, ModelOpt (NVFP4) and GGUF models.

A scheme of SGLang's makes a layer's parameters and loads them. When it would repack them for Marlin, :func:`convert`
packs them for our kernels, and :func:`apply` multiplies. NVFP4 layers are those that SGLang multiplies by 16-bit
activations, as it does on Hopper.

SGLang has no kernel for some of these layers: compressed-tensors' W4AFP8, to which :func:`fp8_scheme` gives a scheme,
GPTQ of 2 and 3 bits or with zero points, whose scheme asks :func:`kernel_of_gptq` for one, and MXFP8 on Hopper, which
:func:`mxfp8_capability` lets SGLang load.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from w4gemm.api.ops import linear
from w4gemm.checkpoints.stored import whole_groups
from w4gemm.core import environment
from w4gemm.integrations.engines.engine import LEAST
from w4gemm.integrations.engines.formats import SCALES, check_unused_zeros
from w4gemm.integrations.engines.gguf import PARAMETERS, gguf_weights
from w4gemm.integrations.engines.loading import NOTHING_LOADED, check_known, check_loaded, mark
from w4gemm.integrations.engines.warmup import LinearUse, linear_need
from w4gemm.integrations.sglang.dense_formats import FP8, SCHEMES, Scheme
from w4gemm.integrations.sglang.takeover import (
    QUANTIZATION,
    SGLANG,
    WARMUP,
    Hook,
    capability,
    deterministic,
    dummy,
    exchange,
    hook,
    hook_loading,
    speculative,
    why_not_here,
)
from w4gemm.integrations.sglang.updates import QuantizedUpdate, end_updates, install_answers, open_updates
from w4gemm.weights.weight import QuantizedWeight

_WEIGHT = "w4gemm_weight"
"""Attribute of a layer that was taken over: its weights, whose rows follow one another."""
_INVARIANT = "w4gemm_batch_invariant"
"""Attribute of such a layer: whether a row's result must not depend on the other rows."""
_DTYPE = "w4gemm_dtype"
"""Attribute of such a layer: dtype of the model's activations."""
_MODELS = {rule: dtype for dtype, rule in SCALES.items()}
"""dtype of a model's activations, by the scale rule of a weight that is loaded with scales in it."""
_FP8 = "w4gemm_fp8"
"""Attribute of a scheme that :func:`fp8_scheme` made."""
_MXFP8_SINCE = (10, 0)
"""Compute capability from which on SGLang has kernels for MXFP8."""
_ALONE = "w4gemm_alone"
"""Attribute of a scheme that SGLang has no kernel for."""
_GGUF = f"{QUANTIZATION}.gguf.GGUFLinearMethod"
_OF_GGUF = "linear layers of GGUF"


def install() -> None:
    """Put hooks around the schemes' methods.

    Raises:
        ImportError, AttributeError: if this SGLang has other schemes.
    """
    hooks = []
    for scheme in SCHEMES:
        made, converted = functools.partial(create, scheme), functools.partial(convert, scheme)
        hooks.append(Hook(f"{scheme.target}.create_weights", ("self", "layer"), made))
        hooks.append(Hook(f"{scheme.target}.process_weights_after_loading", ("self", "layer"), converted))
        hooks.append(Hook(f"{scheme.target}.{scheme.apply}", ("self", "layer", "x", "bias"), apply))
    other = f"{QUANTIZATION}.gptq.schemes.GPTQLinearScheme._init_kernel"
    hooks.append(Hook(other, ("self", "quant_config"), kernel_of_gptq))
    hooks.append(Hook(f"{_GGUF}.process_weights_after_loading", ("self", "layer"), convert_gguf))
    hooks.append(Hook(f"{_GGUF}.apply", ("self", "layer", "x", "bias"), apply))
    hooks.append(Hook(f"{FP8}.Fp8Config.get_min_capability", ("self",), mxfp8_capability))
    hooks.append(Hook(f"{FP8}.Fp8Config.get_quant_method", ("self", "layer", "prefix"), mxfp8_method))
    parts = "self", "weight_quant", "input_quant", "format"
    config = f"{QUANTIZATION}.compressed_tensors.compressed_tensors.CompressedTensorsConfig"
    hook_loading()
    hook([*hooks, Hook(f"{config}._get_scheme_from_parts", parts, fp8_scheme)])
    install_answers()


def create(scheme: Scheme, own: Callable[..., None], self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Make a layer's parameters as SGLang does, and mark those that are packed."""
    own(self, layer, *args, **kwargs)
    names = scheme.parameters(layer)
    if (
        scheme.takes(self)
        and not dummy()
        and not why_not_here(quantizes(scheme, self), getattr(layer, names[0]).device)
    ):
        mark(layer, [*names, "g_idx", "qzeros"])


def convert(scheme: Scheme, own: Callable[..., None], self: Any, layer: Any) -> None:
    """Pack what a layer has loaded; or let SGLang's own method do its work, and log why.

    Raises:
        ValueError: for a layer that SGLang's own kernels cannot run, and for one that SGLang has loaded in part.
    """
    if hasattr(layer, _WEIGHT):  # called again, at the end of an update
        end_updates(layer)
        return
    if not scheme.takes(self):
        own(self, layer)
        return
    reason = SGLANG.asked(scheme.kind, lambda: _pack(scheme, self, layer, quantizes(scheme, self)))
    if reason and (hasattr(self, _FP8) or scheme.alone or hasattr(self, _ALONE)):
        with_fp8 = " with fp8 activations" if hasattr(self, _FP8) else ""
        raise ValueError(f"w4gemm cannot run {scheme.kind}{with_fp8}, and neither can SGLang: {reason}")
    if reason:
        own(self, layer)


def quantizes(scheme: Scheme, self: Any) -> bool:
    """Return whether x is quantized to fp8: in W4AFP8, and in NVFP4 by choice."""
    return hasattr(self, _FP8) or bool(scheme.floats and environment.takes_fp8(scheme.floats, False))


def convert_gguf(own: Callable[..., None], self: Any, layer: Any) -> None:
    """Pack the blocks that a layer of GGUF has loaded; or let SGLang's own method do its work, and log why. A table of
    token embeddings, whose rows are looked up, is SGLang's."""
    if hasattr(layer, _WEIGHT):
        return
    embedding = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    if embedding or SGLANG.asked(_OF_GGUF, lambda: _pack_gguf(self, layer)):
        own(self, layer)


def _pack_gguf(self: Any, layer: Any) -> str:
    if reason := _why_not(layer, layer.qweight.device):
        return reason
    if type(self.quant_config).__name__ == "ExpertPackConfig":
        return "models of expert packs read the blocks of some themselves"
    weights = gguf_weights(layer, self.params_dtype, f"{_OF_GGUF} {tuple(layer.qweight.tensor_shape)}")
    _take(layer, PARAMETERS, weights, self.params_dtype)
    return ""


def _why_not(layer: Any, device: torch.device, fp8: bool = False) -> str:
    """Return why no layer is taken over here, or not a head, or the empty string."""
    if reason := why_not_here(fp8, device):
        return reason
    if isinstance(layer, VocabParallelEmbedding) and speculative():
        return "draft models read and replace the parameter of lm_head (--speculative-algorithm)"
    return ""


def _pack(scheme: Scheme, self: Any, layer: Any, fp8: bool) -> str:
    """Return why a layer is not taken over, or the empty string: then it is."""
    names = scheme.parameters(layer)
    if reason := _why_not(layer, getattr(layer, names[0]).device, fp8):
        return reason
    if not check_loaded(layer, names, scheme.kind):
        return NOTHING_LOADED
    numbers = scheme.numbers(self, layer)
    whole_groups(numbers.format, numbers.k)
    dtype = _MODELS.get(numbers.format.scale) or layer.params_dtype
    activations = "fp8" if fp8 else None
    if reason := SGLANG.why_no_kernel(numbers, activations, dtype):
        return reason
    check_known(layer, {*scheme.read, *scheme.others, "bias"})
    if "qzeros" in scheme.others:
        check_unused_zeros(layer.qzeros, numbers.format.bits)

    def pack() -> list[QuantizedWeight]:
        return [SGLANG.packed(scheme.numbers(self, layer), activations)]

    made = pack()
    order = [name for name in ("g_idx",) if made[0].perm is not None and name in layer._parameters]
    update = QuantizedUpdate(scheme.kind, layer, [*names, *order], scheme.others, pack)
    (w,) = _take(layer, (*scheme.read, *scheme.others), made, dtype)
    if not isinstance(layer, VocabParallelEmbedding):  # SGLang multiplies by the weight of a head that has one
        open_updates(layer, update, {"weight": w})
    return ""


def _take(
    layer: Any, old: Sequence[str], weights: Sequence[QuantizedWeight], dtype: torch.dtype
) -> tuple[QuantizedWeight, ...]:
    """Replace parameters of a layer by weights whose rows follow one another, and announce what they launch; return
    these weights as the layer holds them."""
    held = tuple(exchange(layer, old, f"{_WEIGHT}{i or ''}", w) for i, w in enumerate(weights))
    use = LinearUse(dtype, batch_invariant=deterministic())
    if len(held) > 1:
        use = use._replace(call=lambda x, bias: apply(_no_kernel, None, layer, x, bias))
    setattr(layer, _WEIGHT, held)
    setattr(layer, _INVARIANT, use.batch_invariant)
    setattr(layer, _DTYPE, dtype)
    WARMUP.loaded(layer, linear_need(held, getattr(layer, "bias", None), use))
    return held


def apply(
    own: Callable[..., torch.Tensor], self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x (..., k) @ w.T + bias of a layer that was taken over; else what SGLang's own method does."""
    weights = getattr(layer, _WEIGHT, None)
    if weights is None:
        return own(self, layer, x, bias)
    rows = x.to(getattr(layer, _DTYPE)) if x.dtype == torch.float32 else x  # lm_head's, with --enable-fp32-lm-head
    biases = [None] * len(weights) if bias is None else bias.split([w.n for w in weights])
    invariant = getattr(layer, _INVARIANT)
    parts = [linear(rows, w, each, batch_invariant=invariant) for w, each in zip(weights, biases, strict=True)]
    d = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return d.float() if x.dtype == torch.float32 else d


def _no_kernel(*arguments: Any) -> Any:
    raise AssertionError("the layer was taken over")


def kernel_of_gptq(own: Callable[..., Any], self: Any, quant_config: Any) -> Any:
    """Return a place for what a scheme of GPTQ says of its kernel, where ours will run the layer; SGLang's own method
    refuses."""
    if SGLANG.asked("GPTQ's linear layers that Marlin does not take", why_not_here):
        return own(self, quant_config)
    setattr(self, _ALONE, True)
    return SimpleNamespace()


def fp8_scheme(
    own: Callable[..., Any], self: Any, weight_quant: Any, input_quant: Any, format: str | None = None
) -> Any:
    """Return a scheme for dense W4AFP8, int4 weights with fp8 activations with a scale for each token; for all else
    what SGLang's own method does."""
    if not _is_w4afp8(weight_quant, input_quant, format or self.quant_format):
        return own(self, weight_quant, input_quant, format)
    if reason := why_not_here(fp8=True):
        SGLANG.refuse("compressed-tensors' linear layers with fp8 activations", reason)
        return own(self, weight_quant, input_quant, format)
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    scheme = CompressedTensorsWNA16(
        strategy=weight_quant.strategy,
        num_bits=weight_quant.num_bits,
        group_size=weight_quant.group_size,
        symmetric=weight_quant.symmetric,
        actorder=weight_quant.actorder,
    )
    setattr(scheme, _FP8, True)
    return scheme


def mxfp8_capability(own: Callable[..., int], self: Any) -> int:
    """Return the compute capability that a model in fp8 needs, ten times: our kernels' for MXFP8, of which SGLang has
    none before Blackwell's."""
    ours = self.use_mxfp8 and self.is_checkpoint_fp8_serialized and not why_not_here()
    return LEAST[0] * 10 + LEAST[1] if ours else own(self)


def mxfp8_method(own: Callable[..., Any], self: Any, layer: Any, prefix: str) -> Any:
    """Return SGLang's method for a layer.

    Raises:
        ValueError: for experts in MXFP8 on a GPU that has no products of it, which ours do not run.
    """
    method, here = own(self, layer, prefix), capability()
    stays = self.use_mxfp8 and type(method).__name__ == "Fp8MoEMethod" and not method.convert_mxfp8_to_block
    if stays and here is not None and here < _MXFP8_SINCE:
        raise ValueError(
            f"{prefix}: experts in MXFP8 need compute capability 10.0, and this GPU has {here[0]}.{here[1]}"
        )
    return method


def _is_w4afp8(weight: Any, activations: Any, packing: str) -> bool:
    if weight is None or activations is None or packing != "pack-quantized":
        return False
    ours = weight.num_bits == 4 and weight.type == "int" and weight.symmetric and not weight.dynamic
    theirs = activations.num_bits == 8 and activations.type == "float" and activations.dynamic is True
    return ours and weight.strategy in ("group", "channel") and theirs and activations.strategy == "token"
