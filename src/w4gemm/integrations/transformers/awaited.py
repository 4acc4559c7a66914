"""Layers of a model whose quantized weights are still to come: :class:`AwaitedLinear` and its relatives.

A layer keeps its identity when it is filled, because frameworks have put hooks on it by then, such as tensor
parallelism's. So its class changes, as the class of PyTorch's lazy modules does.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn

from w4gemm.api.experts import W4Experts, W4GroupedLinear
from w4gemm.api.nn import W4Linear
from w4gemm.api.packed_module import PackedModule
from w4gemm.checkpoints.dense import default_format
from w4gemm.checkpoints.experts import DOWN
from w4gemm.checkpoints.model_experts import (
    DenseProduct,
    activation_of,
    has_bias,
    is_transposed,
    of_llama_4,
    products_of,
)
from w4gemm.core.formats import WeightFormat
from w4gemm.integrations.transformers.sharding import Local
from w4gemm.packing.packed_shape import packed_shape
from w4gemm.weights.quantize import quantize
from w4gemm.weights.weight import QuantizedWeight


class AwaitedLinear(nn.Module):
    """A linear layer whose quantized weight is still to come. :meth:`fill` makes it a :class:`W4Linear`, in place.

    Its only tensors are the dense layer's bias and ``place``, one byte without meaning that a framework moves to the
    device on which it wants the layer.

    Args:
        linear: the dense layer that was here.
        format: of the weight to come.
        pre_quant_scale: True if the layer is to have one.
    """

    cls_to_become: ClassVar[type[PackedModule]] = W4Linear
    bias: nn.Parameter | None
    place: torch.Tensor
    pre_quant_scale: torch.Tensor | None

    def __init__(self, linear: nn.Linear, format: WeightFormat, pre_quant_scale: bool = False) -> None:
        self._await(linear.in_features, linear.out_features, format, linear.weight.dtype, linear.bias)
        self._hf_quantized_needs_local_tp = True  # transformers' tensor parallelism is to pass it no DTensors
        scale = torch.empty(self.in_features, dtype=self.dtype, device="meta") if pre_quant_scale else None
        self.register_buffer("pre_quant_scale", scale)
        # neither parameter nor buffer: for code that initializes the weights of a layer's parts by name (SigLIP's), to
        # which transformers says that this one is
        weight: Any = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")
        weight._is_hf_initialized = True
        self.weight = weight

    def _await(
        self, n_in: int, n_out: int, format: WeightFormat, dtype: torch.dtype, bias: nn.Parameter | None = None
    ) -> None:
        """Make what layers of all kinds have in common."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.format, self.dtype = n_in, n_out, format, dtype
        self.register_parameter("bias", bias)
        self.register_buffer("place", torch.empty(1, dtype=torch.uint8, device="meta"), persistent=False)

    @property
    def has_bias(self) -> bool:
        """True if the dense layer had a bias."""
        return self.bias is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the weight to come, without padding of its layout."""
        return packed_shape(self.format, "canonical", self.out_features, self.in_features).nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The method of what the layer has become, for a framework that took hold of this one before."""
        if isinstance(self, AwaitedLinear):
            raise RuntimeError(f"{type(self).__name__}: its weight was not loaded")
        return type(self).forward(self, x)

    def fill(self, local: Local, activations: str | None) -> None:
        """Become a W4Linear of ``local``, which may be one shard of the layer. The layer keeps its numbers of features,
        because tensor parallelism asks for the whole layer's.

        Args:
            activations: "fp8", or None to keep the weight's.
        """
        features = self.in_features, self.out_features
        self._buffers.pop("place")
        self.__dict__.pop("weight", None)
        self.__class__ = self.cls_to_become  # type: ignore[assignment]
        assert isinstance(self, PackedModule)
        self.adopt(local.weight if activations is None else local.weight.repack(activations=activations), self.dtype)
        if local.bias is not None:
            self.bias = nn.Parameter(local.bias, requires_grad=False)
        if local.pre_quant_scale is not None:
            self.pre_quant_scale = local.pre_quant_scale
        self.in_features, self.out_features = features


class AwaitedGrouped(AwaitedLinear):
    """A product of experts whose quantized weights are still to come; :meth:`fill` makes it a :class:`W4GroupedLinear`.

    Its bias comes with the weight, since transformers knows it by another name.

    Args:
        weight: the dense parameter that was here, (experts, n, k), or (experts, k, n) if ``transposed``.
        activation: of the product's result, or None.
    """

    cls_to_become = W4GroupedLinear

    def __init__(self, weight: nn.Parameter, transposed: bool, has_bias: bool, activation: str | None = None) -> None:
        experts, n, k = weight.shape
        self._await(*((n, k) if transposed else (k, n)), WeightFormat(), weight.dtype)
        self.experts, self._has_bias, self.activation = experts, has_bias, activation

    @property
    def has_bias(self) -> bool:
        return self._has_bias

    @property
    def nbytes(self) -> int:
        sizes = self.out_features, self.in_features, self.experts
        return packed_shape(self.format, "canonical", *sizes).nbytes

    def fill(self, local: Local, activations: str | None) -> None:
        activation = self.activation
        del self._has_bias, self.experts
        super().fill(local, activations)
        self.activation = activation


class AwaitedExperts(W4Experts):
    """Experts whose products' weights are still to come; :func:`finish` makes it a W4Experts.

    Args:
        experts: the dense experts that were here.
        config: the model's, which says by the time that it is asked for whether each process is to hold some of them.

    Attributes:
        leaves: names of the dense parameters of both products.

    Raises:
        ValueError: if w4gemm computes no such experts.
    """

    gate_up: AwaitedGrouped  # type: ignore[assignment]
    down: AwaitedGrouped  # type: ignore[assignment]

    def __init__(self, experts: nn.Module, config: Any) -> None:
        nn.Module.__init__(self)
        transposed, biased = is_transposed(experts), has_bias(experts)
        leaves = products_of(experts)
        assert leaves is not None
        up, down = map(experts.get_parameter, leaves)
        self.gate_up = AwaitedGrouped(up, transposed, biased, activation_of(experts))
        self.down = AwaitedGrouped(down, transposed, biased)
        self.config, self.leaves = config, leaves
        self.__dict__.update(zip(leaves, (up.data, down.data), strict=True))  # Qwen3-Omni's blocks draw these numbers

    @property
    def num_experts(self) -> int:
        """Experts of this process, for transformers' expert parallelism."""
        split = getattr(getattr(self.config, "distributed_config", None), "ep_size", None) or 1
        return self.gate_up.experts // split


class AwaitedDense(AwaitedLinear):
    """A linear layer whose dense weight transformers is to load; the quantizer rounds it to ``quantized``."""

    quantized: QuantizedWeight | None

    def __init__(self, linear: nn.Linear, format: WeightFormat) -> None:
        super().__init__(linear, format)
        self.weight, self.quantized = linear.weight, None

    def take(self, leaf: str, weight: torch.Tensor) -> None:
        """Round the weight that was loaded."""
        self.quantized = quantize(weight, self.format)

    def fill(self, local: Local, activations: str | None) -> None:
        del self._parameters["weight"], self.quantized
        super().fill(local, activations)


class AwaitedDenseExperts(AwaitedExperts):
    """Experts whose dense weights transformers is to load; the quantizer rounds each of them."""

    def __init__(
        self, experts: nn.Module, config: Any, products: Mapping[str, DenseProduct], format: WeightFormat | None
    ) -> None:
        super().__init__(experts, config)
        self.products, self.quantized = products, dict[str, QuantizedWeight]()
        for leaf, product in products.items():
            self.awaited(leaf).format = format or default_format(product.sizes[2])
        for leaf, parameter in experts.named_parameters(recurse=False):
            self.__dict__.pop(leaf, None)
            self.register_parameter(leaf, parameter)

    def awaited(self, leaf: str) -> AwaitedGrouped:
        """The layer that the parameter of a product becomes."""
        return self.down if leaf == DOWN else self.gate_up

    def take(self, leaf: str, weight: torch.Tensor, search: bool = False) -> None:
        """Round the loaded weights of one product. search: as for :func:`w4gemm.quantize`."""
        format, product = self.awaited(leaf).format, self.products[leaf]
        each = (quantize(w, format, search=search) for w in product.weights(weight))
        self.quantized[leaf] = QuantizedWeight.stack(each, product.shape[0], "canonical")

    def fill(self, activations: str | None) -> None:
        """Fill both layers with what was rounded and with their biases, and forget the dense parameters."""
        for leaf, product in self.products.items():
            bias = self._parameters.get(f"{leaf}_bias") if product.has_bias else None
            local = Local(self.quantized[leaf], None if bias is None else product.biases(bias.data))
            self.awaited(leaf).fill(local, activations)
        self._parameters.clear()
        del self.products, self.quantized


def put_experts(model: nn.Module, name: str, experts: AwaitedExperts) -> None:
    """Put these experts in the place of a model's own. Llama 4's mixture around them becomes a RoutedMixture, because
    its own forward multiplies all tokens by all experts."""
    if of_llama_4(model.get_submodule(name)):
        from w4gemm.integrations.transformers.llama4 import RoutedMixture

        mixture: Any = model.get_submodule(name.rpartition(".")[0])
        mixture.__class__ = RoutedMixture
        if hasattr(mixture, "_hf_hook"):  # accelerate's, with the forward behind it
            mixture._old_forward = MethodType(RoutedMixture.forward, mixture)
    model.set_submodule(name, experts)


def finish(model: nn.Module) -> None:
    """Let the experts whose products were filled be a :class:`W4Experts`."""
    for module in model.modules():
        if isinstance(module, AwaitedExperts):
            for leaf in module.leaves:
                module.__dict__.pop(leaf, None)
            del module.config, module.leaves
            module.__class__ = W4Experts  # type: ignore[assignment]
