"""The commands around choosing: explain, gemm, bench; what all commands say of mistakes."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch

import w4gemm
from w4gemm import choice
from w4gemm.choice import table
from w4gemm.cli.__main__ import main
from w4gemm.console.errors import memory_for, sentence
from w4gemm.console.progress import counted
from w4gemm.core.problem import gpu_named
from w4gemm.kernels import KERNELS, Resources, kernel_named
from w4gemm.kernels.hopper import HopperKernel

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.usefixtures("cache_folder")


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
        assert re.search(rf"^  [\w, ]*\b{kernel.name}\b.*: ", out, re.MULTILINE)


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
        ("explain 4 64 64 --device mi300x", "got 'mi300x'; AMD GPUs are not supported"),
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
        ("convert {file} {file}", "OUTPUT: wanted a folder, which is made if needed, got the file '"),
        ("convert {file} {file}/x/y", "OUTPUT: wanted a folder, which is made if needed, got the file '"),
        ("compile --shapes 64x64 --m 1 -o {link}", "--output: wanted a folder, which is made if needed, got the link"),
        (f"tune --shapes 64x64 --m 1,{2**31}", f"--m: wanted numbers of at most {2**31 - 1}, got '{2**31}'"),
        ("cache export {file}/x", "/file/x: Not a directory"),
        ("cache export {file}/..", "/file/..: Not a directory"),
        ("cache import {binary}", "FILE: wanted a text file in UTF-8, got '"),
        ("tune --shapes {binary} --device cpu", "--shapes: wanted a text file in UTF-8, got '"),
        (
            "gemm 2000000000 64 1048576 --device cpu",
            "M, N, K: wanted sizes that fit the memory of the CPU, got 2000000000, 64, 1048576; 7812500.0 GiB",
        ),
        ("gemm 4 2000000000 2000000000 --device cpu", "got 4, 2000000000, 2000000000; 18626451492.3 GiB could not be"),
        # Linux would grant these numbers, and end the process once they are written
        ("gemm 1 4000000 1000000 --device cpu", "got 1, 4000000, 1000000; 18626.5 GiB could not be allocated"),
        ("gemm 4 2000000000 2000000000 --device cpu --profile", "M, N, K: wanted sizes that fit the memory of the CPU"),
        (
            "tune --shapes 2000000000x2000000000 --m 1 --device cpu",
            "fit the memory of the CPU, got '2000000000x2000000000'; 186",
        ),
        ("compile --shapes 64x64 -o {file}s --gpu h200 --arch sm_80", "--arch: wanted the target of NVIDIA H200"),
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
        ("bench grouped", "bench grouped measures on a GPU"),
        ("generate '' --device cpu", "PROMPT: it is empty"),
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
    (tmp_path / "link").symlink_to("nowhere")
    words = shlex.split(arguments.format(**{name: tmp_path / name for name in ("file", "binary", "pipe", "link")}))
    code = 1 if any(each in message for each in FAILURES) else 2
    _, err = run(capsys, *words, code=code)
    last = err.splitlines()[-1]
    assert last.startswith("w4gemm: error: ") and message in last and "Errno" not in last and "codec" not in last


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
        ("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 128),
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


def test_explain_says_what_float32_sums_take(capsys):
    sizes = ("4096", "4096", "4096", "--device", "h200", "--dtype", "float8_e4m3fn", "--rows", "1")
    sums = "scales multiply float32 sums, beside which tensor cores wait: "
    out, _ = run(capsys, "explain", *sizes, "--format", "int4_g128")
    assert "roofline: 88.7 us for its operations, 90.7 us with a launch" in out and f"{sums}22.2 us more" in out
    assert sums not in run(capsys, "explain", *sizes, "--format", "int4_g128_e4m3")[0], "scales are in the weights"


def test_json_of_the_commands_that_report(capsys):
    def facts(*arguments):
        return json.loads(run(capsys, *arguments, "--json")[0])

    said = facts("explain", "16", "1024", "512", "--device", "h200", "--rows", "3")
    assert said["chosen"].startswith("sm90_") and len(said["configs"]) == 3 and said["kernels"]["sm90_decode"] == ""
    assert said["limit_us"] == said["roofline_us"] + 2.0 and said["sums_us"] == 0
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
    out, _ = run(capsys, *problem, "190")
    assert "\n  m 190 is planned as m 192\n" in out and "planned as" not in run(capsys, *problem, "192")[0]


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
        main(["--traceback", "gemm", "2000000000", "64", "1048576", "--device", "cpu"])
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
    "arguments", ["compile --shapes 64x64 --m 1 -o ''", "convert nowhere ''", "cache export ''", "cache import ''"]
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
    assert "the cost model only orders methods on a CPU" in out
    assert re.search(r"^\*1 +cpu_mixed_gemm/\S+ +(compiled|sum|dense|tiles) +\d+ KiB$", out, re.MULTILINE)


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
                assert actual == Resources(0)
                continue
            assert 0 < actual.memory <= problem.device.shared_memory
            assert actual.threads <= 1024 and actual.threads % 32 == 0 and actual.registers <= 255
            assert actual.stages >= 1 and actual.ctas >= 1
            assert any(actual.waves == pytest.approx(actual.ctas / (132 * per_sm), abs=0.01) for per_sm in (1, 2))


def cpu_problem() -> w4gemm.GemmProblem:
    return w4gemm.GemmProblem(8, 96, 64, torch.float32, w4gemm.WeightFormat(), "cpu", device=w4gemm.Device("cpu"))


def test_gemm(capsys, cache_folder):
    out, _ = run(capsys, "gemm", "4", "96", "64", "--device", "cpu")
    assert "(heuristic): " in out and "relative error" in out and "no roofline is known" in out
    other = choice.configs(choice.explain(cpu_problem()).problem)[1]
    out, _ = run(capsys, "gemm", "4", "96", "64", "--device", "cpu", "--config", other)
    assert f"{other} (forced): " in out
    out, _ = run(capsys, "gemm", "4", "96", "64", "--device", "cpu", "--profile")
    assert f"{len(choice.configs(cpu_problem()))} configs" in out
    assert "the heuristic's first guess" in out and "kept for m 3 to 4" in out
    assert len((cache_folder / table.USER_FILE).read_text().splitlines()) == 1
    out, _ = run(capsys, "gemm", "4", "96", "64", "--device", "cpu")
    assert "(tuned): " in out
    _, err = run(capsys, "gemm", "0", "96", "64", code=2)
    assert "M, N, K: wanted numbers from 1 to 2147483647, got 0, 96, 64" in err


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--json info", "--json; options of a command stand behind it: w4gemm info --json"),
        ("explain --m 16,32 --n 64 --k 64", "--m: wanted one integer, got 16,32"),
    ],
)
def test_what_the_parser_says(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        main(arguments.split())
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_bench_wants_a_checkout(monkeypatch, capsys, tmp_path):
    from w4gemm.cli import bench

    monkeypatch.setattr(bench, "_CHECKOUT", tmp_path)
    for action in ("report", "run"):  # also before anything is said about a GPU
        assert "run w4gemm from a checkout" in run(capsys, "bench", action, code=1)[1]
