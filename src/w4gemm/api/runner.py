"""The kernels without the rest of the library, for authors of engines: :class:`MixedGemm`.

It takes packed tensors of torch or of any framework with DLPack (``__dlpack__``), such as JAX, CuPy or Paddle. On a GPU
:meth:`MixedGemm.run` does not synchronize. It allocates nothing but a workspace that its config needs and the caller
does not pass. So it can be captured in a CUDA graph. There are two exceptions: dequantize_gemm copies an x with
strides, and the first launch with stream-k synchronizes if no workspace is passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from w4gemm import choice
from w4gemm.api.arguments import DTYPES, check_alignment, check_out, checked_config, checked_factor
from w4gemm.api.product import Product, product_of
from w4gemm.core.activation import require_pairs
from w4gemm.core.epilogue import PLAIN, Epilogue, EpilogueOperands
from w4gemm.core.errors import (
    device_named,
    kind_of,
    require_bool,
    require_gpu,
    require_int,
    require_own_numbers,
    require_tensor,
)
from w4gemm.core.formats import WeightFormat
from w4gemm.core.problem import Device, GemmProblem
from w4gemm.kernels import Operands
from w4gemm.packing.layouts import layout_for, layout_named
from w4gemm.packing.layouts.mma import MmaLayout
from w4gemm.packing.packed_shape import PackedShape, packed_shape
from w4gemm.weights.weight import QuantizedWeight

_ALIGNMENT = 16
_OURS = "the device of this MixedGemm,"


@dataclass(frozen=True)
class MixedGemm:
    """The product out = act(alpha * token_scale * (a @ b.T) + bias) + residual, for one format of weights on one device
    and any m, n and k.

    Args:
        format: format of b, or its string, such as "int4_g128".
        dtype: dtype of a: float16, bfloat16 or float8_e4m3fn, on the CPU also float32.
        device: device of all tensors.
        layout: layout of b; None for the one that the fastest kernel of the device reads. The tensors are
            ``w.repack(layout).tensors`` of a :class:`w4gemm.QuantizedWeight`; :meth:`weight_shapes` says their shapes.
        epilogue: says which of alpha, bias, residual and token_scale :meth:`run` gets, the activation, and the dtype of
            out.
        batch_invariant: as for :func:`w4gemm.linear`.

    Raises:
        TypeError, ValueError: for an unknown format, dtype, layout or epilogue, or a device that is not there.

    Examples:
        >>> gemm = w4gemm.MixedGemm("int4_g128", torch.bfloat16, "cpu")
        >>> w = w4gemm.quantize(torch.randn(512, 1024)).repack(gemm.layout)
        >>> a, out = torch.randn(5, 1024).bfloat16(), torch.empty(5, 512).bfloat16()
        >>> _ = gemm.prepare(5, 512, 1024)
        >>> gemm.run(a, w.tensors, out)
    """

    format: WeightFormat | str
    dtype: torch.dtype
    device: torch.device | str = "cuda"
    layout: str | None = None
    epilogue: Epilogue = PLAIN
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        device, format = device_named(self.device), WeightFormat.of(self.format)
        require_gpu("device", device)
        require_bool("batch_invariant", self.batch_invariant)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device: wanted 'cpu' or a CUDA GPU, such as 'cuda:0', got '{device}'")
        if device.type == "cpu":
            device = torch.device("cpu")  # without an index, as tensors have it
        elif device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "format", format)
        GemmProblem(1, 2, 1, self.dtype, format, "", self.epilogue).check()
        if self.dtype not in DTYPES:
            raise TypeError(f"dtype: wanted {' or '.join(map(str, DTYPES))}, got {self.dtype}")
        if self.epilogue.block_scale:
            raise ValueError("epilogue: wanted one without block_scale, which run does not take; use token_scale")
        layout = layout_named(layout_for(Device.of(device), format, self.dtype) if self.layout is None else self.layout)
        if device.type == "cpu" and isinstance(layout, MmaLayout):
            raise ValueError(f"layout: wanted 'cpu' or 'canonical' on the CPU, got {layout.name!r}")
        object.__setattr__(self, "layout", layout.name)

    def problem(self, m: int, n: int, k: int) -> GemmProblem:
        """Return the problem that a config is chosen for at these sizes. Its m is the last of m's interval or, above
        256 tokens, m rounded up to a multiple of 16, above 2048 by at most 1/64."""
        return self._key(self._weight(n, k), m).problem()

    def weight_shapes(self, n: int, k: int) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """Return the dtype and shape of each tensor of b, for a weight (n, k). All are contiguous."""
        return self._weight(n, k).tensors

    def configs(self, m: int, n: int, k: int) -> list[str]:
        """Return every config that :meth:`run` takes at these sizes, as strings, least predicted time first. The list
        is empty if no kernel can run them; ``w4gemm.explain(gemm.problem(m, n, k))`` has the reasons."""
        return choice.configs(self.problem(m, n, k))

    def workspace_bytes(self, m: int, n: int, k: int, config: str | None = None) -> int:
        """Return the bytes of device memory that a launch of ``config`` needs, or of the tuned or predicted config for
        None: the least size of :meth:`run`'s ``workspace``. If run is given none, it takes them from PyTorch's
        allocator, in the order of its stream, and frees them. On a GPU only stream-k and dequantize_gemm need any,
        because split-k reduces in the shared memory of a cluster.

        Raises:
            UnsupportedError, ValueError: if nothing runs these sizes, or the config is not legal.
        """
        problem = self.problem(m, n, k)
        problem.check()  # of an odd n with a gated activation
        chosen = choice.choose(problem, None if config is None else checked_config(config))
        return chosen.kernel.workspace_bytes(chosen.problem, chosen.config)

    def tokens(self, most: int, n: int, k: int) -> list[int]:
        """Return values of m within 1 .. most. Together they need every kernel that 1 .. most tokens need:
        :meth:`prepare` each before serving."""
        require_int("most", most)
        return choice.tokens_of_all_plans(self._key(self._weight(n, k), 1), most)

    def prepare(self, m: int, n: int, k: int, config: str | None = None) -> str:
        """Compile or load what :meth:`run` needs for m tokens, and return the config that it will use.

        Args:
            config: one of :meth:`configs`; None for the tuned or predicted one.

        Raises:
            UnsupportedError, ValueError: if nothing runs these sizes, or the config is not legal.
        """
        require_int("m", m)
        return str(self._product(self._weight(n, k), config).plan(m))

    def run(
        self,
        a: Any,
        b: Any,
        out: Any,
        *,
        n: int | None = None,
        alpha: Any = None,
        bias: Any = None,
        residual: Any = None,
        token_scale: Any = None,
        config: str | None = None,
        workspace: Any = None,
        stream: torch.cuda.Stream | int | None = None,
    ) -> None:
        """Launch the product once. The first call that needs a kernel compiles it, unless :meth:`prepare` did.

        Args:
            a: activations (m, k), columns contiguous, rows at multiples of 16 bytes that do not overlap.
            b: the packed tensors of a weight (n, k), a sequence.
            out: tensor that the result is written to: (m, n), or (m, n / 2) with a gated activation; contiguous, its
                dtype as the epilogue says. It may be the residual.
            n: the weight's number of features, which ``out`` has to fit. Packed tensors are padded and do not tell it;
                None takes it from ``out``, and is refused unless the tensors of a larger n have other shapes.
            alpha: a number if ``epilogue.alpha`` is "host", a float32 tensor of one element if it is "device".
            bias: (n,) of a's dtype. For fp8 a: of out's dtype if that has 16 bits, else bfloat16.
            residual: the shape and dtype of out.
            token_scale: float32 (m,), for fp8 a.
            config: one of :meth:`configs`; None for the tuned or predicted one.
            workspace: device buffer of at least :meth:`workspace_bytes` bytes, zero-filled before its first use.
                Launches that may overlap need separate buffers. If None, each launch allocates what it needs. Ignored
                on the CPU.
            stream: a torch stream or the address of a ``CUstream``; None for torch's current one.

        Raises:
            TypeError, ValueError: for an argument that does not fit; the message names it.
            UnsupportedError: if no kernel runs these sizes; the message has each kernel's reason.
        """
        if stream is not None:
            fused = {"alpha": alpha, "bias": bias, "residual": residual, "token_scale": token_scale}
            with _launching_on(stream, self.device):  # other frameworks let this stream wait for the tensors that come
                self.run(a, b, out, n=n, config=config, workspace=workspace, **fused)
            return
        a, out = torch_tensor("a", a), torch_tensor("out", out)
        if isinstance(b, QuantizedWeight):
            raise TypeError("b: wanted the packed tensors, w.tensors, got the weight itself")
        if isinstance(b, torch.Tensor) or not isinstance(b, Iterable):
            raise TypeError(f"b: wanted the packed tensors, w.tensors, got {kind_of(b)}")
        tensors = tuple([torch_tensor("b", t) for t in b])
        epilogue_operands = EpilogueOperands(
            torch_tensor("alpha", alpha) if alpha is None or hasattr(alpha, "__dlpack__") else checked_factor(alpha),
            torch_tensor("bias", bias),
            torch_tensor("residual", residual),
            torch_tensor("token_scale", token_scale),
        )
        operands = Operands(a, tensors, out, epilogue_operands)
        weight = self._check(operands, n)
        (m, k), (row, column), device = a.shape, a.stride(), a.device
        if m == 0:
            return
        if column != 1 or row * a.itemsize % _ALIGNMENT or row < k:
            operands = operands._replace(x=_readable(a))
        product = self._product(weight, config)
        if (memory := torch_tensor("workspace", workspace)) is not None and device.type == "cuda":
            operands = operands._replace(workspace=self._workspace(memory, product.plan(m)))
        if not torch.is_grad_enabled():
            product.launch(operands, m)
            return
        with torch.no_grad():  # some kernels call PyTorch's operators, which would make out a part of a graph, or raise
            product.launch(operands, m)

    def _weight(self, n: int, k: int) -> PackedShape:
        assert isinstance(self.format, WeightFormat) and self.layout is not None
        return packed_shape(self.format, self.layout, n, k)

    def _key(self, weight: PackedShape, m: int) -> choice.PlanKey:
        require_int("m", m)
        assert isinstance(self.device, torch.device)
        return choice.PlanKey.of(weight, m, self.dtype, self.device, self.epilogue, self.batch_invariant)

    def _product(self, weight: PackedShape, config: str | None) -> Product:
        text = "" if config is None else checked_config(config)
        assert isinstance(self.device, torch.device)
        return product_of(weight, self.epilogue, self.dtype, self.device, self.batch_invariant, text)

    def _workspace(self, memory: Any, plan: choice.Plan) -> torch.Tensor:
        if not isinstance(memory, torch.Tensor):
            raise TypeError(f"workspace: wanted a buffer on {self.device} or None, got {kind_of(memory)} {memory}")
        needed, size = plan.kernel.workspace_bytes(plan.problem, plan.config), memory.numel() * memory.element_size()
        if size < needed or not memory.is_contiguous() or memory.device != self.device:
            raise ValueError(
                f"workspace: wanted at least {needed} contiguous bytes on {self.device}, got {size} on {memory.device}"
            )
        check_alignment("workspace", memory, _ALIGNMENT)
        return memory.view(-1).view(torch.uint8)[:needed]

    def _check(self, operands: Operands, n: int | None) -> PackedShape:
        """Check everything that a kernel relies on, except a's strides; return the weight's packed shape."""
        a, out, epilogue, device = operands.x, operands.out, self.epilogue, self.device
        assert isinstance(device, torch.device)
        if not isinstance(a, torch.Tensor) or not isinstance(out, torch.Tensor):
            raise TypeError(f"a, out: wanted tensors, got {kind_of(a)} and {kind_of(out)}")
        if a.dim() != 2 or out.dim() != 2 or a.shape[0] != out.shape[0]:
            raise ValueError(f"a, out: wanted (m, k) and (m, n), got {tuple(a.shape)} and {tuple(out.shape)}")
        (m, k), columns = a.shape, out.shape[1]
        if not k or not columns:
            raise ValueError(f"a, out: wanted at least one column, got {tuple(a.shape)} and {tuple(out.shape)}")
        require_tensor("a", a, self.dtype, (m, k), device, whose=_OURS, contiguous=False)
        check_alignment("a", a, _ALIGNMENT)
        weight = self._weight(columns * (2 if epilogue.gated else 1) if n is None else n, k)
        require_pairs("n", epilogue.activation, weight.n)
        if len(weight.tensors) != len(operands.weight):
            raise ValueError(
                f"b: wanted {len(weight.tensors)} tensors in the {self.layout} layout, got {len(operands.weight)}"
            )
        for i, (t, (dtype, shape)) in enumerate(zip(operands.weight, weight.tensors, strict=True)):
            name = f"b[{i}]"
            require_tensor(name, t, dtype, shape, device, size=", for the sizes of a and out", whose=_OURS)
            check_alignment(name, t, _ALIGNMENT)
        if n is None and weight.padded:
            raise ValueError(
                f"n: wanted the weight's number of features, since packed tensors of more than {weight.n} have the "
                f"same shapes, got None; n={weight.n} if out has all of them"
            )
        shape = m, epilogue.columns(weight.n)
        self._check_epilogue(operands.epilogue, shape, weight.n)
        read = {"a": a, "b": operands.weight, **operands.epilogue._asdict()}
        check_out(out, read, epilogue, a, shape, f" for n {weight.n} of the weight")
        return weight

    def _check_epilogue(self, operands: EpilogueOperands, shape: tuple[int, int], n: int) -> None:
        epilogue, device = self.epilogue, self.device
        assert isinstance(device, torch.device)
        actual = Epilogue.of(operands, epilogue.activation, epilogue.out_dtype)
        if actual != epilogue:
            for name, expected, got in zip(Epilogue._fields, epilogue, actual, strict=True):
                if expected != got:
                    text = "the epilogue of this MixedGemm"
                    raise ValueError(f"{name}: {text} ({epilogue}) wants {_in_a_word(expected)}, got {_in_a_word(got)}")
        for name, (dtype, size) in epilogue.operand_shapes(self.dtype, shape, n).items():
            require_tensor(name, getattr(operands, name), dtype, size, device)
            check_alignment(name, getattr(operands, name), _ALIGNMENT if name == "residual" else dtype.itemsize)


@contextmanager
def _launching_on(stream: Any, device: Any) -> Iterator[None]:
    """Make ``stream`` torch's current one in the block; on the CPU do nothing.

    Raises:
        TypeError, ValueError: if it is no stream of ``device``.
    """
    if not isinstance(stream, (int, torch.cuda.Stream)):
        raise TypeError(f"stream: wanted a torch.cuda.Stream, an address or None, got {kind_of(stream)}")
    if device.type != "cuda":
        yield
        return
    if isinstance(stream, int):
        stream = torch.cuda.ExternalStream(stream, device=device)
    elif stream.device != device:  # torch would make that device current, and the launch go to another stream
        raise ValueError(f"stream: wanted one of {device}, where the tensors are, got one of {stream.device}")
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def _in_a_word(field: Any) -> str:
    """Return a field of an epilogue in a word. Most are flags for a tensor."""
    return {True: "one", False: "none", None: "none"}.get(field, str(field))


def _readable(a: torch.Tensor) -> torch.Tensor:
    """Return a (m, k) with strides that kernels take. The stride of a single row or column is free, and is replaced.

    Raises:
        ValueError: if columns are not contiguous, or rows do not begin at multiples of 16 bytes or overlap.
    """
    (m, k), (row, column), step = a.shape, a.stride(), _ALIGNMENT // a.itemsize
    if column != 1 and k > 1:
        raise ValueError(f"a: wanted contiguous columns, stride 1, got strides {a.stride()}")
    least = -(-k // step) * step
    if m > 1 and (row % step or row < k):
        raise ValueError(
            f"a: wanted a row stride that is a positive multiple of {_ALIGNMENT} bytes and at least a row, got strides "
            f"{a.stride()} of {a.dtype}; nearest is ({max(round(row / step) * step, least)}, 1)"
        )
    return a.as_strided(a.shape, (row if m > 1 else least, 1))


def torch_tensor(name: str, value: Any) -> Any:
    """Return a torch tensor that shares the memory of ``value``; a number or None as it is.

    Raises:
        TypeError, ValueError: for what torch cannot import; the message begins with ``name``, the argument.
    """
    if isinstance(value, torch.Tensor):
        require_own_numbers(name, value)
        return value
    if value is None or isinstance(value, (int, float)):
        return value
    if name == "out" and getattr(getattr(value, "flags", None), "writeable", True) is False:  # DLPack may not tell
        raise ValueError("out: wanted memory that may be written, got a read-only array")
    if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
        missing = " without __dlpack_device__" if hasattr(value, "__dlpack__") else ""
        raise TypeError(f"{name}: wanted a tensor of torch or one with __dlpack__, got {type(value).__name__}{missing}")
    strides = getattr(value, "strides", None)
    if not isinstance(strides, (tuple, list)):
        strides = (getattr(value, "__array_interface__", None) or {}).get("strides") or ()
    if any(stride < 0 for stride in strides):  # torch would end the process
        raise ValueError(f"{name}: wanted no negative strides, got {tuple(strides)}; numpy.ascontiguousarray copies it")
    try:
        return torch.from_dlpack(value)
    except Exception as e:  # whatever the other framework raises
        kind = type(value).__name__
        raise ValueError(f"{name}: wanted what torch.from_dlpack takes, got {kind} that it refuses: {e}") from e
