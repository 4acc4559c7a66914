"""The vLLM plugin's entry point: what it takes over where, what it says, and that it imports no vLLM by itself."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from pathlib import Path

import pytest

from w4gemm.integrations import vllm as plugin
from w4gemm.integrations.vllm import takeover

if sys.version_info >= (3, 11):
    import tomllib


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_installed", [])
    monkeypatch.delenv("W4GEMM_VLLM", raising=False)


class Part(types.ModuleType):
    """A part that counts its installations, or fails with ``error``."""

    TAKES = "toy layers"

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__("toy")
        self.times, self.error = 0, error

    def install(self) -> None:
        if self.error:
            raise self.error
        self.times += 1


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Part:
    part = Part()
    monkeypatch.setattr(plugin, "PARTS", ("toy",))
    monkeypatch.setattr(plugin, "enter_compile_key", lambda: None)
    monkeypatch.setitem(sys.modules, "w4gemm.integrations.vllm.toy", part)
    return part


def test_registering_twice_installs_once_and_says_so_once(toy: Part, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        plugin.register()
        plugin.register()
    assert toy.times == 1
    assert [r.message for r in caplog.records if "toy layers" in r.message and "W4GEMM_VLLM=off" in r.message]
    assert len(caplog.records) == 1


def test_switched_off(toy: Part, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("W4GEMM_VLLM", "off")
    with caplog.at_level(logging.INFO, "vllm.w4gemm"):
        plugin.register()
    assert not toy.times and not caplog.records


def test_a_mistyped_switch_ends_no_engine(
    toy: Part, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("W4GEMM_VLLM", "yes")
    plugin.register()
    assert not toy.times
    assert "wanted auto, on or off, got 'yes'" in caplog.records[0].message


def test_a_vllm_that_lacks_an_interface_goes_on(toy: Part, caplog: pytest.LogCaptureFixture) -> None:
    toy.error = ImportError("cannot import name 'MPLinearKernel'")
    plugin.register()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "its own toy kernels" in record.message and "MPLinearKernel" in record.message


def test_a_vllm_that_keys_compiled_graphs_in_another_way(
    toy: Part, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def enter_compile_key() -> None:
        raise AttributeError("module 'vllm.envs' has no attribute 'environment_variables'")

    monkeypatch.setattr(plugin, "enter_compile_key", enter_compile_key)
    plugin.register()
    assert toy.times == 1
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "VLLM_DISABLE_COMPILE_CACHE=1" in record.message and "environment_variables" in record.message


@pytest.mark.parametrize(
    ("switch", "capability", "fp8", "reason"),
    [
        ("auto", (9, 0), False, ""),
        ("auto", (9, 0), True, ""),
        ("auto", (8, 0), False, "W4GEMM_VLLM=on takes over"),
        ("auto", (10, 0), False, "W4GEMM_VLLM=on takes over"),
        ("on", (8, 0), False, ""),
        ("on", (8, 0), True, "needs compute capability 8.9"),
        ("on", (7, 5), False, "needs compute capability 8.0"),
        ("on", None, False, "no NVIDIA GPU"),
        ("off", (9, 0), False, "W4GEMM_VLLM is off"),
    ],
)
def test_where_layers_are_taken_over(
    switch: str, capability: tuple[int, int] | None, fp8: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("W4GEMM_VLLM", switch)
    found = takeover.why_not_here(capability, fp8)
    assert reason in found and bool(reason) == bool(found)


def test_what_info_says(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = takeover.VLLM
    monkeypatch.setattr(type(vllm), "version", lambda self: "")
    assert vllm.answer((9, 0)) == "vLLM: not installed"
    monkeypatch.setattr(type(vllm), "version", lambda self: "0.26.0")
    assert vllm.answer((9, 0)) == "vLLM 0.26.0: w4gemm runs its 4-bit layers; W4GEMM_VLLM=off switches it off"
    assert vllm.answer((9, 0), "needs CuTe DSL").endswith("its own kernels run 4-bit layers: needs CuTe DSL")
    assert vllm.answer((8, 0)).endswith("W4GEMM_VLLM=on takes over")
    monkeypatch.setenv("W4GEMM_VLLM", "maybe")
    assert "wanted auto, on or off, got 'maybe'" in vllm.answer((9, 0))


def test_importing_the_plugin_imports_no_vllm() -> None:
    script = (
        f"import sys; sys.path[:] = {sys.path!r}\nimport w4gemm.integrations.vllm\nassert 'vllm' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no tomllib")
def test_the_entry_point_is_the_function() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["w4gemm"].partition(":")
    assert getattr(sys.modules[module], function) is plugin.register
