"""Measure the first call of new processes whose kernel is on disk: ``python -m bench.first_call``.

On a GPU it is a call of linear on tensors that are there, with the wait for its result. Without a GPU it is the choice
for a described H200 and the loading of the compiled function. The first process compiles into an empty folder. Then
come --rounds processes of each case, one row of JSON a case, with least and median of wall-clock milliseconds:

- ``library``: the kernel is loaded from its shared library; left out where this machine has no linker;
- ``library, tvm-ffi imported before``: the same without the time that importing tvm-ffi takes;
- ``object``: the libraries are deleted, so that CuTe DSL is imported to load the object.

import_ms is what importing w4gemm takes after torch. A process that does not end well ends the measurement.

Every process finds the bytecode of all modules in a folder of this command, where the first process writes it, as an
installed package has it from pip. ``--no-bytecode`` leaves that to the environment: if ``PYTHONDONTWRITEBYTECODE`` is
set and packages came without bytecode, each process compiles the source of every module that it imports.

With --model, a last row (kind ``compile_model``) has the seconds in which ``w4gemm compile``, from the start of its
process to its end, compiles every kernel of Llama-3-8B's layers for 1 to 8192 tokens into an empty folder.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_M, _N, _K, _FORMAT = 16, 4096, 4096, "int4_g128"
_MODEL = "6144x4096,4096x4096,28672x4096,4096x14336"
_TVM_FFI = "library, tvm-ffi imported before"


def main(argv: Sequence[str] | None = None) -> None:
    from bench.options import command  # imports w4gemm, which the processes of a case time

    from w4gemm.jit.pool import usable_processors
    from w4gemm.tuning import record

    parser = command("bench.first_call", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each case (default: %(default)s)")
    parser.add_argument("--no-bytecode", action="store_true", help="see above")
    parser.add_argument("--model", action="store_true", help="also compile a whole model's kernels")
    args = parser.parse_args(argv)
    facts = record.facts()
    with tempfile.TemporaryDirectory() as folder:
        variables = os.environ | {"W4GEMM_CACHE_DIR": folder}
        if not args.no_bytecode:
            variables |= {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}
        _child("", variables)
        for case in ("library", _TVM_FFI, "object"):
            libraries = list(Path(folder).glob("*.so"))
            if case == "object":
                for path in libraries:
                    path.unlink()
            elif not libraries:
                continue
            found = [_child(case, variables) for _ in range(args.rounds)]
            row = {"kind": "first_call", "run": record.run_name(facts), "case": case, "dsl_imported": found[0]["dsl"]}
            row["bytecode"] = not args.no_bytecode
            for name in ("import_ms", "call_ms"):
                times = [each[name] for each in found]
                row |= {f"{name}_min": min(times), f"{name}_p50": statistics.median(times)}
            print(json.dumps(row | facts), flush=True)
        if args.model:
            row = {"kind": "compile_model", "run": record.run_name(facts), "layers": _MODEL}
            row |= {"cores": usable_processors(), "bytecode": not args.no_bytecode}
            print(json.dumps(row | compile_model(variables) | facts))


def compile_model(variables: dict[str, str]) -> dict[str, float]:
    """The number of a model's kernels, and seconds to compile them all from nothing. variables: the environment of the
    process."""
    with tempfile.TemporaryDirectory() as folder:
        process = [sys.executable, "-m", "w4gemm.cli", "compile", "--shapes", _MODEL, "-o", folder]
        started = time.perf_counter()
        subprocess.run(process, check=True, stdout=sys.stderr, env=variables | {"W4GEMM_CACHE_DIR": folder})
        seconds = time.perf_counter() - started
        return {"kernels": len(list(Path(folder).glob("*.o"))), "seconds": round(seconds, 1)}


def _child(case: str, variables: dict[str, str]) -> dict[str, float]:
    script = f"import json; from bench.first_call import measured; print(json.dumps(measured({case == _TVM_FFI})))"
    process = [sys.executable, "-c", script]
    found: dict[str, float] = json.loads(subprocess.check_output(process, text=True, env=variables))
    return found


def measured(tvm_ffi_before: bool) -> dict[str, float]:
    """Milliseconds of this process."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(_M, _K, dtype=torch.bfloat16, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    if tvm_ffi_before:
        import tvm_ffi  # noqa: F401
    started = time.perf_counter()
    import w4gemm

    imported = time.perf_counter()
    from w4gemm import choice
    from w4gemm.jit import compiled
    from w4gemm.weights.random import random_weight

    format = w4gemm.WeightFormat.parse(_FORMAT)
    if device == "cuda":
        w = random_weight(format, _N, _K, device=device).repack()
        torch.cuda.synchronize()
        ready = time.perf_counter()
        w4gemm.linear(x, w)
        torch.cuda.synchronize()
    else:
        ready = time.perf_counter()
        unit = choice.decide(w4gemm.GemmProblem(_M, _N, _K, x.dtype, format, "mma16")).unit
        assert unit is not None
        compiled(unit)
    ended = time.perf_counter()
    return {
        "import_ms": round(1e3 * (imported - started), 2),
        "call_ms": round(1e3 * (ended - ready), 2),
        "dsl": "cutlass" in sys.modules,
    }


if __name__ == "__main__":
    main()
