"""Places of a checkpoint's modules in a model without numbers: :class:`Placement`."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from w4gemm.checkpoints import Checkpoint, Module
from w4gemm.checkpoints.account import Account, Naming, Recipe, Stored
from w4gemm.checkpoints.base import finite_dense
from w4gemm.checkpoints.dense import linear_layers
from w4gemm.checkpoints.experts import DOWN, GATE_UP, roles_of
from w4gemm.checkpoints.model_experts import has_known_layout, is_concatenated, is_transposed, products_of
from w4gemm.checkpoints.numbers import Numbers
from w4gemm.checkpoints.quantized_folder import QuantizedFolder
from w4gemm.core.errors import FormatError
from w4gemm.core.problem import Device
from w4gemm.core.words import listed
from w4gemm.integrations.transformers.awaited import AwaitedExperts, AwaitedLinear, put_experts
from w4gemm.integrations.transformers.embeddings import AwaitedEmbedding, TiedEmbedding, packable
from w4gemm.integrations.transformers.sharding import Local, Split, local_numbers
from w4gemm.kernels import runs_on
from w4gemm.weights.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("w4gemm")


class Place(NamedTuple):
    """The place of a packed module's weight."""

    layer: str
    """Name of the layer in the model."""
    dense: str = ""
    """Name of the experts' dense parameter that was here; empty for a linear layer."""

    @property
    def weight_name(self) -> str:
        """Name of the dense weight that was here."""
        return self.dense or f"{self.layer}.weight"

    @property
    def bias_name(self) -> str:
        """Name of the bias that is or was here, if there is one."""
        return f"{self.dense}_bias" if self.dense else f"{self.layer}.bias"


class Placement:
    """Where the modules and tensors of a checkpoint go in a model without numbers.

    The layers of modules that stay packed become :class:`AwaitedLinear`. Any other module becomes dense, with the
    checkpoint's numbers, because the model's own code reads a dense weight: routers, some embeddings, GPT-2's layers,
    experts that :class:`W4Experts` does not compute, and what transformers merges or reorders; or because no kernel of
    the device takes its format.

    Args:
        device: where the model is to run.
        rules: transformers' rules of names and merging for the model; None for its own ones.
        folder_model, strangers_refused: as for :class:`Account`.
        fp8: True if every quantized layer is to quantize x.
        embeddings: False to make all embeddings dense.

    Attributes:
        packed: place of each module that stays packed.
        account: what the dense tensors become, those that are made of modules included.

    Raises:
        FormatError: if not all of the checkpoint and of the model fit, see :class:`Account`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        device: Device,
        rules: Sequence[Any] | None = None,
        folder_model: Callable[[], PreTrainedModel | None] = lambda: None,
        *,
        fp8: bool = False,
        embeddings: bool = True,
        strangers_refused: bool = True,
    ) -> None:
        self._model, self._checkpoint, self._device = model, checkpoint, device
        self._fp8, self._keeps_embeddings = fp8, embeddings
        self._embeddings: dict[str, Module] = getattr(checkpoint, "embeddings", {})
        self._modules = {**checkpoint.modules, **self._embeddings}
        self._naming = naming = Naming(model, rules)
        self._plain = linear_layers(model, ())
        self.packed: dict[str, Place] = {}
        self._made: dict[str, Callable[[torch.dtype, torch.device], torch.Tensor]] = {}
        self._stored: dict[str, Stored] = {}
        self._with_modules: set[str] = set()
        self._weight = functools.lru_cache(maxsize=1)(checkpoint.weight)
        modules = checkpoint.modules.items()
        run = {name: m for name, m in modules if runs_on(device, m.format, m.n, m.k, m.experts)}
        self._without_kernel = {name for name, m in modules if name not in run and not m.shared}
        partners = {self._name_of(name): module for name, module in run.items() if module.experts}
        strangers: dict[str, str] = {}
        for name, module in modules:
            if name in run and (place := self._reserved(name, module, partners)):
                self.packed[name] = place
            elif module.shared:
                continue  # the model takes the dense tensor
            elif not self._make_dense(name, module):
                strangers[name] = f"{name} ({module.experts} experts)" if module.experts else name
        filled = self._reserve_embeddings()
        for name, shape in checkpoint.tensors.items():
            if name not in self._with_modules and name not in self.packed:
                self._stored[name] = Stored(shape, checkpoint.stored_type(name), self._buffer(name))
        filled |= {place.weight_name for place in self.packed.values()}
        filled |= {place.bias_name for name, place in self.packed.items() if self._bias(name) in self._with_modules}
        filled &= naming.known.keys()
        self._untie(filled)
        others = strangers, folder_model, strangers_refused
        self.account = Account(checkpoint.path, model, naming, self._stored, filled, *others)

    # --- modules that stay packed -----------------------------------------------------------------------------------

    def _name_of(self, name: str) -> str:
        """Name of a module in the model."""
        if self._checkpoint.modules[name].experts:  # a parameter of the model's
            return self._naming(name)
        return self._naming(f"{name}.weight").removesuffix(".weight")

    def _reserved(self, name: str, module: Module, partners: Mapping[str, Module]) -> Place | None:
        """Replace the layer of a module by an awaited one, and return its place; None if it cannot stay packed."""
        target = self._name_of(name)
        if module.experts:
            return self._reserved_experts(name, target, module, partners)
        layer = self._plain.get(target)
        if layer is None and self._reserved_embedding(name, target, module):
            return Place(target)
        if not isinstance(layer, nn.Linear) or self._naming.of(f"{name}.weight")[1] is not None:
            return None  # transformers makes something else of the weight, or the model's code does
        self._check_shape(target, (module.n, module.k), (layer.out_features, layer.in_features))
        self._check_bias(name, module, layer.bias is not None)
        awaited = AwaitedLinear(layer, module.format, module.pre_quant_scale)
        self._model.set_submodule(target, awaited)
        if awaited.pre_quant_scale is not None:
            self._naming.known[f"{target}.pre_quant_scale"] = awaited.pre_quant_scale
        return Place(target)

    def _reserve_embeddings(self) -> set[str]:
        """Keep the embeddings packed that a checkpoint has beside its modules. Return the weights of those that share a
        head's."""
        shared, tied = set(), getattr(self._checkpoint, "tied", {})
        for name, module in self._embeddings.items():
            target = self._naming(f"{name}.weight").removesuffix(".weight")
            head = self._model.get_submodule(self.packed[tied[name]].layer) if tied.get(name) in self.packed else None
            if not self._reserved_embedding(name, target, module, head):
                if name in tied and isinstance(self._checkpoint, QuantizedFolder):  # transformers finds no tensor
                    self._add(f"{name}.weight", (module.n, module.k), lambda w: w, tied[name], "")
                    self._with_modules.add(f"{name}.weight")
                continue
            self._with_modules.add(f"{name}.weight")
            if isinstance(self._model.get_submodule(target), TiedEmbedding):
                shared.add(f"{target}.weight")
            else:
                self.packed[name] = Place(target)
        return shared

    def _reserved_embedding(self, name: str, target: str, module: Module, head: nn.Module | None = None) -> bool:
        """Replace an embedding by one that reads its head's packed weight, or by an awaited one; False if it is to be
        dense. head: the layer of the same numbers."""
        layer = submodule(self._model, target)
        if not self._keeps_embeddings or not packable(
            self._model, target, layer, module, self._device, of_head=head is not None
        ):
            return False
        assert isinstance(layer, nn.Embedding)
        self._check_shape(target, (module.n, module.k), (layer.num_embeddings, layer.embedding_dim))
        fp8 = self._device.kind == "cuda" and (self._fp8 or module.activations is not None)  # another layout
        if isinstance(head, AwaitedLinear) and head.pre_quant_scale is None and not fp8:
            self._model.set_submodule(target, TiedEmbedding(head, layer))
        else:
            self._model.set_submodule(target, AwaitedEmbedding(layer, module.format))
        return True

    def _reserved_experts(self, name: str, target: str, module: Module, partners: Mapping[str, Module]) -> Place | None:
        """The place of a module of several experts. The first of both modules puts a :class:`W4Experts` in the place of
        the model's experts."""
        owner, _, leaf = target.rpartition(".")
        experts = submodule(self._model, owner)
        parameters = _parameters(experts)
        both = {parameters.get(n.rpartition(".")[2]) for n in partners if n.rpartition(".")[0] == owner}
        if leaf not in parameters or both != {*parameters.values()}:
            return None
        if not isinstance(experts, AwaitedExperts):
            assert experts is not None
            if module.shared and module.bias == is_concatenated(experts):
                return None  # its reader took the gates and ups for others
            try:
                experts = AwaitedExperts(experts, getattr(self._model, "config", None))
            except ValueError as e:
                raise FormatError(f"{self._checkpoint.path}: {owner}: {e}") from e
            put_experts(self._model, owner, experts)
        dense = parameters[leaf]
        product = "down" if dense == DOWN else "gate_up"
        layer = getattr(experts, product)
        own_shape = layer.experts, layer.out_features, layer.in_features
        self._check_shape(target, (module.experts, module.n, module.k), own_shape)
        layer.format = module.format
        self._check_bias(name, module, layer.has_bias)
        self._with_modules |= {self._bias(name), f"{name}.pre_quant_scale"}
        return Place(f"{owner}.{product}", dense=f"{owner}.{dense}")

    def _bias(self, name: str) -> str:
        """Name in the checkpoint of a module's bias: that of a parameter beside the module's own, or its own."""
        module = self._modules[name]
        return f"{name}_bias" if module.shared and module.experts else f"{name}.bias"

    def _check_shape(self, target: str, stored: tuple[int, ...], own: tuple[int, ...]) -> None:
        """Raise FormatError unless the weight of ``target`` has the shape that the model has."""
        if stored != own:
            raise FormatError(
                f"{self._checkpoint.path}: the weight of {target} has shape {stored}, its config wants {own}"
            )

    def _check_bias(self, name: str, module: Module, has_bias: bool) -> None:
        """Raise FormatError unless a module has a bias if its layer has one. A bias of zeros may be there without a
        place: old GPTQ files have such a bias for every layer."""
        stored, checkpoint = self._bias(name), self._checkpoint
        if module.bias == has_bias:
            return
        if stored in checkpoint.tensors and not checkpoint.dense(stored).any():
            self._with_modules.add(stored)
            return
        stored_words, own_words = ("a bias", "none") if module.bias else ("no bias", "one")
        raise FormatError(f"{checkpoint.path}: {name} has {stored_words}, its config wants {own_words}")

    def fill(self, name: str, device: torch.device | None, activations: str | None) -> None:
        """Fill the layer of a packed module with its weight, or this process's part of it; of experts also with their
        biases and factors of x, which transformers does not load.

        Args:
            device: the layer's; None for the one that transformers moved its place to.
            activations: "fp8", or None to keep the weight's.
        """
        target, module = self.packed[name].layer, self._modules[name]
        layer = self._model.get_submodule(target)
        assert isinstance(layer, AwaitedLinear)
        device = layer.place.device if device is None else device

        def pack(numbers: Numbers, own: str | None) -> QuantizedWeight:
            if isinstance(layer, AwaitedEmbedding):
                return layer.pack(numbers)
            return local_numbers(self._model, target, numbers).packed(activations or own)

        w, bias, scale = self._checkpoint.weight(name, device, pack), None, None
        if module.experts:
            owner, _, product = target.rpartition(".")
            split, down = Split.of(self._model, owner), product == "down"
            if module.bias and layer.has_bias:
                bias = finite_dense(self._checkpoint, self._bias(name), layer.dtype).to(device)
                bias = bias if split is None else split.bias(bias, down)
            if module.pre_quant_scale:
                scale = finite_dense(self._checkpoint, f"{name}.pre_quant_scale", layer.dtype).to(device)
                scale = scale if split is None else split.factors(scale, down)
        layer.fill(Local(w, bias, scale), activations)

    # --- modules that become dense ----------------------------------------------------------------------------------

    def _make_dense(self, name: str, module: Module) -> bool:
        """Add what a module becomes to the dense tensors; False if the model has nothing of its kind."""
        scale = f"{name}.pre_quant_scale"
        if module.pre_quant_scale:
            self._with_modules.add(scale)
        if module.experts:
            return self._make_dense_experts(name, module)
        target, layer = self._naming.of(f"{name}.weight")[0], submodule(self._model, self._name_of(name))
        if target not in self._naming.known:
            return False
        if layer is not None:
            self._check_bias(name, module, getattr(layer, "bias", None) is not None)
        if module.pre_quant_scale and isinstance(layer, nn.Embedding):
            raise FormatError(
                f"{self._checkpoint.path}: {name} has a pre_quant_scale, which no Embedding multiplies by"
            )
        # packings keep a weight as (n, k), but fp8 beside a scale lies as the model has it
        transposed = layer is not None and _is_transposed(layer) and module.format.element not in ("e4m3", "e5m2")
        self._add(f"{name}.weight", (module.n, module.k), lambda w: w.T.contiguous() if transposed else w, name, "")
        return True

    def _make_dense_experts(self, name: str, module: Module) -> bool:
        owner, _, leaf = self._name_of(name).rpartition(".")
        experts = submodule(self._model, owner)
        parameter = _parameters(experts).get(leaf, leaf)
        dense = f"{owner}.{parameter}"
        if dense in self._naming.known and experts is not None and has_known_layout(experts):
            layout = functools.partial(_as_parameter, experts, parameter == GATE_UP)
            self._add(dense, (module.experts, module.n, module.k), layout, name, dense)
            if module.bias:
                self._with_modules.add(f"{name}.bias")
                rows = functools.partial(_in_order, experts, parameter == GATE_UP)
                self._made[f"{dense}_bias"] = lambda dtype, device: rows(
                    finite_dense(self._checkpoint, f"{name}.bias", dtype).to(device)
                )
                self._stored[f"{dense}_bias"] = Stored((module.experts, module.n), "", f"{dense}_bias", name)
            return True
        roles = roles_of(self._checkpoint.modules, name)
        singles = [f"{name.rpartition('.')[0]}.{{}}.{role}.weight" for role in roles]
        if module.bias or not all(self._naming(single.format(0)) in self._naming.known for single in singles):
            return False
        for expert in range(module.experts):
            for i, single in enumerate(singles):
                part = functools.partial(_of_expert, expert, i, len(singles))
                self._add(single.format(expert), (module.experts, module.n, module.k), part, name, "")
        return True

    def _add(
        self, dense: str, shape: tuple[int, ...], layout: Callable[[torch.Tensor], torch.Tensor], name: str, target: str
    ) -> None:
        """Add a dense tensor that ``layout`` makes of a module's weight."""
        scale = f"{name}.pre_quant_scale" if self._checkpoint.modules[name].pre_quant_scale else None

        def read(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            w = self._weight(name, device)
            if scale is None:
                return layout(w.dequantize(dtype))
            return layout((w.dequantize() * self._checkpoint.dense(scale).to(device)).to(dtype))

        made = layout(torch.empty(shape, device="meta"))
        self._stored[dense] = Stored(tuple(made.shape), "", target, name)
        self._made[dense] = read

    # --- the rest ---------------------------------------------------------------------------------------------------

    def _buffer(self, name: str) -> str:
        """The buffer that a tensor is, of those that no other folder has, such as a GGUF file's rotary table; "" if it
        is none."""
        renamed = self._naming(name)
        owner, _, leaf = renamed.rpartition(".")
        layer = submodule(self._model, owner)
        if renamed in self._naming.known or layer is None or (buffer := layer._buffers.get(leaf)) is None:
            return ""
        if leaf == "position_ids" or self._naming.is_unused(name):
            return ""
        self._naming.known[renamed] = buffer
        return renamed

    def _untie(self, packed: set[str]) -> None:
        """Let parameters that the config ties be two, if the checkpoint has both and one of them packed."""
        recipes, pairs = self._naming.recipes(self._stored)[0], self._model.all_tied_weights_keys
        there = packed | {recipe.targets[0] for recipe in recipes}
        in_4_bits = packed | {recipe.targets[0] for recipe in recipes if self._is_made(recipe)}
        untied = [t for t, s in pairs.items() if {t, s} & packed or ({t, s} <= there and {t, s} & in_4_bits)]
        untie(self._model, untied)

    def _is_made(self, recipe: Recipe) -> bool:
        return any(name in self._made for name in recipe.names)

    @property
    def filled_here(self) -> list[Recipe]:
        """The parameters whose numbers transformers cannot read in the folder: made of packed modules, or of weights
        in fp8 with scales."""
        in_fp8 = {*getattr(self._checkpoint, "in_fp8", ())}
        outside = self._naming.known.keys() - self._model.state_dict().keys()
        return [
            r
            for r in self.account.recipes
            if self._is_made(r) or not in_fp8.isdisjoint(r.names) or not outside.isdisjoint(r.targets)
        ]

    @property
    def made(self) -> list[Recipe]:
        """The parameters that are made of packed modules, maybe together with dense tensors."""
        return [recipe for recipe in self.account.recipes if self._is_made(recipe)]

    def values(self, recipe: Recipe, device: torch.device) -> dict[str, torch.Tensor]:
        """Return parameters by name, in the model's dtype.

        Raises:
            FormatError: if float16 cannot hold the numbers.
        """
        target = recipe.targets[0]
        dtype = dtype_of(self._model, target, self._naming.known[target])

        def read(name: str) -> torch.Tensor:
            made = self._made.get(name)
            return finite_dense(self._checkpoint, name, dtype).to(device) if made is None else made(dtype, device)

        return recipe.values(self._model, read)

    def log(self) -> None:
        """Say which weights take the memory of dense ones although the checkpoint has them packed."""
        if names := sorted(self._without_kernel):
            formats = listed(sorted({str(self._checkpoint.modules[name].format) for name in names}))
            said = "%s: dense, because no kernel of the device takes %s: %s"
            _log.warning(said, self._checkpoint.path, formats, listed(names))
        stay = [
            r
            for r in self.account.recipes
            if self._is_made(r)
            and (r.converter or self._stored[r.names[0]].target)
            and self._without_kernel.isdisjoint(self._stored[name].owner for name in r.names)
        ]
        if stay:
            said = "%s: dense with the packed numbers, because w4gemm has no layer that computes the same: %s"
            _log.warning(said, self._checkpoint.path, listed([target for r in stay for target in r.targets]))
        reasons: dict[str, list[str]] = {}
        for name, reason in self.account.left_out.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            _log.info("%s: left out: %s: %s", self._checkpoint.path, listed(names), reason)


def untie(model: PreTrainedModel, targets: Iterable[str]) -> None:
    """Let some parameters that the model ties to others be their own. The config says so of a head alone."""
    for target in targets:
        source = model.all_tied_weights_keys.pop(target)
        ends = model.get_output_embeddings(), model.get_input_embeddings()
        if any(submodule(model, name.rpartition(".")[0]) in ends for name in (target, source)):
            for config in (model.config, model.config.get_text_config()):
                config.tie_word_embeddings = False


def _parameters(experts: nn.Module | None) -> dict[str, str]:
    """The parameters of a model's experts by the last part of the name of a module of theirs, in folders of others and
    of our own; empty for what are no experts that :class:`W4Experts` computes."""
    leaves = experts.leaves if isinstance(experts, AwaitedExperts) else products_of(experts)
    if leaves is None:
        return {}
    first, down = leaves
    return {first: first, down: down, "gate_up": first, "down": down}


def _as_parameter(experts: nn.Module, pairs: bool, w: torch.Tensor) -> torch.Tensor:
    """A weight (experts, n, k) in the layout of the model's own parameter."""
    w = _in_order(experts, pairs, w)
    return w.mT.contiguous() if is_transposed(experts) else w


def _in_order(experts: nn.Module, pairs: bool, rows: torch.Tensor) -> torch.Tensor:
    """Rows (experts, n, ...) in the order of the model's own parameter, if they are ``pairs`` of a gate and an up."""
    if not pairs or not is_concatenated(experts):
        return rows
    return rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _of_expert(expert: int, part: int, parts: int, w: torch.Tensor) -> torch.Tensor:
    """The rows of one of the modules that an expert's weight is made of, in turn."""
    return w[expert, part::parts]


def _is_transposed(layer: nn.Module) -> bool:
    """True for a layer of GPT-2's, which keeps a linear layer's weight as (k, n)."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D)


def dtype_of(model: PreTrainedModel, name: str, target: torch.Tensor) -> torch.dtype:
    """Dtype of a dense tensor: float32 where the model says that it needs it, such as a router's bias."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return torch.float32 if target.is_floating_point() and any(re.search(k, name) for k in kept) else target.dtype


def submodule(model: nn.Module, name: str) -> nn.Module | None:
    """A module of the model, or None if there is none of this name."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
