"""One token of a sequence through a model on a CPU, as a list of calls of machine code: :class:`CompiledStep`.

A step of ``generate`` runs some 20 of PyTorch's operators a layer, from Python, which take longer than the products of
a small model. Here a decoder's layers become calls with all arguments at hand: the products and what lies between them
(``kernels/cpu/step.py``), on tensors that stay where they are. Modules are known by the names of their children.
Whether all this computes the model is not taken on trust: the logits of the first step are compared.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.models.llama.modeling_llama import LlamaAttention

from w4gemm.api.modes import is_watched
from w4gemm.api.nn import W4Linear
from w4gemm.integrations.decoder.attention import NotFusable
from w4gemm.integrations.decoder.fusion import is_rms_norm
from w4gemm.integrations.decoder.requirements import (
    GATE_UP,
    LAYER,
    QKV,
    Otherwise,
    broken,
    cache_argument,
    log_once,
    norm_eps,
)
from w4gemm.integrations.decoder.step import Prompt, facts_of
from w4gemm.kernels.cpu import compiled, machine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_ERROR = 1e-3
"""Largest relative difference of the logits, which are sums of float32 in another order."""
_LINEAR = (W4Linear.forward, nn.Linear.forward)
_HEAD_NORMS = ("q_norm", "k_norm")
_BEYOND_LLAMA = {*_HEAD_NORMS, "sliding_window", "getattr"}
"""What the code of other attentions may use beside what Llama's uses. Windows are known by the cache. A scale that
grows with the position, which the first step would not show, has another name."""
_WIDTH = 32
"""Elements of hidden states and heads are multiples of it, so that vectors of half a head are full."""


class CompiledStep:
    """One token of a sequence through a model without padding, with a cache of fixed size.

    All tensors that a step reads and writes lie here or in the model, and none of them moves.
    """

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        """
        Args:
            length: tokens of the sequence at most, with those of the prompt.

        Raises:
            NotFusable: if the model is not one that a compiled step computes, with the reason.
        """
        self.length, self.facts, self.threads = length, facts_of(model), torch.get_num_threads()
        self.error: float | None = None
        """Relative difference of the logits of the first step; None before it."""
        self._own: Any = None
        """The cache of a model that goes on in its own code."""
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._calls: list[Callable[[], Any]] = []
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.inference_mode():
            self.position = torch.zeros(1, 1, dtype=torch.int64)
            self.slot = torch.zeros(1, dtype=torch.int64)
            self._scores = torch.empty(length + 16)
            self.logits = self._build(model)

    def serves(self, model: PreTrainedModel, batch: int, length: int, padded: bool, planes: int = 0) -> bool:
        """True if calls of these sizes can use this step, and the model is what it was."""
        sizes = (batch, padded, planes) == (1, False, 0) and length <= self.length
        plain = self.threads == torch.get_num_threads() and not _is_observed()
        return sizes and plain and self.facts is not None and self.facts == facts_of(model)

    @torch.inference_mode()
    def prefill(self, model: PreTrainedModel, prompt: Prompt) -> torch.Tensor:
        """Return the logits (1, vocabulary) behind a prompt of one sequence, which has no padding."""
        ids, mask, positions = prompt
        assert mask is None
        own = _cache(model)
        logits = prompt.logits(model, own, positions)
        tokens = ids.shape[1]
        self.position.fill_(tokens - 1 if positions is None else positions[0, -1])
        self.slot.fill_(tokens - 1)
        for (keys, values), layer in zip(self._caches, own.layers, strict=True):
            keys[:, :tokens], values[:, :tokens] = layer.keys[0], layer.values[0]
        self._own = None if self.error is not None and self.error <= _MOST_ERROR else own
        return logits

    @torch.inference_mode()
    def __call__(self, model: PreTrainedModel, token: torch.Tensor) -> torch.Tensor:
        """Return the logits (1, vocabulary) behind one more token (1,): memory that the next call overwrites."""
        self.position.add_(1)
        self.slot.add_(1)
        if self._own is None:
            return self._run(model, token)
        options = {cache_argument(model): self._own, "position_ids": self.position, "use_cache": True}
        own = model(token[:, None], **options).logits[:, -1]
        if self.error is None:
            try:
                self.error = float((self._run(model, token) - own).norm() / own.norm())
            except (RuntimeError, TypeError, ValueError):  # angles of a part of a head have another shape
                self.error = math.inf
            if self.error <= _MOST_ERROR:
                self._own = None
            else:
                text = f"{type(model).__name__}: a step runs in its own code; compiled, its logits would be off by "
                log_once(logging.WARNING, f"{text}{self.error:.2g}")
        return own

    def _run(self, model: PreTrainedModel, token: torch.Tensor) -> torch.Tensor:
        decoder = model.get_decoder()
        self._x.copy_(decoder.embed_tokens(token))
        for angle, own in zip(decoder.rotary_emb(self._x, self.position), self._angles, strict=True):
            own.copy_(angle[0])
        for call in self._calls:
            call()
        return self.logits

    # --- the list of calls -------------------------------------------------------------------------------------------

    def _build(self, model: PreTrainedModel) -> torch.Tensor:
        """Make the calls of a step, and return the tensor of its logits."""
        if not machine.is_available():
            raise NotFusable(f"a compiled step needs {machine.NEEDS}")
        if reason := broken(model, Otherwise.COMPILED):
            raise NotFusable(reason)
        if model.dtype != torch.float32 or _is_observed():
            raise NotFusable("a compiled step computes in float32, and no mode sees its operators")
        for module in model.modules():
            _require(not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)), module)
        if any(type(layer) is not DynamicLayer for layer in _cache(model).layers):
            raise NotFusable("its cache is not one of keys and values of all tokens")
        decoder = model.get_decoder()
        _require(_names(decoder) == {"embed_tokens", "layers", "norm", "rotary_emb"}, decoder)
        x = self._x = self._buffer("x", decoder.embed_tokens.weight.shape[1])
        y = None
        for layer in decoder.layers:
            _require(_names(layer) == set(LAYER) and _names(layer.mlp) == {*GATE_UP, "down_proj", "act_fn"}, layer)
            attention, mlp, *norms = (layer.get_submodule(name) for name in LAYER)
            h = self._norm(norms[0], x, self._buffer("normed", x.shape[1]), y)
            attended = self._attention(attention, h)
            y = self._linear(attention.o_proj, attended, "o")
            h = self._norm(norms[1], x, self._buffer("normed", x.shape[1]), y)
            gate, up = (self._linear(getattr(mlp, name), h, name) for name in GATE_UP)
            self._calls.append(functools.partial(_gate, mlp.act_fn, gate, up))
            y = self._linear(mlp.down_proj, gate, "down")
        h = self._norm(decoder.norm, x, self._buffer("normed", x.shape[1]), y)
        return self._linear(model.get_output_embeddings(), h, "logits")

    def _buffer(self, name: str, columns: int) -> torch.Tensor:
        """Return the one tensor (1, columns) of a name, in memory for whole blocks of features."""
        if (name, columns) not in self._buffers:
            whole = -(-columns // compiled.MOST_FEATURES) * compiled.MOST_FEATURES
            self._buffers[name, columns] = torch.zeros(1, whole)[:, :columns]
        return self._buffers[name, columns]

    def _linear(self, layer: nn.Module, x: torch.Tensor, name: str) -> torch.Tensor:
        """Add the call of a linear layer, and return its result."""
        _require(type(layer).forward in _LINEAR, layer)
        if isinstance(layer, W4Linear):
            w = layer.weight
            plain = layer.activation is None and layer.pre_quant_scale is None and w.perm is None
            _require(plain and w.activations is None and w.layout == "cpu", layer)
            out = self._buffer(name, w.n)
            self._calls.append(compiled.CompiledProduct(w.format, w.n, w.k).step(x, w.tensors, out))
        else:
            assert isinstance(layer, nn.Linear)
            out = self._buffer(name, layer.out_features)
            self._calls.append(functools.partial(torch.mm, x, layer.weight.mT, out=out))
        if layer.bias is not None:
            self._calls.append(functools.partial(out.add_, layer.bias))
        return out

    def _norm(
        self, norm: nn.Module, x: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add the call of a norm of the rows of x (1, rows * k), to which ``added`` is added before."""
        from w4gemm.kernels.cpu.step import NormArguments
        from w4gemm.kernels.cpu.step import norm as program

        _require(is_rms_norm(norm), norm)
        weight, eps = norm.get_parameter("weight"), norm_eps(norm)
        k = len(weight)
        _require(x.shape[1] % k == 0 and k % _WIDTH == 0, norm)
        run = machine.machine_code(program, machine.lanes(), k, eps, added is not None)
        addresses = (0 if t is None else t.data_ptr() for t in (x, added, weight, out))
        self._calls.append(functools.partial(run, machine.packing(NormArguments)(*addresses, x.shape[1] // k)))
        return out

    def _attention(self, attention: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Add the calls of an attention up to o_proj, and return what that takes."""
        from w4gemm.kernels.cpu.step import AttentionArguments
        from w4gemm.kernels.cpu.step import attention as program

        _require(_names(attention) - set(_HEAD_NORMS) == {*QKV, "o_proj"} and not attention.training, attention)
        _require(_words(type(attention).forward) <= _words(LlamaAttention.forward) | _BEYOND_LLAMA, attention)
        dim, scale = getattr(attention, "head_dim", 0), getattr(attention, "scaling", None)
        _require(dim > 0 and dim % _WIDTH == 0 and isinstance(scale, float), attention)
        q, k, v = (self._linear(attention.get_submodule(name), x, name) for name in QKV)
        heads, kv_heads = q.shape[1] // dim, k.shape[1] // dim
        _require(v.shape == k.shape and (heads * dim, kv_heads * dim) == (q.shape[1], k.shape[1]), attention)
        for name, rows in zip(_HEAD_NORMS, (q, k), strict=True):
            if hasattr(attention, name):
                self._norm(attention.get_submodule(name), rows, rows)
        # empty: memory that no token reaches is never touched, and a caller may allow far more tokens than come
        keys, values = (torch.empty(kv_heads, self.length, dim) for _ in range(2))
        self._caches.append((keys, values))
        cos, sin = self._angles = self._buffer("cos", dim), self._buffer("sin", dim)
        out = self._buffer("attended", heads * dim)
        run = machine.machine_code(program, machine.lanes(), dim, heads // kv_heads, scale)
        tensors = q, k, v, cos, sin, keys, values, self.slot, self._scores, out
        arguments = machine.packing(AttentionArguments)(*(t.data_ptr() for t in tensors), kv_heads, self.length)
        self._calls.append(functools.partial(run, arguments))
        return out


def _cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _gate(act_fn: Callable[[torch.Tensor], torch.Tensor], gate: torch.Tensor, up: torch.Tensor) -> None:
    torch.mul(act_fn(gate), up, out=gate)


def _is_observed() -> bool:
    return is_watched() or torch.is_autocast_enabled("cpu")


def _require(holds: bool, module: nn.Module) -> None:
    """Raise NotFusable, of a module, unless a fact about it holds."""
    if not holds:
        raise NotFusable(f"{type(module).__name__} is not one that a compiled step computes")


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _words(function: Callable[..., Any]) -> set[str]:
    """Return the attributes and globals that a function's code uses."""
    return set(inspect.unwrap(function).__code__.co_names)
