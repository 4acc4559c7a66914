"""What the decoder patches and reads in transformers: a failing test here names what a new release changed."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, cache_utils, masking_utils
from transformers.generation import EosTokenCriteria, GenerationMixin
from transformers.models.llama import modeling_llama

from w4gemm import integrations
from w4gemm.integrations import decoder
from w4gemm.integrations.decoder import decode_by_graph, loop
from w4gemm.integrations.decoder.requirements import REQUIREMENTS, Otherwise, Requirement, broken, holds, log_once

GENERATE = [r for r in REQUIREMENTS if r.otherwise is Otherwise.GENERATE]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = AutoConfig.for_model("llama", **sizes, **heads)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.name)
def test_transformers_is_what_the_decoder_relies_on(model: Any, requirement: Requirement) -> None:
    assert holds(requirement, model), (
        f"transformers {transformers.__version__} changed {requirement.name}. Expected: {requirement.fact}. "
        f"Use: {requirement.why}. What runs instead: {requirement.otherwise.value}"
    )


def test_a_graph_needs_nothing_of_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release without AttentionInterface captures the model's own attention."""
    monkeypatch.setattr(integrations, "decoder", integrations.decoder)
    for name in [name for name in sys.modules if name.startswith(decoder.__name__)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("transformers.modeling_utils.AttentionInterface")
    assert importlib.import_module(f"{decoder.__name__}.loop") is not loop


def nothing(self: Any, *_: Any, **__: Any) -> None:
    """A method that another release has in place of the one that the decoder relies on."""


def absent(self: Any) -> None:
    raise AttributeError


CHANGED: dict[str, tuple[Any, str, Any]] = {
    "GenerationMixin._sample": (GenerationMixin, "_sample", nothing),
    "GenerationConfig._pad_token_tensor": (GenerationMixin, "_prepare_special_tokens", nothing),
    "Cache._is_user_defined": (GenerationMixin, "_prepare_cache_for_generation", nothing),
    "GenerationConfig": (GenerationConfig, "disable_compile", property(absent)),
    "StoppingCriteriaList, EosTokenCriteria": (EosTokenCriteria, "__init__", nothing),
    "get_text_config, get_decoder": (modeling_llama.LlamaConfig, "get_text_config", nothing),
    "PreTrainedModel._can_compile_fullgraph": (modeling_llama.LlamaPreTrainedModel, "_can_compile_fullgraph", None),
    "PretrainedConfig._attn_implementation": (modeling_llama.LlamaConfig, "_attn_implementation", property(absent)),
    "StaticCache, StaticLayer": (cache_utils.StaticLayer, "update", nothing),
    "DynamicCache, rotary_emb": (cache_utils.DynamicLayer, "update", nothing),
    "PreTrainedModel.forward": (modeling_llama.LlamaForCausalLM, "forward", nothing),
    "prepare_inputs_for_generation": (GenerationMixin, "prepare_inputs_for_generation", nothing),
    "AttentionInterface.register, set_attn_implementation": (masking_utils, "_preprocess_mask_arguments", nothing),
    "apply_rotary_pos_emb": (modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * cos, k * cos)),
    "names of layers": (modeling_llama.LlamaMLP, "named_children", lambda _: iter(())),
    "RMSNorm": (modeling_llama.LlamaRMSNorm, "weight", SimpleNamespace()),
}
"""For each requirement a change that it must notice."""


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.name)
def test_a_change_is_noticed(model: Any, requirement: Requirement, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, value = CHANGED[requirement.name]
    monkeypatch.setattr(owner, name, value, raising=False)
    assert not holds(requirement, model)
    assert requirement.fact in broken(model, requirement.otherwise)


@pytest.mark.parametrize("name", ["Cache._is_user_defined", "StaticCache, StaticLayer"])
def test_a_model_keeps_its_own_generate(
    model: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says why, once."""
    monkeypatch.setattr(loop, "DEVICES", ("cpu", "cuda"))
    ids = torch.randint(1, 50, (2, 5))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    tokens = model.generate(ids, **options)
    requirement = next(r for r in GENERATE if r.name == name)
    changed = [r._replace(holds=lambda _: False) if r is requirement else r for r in REQUIREMENTS]
    monkeypatch.setattr("w4gemm.integrations.decoder.requirements.REQUIREMENTS", changed)
    monkeypatch.setattr(loop, "enable", lambda *_: pytest.fail("a step would rely on what is not there"))
    log_once.cache_clear()
    for _ in range(2):
        assert decode_by_graph(model) is model
    assert loop.step_of(model) is None and torch.equal(model.generate(ids, **options), tokens)
    (text,) = [record.getMessage() for record in caplog.records if "own loop" in record.getMessage()]
    assert text.startswith("LlamaForCausalLM: generate runs transformers' own loop, because ")
    assert text.endswith(f"{name} of transformers {transformers.__version__} is not as expected: {requirement.fact}")
