"""The vLLM plugin's entry point: what it takes over where, and what it says."""

from __future__ import annotations

import logging
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from w4gemm.integrations import vllm as plugin
from w4gemm.integrations.engines.engine import Engine
from w4gemm.integrations.vllm import takeover


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_installed", [])
    monkeypatch.delenv("W4GEMM_VLLM", raising=False)


class Part(types.ModuleType):
    """A part that counts its installations, or fails with ``error``."""

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
    monkeypatch.setattr(plugin, "PARTS", {"toy": "toy layers"})
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


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [("W4GEMM_VLLM", "yes", "auto, on or off"), ("W4GEMM_NVFP4", "16", "auto, fp8 or 16bit")],
)
def test_a_mistyped_variable_ends_no_engine(
    name: str,
    value: str,
    legal: str,
    toy: Part,
    installed: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(name, value)
    plugin.register()
    assert not toy.times
    assert caplog.records[0].levelno == logging.WARNING
    assert f"{name}: wanted {legal}, got '{value}'" in caplog.records[0].message
    assert f"{name}: wanted {legal}" in installed("0.33.0", "w4gemm").answer((9, 0))


@pytest.mark.parametrize("error", [ImportError("cannot import name 'MPLinearKernel'"), KeyError("PlatformEnum.CUDA")])
def test_a_vllm_that_lacks_an_interface_goes_on(toy: Part, caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    toy.error = error
    plugin.register()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "w4gemm leaves toy layers to vLLM's own kernels" in record.message
    assert "in 0.26.0 to 0.33.0: " in record.message and str(error) in record.message


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
    answer = takeover.VLLM.why_not_here(capability, fp8)
    assert reason in answer and bool(reason) == bool(answer)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM of a version, and packages with entry points of these names."""

    def install(version: str, *plugins: str) -> Engine:
        monkeypatch.setattr(Engine, "version", lambda self: version)
        points = [SimpleNamespace(name=name) for name in plugins]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
        return takeover.VLLM

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return install


def test_what_info_says(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed("").answer((9, 0)) == "vLLM: not installed"
    vllm = installed("0.26.0", "w4gemm", "other")
    assert vllm.answer((9, 0)) == "vLLM 0.26.0: w4gemm runs its quantized layers; W4GEMM_VLLM=off switches it off"
    assert vllm.answer((9, 0), "needs CuTe DSL").endswith("its own kernels run quantized layers: needs CuTe DSL")
    assert vllm.answer((8, 0)) == (
        "vLLM 0.26.0: its own kernels run quantized layers: w4gemm is measured to be faster on Hopper (9.0) only, and "
        "this GPU has 8.0; W4GEMM_VLLM=on takes over"
    )
    monkeypatch.setenv("W4GEMM_VLLM", "maybe")
    assert "wanted auto, on or off, got 'maybe'" in vllm.answer((9, 0))


def test_info_names_a_version_that_was_not_tested(installed: Any) -> None:
    assert "vLLM 0.40.1 (tested with 0.26.0 to 0.33.0): w4gemm runs" in installed("0.40.1", "w4gemm").answer((9, 0))


def test_info_says_why_vllm_does_not_load_the_plugin(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no installed package has w4gemm's entry point" in installed("0.33.0", "other").answer((9, 0))
    vllm = installed("0.33.0", "other", "w4gemm")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert vllm.answer((9, 0)).endswith("its own kernels run quantized layers: VLLM_PLUGINS does not name w4gemm")
    monkeypatch.setenv("VLLM_PLUGINS", "other, w4gemm")
    assert "w4gemm runs its quantized layers" in vllm.answer((9, 0))


@pytest.mark.parametrize(("value", "switch"), [("1", "on"), ("0", "off"), ("ON", "on"), ("", "auto")])
def test_values_of_the_switch(value: str, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W4GEMM_VLLM", value)
    assert takeover.VLLM.switch() == switch
