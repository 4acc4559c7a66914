"""A provider of w4gemm's products for NVIDIA's CUTLASS Operator API, the package ``nvidia-cutlass-operators``.

Importing this registers it. An operand B that is a :class:`PackedOperand` holds a packed weight; A is (m, k) and out is
(m, n), both contiguous along their rows:

    from cutlass.operators import GemmArguments, Manifest
    from w4gemm.integrations.cutlass_operators import PackedOperand

    arguments = GemmArguments(x, PackedOperand(w), out, accumulator_type=torch.float32)
    best, *others = Manifest.get_operators(arguments, target_sm="90a")
    best.run(arguments)

There is an operator for each config that w4gemm's kernels for Hopper have for these sizes, first the one that
``w4gemm.linear`` takes, then by predicted time. Tensors on the CPU get those of an H200, for a look without a GPU.
Operators are made for arguments only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import torch
from cutlass.operators import (
    CompiledArtifact,
    EpilogueArguments,
    GemmArguments,
    Operand,
    Operator,
    OperatorMetadata,
    Provider,
    RuntimeArguments,
    Status,
    TargetSm,
)
from cutlass.operators.metadata import BLASDesignMetadata, DenseTensorConstraints, GemmOperandsMetadata
from cutlass.operators.metadata.operand_constraints import OperandConstraints
from cutlass.operators.mma import AmpereMma, HopperWgmma
from cutlass.operators.providers import register_provider

from w4gemm.api.ops import linear
from w4gemm.choice import choose
from w4gemm.choice.explanation import explain
from w4gemm.core.config import GemmConfig
from w4gemm.core.epilogue import PLAIN
from w4gemm.core.errors import UnsupportedError, kind_of
from w4gemm.core.problem import H200, Device, GemmProblem
from w4gemm.jit import compiled
from w4gemm.packing.packed_shape import PackedShape
from w4gemm.weights.weight import QuantizedWeight

_INSTRUCTIONS = {"sm90_mixed_gemm": HopperWgmma, "sm90_decode": AmpereMma}
"""Kernels, and their matrix instructions."""
_TARGET = TargetSm("90a")
_DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
_OUT_DTYPES = _DTYPES | {torch.float32: cutlass.Float32}
_DIVISIBILITY = 8
"""Divisor of the elements of a row, so that rows begin at 16 bytes."""


@dataclass
class PackedOperand(Operand):  # type: ignore[misc, unused-ignore]
    """Operand B of a GEMM: the packed weight w (n, k), as ``w.repack()`` returns it, in the place of w.T.

    Raises:
        TypeError, ValueError: if it is no weight, one of several experts, in act-order, or one that quantizes A.
    """

    weight: QuantizedWeight

    def __post_init__(self) -> None:
        if not isinstance(self.weight, QuantizedWeight):
            raise TypeError(f"weight: wanted a QuantizedWeight, got {kind_of(self.weight)}")
        if self.weight.experts or self.weight.perm is not None or self.weight.activations:
            raise ValueError(
                "weight: wanted one without experts, perm and quantized activations, got "
                f"experts {self.weight.experts}, perm {kind_of(self.weight.perm)}, {self.weight.activations!r}"
            )

    def __copy__(self) -> PackedOperand:
        return PackedOperand(self.weight)

    @property
    def shape(self) -> tuple[int, int]:
        """(k, n)."""
        return self.weight.k, self.weight.n


@dataclass
class PackedConstraints(OperandConstraints):  # type: ignore[misc, unused-ignore]
    """The packed weights that an operator takes: those of this format, layout and size."""

    packed: PackedShape

    def supports(self, operand: Any) -> Status:
        """Return whether an operand, or what another operator takes, is such a weight."""
        if not isinstance(operand, (PackedOperand, PackedConstraints)):
            return Status.fail(f"Expected PackedOperand or PackedConstraints, got {type(operand)}")
        packed = operand.weight.packed if isinstance(operand, PackedOperand) else operand.packed
        return Status.success() if packed is self.packed else Status.fail(f"Expected {self.packed}, got {packed}")


@register_provider("w4gemm")
class W4gemmProvider(Provider):  # type: ignore[misc, unused-ignore]
    """Products of 16-bit activations and packed weights on Hopper."""


@W4gemmProvider.register
class W4gemmOperator(Operator):  # type: ignore[misc, unused-ignore]
    """out = A @ w.T by one kernel in one config. The metadata of a config of two launches describes the first one.

    Args:
        config: "<kernel>/<config>", as :func:`w4gemm.linear` takes it.
    """

    supported_args_type: ClassVar[type[RuntimeArguments]] = GemmArguments
    designed_for_min_cc: ClassVar[int] = 90

    def __init__(self, metadata: OperatorMetadata, config: str) -> None:
        super().__init__(metadata)
        self.config = config

    @classmethod
    def _generate_operators(
        cls,
        metadata_filter: Callable[[OperatorMetadata], bool],
        epilogue_args: EpilogueArguments | None = None,
        target_sm: TargetSm | None = None,
        args: RuntimeArguments | None = None,
    ) -> list[Operator]:
        if not isinstance(args, GemmArguments) or _why_not(args):
            return []
        explanation = explain(_problem(args))
        configs = [*filter(None, [explanation.chosen]), *((c.kernel, c.config) for c in explanation.candidates)]
        operators = [
            cls(_metadata(args, kernel, config), f"{kernel}/{config}")
            for kernel, config in dict.fromkeys((kernel, config) for kernel, config in configs)
            if kernel in _INSTRUCTIONS
        ]
        return [operator for operator in operators if metadata_filter(operator.metadata)]

    def _supports(self, args: GemmArguments, target_sm: TargetSm | None = None) -> Status:
        try:
            if reason := _why_not(args):
                raise ValueError(reason)
            choose(_problem(args), self.config)
        except (UnsupportedError, ValueError) as e:
            return Status.fail(str(e))
        return Status.success()

    def _compile(self, args: GemmArguments, target_sm: TargetSm | None = None) -> CompiledArtifact:
        choice = choose(_problem(args), self.config)
        unit = choice.kernel.unit(choice.problem, choice.config)
        assert unit is not None, f"{self.config}: kernels of GPUs are compiled"
        return CompiledArtifact(compiled(unit), self, _TARGET)

    def _run(
        self, args: GemmArguments, compiled_artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        """Launch on a stream. w4gemm finds what is compiled in its own cache."""
        a, out = _tensors(args)
        handle = stream.cuda_stream if isinstance(stream, torch.cuda.Stream) else int(stream)
        with torch.cuda.stream(torch.cuda.ExternalStream(handle, a.device)):
            linear(a, args.B.weight, out=out, out_dtype=out.dtype, config=self.config)


def _tensors(args: GemmArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and out."""
    return args.A.tensor.runtime_tensor, args.out.tensor.runtime_tensor


def _why_not(args: GemmArguments) -> str:
    """Return why no operator takes these arguments, or the empty string."""
    if not isinstance(args.B, PackedOperand) or args.epilogue is not None:
        return "B: wanted a PackedOperand, and no epilogue"
    a, out = _tensors(args)
    if not isinstance(a, torch.Tensor) or not isinstance(out, torch.Tensor) or a.dim() != 2:
        return "A, out: wanted matrices of torch (GlobalOptions().use_tvm_ffi)"
    if a.dtype not in _DTYPES or out.dtype not in _OUT_DTYPES:
        return f"A: wanted float16 or bfloat16, out: or float32, got {a.dtype} and {out.dtype}"
    return ""


def _problem(args: GemmArguments) -> GemmProblem:
    (a, out), w = _tensors(args), args.B.weight
    device = Device.of(a.device) if a.is_cuda else H200
    epilogue = PLAIN._replace(out_dtype=None if out.dtype == a.dtype else out.dtype)
    return GemmProblem(len(a), w.n, w.k, a.dtype, w.format, w.layout, epilogue, device)


def _metadata(args: GemmArguments, kernel: str, config: GemmConfig) -> OperatorMetadata:
    a, out = (DenseTensorConstraints(_OUT_DTYPES[t.dtype], (0, 0, 1), _DIVISIBILITY) for t in _tensors(args))
    w = args.B.weight
    return OperatorMetadata(
        operator_name=f"w4gemm.{kernel}.{w.format}.{config}",
        operator_class=W4gemmOperator,
        supported_targets=[_TARGET],
        operands=GemmOperandsMetadata(a, PackedConstraints(w.packed), out, cutlass.Float32),
        design=BLASDesignMetadata(
            mma_instruction_type=_INSTRUCTIONS[kernel],
            tile_shape=(config.tile_m, config.tile_n, config.tile_k),
            cluster_shape=(config.cluster_m, config.cluster_n, 1),
        ),
    )
