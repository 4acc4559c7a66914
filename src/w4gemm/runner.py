"""The kernels without the library around them, for engine authors: :class:`MixedGemm`.

It takes packed tensors, of torch or of any framework that speaks DLPack (``__dlpack__``), such as JAX, CuPy or Paddle.
On a GPU :meth:`MixedGemm.run` does not synchronize, and allocates nothing but the workspace of configs that have one,
unless it is given, so it can be captured in a CUDA graph. (dequantize_gemm also copies an x with strides, and the first
launch with stream-k synchronizes where no workspace is given.)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from w4gemm import choice
from w4gemm.epilogue import PLAIN, Epilogue, EpilogueOperands, bias_dtype
from w4gemm.formats import WeightFormat
from w4gemm.kernels import Operands, kernel_named
from w4gemm.packing.layouts import layout_for, layout_named
from w4gemm.problem import Device, GemmProblem
from w4gemm.weight import QuantizedWeight

_ALIGNMENT = 16


@dataclass(frozen=True)
class MixedGemm:
    """d = act(alpha * token_scale * (a @ b.T) + bias) + residual for one kind of weight on one device, any m, n and k.

    Args:
        format: what the numbers of b mean, or its string.
        dtype: of a: float16, bfloat16 or float8_e4m3fn, on the CPU also float32.
        device: where.
        layout: of b; None for the one that the fastest kernel reads. ``w.repack(layout).tensors`` of a
            :class:`w4gemm.QuantizedWeight` are such tensors; their shapes are :meth:`weight_shapes`.
        epilogue: which of alpha, bias, residual, token_scale and activation :meth:`run` is given, and the dtype of d.
        batch_invariant: as for :func:`w4gemm.linear`.

    Raises:
        TypeError, ValueError: for a format, a layout or an epilogue that there is not.
    """

    format: WeightFormat | str
    dtype: torch.dtype
    device: torch.device | str = "cuda"
    layout: str | None = None
    epilogue: Epilogue = PLAIN
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        device, format = torch.device(self.device), WeightFormat.of(self.format)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device: {device} is not there; PyTorch sees no CUDA GPU")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "format", format)
        GemmProblem(1, 2, 1, self.dtype, format, "", self.epilogue).check()
        layout = layout_for(Device.of(device), format, self.dtype) if self.layout is None else self.layout
        object.__setattr__(self, "layout", layout_named(layout).name)

    def problem(self, m: int, n: int, k: int) -> GemmProblem:
        """The problem that a config is chosen for at these sizes: m is that of its interval."""
        call = self._call(m, n, k, "")
        at = choice.representative(m)
        device = Device.of(call.device)
        return GemmProblem(at, n, k, self.dtype, call.format, call.layout, self.epilogue, device, self.batch_invariant)

    def weight_shapes(self, n: int, k: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """dtype and shape of each tensor of b; all are contiguous."""
        assert isinstance(self.format, WeightFormat) and self.layout is not None
        return _shapes(self.layout, self.format, n, k)

    def configs(self, m: int, n: int, k: int) -> list[str]:
        """Every config that :meth:`run` takes, best guess first; empty if nothing can run this, for which
        :func:`w4gemm.explain` of :meth:`problem` has the reasons."""
        return choice.configs(self.problem(m, n, k))

    def workspace_bytes(self, m: int, n: int, k: int, config: str) -> int:
        """Bytes of device memory that a launch needs: what :meth:`run` takes as ``workspace``, or else from PyTorch's
        allocator, in the order of its stream, and gives back. 0 on a GPU, where sums of split k meet in the cluster's
        shared memory, but for stream-k and dequantize_gemm."""
        name, _, _ = config.rpartition("/")
        problem = self.problem(m, n, k)
        chosen = choice.explain(problem, config).chosen
        assert chosen is not None
        return kernel_named(name or chosen[0]).workspace_bytes(problem, chosen[1])

    def prepare(self, m: int, n: int, k: int, config: str | None = None) -> str:
        """Compile or load what :meth:`run` needs for m's interval, and give the config that it will use.

        Raises:
            UnsupportedError, ValueError: if nothing runs this, or the config is not legal.
        """
        return str(choice.plan_for(self._call(m, n, k, config or "")))

    def run(
        self,
        a: Any,
        b: Any,
        out: Any,
        *,
        alpha: Any = None,
        bias: Any = None,
        residual: Any = None,
        token_scale: Any = None,
        config: str | None = None,
        workspace: Any = None,
        stream: torch.cuda.Stream | int | None = None,
    ) -> None:
        """Launch once. The first call for an interval of m compiles; :meth:`prepare` does that beforehand.

        Args:
            a: (m, k), columns contiguous, rows at multiples of 16 bytes.
            b: the packed tensors of a weight (n, k), a sequence.
            out: (m, n), or (m, n / 2) with silu_mul; contiguous. It may be the residual.
            alpha: a number or a float32 tensor of one element, as the epilogue says.
            bias: (n) of a's dtype; beside fp8 a, of out's 16-bit dtype or bfloat16.
            residual: of out's shape and dtype.
            token_scale: float32 (m), for fp8 a.
            config: one of :meth:`configs`; None for the tuned or predicted one.
            workspace: at least :meth:`workspace_bytes` bytes on the GPU, zero before the first launch that uses them;
                launches that may run at the same time must not share them. None: a launch looks after itself, as it
                does on the CPU.
            stream: a torch stream or the address of a ``CUstream``; None for torch's current one.

        Raises:
            TypeError, ValueError: for an argument that does not fit, naming it.
            UnsupportedError: as :meth:`prepare`.
        """
        a, out = _tensor("a", a), _tensor("out", out)
        if isinstance(b, QuantizedWeight):
            raise TypeError("b: wanted the packed tensors, w.tensors, got the weight itself")
        weight = tuple(_tensor(f"b[{i}]", t) for i, t in enumerate(b))
        bias = None if bias is None else _tensor("bias", bias)
        residual = None if residual is None else _tensor("residual", residual)
        alpha = alpha if alpha is None or isinstance(alpha, (int, float)) else _tensor("alpha", alpha)
        token_scale = None if token_scale is None else _tensor("token_scale", token_scale)
        operands = Operands(a, weight, out, EpilogueOperands(alpha, bias, residual, token_scale))
        n = self._check(operands)
        m, k = a.shape
        if m == 0:
            return
        plan = choice.plan_for(self._call(m, n, k, config or ""))
        if workspace is not None and a.device.type == "cuda":
            operands = operands._replace(workspace=self._workspace(_tensor("workspace", workspace), plan))
        if a.device.type != "cuda" or (stream is None and a.device.index == torch.cuda.current_device()):
            plan.launch(operands)
            return
        if isinstance(stream, int):
            stream = torch.cuda.ExternalStream(stream, device=a.device)
        with torch.cuda.device(a.device), torch.cuda.stream(stream):
            plan.launch(operands)

    def _call(self, m: int, n: int, k: int, config: str) -> choice.PlanKey:
        if min(m, n, k) < 1:
            raise ValueError(f"m, n, k: wanted numbers from 1, got {m}, {n}, {k}")
        assert isinstance(self.format, WeightFormat) and self.layout is not None
        device = self.device
        assert isinstance(device, torch.device)
        rest = (self.layout, self.epilogue, device, config, self.batch_invariant)
        return choice.PlanKey(choice.interval(m), n, k, self.dtype, self.format, *rest)

    def _workspace(self, given: torch.Tensor, plan: choice.Plan) -> torch.Tensor:
        wanted, size = plan.kernel.workspace_bytes(plan.problem, plan.config), given.numel() * given.element_size()
        if size < wanted or not given.is_contiguous() or given.device != self.device:
            raise ValueError(
                f"workspace: wanted at least {wanted} contiguous bytes on {self.device}, got {size} on {given.device}"
            )
        if given.data_ptr() % _ALIGNMENT:
            raise ValueError(f"workspace: wanted its data at a multiple of {_ALIGNMENT} bytes")
        return given.view(-1).view(torch.uint8)[:wanted]

    def _check(self, operands: Operands) -> int:
        """Everything that a kernel takes for granted; gives n."""
        a, weight, out, (alpha, bias, residual, token_scale, _), *_ = operands
        epilogue, device = self.epilogue, self.device
        assert isinstance(device, torch.device)
        if a.dim() != 2 or out.dim() != 2 or a.shape[0] != out.shape[0]:
            raise ValueError(f"a, out: wanted (m, k) and (m, n), got {tuple(a.shape)} and {tuple(out.shape)}")
        n, k = out.shape[1] * (2 if epilogue.gated else 1), a.shape[1]
        _fits("a", a, self.dtype, (a.shape[0], k), device, rows=True)
        _fits("out", out, epilogue.result_dtype(self.dtype), tuple(out.shape), device)
        shapes = self.weight_shapes(n, k)
        if len(shapes) != len(weight):
            raise ValueError(f"b: wanted {len(shapes)} tensors in the {self.layout} layout, got {len(weight)}")
        for i, (t, (dtype, shape)) in enumerate(zip(weight, shapes, strict=True)):
            _fits(f"b[{i}]", t, dtype, shape, device)
        kind = None if alpha is None else "device" if isinstance(alpha, torch.Tensor) else "host"
        asked = {"alpha": epilogue.alpha, "bias": epilogue.bias, "residual": epilogue.residual}
        asked["token_scale"] = epilogue.token_scale
        came = {"alpha": kind, "bias": bias is not None, "residual": residual is not None}
        came["token_scale"] = token_scale is not None
        for name, wanted in asked.items():
            if wanted != came[name]:
                raise ValueError(
                    f"{name}: the epilogue ({epilogue}) wants {wanted or 'none'}, got {came[name] or 'none'}"
                )
        if isinstance(alpha, torch.Tensor):
            _fits("alpha", alpha, torch.float32, (1,), device, alignment=4)
        if bias is not None:
            _fits("bias", bias, bias_dtype(self.dtype, epilogue.out_dtype), (n,), device, alignment=2)
        if token_scale is not None:
            _fits("token_scale", token_scale, torch.float32, (a.shape[0],), device, alignment=4)
        if residual is not None:
            _fits("residual", residual, out.dtype, tuple(out.shape), device)
        return n


@functools.lru_cache(maxsize=1024)
def _shapes(layout: str, format: WeightFormat, n: int, k: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    return layout_named(layout).shapes(format, n, k)


def _tensor(name: str, value: Any) -> torch.Tensor:
    """A view of the same memory as torch's."""
    if isinstance(value, torch.Tensor):
        return value
    if not hasattr(value, "__dlpack__"):
        raise TypeError(f"{name}: wanted a tensor of torch or one with __dlpack__, got {type(value).__name__}")
    return torch.from_dlpack(value)


def _fits(
    name: str,
    t: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
    *,
    rows: bool = False,
    alignment: int = _ALIGNMENT,
) -> None:
    if t.dtype != dtype or t.shape != shape or t.device != device:
        raise ValueError(f"{name}: wanted {dtype} {shape} on {device}, got {t.dtype} {tuple(t.shape)} on {t.device}")
    if t.data_ptr() % alignment:
        raise ValueError(f"{name}: wanted its data at a multiple of {alignment} bytes")
    if not rows and not t.is_contiguous():
        raise ValueError(f"{name}: wanted it contiguous, got strides {t.stride()}")
    if (
        rows
        and t.numel()
        and (t.stride(1) != 1 or t.stride(0) * t.element_size() % alignment or t.stride(0) < shape[1])
    ):
        raise ValueError(f"{name}: wanted rows at multiples of {alignment} bytes, got strides {t.stride()}")
