"""Parts of the vLLM plugin, beside a stub of vLLM: :func:`part_fixture`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from w4gemm.integrations import vllm as plugin
from w4gemm.integrations.engines import engine
from w4gemm.integrations.engines.warmup import Warmup
from w4gemm.integrations.vllm import takeover


@contextmanager
def vllm_stub(monkeypatch: pytest.MonkeyPatch, part: str) -> Iterator[None]:
    """Have the stub be vLLM, and one part of the plugin installed in it by the entry point."""

    def forget() -> None:
        for name in [n for n in sys.modules if n.split(".")[0] in ("vllm", "vllm_stub", "vllm_gguf_plugin")]:
            del sys.modules[name]
        names = part, "dense", "configs", "linear_kernel", "fusion", "shards"
        for name in (*names, "experts", "experts_kernel", "experts_lora", "experts_support"):
            sys.modules.pop(f"{plugin.__name__}.{name}", None)
        engine._refuse.cache_clear()

    forget()
    importlib.import_module("vllm_stub").install()
    monkeypatch.setattr(plugin, "_installed", [])
    monkeypatch.setattr(plugin, "PARTS", {part: "layers"})
    monkeypatch.setattr(takeover, "WARMUP", Warmup(takeover.VLLM))
    monkeypatch.setattr(takeover, "_MOST_TOKENS", 8)
    monkeypatch.delenv("W4GEMM_VLLM", raising=False)
    plugin.register()
    yield
    forget()


def part_fixture(part: str, autouse: bool = False) -> Any:
    """Return a fixture: the module of a part of the plugin, installed in the stub."""

    @pytest.fixture(name=None if autouse else part, autouse=autouse)
    def fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
        with vllm_stub(monkeypatch, part):
            yield importlib.import_module(f"{plugin.__name__}.{part}")

    return fixture
