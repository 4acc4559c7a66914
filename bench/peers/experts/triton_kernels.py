"""triton_kernels' ``matmul_ogs``, as vLLM calls it for gpt-oss on Hopper: MXFP4, whose numbers it widens to bf16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from bench.peers.base import PackageAdapter, Tensors, unsupported
from bench.peers.experts.base import Experts, Prepared, Run
from torch.nn.functional import pad

from w4gemm.core.formats import WeightFormat

_WARPS = 8
"""As vLLM swizzles scales."""


class TritonKernels(PackageAdapter):
    name = "triton_kernels"
    package = module = "triton_kernels"

    def supports(self, n: int, k: int, format: WeightFormat, dtype: torch.dtype) -> str:
        limits = {"groups": (32,), "dtypes": (torch.bfloat16,), "k_multiple": 64}
        return unsupported(n, k, format, dtype, **limits, bits=(), floats=("mxfp4",))

    def prepare(self, experts: Experts, dtype: torch.dtype) -> Prepared:
        from triton_kernels.matmul_ogs import PrecisionConfig, matmul_ogs
        from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints
        from triton_kernels.routing import RoutingData, compute_expt_data_torch
        from triton_kernels.tensor import FP4, Storage, Tensor, convert_layout, wrap_torch_tensor
        from triton_kernels.tensor_details import layout

        update_opt_flags_constraints({"split_k": 1})  # as vLLM does on Hopper
        values, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        scaling, own = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=_WARPS)
        groups = experts.scales.view(torch.uint8)
        groups = pad(groups, (0, -groups.shape[-1] % 4))
        w = convert_layout(wrap_torch_tensor(experts.words.view(torch.uint8).mT, dtype=FP4), values, **options)
        s = convert_layout(wrap_torch_tensor(groups.mT), scaling, **own)

        def of(tensor: Tensor, data: torch.Tensor) -> Tensor:
            return Tensor(Storage(data, tensor.storage.layout), tensor.dtype, list(tensor.shape))

        def routed(counts: Sequence[int]) -> Run:
            total, hist = sum(counts), torch.tensor(counts, dtype=torch.int32, device=experts.words.device)
            data = compute_expt_data_torch(hist, len(counts), total)
            routing = RoutingData(None, hist, len(counts), 1, data)

            def run(tensors: Tensors, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
                codes, scales = tensors
                precision = PrecisionConfig(weight_scale=of(s, scales), out_dtype=out.dtype)
                y = matmul_ogs(x, of(w, codes), None, routing, precision_config=precision)
                return y.view(-1, y.shape[-1])

            return run

        return Prepared((w.storage.data, s.storage.data), routed)


PEER = TritonKernels()
