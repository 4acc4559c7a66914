"""The one list of what a launch of a GPU kernel takes: :class:`Arguments`.

The host fills it with torch tensors, ``cute.compile`` with stand-ins (:func:`stand_ins`), and device code reads it with
cute tensors in it. What compiled code takes is its values in a row, without the nesting (:func:`flat`).

No DSL is imported here before :func:`stand_ins` is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from w4gemm.core.epilogue import NO_OPERANDS, EpilogueOperands

Tensor = Any
"""A torch.Tensor on the host, a cute.Tensor on the device."""


class ExpertRows(NamedTuple):
    """The rows of x of each expert: expert e multiplies the rows starts[e] .. ends[e], which may be none."""

    starts: Tensor = None
    """int32 (experts,)."""
    ends: Tensor = None
    """int32 (experts,), 0 <= starts <= ends <= m; only the device knows the values."""
    indices: Tensor = None
    """int32 (m,): row i of d is made of row indices[i] of x; None if x is not gathered."""
    settled: Any = 0
    """int32: 1 if the launch before this one in the stream came after the three tensors were written. A kernel may then
    read them, and request weights, while that launch still runs."""


class StreamWorkspace(NamedTuple):
    """Device memory in which the CTAs of a stream-k launch add up, see device/stream_k.py."""

    partials: Tensor = None
    """float32 partial sums."""
    flags: Tensor = None
    """int32, 0 before and after a launch."""


NO_ROWS = ExpertRows(settled=None)
NO_WORKSPACE = StreamWorkspace()


class Arguments(NamedTuple):
    """Arguments of one launch; None where the compiled variant has no use for one."""

    x: Tensor
    """(m, k), or (any number, k) if gathered; rows at multiples of 16 bytes."""
    weight: Tensor
    """int32 (n blocks, k blocks, words): the packed blocks, those of all experts in a row."""
    out: Tensor
    """(m, columns)."""
    epilogue: EpilogueOperands = NO_OPERANDS
    rows: ExpertRows = NO_ROWS
    workspace: StreamWorkspace = NO_WORKSPACE
    max_clusters: Any = 1
    """int32: the clusters of this kernel that the device holds at once."""
    x_sums: Tensor = None
    """float32 (m, scale groups): the sums of each row of x, beside float zero points."""

    def behind_tma(self) -> Arguments:
        """Return the arguments without those that only the host function needs, because device code reads x,
        its block scales and its sums through TMA."""
        epilogue = self.epilogue._replace(block_scale=None)
        return self._replace(x=None, epilogue=epilogue, max_clusters=None, x_sums=None)


def flat(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    epilogue: EpilogueOperands,
    rows: ExpertRows,
    workspace: StreamWorkspace,
    max_clusters: Any,
    x_sums: Tensor = None,
) -> tuple[Any, ...]:
    """The fields of :class:`Arguments` as compiled code takes them, without the nesting."""
    return (x, weight, out, *epilogue, *rows, *workspace, max_clusters, x_sums)


def nested(values: Sequence[Any]) -> Arguments:
    """The :class:`Arguments` that :func:`flat` made ``values`` of."""
    left = iter(values)
    x, weight, out = (next(left) for _ in range(3))
    epilogue = EpilogueOperands(*(next(left) for _ in EpilogueOperands._fields))
    rows = ExpertRows(*(next(left) for _ in ExpertRows._fields))
    workspace = StreamWorkspace(*(next(left) for _ in StreamWorkspace._fields))
    return Arguments(x, weight, out, epilogue, rows, workspace, *left)


def stand_ins(variant: Any, workspace: bool) -> Arguments:
    """Return arguments for ``cute.compile``, with dtypes and symbolic shapes.

    variant: a :class:`w4gemm.kernels.variant.GpuVariant`.
    workspace: True if a launch takes partials and flags.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

    kinds = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
    dtypes = {
        torch.float16: cutlass.Float16,
        torch.bfloat16: cutlass.BFloat16,
        torch.float32: cutlass.Float32,
        torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    }
    asked, x_dtype = variant.epilogue, kinds[variant.kind]
    dtype, out_dtype = dtypes[x_dtype], dtypes[asked.out_dtype]
    m, n, k, experts = (cute.sym_int() for _ in range(4))
    x_rows = cute.sym_int() if variant.gathered else m
    columns = cute.sym_int() if asked.gated else n

    def compact(dtype: Any, *shape: Any) -> Any:
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=dtype.width // 8)

    def result() -> Any:
        """d, or a residual."""
        size = out_dtype.width // 8
        wide = 16 // size if variant.vector else 1
        strides = (cute.sym_int64(divisibility=wide), 1)
        return make_fake_tensor(out_dtype, (m, columns), strides, assumed_align=size * wide)

    def by_columns() -> Any:
        """float32 numbers of the rows of x: tokens are contiguous, as TMA wants them."""
        strides = (1, cute.sym_int64(divisibility=4))
        return make_fake_tensor(cutlass.Float32, (m, cute.sym_int()), strides, assumed_align=16)

    blocks = (cute.sym_int(), cute.sym_int(), variant.block.words)
    shapes = asked.operand_shapes(x_dtype, (m, columns), n, experts if variant.grouped else 0, x_rows)
    operands = {name: compact(dtypes[t], *shape) for name, (t, shape) in shapes.items() if name != "residual"}
    if asked.alpha == "host":
        operands["alpha"] = cutlass.Float32(1.0)
    if asked.residual:
        operands["residual"] = result()
    if asked.block_scale:
        operands["block_scale"] = by_columns()
    if variant.channel_scales:
        operands["channel_scale"] = compact(cutlass.Float32, *((experts, n) if variant.grouped else (n,)))
    return Arguments(
        make_fake_tensor(dtype, (x_rows, k), (cute.sym_int64(divisibility=128 // dtype.width), 1), assumed_align=16),
        make_fake_compact_tensor(cutlass.Int32, blocks, stride_order=(2, 1, 0), assumed_align=16),
        result(),
        EpilogueOperands(**operands),
        ExpertRows(
            starts=compact(cutlass.Int32, experts) if variant.grouped else None,
            ends=compact(cutlass.Int32, experts) if variant.grouped else None,
            indices=compact(cutlass.Int32, m) if variant.gathered else None,
            settled=1 if variant.grouped else None,
        ),
        StreamWorkspace(
            partials=make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), assumed_align=16),
            flags=compact(cutlass.Int32, cute.sym_int()),
        )
        if workspace
        else NO_WORKSPACE,
        x_sums=by_columns() if variant.takes_x_sums else None,
    )
