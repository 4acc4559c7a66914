"""transformers' ``generate`` by CUDA graphs, on CPUs by machine code. :func:`decode_by_graph` is the only door: no
other package imports more.

A step of ``generate`` launches some 1,500 kernels for 32 layers, from Python: the GPU waits for the host. Here the
whole step, from the token to its logits, is captured once and replayed for each token (``loop.py``, ``step.py``), in
fewer kernels than the model's own code launches (``fusion.py``, ``attention.py``). ``requirements.py`` lists everything
of transformers that is patched or relied on. transformers' own way, ``torch.compile``, compiles for long before it
starts. On a CPU a step is a list of calls of machine code instead (``compiled_step.py``).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from w4gemm.core.errors import require_pretrained
from w4gemm.integrations.decoder.requirements import Otherwise, broken, log_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decode_by_graph(model: PreTrainedModel, fuse: bool = True) -> PreTrainedModel:
    """Let ``model.generate`` on a GPU replay a CUDA graph for each token, where the call and the model allow it: greedy
    or with sampling, for a decoder on one GPU with attention alone. ``disable_compile=True`` in a call's
    generation config turns it off for the call. On a CPU it runs calls of machine code, for one sequence of a model
    like Llama in float32. If the installed transformers is not what the decoder relies on, the model keeps its own
    ``generate``, and one warning says why.

    Args:
        fuse: False to capture the model's own code, whose kernels ``fusion.py`` fuses.

    Returns:
        The model itself.

    Raises:
        TypeError: for what is no model of transformers.
    """
    require_pretrained(model)
    if reason := broken(model, Otherwise.GENERATE):
        log_once(logging.WARNING, f"{type(model).__name__}: generate runs transformers' own loop, because {reason}")
        return model
    from w4gemm.integrations.decoder.loop import enable  # imports what the requirements have just shown to be there

    enable(model, fuse)
    return model


__all__ = ["decode_by_graph"]
