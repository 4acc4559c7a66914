"""Inline PTX: :func:`asm`. memory.py and arithmetic.py have the single instructions that several kernels use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

HIDDEN_ZERO = "mov.u32 m, %lanemask_eq; sub.u32 z, m, 1; and.b32 z, z, m; "
"""PTX that sets z to a 0 that the compiler does not know: the one bit of the lane's mask m, less that bit. Who inserts
it declares both, of 32 bits."""
_CONSTRAINT = {Int32: "r", Int64: "l", Float32: "f"}


def asm(
    text: str, outputs: Sequence[type] = (), inputs: Sequence[Any] = (), *, pure: bool = False, early: bool = False
) -> tuple[Any, ...]:
    """Inline PTX with operands $0, $1, ...: first the outputs, then the inputs.

    ``pure`` lets the compiler move, merge and drop it: arithmetic only. Everything else stays in order with the
    barrier operations around it. ``early`` marks outputs that are written before the last input is read.
    """
    constraints = [("=&" if early else "=") + _CONSTRAINT[t] for t in outputs]
    constraints += [_CONSTRAINT[type(v)] for v in inputs]
    if not pure:
        constraints.append("~{memory}")
    types = [T.f32() if t is Float32 else T.i64() if t is Int64 else T.i32() for t in outputs]
    result = None if not types else types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    r = llvm.inline_asm(
        result,
        [v.ir_value() for v in inputs],
        text,
        ",".join(constraints),
        has_side_effects=not pure,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(types) == 1:
        return (outputs[0](r),)
    return tuple(outputs[i](llvm.extractvalue(t, r, [i])) for i, t in enumerate(types))
