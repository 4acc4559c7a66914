"""Humming's grouped kernel, just-in-time compiled CUDA C++; its configs as its heuristic chooses them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from bench.peers.base import FP8, PackageAdapter, Tensors, float_name, unsupported
from bench.peers.experts.base import Experts, Prepared, Run
from bench.peers.experts.rows import ends_of

from w4gemm.core.formats import WeightFormat

_COMPUTE = {"gemm_type": "grouped_contiguous"}
_TILE_N = 128
"""Humming's heuristic wants n in such multiples for experts, and its layer pads to them; d keeps its n."""
_STEPS = {8: 1, 1024: 8, 2048: 16, 4096: 32, 16384: 64}
"""Multiples of the value begin another entry of Humming's table of configs, for numbers of rows up to the key."""
_MOST_ROWS = 65408
"""The table's last entry."""


class Humming(PackageAdapter):
    name = "humming"
    package, module = "humming-kernels", "humming"

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        dtypes, fp4 = (torch.bfloat16, FP8), ("mxfp4",) if dtype == FP8 else ("mxfp4", "nvfp4")
        limits = {"groups": (-1, 32, 64, 128, 256), "n_multiple": 64, "k_multiple": 64}
        if format.element == "int4" and format.has_channels:  # prepare joins both kinds of scales
            format = replace(format, scale="bf16")
        return unsupported(n, k, format, dtype, dtypes=dtypes, floats=fp4, **limits)

    def prepare(self, experts: Experts, dtype: torch.dtype) -> Prepared:
        from humming.forward import humming_forward
        from humming.layer import HummingLayer

        weights, tensors = tensors_of(experts)
        # W4A8: x is bf16, and quantized within the call
        inputs = {"dtype": "float8e4m3"} if dtype == FP8 else None
        options = {"num_experts": len(experts.words), "torch_dtype": torch.bfloat16}
        with torch.device(experts.words.device):
            layer = HummingLayer(experts.n, experts.k, weights, inputs, pad_n_to_multiple=_TILE_N, **options)
        layer.load_from_tensors(tensors)
        layer.transform()
        config, second = layer.humming_config, getattr(layer, "weight_scale_2", None)

        def routed(counts: Sequence[int]) -> Run:
            offsets, tuning = ends_of(counts, torch.int64, experts.words.device), tuning_of(config, sum(counts))

            def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
                w, s, locks = tensors
                options = {"expert_layout": offsets, "compute_config": _COMPUTE, "tuning_config": tuning}
                humming_forward(config, x, w, s, weight_scale_2=second, outputs=out, locks=locks, **options)
                return out

            return run

        tensors = (layer.weight.data, layer.weight_scale.data, layer.locks)
        activations = torch.bfloat16 if inputs else None
        note = f"n {config.shape_n}" if config.shape_n > experts.n else ""
        return Prepared(tensors, routed, lambda rows: compile_only(config, rows), activations, note)


def tensors_of(experts: Experts) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Return the weight's part of a layer's config, and the layer's tensors as Humming's own checkpoints have them."""
    group = max(0, experts.format.group_size)
    if name := float_name(experts.format):
        scale = "float8e8m0" if name == "mxfp4" else "float8e4m3"
        weights: dict[str, object] = {"dtype": "float4e2m1", "group_size": group, "scale_dtype": scale}
        tensors = {"weight": experts.words, "weight_scale": experts.scales}
        if name == "nvfp4":
            weights["scale_2_type"] = "tensor"
            tensors["weight_scale_2"] = experts.factors()
        return weights, tensors
    scales = experts.scales
    if experts.channels is not None:
        scales = scales.float() * experts.channels[..., None]
    return {"dtype": "int4", "group_size": group}, {"weight": experts.words, "weight_scale": scales.bfloat16()}


def tuning_of(config: Any, rows: int) -> dict[str, Any]:
    """Return the config of the call and make its kernel ready: the one that Humming's table of all numbers of rows
    has, of which Humming itself would compile all 23 to 94 entries."""
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    tuning: dict[str, Any] = get_heuristics_config(config, entry(rows), **_COMPUTE)
    HummingKernel.prepare_kernels(config.to_str(), json.dumps(_COMPUTE), json.dumps(tuning))
    return tuning


def entry(rows: int) -> int:
    """Return the number of rows whose config serves ``rows``."""
    step = next((step for most, step in _STEPS.items() if rows <= most), 128)
    if step == 1:
        return 1 << (rows - 1).bit_length()
    return min(_MOST_ROWS, -(-rows // step) * step)


def compile_only(config: Any, rows: int) -> None:
    """Put the kernel of a call into Humming's cache of compiled kernels, and load nothing."""
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    class Compiled(HummingKernel):
        def register_kernel(self) -> None:
            """Loading a kernel would end the capture of a CUDA graph in another thread."""

    tuning = json.dumps(get_heuristics_config(config, entry(rows), **_COMPUTE))
    layer, compute, chosen = HummingKernel._resolve_configs(config.to_str(), json.dumps(_COMPUTE), tuning)
    Compiled(**layer, **compute, **{name: value for name, value in chosen.items() if name != "num_sms"})


PEER = Humming()
