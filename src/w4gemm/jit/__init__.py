"""From a kernel, a problem and a config to something callable: compile once, keep in memory and on disk."""

from w4gemm.jit.compile import adopt, compiled, is_ready, object_code

__all__ = ["adopt", "compiled", "is_ready", "object_code"]
