"""Compiles units once, and keeps what was compiled in memory and on disk."""

from w4gemm.jit.compile import adopt, compiled, is_ready, object_code
from w4gemm.jit.unit import Program, Unit

__all__ = ["Program", "Unit", "adopt", "compiled", "is_ready", "object_code"]
