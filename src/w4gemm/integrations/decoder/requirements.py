"""What the decoder patches, calls and reads in transformers: :data:`REQUIREMENTS`, the one list of it.

Each entry checks the installed transformers. :func:`decode_by_graph`, a call and the fused attention ask for theirs
before they start; ``tests/test_decoder_requirements.py`` asks for all, so it names what a new release changed.
"""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

_log = logging.getLogger("w4gemm")

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
LAYER = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")

LEFT_TO_TRANSFORMERS = ("disable_compile", "return_dict_in_generate", "cache_implementation", "prefill_chunk_size")
"""Settings of a call with which transformers decodes."""


class Otherwise(enum.Enum):
    """The code that runs where a requirement does not hold."""

    GENERATE = "the model's own generate"
    CALL = "the model's own generate, because of the model: each call asks"
    ATTENTION = "the model's own rotation, cache and attention, in a captured step"
    COMPILED = "the model's own generate, on a CPU"
    LAYERS = "the code of the layers that are built in another way, in a captured step"


class Requirement(NamedTuple):
    """One thing of transformers that the decoder uses."""

    name: str
    fact: str
    """The statement about it that must hold."""
    why: str
    """The decoder's use of it."""
    otherwise: Otherwise
    holds: Callable[[Any], bool]
    """Whether the fact is true, of a model; an exception says no."""


def broken(model: nn.Module, otherwise: Otherwise) -> str:
    """Return the first requirement of a kind that does not hold for the model; the empty string if all of them hold."""
    for requirement in REQUIREMENTS:
        if requirement.otherwise is otherwise and not holds(requirement, model):
            import transformers

            release = f"transformers {transformers.__version__}"
            return f"{requirement.name} of {release} is not as expected: {requirement.fact}"
    return ""


def holds(requirement: Requirement, model: nn.Module) -> bool:
    """True if the requirement's fact is true of the model."""
    try:
        return requirement.holds(model)
    except Exception:  # whatever is not there fails in a way of its own
        return False


@functools.lru_cache(maxsize=64)
def log_once(level: int, text: str) -> None:
    """Log a text unless it was logged before. level: as ``logging`` has it."""
    _log.log(level, text)


def takes(function: Callable[..., Any], *names: str) -> bool:
    """True if a function has parameters of these names."""
    return set(names) <= inspect.signature(function).parameters.keys()


def _mentions(function: Callable[..., Any], *names: str) -> bool:
    """True if the code of a function reads or writes attributes and globals of these names."""
    return set(names) <= set(inspect.unwrap(function).__code__.co_names)


# --- generate --------------------------------------------------------------------------------------------------------


def _sample_is_called(model: Any) -> bool:
    from transformers.generation import GenerationMixin, GenerationMode
    from transformers.generation.utils import GENERATION_MODES_MAPPING as methods

    arguments = ("input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer")
    modes = GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH
    called = _mentions(GenerationMixin.generate, "GENERATION_MODES_MAPPING", "getattr", "type")
    named = all(methods[mode] == "_sample" for mode in modes)
    return called and named and takes(GenerationMixin._sample, *arguments, "model_kwargs")


def _pad_token_is_set(model: Any) -> bool:
    from transformers.generation import GenerationMixin

    return _mentions(GenerationMixin._prepare_special_tokens, "_pad_token_tensor")


def _callers_cache_is_marked(model: Any) -> bool:
    from transformers.generation import GenerationMixin

    return _mentions(GenerationMixin._prepare_cache_for_generation, "_is_user_defined")


def _criteria_have_ends(model: Any) -> bool:
    from transformers.generation import EosTokenCriteria, StoppingCriteriaList

    return hasattr(StoppingCriteriaList, "max_length") and _mentions(EosTokenCriteria.__init__, "eos_token_id")


def _config_has_options(model: Any) -> bool:
    from transformers import GenerationConfig

    return all(hasattr(GenerationConfig(), name) for name in LEFT_TO_TRANSFORMERS)


def _steps_have_inputs(model: Any) -> bool:
    from transformers.generation import GenerationMixin

    return takes(GenerationMixin.prepare_inputs_for_generation, "input_ids", "next_sequence_length")


def _forward_takes_a_cache(model: Any) -> bool:
    return takes(model.forward, "attention_mask", "position_ids", cache_argument(model))


def cache_argument(model: Any) -> str:
    """Name of the argument that a model takes its cache in: another one since transformers 5.24."""
    return "cache" if takes(model.forward, "cache") else "past_key_values"


def _static_layers_are_tensors(model: Any) -> bool:
    from transformers.cache_utils import Cache, StaticCache, StaticLayer, StaticSlidingWindowLayer

    assert issubclass(StaticSlidingWindowLayer, StaticLayer)
    made = takes(StaticCache, "config", "max_cache_len") and takes(StaticLayer, "max_cache_len")
    written = _mentions(StaticLayer.update, "keys", "values", "cumulative_length", "add_", "index_copy_")
    return made and written and _mentions(Cache.reset, "layers")


# --- a fused step ----------------------------------------------------------------------------------------------------


def _attention_layers(model: Any) -> set[type[nn.Module]]:
    """Classes of the attention layers of the part of a model that decodes."""
    return {type(m) for m in model.get_decoder().modules() if hasattr(m, "q_proj")}


def attention_files(model: Any) -> set[ModuleType]:
    """Return the files that define the attention layers of the part of a model that decodes."""
    return {sys.modules[layer.__module__] for layer in _attention_layers(model)}


def _attention_is_named(model: Any) -> bool:
    from transformers.masking_utils import _preprocess_mask_arguments
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    layers = _attention_layers(model)
    called = [_mentions(layer.forward, "ALL_ATTENTION_FUNCTIONS", "_attn_implementation") for layer in layers]
    maskless = _mentions(_preprocess_mask_arguments, "_attn_implementation", "ALL_MASK_ATTENTION_FUNCTIONS")
    named = takes(AttentionInterface.register, "key", "value") and isinstance(
        ALL_ATTENTION_FUNCTIONS, AttentionInterface
    )
    return bool(called) and all(called) and maskless and named and takes(model.set_attn_implementation)


def _rotation_is_a_global(model: Any) -> bool:
    layers = _attention_layers(model)
    return (
        bool(layers)
        and all(_mentions(layer.forward, "apply_rotary_pos_emb") for layer in layers)
        and all(_rotates(file.apply_rotary_pos_emb) for file in attention_files(model))
    )


def _rotates(rotate: Callable[..., tuple[torch.Tensor, ...]]) -> bool:
    """True if a rotation is :func:`rotated`: over all of a head, its halves against each other."""
    g, shapes = torch.Generator().manual_seed(0), ((2, 3, 1, 8), (2, 1, 1, 8), (2, 1, 4))
    q, k, half = (torch.randn(shape, generator=g, dtype=torch.float32, device="cpu") for shape in shapes)
    whole = half.repeat(1, 1, 2)
    expected = [rotated(x, whole.cos()[:, None], whole.sin()[:, None]) for x in (q, k)]
    for angle in (whole, half):  # gpt-oss has the angles once for both halves
        try:
            result = rotate(q, k, angle.cos(), angle.sin())
        except Exception:
            continue
        if all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(result, expected, strict=True)):
            return True
    return False


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (..., dim) by cos and sin (..., dim), as the kernel ``step_attention`` does."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def norm_eps(norm: nn.Module) -> float | None:
    """The number that an RMSNorm adds to the mean of squares."""
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _has_children(model: nn.Module, *names: str) -> bool:
    return any({name for name, _ in m.named_children()} >= set(names) for m in model.modules())


def _layers_are_named(model: Any) -> bool:
    mlps = [m for m in model.modules() if hasattr(m, "down_proj")]
    named = [(*QKV, "o_proj"), (*GATE_UP, "down_proj"), LAYER]
    return all(_has_children(model, *names) for names in named) and all(callable(m.act_fn) for m in mlps)


def _norms_are_named(model: Any) -> bool:
    norms = [m for m in model.modules() if "RMSNorm" in type(m).__name__]
    return bool(norms) and all(isinstance(norm_eps(norm), float) and norm.weight.dim() == 1 for norm in norms)


def _prompts_are_cached(model: Any) -> bool:
    from transformers.cache_utils import DynamicCache, DynamicLayer

    kept = takes(DynamicCache, "config") and _mentions(DynamicLayer.update, "keys", "values", "cat")
    return kept and takes(model.get_decoder().rotary_emb.forward, "x", "position_ids")


REQUIREMENTS = (
    Requirement(
        "GenerationMixin._sample",
        "it is a method of these arguments, which generate takes from the model's class for greedy search and sampling",
        # generate's own hook, custom_generate, drops a call's streamer and tokenizer, and takes every mode
        "patched once in a process: models of decode_by_graph sample by steps, all others as before",
        Otherwise.GENERATE,
        _sample_is_called,
    ),
    Requirement(
        "GenerationConfig._pad_token_tensor",
        "generate sets it before it samples",
        "read: the token of sequences that have ended",
        Otherwise.GENERATE,
        _pad_token_is_set,
    ),
    Requirement(
        "GenerationConfig",
        f"it has {', '.join(LEFT_TO_TRANSFORMERS)}",
        "read: a call that sets one is left to transformers",
        Otherwise.GENERATE,
        _config_has_options,
    ),
    Requirement(
        "StoppingCriteriaList, EosTokenCriteria",
        "they have max_length and eos_token_id",
        "read: the length of a step's cache, and whether sequences that have ended get the pad token",
        Otherwise.GENERATE,
        _criteria_have_ends,
    ),
    Requirement(
        "Cache._is_user_defined",
        "generate sets it on a cache that the caller passes",
        "read: such a call is left to transformers, because a step has a cache of its own",
        Otherwise.GENERATE,
        _callers_cache_is_marked,
    ),
    Requirement(
        "PreTrainedModel._can_compile_fullgraph",
        "a class says by it whether its forward with a static cache needs nothing from the host",
        "read: only such models are captured",
        Otherwise.CALL,
        lambda model: isinstance(model._can_compile_fullgraph, bool),
    ),
    Requirement(
        "PretrainedConfig._attn_implementation",
        "it is the name of the attention function",
        "read: only sdpa and eager read the mask of a static cache",
        Otherwise.CALL,
        lambda model: hasattr(model.config, "_attn_implementation"),
    ),
    Requirement(
        "StaticCache, StaticLayer",
        "they are made of config and max_cache_len; update writes keys and values (batch, heads, length, dim) at "
        "cumulative_length, a tensor, and adds to it in place",
        "subclassed: the cache of a step, whose addresses a graph may keep",
        Otherwise.GENERATE,
        _static_layers_are_tensors,
    ),
    Requirement(
        "get_text_config, get_decoder",
        "they are methods of the config and of the model, for the part of a larger model that decodes",
        "called: the sizes of the cache; the part whose attention a fused step sets",
        Otherwise.CALL,
        lambda model: takes(model.config.get_text_config, "decoder") and callable(model.get_decoder),
    ),
    Requirement(
        "PreTrainedModel.forward",
        "it takes attention_mask, position_ids, and a cache in cache or past_key_values",
        "called: the prompt and each step",
        Otherwise.CALL,
        _forward_takes_a_cache,
    ),
    Requirement(
        "prepare_inputs_for_generation",
        "it takes input_ids and next_sequence_length",
        "called: makes the inputs of a step in the model's own code, the mask of a static cache among them",
        Otherwise.GENERATE,
        _steps_have_inputs,
    ),
    Requirement(
        "AttentionInterface.register, set_attn_implementation",
        "attention layers call the function that is registered under their config's name; one without a mask function "
        "gets no mask",
        "called: the attention of a fused step is a function of its own name",
        Otherwise.ATTENTION,
        _attention_is_named,
    ),
    Requirement(
        "apply_rotary_pos_emb",
        "it is a global of the file of the attention layers, which they call with (q, k, cos, sin); it rotates "
        "the halves of whole heads",
        "patched while a fused step is computed: the kernel rotates q and k (transformers has no hook)",
        Otherwise.ATTENTION,
        _rotation_is_a_global,
    ),
    Requirement(
        "names of layers",
        f"they are {', '.join((*QKV, 'o_proj'))}; {', '.join((*GATE_UP, 'down_proj'))}, act_fn; {', '.join(LAYER)}",
        "their forward is replaced while a fused step is computed: joint products, residuals in epilogues",
        Otherwise.LAYERS,
        _layers_are_named,
    ),
    Requirement(
        "DynamicCache, rotary_emb",
        "the cache is made of config, and its layers have keys and values (batch, heads, tokens, dim); rotary_emb "
        "takes x and position_ids",
        "read: the keys and values of a prompt; called: the angles of a token",
        Otherwise.COMPILED,
        _prompts_are_cached,
    ),
    Requirement(
        "RMSNorm",
        "it is part of the class's name; a norm has weight (k,), and eps or variance_epsilon",
        "its forward is replaced while a fused step is computed",
        Otherwise.LAYERS,
        _norms_are_named,
    ),
)
"""In the order in which a call uses them."""
