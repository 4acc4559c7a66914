"""Layers of a model in 4 bits and dense again: what is refused, and modules that have several names."""

from __future__ import annotations

import copy
import re
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, BartConfig, BertConfig

from tiny_model import write_dense
from w4gemm import W4Experts, W4Linear, integrations
from w4gemm.checkpoints.dense import layers_to_quantize
from w4gemm.integrations.transformers import W4GemmConfig, dequantize_layers, describe, quantize_layers


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((None,), TypeError, "model: wanted a torch.nn.Module, got NoneType"),
        ((nn.Linear(64, 64),), TypeError, "model: wanted a module with layers inside, got a Linear itself"),
        ((model(), ""), ValueError, "format: wanted int4_g<group size>"),
    ],
)
def test_what_is_refused(arguments, error, said):
    with pytest.raises(error, match=re.escape(said)):
        quantize_layers(*arguments)


def test_memory_of_a_dense_layer_is_free_before_the_next_one_is_quantized():
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    dense, alive = [weakref.ref(layer.weight) for layer in layers], list[int]()
    quantize_layers(layers, progress=lambda *_: alive.append(sum(weight() is not None for weight in dense)))
    assert alive == [4, 3, 2, 1]


def test_a_layer_itself_has_no_place_for_a_dense_one():
    with pytest.raises(TypeError, match="model: wanted a module with layers inside, got a W4Linear itself"):
        dequantize_layers(W4Linear(64, 64), torch.float32)


@pytest.mark.parametrize("skip", ["lm_head", None, 3, [3]])
def test_names_that_are_skipped_are_no_letters(skip):
    """Once a string was taken for its letters, and the layer of that name was quantized."""
    for call in (lambda: quantize_layers(model(), skip=skip), lambda: W4GemmConfig(skip=skip)):
        with pytest.raises(TypeError, match=re.escape("skip: wanted names of layers, such as ('lm_head',), got")):
            call()


@pytest.mark.parametrize(
    ("skip", "close"),
    [
        (("lm_head", "gate_prj"), "'gate_prj'; nearest is 'gate_proj'"),
        (("mlp.gateproj",), "'mlp.gateproj'; nearest is 'gate_proj'"),
        (("ml",), "'ml'; there are down_proj, gate_proj"),
        ((r"mlp\.[a-c]\w+",), r"'mlp\\.[a-c]\\w+'; there are down_proj, gate_proj"),
        (("_proj",), "'_proj'; nearest is 'gate_proj'"),
        (("Down_proj",), "'Down_proj'; nearest is 'down_proj'"),
    ],
)
def test_a_name_to_skip_that_no_layer_has(skip, close):
    """Once such a layer was quantized without a word."""
    mlp = nn.ModuleDict({"gate_proj": nn.Linear(64, 64), "down_proj": nn.Linear(64, 64)})
    whole = nn.ModuleDict({"mlp": mlp})
    said = "skip: wanted names of the model's linear layers and experts, got "
    with pytest.raises(ValueError, match=re.escape(said + close) + "$"):
        quantize_layers(whole, skip=skip)
    assert type(mlp["gate_proj"]) is type(mlp["down_proj"]) is nn.Linear
    quantize_layers(whole, skip=("lm_head", "down_proj"))  # lm_head is skipped wherever there is one
    assert type(mlp["gate_proj"]) is W4Linear and type(mlp["down_proj"]) is nn.Linear


@pytest.mark.parametrize(
    ("skip", "dense"),
    [
        ("blocks.1", ["1.up", "1.mlp.down"]),
        ("1", ["1.up", "1.mlp.down"]),
        (r"blocks\.1\.", ["1.up", "1.mlp.down"]),
        (r"blocks\.1\d", ["10.up", "10.mlp.down", "11.up", "11.mlp.down"]),
        ("^blocks.1.up$|10.mlp", ["1.up", "10.mlp.down"]),
        ("mlp.down", ["1.mlp.down", "10.mlp.down", "11.mlp.down"]),
        ("mlp", ["1.mlp.down", "10.mlp.down", "11.mlp.down"]),
        ("blocks.10.mlp.down", ["10.mlp.down"]),
    ],
)
def test_whole_names_and_patterns_to_skip(skip, dense):
    """As transformers' ``modules_to_not_convert``. Once only the last part of a name was taken."""

    def block():
        return nn.ModuleDict({"up": nn.Linear(64, 64), "mlp": nn.ModuleDict({"down": nn.Linear(64, 64)})})

    whole = nn.ModuleDict({"blocks": nn.ModuleDict({number: block() for number in ("1", "10", "11")})})
    quantize_layers(whole, skip=(skip,))
    stayed = [name.removeprefix("blocks.") for name, layer in whole.named_modules() if type(layer) is nn.Linear]
    assert stayed == dense


@pytest.mark.parametrize("skip", ["*.mlp", "", "down["])
def test_a_pattern_to_skip_that_is_none(skip):
    for call in (lambda: quantize_layers(model(), skip=[skip]), lambda: W4GemmConfig(skip=[skip])):
        with pytest.raises(
            ValueError, match=re.escape(f"skip: wanted names or regular expressions of layers, got {skip!r}")
        ):
            call()


def test_an_error_names_the_layer():
    broken = model()
    broken[2].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="2: weight: wanted finite values"):
        quantize_layers(broken)
    wide = model()
    wide[2].double()
    with pytest.raises(TypeError, match="^2: dtype: wanted torch.float32 or"):
        quantize_layers(wide)


class Shared(nn.Module):
    """A layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_layer_of_two_names_stays_one():
    shared, x = Shared(), torch.randn(3, 64)
    quantize_layers(shared)
    assert isinstance(shared.second, W4Linear) and shared.first is shared.second
    actual = shared(x)
    dequantize_layers(shared, torch.float32)
    assert type(shared.second) is nn.Linear and shared.first is shared.second
    torch.testing.assert_close(shared(x), actual, rtol=1e-4, atol=1e-5)


def test_a_saved_layer_of_two_names(tmp_path):
    """transformers reads a tensor for each. Once the second name had no codes, and nothing could load the folder."""
    shared = AutoModelForCausalLM.from_pretrained(write_dense(tmp_path), quantization_config=W4GemmConfig("int4_g32"))
    shared.model.layers[1].mlp = shared.model.layers[0].mlp
    shared.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.arange(1, 8)[None]
    assert torch.equal(again(ids).logits, shared(ids).logits)


_BERT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
_BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}


@pytest.mark.parametrize(
    ("config", "cls", "other"),
    [
        (BertConfig(vocab_size=100, **_BERT), AutoModelForMaskedLM, "cls.predictions.bias"),
        (BartConfig(vocab_size=100, **_BART), AutoModelForSeq2SeqLM, "model.decoder.embed_tokens.weight"),
    ],
    ids=["bert", "bart"],
)
def test_what_is_tied_beside_a_quantized_head_is_saved(tmp_path, config, cls, other):
    ids = torch.tensor([[3, 17, 42]])
    model = cls.from_config(config).eval()
    nn.init.normal_(model.get_parameter(other))
    describe(quantize_layers(model, "int4_g32_zint", skip=()))
    assert isinstance(model.get_output_embeddings(), W4Linear)
    model.save_pretrained(tmp_path / "packed")
    with torch.inference_mode():
        assert torch.equal(cls.from_pretrained(tmp_path / "packed").eval()(ids).logits, model(ids).logits)
        model.dequantize().save_pretrained(tmp_path / "dense")
        assert torch.equal(cls.from_pretrained(tmp_path / "dense").eval()(ids).logits, model(ids).logits)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("computed", ("pruned", "weight_norm", "spectral_norm"))
def test_a_weight_that_is_computed_before_each_call(computed):
    """Its hook would look for tensors that a quantized layer lacks. What it computes is as old as the last call."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    if computed == "pruned":
        prune.l1_unstructured(model[0], "weight", amount=0.5)
        model[0].weight_orig.data.mul_(3)
    elif computed == "weight_norm":
        nn.utils.weight_norm(model[0]).weight_g.data.mul_(3)
    else:
        nn.utils.spectral_norm(model[0]).weight_orig.data.mul_(3)
    model.eval()
    calls = []
    model[0].register_forward_pre_hook(lambda module, arguments: calls.append(module))
    x = torch.randn(5, 64)
    expected = model(x)
    model[0].weight = torch.zeros(32, 64)  # as after the tensors were loaded anew
    calls.clear()
    quantize_layers(model)
    got = model(x)
    assert calls == [model[0]]  # other hooks are its successor's
    assert (got - expected).norm() / expected.norm() < 0.15


def test_a_device_that_there_is_not(tmp_path):
    with pytest.raises(ValueError, match="device: wanted a torch.device or its string, .* got 'nonsense'"):
        integrations.transformers.load(tmp_path, "nonsense")


def test_a_linear_layer_that_computes_something_else_stays_dense():
    """Such as a router that returns the choices too, or a layer with low-rank terms of its own."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 100 * super().forward(x)

    class Same(nn.Linear):
        pass

    mixed, x = nn.Sequential(Same(64, 64), Scaled(64, 32), nn.Linear(32, 32)), torch.randn(3, 64)
    plain = mixed[2].forward
    mixed[2].forward = lambda x: 10 * plain(x)
    expected = mixed(x)
    quantize_layers(mixed, "int4_g32")
    assert isinstance(mixed[0], W4Linear) and type(mixed[1]) is Scaled and type(mixed[2]) is nn.Linear
    assert (mixed(x) - expected).norm() < 0.2 * expected.norm()


def test_hooks_stay_where_a_layer_is_replaced():
    """Those of the backward pass too, and where a layer becomes dense again."""
    hooked, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), torch.randn(3, 64, requires_grad=True)
    hooked[0].register_forward_pre_hook(lambda layer, arguments: 3 * arguments[0])
    hooked[0].register_forward_hook(lambda layer, arguments, y: 5 * y)
    hooked[0].register_full_backward_pre_hook(lambda layer, gradients: (7 * gradients[0],))
    hooked[1].register_full_backward_hook(lambda layer, to_x, to_y: (11 * to_x[0],))
    hooked.eval()
    expected = hooked(x)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    for replace in (lambda: quantize_layers(hooked, "int8_g32"), lambda: dequantize_layers(hooked, torch.float32)):
        replace()
        y = hooked(x)
        assert (y - expected).norm() < 0.02 * expected.norm()
        assert (torch.autograd.grad(y.sum(), x)[0] - slope).norm() < 0.02 * slope.norm()
        assert not any(layer.training for layer in hooked)


def test_hooks_of_a_device_map_stay():
    """accelerate sets a forward on each layer of a model that several GPUs share."""
    accelerate = pytest.importorskip("accelerate")
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), torch.randn(3, 64)
    expected = model(x)
    accelerate.dispatch_model(model, {"0": "cpu", "1": "cpu"}, force_hooks=True)
    hooks = [layer._hf_hook for layer in model]
    for replace, kind in ((quantize_layers, W4Linear), (dequantize_layers, nn.Linear)):
        replace(model, *(["int8_g32"] if kind is W4Linear else [torch.float32]))
        assert [type(layer) for layer in model] == [kind, kind] and [layer._hf_hook for layer in model] == hooks
        assert (model(x) - expected).norm() < 0.02 * expected.norm()
    accelerate.hooks.remove_hook_from_submodules(model)  # which leaves a forward that is nn.Linear's
    assert [*layers_to_quantize(model)] == ["0", "1"]


def test_experts_of_a_model_with_a_device_map(tmp_path):
    """Llama 4's mixture changes its class behind accelerate's hook."""
    accelerate = pytest.importorskip("accelerate")
    dense = AutoModelForCausalLM.from_pretrained(write_dense(tmp_path, "llama4_text"), dtype=torch.float32)
    ids, experts = torch.arange(1, 8)[None], "model.layers.0.feed_forward.experts"
    expected = quantize_layers(copy.deepcopy(dense), "int4_g32")(ids).logits
    accelerate.dispatch_model(dense, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    quantize_layers(dense, "int4_g32")
    assert type(dense.get_submodule(experts)) is W4Experts and hasattr(dense.get_submodule(experts), "_hf_hook")
    assert torch.equal(dense(ids).logits, expected)
    dequantize_layers(dense, torch.float32)
    assert hasattr(dense.get_submodule(experts), "_hf_hook")
    torch.testing.assert_close(dense(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("architecture", "mixture"), [("qwen3_moe", "mlp"), ("llama4_text", "feed_forward")])
def test_experts_with_a_forward_set_on_them_stay_dense(tmp_path, caplog, architecture, mixture):
    """Those of transformers, and Llama 4's, which dequantize_layers makes."""
    dense = AutoModelForCausalLM.from_pretrained(write_dense(tmp_path, architecture), dtype=torch.float32)
    if architecture == "llama4_text":
        dequantize_layers(quantize_layers(dense, "int4_g32"), torch.float32)
    name = f"model.layers.0.{mixture}.experts"
    experts = dense.get_submodule(name)
    plain = experts.forward
    experts.forward = lambda *arguments: 10 * plain(*arguments)
    skipped = copy.deepcopy(dense)
    with caplog.at_level("WARNING"):
        quantize_layers(skipped, "int4_g32", skip=("lm_head", "experts"))
        assert not caplog.text
        quantize_layers(dense, "int4_g32")
    assert dense.get_submodule(name) is experts
    assert name in caplog.text
    assert type(dense.get_submodule("model.layers.0.self_attn.q_proj")) is W4Linear


def test_the_router_of_a_mixture_stays_dense(tmp_path):
    from transformers import PhimoeConfig

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    dense = AutoModelForCausalLM.from_config(PhimoeConfig(**sizes, **heads, pad_token_id=0, bos_token_id=1))
    dense.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=W4GemmConfig("int4_g32"))
    kinds = {name.split(".")[-1]: type(m).__name__ for name, m in loaded.named_modules() if hasattr(m, "weight")}
    assert kinds["q_proj"] == "W4Linear" != kinds.get("router")
    assert loaded(torch.arange(8)[None]).logits.isfinite().all()


def test_a_layer_with_an_activation_is_not_made_dense_without_it() -> None:
    model = nn.Sequential(W4Linear.from_linear(nn.Linear(64, 64)), W4Linear.from_linear(nn.Linear(64, 64)))
    model[1].activation = "relu"
    with pytest.raises(ValueError, match=r"1\.activation: wanted None, since a torch\.nn\.Linear has none, got 'relu'"):
        dequantize_layers(model, torch.float32)
    assert all(isinstance(layer, W4Linear) for layer in model)


@pytest.mark.parametrize(
    ("architecture", "layer", "setting", "expected"),
    [
        ("llama", "mlp.up_proj", {"activation": "relu"}, "None"),
        ("llama", "mlp.up_proj", {"bias": nn.Parameter(torch.ones(96))}, "None"),
        ("qwen2", "self_attn.q_proj", {"bias": None}, r"\(64,\)"),
        ("qwen3_moe", "mlp.experts.gate_up", {"bias": nn.Parameter(torch.ones(4, 64))}, "None"),
        ("qwen3_moe", "mlp.experts", {"activation": "gelu_mul"}, "'silu_mul'"),
        ("qwen3_moe", "mlp.experts.down", {"expert_scale": torch.ones(4)}, "None"),
    ],
)
def test_what_no_saved_folder_holds(tmp_path, architecture, layer, setting, expected):
    """Once the loaded model did not compute it, or nothing could load the folder."""
    write_dense(tmp_path, architecture)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=W4GemmConfig("int4_g32"))
    (name, value), name_of_layer = *setting.items(), f"model.layers.0.{layer}"
    setattr(model.get_submodule(name_of_layer), name, value)
    with pytest.raises(ValueError, match=rf"^{name_of_layer}\.{name}: wanted {expected}, since a saved folder has no"):
        model.save_pretrained(tmp_path / "saved")


def test_routers_stay_dense():
    """They decide which experts a token has; some are plain linear layers."""
    from transformers import AutoConfig

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "pad_token_id": 0}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "moe_topk": 2}
    names = {"qwen2_moe": ("shared_expert_gate",), "hunyuan_v1_moe": ("wg",)}
    for architecture, routers in names.items():
        config = AutoConfig.for_model(architecture, **sizes, moe_intermediate_size=32)
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config)
        expected = {n for n, layer in made.named_modules() if type(layer) is nn.Linear} - {"lm_head"}
        actual = set(layers_to_quantize(made))
        assert {n.rpartition(".")[2] for n in expected - actual} == set(routers) and len(actual) > 3


def test_a_model_without_dense_layers_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    with pytest.raises(ValueError, match="format"):
        quantize_layers(torch.nn.Sequential(), "nonsense")
    quantize_layers(model, "int4_g32")
    with pytest.raises(ValueError, match=r"model: wanted one with dense linear layers to quantize, got 1 of 1 linear"):
        quantize_layers(model, "nf4")
