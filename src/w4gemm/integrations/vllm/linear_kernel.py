"""The kernel of a linear layer of vLLM: :class:`LinearKernel` multiplies by a packed weight, or leaves the layer to
vLLM's own kernel after all. :class:`ListedKernel` is one that vLLM finds in a list of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from vllm import envs

from w4gemm.api.activations import quantized
from w4gemm.api.packed import PackedLinear
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.core.epilogue import PLAIN, Epilogue
from w4gemm.integrations.engines.loading import NOTHING_LOADED, check_loaded, draw, mark
from w4gemm.integrations.engines.warmup import LinearUse, linear_need
from w4gemm.integrations.vllm import fusion, takeover
from w4gemm.integrations.vllm.updates import ReloadedUpdate, end_reload
from w4gemm.weights.weight import QuantizedWeight

_made: ContextVar[list[LinearKernel] | None] = ContextVar("w4gemm_made", default=None)
"""Kernels of the layer that vLLM is making; None where it makes none."""
_PERM = "w4gemm_perm"
_DENSE = "weight"
"""An empty parameter of a packed layer, which takes dense numbers."""
_PACKED = "w4gemm_is_packed"
"""Attribute of a layer's first parameter if it is packed; vLLM's reloading puts it back after another one."""


class PackedLayer:
    """x @ w.T + bias of a layer whose parameters are a weight's packed tensors, and which is passed with each call.

    Args:
        layer: gets the tensors as parameters, in act-order also the buffer ``w4gemm_perm``.
        names: of the parameters.
        epilogue: of the product without a bias.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        w: QuantizedWeight,
        names: Iterable[str],
        epilogue: Epilogue,
        batch_invariant: bool,
    ) -> None:
        self.packed, self.activations, self.names = w.packed, w.activations, tuple(names)
        self.in_act_order = w.perm is not None
        self.plain, self.biased = (
            PackedLinear(w.packed, epilogue._replace(bias=bias), batch_invariant) for bias in (False, True)
        )
        for name, t in zip(self.names, w.tensors, strict=True):
            parameter = torch.nn.Parameter(t, requires_grad=False)
            setattr(parameter, _PACKED, True)
            layer.register_parameter(name, parameter)
        if self.in_act_order:  # which sleep mode keeps, unlike weights
            layer.register_buffer(_PERM, w.perm)

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Return the weight that a layer's tensors are."""
        p, own = self.packed, tuple(tensors[name] for name in self.names)
        return QuantizedWeight(p.format, p.n, p.k, p.layout, own, tensors.get(_PERM), activations=self.activations)

    def __call__(
        self,
        layer: torch.nn.Module,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        token_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the product for rows (m, k); traced by torch.compile."""
        product = self.plain if bias is None else self.biased
        tensors = [getattr(layer, name) for name in self.names]
        # a module takes 2 us to say that it has no such attribute
        perm = getattr(layer, _PERM) if self.in_act_order else None
        return product(rows, tensors, bias, token_scale, perm)


class LinearKernel:
    """Our side of a kernel of both, before vLLM's base class. vLLM chooses kernels by a layer's config; only when the
    weights are loaded do they say whether they can be packed, as scales that are not finite cannot."""

    kind: ClassVar[str]
    """Its layers, for the log."""
    activations: str | None = None
    """As of :class:`w4gemm.QuantizedWeight`."""
    vllm_kernel: Any = None
    """vLLM's own, for a layer that was left to it."""
    is_loaded = True
    """False if vLLM has loaded nothing of the layer."""
    is_drawn = False
    """True if vLLM loads random numbers (--load-format dummy)."""
    packed: tuple[PackedLayer, ...]
    """One, or several whose rows follow one another."""

    def expect(self) -> None:
        """Announce a kernel that vLLM has made for a layer."""
        fusion.install()
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self.most_tokens = takeover.most_tokens()
        takeover.expect(self)
        if (made := _made.get()) is not None:
            made.append(self)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Replace the layer's parameters by the packed weight; leave a layer that cannot be packed to vLLM.

        A layer that was left to vLLM stays there when its weights are loaded anew (``reload_weights``), because vLLM
        copies what a kernel makes of new weights into the tensors that it made of the first ones.
        """
        if is_packed(layer):  # called again, by who has loaded dense numbers
            return
        if self.vllm_kernel is not None:
            self.vllm_kernel.process_weights_after_loading(layer)
            return
        dtype, fp8 = self.model_dtype(layer), self.activations == "fp8"
        try:
            if not self.is_loaded:
                raise ValueError(NOTHING_LOADED)
            weights = self.weights(layer)
        except (TypeError, ValueError) as e:
            takeover.refuse(self.kind, str(e))
            self.vllm_kernel = self.next_kernel()
            self.vllm_kernel.process_weights_after_loading(layer)
            takeover.WARMUP.settle(self)
            return
        first, *others = self.weight_names(layer)
        for name in (first, *others):
            if hasattr(layer, name):
                delattr(layer, name)
        if first == _DENSE and takes_dense(layer):
            empty = weights[0].tensors[0].new_empty(0, dtype=ReloadedUpdate.asked_dtype)
            layer.register_parameter(first, torch.nn.Parameter(empty, requires_grad=False))
            first = "w4gemm_packed0"
        epilogue = PLAIN.of_quantized(dtype) if fp8 else PLAIN
        self.packed = tuple(
            PackedLayer(layer, w, _names(first, i, len(w.tensors)), epilogue, self.batch_invariant)
            for i, w in enumerate(weights)
        )
        call = functools.partial(self.apply_weights, layer)
        use = LinearUse(dtype, call, self.most_tokens, self.batch_invariant, fused=True)
        takeover.WARMUP.loaded(self, linear_need(weights, getattr(layer, "bias", None), use))

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x (..., k) @ w.T + bias; traced by torch.compile."""
        if self.vllm_kernel is not None:
            d: torch.Tensor = self.vllm_kernel.apply_weights(layer, x, bias)
            return d
        # the pass that fuses silu(gate) * up with the quantization looks for no reshape between them
        rows, token_scale = x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), None
        if self.activations == "fp8":
            rows, token_scale = quantized(rows)
        if len(self.packed) == 1:
            d = self.packed[0](layer, rows, bias, token_scale)
        else:
            sizes = [part.packed.n for part in self.packed]
            biases = [None] * len(sizes) if bias is None else bias.split(sizes)
            parts = zip(self.packed, biases, strict=True)
            d = torch.cat([part(layer, rows, of_part, token_scale) for part, of_part in parts], 1)
        return d.view(*x.shape[:-1], d.shape[-1])

    def weight(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """Return the packed weight that a layer's tensors are; raises ValueError if that is none, or not one."""
        packed: tuple[PackedLayer, ...] = getattr(self, "packed", ())
        if len(packed) != 1:
            raise ValueError(f"it holds {len(packed)} packed weights, wanted one")
        return packed[0].weight(tensors)

    # --- what a subclass says of its layers ---------------------------------------------------------------------------

    def model_dtype(self, layer: torch.nn.Module) -> torch.dtype:
        """Return the dtype of the results, which is the model's."""
        raise NotImplementedError

    def parameters(self, layer: torch.nn.Module) -> list[str]:
        """Return the names of the parameters, as vLLM's method makes them, whose numbers are packed."""
        raise NotImplementedError

    def note(self, layer: torch.nn.Module) -> None:
        """Keep what vLLM's method is going to drop of a layer that is loaded."""

    def weights(self, layer: torch.nn.Module) -> list[QuantizedWeight]:
        """Return the packed weights of a layer that is loaded: one, or several whose rows follow one another.

        Raises:
            TypeError, ValueError: if it cannot be packed, or no kernel runs the product.
        """
        numbers = self.numbers(layer)
        if reason := takeover.VLLM.why_no_kernel(numbers, self.activations, self.model_dtype(layer)):
            raise ValueError(reason)
        return [takeover.VLLM.packed(numbers, self.activations)]

    def numbers(self, layer: torch.nn.Module) -> Numbers:
        """Return the numbers that a layer has loaded.

        Raises:
            TypeError, ValueError: if its parameters are not understood.
        """
        raise NotImplementedError

    def weight_names(self, layer: torch.nn.Module) -> list[str]:
        """Return the name under which vLLM looks for the layer's weight, and the names of the other parameters that
        held the same numbers, as far as there are any; all go when it is packed."""
        raise NotImplementedError

    def next_kernel(self) -> Any:
        """Return the kernel that vLLM would have made without ours; raises ValueError if there is none."""
        raise NotImplementedError


class ListedKernel(LinearKernel):
    """A kernel of ours in one of vLLM's lists, of which vLLM takes the first that runs a layer."""

    possible: list[Any]
    """The list."""
    left: Any = None
    """What runs the layer if ours cannot; None for the first kernel in the list that can."""

    @classmethod
    def put_first(cls) -> None:
        """Put the kernel first in its list, once."""
        if cls not in cls.possible:
            cls.possible.insert(0, cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.arguments = args, kwargs
        """Arguments of the class of every kernel in the list."""
        self.expect()

    def may_run(self, cls: Any) -> bool:
        """True if a kernel of vLLM's runs the layer."""
        config: Any = self.config  # type: ignore[attr-defined]
        return bool(cls.is_supported()[0] and cls.can_implement(config)[0])

    def next_kernel(self) -> Any:
        if self.left is not None:
            return self.left
        args, kwargs = self.arguments
        for cls in self.possible:
            own = not issubclass(cls, LinearKernel) and cls.__name__ not in envs.VLLM_DISABLED_KERNELS
            if own and self.may_run(cls):
                return cls(*args, **kwargs)
        raise ValueError(f"no kernel of vLLM runs these {self.kind}")


class FloatsKernel(ListedKernel):
    """A kernel in a list of vLLM's for floats, whose kernels are chosen before the sizes of a layer are known."""

    @classmethod
    def takes_fp8(cls) -> bool:
        """True if x is quantized to fp8 by choice."""
        return False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        reason = takeover.VLLM.asked(cls.kind, lambda: takeover.why_not_here(cls.takes_fp8()))
        return not reason, reason or None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def model_dtype(self, layer: Any) -> torch.dtype:
        dtype: torch.dtype = layer.params_dtype
        return dtype


def _names(first: str, part: int, tensors: int) -> list[str]:
    """Return the names of the tensors of a layer's weight, or of its part of that number."""
    begin = f"w4gemm_part{part}_" if part else "w4gemm_packed"
    return [f"{begin}0" if part else first, *(f"{begin}{i}" for i in range(1, tensors))]


def kernels_made(make: Callable[[], Any]) -> tuple[Any, list[LinearKernel]]:
    """Return the result of a function of vLLM's, and the kernels of ours that it has made."""
    made: list[LinearKernel] = []
    token = _made.set(made)
    try:
        return make(), made
    finally:
        _made.reset(token)


def takes_dense(layer: torch.nn.Module) -> bool:
    """False for a head, because vLLM compares weights of heads, and would find two empty ones."""
    return not hasattr(layer, "num_embeddings")


def is_packed(layer: torch.nn.Module) -> bool:
    """True if a layer holds a packed weight, and nothing that was loaded after it was packed."""
    return any(hasattr(parameter, _PACKED) for parameter in layer._parameters.values())


@functools.cache
def _out_of_caches(base: type) -> type:
    """Return the class of a method whose packed layers vLLM's cache of weights (--load-format ipc_cache) may not hand
    to other processes, which would find tensors that no kernel of theirs has made; it refuses the model then."""
    return type(base.__name__, (base,), {"__module__": __name__, "supports_pre_processed_weights": False})


def _no_dense(tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    raise ValueError("vLLM transforms its x or its results (transform_config): it is loaded quantized alone")


def watch(method: Any, kernels: list[LinearKernel], name: str) -> None:
    """Have a method of vLLM's for a linear layer mark the parameters that a kernel of ours packs, and see afterwards
    that vLLM has loaded them, before the method brings them into another order. Then the layer takes dense numbers too.

    Args:
        kernels: our kernels that were made together with the method.
        name: of the layer.
    """
    make, process = method.create_weights, method.process_weights_after_loading
    updates: list[ReloadedUpdate] = []

    def create_weights(layer: Any, *args: Any, **kwargs: Any) -> None:
        kernels.extend(kernels_made(lambda: make(layer, *args, **kwargs))[1])
        if kernels and getattr(method, "supports_pre_processed_weights", False):
            own: type = type(method)
            method.__class__ = _out_of_caches(own)
        if kernels:
            numbers = kernels[-1].parameters(layer)
            kernels[-1].is_drawn = takeover.is_dummy()
            mark(layer, {"qzeros"}.difference(numbers) if kernels[-1].is_drawn else {*numbers, "qzeros"})
        if kernels and takes_dense(layer):
            turned = any(getattr(method, f"{side}_tfms", None) for side in ("input", "output"))
            updates.append(ReloadedUpdate(_DENSE, name, _no_dense if turned else kernels[-1].weight))
            updates[-1].open(layer)

    def process_weights_after_loading(layer: Any) -> None:
        if kernels and end_reload(layer, updates, kernels[-1].parameters(layer)):
            return
        if is_packed(layer):
            for update in updates:
                update.end()
            return
        for update in updates:
            update.close(layer)
        if kernels and kernels[-1].vllm_kernel is None:
            if kernels[-1].is_drawn:
                draw(layer, kernels[-1].parameters(layer))
            else:
                kernels[-1].is_loaded = check_loaded(layer, kernels[-1].parameters(layer), name)
                kernels[-1].note(layer)
        process(layer)
        for update in updates:
            if kernels[-1].vllm_kernel is None:
                update.open(layer)

    method.create_weights, method.process_weights_after_loading = create_weights, process_weights_after_loading
