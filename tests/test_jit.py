"""The jit: compile once, keep in memory and on disk, survive every damage to the disk."""

from __future__ import annotations

import functools
import gc
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import w4gemm
from sass import disassemble
from tiny_kernel import tiny
from w4gemm import GemmConfig, WeightFormat
from w4gemm.core import environment
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.jit import Unit, adopt, compiled, disk, library, object_code
from w4gemm.jit import compile as jit
from w4gemm.jit.pool import CompilePool, _ended, usable_processors
from w4gemm.kernels import kernel_named

pytest.importorskip("cutlass")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty disk cache, which gets objects only, and an empty memory cache; test_library.py has libraries."""
    monkeypatch.setattr(library, "_linker", lambda: None)
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_memory", {})
    return tmp_path / "cache"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the objects that are compiled from now on."""
    names: list[str] = []
    build = jit._build
    monkeypatch.setattr(jit, "_build", lambda unit: (names.append(disk.entry_name(unit)), build(unit))[1])
    return names


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do as a new process: an empty memory cache."""
    monkeypatch.setattr(jit, "_memory", {})


def test_memory_then_disk_then_compile(folder, builds, monkeypatch):
    unit, made = tiny(), []
    unit = replace(unit, program=lambda make=unit.program: (made.append(1), make())[1])
    first = compiled(unit)
    assert callable(first) and len(builds) == 1
    assert compiled(unit) is first

    forget(monkeypatch)
    assert callable(compiled(unit))
    assert len(made) == 1, "what is in memory or on disk must not make the program again"
    assert len(builds) == 1, "found on disk"
    assert [f.name for f in folder.iterdir()] == builds, "one object and no temporary files"


def test_an_object_is_never_taken_on_another_architecture(folder, builds, monkeypatch):
    """Not even where the kernel, its compile key and its code are the same."""
    devices = [Device("cuda", "some GPU", capability, 100, 101376) for capability in ((8, 6), (8, 7), (8, 9))]
    problems = [GemmProblem(1, 64, 64, torch.bfloat16, WeightFormat(), "mma16", device=d) for d in devices]
    kernel, config = kernel_named("sm80_mixed_gemm"), GemmConfig(8, 64, 256)
    units = [kernel.unit(problem, config) for problem in problems]
    assert len({unit.key for unit in units}) == 1
    functions = [compiled(unit) for unit in units]
    assert len(set(functions)) == 3 and [name.split("-")[1] for name in builds] == ["sm_86", "sm_87", "sm_89"]
    forget(monkeypatch)
    for unit, name in zip(units, tuple(builds), strict=True):
        code = object_code(unit)
        assert code == disk.read(name) and all(code != disk.read(other) for other in builds if other != name)
    assert len(builds) == 3, "found on disk"


def test_what_a_unit_is():
    """Equal units share an object, whatever makes their programs; jit knows of nothing else."""
    one = tiny()
    assert one == replace(one, program=test_what_a_unit_is) and hash(one) == hash(tiny())
    assert len({one, tiny(3.0), tiny(arch="sm_80"), replace(one, name="huge")}) == 4
    assert pickle.loads(pickle.dumps(one)) == one
    for file in Path(jit.__file__).parent.glob("*.py"):
        assert not re.search(r"w4gemm\.(kernels|problem|config)", file.read_text()), file


def test_takes_positional_arguments_and_checks_them(folder):
    scale = compiled(tiny())
    x = torch.ones(3)
    with pytest.raises(ValueError, match="device_type=cuda"):  # the compiled check; nothing was launched
        scale(x, x)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text", "a folder"])
def test_damage_is_a_miss(folder, builds, monkeypatch, caplog, damage):
    compiled(tiny())
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    if damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        flipped = whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]
        texts = {"truncated": whole[:-100], "flipped": flipped, "empty": b"", "text": b"not an object"}
        path.write_bytes(texts[damage])
    forget(monkeypatch)
    with caplog.at_level(logging.WARNING, "w4gemm"):
        assert callable(compiled(tiny()))
    assert len(builds) == 2 and "compiling it again" in caplog.text
    if damage != "a folder":
        assert disk.read(path.name) is not None, "overwritten by a whole one"


def test_whole_but_unloadable_is_a_miss(folder, builds, monkeypatch, caplog):
    compiled(tiny())
    (path,) = folder.iterdir()
    disk.write(path.name, b"junk")
    forget(monkeypatch)
    assert callable(compiled(tiny()))
    assert len(builds) == 2 and "cannot load" in caplog.text


def test_works_without_a_writable_folder(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path / "file" / "cache"))  # not even root can make that
    forget(monkeypatch)
    disk._warn_unwritable.cache_clear()
    assert callable(compiled(tiny()))
    assert callable(compiled(tiny(3.0)))
    assert caplog.text.count("cannot store") == 1, "said once"


def test_off_keeps_nothing(folder, builds, monkeypatch):
    monkeypatch.setenv("W4GEMM_CACHE_DIR", "off")
    compiled(tiny())
    forget(monkeypatch)
    compiled(tiny())
    assert len(builds) == 2 and not folder.exists()


def test_threads_compile_once(folder, builds):
    unit, functions = tiny(), []
    threads = [threading.Thread(target=lambda: functions.append(compiled(unit))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(builds) == 1 and len(functions) == 8 and len(set(map(id, functions))) == 1


def test_name_depends_on_all_that_the_code_depends_on(monkeypatch):
    names = {
        disk.entry_name(tiny()),
        disk.entry_name(replace(tiny(), name="huge")),
        disk.entry_name(tiny(3.0)),
        disk.entry_name(tiny(arch="sm_80")),
    }
    monkeypatch.setattr(disk, "fingerprint", lambda: ("another DSL",))
    names.add(disk.entry_name(tiny()))
    assert len(names) == 5


BESIDE_THE_SOURCES = {
    "core/config.py": "a config is part of every key",
    "core/errors.py": "sentences of refusals",
    "core/format_names.py": "the format that a name stands for is part of every key",
    "core/function_names.py": "so is the activation or router",
    "core/gpus.py": "rates rank configs",
    "core/imports.py": "the DSL's version is part of the fingerprint, as it is installed",
    "core/problem.py": "of a problem, only what is in a key is compiled",
    "core/words.py": "words of messages",
}
"""Files that device code imports, directly or not, and that decide nothing of an object; with the reason."""


def test_the_fingerprint_has_all_sources_of_device_code():
    """Else an object of an older version would be run after its source has changed."""
    package = Path(w4gemm.__file__).parent
    todo = [f for f in (package / "kernels").rglob("*.py") if "cutlass" in f.read_text()]
    functions: set[Path] = set()
    while todo:
        file = todo.pop()
        if file in functions:
            continue
        functions.add(file)
        for line in re.findall(r"^\s*from w4gemm\.([\w.]+) import", file.read_text(), re.MULTILINE):
            path = package / line.replace(".", "/")
            if line.partition(".")[0] != "jit":
                todo.append(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
    names = {file.relative_to(package).as_posix() for file in functions}
    others = {name for name in names if not name.startswith(disk._SOURCES) and not name.endswith("__init__.py")}
    assert others == set(BESIDE_THE_SOURCES)


def test_fingerprint_follows_sources_and_dsl_settings(monkeypatch, tmp_path):
    disk.fingerprint.cache_clear()
    before = disk.fingerprint()
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    disk.fingerprint.cache_clear()
    assert disk.fingerprint() != before
    monkeypatch.delenv("CUTE_DSL_LINEINFO")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")  # the program's arch overrules it
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "30")  # as SGLang's engines have it, beside kernels of other programs
    monkeypatch.setenv("CUTE_DSL_LOG_TO_CONSOLE", "1")
    disk.fingerprint.cache_clear()
    assert disk.fingerprint() == before

    monkeypatch.setattr(disk, "_PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("1")
    hashes = {disk.source_hash("a.py")}
    (tmp_path / "a.py").write_text("2")
    hashes.add(disk.source_hash("a.py"))
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    hashes.add(disk.source_hash("b.py"))
    assert len(hashes) == 3


def test_a_key_that_differs_between_processes_is_refused(folder):
    with pytest.raises(AssertionError, match="differs between processes"):
        compiled(tiny(key=object()))


def test_arch_is_the_programs(folder, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    for arch in ("sm_80", "sm_90a"):
        assert f"code for {arch}\n" in disassemble(object_code(tiny(arch=arch))).text


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.delenv("W4GEMM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.cache_dir() == tmp_path / "w4gemm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert environment.cache_dir() == Path.home() / ".cache/w4gemm"
    monkeypatch.setenv("W4GEMM_CACHE_DIR", "~/x")
    assert environment.cache_dir() == Path.home() / "x"
    monkeypatch.setenv("W4GEMM_CACHE_DIR", "OFF")
    assert environment.cache_dir() is None
    monkeypatch.setenv("W4GEMM_CACHE_DIR", "~nosuchuser/x")
    with pytest.raises(ValueError, match="W4GEMM_CACHE_DIR: wanted a folder or off, got '~nosuchuser/x'"):
        environment.cache_dir()


def test_a_relative_cache_dir_stays_where_it_was(monkeypatch, tmp_path):
    monkeypatch.setenv("W4GEMM_CACHE_DIR", f"cache-of-{tmp_path.name}")
    monkeypatch.chdir(tmp_path)
    folder = environment.cache_dir()
    monkeypatch.chdir("/")
    assert environment.cache_dir() == folder == tmp_path / f"cache-of-{tmp_path.name}"
    assert environment.of_children()["W4GEMM_CACHE_DIR"] == str(folder)
    monkeypatch.setenv("W4GEMM_CACHE_DIR", "off")
    assert environment.of_children()["W4GEMM_CACHE_DIR"] == "off"


def test_log_level(monkeypatch):
    logger = logging.getLogger("w4gemm")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setenv("W4GEMM_LOG", "debug")
    environment.configure_logging()
    assert logger.level == logging.DEBUG and len(logger.handlers) == 1
    monkeypatch.setenv("W4GEMM_LOG", "loud")
    with pytest.raises(ValueError, match="W4GEMM_LOG: wanted debug.*got 'loud'"):
        environment.configure_logging()


def test_variables_that_w4gemm_does_not_have(monkeypatch):
    documented = set(re.findall(r"W4GEMM_[A-Z0-9_]+[A-Z0-9]", environment.__doc__))
    assert documented == set(environment._NAMES)
    monkeypatch.setattr(os, "environ", dict.fromkeys((*environment._NAMES, "W4GEMM_CACHEDIR", "HOME"), ""))
    assert environment.unknown() == ["W4GEMM_CACHEDIR: w4gemm has no such variable; nearest is 'W4GEMM_CACHE_DIR'"]


def test_an_object_of_another_processor(folder, builds, monkeypatch):
    """It is taken if this processor can do all that it may use, and not if it may use more."""
    here = disk.processor()
    for features, taken in ((here[:-1], True), ((*here, "avx1024"), False), (("another", *here[1:]), False)):
        for path in folder.glob("*"):
            path.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(disk, "processor", lambda features=features: features)
            object_code(tiny())
        before = len(builds)
        forget(monkeypatch)
        assert callable(compiled(tiny()))
        assert len(builds) == before + (not taken)


def test_compiling_can_be_forbidden(folder, builds, monkeypatch):
    object_code(tiny())
    monkeypatch.setenv("W4GEMM_COMPILE", "off")
    assert callable(compiled(tiny())), "it is there"
    with pytest.raises(w4gemm.UnsupportedError, match="W4GEMM_COMPILE=off forbids compiling, and tiny-sm_90a-"):
        compiled(tiny(3.0))
    monkeypatch.setenv("W4GEMM_COMPILE", "never")
    with pytest.raises(ValueError, match="W4GEMM_COMPILE: wanted on or off, got 'never'"):
        compiled(tiny(4.0))
    assert len(builds) == 3 and len(list(folder.iterdir())) == 1


@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")  # open pipes
def test_a_pool_compiles_in_other_processes_survives_them_and_leaves_nobody_waiting(folder, builds, monkeypatch):
    """A compilation may end its process, as a crash in native code does."""
    die = functools.partial(signal.raise_signal, signal.SIGKILL)
    units = [tiny(factor) for factor in (2.0, 3.0)]
    with CompilePool(workers=2) as pool:
        dead, *good = pool.submit([Unit("tiny", "dies", "sm_90a", die), *units])
        (bad,) = pool.submit([tiny(arch="sm_1")])
        with pytest.raises(RuntimeError, match="the compiling process ended \\(killed, as by a system without enough"):
            dead.result(timeout=600)
        codes = [future.result(timeout=600) for future in good]
        with pytest.raises(RuntimeError, match="sm_1"):
            bad.result(timeout=600)
        many = pool.submit(units[:1] * 50)
        assert many[-1].cancel(), "a job that is not wanted any more"
        assert many[0].result(timeout=600)
    gc.collect()
    assert not wait(many, timeout=600).not_done
    assert len(set(codes)) == 2 and len(disk.stored()) == 2
    monkeypatch.setenv("W4GEMM_CACHE_DIR", "off")
    adopt(units[0], codes[0])
    assert callable(compiled(units[0])) and not builds


def test_why_a_child_ended():
    child = subprocess.Popen(["sh", "-c", "exit 1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert _ended(child) == "with exit status 1"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_no_more_processes_than_a_container_may_use(tmp_path, monkeypatch, files, expected):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("w4gemm.jit.pool._CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(8), raising=False)
    assert usable_processors() == CompilePool().workers == expected


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_child_ends_with_its_parent_whatever_it_compiles(folder):
    script = f"""
import functools, sys, time; sys.path[:] = {sys.path!r}
from w4gemm.jit import Unit
from w4gemm.jit.pool import CompilePool, _ended
with CompilePool(workers=1) as pool:
    (future,) = pool.submit([Unit("tiny", "slow", "sm_90a", functools.partial(time.sleep, 600))])
    while not pool._children: time.sleep(0.01)
    print(pool._children[0].pid, flush=True)
    future.result()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with parent:
        child = int(parent.stdout.readline())
        time.sleep(1.0)
        assert not has_ended(child)
        parent.terminate()
    until = time.monotonic() + 20
    while not has_ended(child):
        assert time.monotonic() < until, "still there, and would be for ten minutes"
        time.sleep(0.01)


def has_ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_why_an_object_of_a_richer_processor_is_missing(folder, monkeypatch):
    name = disk.entry_name(tiny())
    assert disk.write(name, b"code")
    monkeypatch.setattr(disk, "processor", lambda: ("another machine",))
    expected = disk.entry_name(tiny())
    assert expected != name and disk.read(expected) is None
    assert f"{name}, which is damaged or was compiled on a machine whose CPU" in disk.why_missing(expected)


def test_why_a_whole_object_is_not_loaded(folder):
    """A container without a folder for temporary files cannot import CuTe DSL."""
    name = disk.entry_name(tiny())
    assert disk.write(name, b"code")
    assert disk.why_missing(name) == f"{folder / name} is whole, and CuTe DSL cannot load it"
    (folder / name).write_bytes(b"code")
    assert disk.why_missing(name) == f"{folder / name} is damaged"


def test_a_pool_answers_whatever_keeps_a_child_from_starting(monkeypatch):
    monkeypatch.setenv("W4GEMM_CACHE_DIR", "~nobody-has-this-name/kernels")
    with CompilePool(workers=1) as pool:
        (future,) = pool.submit([tiny()])
        with pytest.raises(ValueError, match="where ~ is unknown"):
            future.result(timeout=20)


@pytest.mark.parametrize("name", ["off", "~nobody-has-this-name"])
def test_a_folder_of_any_name_can_be_the_cache(folder, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    environment.set_cache_dir(Path(name))
    assert environment.cache_dir() == tmp_path / name


def test_a_pool_that_cannot_start_a_child_says_so(folder, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr("subprocess.Popen", refuse)
    with CompilePool(workers=1) as pool:
        futures = pool.submit([tiny()] * 2)
        for future in futures:
            with pytest.raises(RuntimeError, match="no more processes"):
                future.result(timeout=600)


@pytest.mark.gpu
def test_runs_alike_new_and_stored_and_follows_the_stream(folder, monkeypatch):
    x = torch.randn(1000, device="cuda")
    for _ in range(2):  # compiled, then loaded from disk
        forget(monkeypatch)
        scale = compiled(tiny())
        y = torch.zeros_like(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            scale(x, y)
        stream.synchronize()
        assert torch.equal(y, 2 * x)
