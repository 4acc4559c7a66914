"""The part of SGLang 0.5.23 that the plugin uses, in little: the same names, methods, parameters and shapes.

The tests of the plugin run on this in place of SGLang, and on SGLang's own sources where they are (sglang_sources.py).
``tests/sglang_interface.json`` has the parameters of every function here as the sources have them; a test compares.
"""

from sglang_stub import configs, experts
from sglang_stub.registry import SGLANG

__all__ = ["SGLANG", "configs", "experts"]
