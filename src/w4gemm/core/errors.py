"""The errors that users see, and the checks and words that messages share.

A bad argument raises ``ValueError`` or ``TypeError``; the message names the argument, what was wanted and what came.
"""

from __future__ import annotations

import numbers
from collections.abc import Collection, Sequence
from typing import TypeGuard

import torch

from w4gemm.core.format_names import LARGEST_SIZE
from w4gemm.core.words import nearest


class UnsupportedError(RuntimeError):
    """No kernel can run the problem here. The message lists every kernel with its reason."""


class FormatError(ValueError):
    """A file or tensor is not what its format says: truncated, mislabelled, or of another layout."""


def is_int(value: object) -> TypeGuard[int]:
    """True for an int, also one of NumPy's; False for a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def require_int(name: str, value: object, least: int = 1, most: int = LARGEST_SIZE) -> None:
    """Raise TypeError or ValueError unless ``value`` is an int from ``least`` to ``most``."""
    if not is_int(value):
        raise TypeError(f"{name}: wanted an int from {least} on, got {value!r:.40}")
    if int(value) < least:
        raise ValueError(f"{name}: wanted an int from {least} on, got {value!r:.40}")
    if int(value) > most:
        raise ValueError(f"{name}: wanted an int of at most {most}, got {value!r:.40}")


def require_bool(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: wanted a bool, got {type(value).__name__} {value!r:.40}")


def require_progress(progress: object, arguments: str) -> None:
    """Raise TypeError unless ``progress`` is None or can be called with ``arguments``."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: wanted a function of {arguments} or None, got {kind_of(progress)}")


def require_module(model: object) -> None:
    """Raise TypeError unless ``model`` is a module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: wanted a torch.nn.Module, got {kind_of(model)}")


def require_pretrained(model: object) -> None:
    """Raise TypeError unless ``model`` is a model of transformers, or PEFT's around one."""
    if not hasattr(model, "get_input_embeddings"):
        raise TypeError(f"model: wanted a model of transformers, got {kind_of(model)}")


def require_dense(name: str, t: torch.Tensor) -> None:
    """Raise TypeError for a sparse, nested or MKL-DNN tensor, and for one that several processes share."""
    if t.is_nested:
        raise TypeError(f"{name}: wanted a dense tensor, got a nested one")
    if t.layout is not torch.strided:
        raise TypeError(f"{name}: wanted a dense tensor, got one of layout {t.layout}")
    if type(t) not in (torch.Tensor, torch.nn.Parameter) and hasattr(t, "full_tensor"):  # DTensor's import takes long
        raise TypeError(
            f"{name}: wanted a tensor of this process, got a {type(t).__name__}; {name}.to_local() is its part here, "
            f"{name}.full_tensor() all of it"
        )


def require_own_numbers(name: str, t: torch.Tensor) -> None:
    """Raise ValueError for a view whose numbers PyTorch negates when it reads them: a kernel takes what memory
    holds."""
    if t.is_neg():
        use = f"use {name}.resolve_neg()" if name != "out" else "write to another tensor, and copy from it"
        raise ValueError(f"{name}: wanted a tensor of the numbers in its memory, got a view of them negated; {use}")


def require_tensor(
    name: str,
    t: object,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | str],
    device: torch.device | None = None,
    *,
    like: str = "",
    size: str = "",
    whose: str = "x's device",
    contiguous: bool = True,
) -> None:
    """Raise TypeError or ValueError unless ``t`` is a dense tensor.

    Args:
        dtypes: its dtype, or several that are legal; none for any floating-point one.
        shape: its sizes; a string, such as "tokens", names one that may be any.
        device: its device; None for any.
        like, size, whose: reasons in messages, behind the dtype, behind the shape, and before the device.
        contiguous: True if it has to be.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: wanted a tensor {_sizes(shape)} of {_or(dtypes)}, got {type(t).__name__}")
    if t.dtype is not dtypes and (
        isinstance(dtypes, torch.dtype) or not (t.dtype in dtypes if dtypes else t.is_floating_point())
    ):
        raise TypeError(f"{name}: wanted {_or(dtypes)}{like and ' '}{like}, got {t.dtype}")
    require_dense(name, t)
    if t.shape != shape and (
        t.dim() != len(shape)
        or any(isinstance(legal, int) and own != legal for own, legal in zip(t.shape, shape, strict=True))
    ):
        raise ValueError(f"{name}: wanted shape {_sizes(shape)}{size}, got {tuple(t.shape)}")
    if device is not None and t.device != device:
        raise ValueError(f"{name}: wanted {whose} {device}, got {t.device}")
    if contiguous and not t.is_contiguous():
        use = f"use {name}.contiguous()" if name != "out" else "write to a contiguous one, and copy from it"
        raise ValueError(f"{name}: wanted it contiguous, got strides {t.stride()}; {use}")


def _or(dtypes: torch.dtype | Sequence[torch.dtype]) -> str:
    return " or ".join(map(str, (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes)) or "floating point"


def _sizes(shape: Sequence[int | str]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def device_named(device: object) -> torch.device:
    """Return a torch.device from itself or from its string. It need not be on this machine.

    Raises:
        TypeError, ValueError: for anything else.
    """
    if isinstance(device, torch.device):
        return device
    if not isinstance(device, str):
        raise TypeError(f"device: wanted a torch.device or its string, such as 'cuda:0', got {kind_of(device)}")
    try:
        return torch.device(device)
    except (RuntimeError, UnicodeError) as e:
        raise ValueError(f"device: wanted a torch.device or its string, such as 'cuda:0', got {device!r:.40}") from e


def require_gpu(name: str, device: torch.device) -> None:
    """Raise ValueError if ``device`` is a GPU that PyTorch does not see."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        seen = f"{torch.cuda.device_count()} CUDA GPUs" if torch.cuda.is_available() else "no CUDA GPU"
        raise ValueError(f"{name}: {device} is not there; PyTorch sees {seen}")


def require_among(path: object, kind: str, name: str, names: Collection[str]) -> None:
    """Raise FormatError unless ``name``, that of a ``kind`` of thing, is among a checkpoint's ``names``."""
    if name not in names:
        raise FormatError(f"{path}: no {kind} {name!r} among its {len(names)}{nearest(name, names)}")


def kind_of(value: object) -> str:
    """Return in words the value that came instead: dtype and shape of a tensor, else the name of the type."""
    if type(value).__module__.startswith("torch.fx."):
        return f"a {type(value).__name__} of torch.fx, whose Tracer has to take this module as a leaf (is_leaf_module)"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"nested {value.dtype}" if value.is_nested else f"{value.dtype} {tuple(value.shape)}"


def device_here(device: object) -> torch.device:
    """Return a device of this machine, or meta, from itself or from its string.

    Raises:
        TypeError, ValueError: for what is no device, or is not there.
    """
    device = device_named(device)
    require_gpu("device", device)
    if device.type not in ("cpu", "cuda", "meta"):
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, ImportError) as e:  # PyTorch's, of builds without such devices
            reason = str(e).splitlines()[0].partition(". ")[0]
            raise ValueError(f"device: {device} is not there: {reason}") from e
    return device
