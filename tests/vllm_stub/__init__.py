"""The interfaces of vLLM and its GGUF plugin that ours uses, without what is behind them: tests run it against these.

``python tests/vllm_stub/check.py FOLDER...`` holds them to vLLM's own sources.
"""

import importlib

from stub_modules import StubModules

VLLM, GGUF = StubModules("vllm"), StubModules("vllm_gguf_plugin")


def install() -> None:
    """Put the modules into sys.modules."""
    importlib.import_module("vllm_stub.gguf")  # and with it all other files
    VLLM.install()
    GGUF.install()
