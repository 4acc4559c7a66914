"""A layer of experts in one launch, for few tokens: :func:`expert_layer`; whether it is chosen: :func:`one_launch`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from w4gemm.choice import invariant_order
from w4gemm.choice.cost.experts import one_launch_is_slower
from w4gemm.core import environment
from w4gemm.core.epilogue import HALVES, Epilogue
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.core.router import Router
from w4gemm.jit import is_ready
from w4gemm.kernels import launcher, workspace
from w4gemm.kernels.expert_layer.spec import MOST_TOKENS, ExpertLayer
from w4gemm.kernels.helpers.experts import ExpertChoice
from w4gemm.kernels.requirements import hopper_refusal
from w4gemm.kernels.sm90_mixed_gemm.spec import Sm90MixedGemm
from w4gemm.packing.codecs import weight_operand
from w4gemm.packing.packed_shape import PackedShape
from w4gemm.weights.weight import QuantizedWeight


class Experts(NamedTuple):
    """One of the two products of a layer."""

    weight: QuantizedWeight
    bias: torch.Tensor | None = None
    """(experts, n) of x's dtype."""
    scale: torch.Tensor | None = None
    """float32 (experts,)."""


class ByIds(NamedTuple):
    """Choices that were made before."""

    expert_ids: torch.Tensor
    """int32 or int64 (tokens, top k). One outside 0 .. experts - 1 adds nothing."""
    expert_weights: torch.Tensor
    """Floating point (tokens, top k)."""


class ByLogits(NamedTuple):
    """Choices that follow from the logits of a router."""

    logits: torch.Tensor
    """float32, float16 or bfloat16 (tokens, experts)."""
    router: Router
    bias: torch.Tensor | None = None
    """float32 (experts,)."""

    def choice(self) -> ExpertChoice:
        return ExpertChoice(self.router, self.logits.shape[1], self.logits.dtype, self.bias is not None)


class OneLaunch(NamedTuple):
    """Whether a layer runs in one launch."""

    layer: ExpertLayer | None
    """Parameters of the kernel; None if it does not run."""
    refusal: str
    """Why it cannot; the empty string if it can."""
    slower: str
    """Why four launches are predicted to be faster; the empty string if they are not."""

    @property
    def chosen(self) -> ExpertLayer | None:
        """The kernel, if it runs and is predicted to be the faster; else None."""
        return None if self.slower else self.layer


class LayerKey(NamedTuple):
    """Facts of a layer and call that decide how it runs."""

    tokens: int
    gate_up: PackedShape
    down: PackedShape
    dtype: torch.dtype
    activation: str
    top_k: int
    ids: torch.dtype
    mapped: bool = False
    operands: tuple[bool, ...] = (False,) * 4
    """Whether there are biases of gate_up and down, and scales of both."""
    choice: ExpertChoice | None = None
    """How the launch chooses experts by logits; None if it is given ids and weights."""
    in_order: bool = False
    """True if bits must be those of four launches that are batch invariant."""

    @classmethod
    def of(
        cls, x: torch.Tensor, choices: ByIds | ByLogits, gate_up: Experts, down: Experts, activation: str
    ) -> LayerKey:
        """Return the key of a call without an expert map."""
        operands = gate_up.bias, down.bias, gate_up.scale, down.scale
        shapes, has = (gate_up.weight.packed, down.weight.packed), tuple(t is not None for t in operands)
        if isinstance(choices, ByIds):
            top_k, ids, choice = choices.expert_ids.shape[1], choices.expert_ids.dtype, None
        else:
            top_k, ids, choice = choices.router.top_k, torch.int32, choices.choice()
        return cls(len(x), *shapes, x.dtype, activation, top_k, ids, False, has, choice)

    def parameters(self) -> tuple[Any, ...]:
        """Return the arguments of :meth:`ExpertLayer.of` behind the device."""
        first, weight = self.gate_up, weight_operand(self.gate_up.format, self.dtype)
        sizes = first.experts, first.k, self.down.k, self.top_k
        return (
            self.tokens,
            weight,
            self.activation,
            *sizes,
            self.ids,
            self.mapped,
            *self.operands,
            self.choice,
            self.in_order,
        )


@functools.lru_cache(maxsize=4096)
def one_launch(key: LayerKey, device: Device) -> OneLaunch:
    """Return whether a layer can run in one launch on a device, and whether that is predicted to be faster."""
    if not 0 < key.tokens <= MOST_TOKENS:
        return OneLaunch(None, f"takes 1 to {MOST_TOKENS} tokens, got {key.tokens}", "")
    if key.dtype not in HALVES:
        reason = f"takes 16-bit x, got {key.dtype}, in which rows of down need their largest number first"
        return OneLaunch(None, reason, "")
    if key.gate_up.format != key.down.format:
        return OneLaunch(None, f"takes one format, got {key.gate_up.format} and {key.down.format}", "")
    if reason := hopper_refusal(device):
        return OneLaunch(None, reason, "")
    if not key.gate_up.layout == key.down.layout == "mma16":
        return OneLaunch(None, f"reads the mma16 layout, got {key.gate_up.layout} and {key.down.layout}", "")
    layer = ExpertLayer.form(device, *key.parameters())
    if key.in_order and not _adds_in_order(key, device):
        return OneLaunch(None, "batch_invariant is True, and other kernels add up in another order", "")
    if reason := layer.refusal(device):
        return OneLaunch(None, reason, "")
    return OneLaunch(layer, "", one_launch_is_slower(layer, key.tokens, device))


def _adds_in_order(key: LayerKey, device: Device) -> bool:
    """True if the batch-invariant products of four launches add up steps of 16 columns in order. WGMMA and mma.sync
    then make equal bits (H200, 2026-12-01)."""
    bias_up, bias_down, scale_up, scale_down = key.operands
    epilogues = (
        Epilogue(key.activation, bias=bias_up, expert_scale=scale_up),
        Epilogue(bias=bias_down, expert_scale=scale_down),
    )
    for w, epilogue in zip((key.gate_up, key.down), epilogues, strict=True):
        problem = GemmProblem(0, w.n, w.k, key.dtype, w.format, w.layout, epilogue, device, True, w.experts)
        if invariant_order(problem) != Sm90MixedGemm.in_order():
            return False
    return True


def one_launch_now(key: LayerKey, device: Device) -> OneLaunch:
    """Return :func:`one_launch`, where ``W4GEMM_COMPILE=off`` counts: a kernel that is not compiled is no faster."""
    decision = one_launch(key, device)
    if decision.layer is None or environment.may_compile() or is_compiled(decision.layer):
        return decision
    return decision._replace(slower="W4GEMM_COMPILE=off forbids compiling, and its kernel was not compiled ahead")


@functools.lru_cache(maxsize=4096)
def is_compiled(layer: ExpertLayer) -> bool:
    """True if the first call in this process found the kernel compiled."""
    return is_ready(layer.unit())


def expert_layer(
    x: torch.Tensor,
    choices: ByIds | ByLogits,
    gate_up: Experts,
    down: Experts,
    activation: str,
    expert_map: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    in_order: bool = False,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts by one launch, where :func:`one_launch` refuses nothing.

    Args:
        x: 16-bit (tokens, features) on a GPU.
        expert_map: as for :func:`w4gemm.route`.
        out: tensor for the result, contiguous and aligned to 16 bytes, in memory of its own, because CTAs that begin
            late read x when others have stored theirs; or None.
        in_order: see :class:`LayerKey`.
    """
    key = LayerKey.of(x, choices, gate_up, down, activation)
    key = key._replace(mapped=expert_map is not None, in_order=in_order)
    layer = one_launch(key, Device.of(x.device)).layer
    run = launcher(ExpertLayer.of, x.device, *key.parameters())
    assert layer is not None and run is not None, "a layer that cannot run in one launch"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if isinstance(choices, ByIds):
        ids, weights = choices.expert_ids.contiguous(), choices.expert_weights.float().contiguous()
        chosen: tuple[torch.Tensor | None, ...] = ids.view(-1), weights.view(-1), None, None
    else:
        chosen = None, None, choices.logits.contiguous(), choices.bias
    run(
        *(x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(), *chosen, expert_map),
        *(gate_up.weight.tensors[0].view(-1), down.weight.tensors[0].view(-1)),
        *(gate_up.bias, down.bias, gate_up.scale, down.scale),
        *(w.weight.tensors[1] if layer.weight.channels else None for w in (gate_up, down)),
        x.new_empty(layer.scratch_bytes // 4, dtype=torch.int32),
        *(workspace.flags_for(x.device, ExpertLayer.name), out),
    )
    return out
