"""Functions of other packages that run inside of ours: :func:`wrap`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def wrap(holder: Any, name: str, around: Callable[..., Any]) -> None:
    """Have a function of ours run in place of another package's, once in each process.

    Args:
        holder: what has the function, a module or a class.
        around: called with the package's own function and what that is called with.

    Raises:
        AttributeError: if this version of the package has no such function.
    """
    own = getattr(holder, name)
    if own.__module__ == __name__:
        return

    @functools.wraps(own, assigned=("__name__", "__qualname__", "__doc__"))
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(own, *args, **kwargs)

    is_bound = isinstance(inspect.getattr_static(holder, name), (staticmethod, classmethod))
    setattr(holder, name, staticmethod(wrapped) if is_bound else wrapped)
