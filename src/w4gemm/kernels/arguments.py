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
from w4gemm.kernels.stand_ins import DTYPES, contiguous, rows

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
    from cutlass.cute.runtime import make_fake_tensor

    asked, dtype = variant.epilogue, DTYPES[variant.kind]
    m, n, k, experts = (cute.sym_int() for _ in range(4))
    x_rows = cute.sym_int() if variant.gathered else m
    columns = cute.sym_int() if asked.gated else n

    def result() -> Any:
        """d, or a residual."""
        return rows(asked.out_dtype, m, columns, step=16 // asked.out_dtype.itemsize if variant.vector else 1)

    def by_columns() -> Any:
        """float32 numbers of the rows of x: tokens are contiguous, as TMA wants them."""
        strides = (1, cute.sym_int64(divisibility=4))
        return make_fake_tensor(cutlass.Float32, (m, cute.sym_int()), strides, assumed_align=16)

    shapes = asked.operand_shapes(dtype, (m, columns), n, experts if variant.grouped else 0, x_rows)
    operands = {name: contiguous(t, *shape) for name, (t, shape) in shapes.items() if name != "residual"}
    if asked.alpha == "host":
        operands["alpha"] = cutlass.Float32(1.0)
    if asked.residual:
        operands["residual"] = result()
    if asked.block_scale:
        operands["block_scale"] = by_columns()
    if variant.channel_scales:
        operands["channel_scale"] = contiguous(torch.float32, *((experts, n) if variant.grouped else (n,)))
    return Arguments(
        rows(dtype, x_rows, k, step=16 // dtype.itemsize),
        contiguous(torch.int32, cute.sym_int(), cute.sym_int(), variant.block.words, align=16),
        result(),
        EpilogueOperands(**operands),
        ExpertRows(
            starts=contiguous(torch.int32, experts) if variant.grouped else None,
            ends=contiguous(torch.int32, experts) if variant.grouped else None,
            indices=contiguous(torch.int32, m) if variant.gathered else None,
            settled=1 if variant.grouped else None,
        ),
        StreamWorkspace(
            partials=contiguous(torch.float32, cute.sym_int(), align=16),
            flags=contiguous(torch.int32, cute.sym_int()),
        )
        if workspace
        else NO_WORKSPACE,
        x_sums=by_columns() if variant.takes_x_sums else None,
    )
