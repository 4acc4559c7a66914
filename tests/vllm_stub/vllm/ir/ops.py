"""The operators, with vLLM's formulas."""

import torch


def fused_add_rms_norm(
    x: torch.Tensor, x_residual: torch.Tensor, weight: torch.Tensor, epsilon: float, variance_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.float() + x_residual.float()
    y = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return (y.to(weight.dtype) * weight).to(x.dtype), total.to(x.dtype)


if not hasattr(torch.ops.vllm_ir, "fused_add_rms_norm"):  # the stub may be imported again
    schema = "(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, int? variance_size=None) -> (Tensor, Tensor)"
    torch.library.define("vllm_ir::fused_add_rms_norm", schema)
    torch.library.impl("vllm_ir::fused_add_rms_norm", "cpu")(fused_add_rms_norm)
    torch.library.register_fake("vllm_ir::fused_add_rms_norm")(fused_add_rms_norm)
