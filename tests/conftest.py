"""GPU tests: left out without a GPU, recorded with one. A run of everything takes a sample."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

import sample
from w4gemm.choice import plan_cache, table
from w4gemm.core import trust

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results/tests.jsonl"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record",
        metavar="FILE",
        help=f"append the counts, the machine and the versions to FILE as a JSON line; a whole run with "
        f"'-m gpu' on a machine with a GPU does so to {RESULTS.relative_to(ROOT)} by itself",
    )
    parser.addoption(
        "--every-variant",
        action="store_true",
        help="test_sass.py: compile every config of every kernel, not a sample (half an hour on two cores)",
    )
    parser.addoption("--every-case", action="store_true", help="take no sample of the cases (tests/sample.py)")
    parser.addoption(
        "--shard",
        metavar="I/N",
        type=sample.Shard.parse,
        help="the I-th of N parts of the tests, for N processes that run all of them",
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # there are as many processes as cores: more threads would wait for each other
        torch.set_num_threads(1)
    # tests leave the user's cache alone, and keep compiled kernels for the next run
    if getattr(config, "cache", None) is not None:
        kernels = config.cache.mkdir("kernels")
        with contextlib.suppress(PermissionError):
            kernels.chmod(0o700)  # or, with a umask of 002, nothing in it would be taken
        if trust.refusal(kernels):  # in a container the checkout may belong to another user
            kernels = Path(tempfile.gettempdir()) / f"w4gemm-tests-{os.getuid()}"
            trust.make_folder(kernels)
        os.environ.setdefault("W4GEMM_CACHE_DIR", str(kernels))


@pytest.fixture(autouse=True)
def _numbers_of_this_test(request: pytest.FixtureRequest) -> None:
    """Numbers that a test draws without a seed of its own are the same in every run, and differ from test to test."""
    seed = zlib.crc32(request.node.nodeid.encode())
    # without a GPU torch.manual_seed keeps a formatted stack for each kind of device: 2.3 ms a test
    torch.manual_seed(seed) if torch.cuda.is_available() else torch.default_generator.manual_seed(seed)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def dtype(device: str) -> torch.dtype:
    """dtype of x that a device's kernels take."""
    return torch.float32 if device == "cpu" else torch.bfloat16


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a cache that is not there yet; nothing was chosen or tuned before."""
    monkeypatch.setenv("W4GEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(table, "_session", [])
    monkeypatch.setattr(plan_cache, "_plans", {})
    return tmp_path / "cache"


@pytest.fixture
def new_seed(request: pytest.FixtureRequest) -> int:
    """Another seed for each commit; of the time, in a run that names what it wants. A test that fails shows it."""
    seed = zlib.crc32((_sample_seed(request.config) or str(time.time())).encode()) % 100_000
    print(f"seed {seed}")
    return seed


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell pytest-xdist's processes the sample, for only the one that starts them knows if files were named."""
    node.workerinput["sample"] = _sample_seed(node.config)


def pytest_report_header(config: pytest.Config) -> str | None:
    if seed := _sample_seed(config):
        gpu = "" if torch.cuda.is_available() else "no GPU, and no test of one; "
        return f"{gpu}sample of the cases: {seed}"
    return None


def _sample_seed(config: pytest.Config) -> str | None:
    """Seed of the sample that a run of everything takes; None for a run that names what it wants."""
    if hasattr(config, "workerinput"):
        return config.workerinput["sample"]
    named = config.args_source is pytest.Config.ArgsSource.ARGS or config.getoption("-k")
    named = named or config.getoption("-m") not in (None, "", "gpu") or config.getoption("--every-case")
    return None if named else sample.seed()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage: 20,000 tests are none, and looking takes 2 s, and more in the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = set() if torch.cuda.is_available() else {item for item in items if item.get_closest_marker("gpu")}
    if seed := _sample_seed(config):
        # 5,600 reports of skipped tests would take their time as well
        left_out = no_gpu | sample.left_out([item for item in items if item not in no_gpu], seed)
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if shard := config.getoption("--shard"):
        items[:] = shard.of(items)
    for item in no_gpu:
        item.add_marker(pytest.mark.skip(reason="no GPU"))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--record") or _whole_gpu_run(session.config)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not path or reporter is None or session.config.getoption("--collect-only"):
        return
    if hasattr(session.config, "workerinput"):  # one of several processes: the one that started them records
        return
    from w4gemm.tuning import record

    def count(*outcomes: str) -> int:
        return sum(len(reporter.stats.get(outcome, ())) for outcome in outcomes)

    facts = record.facts()
    row = {
        "kind": "tests",
        "run": record.run_name(facts),
        "passed": count("passed", "xfailed"),
        "failed": count("failed", "error", "xpassed"),
        "skipped": count("skipped"),
        "kernels": record.kernels_hash(),
    }
    if shard := session.config.getoption("--shard"):
        row["shard"] = str(shard)
    elif _whole_gpu_run(session.config):
        row["whole"] = True
        row["sample"] = _sample_seed(session.config) or "every case"
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        row["interrupted"] = True
    record.append(path, row | facts)


def _whole_gpu_run(config: pytest.Config) -> Path | None:
    """Where to record this run unasked: it selects all gpu tests, and there is a GPU."""
    selected = config.getoption("-m") == "gpu" and not config.getoption("-k")
    everything = config.args_source is not pytest.Config.ArgsSource.ARGS and not config.getoption("--shard")
    return RESULTS if selected and everything and torch.cuda.is_available() else None
