"""Folders that were made to do harm: nothing hangs, no memory is taken by a file's word, nothing outside is touched."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from fuzz import samples
from quantized_model import configure
from w4gemm import FormatError, QuantizedWeight
from w4gemm.checkpoints import hugging_face, open_checkpoint, quantization_configs
from w4gemm.checkpoints.quantization_configs import ExtraConfig, Patterns
from w4gemm.checkpoints.w4gemm import OwnWriter
from w4gemm.checkpoints.writing import write_folder
from w4gemm.cli.__main__ import main
from w4gemm.core.files import _pid_namespace, placed, read_regular, why_unread
from w4gemm.core.format_names import LARGEST_GROUP
from w4gemm.core.words import printable
from w4gemm.integrations.transformers import W4GemmConfig

# --- regular expressions

ENDLESS = r"(?:.*?.*?.*?.*?.*?.*?){12}[#$]"
"""Takes years to match no name of seven letters, even for an engine that remembers what it has tried."""
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": samples.GROUP, "symmetric": False}
PLACES: dict[str, tuple[str, Any]] = {
    "ignore": ("compressed-tensors", lambda text: {"ignore": [f"re:{text}"]}),
    "targets": (
        "compressed-tensors",
        lambda text: {"config_groups": {"group_0": {"targets": [f"re:{text}"], "weights": WEIGHTS}}},
    ),
    "exclude": ("quark", lambda text: {"exclude": [text]}),
    "layer_quant_config": ("quark", lambda text: {"layer_quant_config": {text: {}}}),
    "exclude_modules": ("modelopt", lambda text: {"exclude_modules": [text]}),
    "dynamic": ("gptq", lambda text: {"dynamic": {f"-:{text}": {}}}),
    "extra_config": ("awq", lambda text: {"extra_config": {text: {"bits": 4}}}),
}


EXPRESSIONS = "ignore", "targets", "dynamic", "extra_config"
"""Arguments whose patterns are regular expressions, not names with wildcards."""


@pytest.mark.parametrize("argument", EXPRESSIONS)
def test_an_expression_that_would_take_years(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization_configs, "_SECONDS", 0.3)
    kind, settings = PLACES[argument]
    folder = samples.FORMATS[kind](tmp_path)
    configure(folder, **settings(ENDLESS))
    with pytest.raises(FormatError, match=rf"{argument}.*: '.*' and the expressions before it take longer than"):
        open_checkpoint(folder)


@pytest.mark.parametrize("argument", PLACES)
def test_an_expression_that_is_too_long(argument: str, tmp_path: Path) -> None:
    kind, settings = PLACES[argument]
    folder = samples.FORMATS[kind](tmp_path)
    configure(folder, **settings("*" + "(" * 10_001))
    with pytest.raises(FormatError, match=f"{argument}.*: wanted regular expressions of at most 10000 characters, got"):
        open_checkpoint(folder)


def test_a_hundred_thousand_expressions(tmp_path: Path) -> None:
    folder = samples.FORMATS["compressed-tensors"](tmp_path)
    configure(folder, ignore=[f"re:layer.{i}" for i in range(100_000)])
    with pytest.raises(FormatError, match=r"ignore, targets: wanted at most 10000 regular expressions, got 100000"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["(", "(?R)", "a**", "(" * 5000, r"\p{L}"])
def test_what_re_does_not_take(text: str) -> None:
    with pytest.raises(ValueError, match="dynamic: '.* is no regular expression: "):
        Patterns("dynamic", {text: text})


REAL = (  # of published configs
    (r".*\.mlp\.gate$", ("model.layers.3.mlp.gate",), ("model.layers.3.mlp.gate_proj",)),
    (r"^(?!.*\.mlp\.experts\.).*$", ("model.layers.0.self_attn.q_proj",), ("model.layers.0.mlp.experts.7.up_proj",)),
    (r".*(?:self_attn|linear_attn)\..*", ("model.layers.0.linear_attn.out_proj",), ("model.layers.0.mlp.up_proj",)),
    (
        r"model\.layers\.(?:[0-9]|1[0-5])\.mlp.*(?<!gate)_proj",
        ("model.layers.12.mlp.up_proj",),
        ("model.layers.16.mlp",),
    ),
    (r"(?i).*VISION.*", ("model.vision.0",), ("model.layers.0",)),
)


@pytest.mark.parametrize(("expression", "meant", "others"), REAL)
def test_expressions_of_published_models(expression: str, meant: tuple[str, ...], others: tuple[str, ...]) -> None:
    patterns = Patterns("ignore", {"re": expression})
    assert all(patterns.match("re", name) for name in meant)
    assert not any(patterns.match("re", name) for name in others)


def test_the_order_of_extra_config() -> None:
    """A name goes before what it is in, that before an expression, and of expressions the first one counts. A name
    means no other that it is the beginning of."""
    config = {
        ".*proj": {"bits": 1},
        "layers.1": {"bits": 2},
        "layers.1.q_proj": {"bits": 3},
        r"layers\.\d+\..*": {"bits": 5},
    }
    extra = ExtraConfig({"extra_config": config})
    bits = {"layers.1.q_proj": 3, "layers.1.k_proj": 2, "layers.11.k_proj": 1, "layers.11.gate": 5}
    assert {name: extra.of(name)["bits"] for name in bits} == bits
    assert extra.of("norm") == {}


# --- numbers and names


@pytest.mark.parametrize("count", [10_001, 10**12])
def test_layers_are_not_made_by_a_files_word(count: int, tmp_path: Path) -> None:
    folder = samples.FORMATS["gptq"](tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for changes in ({"num_hidden_layers": count}, {"text_config": {"num_hidden_layers": count}}):
        (folder / "config.json").write_text(json.dumps(config | changes))
        message = rf"^path: '\S+config.json': num_hidden_layers: wanted at most 10000, got {count}$"
        with pytest.raises(FormatError, match=message):
            open_checkpoint(folder)


def test_from_pretrained_makes_no_layers_by_a_files_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = samples.FORMATS["gptq"](tmp_path)
    LlamaConfig(num_hidden_layers=10_001).save_pretrained(folder)
    monkeypatch.setattr(LlamaForCausalLM, "__init__", lambda *_: pytest.fail("layers were made"))
    with pytest.raises(FormatError, match=r"^config: num_hidden_layers: wanted at most 10000, got 10001$"):
        LlamaForCausalLM.from_pretrained(folder, quantization_config=W4GemmConfig())


def test_a_group_beyond_k(tmp_path: Path) -> None:
    """The one group that the tensors have is of all columns, and nothing repeats its scale as often as config.json
    says."""
    folder = samples.FORMATS["gptq"](tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in ("a", "b"):
        for leaf in ("scales", "qzeros"):
            tensors[f"model.{name}.{leaf}"] = tensors[f"model.{name}.{leaf}"][:1].clone()
        tensors[f"model.{name}.g_idx"].zero_()
    save_file(tensors, folder / "model.safetensors")
    weights = []
    for size in (-1, 128, LARGEST_GROUP):
        configure(folder, group_size=size)
        w = open_checkpoint(folder).weight("model.a")
        assert w.format.group_size == size
        weights.append(w.dequantize())
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    configure(folder, group_size=2**40)
    with pytest.raises(FormatError, match=f"model.a: group_size: wanted a positive multiple .*, got {2**40}"):
        open_checkpoint(folder)


ESCAPE = "model.\x1b[2Jnorm\u202e.weight"


def test_names_with_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = samples.FORMATS["gptq"](tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {ESCAPE: torch.ones(4)}, folder / "model.safetensors")
    assert main(["inspect", str(folder)]) == 1
    said = capsys.readouterr()
    assert r"a tensor is called 'model.\x1b[2Jnorm\u202e.weight', wanted a name of printable" in said.err
    assert printable(said.out + said.err) == said.out + said.err


def test_names_of_files_with_control_characters(tmp_path: Path) -> None:
    folder = samples.FORMATS["gptq"](tmp_path)
    (folder / "model.safetensors").unlink()
    for name in ("a\x1b[2J.safetensors", "a\0.safetensors"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(FormatError, match=f"{tmp_path}: model.safetensors.index.json names files that are not in"):
            open_checkpoint(folder)


def test_errors_and_warnings_show_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A setting's name is in the message as it is."""
    folder = samples.FORMATS["compressed-tensors"](tmp_path)
    configure(folder, config_groups={"\x1b[2J": "W4A16"})
    assert main(["inspect", str(folder)]) == 1
    assert r"config_groups.\x1b[2J is the name of a preset" in capsys.readouterr().err


def test_printable() -> None:
    assert printable("a\tb\x07\x9b\u2028 \u03b2\n") == "a\\tb\\x07\\x9b\\u2028 \u03b2\n"


# --- files that are no files


def make_pipe(file: Path) -> None:
    os.mkfifo(file)


def link_to_zeros(file: Path) -> None:
    file.symlink_to("/dev/zero")


every_kind = pytest.mark.parametrize("make", [make_pipe, link_to_zeros])


@every_kind
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "a.gguf"]
)
def test_pipes_and_devices_in_a_folder(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    folder = samples.FORMATS["gptq"](tmp_path)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(FormatError, match=f"{folder / name}' is no regular file"):
        open_checkpoint(folder)


@every_kind
def test_pipes_and_devices_as_files(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Where no folder was looked through."""
    file = tmp_path / "file"
    make(file)
    with pytest.raises(FormatError, match="what can be loaded"):
        open_checkpoint(file)
    with pytest.raises(FileNotFoundError, match="no file"):
        QuantizedWeight.load(file)
    with pytest.raises(FormatError, match="file cannot be read: it is no regular file"):
        hugging_face.read_header(file)
    with pytest.raises(ValueError, match="it is no regular file"):
        hugging_face.read_json(file)


def test_what_a_download_left(tmp_path: Path) -> None:
    """A clone without Git LFS has pointers; of a download that was interrupted the hub's cache has links to nowhere."""
    folder, other = samples.FORMATS["gptq"](tmp_path / "folder"), tmp_path / "a.gguf"
    file = folder / "model.safetensors"
    for path in (file, other):
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
        with pytest.raises(FormatError, match=f"{path} is a pointer of Git LFS, which `git lfs pull` "):
            open_checkpoint(folder if path is file else path)
    with pytest.raises(FormatError, match=f"path: {file} is a pointer of Git LFS"):
        QuantizedWeight.load(file)
    file.unlink()
    file.symlink_to("../../blobs/00")
    with pytest.raises(FormatError, match=f"{file} is a link to a file that is not there"):
        open_checkpoint(folder)
    assert why_unread(folder) == "cannot be read: Is a directory"


def test_json_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"123456")
    assert read_regular(tmp_path / "file", 6) == b"123456"
    with pytest.raises(ValueError, match="it has more than 5 bytes"):
        read_regular(tmp_path / "file", 5)
    folder = samples.FORMATS["gptq"](tmp_path / "model")
    monkeypatch.setattr(hugging_face, "_LARGEST_JSON", 30)
    with pytest.raises(FormatError, match=r"config.json' is no JSON object: it has more than 30 bytes"):
        open_checkpoint(folder)


def test_a_gguf_file_that_goes_on(tmp_path: Path) -> None:
    """Bytes behind the tensors belong to none: a tensor's entry may be lost."""
    path = samples.FORMATS["gguf"](tmp_path)
    open_checkpoint(path)
    whole = path.read_bytes() + bytes(-path.stat().st_size % 32)
    for more in (1, 32):
        path.write_bytes(whole + bytes(more))
        with pytest.raises(FormatError, match="the header does not name all"):
            open_checkpoint(path)


# --- links


def converted(folder: Path, out: Path) -> None:
    write_folder(open_checkpoint(folder), out, OwnWriter(), dtype=torch.float16)


def test_what_is_written_follows_no_link(tmp_path: Path) -> None:
    folder, out, victim = samples.FORMATS["gptq"](tmp_path / "in"), tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    for name in ("config.json.unfinished", "config.json", "tokenizer.json"):
        (out / name).symlink_to(victim)
        for text in (None, "precious"):  # nothing is made where a link leads to either
            if text:
                victim.write_text(text)
            with pytest.raises(FileExistsError, match=f"holds {name}, a link; wanted an empty folder"):
                converted(folder, out)
            assert victim.exists() == bool(text) and (not text or victim.read_text() == text)
        (out / name).unlink()
        victim.unlink()
    converted(folder, out)


def test_a_file_is_placed_beside_a_link(tmp_path: Path) -> None:
    """One that came after the folder was looked through."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"file.{_pid_namespace()}-{os.getpid()}-{threading.get_ident():x}.unfinished").symlink_to(victim)
    with placed(tmp_path / "file") as unfinished:
        unfinished.write_text("new")
    assert victim.read_text() == "precious" and (tmp_path / "file").read_text() == "new"
    assert not (tmp_path / "file").is_symlink()


def test_links_out_of_a_folder_are_not_copied(tmp_path: Path) -> None:
    folder, secret = samples.FORMATS["gptq"](tmp_path / "in"), tmp_path / "secret"
    secret.write_text("{}")
    for name in ("LICENSE", "tokenizer.json"):
        (folder / name).symlink_to(secret)
        with pytest.raises(FormatError, match=f"{name} is a link to '{secret}', wanted files in the folder"):
            converted(folder, tmp_path / "out")
        (folder / name).unlink()
    assert not (tmp_path / "out").exists()
    (folder / "LICENSE.md").symlink_to("config.json")
    (folder / "more.txt").mkdir()
    converted(folder, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE.md").read_bytes() == (folder / "config.json").read_bytes()
    assert not (tmp_path / "out" / "LICENSE.md").is_symlink() and not (tmp_path / "out" / "more.txt").exists()


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "123"
    blobs.mkdir(parents=True)
    samples.FORMATS["gptq"](folder)
    (folder / "tokenizer.json").write_text("{}")
    for i, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(i))
        file.symlink_to(Path("../../blobs", str(i)))
    converted(folder, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


# --- chat templates


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only\x1b[2J tools') }}", r"cannot be used: only\\x1b\[2J tools$"),
        ("{{ messages[7].content.x }}", "cannot be used: "),
        ("{% for", "cannot be used: "),
        ("{{ 'a' * 2**62 }}", "cannot be used: MemoryError$"),
        (f"{'{% for i in range(9999) %}' * 4}{'{% endfor %}' * 4}", r"cannot be used: it runs longer than 0\.2 s$"),
    ],
    ids=["raises", "undefined", "syntax", "long", "endless"],
)
def test_chat_templates(template: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    from w4gemm.integrations import generation

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hello": 0, "you": 1}, unk_token="you"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    monkeypatch.setattr(generation, "_TEMPLATE_SECONDS", 0.2)
    tokenizer.chat_template = template
    with pytest.raises(FormatError, match=f"the model's chat template {message}"):
        generation.encode(tokenizer, "hello")
    tokenizer.chat_template = "you {{ messages[0].content }}"
    assert generation.encode(tokenizer, "hello").tolist() == [[1, 0]]
    time.sleep(0.3)  # no alarm goes off behind it
