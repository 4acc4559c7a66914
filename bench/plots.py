"""matplotlib as the plots of docs/plots/ want it: :func:`pyplot`."""

from __future__ import annotations

from typing import Any


def pyplot() -> Any:
    """Return ``matplotlib.pyplot`` for files alone, which are the same for the same rows.

    Raises:
        SystemExit: without matplotlib.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SystemExit("plots want matplotlib: pip install matplotlib; what else was written stays") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "w4gemm"
    import matplotlib.pyplot as plt

    return plt
