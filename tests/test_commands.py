"""The commands around choosing: explain, gemm, tune, cache, compile, bench."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import w4gemm
from w4gemm import choice
from w4gemm.choice import table
from w4gemm.choice.table import Record, key_of
from w4gemm.cli import problems
from w4gemm.cli.__main__ import main
from w4gemm.console.errors import memory_for, sentence
from w4gemm.console.progress import counted
from w4gemm.console.values import parse_tokens
from w4gemm.core import trust
from w4gemm.core.epilogue import Epilogue
from w4gemm.core.problem import GPUS, Device, gpu_named
from w4gemm.kernels import KERNELS, kernel_named
from w4gemm.kernels.helpers.activation_quantize import ActivationQuantize
from w4gemm.kernels.hopper import HopperKernel

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(table, "_session", [])
    monkeypatch.setattr(choice.plan_cache, "_plans", {})
    return tmp_path / "cache"


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert main(arguments) == code
    return capsys.readouterr()


def test_explain_a_gpu_that_is_not_there(capsys):
    out, _ = run(capsys, "explain", "--m", "500", "--n", "1024", "--k", "1024", "--device", "h200")
    problem = w4gemm.GemmProblem(512, 1024, 1024, torch.bfloat16, w4gemm.WeightFormat(), "mma16")
    assert out.startswith("NVIDIA H200, compute capability 9.0, 132 multiprocessors\nm 512, n 1024, k 1024")
    assert "chosen for m 512, of the few configs that serve more than 256 tokens" in out
    assert "roofline: 1.4 us for its operations, 3.4 us with a launch; the choice is predicted to reach 8" in out
    actual = w4gemm.explain(problem)
    assert f"chosen: {actual.chosen[0]}/{actual.chosen[1]} ({actual.source})" in out
    *rows, last = out.split("\n\n")[1].splitlines()
    assert 21 <= len(rows) <= 22 and sum(row.lstrip().startswith("*") for row in rows) == 1
    count = len(w4gemm.configs(problem))
    assert last == f"of {count} configs; --rows {count} prints all"
    for kernel in KERNELS:
        assert f"  {kernel.name}: " in out


FAILURES = (
    *("FILE: no file '", "wanted a folder, which is made if needed", "Not a directory", "wanted a text file in UTF-8"),
    *(
        "fit the memory of the CPU",
        "GiB could not be",
        "got an empty string",
        "on a GPU",
        "neither a file nor a folder",
    ),
)
"""Words of messages about what the arguments name, or about the machine: exit status 1, where it is 2 for arguments."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gemm 4 64 64 --device h200", "got 'h200'; GPUs by name are for `explain`, `inspect` and"),
        ("tune --shapes 64x64 --device H200", "got 'H200'; GPUs by name are for"),
        (
            "explain 4 64 64 --device rtx-409",
            "the name of a GPU, such as h200 or rtx-4090, got 'rtx-409'; nearest is 'RTX 4090'",
        ),
        ("explain --m 0 --n 64 --k 64", "M, N, K: wanted numbers from 1 to 2147483647, got 0, 64, 64"),
        ("explain --m 3000000000 --n 64 --k 64", "M, N, K: wanted numbers from 1 to 2147483647"),
        ("cache import {file}/x", "FILE: no file '"),
        ("gemm 4 64 64 --device cpu --top 3", "--top: goes with --profile"),
        ("explain --m 4 --n 63 --k 64 --device h200 --activation silu_mul", "n: silu_mul wants an even n"),
        ("explain 4 64 64 --device h200 --block-scales", "--block-scales: wanted --dtype float8_e4m3fn beside it, got"),
        (
            "compile --shapes 64x64 --m 1 -o {file}",
            "--output: wanted a folder, which is made if needed, got the file '",
        ),
        ("convert nowhere {file}", "OUTPUT: wanted a folder, which is made if needed, got the file '"),
        ("cache export {file}/x", "/file/x: Not a directory"),
        ("cache export {file}/..", "/file/..: Not a directory"),
        ("cache import {binary}", "FILE: wanted a text file in UTF-8, got '"),
        ("tune --shapes {binary} --device cpu", "--shapes: wanted a text file in UTF-8, got '"),
        (
            "gemm 2000000000 64 1048576 --device cpu",
            "M, N, K: wanted sizes that fit the memory of the CPU, got 2000000000, 64, 1048576; 7812500.0 GiB",
        ),
        ("gemm 4 2000000000 2000000000 --device cpu", "got 4, 2000000000, 2000000000; 3725290298.5 GiB could not be"),
        ("gemm 4 2000000000 2000000000 --device cpu --profile", "M, N, K: wanted sizes that fit the memory of the CPU"),
        (
            "tune --shapes 2000000000x2000000000 --m 1 --device cpu",
            "fit the memory of the CPU, got '2000000000x2000000000'; 37",
        ),
        (
            "compile --shapes 64x64 -o {file}s --gpu h200 --arch sm_80",
            "--arch: wanted the target of NVIDIA H200",
        ),
        ("compile --shapes 64x64 -o {file}s --gpu 'RTX 9090'", "got 'RTX 9090'; nearest is 'RTX 5090'"),
        (
            "compile --shapes 64x64 -o {file}s --gpu 'nvidia geforce rtx 409' --arch sm_89",
            "or --arch and --sms beside the name of another, got 'nvidia geforce rtx 409'; nearest is 'RTX 4090'",
        ),
        ("compile --shapes 64x64 -o {file}s --gpu sm_90 --sms 132", "or --arch and --sms beside the name of another"),
        (
            "compile --shapes 255x256 -o {file}s --activation silu_mul",
            "silu_mul wants an even number of features, got 255",
        ),
        ("compile --shapes 64x64 -o {file}s --top-k 4", "--top-k: wanted only beside layers of experts, got 4"),
        ("compile --shapes 64x64 -o {file}s --expert-scale", "--expert-scale: wanted only beside layers of experts"),
        ("inspect ''", "wanted a file or folder, got an empty string"),
        ("convert '' {file}s", "wanted a file or folder, got an empty string"),
        ("generate hi --model '' --device cpu", "wanted a file or folder, got an empty string"),
        ("bench layers", "bench layers measures on a GPU"),
        ("generate '' --device cpu", "PROMPT: it is empty"),
        (f"generate hi --seed {2**64} --device cpu", f"--seed: wanted a number of 64 bits, got {2**64}"),
        ("tune --shapes 64x64 --m 1 --format '' --device cpu", "format: wanted int4_g"),
        ("gemm 1 64 64 --config '' --device cpu", "config: wanted <tile_m>x<tile_n>x<tile_k>"),
        ("explain --m 1 --n 64 --k 64 --why '' --device cpu", "config: wanted <tile_m>x<tile_n>x<tile_k>"),
        (
            "compile --shapes 64x64 --m 1 -o {file}s --gpu ''",
            "--gpu: wanted a known GPU, such as h200 or 'NVIDIA H200'",
        ),
        ("compile --shapes 64x64 -o {file}s --gpu '' --arch sm_80 --sms 9", "--gpu: wanted a known GPU"),
        (f"tune --shapes 64x{2**31} --m 1", f"--shapes: wanted sizes of at most {2**31 - 1}, got {2**31}"),
        (f"tune --shapes {'9' * 5000}x64 --m 1", f"--shapes: wanted sizes of at most {2**31 - 1}, got 999"),
        (f"compile --shapes 64x64 --m 1..{'9' * 5000} -o {{file}}s", "--m: wanted numbers from 1 and ranges like"),
        ("inspect {pipe}", "/pipe' is neither a file nor a folder; what can be loaded: a GGUF file"),
    ],
)
def test_mistakes_are_sentences(capsys, tmp_path, arguments, message):
    if "bench" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (tmp_path / "file").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "pipe")
    words = shlex.split(arguments.format(**{name: tmp_path / name for name in ("file", "binary", "pipe")}))
    code = 1 if any(each in message for each in FAILURES) else 2
    _, err = run(capsys, *words, code=code)
    last = err.splitlines()[-1]
    assert last.startswith("w4gemm: error: ") and message in last and "Errno" not in last and "codec" not in last


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


@pytest.mark.parametrize(
    "name, exact, capability, sms",
    [
        ("H100", "NVIDIA H100 80GB HBM3", (9, 0), 132),
        ("h800", "NVIDIA H800", (9, 0), 132),
        ("h20", "NVIDIA H20", (9, 0), 78),
        ("gb200", "NVIDIA GB200", (10, 0), 152),
        ("b300", "NVIDIA B300", (10, 3), 148),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000", (12, 0), 188),
        ("rtx 4090", "NVIDIA GeForce RTX 4090", (8, 9), 128),
        ("L4", "NVIDIA L4", (8, 9), 58),
        ("a40", "NVIDIA A40", (8, 6), 84),
        ("A30", "NVIDIA A30", (8, 0), 56),
        ("nvidia h100 pcie", "nvidia h100 pcie", (9, 0), 114),
    ],
)
def test_gpus_by_name(capsys, name, exact, capability, sms):
    gpu = gpu_named(name)
    assert (gpu.name, gpu.capability, gpu.sms) == (exact, capability, sms) and gpu.bandwidth and gpu.shared_memory
    out, _ = run(capsys, "explain", "16", "512", "512", "--device", name, "--rows", "1")
    assert out.startswith(f"{exact}, compute capability") and "chosen: sm" in out


def test_a_gpu_without_kernels_is_known_too(capsys):
    out, _ = run(capsys, "explain", "16", "512", "512", "--device", "t4", code=1)
    assert out.startswith("NVIDIA T4, compute capability 7.5") and "needs compute capability 8.0 or newer" in out


def test_every_gpu_of_the_support_page_is_known():
    cells = re.findall(
        r"^\| ((?:[HABLR][^|]*\(\d+\.\d\);? ?)+)\|", (ROOT / "docs/support.md").read_text(), re.MULTILINE
    )
    names = {name.strip() for cell in cells for name in re.split(r",|;|\(\d+\.\d\)", cell)} - {""}
    assert len(names) >= 15 and all(gpu_named(name) for name in names)


def test_json_of_the_commands_that_report(capsys):
    def facts(*arguments):
        return json.loads(run(capsys, *arguments, "--json")[0])

    said = facts("explain", "16", "1024", "512", "--device", "h200", "--rows", "3")
    assert said["chosen"].startswith("sm90_") and len(said["configs"]) == 3 and said["kernels"]["sm90_decode"] == ""
    assert said["limit_us"] == said["roofline_us"] + 2.0
    assert said["predicted_share"] == pytest.approx(said["limit_us"] / said["configs"][0]["predicted_us"])
    assert not facts("explain", "16", "64", "64", "--device", "h200", "--why", "1x1x1_1x1x1_coop")["verdicts"][0][
        "legal"
    ]
    blocks = ("explain", "1024", "4096", "4096", "--device", "h200", "--format", "e4m3_g128_b128", "--dtype")
    said = [facts(*blocks, "float8_e4m3fn", "--rows", "1", *flags) for flags in ([], ["--block-scales"])]
    assert [each["chosen"].split("/")[0] for each in said] == ["sm90_fp8_gemm", "sm90_fp8_block_gemm"]
    said = facts("gemm", "4", "96", "64", "--device", "cpu")
    assert said["us"] > 0 and said["relative_error"] < 1e-2 and said["config"].startswith("cpu_mixed_gemm/")
    assert facts("gemm", "4", "96", "64", "--device", "cpu", "--profile")["kept"]
    (tuned,) = facts("tune", "--shapes", "64x64", "--m", "2", "--device", "cpu")["tuned"]
    assert tuned["us"] > 0 and (tuned["m"], tuned["n"]) == (2, 64)
    assert len(facts("cache", "list")["tuned"]) == 2 < len(facts("cache", "list", "--all")["tuned"])


def test_the_page_has_what_explain_says_of_kernels(capsys):
    """Its choice is the cost model's, which may change; what the kernels can run may not."""
    page = (ROOT / "docs/commands.md").read_text()
    command, shown = re.search(r"\$ w4gemm (explain .*--rows 6)\n(.*?)  chosen: ", page, re.DOTALL).groups()
    out, _ = run(capsys, *command.split())
    assert out.startswith(shown) and shown.count(" configs\n") >= 3


def test_a_home_folder_in_quotes(tmp_path, monkeypatch, capsys):
    """No shell reads a container's list of arguments either."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run(capsys, "cache", "export", "~/tuned.jsonl")
    assert (tmp_path / "tuned.jsonl").exists() and not (tmp_path / "~").exists()
    with pytest.raises(SystemExit):
        main(["cache", "export", "~nobody-has-this-name/tuned.jsonl"])
    assert "got '~nobody-has-this-name/tuned.jsonl', and there is no such home folder" in capsys.readouterr().err


def test_why_says_for_how_many_tokens(capsys):
    """Up to 256 tokens a config is ranked for the end of the interval."""
    problem = ("explain", "--n", "4096", "--k", "4096", "--device", "h200", "--why", "192x128x128_1x1x1_coop", "--m")
    out, _ = run(capsys, *problem, "170")
    assert "\n  m 170 is planned as m 192\n" in out and "planned as" not in run(capsys, *problem, "192")[0]


def test_a_config_is_refused_before_anything_is_printed(capsys):
    for arguments in ("explain --m 4 --n 96 --k 64 --device cpu --why foo", "gemm 4 96 64 --device cpu --config foo"):
        out, err = run(capsys, *arguments.split(), code=2)
        assert not out and err.startswith("w4gemm: error: config: wanted <tile_m>x")
    _, err = run(capsys, "gemm", "4", "96", "64", "--device", "cpu", "--config", "2x128x64_1x1x1_coop", code=2)
    assert "is not legal" in err


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, RuntimeError])
def test_a_gpu_without_enough_memory(error):
    text = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
    assert sentence(error(text)) == "not enough memory; 20.00 GiB could not be allocated"
    with (
        pytest.raises(MemoryError, match="^M: wanted less; 20.00 GiB could not") as raised,
        memory_for("M: wanted less"),
    ):
        raise error(text)
    assert sentence(raised.value) == str(raised.value) and isinstance(raised.value.__cause__, error)
    assert sentence(RuntimeError("a defect")) is None
    with pytest.raises(RuntimeError, match="a defect"), memory_for("M: wanted less"):
        raise RuntimeError("a defect")


def test_traceback_shows_where_memory_was_missing():
    with pytest.raises(MemoryError) as raised:
        main(["--traceback", "gemm", "4", "2000000000", "2000000000", "--device", "cpu"])
    assert "can't allocate memory" in str(raised.value.__cause__)


def test_an_operating_systems_error_names_its_paths():
    assert sentence(FileNotFoundError(2, "No such file or directory", "/nope")) == "/nope: No such file or directory"
    assert sentence(OSError(18, "Invalid cross-device link", "a", None, b"b")) == "a -> b: Invalid cross-device link"
    assert sentence(OSError("said whole")) == "said whole"


def test_one_is_singular():
    assert [counted(n, "problem") for n in (0, 1, 2)] == ["0 problems", "1 problem", "2 problems"]


@pytest.mark.parametrize(
    "arguments",
    [
        "compile --shapes 64x64 -o kernels --top 0",
        "compile --shapes 64x64 -o kernels --workers -1",
        "compile --shapes 64x64 -o kernels --sms -5",
        "tune --shapes 64x64 --device cpu --top -2",
        "gemm 4 64 64 --device cpu --profile --top x",
    ],
)
def test_counts_are_from_one(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert f"wanted an integer >= 1, got {arguments.split()[-1]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        "compile --shapes 64x64 --m 1 -o ''",
        "convert nowhere ''",
        "cache export ''",
        "cache import ''",
    ],
)
def test_an_empty_string_is_not_the_current_folder(capsys, monkeypatch, tmp_path, arguments):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(shlex.split(arguments))
    assert stopped.value.code == 2
    assert "wanted a path, got an empty string" in capsys.readouterr().err


def test_one_question_about_a_config_at_a_time(capsys):
    config = "1x128x64_1x1x1_coop"
    with pytest.raises(SystemExit):
        main(["explain", "--m", "4", "--n", "96", "--k", "64", "--device", "cpu", "--config", config, "--why", config])
    assert "argument --why: not allowed with argument --config" in capsys.readouterr().err


def test_explain_where_nothing_runs(capsys):
    arguments = ("--m", "5", "--n", "512", "--k", "512", "--device", "h200", "--format", "int4_g128_e4m3")
    out, _ = run(capsys, "explain", *arguments, code=1)
    assert all(text in out for text in ("int4_g128_e4m3", "float8_e4m3fn", "torch.bfloat16")), "wanted and got"
    assert "repack('mma16')" not in out and "chosen once" not in out


def test_explain_forced_and_shortened(capsys):
    arguments = ("explain", "--m", "16", "--n", "1024", "--k", "1024", "--device", "h200", "--rows", "2")
    last = w4gemm.configs(w4gemm.GemmProblem(16, 1024, 1024, torch.bfloat16, w4gemm.WeightFormat(), "mma16"))[-1]
    out, _ = run(capsys, *arguments, "--config", last)
    assert f"chosen: {last} (forced)" in out
    assert len(out.split("\n\n")[1].splitlines()) == 4, "the header, two, and the chosen one"
    _, err = run(capsys, *arguments, "--config", "1x1x1_1x1x1_coop", code=2)
    assert "is not legal" in err
    out, _ = run(capsys, "explain", "--m", "8", "--n", "64", "--k", "64", "--device", "cpu")
    assert "only order the configs here" in out


def test_resources_are_found_when_they_are_asked_for(monkeypatch):
    """They take nine tenths of the time of an explanation, which compiling and tuning want without them."""
    asked = []
    of_config = type(kernel_named("sm90_decode")).resources
    monkeypatch.setattr(HopperKernel, "resources", lambda *args: asked.append(args) or of_config(*args))
    problem = w4gemm.GemmProblem(1, 6144, 4096, torch.bfloat16, w4gemm.WeightFormat(), "mma16")
    first = w4gemm.explain(problem).candidates[0]
    assert not asked and first.resources.stages and len(asked) == 1


def test_resources_fit_the_device():
    for m in (1, 64, 4096):
        problem = w4gemm.GemmProblem(m, 6144, 4096, torch.bfloat16, w4gemm.WeightFormat(), "mma16")
        for candidate in w4gemm.explain(problem).candidates:
            actual = candidate.resources
            if candidate.kernel == "dequantize_gemm":  # the launch is cuBLAS's
                assert actual == (0, None, None, None, None, None)
                continue
            assert 0 < actual.memory <= problem.device.shared_memory
            assert actual.threads <= 1024 and actual.threads % 32 == 0 and actual.registers <= 255
            assert actual.stages >= 1 and actual.ctas >= 1
            assert any(actual.waves == pytest.approx(actual.ctas / (132 * per_sm), abs=0.01) for per_sm in (1, 2))


def test_gemm(capsys, folder):
    out, _ = run(capsys, "gemm", "4", "96", "64", "--device", "cpu")
    assert "(heuristic): " in out and "relative error" in out and "no roofline is known" in out
    other = choice.configs(choice.explain(_cpu_problem()).problem)[1]
    out, _ = run(capsys, "gemm", "4", "96", "64", "--device", "cpu", "--config", other)
    assert f"{other} (forced): " in out
    out, _ = run(capsys, "gemm", "4", "96", "64", "--device", "cpu", "--profile")
    assert f"{len(choice.configs(_cpu_problem()))} configs" in out
    assert "the heuristic's first guess" in out and "kept for m 3 to 4" in out
    assert len((folder / table.USER_FILE).read_text().splitlines()) == 1
    out, _ = run(capsys, "gemm", "4", "96", "64", "--device", "cpu")
    assert "(tuned): " in out
    _, err = run(capsys, "gemm", "0", "96", "64", code=2)
    assert "M, N, K: wanted numbers from 1 to 2147483647, got 0, 96, 64" in err


def _cpu_problem() -> w4gemm.GemmProblem:
    return w4gemm.GemmProblem(8, 96, 64, torch.float32, w4gemm.WeightFormat(), "cpu", device=w4gemm.Device("cpu"))


def test_tune_and_cache(capsys, folder, tmp_path):
    shapes = tmp_path / "shapes.txt"
    shapes.write_text("# two layers\n96 64\n\n64 96 int4_g32_zint bias  # with a bias\n")
    arguments = ("tune", "--shapes", str(shapes), "--m", "5..16", "--device", "cpu")
    out, err = run(capsys, *arguments)
    assert len(out.splitlines()) == 4 and "m 16, n 64, k 96: cpu_mixed_gemm/" in out
    assert "4 of 4 measured" in err and "geometric mean" in err and str(folder) in err
    out, err = run(capsys, *arguments)
    assert not out and "0 of 4 measured" in err and "with a record already: 4 (--force measures again)" in err

    out, _ = run(capsys, "cache", "path")
    assert out == f"{folder}\n"
    out, _ = run(capsys, "cache", "list")
    assert "0 compiled kernels" in out and "tuned.jsonl, 4 configs" in out and "(stale)" not in out
    assert f"with {counted(torch.get_num_threads(), 'thread')}, float32 x int4_" in out
    more, _ = run(capsys, "cache", "list", "--all")
    assert out.splitlines()[-1].startswith("shipped: ") and len(more.splitlines()) > 100 + len(out.splitlines())
    exported, _ = run(capsys, "cache", "export")
    assert exported == (folder / table.USER_FILE).read_text()
    run(capsys, "cache", "export", str(tmp_path / "out.jsonl"))
    _, err = run(capsys, "cache", "clear")
    assert "deleted 4 tuned configs" in err and not (folder / table.USER_FILE).exists()
    _, err = run(capsys, "cache", "import", str(tmp_path / "out.jsonl"))
    assert "added 4 tuned configs" in err and table.read(folder / table.USER_FILE)
    _, err = run(capsys, "cache", "import", str(tmp_path / "out.jsonl"))
    assert "added 0 tuned configs" in err and "(there already: 4)" in err
    assert (folder / table.USER_FILE).read_text() == exported
    (tmp_path / "out.jsonl").write_text("what\n" + exported)
    _, err = run(capsys, "cache", "import", str(tmp_path / "out.jsonl"), code=1)
    assert "skipped 1 unreadable line; line 1" in err
    stale = json.loads(exported.splitlines()[0]) | {"revision": 0}
    (folder / table.USER_FILE).write_text(json.dumps(stale) + "\n")
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


def test_a_full_disk_holds_no_tuned_configs(capsys, folder, monkeypatch):
    """The empty table is there then."""

    def full(path: Path, records: object) -> None:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table, "append", full)
    _, err = run(capsys, "tune", "--shapes", "64x64", "--m", "1", "--device", "cpu")
    assert (folder / table.USER_FILE).exists() and "1 of 1 measured" in err and "kept in" not in err


def test_many_sizes_are_longer_than_a_path_may_be():
    sizes = ",".join(f"{64 * i}x64" for i in range(1, 65))
    assert len(sizes) > 255
    args = problems.argparse.Namespace(model=None, shapes=sizes, format=None)
    assert [layer.n for layer in problems.parse_layers(args, Device("cpu"))] == [64 * i for i in range(1, 65)]


def test_files_may_be_pipes(capsys, folder):
    def pipe(text: str) -> str:
        out, into = os.pipe()
        with os.fdopen(into, "w") as f:
            f.write(text)
        return f"/dev/fd/{out}"

    tune = ("tune", "--m", "1", "--device", "cpu", "--shapes")
    run(capsys, *tune, pipe("96 64\n"))
    exported, _ = run(capsys, "cache", "export")
    run(capsys, "cache", "clear")
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


def test_bench_passes_arguments_on(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", "run", "--shapes", "layers", "--help"])
    assert exit.value.code == 0 and "--impl" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit:
        main(["bench", "grouped", "--help"])
    assert exit.value.code == 0 and "--routing" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert "bench run measures on a GPU" in run(capsys, "bench", "run", "--m", "1", code=1)[1]
        assert "bench grouped measures on a GPU" in run(capsys, "bench", "grouped", code=1)[1]
        out, _ = run(capsys, "bench", "unknown", "--dry", "--kinds", "w4a16", "--layers", "1")
        assert "w4a16: 4 points, 4 variants to compile" in out
    with pytest.raises(SystemExit) as exit:
        main(["info", "--impl", "x"])
    assert exit.value.code == 2 and "unrecognized arguments: --impl x" in capsys.readouterr().err


def test_bench_wants_a_checkout(monkeypatch, capsys, tmp_path):
    from w4gemm.cli import bench

    monkeypatch.setattr(bench, "_CHECKOUT", tmp_path)
    for action in ("report", "run"):  # also before anything is said about a GPU
        assert "run w4gemm from a checkout" in run(capsys, "bench", action, code=1)[1]
