"""bench.gpu_steps: each step's command parses, and what a time limit, a failure or a second GPU does to steps."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sample import Shard, is_conformance

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.gpu_steps import __main__ as gpu_steps  # noqa: E402
from bench.gpu_steps import process  # noqa: E402
from bench.gpu_steps.process import MARK  # noqa: E402
from bench.gpu_steps.schedule import Busy, next_start  # noqa: E402
from bench.gpu_steps.steps import SHARDS, STEPS, Step  # noqa: E402

GPUS = [gpu_steps.Gpu("0", "NVIDIA H200")]


def test_every_command_parses():
    """The shards differ by a number: one stands for all."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_steps", "--dry-run", "--skip", "tests-[2-9]-*", "tests-1[0-9]-*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, [line for line in lines if not line.endswith(": parses")] or done.stderr[-800:]
    assert len(lines) == len(STEPS) - (SHARDS - 1)


WRONG = {
    "python -m fuzz.run --device gpu": "invalid choice: 'gpu'",
    "python -m bench.engine --model llama-4": "llama-4",
    "python -m bench.no_such_module": "No module named",
    "python tests/no_such_file.py": "there is no tests/no_such_file.py",
    "python -m pytest -q --no-such-option": "unrecognized arguments: --no-such-option",
}


def test_a_command_that_does_not_parse_is_found():
    program = (
        "import sys; from bench.gpu_steps.parsing import problem_of; from bench.gpu_steps.steps import Step\n"
        "for command in sys.argv[1:]: print(ascii(problem_of(Step('a', command, 1, '', ''))))"
    )
    said = subprocess.run([sys.executable, "-c", program, *WRONG], cwd=ROOT, capture_output=True, text=True, check=True)
    for reason, line in zip(WRONG.values(), said.stdout.splitlines(), strict=True):
        assert reason in ast.literal_eval(line)


def sections(page: Path) -> set[str]:
    """Return the names by which links point to the sections of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_step_is_wanted_by_a_section_that_there_is():
    for step in STEPS:
        page, _, section = step.wanted_by.partition("#")
        assert section in sections(ROOT / page), step.name
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_the_pages_and_the_steps_have_the_same_commands():
    """The commands of "To be run next", and those of the release's steps 5 and 6."""
    steps = [" ".join(shlex.split(step.command)) for step in STEPS]
    page = (ROOT / "docs/measured/engine.md").read_text()
    (block,) = re.findall(r"## To be run next.*?```console\n(.*?)```", page, re.DOTALL)
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").split("$ ") if line]
    assert commands
    for command in commands:
        assert any(set(command) <= set(step.split()) for step in steps), " ".join(command)
    release = [
        line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if re.match(r"\| [56] \| on ", line)
    ]
    assert len(release) == 2 and all("bench.gpu_steps" in line for line in release)


def fake(name: str, program: str, seconds: int = 20, **others) -> Step:
    """A step that runs a program in Python, with ``folder`` and ``rows`` for its paths."""
    start = "import os, sys, time; folder, rows = sys.argv[1:]\n"
    command = shlex.join(["python", "-c", start + program]) + " {folder} {rows}"
    return Step(name, command, seconds, "rows.jsonl", "", **others)


def run(steps: list[Step], folder: Path, seconds: float = 60, gpus=GPUS) -> dict[str, gpu_steps.Outcome]:
    return {o.step.name: o for o in gpu_steps.run(steps, gpus, seconds, folder / "work", folder / "out")}


def left_over() -> list[str]:
    """Return the processes of steps that this process has started."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found += re.findall(rf"{MARK}=[^\0]* of {os.getpid()} at", (folder / "environ").read_text())
    return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.delenv("W4GEMM_CACHE_DIR", raising=False)
    monkeypatch.setattr(gpu_steps, "LAST_S", 0)
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    monkeypatch.setattr(gpu_steps.os, "cpu_count", lambda: 16)


def test_what_passes_fails_or_is_left_out(tmp_path, capsys):
    found = run(
        [
            fake("passes", "open(rows, 'a').write('{}\\n'); print('two wrong'); print()"),
            fake("fails", "sys.exit('a reason')"),
            fake("lacks", "", needs=("no_such_package",)),
            fake("of-two", "", gpus=2),
            fake("elsewhere", "", gpu="H100"),
            fake("sees", "print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['W4GEMM_CACHE_DIR'])", alone=True),
        ],
        tmp_path,
    )
    assert {name: (o.outcome, o.last_line) for name, o in found.items()} == {
        "passes": ("passed", "two wrong"),
        "fails": ("failed with exit status 1", "a reason"),
        "lacks": ("left out: no no_such_package", ""),
        "of-two": ("left out: wants 2 GPUs", ""),
        "elsewhere": ("left out: for H100", ""),
        "sees": ("passed", f"0 {tmp_path}/work/kernels-of-timed-steps"),
    }
    with tarfile.open(tmp_path / "out/steps.tgz") as tar:
        packed = {name.partition("/")[2]: tar.extractfile(name).read() for name in tar.getnames()}
    assert packed["passes/rows.jsonl"] == b"{}\n" and b"two wrong" in packed["passes/log"]
    assert {"fails/log", "sees/log"} < packed.keys()
    assert "fails: failed with exit status 1 after" in capsys.readouterr().out


def test_a_step_that_hangs_is_interrupted_and_then_killed(tmp_path):
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(99)"
    tell = "try:\n  print('works', flush=True); time.sleep(99)\nexcept KeyboardInterrupt:\n  print('7 rows so far')"
    for seconds in (3, 15, 75):  # on a busy machine they may not have begun before they are interrupted
        began = time.monotonic()
        found = run([fake("deaf", ignore, seconds), fake("tells", tell, seconds)], tmp_path / str(seconds), 200)
        assert {o.outcome for o in found.values()} == {"ran out of time"}
        said = {name: o.last_line for name, o in found.items()}
        if said == {"tells": "7 rows so far", "deaf": "deaf"}:
            break
    else:
        raise AssertionError(said)
    assert time.monotonic() - began < 90, "less than they would sleep"


def test_nothing_that_a_step_started_outlives_it(tmp_path):
    """A child in a session of its own, of a step that ends and of one that hangs."""
    spawn = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
    )
    found = run([fake("ends", spawn), fake("hangs", spawn + "time.sleep(99)", 4)], tmp_path)
    assert (found["ends"].outcome, found["hangs"].outcome) == ("passed", "ran out of time")
    assert not left_over()


def test_rows_are_packed_while_steps_run(tmp_path, monkeypatch):
    """The step itself waits until the archive has its row."""
    monkeypatch.setattr(gpu_steps, "PACKED_EVERY_S", 0.3)
    wait = (
        "import pathlib, tarfile; open(rows, 'a').write('{}\\n')\n"
        "archive = pathlib.Path(folder).parents[2] / 'out/steps.tgz'\n"
        "while not archive.exists() or not any(n.endswith('rows.jsonl') for n in tarfile.open(archive).getnames()):\n"
        "  time.sleep(0.1)\n"
        "print('packed')"
    )
    assert run([fake("waits", wait)], tmp_path)["waits"].last_line == "packed"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["steps.tgz"]


def test_no_step_starts_without_time_for_it_and_none_runs_past_the_end(tmp_path):
    began = time.monotonic()
    steps = [
        fake("long", "", 30),
        fake("cut", "print(1, flush=True); time.sleep(99)", 30, least=1),
        fake("fits", "", 3),
    ]
    found = run(steps, tmp_path, seconds=6)
    assert time.monotonic() - began < 90, "less than a step would sleep"
    assert {name: o.outcome for name, o in found.items()} == {
        "long": "no time left",
        "cut": "ran out of time",
        "fits": "passed",
    }


def test_an_interrupted_run_kills_its_steps_and_packs_what_there_is(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(process.Running, "ended", stop)
    with pytest.raises(KeyboardInterrupt):
        run([fake("runs", "time.sleep(99)")], tmp_path)
    assert (tmp_path / "out/steps.tgz").exists()
    assert not left_over()


def shared(name: str, seconds: int = 10, cores: int = 2) -> Step:
    return Step(name, "", seconds, "", "", cores=cores)


def alone(name: str, seconds: int = 10, gpus: int = 1) -> Step:
    return Step(name, "", seconds, "", "", alone=True, gpus=gpus)


def start(waiting, busy=(), gpus="0", cores=16, now=0.0):
    found = next_start(waiting, [Busy(step, tuple(on), end) for step, on, end in busy], list(gpus), cores, now)
    return found and (found.step.name, "".join(found.gpus))


def test_correctness_steps_share_a_gpu_and_times_have_one_to_themselves():
    a, t = shared("a"), alone("t")
    assert start([shared("b")], [(a, "0", 10)]) == ("b", "0")
    assert start([t], [(a, "0", 10)]) is None and start([a], [(t, "0", 10)]) is None
    assert start([t], [(a, "0", 10)], "01") == ("t", "1")
    assert start([shared("b")], [(a, "1", 10)], "01") == ("b", "1"), "the other GPU stays free for times"
    assert start([alone("both", gpus=2)], [(a, "0", 10)], "01") is None
    assert start([alone("both", gpus=2)], (), "01") == ("both", "01")


def test_a_step_that_waits_keeps_its_gpus_but_for_what_ends_before():
    busy = [(shared("a"), "0", 10)]
    assert start([alone("t"), shared("long", 11), shared("short", 9)], busy) == ("short", "0")
    assert start([alone("t"), shared("long", 11)], busy) is None
    assert start([alone("t", gpus=2), alone("long", 11), alone("short", 9)], busy, "01") == ("short", "1")


def test_cores_are_not_taken_twice():
    busy = [(shared("a", cores=12), "0", 10)]
    assert start([shared("b", cores=8), shared("c", cores=4)], busy) == ("c", "0")
    assert start([shared("d", cores=99)]) == ("d", "0"), "or it would never start"


def test_steps_are_chosen_by_patterns():
    names = [step.name for step in gpu_steps.chosen(["sanitize-*", "load"], ["*-racecheck"])]
    assert names == ["sanitize-synccheck-initcheck", "load"]
    with pytest.raises(SystemExit, match="wanted names that --list prints, or patterns of them, got fuz"):
        gpu_steps.chosen(["fuz"])


def test_without_git_the_commit_must_be_given(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_steps, "ROOT", tmp_path)
    monkeypatch.delenv("W4GEMM_COMMIT", raising=False)
    with pytest.raises(SystemExit, match="W4GEMM_COMMIT: wanted the commit of"):
        gpu_steps.main([])


def test_shards_are_all_tests_each_once():
    """And each shard has the conformance suite last, with neighbours together."""
    items = [SimpleNamespace(path=Path("tests", "conformance" if i % 3 else "", "test_a.py"), i=i) for i in range(1000)]
    shards = [Shard.parse(f"{i}/7").of(items) for i in range(1, 8)]
    assert sorted(item.i for shard in shards for item in shard) == list(range(1000))
    assert max(map(len, shards)) - min(map(len, shards)) <= 17
    for shard in shards:
        suite = [is_conformance(item) for item in shard]
        assert suite == sorted(suite) and 47 <= suite.index(True) <= 48
        first = [item.i for item in shard if is_conformance(item)][:16]
        assert first == [i for i in range(first[0], first[-1] + 1) if i % 3]
    for text in ("0/7", "8/7", "7", "a/b"):
        with pytest.raises(Exception, match=f"wanted I/N with I from 1 to N, like 1/12, got '{text}'"):
            Shard.parse(text)
