"""compute-sanitizer sees every kernel, schedule and helper kernel, by names that it instruments."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import sanitize_matrix
from launch_cells import COUNTS, HELPER_CALLS, Made, cells
from w4gemm import GemmConfig
from w4gemm.core.problem import H200
from w4gemm.jit import object_code
from w4gemm.kernels import HELPERS, KERNELS, config_named
from w4gemm.kernels.gpu import GpuKernel
from w4gemm.kernels.helpers.base import LayerFacts
from w4gemm.kernels.helpers.rows import RmsNorm
from w4gemm.kernels.hopper import most_narrow_rows

TESTS = Path(sanitize_matrix.__file__).parent
GPU_KERNELS = {kernel.name for kernel in KERNELS} - {"cpu_mixed_gemm"}


def test_every_kernel_and_schedule_is_launched():
    actual = cells()
    ways = {(c.kind, c.fp8, c.config.partition("/")[0]) for c in actual}
    assert {kernel for *_, kernel in ways} == GPU_KERNELS
    for kind, fp8 in itertools.product(("dense", "experts", "gathered"), (False, True)):
        assert len({kernel for k, f, kernel in ways if (k, f) == (kind, fp8)}) >= 2
    dense = [config_named(c.config) for c in actual if c.kind == "dense"]
    for kernel in (k for k in KERNELS if isinstance(k, GpuKernel)):
        offered = {config.schedule for config in kernel.space.configs}
        assert {config.schedule for k, config in dense if k is kernel} == offered, kernel.name
    assert any("+" in c.config for c in actual)
    assert {c.format for c in actual} >= {"iq4_g32_fp16", "q4_k", "nvfp4", "mxfp4"}


def test_both_launches_of_a_pair_have_experts():
    pairs = [GemmConfig.parse(c.config.partition("/")[2]) for c in cells() if c.kind != "dense" and "+" in c.config]
    assert pairs
    for config in pairs:
        assert 0 < min(filter(None, COUNTS)) <= most_narrow_rows(config) < max(COUNTS), config


def test_nothing_runs_on_when_the_sanitizers_are_ended(tmp_path):
    """A process that stays on the GPU would be in the times of whatever is measured next."""
    waits = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    code = f"""
import signal, sys
from pathlib import Path
import sanitize_matrix
sanitize_matrix.command = lambda piece: [sys.executable, "-c", {waits!r}]
signal.signal(signal.SIGTERM, sanitize_matrix.end_all)
sanitize_matrix.run(sanitize_matrix.Slice("none", 0, 1), 600, Path(sys.argv[1]))
"""
    process, log = subprocess.Popen([sys.executable, "-c", code, tmp_path], cwd=TESTS), tmp_path / "none-0.log"
    try:
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_text().strip()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        pid = int(log.read_text())
        process.terminate()
        assert process.wait(30) == 1
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        process.kill()


def test_every_helper_is_launched():
    named = {name.split()[0] for name in HELPER_CALLS}
    assert named == {h.name for h in HELPERS} - {"expert_route", "row_combine"} | {
        "route",
        "weight_quantize",
    }  # one call has both


@pytest.mark.parametrize("name", HELPER_CALLS)
def test_a_helper_call_runs_on_the_cpu(name):
    """Where PyTorch's operators stand for the kernel, and are what it is held to."""
    torch.manual_seed(1)
    actual = HELPER_CALLS[name](Made.on("cpu"))
    assert all(t.isfinite().all() for t in (actual if isinstance(actual, tuple) else (actual,)))


def test_names_of_kernels_are_those_that_are_instrumented():
    """A kernel of another name would pass unseen; that of a dataclass holds no name of a module."""
    text = sanitize_matrix.KERNELS.partition("=")[2].encode()
    norm = RmsNorm.of(H200, torch.bfloat16, 4096)
    helpers = [*HELPERS[0].needed(H200, LayerFacts(4096, torch.bfloat16, act_order=True)), norm]
    assert len(helpers) > 1
    for helper in helpers[-2:]:
        assert helper is not None and text in object_code(helper.unit())
