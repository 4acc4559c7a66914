"""The commands that tune and compile, and those for their cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import w4gemm
from test_commands import run
from w4gemm import choice
from w4gemm.choice import table
from w4gemm.choice.table import Record, key_of
from w4gemm.cli import problems
from w4gemm.console.progress import counted
from w4gemm.console.values import parse_tokens
from w4gemm.core import trust
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.problem import GPUS, Device
from w4gemm.kernels import kernel_named
from w4gemm.kernels.helpers.activation_quantize import ActivationQuantize

pytestmark = pytest.mark.usefixtures("cache_folder")


def test_tune_and_cache(capsys, cache_folder, tmp_path):
    shapes = tmp_path / "shapes.txt"
    shapes.write_text("# two layers\n96 64\n\n64 96 int4_g32_zint bias  # with a bias\n")
    arguments = ("tune", "--shapes", str(shapes), "--m", "5..16", "--device", "cpu")
    out, err = run(capsys, *arguments)
    assert len(out.splitlines()) == 4 and "m 16, n 64, k 96: cpu_mixed_gemm/" in out
    assert "4 of 4 measured" in err and "geometric mean" in err and str(cache_folder) in err
    out, err = run(capsys, *arguments)
    assert not out and "0 of 4 measured" in err and "with a record already: 4 (--force measures again)" in err

    out, _ = run(capsys, "cache", "path")
    assert out == f"{cache_folder}\n"
    out, _ = run(capsys, "cache", "list")
    assert "0 compiled kernels" in out and "tuned.jsonl, 4 configs" in out and "(stale)" not in out
    assert f"with {counted(torch.get_num_threads(), 'thread')}, float32 x int4_" in out
    more, _ = run(capsys, "cache", "list", "--all")
    assert out.splitlines()[-1].startswith("shipped: ") and len(more.splitlines()) > 100 + len(out.splitlines())
    exported, _ = run(capsys, "cache", "export")
    assert exported == (cache_folder / table.USER_FILE).read_text()
    run(capsys, "cache", "export", str(tmp_path / "out.jsonl"))
    _, err = run(capsys, "cache", "clear")
    assert "kept 4 tuned configs" in err and (cache_folder / table.USER_FILE).read_text() == exported
    _, err = run(capsys, "cache", "clear", "--tuned")
    assert f"deleted 4 tuned configs of {cache_folder}\n" in err and not (cache_folder / table.USER_FILE).exists()
    _, err = run(capsys, "cache", "import", str(tmp_path / "out.jsonl"))
    assert "added 4 tuned configs" in err and table.read(cache_folder / table.USER_FILE)
    _, err = run(capsys, "cache", "import", str(tmp_path / "out.jsonl"))
    assert "added 0 tuned configs" in err and "(there already: 4)" in err
    assert (cache_folder / table.USER_FILE).read_text() == exported
    (tmp_path / "out.jsonl").write_text("what\n" + exported)
    _, err = run(capsys, "cache", "import", str(tmp_path / "out.jsonl"), code=1)
    assert "skipped 1 unreadable line; line 1" in err
    stale = json.loads(exported.splitlines()[0]) | {"revision": 0}
    (cache_folder / table.USER_FILE).write_text(json.dumps(stale) + "\n")
    assert "(stale)" in run(capsys, "cache", "list")[0]


def test_nothing_is_kept(capsys, monkeypatch):
    monkeypatch.setenv("W4GEMM_CACHE_DIR", "off")
    out, _ = run(capsys, "cache", "list")
    assert "nothing is kept" in out and "tuned: no file, 0 configs" in out
    assert "W4GEMM_CACHE_DIR is off: nothing is kept" in run(capsys, "cache", "path", code=1)[1]
    tune = ("tune", "--shapes", "64x64", "--m", "1", "--device", "cpu")
    assert "kept in no file: W4GEMM_CACHE_DIR is off\n" in run(capsys, *tune)[1]
    monkeypatch.delenv("W4GEMM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", lambda path: Path.home() / 1)
    monkeypatch.setattr(Path, "home", _no_home)
    assert "this user has no home folder: nothing is kept" in run(capsys, "cache", "path", code=1)[1]


def test_a_cache_folder_that_is_a_file(capsys, caplog, monkeypatch, tmp_path):
    """Nothing is listed as from an empty folder, and no earlier export is replaced by an empty one."""
    file, exported = tmp_path / "file", tmp_path / "exported"
    for each in (file, exported):
        each.write_text("precious")
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(file))
    trust.warn.cache_clear()
    assert "0 compiled kernels" in run(capsys, "cache", "list")[0] and caplog.messages == [f"{file} is no folder"]
    for arguments in (("clear",), ("export", str(exported)), ("import", str(exported))):
        assert run(capsys, "cache", *arguments, code=1)[1] == f"w4gemm: error: {file} is no folder\n"
    assert file.read_text() == exported.read_text() == "precious"


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_what_cannot_be_kept_is_not_said_to_be_kept(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path / "file" / "cache"))  # not even root can make that
    _, err = run(capsys, "tune", "--shapes", "64x64", "--m", "1", "--device", "cpu")
    assert "1 of 1 measured" in err and "kept in" not in err
    out, _ = run(capsys, "gemm", "4", "96", "64", "--device", "cpu", "--profile")
    assert "fastest, and not kept, for m 3 to 4: " in out


def test_a_full_disk_holds_no_tuned_configs(capsys, cache_folder, monkeypatch):
    """The empty table is there then."""

    def full(path: Path, records: object) -> None:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table, "append", full)
    _, err = run(capsys, "tune", "--shapes", "64x64", "--m", "1", "--device", "cpu")
    assert (cache_folder / table.USER_FILE).exists() and "1 of 1 measured" in err and "kept in" not in err


def test_many_sizes_are_longer_than_a_path_may_be():
    sizes = ",".join(f"{64 * i}x64" for i in range(1, 65))
    assert len(sizes) > 255
    args = problems.argparse.Namespace(model=None, shapes=sizes, format=None)
    assert [layer.n for layer in problems.parse_layers(args, Device("cpu"))] == [64 * i for i in range(1, 65)]


def test_files_may_be_pipes(capsys, cache_folder):
    def pipe(text: str) -> str:
        out, into = os.pipe()
        with os.fdopen(into, "w") as f:
            f.write(text)
        return f"/dev/fd/{out}"

    tune = ("tune", "--m", "1", "--device", "cpu", "--shapes")
    run(capsys, *tune, pipe("96 64\n"))
    exported, _ = run(capsys, "cache", "export")
    run(capsys, "cache", "clear", "--tuned")
    assert "added 1 tuned config" in run(capsys, "cache", "import", pipe(exported))[1]


def test_layers_of_a_gguf_file(tmp_path):
    pytest.importorskip("gguf")
    from tiny_model import write_gguf

    args = problems.argparse.Namespace(model=str(write_gguf(tmp_path / "tiny.gguf")), shapes=None, format=None)
    layers = problems.parse_layers(args, Device("cpu"))
    assert len(layers) == len(set(layers)) > 1
    assert {str(layer.format) for layer in layers} == {"int4_g32_zfloat_fp16", "int8_g32_fp16"}


def test_layers_of_a_hugging_face_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=32).save_pretrained(tmp_path)
    args = problems.argparse.Namespace(model=str(tmp_path), shapes=None, format=None)
    actual = {(layer.n, layer.k, str(layer.format), layer.bias) for layer in problems.parse_layers(args, Device("cpu"))}
    g64, g32 = "int4_g64", "int4_g32"
    assert actual == {
        (64, 64, g64, True),
        (32, 64, g64, True),
        (64, 64, g64, False),
        (96, 64, g64, False),
        (64, 96, g32, False),
    }


def test_a_format_for_a_model_that_has_none(tmp_path):
    """``tune`` and ``compile`` took a dense model's layers as int4_g128 whatever --format said."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    transformers.LlamaConfig(**sizes, vocab_size=32).save_pretrained(tmp_path)
    for format in ("int4_g32", "int4_g64_zint", "nf4_g32"):
        args = problems.argparse.Namespace(model=str(tmp_path), shapes=None, format=format)
        assert {str(layer.format) for layer in problems.parse_layers(args, Device("cpu"))} == {format}


def test_layers_of_experts_and_of_fp8_activations(tmp_path, capsys):
    (tmp_path / "s.txt").write_text("8 96 64 int4_g32 bias\n96 64\n")
    for shapes, expected in ((str(tmp_path / "s.txt"), (8, 96, 64)), ("4x64x32,64x64", (4, 64, 32))):
        args = problems.argparse.Namespace(model=None, shapes=shapes, format=None)
        experts, dense = problems.parse_layers(args, Device("cpu"))
        assert (experts.experts, experts.n, experts.k) == expected and not dense.experts
        grouped, plain = problems.problems([experts, dense], [16], GPUS["sm_90a"], torch.bfloat16)
        assert (grouped.m, grouped.experts) == (16 * expected[0], expected[0]) and (plain.m, plain.experts) == (16, 0)
    assert experts != dense
    fp8 = replace(dense, activations="fp8")
    (actual,) = problems.problems([fp8], [16], GPUS["sm_90a"], torch.bfloat16)
    assert (actual.dtype, actual.layout, actual.epilogue.token_scale) == (torch.float8_e4m3fn, "mma8", True)
    out, err = run(capsys, "tune", "--shapes", str(tmp_path / "s.txt"), "--m", "4", "--device", "cpu")
    assert "experts are not tuned: 1 layer of experts" in err and len(out.splitlines()) == 1
    assert "1 of 1 measured" in err and "the CPU; 1 problem\n" in err and "record already" not in err
    _, err = run(capsys, "tune", "--shapes", "4x64x32", "--m", "4", "--device", "cpu", code=2)
    assert "error: --shapes: wanted a layer that is not of experts" in err and "measured" not in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1..8192", choice.BOUNDS), ("1..", (*choice.BOUNDS, 16384)), ("3,5,20", (4, 8, 24)), ("9..17", (16, 24))],
)
def test_tokens(text, expected):
    assert parse_tokens(text) == list(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "nowhere.txt"), "--shapes: wanted a file or sizes like 6144x4096"),
        (("--shapes", "96x64,64x"), "--shapes: wanted a file or sizes like 6144x4096 (n x k), got '64x'"),
        (("--shapes", "96x64", "--m", "0..3"), "--m: wanted numbers from 1"),
        (("--shapes", "96x64", "--m", "9..3"), "--m: wanted ranges that go up"),
        (("--shapes", "96x64", "--format", "int3"), "format: wanted int4_g"),
        (("--model", "nowhere.gguf"), "no file or folder 'nowhere.gguf'"),
    ],
)
def test_mistakes(arguments, message, capsys):
    _, err = run(capsys, "tune", "--device", "cpu", *arguments, code=1 if "nowhere" in arguments[1] else 2)
    assert err.startswith("w4gemm: error: ") and message in err


def test_a_bad_line_is_named(tmp_path, capsys):
    (tmp_path / "s.txt").write_text("96 64\n96\n")
    _, err = run(capsys, "tune", "--shapes", str(tmp_path / "s.txt"), code=1)
    assert f"{tmp_path / 's.txt'}:2: wanted [EXPERTS] N K [FORMAT] [bias], got '96'" in err


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_fp8_is_compiled_ahead_of_time_for_other_gpus_with_what_quantizes(tmp_path, capsys, monkeypatch, arch):
    """Then all that linear launches for 16-bit x is there, and nothing of another target. Nothing is compiled:
    tests/test_sass.py compiles these kernels."""
    pytest.importorskip("cutlass")
    units = []
    monkeypatch.setattr("w4gemm.cli.compile.fill", lambda folder, needed, workers: units.extend(needed) or 0)
    run(
        capsys,
        "compile",
        "--shapes",
        "512x768",
        "--m",
        "8",
        "--dtype",
        "float8_e4m3fn",
        "--act-order",  # for which there is nothing to add
        "--arch",
        arch,
        "-o",
        str(tmp_path / "kernels"),
    )
    device = GPUS[arch]
    problem = w4gemm.GemmProblem(
        8, 512, 768, torch.float8_e4m3fn, w4gemm.WeightFormat(), "mma8", Epilogue(token_scale=True), device
    )
    actual = choice.explain(problem).chosen
    assert actual is not None and actual[0] == {"sm_89": "sm89_fp8_gemm", "sm_90a": "sm90_fp8_gemm"}[arch]
    assert kernel_named(actual[0]).unit(problem, actual[1]) in units
    for dtype in (torch.float16, torch.bfloat16):
        assert ActivationQuantize.of(device, dtype, 768, "", True).unit() in units
        as_dtype = replace(problem, epilogue=problem.epilogue._replace(out_dtype=dtype))
        assert kernel_named(actual[0]).unit(as_dtype, actual[1]) in units
    assert {unit.arch for unit in units} == {arch} and len(set(units)) == len(units) == 8


def test_compiled_ahead_of_time_and_loaded_where_compiling_is_forbidden(tmp_path, capsys, monkeypatch):
    """In a fresh process, where cute.compile would raise, and that leaves the folder as it is."""
    pytest.importorskip("cutlass")
    output = tmp_path / "kernels"
    problem = w4gemm.GemmProblem(16, 1536, 1024, torch.bfloat16, w4gemm.WeightFormat(), "mma16")
    # a tuned config that the heuristic would not choose goes along
    kernel, _, config = choice.configs(problem)[3].rpartition("/")
    revision = kernel_named(kernel).revision
    tuned = Record(key_of(problem), (9, 16), kernel, config, 1.0, revision, "2026-11-21")
    table.add([tuned])
    out, _ = run(
        capsys, "compile", "--shapes", "1536x1024", "--m", "5..16", "--act-order", "--workers", "1", "-o", str(output)
    )
    assert f"{output}: 3 kernels" in out and "1 tuned config\n" in out
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    script = f"""
import sys; sys.path[:] = {sys.path!r}
import cutlass.cute as cute
def forbidden(*a, **k): raise AssertionError("compiled")
cute.compile = forbidden
from dataclasses import replace
import torch, w4gemm
from w4gemm import choice
problem = w4gemm.GemmProblem(16, 1536, 1024, torch.bfloat16, w4gemm.WeightFormat(), "mma16")
for m in (8, 16):
    plan = choice.choose(replace(problem, m=m))
    assert callable(plan.compiled)
    print(plan, plan.source)
try:
    choice.choose(replace(problem, m=4096)).ready()
except w4gemm.UnsupportedError as e:
    print(e)
"""
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(output))
    monkeypatch.setenv("W4GEMM_COMPILE", "off")
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    first, second, refused = child.stdout.splitlines()
    assert first.endswith(" heuristic") and second == f"{tuned.choice} tuned"
    assert refused.startswith("W4GEMM_COMPILE=off forbids compiling")
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_a_compiling_process_that_ends_is_a_sentence(tmp_path, capsys, monkeypatch):
    pytest.importorskip("cutlass")

    def refuse():
        raise OSError("no more processes")

    monkeypatch.setattr("w4gemm.jit.pool._start", refuse)
    _, err = run(capsys, "compile", "--shapes", "64x64", "--m", "1", "-o", str(tmp_path / "kernels"), code=1)
    assert re.search(r"error: sm90_\S+\.o cannot be compiled: .* ended \(no more processes\)\n", err)


@pytest.mark.parametrize("opened", ["TemporaryFile", "mkstemp"])
def test_a_folder_or_disk_that_cannot_be_written(tmp_path, capsys, monkeypatch, opened):
    """Without access before anything is compiled; a full disk at the first kernel."""
    pytest.importorskip("cutlass")
    asked = []
    refusal = OSError(28, "No space left on device", f"{tmp_path}/kernels/.sm90_decode.o.x")
    monkeypatch.setattr("w4gemm.jit.pool._start", lambda: subprocess.Popen(["true"]))
    monkeypatch.setattr("w4gemm.jit.pool._end", lambda child: child.wait())
    monkeypatch.setattr("w4gemm.jit.pool._ask", lambda child, unit: asked.append(unit) or (b"code", ""))
    monkeypatch.setattr(f"w4gemm.jit.disk.tempfile.{opened}", Mock(side_effect=refusal))
    _, err = run(capsys, "compile", "--shapes", "64x64", "--m", "1", "-o", str(tmp_path / "kernels"), code=1)
    assert err.endswith(f"error: {tmp_path}/kernels: No space left on device\n")
    assert len(asked) == (opened == "mkstemp")


@pytest.mark.parametrize(
    "value, expected", [("off", "to compile; got off"), ("maybe", "wanted on or off, got 'maybe'")]
)
def test_compile_where_compiling_is_forbidden(capsys, monkeypatch, tmp_path, value, expected):
    monkeypatch.setenv("W4GEMM_COMPILE", value)
    _, err = run(capsys, "compile", "--shapes", "256x256", "--m", "1", "-o", str(tmp_path / "new"), code=2)
    assert "W4GEMM_COMPILE: " in err and err.rstrip().endswith(expected) and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "top_k, said",
    [
        ((), "without --top-k the sum over the experts of a token is left out"),
        (("--top-k", "16"), ""),
        (("--top-k", "17"), "--top-k: PyTorch adds up the results of 17 experts; the kernel for it takes at most 16"),
    ],
)
def test_compile_says_when_no_kernel_adds_up_the_experts_of_a_token(capsys, monkeypatch, tmp_path, top_k, said):
    pytest.importorskip("cutlass")
    names = []
    monkeypatch.setattr(
        "w4gemm.cli.compile.fill", lambda folder, units, workers: names.extend(u.name for u in units) or 0
    )
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path / "cache"))
    _, err = run(capsys, "compile", "--shapes", "32x256x128", "--m", "1", "-o", str(tmp_path / "out"), *top_k)
    assert ("row_combine" in names) == (not said)
    assert [line for line in err.splitlines() if "experts" in line and "problems" not in line] == [said] * bool(said)
