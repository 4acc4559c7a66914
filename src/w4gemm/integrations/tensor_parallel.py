"""Styles of ``torch.distributed.tensor.parallel.parallelize_module`` for :class:`w4gemm.W4Linear` layers.

    parallelize_module(block, mesh, {"up": W4ColwiseParallel(), "down": W4RowwiseParallel()})

Every process holds the whole layer before and its shard after. Sharding rounds nothing, for any group size. Tensors are
plain ones on every process: a colwise layer takes the whole x and returns its columns of y, a rowwise layer takes its
columns of x and returns the whole y. Gradients reach x. PEFT refuses adapters for such layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel.style import ParallelStyle

from w4gemm.api.nn import W4Linear
from w4gemm.core.errors import kind_of


class W4ColwiseParallel(ParallelStyle):
    """Splits the output features: x (..., k) on every process to y (..., n / processes).

    Raises:
        TypeError: if the module is no W4Linear.
        ValueError: if n does not split into equal shards.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _checked(module)
        index, count = device_mesh.get_local_rank(), device_mesh.size()
        rows = layer.weight.n // count
        bias = layer.bias
        layer.weight = layer.weight.shard(0, index, count)
        layer.out_features = count * rows  # of all shards, as in PyTorch's style
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach()[index * rows : (index + 1) * rows].clone(), bias.requires_grad)
        layer.register_forward_pre_hook(lambda _, *arguments: _with_sums(device_mesh, *arguments), with_kwargs=True)
        return layer


class W4RowwiseParallel(ParallelStyle):
    """Splits the input features: x (..., k / processes) to y (..., n), summed over the processes. The first process
    adds the bias.

    Raises:
        TypeError: if the module is no W4Linear.
        ValueError: if k does not split into equal shards, the weight is in act-order, or the layer has an activation,
            which would have to come after the sum.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _checked(module)
        if layer.activation is not None:
            raise ValueError(f"activation: wanted None in a rowwise layer, got {layer.activation!r}")
        index, count = device_mesh.get_local_rank(), device_mesh.size()
        columns = layer.weight.k // count
        layer.weight = layer.weight.shard(1, index, count)
        layer.in_features = count * columns
        if layer.pre_quant_scale is not None:
            layer.pre_quant_scale = layer.pre_quant_scale[index * columns : (index + 1) * columns].clone()
        if index:
            layer.bias = None
        layer.register_forward_hook(lambda _, args, y: SumResults.apply(y, device_mesh))
        return layer


def _with_sums(
    mesh: DeviceMesh, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments with the sum of gradients behind x, which may be one by name."""
    if args:
        return (_SumGradients.apply(args[0], mesh), *args[1:]), named
    return args, {**named, "x": _SumGradients.apply(named["x"], mesh)} if "x" in named else named


def _checked(module: nn.Module) -> W4Linear:
    if not isinstance(module, W4Linear):
        raise TypeError(f"module: wanted a W4Linear, got {kind_of(module)}")
    return module


class SumResults(torch.autograd.Function):
    """Forward: the sum over processes. Backward: every process has the whole gradient already."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, group: DeviceMesh | ProcessGroup) -> torch.Tensor:
        return collectives.wait_tensor(collectives.all_reduce(y, "sum", group))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _SumGradients(torch.autograd.Function):
    """Forward: nothing. Backward: the sum over processes, because each has the gradient of its columns alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return collectives.wait_tensor(collectives.all_reduce(gradients[0].contiguous(), "sum", ctx.mesh)), None
