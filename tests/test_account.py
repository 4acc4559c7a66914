"""Every tensor of a folder has its place in the model, and every parameter its tensor, or the folder is refused: by
``load`` and by ``from_pretrained``, with the same numbers."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoePreTrainedModel, Qwen3MoeSparseMoeBlock

import test_awq
import test_gptq
import test_modelopt
from engine_tensors import words
from quantized_model import change
from test_mixtures import write_gpt_oss
from w4gemm import FormatError, W4Experts, W4Linear
from w4gemm.checkpoints import open_checkpoint
from w4gemm.checkpoints.account import Naming
from w4gemm.cli.__main__ import main
from w4gemm.integrations.transformers import W4GemmConfig, load, quantize_layers, saving, summarize

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURE = {"head_dim": 16, "moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mixture": ("qwen3_moe", MIXTURE),
    "deepseek": (
        "deepseek_v3",
        LATENT
        | {"moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"num_key_value_heads": 4, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1},
    ),
    "without gates": (
        "nemotron_h",
        {"layers_block_type": ["moe", "attention"], "head_dim": 16, "n_routed_experts": 4, "moe_intermediate_size": 96}
        | {"moe_shared_expert_intermediate_size": 64},
    ),
    "experts first": (
        "granitemoehybrid",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64, "mamba_d_state": 16}
        | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1},
    ),
    "mamba": ("mamba", {"time_step_rank": 32, "state_size": 16, "tie_word_embeddings": False}),
}
GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
CONFIG = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
CONFIG |= {"config_groups": {"g": {"targets": ["Linear"], "weights": GROUP}}}
OURS: dict[str, Any] = {"quantization_config": W4GemmConfig(), "dtype": torch.float32}
Packer = Callable[[str, int, int], tuple[Mapping[str, torch.Tensor], torch.Tensor]]


def int4(name: str, n: int, k: int) -> Any:
    codes = torch.randint(0, 16, (n, k))
    scales = (torch.rand(n, k // 32) / 100 + 0.005).bfloat16()
    stored = {"weight_packed": words(codes), "weight_scale": scales}
    return stored, (codes - 8) * scales.float().repeat_interleave(32, 1)


def fp8(name: str, n: int, k: int) -> Any:
    w, scales = (torch.randn(n, k) * 20).to(torch.float8_e4m3fn), torch.rand(n, 1) / 200
    return {"weight": w, "weight_scale": scales}, w.float() * scales


def write(
    folder: Path, kind: str, rules: Mapping[str, Packer], config: dict[str, Any] = CONFIG, **settings: Any
) -> torch.nn.Module:
    """Write a tiny model whose matrices that match a rule are packed; return transformers' own model of the numbers."""
    torch.manual_seed(0)
    architecture, own = MODELS[kind]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **SIZES | own)).eval()
    model.save_pretrained(folder / "dense")
    numbers = load_file(folder / "dense" / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, w in numbers.items():
        pack = next((p for rule, p in rules.items() if re.search(rule, name)), None)
        parts, numbers[name] = ({"weight": w}, w) if pack is None else pack(name, *w.shape)
        stored |= {(name.removesuffix("weight") + leaf if pack else name): t for leaf, t in parts.items()}
    save(folder / "dense", numbers)
    said = json.loads((folder / "dense" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": config} | settings))
    save(folder, stored)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(96)}, unk_token="t3"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)


def save(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file(
        {name: t.contiguous().clone() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def configure(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([[3, 5, 7, 11]])).logits


def both_ways(folder: Path) -> list[torch.nn.Module]:
    return [load(folder)[0], AutoModelForCausalLM.from_pretrained(folder, **OURS)]


def assert_equal_to(dense: torch.nn.Module, folder: Path) -> list[torch.nn.Module]:
    made = both_ways(folder)
    for model in made:
        torch.testing.assert_close(logits(model), logits(dense), rtol=1e-4, atol=1e-5)
    assert summarize(made[0]) == summarize(made[1])
    return made


def assert_refused(folder: Path, message: str, cls: Any = AutoModelForCausalLM) -> None:
    for way in (load, lambda path: cls.from_pretrained(path, **OURS)):
        if way is not load or cls is AutoModelForCausalLM:
            with pytest.raises(FormatError, match=message):
                way(folder)


ATTENTION = {r"self_attn\.\w_proj\.weight$": int4}
WITHOUT_GATES = {
    "compressed-tensors": (CONFIG, int4),
    "gptq": (test_gptq.CONFIG, test_gptq.writer(-1)),
    "awq": (test_awq.CONFIG, test_awq.writer(zeros=(1, 15))),
    "modelopt": (test_modelopt.NVFP4, test_modelopt.nvfp4),
}


@pytest.mark.parametrize(("config", "pack"), WITHOUT_GATES.values(), ids=WITHOUT_GATES)
def test_experts_without_gates(tmp_path: Path, config: Any, pack: Packer, caplog: pytest.LogCaptureFixture) -> None:
    """transformers drew them at random, and later they were dense."""
    dense = write(tmp_path, "without gates", {r"proj\.weight$": pack}, config)
    models = assert_equal_to(dense, tmp_path)
    for model in models:
        (experts,) = (m for m in model.modules() if isinstance(m, W4Experts))
        assert experts.activation == "relu2" and experts.gate_up.weight.n == experts.down.weight.k
    assert "dense" not in caplog.text
    models[1].save_pretrained(tmp_path / "saved")
    assert main(["convert", str(tmp_path), str(tmp_path / "converted")]) == 0
    for folder in ("saved", "converted"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        assert torch.equal(logits(again), logits(models[1])) and summarize(again) == summarize(models[1])


EXPERTS = {
    "down in fp8": {r"experts.*down_proj\.weight$": fp8},
    "all in fp8": {r"experts.*_proj\.weight$": fp8},
    "down in 4 bits": {r"experts.*down_proj\.weight$": int4},
    "gate and up in 4 bits": {r"experts.*(gate|up)_proj\.weight$": int4},
    "up in 4 bits": {r"experts.*up_proj\.weight$": int4},
    "4 bits and fp8": {r"experts.*down_proj\.weight$": fp8, r"experts.*_proj\.weight$": int4},
    "fp8 and 4 bits": {r"experts.*down_proj\.weight$": int4, r"experts.*_proj\.weight$": fp8},
}


@pytest.mark.parametrize("rules", EXPERTS.values(), ids=EXPERTS)
def test_experts_of_which_a_part_is_in_other_bits(
    tmp_path: Path, rules: dict[str, Packer], request: pytest.FixtureRequest
) -> None:
    """All had the last one's numbers, or failed at the first call. They stay packed if both products are."""
    dense = write(tmp_path, "mixture", ATTENTION | rules)
    packed = any(name in request.node.name for name in ("all in fp8", "4 bits and fp8", "fp8 and 4 bits"))
    for model in assert_equal_to(dense, tmp_path):
        assert any(isinstance(m, W4Experts) for m in model.modules()) == packed


def test_blocks_that_draw_their_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of Qwen3-Omni do, by the names of the dense parameters."""
    own = Qwen3MoePreTrainedModel._init_weights

    def init(model: Any, module: torch.nn.Module) -> None:
        own(model, module)
        if isinstance(module, Qwen3MoeSparseMoeBlock):
            torch.nn.init.normal_(module.experts.gate_up_proj)
            torch.nn.init.normal_(module.experts.down_proj)

    monkeypatch.setattr(Qwen3MoePreTrainedModel, "_init_weights", init)
    dense = write(tmp_path, "mixture", {r"experts.*_proj\.weight$": int4})
    for model in assert_equal_to(dense, tmp_path):
        assert {*model.model.layers[0].mlp.experts.__dict__}.isdisjoint({"gate_up_proj", "down_proj"})
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", **OURS)
    assert isinstance(rounded.model.layers[0].mlp.experts, W4Experts)


def test_experts_before_linear_layers(tmp_path: Path) -> None:
    """Granite 4 has its experts first, and other names for them in files: one saved with them could not be loaded."""
    write(tmp_path, "experts first", {})
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", **OURS)
    rounded.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(again), logits(rounded)) and torch.equal(logits(load(tmp_path)[0]), logits(rounded))


def test_layers_that_files_have_in_one_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would join their codes, and what says their formats, which no reader takes."""
    write(tmp_path, "llama", {})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", **OURS)

    def revert(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        both = {re.sub(r"[qk]_proj", "qk", name): [] for name in state}
        for name, t in state.items():
            both[re.sub(r"[qk]_proj", "qk", name)].append(t)
        return {name: torch.cat(each) for name, each in both.items()}

    monkeypatch.setattr(saving, "revert_weight_conversion", revert)
    with pytest.raises(ValueError, match=r"saves several quantized layers as model\.layers\.0\.self_attn\.qk, which"):
        model.save_pretrained(tmp_path / "saved")


def test_weights_that_a_model_reads(tmp_path: Path) -> None:
    """Mamba multiplies dt_proj's weight by itself, so that a packed one failed at the first call; and it casts x to
    the dtype of its head's weight, which was that of the scales."""
    dense = write(tmp_path, "mamba", {r"(_proj|lm_head)\.weight$": int4}, CONFIG | {"ignore": []})
    names = {f"{leaf}_proj" for leaf in ("in", "x", "out")} | {"lm_head"}
    for model in assert_equal_to(dense, tmp_path):
        assert {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, W4Linear)} == names
    assert logits(quantize_layers(dense, "int4_g32")).isfinite().all()


def test_a_head_in_4_bits_that_the_config_ties(tmp_path: Path) -> None:
    """It has numbers of its own, and so has the embedding."""
    dense = write(tmp_path, "llama", {r"(proj|lm_head)\.weight$": int4}, CONFIG | {"ignore": []})
    configure(tmp_path, tie_word_embeddings=True)
    for i, model in enumerate(assert_equal_to(dense, tmp_path)):
        assert isinstance(model.lm_head, W4Linear) and not model.config.tie_word_embeddings
        model.save_pretrained(tmp_path / f"saved{i}")
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / f"saved{i}", dtype=torch.float32)
        assert torch.equal(logits(saved), logits(model))


def further(tensors: dict[str, torch.Tensor], layer: int) -> None:
    """Add a layer that predicts further tokens."""
    tensors |= {
        name.replace("layers.1.", f"layers.{layer}."): t.clone() for name, t in tensors.items() if "layers.1." in name
    }
    tensors[f"model.layers.{layer}.eh_proj.weight"] = torch.ones(64, 128)


@pytest.mark.parametrize(
    "rules", [{r"proj\.weight$": int4}, {r"layers\.0.*proj\.weight$": int4}], ids=["4 bits", "dense"]
)
def test_layers_that_predict_further_tokens(
    tmp_path: Path, rules: dict[str, Packer], caplog: pytest.LogCaptureFixture
) -> None:
    """transformers names their number in published models alone; the config says how many layers they are."""
    caplog.set_level(logging.INFO, "w4gemm")
    dense = write(tmp_path, "deepseek", rules)
    change(tmp_path, lambda tensors: further(tensors, 2))
    assert_equal_to(dense, tmp_path)
    assert caplog.text.count("predicts further tokens") == 2
    configure(tmp_path, num_nextn_predict_layers=0)
    assert_refused(tmp_path, r"no place for model\.layers\.2\.")


def test_a_layer_of_the_number_that_another_model_has_behind_its_last(tmp_path: Path) -> None:
    """transformers leaves out layer 61 of every DeepSeek-V3, also of one with more layers."""
    write(tmp_path, "deepseek", {r"proj\.weight$": int4})
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "dense"))
    name = "model.layers.61.mlp.other.weight"
    assert Naming(model).is_unused(name)
    model.config.num_hidden_layers = 70
    assert not Naming(model).is_unused(name)


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name.replace(old, new): tensors.pop(name) for name in list(tensors)})


def without(pattern: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if re.search(pattern, name)] and None


def added(name: str, shape: int, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)})


def twice(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {name.replace("experts.0.", "experts.00."): t.clone() for name, t in tensors.items()}


DOWN = r"model\.layers\.[01]\.mlp\.down_proj\.weight"
REFUSED = {
    "another name": ("llama", renamed("down_proj", "w2"), rf"no tensor for {DOWN}.*no place for .*0\.mlp\.w2"),
    "a packed layer": ("llama", without(r"1\.mlp\.down_proj"), rf"no tensor for {DOWN}$"),
    "a packed layer everywhere": ("llama", without("down_proj"), rf"no tensor for {DOWN}"),
    "a norm": ("llama", without(r"^model\.norm"), r"no tensor for model\.norm\.weight"),
    "an untied head": ("llama", without("lm_head"), r"no tensor for lm_head\.weight"),
    "a stranger": ("llama", added("model.extra", 3), r"no place for model\.extra"),
    "integers": ("llama", added("model.norm.weight", 64, torch.int64), r"model\.norm\.weight"),
    "a shape": ("llama", added("model.norm.weight", 3), r"'model.norm.weight' has shape \(3,\)"),
    "a router": ("mixture", without(r"0\.mlp\.gate\."), r"no tensor for model\.layers\.0\.mlp\.gate\.weight"),
    "fused names": ("mixture", renamed("gate_proj.weight_packed", "gate_up_proj_packed"), "mlp.experts"),
    "an expert": ("dense mixture", without(r"experts\.2\."), "for each expert, but there is none for expert 2"),
    "the last expert": ("dense mixture", without(r"experts\.3\."), r"down_proj, made of .* has shape \(3, 64, 96\)"),
    "all gates": ("dense mixture", without(r"gate_proj"), r"makes no .*gate_up_proj of .*0\.up_proj"),
    "all experts": ("dense mixture", without(r"experts\."), r"no tensor for model\.layers\.0\.mlp\.experts\."),
    "an expert twice": ("dense mixture", twice, "wanted one for each expert"),
}


@pytest.mark.parametrize(("kind", "damage", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_missing_or_strange_is_refused(tmp_path: Path, kind: str, damage: Any, message: str) -> None:
    """Before, transformers drew parameters at random, and said so in a table of its log."""
    rules = ATTENTION if kind.startswith("dense") else {r"proj\.weight$": int4}
    write(tmp_path, kind.split()[-1], rules)
    change(tmp_path, damage)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize("damage", ["a norm", "a stranger", "an expert", "all gates", "an untied head", "integers"])
def test_a_dense_folder_is_refused_alike(tmp_path: Path, damage: str) -> None:
    kind, damaged, message = REFUSED[damage]
    write(tmp_path, kind.split()[-1], {})
    for file in tmp_path.glob("tokenizer*"):
        (tmp_path / "dense" / file.name).write_bytes(file.read_bytes())
    change(tmp_path / "dense", damaged)
    assert_refused(tmp_path / "dense", message)
    with pytest.raises(FormatError, match=message):
        checkpoint = open_checkpoint(tmp_path / "dense")
        checkpoint.dense("model.embed_tokens.weight")


@pytest.mark.parametrize("rules", [{}, {r"proj\.weight$": int4}], ids=["dense", "packed"])
def test_names_that_key_mapping_changes(tmp_path: Path, rules: dict[str, Packer]) -> None:
    """The account was made without it, and its error named the tensors."""
    write(tmp_path, "llama", rules)
    folder = tmp_path if rules else tmp_path / "dense"
    expected = logits(AutoModelForCausalLM.from_pretrained(folder, **OURS))
    change(folder, renamed("model.layers", "blocks"))
    with pytest.raises(FormatError, match=r"no tensor for model\.layers\.0.*no place for blocks\.0"):
        AutoModelForCausalLM.from_pretrained(folder, **OURS)
    model = AutoModelForCausalLM.from_pretrained(folder, key_mapping={r"^blocks\.": "model.layers."}, **OURS)
    assert torch.equal(logits(model), expected) and summarize(model).quantized == 14
    change(folder, without(r"1\.mlp\.down_proj"))
    with pytest.raises(FormatError, match=r"no tensor for model\.layers\.1\.mlp\.down_proj\.weight$"):
        AutoModelForCausalLM.from_pretrained(folder, key_mapping={r"^blocks\.": "model.layers."}, **OURS)


def test_a_state_dict_is_refused(tmp_path: Path) -> None:
    """No account was made of its tensors: one that lacks some gave a model with random numbers."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    with pytest.raises(ValueError, match="state_dict: wanted None beside a W4GemmConfig.*quantize_layers"):
        type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict(), **OURS)


def test_a_head_that_the_class_adds_is_new(tmp_path: Path) -> None:
    """In a dense folder and a packed one; what both classes have may not be missing."""
    write(tmp_path, "llama", {r"proj\.weight$": int4})
    for folder in (tmp_path, tmp_path / "dense"):
        for cls in (transformers.AutoModelForTokenClassification, transformers.AutoModelForSequenceClassification):
            model = cls.from_pretrained(folder, **OURS)
            assert type(model.score) is torch.nn.Linear and isinstance(model.model.layers[0].mlp.up_proj, W4Linear)
        assert_refused(folder, r"no tensor for transformer\.", transformers.AutoModelForQuestionAnswering)
        change(folder, without(r"1\.mlp\.up_proj"))
        assert_refused(
            folder, r"no tensor for model\.layers\.1\.mlp\.up_proj", transformers.AutoModelForTokenClassification
        )


HEADS = {
    "token": ("bert", "AutoModelForTokenClassification", ("classifier",)),
    "choice": ("bert", "AutoModelForMultipleChoice", ("classifier", "pooler")),
    "question": ("bert", "AutoModelForQuestionAnswering", ("qa_outputs",)),
    "xlm": ("xlm-roberta", "AutoModelForSequenceClassification", ("classifier",)),
}


@pytest.mark.parametrize(("architecture", "kind", "heads"), HEADS.values(), ids=HEADS)
def test_heads_of_dense_folders(tmp_path: Path, architecture: str, kind: str, heads: tuple[str, ...]) -> None:
    """New ones are refused no more, and trained ones stay dense."""
    cls = getattr(transformers, kind)
    config = AutoConfig.for_model(architecture, **{k: v for k, v in SIZES.items() if "key_value" not in k})
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "base")
    model = cls.from_pretrained(tmp_path / "base", **OURS)
    own = cls.from_config(config)
    own.save_pretrained(tmp_path / "trained")
    trained = cls.from_pretrained(tmp_path / "trained", **OURS)
    for made in (model, trained):
        assert summarize(made).quantized >= 12
        assert not any(isinstance(m, W4Linear) for n, m in made.named_modules() if n.split(".")[0] in heads)
    there, here = dict(own.named_parameters()), dict(trained.named_parameters())
    assert all(torch.equal(here[n], there[n]) for n in here if n.split(".")[0] in heads)


@pytest.mark.parametrize("architecture", ["mixture", "without gates"])
def test_experts_of_a_dense_mixture(tmp_path: Path, architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    """from_pretrained left them dense without a word."""
    write(tmp_path, architecture, {})
    for file in tmp_path.glob("tokenizer*"):
        (tmp_path / "dense" / file.name).write_bytes(file.read_bytes())
    made = both_ways(tmp_path / "dense")
    assert torch.equal(*map(logits, made)) and summarize(made[0]) == summarize(made[1])
    packed = sum(isinstance(m, W4Experts) for m in made[1].modules())
    assert packed == (2 if architecture == "mixture" else 1)
    assert "experts stay dense" not in caplog.text
    made[1].save_pretrained(tmp_path / "saved")
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)), logits(made[0])
    )


OPENED = """
import sys
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM
for folder in sys.argv[1:]:
  for cls in (AutoModel, AutoModelForCausalLM):
    try:
        model = cls.from_pretrained(folder, dtype=torch.float32)
    except RuntimeError as e:
        print("refused", e)
with torch.inference_mode():
    save_file({"logits": model(torch.tensor([[3, 5, 7, 11]])).logits}, "logits.safetensors")
"""


def test_folders_without_w4gemm_are_refused_or_right(tmp_path: Path) -> None:
    """transformers warns of an unknown method, and drew every quantized weight at random."""
    pytest.importorskip("compressed_tensors")
    write(tmp_path / "int4", "llama", {r"proj\.weight$": int4})
    write_gpt_oss(tmp_path / "experts")  # which alone are in 4 bits, with biases that compressed-tensors does not hold
    (tmp_path / "int4" / "dense" / "tokenizer.json").write_bytes((tmp_path / "int4/tokenizer.json").read_bytes())
    folders = []
    for folder, config in (
        (tmp_path / "int4" / "dense", W4GemmConfig("nf4_g32")),  # which compressed-tensors does not hold
        (tmp_path / "experts", W4GemmConfig()),
        (tmp_path / "int4", W4GemmConfig()),
    ):
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
        model.save_pretrained(folder / "saved")
        folders.append(folder / "saved")
        assert torch.equal(
            logits(AutoModelForCausalLM.from_pretrained(folders[-1], dtype=torch.float32)), logits(model)
        )
    assert main(["convert", str(tmp_path / "experts"), str(tmp_path / "converted")]) == 0
    names = [tmp_path / "converted", *folders]
    process = subprocess.run(
        [sys.executable, "-c", OPENED, *names], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert process.stdout.count("refused You set `ignore_mismatched_sizes` to `False`") == 6, process.stderr
    theirs = load_file(tmp_path / "logits.safetensors")["logits"]
    torch.testing.assert_close(theirs, logits(model), rtol=1e-4, atol=1e-4)
