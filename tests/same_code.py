"""Compare the machine code of sampled kernel variants with that of another commit, without a GPU.

    python tests/same_code.py                        150 variants of this tree against its last commit
    python tests/same_code.py --against 76d88c7 --sample 20 --only sm90_decode
    python tests/same_code.py --against 76d88c7 --json OUT   also appends one JSON line with the counts to OUT

A refactoring of device code proves itself this way: every instruction of every sampled variant is the same, registers
included. Variants are drawn at random (--seed), evenly over kernels, schedules, dense, grouped and gathered problems,
activations of 16 bits and fp8, formats and epilogues; some forms of each helper come besides. Both trees compile every
variant anew, each in processes of its own; the code of a commit is kept in the git folder, so the next comparison with
it compiles one tree only.

Exit status: 0 if all are equal, 1 if any differs or is not legal in one of the trees.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIZES = ((8192, 8192), (28672, 4096), (6144, 1100), (1024, 4096))
TOKENS = (1, 2, 4, 8, 16, 24, 48, 64, 100, 192, 256, 1000, 4096)
FORMATS_16 = (
    *("int4_g128", "int4_g32", "int4_g64_zint", "int4_g32_zfloat", "int4_col", "int4_g128_fp16"),
    *("mxfp4", "nvfp4", "nf4", "iq4_g32_fp16", "iq4_g32_fp32", "q4_k", "int4_g64_zfloat_fp32"),
)
FORMATS_FP8 = ("int4_g128", "int4_g128_e4m3", "int4_g32_e4m3", "int4_g64_zint", "int4_col", "mxfp4", "e4m3_col_fp32")
EPILOGUES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"bias": True},
    {"activation": "silu_mul"},
    {"activation": "gelu", "bias": True, "residual": True},
    {"alpha": "device", "residual": True},
    {"alpha": "host", "out_dtype": "float32"},
)
BLOCK_SCALE: dict[str, Any] = {"block_scale": True}
"""Epilogue of a fifth of the cases with fp8 x, whose rows else have one scale each."""
BLOCKS = "e4m3_g128_b128"
"""The format of half of these cases."""
HELPERS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "column_gather": (("bfloat16", 4096),),
    "expert_route": (("int64", 128, False, 512), ("int32", 8, True, 65536)),
    "row_combine": (("bfloat16", 8), ("float16", 2)),
    "activation_quantize": (
        *(("bfloat16", 4096, "", True), ("float16", 4096, "rms", True)),
        *(("bfloat16", 4096, "silu_mul", True), ("bfloat16", 4099, "silu_mul", False)),
        *(("bfloat16", 4096, "add_rms", True), ("bfloat16", 4099, "rms", False)),
    ),
    "rms_norm": (("bfloat16", 4096), ("float16", 16384), ("bfloat16", 4096, True)),
    "gate_halves": (("bfloat16", "silu_mul"),),
    "row_sums": ((32,), (128,)),
    "adapted_rows": (("bfloat16", "silu_mul", True), ("float16", "swiglu_oai", False)),
    "embedding_rows": (("bfloat16", "q4_k", 4096), ("float16", "iq4_g32_fp16", 4096, False)),
    "step_attention": (("bfloat16", 128, 4, 2, False), ("float16", 64, 8, 1, True)),
}
"""By the helper's name, what its ``of`` takes beside the device; dtypes by name. All are in every sample."""
GPUS = (
    ("NVIDIA H200", (9, 0), 132, 232448),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 101376),
)


# --- what runs inside one tree, which may be older or newer than this file ---


def _first(*names: str) -> Any:
    """The first of several ``module:attribute`` that this tree has, modules aside."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            value = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            continue
        if not isinstance(value, ModuleType):
            return value
    raise ImportError(f"none of {', '.join(names)}")


def problem_of(case: dict[str, Any]) -> Any:
    """The GemmProblem that a case describes, in this tree's terms."""
    import torch

    import w4gemm

    layouts = _first("w4gemm.packing.layouts:LAYOUTS", "w4gemm.layouts:LAYOUTS")
    names = set(layouts) if isinstance(layouts, dict) else {layout.name for layout in layouts}
    fp8 = case["dtype"] == "float8_e4m3fn"
    layout = ("mma8" if fp8 else "mma16") if "mma16" in names else ("sm90_fp8" if fp8 else "sm90")
    epilogue = dict(case["epilogue"])
    if "out_dtype" in epilogue:
        epilogue["out_dtype"] = getattr(torch, epilogue["out_dtype"])
    name, capability, sms, shared_memory = case["gpu"]
    device = w4gemm.Device(kind="cuda", name=name, capability=tuple(capability), sms=sms, shared_memory=shared_memory)
    return w4gemm.GemmProblem(
        case["m"] * max(1, case["experts"]),
        case["n"],
        case["k"],
        getattr(torch, case["dtype"]),
        w4gemm.WeightFormat.parse(case["format"]),
        layout,
        w4gemm.Epilogue(**epilogue),
        device=device,
        experts=case["experts"],
        gathered=case["gathered"],
    )


def drawn(count: int, seed: int, only: str) -> list[dict[str, Any]]:
    """``count`` cases of this tree, evenly over the kinds that there are."""
    import w4gemm

    r = random.Random(seed)
    kinds: Counter[tuple[Any, ...]] = Counter()
    cases: dict[str, dict[str, Any]] = {}
    for _ in range(40 * count):
        if len(cases) == count:
            break
        fp8 = r.random() < 0.4
        (n, k), grouping = r.choice(SIZES), r.choice((0, 0, 1, 2))
        case = {
            "m": r.choice(TOKENS),
            "n": n,
            "k": k,
            "dtype": "float8_e4m3fn" if fp8 else r.choice(("bfloat16", "bfloat16", "float16")),
            "format": r.choice(FORMATS_FP8 if fp8 else FORMATS_16),
            "epilogue": dict(r.choice(EPILOGUES)),
            "experts": 8 if grouping else 0,
            "gathered": grouping == 2,
            "gpu": r.choices(GPUS, (8, 1, 1))[0],
        }
        if fp8 and r.random() < 0.2:
            case |= {"epilogue": dict(BLOCK_SCALE), "format": r.choice((BLOCKS, case["format"]))}
        elif fp8:
            case["epilogue"]["token_scale"] = True
        legal = [name for name in w4gemm.configs(problem_of(case)) if only in name and not name.startswith("cpu")]
        by_kind: dict[tuple[Any, ...], list[str]] = {}
        for name in legal:
            kernel, config = name.split("/")
            extras = ("+" in config, "_k" in config)
            by_kind.setdefault((kernel, config.split("_")[2], extras, grouping, fp8), []).append(name)
        if not by_kind:
            continue
        kind = min(by_kind, key=lambda kind: (kinds[kind], r.random()))
        case["config"] = r.choice(by_kind[kind])
        text = json.dumps(case, sort_keys=True)
        if text not in cases:
            cases[text] = case
            kinds[kind] += 1
    return list(cases.values()) + helper_cases(only)


def helpers_by_name() -> dict[str, Any]:
    """The helpers of this tree, of which an older one may have none."""
    return {helper.name: helper for helper in getattr(importlib.import_module("w4gemm.kernels"), "HELPERS", ())}


def helper_cases(only: str) -> list[dict[str, Any]]:
    """The cases of the helpers that this tree has."""
    known = helpers_by_name()
    named = [(name, options) for name, several in HELPERS.items() for options in several]
    return [{"helper": name, "given": options} for name, options in named if name in known and only in name]


def compile_helper(case: dict[str, Any]) -> None:
    """Compile a helper for the first of ``GPUS``."""
    import torch

    import w4gemm

    name, capability, sms, shared_memory = GPUS[0]
    device = w4gemm.Device(kind="cuda", name=name, capability=capability, sms=sms, shared_memory=shared_memory)
    first, *others = case["given"]
    first = getattr(torch, first) if isinstance(first, str) else first
    helper = helpers_by_name()[case["helper"]].of(device, first, *others)
    importlib.import_module("w4gemm.jit").compiled(helper.unit())


def code_of(case: dict[str, Any]) -> list[str]:
    """The instructions of each kernel of a case, compiled anew by this tree."""
    from sass import functions

    with tempfile.TemporaryDirectory(prefix="same-code-") as folder:
        os.environ["W4GEMM_CACHE_DIR"] = folder
        if "helper" in case:
            compile_helper(case)
        else:
            chosen = _first("w4gemm.choice:plan", "w4gemm.dispatch:plan", "w4gemm.choice:choose")
            made = chosen(problem_of(case), case["config"])
            for name in ("ready", "plan"):  # nothing is compiled before; "plan" is the older name
                if hasattr(made, name):
                    getattr(made, name)()
        (file,) = Path(folder).glob("*.o")  # none, if a variant that was compiled before serves this case too
        return functions(file.read_bytes())


def result_of(case: dict[str, Any]) -> dict[str, Any]:
    """``{"code": [...]}`` or ``{"error": ...}``."""
    try:
        return {"code": code_of(case)}
    except Exception as e:  # the other cases go on
        return {"error": f"{type(e).__name__}: {e}"}


def _child(command: str, *arguments: str) -> None:
    if command == "draw":
        count, seed, only = arguments
        print(json.dumps(drawn(int(count), int(seed), only)))
        return
    importlib.import_module("cutlass.cute")  # once, before the forks
    importlib.import_module("w4gemm")
    cases = json.load(sys.stdin)
    # a process each: what one has compiled, it does not compile again for another case of the same variant
    with multiprocessing.get_context("fork").Pool(int(arguments[0]), maxtasksperchild=1) as pool:
        for result in pool.imap(result_of, cases, chunksize=1):
            print(json.dumps(result), flush=True)


# --- the comparison ---


def run_in(tree: Path, *arguments: str, stdin: Any = None) -> Iterator[Any]:
    """The JSON lines that this file prints as a child whose ``w4gemm`` is that of ``tree``."""
    env = dict(os.environ, PYTHONPATH=f"{tree / 'src'}:{ROOT / 'tests'}", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, __file__, "--child", *arguments]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
        ) as child,
    ):
        assert child.stdin and child.stdout
        json.dump(stdin, child.stdin)
        child.stdin.close()
        for line in child.stdout:
            yield json.loads(line)
        if child.wait():
            errors.seek(0)
            raise RuntimeError(f"{tree}: {errors.read()[-2000:]}")


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def compiled_by(tree: Path, cases: list[dict[str, Any]], jobs: int, kept: Path | None) -> list[dict[str, Any]]:
    """The result of each case; those in the folder ``kept`` from there."""
    texts = [json.dumps(case, sort_keys=True) for case in cases]
    files = [kept / f"{hashlib.sha256(t.encode()).hexdigest()[:24]}.json" if kept else None for t in texts]
    outcomes = [json.loads(file.read_text()) if file and file.exists() else None for file in files]
    missing = [i for i, result in enumerate(outcomes) if result is None]
    results = run_in(tree, "code", str(jobs), stdin=[cases[i] for i in missing]) if missing else iter(())
    for done, (i, result) in enumerate(zip(missing, results, strict=True), 1):
        print(f"\r{tree.name}: {done}/{len(missing)} compiled", end="", file=sys.stderr)
        outcomes[i], file = result, files[i]
        if file and "code" in result:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(result))
    if missing:
        print(file=sys.stderr)
    return [result for result in outcomes if result is not None]


def append_row(out: Path, cases: list[dict[str, Any]], counts: Counter[str], commit: str, seed: int) -> None:
    """Append the counts of a comparison with ``commit`` to a file of results."""
    sys.path.insert(0, str(ROOT / "src"))
    from w4gemm.tuning import record

    facts = record.facts()
    compared = Counter(case["helper"] if "helper" in case else case["config"].split("/")[0] for case in cases)
    row = {
        "kind": "same_code",
        "run": record.run_name(facts),
        "against": commit[:12],
        "seed": seed,
        "variants": len(cases),
        **{name: counts[name] for name in ("equal", "differs", "error")},
        "kernels": dict(compared),
    }
    record.append(out, row | facts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="HEAD", metavar="COMMIT", help="the commit to compare with (HEAD)")
    parser.add_argument("--sample", type=int, default=150, metavar="N", help="how many variants (150)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only configs with this text, such as sm90_decode")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (all cores)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="append a JSON line with the counts to this file")
    args = parser.parse_args()

    commit = git("rev-parse", args.against)
    common = Path(git("rev-parse", "--path-format=absolute", "--git-common-dir"))
    kept = common / "same-code" / commit[:12]
    with tempfile.TemporaryDirectory(prefix="same-code-") as folder:
        before = Path(folder) / "tree"
        git("worktree", "add", "--detach", "--quiet", str(before), commit)
        try:
            (cases,) = run_in(before, "draw", str(args.sample), str(args.seed), args.only)
            old = compiled_by(before, cases, args.jobs, kept)
        finally:
            git("worktree", "remove", "--force", str(before))
    new = compiled_by(ROOT, cases, args.jobs, None)
    counts: Counter[str] = Counter()
    for case, *results in zip(cases, old, new, strict=True):
        failed = any("error" in result for result in results)
        outcome = "error" if failed else "equal" if results[0] == results[1] else "differs"
        counts[outcome] += 1
        if outcome != "equal":
            was, now = ([len(f.splitlines()) for f in r["code"]] if "code" in r else r["error"] for r in results)
            print(f"{outcome}: {json.dumps(case)}\n  instructions: {was} before, {now} now")
    print(
        f"{counts['equal']} equal, {counts['differs']} different, {counts['error']} not compiled, against {commit[:12]}"
    )
    if args.json:
        append_row(args.json, cases, counts, commit, args.seed)
    return 0 if counts["equal"] == len(cases) and cases else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(*sys.argv[2:])
    else:
        sys.exit(main())
