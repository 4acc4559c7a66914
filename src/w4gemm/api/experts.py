"""Layers for mixtures of experts: :class:`W4Experts`, which consists of two :class:`W4GroupedLinear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from w4gemm.api.arguments import checked_activation
from w4gemm.api.expert_layer import ByIds, ByLogits, Experts, LayerKey, expert_layer, one_launch_now
from w4gemm.api.grouped import grouped_linear
from w4gemm.api.modes import autocast, is_eager, layer_dtype, refuse_transforms
from w4gemm.api.packed_module import PackedModule, moved_only
from w4gemm.api.routing import check_ids, check_logits, choose_experts, combined, routed
from w4gemm.core.activation import is_gated
from w4gemm.core.errors import UnsupportedError, kind_of, require_tensor
from w4gemm.core.problem import Device
from w4gemm.core.router import Router
from w4gemm.weights.weight import QuantizedWeight


class W4GroupedLinear(PackedModule):
    """The layer of :func:`w4gemm.grouped_linear`: x (total_m, k), sorted by expert, and m_offsets (experts + 1,) to
    (total_m, n). Tensors, dtypes, attributes, such as ``batch_invariant``, and state dict are as of
    :class:`W4Linear`.

    Args:
        w: the weight (experts, n, k).
        bias: (experts, n) on w's device, or None.
        dtype: as for :meth:`W4Linear.from_weight`.
        expert_scale: float32 (experts,) on w's device, or None: a factor for each expert's products, for weights that
            were quantized with a scale for each tensor. It is a buffer. A state dict holds it, and a loaded one may
            bring it. ``half()`` and ``to(dtype)`` leave it float32.

    Raises:
        TypeError, ValueError: for a bad weight, bias, dtype or scale; the message names it.

    Examples:
        >>> stack = w4gemm.QuantizedWeight.stack([w4gemm.quantize(torch.randn(256, 64))] * 4)
        >>> layer = w4gemm.W4GroupedLinear.from_weight(stack, torch.zeros(4, 256))
        >>> layer(torch.randn(10, 64), torch.tensor([0, 3, 3, 9, 10], dtype=torch.int32)).shape
        torch.Size([10, 256])
    """

    grouped = True
    scale_names = ("pre_quant_scale", "expert_scale")
    expert_scale: torch.Tensor | None

    if TYPE_CHECKING:  # torch.nn.Module's returns Any
        __call__: Callable[..., torch.Tensor]

    def __init__(
        self,
        w: QuantizedWeight,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        expert_scale: torch.Tensor | None = None,
    ) -> None:
        super().__init__(w, bias, dtype)
        if expert_scale is not None:
            require_tensor("expert_scale", expert_scale, torch.float32, (w.experts,), w.device, whose="w's device")
            self.expert_scale = expert_scale.detach()

    @classmethod
    def from_weight(
        cls,
        w: QuantizedWeight,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        expert_scale: torch.Tensor | None = None,
    ) -> W4GroupedLinear:
        """Return a layer with weight ``w``: the same as the class itself, by the name that :class:`W4Linear` has."""
        return cls(w, bias, dtype=dtype, expert_scale=expert_scale)

    def forward(
        self, x: torch.Tensor, m_offsets: torch.Tensor, indices: torch.Tensor | None = None, settled: bool = False
    ) -> torch.Tensor:
        """Return :func:`w4gemm.grouped_linear` (total_m, n) of x and m_offsets int32 (experts + 1,). x is (total_m, k)
        or, with ``indices`` (total_m,), has any number of rows."""
        x, bias = autocast(self._scaled(x), self._own_bias())
        fused: dict[str, Any] = {"activation": self.activation, "expert_scale": self.expert_scale, "settled": settled}
        fused["batch_invariant"] = self.batch_invariant
        if (dtype := layer_dtype(x, bias, self.dtype)) is None:
            return grouped_linear(x, self.weight, m_offsets, bias, indices=indices, **fused)
        bias = None if bias is None else bias.to(dtype)
        return grouped_linear(x.to(dtype), self.weight, m_offsets, bias, indices=indices, **fused).to(x.dtype)

    def as_it_is(self, x: torch.Tensor) -> Experts | None:
        """Return the operands of a product with x of x's dtype, if neither it nor the bias is cast, scaled or
        quantized first and the bias needs no gradient; else None."""
        bias, w = self._own_bias(), self.weight
        cast = autocast(x, bias)[0] is not x or layer_dtype(x, bias, self.dtype) is not None
        scaled = self._buffers.get("pre_quant_scale") is not None or w.activations is not None or w.perm is not None
        wrong_bias = bias is not None and bias.dtype != x.dtype
        if cast or scaled or wrong_bias or (torch.is_grad_enabled() and bias is not None and bias.requires_grad):
            return None
        return Experts(w, bias, self.expert_scale)

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.expert_scale is None else ", expert_scale=True")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> W4GroupedLinear:
        scale = self._buffers["expert_scale"]

        def moved(t: torch.Tensor) -> torch.Tensor:
            if t is not scale:
                return fn(t)
            # as integers, because a conversion of the module's dtype leaves those alone
            return moved_only(t.view(torch.int32), fn).view(torch.float32)

        super()._apply(moved, recurse)
        return self


class W4Experts(torch.nn.Module):
    """The experts of a mixture, with quantized weights. Each computes down @ act(gate @ x, up @ x) or, with an
    activation without gates, down @ act(up @ x). A token's results are weighted by the router and added.

    All data stays on the device, and the launches are the same whatever the router chose, so that a CUDA graph can
    capture them. A token's results are added in the order of its choices. Gradients flow to x, to the router's weights
    and to biases, as from :func:`w4gemm.grouped_linear`; the weights are frozen. x of another dtype is cast as by
    :class:`W4Linear`. If the ``activations`` of gate_up or of down is "fp8", that product quantizes its input. A state
    dict keeps it.

    Args:
        gate_up: a weight (experts, 2 * hidden, features), gates and ups in pairs: :meth:`QuantizedWeight.interleave`,
            then :meth:`QuantizedWeight.stack`; without gates (experts, hidden, features). Or a
            :class:`W4GroupedLinear`, which may have a bias for each expert, added before the activation, and a scale
            for each expert.
        down: a weight (experts, features, hidden), or a :class:`W4GroupedLinear`. Its bias is multiplied by the
            router's weights.
        activation: an activation of :func:`w4gemm.linear`: a gated one, such as "silu_mul", "swiglu_oai" (gpt-oss) or
            "silu_mul(limit=10)" (DeepSeek-V4), or for experts without gates another, such as "relu2" (Nemotron). It is
            an attribute and may be set later.
        dtype: dtype to advertise, as for :meth:`W4Linear.from_weight`; for weights that are not layers yet.
        activations: "fp8" or None for both products; "same" keeps each weight's.
        batch_invariant: True if the bits of a token's result must not depend on the other tokens, their experts or
            their number. It is an attribute of the layer and of both products, and may be set later. On Hopper such a
            layer runs in one launch in int4 and MXFP4 alone, with up to 8 tokens.

    Raises:
        TypeError, ValueError: for weights without experts, or sizes that do not match each other and the activation.

    Examples:
        >>> gate, up = (w4gemm.quantize(torch.randn(128, 64)) for _ in range(2))
        >>> gate_up = w4gemm.QuantizedWeight.stack([w4gemm.QuantizedWeight.interleave(gate, up)] * 4)
        >>> down = w4gemm.QuantizedWeight.stack([w4gemm.quantize(torch.randn(64, 128))] * 4)
        >>> scores, ids = torch.randn(10, 4).softmax(-1).topk(2)  # of a router
        >>> w4gemm.W4Experts(gate_up, down)(torch.randn(10, 64), ids, scores).shape
        torch.Size([10, 64])
    """

    if TYPE_CHECKING:  # torch.nn.Module's returns Any
        __call__: Callable[..., torch.Tensor]

    one_launch: bool | None = None
    """Whether an eager call of at most eight tokens runs in one launch on Hopper. None: if that is predicted to be
    faster than four. True: always; a call that cannot is refused. False: never. Both ways round sums differently. Calls
    that are traced run in four."""

    def __init__(
        self,
        gate_up: QuantizedWeight | W4GroupedLinear,
        down: QuantizedWeight | W4GroupedLinear,
        *,
        activation: str = "silu_mul",
        dtype: torch.dtype | None = None,
        activations: str | None = "same",
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        for name, weight in (("gate_up", gate_up), ("down", down)):
            if not isinstance(weight, (QuantizedWeight, W4GroupedLinear)):
                raise TypeError(f"{name}: wanted a QuantizedWeight or a W4GroupedLinear, got {kind_of(weight)}")
            if isinstance(weight, QuantizedWeight) and not weight.experts:
                raise ValueError(
                    f"{name}: wanted one of several experts, as QuantizedWeight.stack makes, got {weight!r}"
                )
        for name, text in (("activation", activation), ("activations", activations)):
            if text is not None and not isinstance(text, str):  # a module would become a child of this one
                raise TypeError(f"{name}: wanted a string, got {kind_of(text)}")
        self.gate_up, self.down = (
            weight if isinstance(weight, W4GroupedLinear) else W4GroupedLinear.from_weight(weight, dtype=dtype)
            for weight in (gate_up, down)
        )
        first, second = self.gate_up.weight, self.down.weight
        if (second.experts, second.n) != (first.experts, first.k) or first.n not in (second.k, 2 * second.k):
            hidden = f"{first.n / 2:g}, or {first.n} without gates,"
            raise ValueError(
                f"down: wanted {first.experts} experts with n {first.k} and k {hidden} for {first!r}, got {second!r}"
            )
        self.activation = activation
        if activations != "same":
            self.activations = activations
        if batch_invariant is not False:
            self.batch_invariant = batch_invariant

    @property
    def activations(self) -> str | None:
        """Whether both products quantize their input: "fp8" or None. Setting it sets both.

        Raises:
            ValueError: if one does: ``gate_up.activations`` and ``down.activations`` say which.
        """
        first, second = self.gate_up.activations, self.down.activations
        if first != second:
            raise ValueError(f"activations: wanted one for both products, got {first!r} of gate_up, {second!r} of down")
        return first

    @activations.setter
    def activations(self, activations: str | None) -> None:
        self.gate_up.activations = activations
        self.down.activations = activations

    @property
    def batch_invariant(self) -> bool:
        """True if a token's result depends on that token and its experts alone. Setting it sets both products'."""
        return self.gate_up.batch_invariant and self.down.batch_invariant

    @batch_invariant.setter
    def batch_invariant(self, batch_invariant: bool) -> None:
        self.gate_up.batch_invariant = batch_invariant
        self.down.batch_invariant = batch_invariant

    @property
    def activation(self) -> str:
        """The activation between the two products."""
        activation = self.gate_up.activation
        assert activation is not None
        return activation

    @activation.setter
    def activation(self, activation: str) -> None:
        features, hidden = self.gate_up.weight.n, self.down.weight.k
        if activation is None or is_gated(activation) != (features == 2 * hidden):
            expected = (
                "a gated one, such as silu_mul," if features == 2 * hidden else "one without gates, such as relu2,"
            )
            raise ValueError(
                f"activation: wanted {expected} between n {features} of gate_up and k {hidden} of down, "
                f"got {activation!r}"
            )
        self.gate_up.activation = checked_activation(activation, features)

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum (tokens, features) of each token's experts.

        Args:
            x: (tokens, features).
            expert_ids: int32 or int64 (tokens, top k), the experts that the router chose. An id outside 0 ..
                experts - 1 adds nothing.
            expert_weights: floating point (tokens, top k), the router's weight of each choice.

        Raises:
            TypeError, ValueError: for another dtype or shape; the message names the argument.
        """
        check_ids(expert_ids)
        require_tensor("x", x, (), ("tokens", "features"), contiguous=False)
        shape = expert_ids.shape
        if shape[0] != x.shape[0]:
            raise ValueError(f"expert_ids: wanted {x.shape[0]} rows, one for each of x, got {tuple(shape)}")
        size = " like expert_ids"
        require_tensor("expert_weights", expert_weights, (), shape, x.device, size=size, contiguous=False)
        if (out := self._in_one_launch(x, ByIds(expert_ids, expert_weights))) is not None:
            return out
        refuse_transforms("experts")  # before PyTorch's operators do, in words of their own
        routing = routed(expert_ids, self.gate_up.weight.experts)
        hidden = self.gate_up(x, routing.m_offsets, routing.tokens)
        d = self.down(hidden, routing.m_offsets, settled=True)
        return combined(d, routing.row_of_choice, expert_weights, None, settled=True)

    def of_logits(
        self, x: torch.Tensor, logits: torch.Tensor, router: Router, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return :meth:`forward` with the choices of :func:`w4gemm.choose_experts`, whose arguments these are. A call
        that runs in one launch chooses in it, the same experts and weights.

        Args:
            x: (tokens, features).
            logits: (tokens, experts).

        Raises:
            TypeError, ValueError: for another dtype, shape or device; the message names the argument.
        """
        check_logits(logits, router, bias)
        if (
            not isinstance(x, torch.Tensor)
            or x.dim() != 2
            or (x.shape[0], x.device) != (logits.shape[0], logits.device)
        ):
            expected = f"a tensor ({logits.shape[0]}, features) on logits' device {logits.device}"
            raise ValueError(f"x: wanted {expected}, got {kind_of(x)}")
        if (out := self._in_one_launch(x, ByLogits(logits, router, bias))) is not None:
            return out
        expert_ids, expert_weights = choose_experts(logits, router, bias)
        return self(x, expert_ids, expert_weights)

    def explain(self, tokens: int, top_k: int, dtype: torch.dtype = torch.bfloat16) -> str:
        """Return in how many launches a call on the weights' device runs, and why.

        Args:
            tokens: rows of x, of ``dtype``.
            top_k: experts of a token; their ids are int64.
        """
        ids = torch.empty((tokens, top_k), dtype=torch.int64, device="meta")
        x = torch.empty((tokens, self.gate_up.weight.k), dtype=dtype, device="meta")
        reason = self._why_four_launches(self._operands(x), x, ByIds(ids, x.new_empty(ids.shape)))
        return f"four launches: {reason}" if reason else "one launch (expert_layer)"

    def _operands(self, x: torch.Tensor) -> tuple[Experts, Experts] | None:
        """Return the operands of both products, if nothing is done to them or to x first; else None."""
        first, second = self.gate_up.as_it_is(x), self.down.as_it_is(x)
        return None if first is None or second is None else (first, second)

    def _why_four_launches(
        self, operands: tuple[Experts, Experts] | None, x: torch.Tensor, choices: ByIds | ByLogits
    ) -> str:
        """Return why a call runs in four launches; the empty string if it runs in one. operands: :meth:`_operands`.

        Raises:
            UnsupportedError: if ``one_launch`` is True and the layer cannot.
        """
        if self.one_launch is False:
            return "one_launch is False"
        if self.gate_up.batch_invariant != self.down.batch_invariant:
            refusal, slower = "batch_invariant is True of one product alone", ""
        elif operands is None:
            refusal, slower = "x or a bias is cast, scaled or quantized before a product, or needs a gradient", ""
        else:
            key = LayerKey.of(x, choices, *operands, self.activation)._replace(in_order=self.batch_invariant)
            _, refusal, slower = one_launch_now(key, Device.of(self.gate_up.weight.device))
        if self.one_launch and refusal:
            raise UnsupportedError(f"one_launch: wanted a layer and call that run in one launch, but {refusal}")
        return refusal or ("" if self.one_launch else slower)

    def _in_one_launch(self, x: torch.Tensor, choices: ByIds | ByLogits) -> torch.Tensor | None:
        """Return the result of a checked call if it runs in one launch, else None."""
        if isinstance(choices, ByIds):
            chosen, scores = choices
        else:
            chosen = scores = choices.logits
        w = self.gate_up.weight
        if not is_eager(x, scores) or x.shape[1] != w.k or not x.device == chosen.device == w.device:
            return None
        operands = self._operands(x)
        if self._why_four_launches(operands, x, choices) or operands is None:
            return None
        return expert_layer(x, choices, *operands, self.activation, in_order=self.batch_invariant)
