"""The experts of a layer as vLLM's modular kernels: :class:`W4gemmExperts`, :class:`BatchedW4gemmExperts`.

vLLM's prepare step quantizes and dispatches tokens, ours multiplies, its finalize step adds up and sends back. All of
it runs inside vLLM's own operator ``moe_forward``, so torch.compile sees none of it. The host reads no tensor, so a
CUDA graph can capture it. The weights are the layer's parameters: whoever moves an expert's rows moves every tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import envs
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

from w4gemm.api.activations import quantize_rows
from w4gemm.api.expert_layer import ByIds, Experts, LayerKey, expert_layer, one_launch_now
from w4gemm.api.product import launch
from w4gemm.api.routing import combined, routed
from w4gemm.choice import first_rows
from w4gemm.core.epilogue import Epilogue, EpilogueOperands
from w4gemm.core.problem import Device
from w4gemm.integrations.engines.warmup import ExpertsCall, Need, experts_need, token_counts
from w4gemm.kernels import Operands
from w4gemm.kernels.arguments import ExpertRows
from w4gemm.kernels.expert_layer.spec import MOST_TOKENS
from w4gemm.weights.weight import QuantizedWeight

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class ExpertsProduct(NamedTuple):
    """One of the products of a layer, without the checks of a user's call, which take longer than a launch."""

    weight: QuantizedWeight
    bias: torch.Tensor | None
    """(experts, n), or None."""
    epilogue: Epilogue
    batch_invariant: bool = False

    @classmethod
    def of(
        cls, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype, activation: str | None
    ) -> ExpertsProduct:
        """Return the product with x of ``dtype``, which is quantized if the weight says so."""
        plain = Epilogue(bias=bias is not None)
        epilogue = plain if weight.activations is None else plain.of_quantized(dtype)
        return cls(weight, bias, epilogue._replace(activation=activation), bool(envs.VLLM_BATCH_INVARIANT))

    def with_block_scales(self) -> ExpertsProduct:
        """Return the product with x that comes in fp8 with a scale for each 128 columns of a row."""
        return self._replace(epilogue=self.epilogue._replace(token_scale=False, block_scale=True))

    def write(
        self, x: torch.Tensor, out: torch.Tensor, rows: ExpertRows, scale: torch.Tensor | None, expected: int = 0
    ) -> None:
        """Write the product of x (rows of x, k) to ``out`` (rows, columns).

        Args:
            scale: float32, one for each row of x, in any shape, or (..., one for each 128 columns of it); None if x is
                not quantized, or not yet.
            expected: rows that the plan is chosen for; 0 for all of ``out``.
        """
        if self.epilogue.token_scale and scale is None:
            x, scale = quantize_rows(x)
        operands = EpilogueOperands(bias=self.bias)
        if self.epilogue.block_scale:
            assert scale is not None
            # if copied, with contiguous rows, as kernels read it
            operands = operands._replace(block_scale=scale.movedim(-1, 0).reshape(scale.shape[-1], -1).T)
        elif scale is not None:
            operands = operands._replace(token_scale=scale.reshape(-1))
        launched = Operands(x, self.weight.tensors, out, operands, rows)
        invariant = self.batch_invariant
        launch(self.weight.packed, launched, self.epilogue, batch_invariant=invariant, expected=expected)


class _Experts(mk.FusedMoEExpertsModular):  # type: ignore[misc, unused-ignore]
    """Common base of both formats.

    Args:
        gate_up: its rows are pairs of a gate and an up or, if the activation has no gates, ups.
        others: arguments of vLLM's base.
    """

    def __init__(self, gate_up: ExpertsProduct, down: ExpertsProduct, **others: Any) -> None:
        super().__init__(**others)
        self.products = gate_up, down
        self.gate_up, self.down = gate_up.weight, down.weight

    @property
    def expects_unquantized_inputs(self) -> bool:
        """True if tokens come in 16 bits, for the first product to quantize: if no other rank sends them, or if DeepEP
        would give all received tokens one scale."""
        parallel = self.moe_config.moe_parallel_config
        alone = parallel.dp_size == 1 and not parallel.use_all2all_kernels
        one_scale = parallel.use_deepep_ht_kernels or parallel.use_deepep_v2_kernels
        return (alone or one_scale) and self.products[0].epilogue.token_scale

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """Experts, tokens (of an expert if there is a dimension of experts), features of both products, top k."""
        return self.gate_up.experts, a1.shape[-2], self.gate_up.n, self.gate_up.k, topk_ids.shape[1]

    def _need(self, counts: Sequence[int], rows_each: int, gathered: bool) -> Need:
        """Return the launches for these numbers of tokens, or of an expert's rows, of ``rows_each`` rows of all
        experts."""
        fused = self.products[0].epilogue
        top_k = [self.moe_config.experts_per_token]
        if self.moe_config.moe_parallel_config.use_deepep_v2_kernels:
            top_k.append(1)  # it may send a token once for each of its experts
        rows = [count * rows_each for count in counts]
        mapped = self.moe_config.moe_parallel_config.use_ep
        facts = gathered, fused.bias, fused.block_scale, mapped, self.products[0].batch_invariant
        call = ExpertsCall(self.moe_config.in_dtype, top_k, rows, *facts)

        @torch.inference_mode()
        def run() -> None:
            for count in counts:
                self._run_once(count)

        return experts_need(self.gate_up, self.down, fused.activation, call, run)

    def _run_once(self, count: int) -> None:
        """Launch everything for so many tokens, or rows of an expert."""
        raise NotImplementedError

    # The plugin chooses these classes itself, having checked the layer, and vLLM's lists of kernels do not have them.
    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True


class W4gemmExperts(_Experts):
    """Tokens as they are: x (tokens, features). Each choice of an expert that is here becomes a row."""

    _last_step: LastStep | None = None
    """The last step of the newest call."""

    @property
    def columns_between(self) -> int:
        """Columns of the rows between the products, as the first one writes them."""
        return self.down.k

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, *others: Any) -> Shapes:
        """Return the shapes that vLLM allocates: nothing, the rows between the products, and the rows behind them.
        These have three dimensions, lest vLLM takes its output for them where each token has one expert: they are in
        another order."""
        return (0,), (M * topk, self.columns_between), (M, topk, self.down.n)

    def apply(  # vLLM names every argument
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        workspace2: torch.Tensor,
        apply_router_weight_on_input: bool,
        **unused: Any,
    ) -> None:
        if len(hidden_states) <= MOST_TOKENS and not apply_router_weight_on_input:
            layer = self._in_one_launch(hidden_states, ByIds(topk_ids.int(), topk_weights), expert_map)
            if layer is not None:
                self._last_step = LastStep(lambda d, weights, out: layer(out=out))
                return
        routing = routed(topk_ids, self.gate_up.experts, expert_map)
        gate_up, down = self.products
        first, end = routing.m_offsets[:-1], routing.m_offsets[1:]
        gate_up.write(hidden_states, workspace2, ExpertRows(first, end, routing.tokens), a1q_scale)
        down.write(workspace2, output.view(-1, self.down.n), ExpertRows(first, end, settled=1), None)
        settled = not apply_router_weight_on_input  # else the weights are new
        self._last_step = LastStep(lambda d, weights, out: combined(d, routing.row_of_choice, weights, out, settled))

    def _in_one_launch(
        self, x: torch.Tensor, choices: ByIds, expert_map: torch.Tensor | None
    ) -> Callable[..., torch.Tensor] | None:
        """Return the layer of a call in one launch, which writes its result to ``out``; None if it cannot or is
        predicted to be slower."""
        in_order = self.products[0].batch_invariant
        gate_up, down = (Experts(product.weight, product.bias) for product in self.products)
        activation = self.products[0].epilogue.activation
        assert activation is not None
        key = LayerKey.of(x, choices, gate_up, down, activation)
        key = key._replace(mapped=expert_map is not None, in_order=in_order)
        if one_launch_now(key, Device.of(x.device)).chosen is None:
            return None
        return functools.partial(expert_layer, x, choices, gate_up, down, activation, expert_map, in_order=in_order)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return LastStep() if self._last_step is None else self._last_step

    def need(self, most_tokens: int) -> Need:
        """Return the launches for 1 to ``most_tokens`` tokens."""
        top_k = self.moe_config.experts_per_token
        return self._need(token_counts(most_tokens, top_k, self.gate_up.experts), top_k, True)

    def _run_once(self, count: int) -> None:
        """Launch everything for so many tokens of zeros, evenly divided among experts, in four launches and, if that is
        chosen, in one."""
        dtype, device, top_k = self.moe_config.in_dtype, self.gate_up.device, self.moe_config.experts_per_token
        x = torch.zeros(count, self.gate_up.k, dtype=dtype, device=device)
        ids = torch.arange(count * top_k, dtype=torch.int32, device=device).view(count, top_k)
        weights = torch.zeros(count, top_k, dtype=torch.float32, device=device)
        columns = self.columns_between, self.down.n
        hidden, output = (torch.empty(count * top_k, n, dtype=dtype, device=device) for n in columns)
        ids %= self.gate_up.experts
        use_map = self.moe_config.moe_parallel_config.use_ep
        every = torch.arange(self.gate_up.experts, dtype=torch.int32, device=device) if use_map else None
        for on_input in (True, False):  # weights on the input: in four launches
            self.apply(
                output=output,
                hidden_states=x,
                topk_weights=weights,
                topk_ids=ids,
                expert_map=every,
                a1q_scale=None,
                workspace2=hidden,
                apply_router_weight_on_input=on_input,
            )
            self.finalize_weight_and_reduce_impl().apply(None, output, weights, ids, False)


class LastStep(mk.TopKWeightAndReduce):  # type: ignore[misc, unused-ignore]
    """The launch that writes a layer's result: the weighted sum of each token's rows or, if one launch runs the whole
    layer, that one, because vLLM hands in its output only here.

    Args:
        launch: from rows d (tokens * top k, features), weights (tokens, top k), and the output, or None for a new
            tensor, to the result; None before the first call with tokens.
    """

    def __init__(self, launch: Callable[..., torch.Tensor] | None = None) -> None:
        self.launch = launch

    def apply(
        self,
        output: torch.Tensor | None,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        """Return ``output``, or a new tensor. If the weights were applied on the input, rows are added as they are."""
        if not len(topk_ids):  # then the experts were not called, and the launch is an older call's
            return fused_expert_output if output is None else output
        assert self.launch is not None
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        return self.launch(fused_expert_output.flatten(0, -2), weights, output)


class BatchedW4gemmExperts(_Experts):
    """Tokens that were dispatched into rows of their experts: x (experts, most tokens, features), and counts."""

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, *others: Any) -> Shapes:
        """Return the shapes that vLLM allocates, as :meth:`W4gemmExperts.workspace_shapes` does."""
        rows = self.max_num_tokens * self.num_dispatchers
        return (0,), (self.gate_up.experts, rows, self.down.k), (self.gate_up.experts, rows, self.down.n)

    def apply(  # vLLM names every argument
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        global_num_experts: int,
        a1q_scale: torch.Tensor | None,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        **unused: Any,
    ) -> None:
        counts, most = expert_tokens_meta.expert_num_tokens, hidden_states.shape[1]
        first = torch.arange(0, len(counts) * most, most, dtype=torch.int32, device=counts.device)
        rows = ExpertRows(first, first + counts)
        gate_up, down = self.products
        hidden = workspace2.flatten(0, 1)
        expected = len(counts) * expected_rows(most, topk_ids.shape[1], global_num_experts)
        gate_up.write(hidden_states.flatten(0, 1), hidden, rows, a1q_scale, expected)
        down.write(hidden, output.flatten(0, 1), rows._replace(settled=1), None, expected)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def need(self, most_tokens: int) -> Need:
        """Return the launches for 1 to as many rows of an expert as there is room for."""
        return self._need(first_rows(self.max_num_tokens * self.num_dispatchers), self.gate_up.experts, False)

    def _run_once(self, count: int) -> None:
        """Launch both products' plans for ``count`` rows of an expert, on one uncounted row of each expert."""
        (gate_up, down), experts = self.products, self.gate_up.experts
        dtype, device = self.moe_config.in_dtype, self.gate_up.device
        x, scale = torch.zeros(experts, self.gate_up.k, dtype=dtype, device=device), None
        if gate_up.epilogue.block_scale:
            x = x.to(torch.float8_e4m3fn)
            scale = torch.ones(experts, -(-self.gate_up.k // 128), dtype=torch.float32, device=device)
        first = torch.arange(experts, dtype=torch.int32, device=device)
        rows = ExpertRows(first, first)
        hidden, d = (torch.empty(experts, n, dtype=dtype, device=device) for n in (self.down.k, self.down.n))
        gate_up.write(x, hidden, rows, scale, experts * count)
        down.write(hidden, d, rows._replace(settled=1), None, experts * count)


def expected_rows(room: int, top_k: int, experts: int) -> int:
    """Return the rows that an expert has on average, from 1 to ``room``, by the tokens of this step on all ranks; if
    vLLM does not tell these, ``room``."""
    if not is_forward_context_available():
        return room
    metadata = get_forward_context().dp_metadata
    if metadata is None:
        return room
    tokens = int(metadata.num_tokens_across_dp_cpu.sum())
    return min(room, max(1, -(-tokens * top_k // experts)))
