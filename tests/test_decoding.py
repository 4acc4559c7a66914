"""Decoding step by step with a static cache: the tokens are those of transformers' own loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM

from w4gemm import QuantizedWeight, W4Experts, W4GroupedLinear, W4Linear, WeightFormat
from w4gemm.checkpoints.model_experts import activation_of
from w4gemm.choice import plan_cache
from w4gemm.core.problem import H200, Device
from w4gemm.integrations.decoder import decode_by_graph, loop
from w4gemm.integrations.decoder.fusion import Fusion, joined, parts
from w4gemm.integrations.decoder.loop import step_of
from w4gemm.integrations.decoder.requirements import attention_files, log_once
from w4gemm.integrations.decoder.step import DecodeStep, Prompt
from w4gemm.integrations.transformers import quantize_layers
from w4gemm.tuning.random_weight import random_weight

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "mistral": {"sliding_window": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 8},
}
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss")
PADDED = torch.tensor([[0] * 4 + [1] * 7, [1] * 11, [0] + [1] * 10])
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def tiny(architecture: str, device: str = "cpu", dtype: torch.dtype = torch.float32, quantized: bool = True) -> Any:
    """With heads of 64 elements if it is quantized, so that joined rows fill the blocks of every layout."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 256 if quantized else 32, "intermediate_size": 128}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(architecture, **sizes, **ARCHITECTURES.get(architecture, {}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for p in model.parameters():
        if p.dim() == 1:
            p.data.uniform_(0.5, 1.5)  # norms and biases that are not 1 and 0
    model.generation_config.pad_token_id = 0
    for name, module in list(model.named_modules()) if quantized else ():
        if hasattr(module, "_apply_gate"):
            model.set_submodule(name, in_4_bits(module))
    return (quantize_layers(model, "int4_g32") if quantized else model).to(device, dtype)


def in_4_bits(experts: Any) -> W4Experts:
    """The experts of a model with random weights, of which each token's choice makes a difference, and its biases."""
    products = []
    for name in ("gate_up_proj", "down_proj"):
        count, n, k = (getattr(experts, name).mT if hasattr(experts, "alpha") else getattr(experts, name)).shape
        stack = QuantizedWeight.stack([random_weight(WeightFormat(32), n, k, seed) for seed in range(count)])
        products.append(W4GroupedLinear.from_weight(stack, getattr(experts, f"{name}_bias", None)))
    return W4Experts(*products, activation=activation_of(experts))


@pytest.fixture
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let CPUs decode step by step too, as GPUs do."""
    monkeypatch.setattr(loop, "DEVICES", ("cpu", "cuda"))
    yield


def ids_of(model: Any) -> torch.Tensor:
    return torch.randint(1, 300, (3, 11), generator=torch.Generator().manual_seed(1)).to(model.device)


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_tokens_are_those_of_transformers(architecture: str, padded: bool, on_cpus: None) -> None:
    model = tiny(architecture, quantized=False)
    ids = ids_of(model)
    mask = PADDED if padded else torch.ones_like(ids)
    ends = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)[:, -5].unique().tolist()
    for sampling in (
        {"do_sample": False},
        {"do_sample": False, "eos_token_id": ends},
        {"do_sample": True, "temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2},
    ):
        options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, **sampling}
        torch.manual_seed(2)
        theirs = model.generate(ids, disable_compile=True, **options)
        decode_by_graph(model)
        torch.manual_seed(2)
        assert torch.equal(model.generate(ids, **options), theirs)
    step = step_of(model)
    assert step is not None and step.padded == padded
    model.generate(ids, attention_mask=mask, max_new_tokens=20)
    assert step_of(model) is step
    assert len(ends) > 0


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_a_cache_grows_with_the_text(padded: bool, on_cpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers allow as many tokens as a model takes, most of which never come."""
    monkeypatch.setattr(loop, "_ROOM", 5)
    monkeypatch.setattr(loop, "_ROUND", 8)
    model = tiny("llama", quantized=False)
    ids = ids_of(model)
    options = {"attention_mask": PADDED if padded else torch.ones_like(ids), "do_sample": False}
    theirs = model.generate(ids, disable_compile=True, max_new_tokens=30, **options)
    ends = theirs[:, 25].unique().tolist()
    for more, slots in (({"max_new_tokens": 30}, 48), ({"max_new_tokens": 10**9, "eos_token_id": ends}, 32)):
        expected = model.generate(ids, disable_compile=True, **options, **more)
        decode_by_graph(model)
        assert torch.equal(model.generate(ids, **options, **more), expected)
        step = step_of(model)
        assert isinstance(step, DecodeStep) and step.cache.layers[1].values.shape[2] == step.length <= slots
    monkeypatch.setattr(step.cache.layers[1], "values", None)  # as if memory had ended
    with pytest.raises(TypeError):
        step.grow(99)
    assert not step.serves(model, 3, 12, padded)


def test_what_else_is_asked_for_is_left_to_transformers(on_cpus: None, caplog: pytest.LogCaptureFixture) -> None:
    """The log says why, once."""
    model = decode_by_graph(tiny("llama", quantized=False))
    ids = ids_of(model)
    log_once.cache_clear()
    caplog.set_level("INFO", "w4gemm")
    asked = {
        "return_dict_in_generate is True": {"return_dict_in_generate": True},
        "use_cache is False": {"use_cache": False},
        "cache_implementation is static": {"cache_implementation": "static"},
        "disable_compile is True": {"disable_compile": True},
        "attention_mask has padding that is not on the left": {"attention_mask": PADDED.flip(1)},
    }
    for options in ({"num_beams": 2}, *asked.values(), *asked.values()):
        model.generate(ids, **{"attention_mask": torch.ones_like(ids), "max_new_tokens": 3} | options)
    said = [record.getMessage() for record in caplog.records if "own loop" in record.getMessage()]
    assert said == [f"LlamaForCausalLM: generate runs transformers' own loop, because {reason}" for reason in asked]
    arguments = {"generation_config": model.generation_config, "stopping_criteria": SimpleNamespace(max_length=9)}
    assert loop.refusal(model, arguments, {}) == ""
    assert "the call passes pixel_values" in loop.refusal(model, arguments, {"pixel_values": torch.ones(1)})
    model.set_attn_implementation("flex_attention")
    assert "attention is flex_attention" in loop.refusal(model, arguments, {})
    assert step_of(model) is None


def test_a_model_without_positions_is_left_to_transformers(on_cpus: None) -> None:
    """BLOOM computes its biases from the mask, whose size a step's cache does not have."""
    model = tiny("bloom", quantized=False)
    ids = ids_of(model)
    options = {"attention_mask": PADDED, "max_new_tokens": 4, "do_sample": False}
    tokens = model.generate(ids, **options)
    assert torch.equal(decode_by_graph(model).generate(ids, **options), tokens) and step_of(model) is None


def test_a_streamer_gets_every_token_once(on_cpus: None) -> None:
    model = decode_by_graph(tiny("llama", quantized=False))
    ids = ids_of(model)[:1]

    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = 0

        def put(self, tokens: torch.Tensor) -> None:
            self.tokens += tokens.flatten().tolist()

        def end(self) -> None:
            self.ended += 1

    mask = torch.ones_like(ids)
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)[0].tolist()
    for end in (None, whole[15]):
        streamer = Streamer()
        options = {"max_new_tokens": 9, "do_sample": False, "streamer": streamer, "eos_token_id": end}
        tokens = model.generate(ids, attention_mask=mask, **options)
        assert (streamer.tokens, streamer.ended) == (tokens[0].tolist(), 1)
        assert tokens[0].tolist() == whole[: tokens.shape[1]]


def test_a_model_that_changed_gets_a_new_step(on_cpus: None) -> None:
    model = decode_by_graph(tiny("llama"))
    ids = ids_of(model)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    model.generate(ids, **options)
    first = step_of(model)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = random_weight(layer.format, layer.out_features, layer.in_features, 5)
    tokens = model.generate(ids, **options)
    assert step_of(model) is not first
    assert torch.equal(tokens, model.generate(ids, disable_compile=True, **options))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_a_fused_step_gives_the_logits_of_the_model(architecture: str, padded: bool, device: str) -> None:
    model = tiny(architecture, device, torch.float32 if device == "cpu" else torch.bfloat16)
    bits = {name: m.weight.dequantize() for name, m in model.named_modules() if isinstance(m, W4Linear)}
    fusion, mixture = Fusion.of(model), architecture in MIXTURES
    assert (len(fusion.attentions), len(fusion.mlps), len(fusion.last)) == ((2, 0, 2) if mixture else (2, 2, 4))
    assert len(fusion.norms) == (9 if architecture.startswith("qwen3") else 5)
    for name, weight in bits.items():
        assert torch.equal(model.get_submodule(name).weight.dequantize(), weight)
    forwards, attention = {m: m.forward for m in model.modules()}, model.config._attn_implementation
    (file,) = attention_files(model)
    rotate = file.apply_rotary_pos_emb
    ids, mask = ids_of(model), PADDED.to(device) if padded else None
    step = DecodeStep(model, 3, 256, padded, fusion)
    logits = step.prefill(model, Prompt(ids, mask))
    for _ in range(2):
        step.token.copy_(logits.argmax(-1)[:, None])
        run = step.choose(model)
        assert run.__name__ == "_run_fused"
        assert step.fused_error is not None
        assert step.fused_error < (1e-5 if device == "cpu" else 0.03)
        logits = run(model)
    assert {m: m.forward for m in model.modules()} == forwards and file.apply_rotary_pos_emb is rotate
    assert model.config._attn_implementation == attention in ("sdpa", "eager")


@torch.inference_mode()
def test_layers_of_equal_format_are_joined_in_a_model_of_several() -> None:
    model = tiny("llama")
    v = model.model.layers[0].self_attn.v_proj
    v.weight = random_weight(WeightFormat.parse("int8_g32"), v.out_features, v.in_features, 5)
    fusion = Fusion.of(model)
    assert [len(joint.layers) for joint in fusion.attentions] == [2, 3]
    step = DecodeStep(model, 3, 256, False, fusion)
    step.prefill(model, Prompt(ids_of(model)))
    assert step.choose(model).__name__ == "_run_fused"
    assert step.fused_error is not None and step.fused_error < 1e-5


@pytest.mark.parametrize("architecture", MIXTURES)
def test_mixtures_of_experts_decode_step_by_step(architecture: str, on_cpus: None) -> None:
    model = tiny(architecture)
    ids = ids_of(model)
    options: dict[str, Any] = {"attention_mask": PADDED, "max_new_tokens": 6, "do_sample": False}
    theirs = model.generate(ids, disable_compile=True, **options)
    assert torch.equal(decode_by_graph(model).generate(ids, **options), theirs)
    assert step_of(model) is not None


@torch.inference_mode()
def test_layers_that_quantize_x_are_fused_too() -> None:
    model = tiny("llama")
    for layer in model.modules():
        if isinstance(layer, W4Linear):
            layer.activations = "fp8"
    step = DecodeStep(model, 3, 256, False, Fusion.of(model))
    step.prefill(model, Prompt(ids_of(model)))
    assert step.choose(model).__name__ == "_run_fused"
    assert step.fused_error is not None and step.fused_error < 0.05  # a rounding may make another fp8


def test_adapters_may_be_switched_off(on_cpus: None) -> None:
    peft = pytest.importorskip("peft")

    model = decode_by_graph(tiny("llama"))
    ids = ids_of(model)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    model.generate(input_ids=ids, **options)  # joins the weights that the adapters then lie beside
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, config).eval()
    tokens = adapted.generate(input_ids=ids, **options)
    assert torch.equal(tokens, adapted.generate(input_ids=ids, disable_compile=True, **options))
    with adapted.disable_adapter():
        plain = adapted.generate(input_ids=ids, **options)
        assert torch.equal(plain, adapted.generate(input_ids=ids, disable_compile=True, **options))
    assert not torch.equal(plain, tokens)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_everything_that_is_launched_is_known_beforehand(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first call compiles one kernel after the other."""
    model = tiny(architecture)
    step = DecodeStep(model, 3, 256, False, Fusion.of(model))
    known = set(loop.launched(model, step, 33)[0])
    plan_cache.forget()
    step.prefill(model, Prompt(ids_of(model)))
    assert step.choose(model).__name__ == "_run_fused"
    assert set(plan_cache._plans) == known
    monkeypatch.setattr(Device, "of", lambda _: H200)
    names = {unit.name for unit in loop.launched(model.bfloat16(), step, 33)[1]}
    others = {"gate_halves"} if architecture == "qwen2" else {"expert_route", "row_combine"}
    assert names == {"rms_norm", "step_attention"} | others


@torch.inference_mode()
def test_a_step_that_computes_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    step = DecodeStep(model, 3, 256, False, Fusion.of(model))
    step.prefill(model, Prompt(ids_of(model)))

    def twice(self: Any, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return 2 * self.o_proj(hidden_states), None

    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", twice)
    assert step.choose(model).__name__ == "_run"
    monkeypatch.undo()
    assert step.choose(model).__name__ == "_run_fused"
    module = __import__(type(model).__module__, fromlist=["apply_rotary_pos_emb"])
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    assert step.choose(model).__name__ == "_run_joined"  # products and norms are what they were
    assert step.fused_error is not None and step.fused_error < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_graph_gives_the_tokens_of_transformers(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(architecture, "cuda", torch.bfloat16)
    ids = ids_of(model)
    options = {"max_new_tokens": 24, "do_sample": False}
    for mask in (torch.ones_like(ids), PADDED.cuda()):
        theirs = model.generate(ids, attention_mask=mask, disable_compile=True, **options)
        decode_by_graph(model)
        ours = model.generate(ids, attention_mask=mask, **options)
        step = step_of(model)
        assert step is not None and step._graph is not None and step.fused_error is not None
        assert (ours[:, :13] == theirs[:, :13]).all()  # later a rounding may choose another token, and all after it
        assert torch.equal(model.generate(ids, attention_mask=mask, **options), ours)
        with monkeypatch.context() as patch:  # a cache that grows at once, and once more
            patch.setattr(loop, "_ROOM", 0)
            patch.setattr(loop, "_ROUND", 1)
            decode_by_graph(model)
            grown = model.generate(ids, attention_mask=mask, **options)
            step = step_of(model)
        assert isinstance(step, DecodeStep) and step.length == 35 and step._graph is not None
        assert (grown[:, :13] == theirs[:, :13]).all()


def test_rows_are_joined_bit_for_bit_and_share_memory() -> None:
    weights = [random_weight(WeightFormat(32), n, 128, n) for n in (64, 128, 64)]
    for layout in ("canonical", "mma16", "cpu"):
        ours = [w.repack(layout) for w in weights] if layout != "cpu" else [weights[1].repack("cpu")] * 2
        whole = joined(ours)
        assert torch.equal(whole.dequantize(), torch.cat([w.dequantize() for w in ours]))
        for part, w in zip(parts(whole, [w.n for w in ours]), ours, strict=True):
            assert torch.equal(part.dequantize(), w.dequantize())
            assert part.tensors[0].untyped_storage().data_ptr() == whole.tensors[0].untyped_storage().data_ptr()
    with pytest.raises(ValueError, match="without padding"):
        joined([weights[0].repack("cpu")] * 2)
    with pytest.raises(ValueError, match="wanted the same format"):
        joined([weights[0], random_weight(WeightFormat(64), 64, 128)])


def test_a_model_decodes_on_its_own_gpu(on_cpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph captured while another GPU is the current one would be empty, and its replays leave the logits as they
    were."""
    inside: list[torch.device] = []

    @contextlib.contextmanager
    def recorded(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.append(torch.device("meta"))

    ran = loop.sample_by_step
    monkeypatch.setattr(loop, "on_device", recorded)
    monkeypatch.setattr(loop, "sample_by_step", lambda *args: (inside.append(torch.device("cuda")), ran(*args))[1])
    model = decode_by_graph(tiny("llama", quantized=False))
    model.generate(ids_of(model), max_new_tokens=2)
    assert [d.type for d in inside] == [model.device.type, "cuda", "meta"]
