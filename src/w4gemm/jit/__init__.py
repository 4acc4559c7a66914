"""From a unit to something callable: compile once, keep in memory and on disk."""

from w4gemm.jit.compile import adopt, compiled, is_ready, object_code
from w4gemm.jit.unit import Program, Unit

__all__ = ["Program", "Unit", "adopt", "compiled", "is_ready", "object_code"]
