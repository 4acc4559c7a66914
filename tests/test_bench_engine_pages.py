"""The page of bench.engine, and the figures and profiles that it shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.engine import (  # noqa: E402
    launch,
    layer,
    offline,
    page,
    profile,
    rows,
    serve,
    sglang,
    tables,
    trace,
)
from bench.engine.models import model_named  # noqa: E402
from bench.engine.offline import Task  # noqa: E402
from bench.rows import read  # noqa: E402

from engine_samples import result  # noqa: E402
from w4gemm import W4Experts  # noqa: E402


def test_the_page_says_what_was_measured_in_an_engine():
    """docs/vllm.md says "measured" of the formats that were measured beside the engine's own kernels, in SGLang in a
    whole model, and "ran" or "measured" of those with any row."""
    stored = [row for row in read(launch.RESULTS) if row["phase"] == "decode"]
    compared = {(row["model"], row["format"]) for row in stored if row["impl"] != "w4gemm"}
    served = {True: set(), False: set()}
    for row in stored:
        if row["impl"] == "w4gemm":
            parts = {2 if "Experts" in kernel else 1 for kernel in row["kernels"]}
            served[(row["model"], row["format"]) in compared] |= {(row["format"], part) for part in parts}
    columns = {"4-bit linear layers": 3, "layers of 4-bit experts": 4}
    for row in read(sglang.RESULTS):
        whole = not row["model"].endswith("-layers")
        served[whole] |= {(row["format"], column) for what, column in columns.items() if what in row["took_over"]}
    lines = (ROOT / "docs/vllm.md").read_text().partition("## What was run")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    said = {
        (format, column): cell.split(",")[0].split(" ")[0]
        for name, *runs in cells
        for format in re.findall(r"`([\w.-]+)`", name)
        for column, cell in enumerate(runs, 1)
    }
    assert {cell for cell, word in said.items() if word == "measured"} == served[True]
    assert {cell: said[cell] for cell in served[False] - served[True]} == dict.fromkeys(
        served[False] - served[True], "ran"
    )


README_MODELS = {
    "Llama-3-8B, W4A16": ("llama-3-8b, gptq-int4-g128, NVIDIA H200", "llama-3-8b, gptq-int4-g128, NVIDIA H100"),
    "Llama-3-8B, W4A8": ("llama-3-8b, ct-int4-g128-fp8, NVIDIA H200", "llama-3-8b, ct-int4-g128-fp8, NVIDIA H100"),
    "Llama-3-70B, W4A16, two": (
        *("llama-3-70b, gptq-int4-g128, 2 x NVIDIA H200", "llama-3-70b, gptq-int4-g128, 2 x NVIDIA H100"),
    ),
    "Qwen2.5-32B, W4A16": ("qwen2.5-32b, gptq-int4-g128, NVIDIA H200", "qwen2.5-32b, gptq-int4-g128, NVIDIA H100"),
    "Qwen3-30B-A3B, W4A16": ("qwen3-30b-a3b, gptq-int4-g128, NVIDIA H200", "qwen3-30b-a3b, ct-int4-g128, NVIDIA H100"),
    "Qwen3-30B-A3B, W4A8": (
        *("qwen3-30b-a3b, ct-int4-g128-fp8, NVIDIA H200", "qwen3-30b-a3b, ct-int4-g128-fp8, NVIDIA H100"),
    ),
    "gpt-oss-20b, MXFP4": ("gpt-oss-20b, mxfp4, NVIDIA H200", "gpt-oss-20b, mxfp4, NVIDIA H100"),
    "DeepSeek-V3, W4A16": (
        *("deepseek-v3-5-layers, awq-int4-g128, NVIDIA H200", "deepseek-v3-5-layers, awq-int4-g128, NVIDIA H100"),
    ),
}
"""The beginnings of the README's rows, and of the sections of docs/benchmarks-vllm.md that they are made of."""


def ratios(section: str) -> dict[int, list[str]]:
    """Ratios over vLLM's choice and over its best kernel by batch, "-" if there is none; later runs come first."""
    found: dict[int, list[str]] = {}
    for each in (ROOT / "docs/benchmarks-vllm.md").read_text().split("\n## "):
        if each.startswith(section) and "torch.compile" in each.partition("\n")[0]:
            for batch, choice, best in re.findall(
                r"^\| decode, batch (\d+):.*\| (\S+) \| (\S+) \|$", each, re.MULTILINE
            ):
                old = found.setdefault(int(batch), ["-", "-"])
                found[int(batch)] = [o if o != "-" else new for o, new in zip(old, (choice, best), strict=True)]
    return found


def span(values: list[str]) -> str:
    numbers = sorted(float(value) for value in values if value != "-")
    return f"{numbers[0]:.2f} to {numbers[-1]:.2f}" if numbers else ""


def test_the_readme_has_the_ratios_of_decoding_in_vllm() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    for beginning, sections in README_MODELS.items():
        (line,) = (line for line in lines if line.startswith(f"| {beginning}"))
        wanted = []
        for section in sections:
            found = ratios(section)
            few = [found[batch] for batch in (1, 8, 64) if batch in found]
            over, best = span([choice for choice, _ in few]), span([best for (choice, best) in few if choice != "-"])
            choice, best_256 = found.get(256, ["-", "-"])
            wanted += [over + f" ({best})" * bool(best), choice.strip("-")]
            wanted[-1] += f" ({best_256})" * (choice != "-" and best_256 not in ("-", choice))
        assert [cell.strip() for cell in line.split("|")[2:-1]] == wanted, beginning


def test_figures_of_a_load():
    answers = [serve.Answer(0.1 * i, [0.01, 0.02], 3) for i in range(1, 5)]
    found = serve.figures(answers, 2.0, streamed=True)
    assert (found["tokens_s"], found["requests"], found["streamed"]) == (6.0, 4, True)
    assert (found["first_token_ms_p50"], found["first_token_ms_p99"]) == (250.0, 400.0)
    assert (found["between_tokens_ms_p50"], found["between_tokens_ms_p99"]) == (15.0, 20.0)
    found = serve.figures([serve.Answer(tokens=3, whole=i) for i in (1.0, 2.0, 4.0)], 3.0, streamed=False)
    assert found == {"requests": 3, "streamed": False, "tokens_s": 3.0, "answer_ms_p50": 2000, "answer_ms_p99": 4000}


def test_a_profile_is_that_of_decode_steps():
    """The steps before the last ones are left out, kernels are grouped by name, and time without kernels is gaps. The
    prefill's is whole."""

    def step(start: float, marlin_us: float) -> list[dict[str, object]]:
        marlin = {"cat": "kernel", "name": "marlin::Marlin<256>", "ts": start, "dur": marlin_us}
        sampler = {"cat": "kernel", "name": "_gumbel_sample_kernel", "ts": start + marlin_us + 8, "dur": 2.0}
        return [marlin, sampler, {"cat": "cpu_op", "name": "aten::mm", "ts": start, "dur": 1e6}]

    prefill = [event for i in range(2) for event in step(1000.0 * i, 900.0)]
    steps = [event for i in range(offline.PROFILED_STEPS) for event in step(2000.0 + 30 * i, 20.0)]
    found = trace.summarize(trace.last_steps(prefill + steps, offline.PROFILED_STEPS))
    row, whole = profile.rows_of([{"batch": 8, **found}], trace.summarize(prefill))
    assert (row["phase"], row["batch"], row["us_step"]) == ("profile", 8, 30.0)
    assert row["groups"] == {"4-bit products": 20.0, "sampling": 2.0} and row["gaps"] == 8.0
    assert "at batch 8, 30 us" in profile.table(row) and "67%" in profile.table(row)
    assert whole["groups"] == {"4-bit products": 1800.0, "sampling": 4.0} and whole["us_step"] == 1910.0
    text = "\n".join(tables.steps([{**row, "impl": "machete"}, {**whole, "impl": "machete"}]))
    assert "| a decode step at batch 8, us | machete |" in text and "| the prefill, us | machete |" in text
    with pytest.raises(ValueError, match="no kernel of a sampler runs more than 32 times"):
        trace.last_steps(prefill, offline.PROFILED_STEPS)


@pytest.mark.parametrize(
    "kernel, group",
    [
        ("void marlin_moe_wna16::Marlin<...>", "4-bit products"),
        ("kernel_cutlass_kernel_w4gemmkernelssm90_mixed_gemmkernelMixedGemm_object_at__...", "4-bit products"),
        ("kernel_cutlass_kernel_w4gemmkernelsactivation_quantize...", "quantization"),
        ("kernel_cutlass_kernel_w4gemmkernelsgate_halves...", "activation"),
        ("void cutlass::device_kernel<machete::MacheteKernel...>", "4-bit products"),
        ("nvjet_tst_128x64_64x9_2x1_v_bz_TNT", "16-bit products"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90...>>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<...>", "attention"),
        ("void vllm::fused_add_rms_norm_kernel<...>", "norm"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norm"),
        ("triton_red_fused_fused_add_rms_norm_machete_mm_2", "norm"),
        ("triton_poi_fused_machete_mm_mul_silu_slice_1", "activation"),
        ("triton_red_fused__to_copy_abs_clamp_cutlass_w4a8_mm_div_max_mul_reciprocal_silu_", "quantization"),
        ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_ovscale_TNT", "4-bit products"),
        ("void vllm::rotary_embedding_kernel<...>", "rope"),
        ("void vllm::act_and_mul_kernel<...>", "activation"),
        ("void vllm::moe::topkGatingSoftmax<...>", "routing"),
        ("void at::native::reduce_kernel<512, 1, ArgMaxOps...>", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
    ],
)
def test_kernels_are_grouped_by_what_they_do(kernel, group):
    assert profile.group_of(kernel) == group


def engine_rows(impl: str, gain: float, run: str = "1", **changed: object) -> list[dict[str, object]]:
    """Rows of an implementation that is ``gain`` times as fast as vLLM's choice, as a run writes them."""
    task = Task({}, 512, (1, 256), 128, 128, prefill=8192)
    found = result(4.0 / gain, [[7] * 128])
    found.decode.append({**result(8.0 / gain, [[7] * 128] * 256).decode[0], "batch": 256})
    common = {"kind": "engine", "run": run, "engine": "vllm", "engine_version": "0.26.0", "model": "llama-3-8b"}
    common |= {"format": "gptq-int4-g128", "dtype": "bfloat16", "gpus": 1, "mode": "graphs", "impl": impl}
    facts = {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11", "commit": "ab", "dirty": False, "utc": ""}
    measured = [{"start": "cold", **row} if row["phase"] == "start" else row for row in rows.rows_of(found, task)]
    return [{**common, "chosen": impl == "machete", **row, **facts, **changed} for row in measured]


def test_the_page_of_sample_rows():
    """The last run only; failed rows leave no trace; ratios are over vLLM's choice and over the best."""
    stored = [*engine_rows("w4gemm", 9.0, run="0"), *engine_rows("w4gemm", 1.5), *engine_rows("humming", 1.2)]
    stored += [*engine_rows("machete", 1.0), {**stored[0], "impl": "conch", "phase": "failed", "reason": "no"}]
    load = {"phase": "serve", "batch": 64, "tokens_s": 9000.0, "first_token_ms_p50": 80.0, "first_token_ms_p99": 120.0}
    load |= {"between_tokens_ms_p50": 6.0, "between_tokens_ms_p99": 9.0}
    stored += [
        {**row, **load} for row in stored if row["phase"] == "decode" and row["batch"] == 1 and row["run"] == "1"
    ]
    kl = {"phase": "agreement", "positions": 700, "kl_mean": 0.00012, "kl_max": 0.004, "top1": 0.995, "tokens_out": 64}
    stored += [{**row, **kl, "equal_prefix": 60.0} for row in stored[:1]]
    text = page.text(stored, "engine.jsonl")
    assert "| gptq-int4-g128 | w4gemm | 0.00012 | 0.004 | 99.5% | 60 |" in text
    assert "| decode, batch 1: tokens/s (ms a step) | 375 (2.67) | 250 (4.00) | 300 (3.33) | 1.50 | 1.25 |" in text
    assert "|  | w4gemm | machete, vLLM's choice | humming | over vLLM's choice | over the best |" in text
    assert "| llama-3-8b, gptq-int4-g128, NVIDIA H200, CUDA graphs only | 1 to 64 | 1.50 | 1.25 |" in text
    parallel = [{**row, "mode": "default+ep+eplb", "gpus": 2} for row in stored]
    where = "| llama-3-8b, gptq-int4-g128, 2 x NVIDIA H200, torch.compile, expert parallel, experts moved | 1 to 64 |"
    assert where in page.text(parallel, "engine.jsonl")
    assert "| prefill of 8192: tokens/s | 32,768 | 32,768 | 32,768 | 1.00 | 1.00 |" in text
    assert "| humming | 64 | 80.0 (120.0) | 6.0 (9.0) |" in text
    assert "conch" not in text and "| cold start: s | 20 |" in text


def test_the_page_keeps_an_earlier_run_of_more_implementations():
    first = [
        row for impl, gain in (("w4gemm", 1.2), ("machete", 1.0), ("humming", 1.1)) for row in engine_rows(impl, gain)
    ]
    last = [row for impl, gain in (("w4gemm", 1.5), ("machete", 1.0)) for row in engine_rows(impl, gain, run="2")]
    text = page.text([*first, *last], "engine.jsonl")
    assert "| llama-3-8b, gptq-int4-g128, NVIDIA H200, CUDA graphs only | 1 to 64 | 1.50 | - |" in text
    assert "| llama-3-8b, gptq-int4-g128, NVIDIA H200, CUDA graphs only, earlier (ab) | 1 to 64 | 1.20 | 1.09 |" in text
    assert page.text([*last, *first], "engine.jsonl") == text, "the time says which is earlier, not the place"
    text = page.text(
        [*last, *engine_rows("w4gemm", 1.6, run="3"), *engine_rows("machete", 1.0, run="3")], "engine.jsonl"
    )
    assert "earlier" not in text


def test_the_page_says_what_a_row_notes():
    rows_of_both = [*engine_rows("w4gemm", 0.8), *engine_rows("machete", 1.0)]
    noted = [{**row, "note": "an outlier."} if row.get("batch") == 256 else row for row in rows_of_both[:4]]
    text = page.text([*noted, *rows_of_both[4:]], "engine.jsonl")
    case = "llama-3-8b, gptq-int4-g128, NVIDIA H200, CUDA graphs only"
    assert text.count("decode, batch 256: an outlier.") == 2 and f"\n{case}: decode, batch 256: an outlier.\n" in text


def test_the_page_leaves_out_engines_that_ended_early():
    whole = [row for impl, gain in (("w4gemm", 1.2), ("machete", 1.0)) for row in engine_rows(impl, gain)]
    early = [row for row in engine_rows("w4gemm", 2.0, run="2", partial=True) if row.get("batch") != 256]
    assert page.text([*whole, *early], "engine.jsonl") == page.text(whole, "engine.jsonl")


def test_the_page_shows_an_engine_that_ended_early_if_no_run_measured_all():
    early = [row for row in engine_rows("machete", 1.0, partial=True) if row.get("batch") == 1]
    text = page.text([*engine_rows("w4gemm", 1.5), *early], "engine.jsonl")
    assert "| decode, batch 1: tokens/s (ms a step) | 375 (2.67) | 250 (4.00) | 1.50 | - |" in text
    assert "Ended before all was measured: machete." in text


def test_models_that_ran_alone_share_a_table():
    alone = engine_rows("w4gemm", 1.0, model="llama-3-8b-2-layers", kernels={"W4GemmLinearKernel": 8})
    text = page.text([*engine_rows("w4gemm", 1.2), *engine_rows("machete", 1.0), *alone], "engine.jsonl")
    line = "| llama-3-8b-2-layers | gptq-int4-g128 | NVIDIA H200 | 8 W4GemmLinearKernel | 4.00 |"
    assert line in text and text.count("llama-3-8b-2-layers") == 1
    moved = [{**row, "gpus": 2, "mode": "default+ep+eplb"} for row in alone]
    moved.append({**moved[0], "phase": "moves", "places": 6144, "moved": 5827, "intact": True})
    text = " ".join(page.text([*engine_rows("w4gemm", 1.2), *engine_rows("machete", 1.0), *moved], "a").split())
    assert "| 2 x NVIDIA H200 | 8 W4GemmLinearKernel |" in text
    assert (
        "5,827 of 6,144 places had another expert at the end, and the weights of all experts were as they were" in text
    )


def test_the_page_of_a_layer_of_experts():
    facts = engine_rows("w4gemm", 1.0)[0]
    times = {1: (10.0, 20.0), 64: (50.0, 40.0), 128: (60.0, 120.0)}
    stored = [
        {**facts, "mode": "layer", "phase": "experts", "batch": batch, "impl": impl, "us": us}
        for batch, both in times.items()
        for impl, us in zip(("w4gemm", "marlin"), both, strict=True)
    ]
    text = page.text([*engine_rows("w4gemm", 1.0), {**stored[0], "run": "0", "us": 1.0}, *stored], "engine.jsonl")
    assert "| tokens | 1 | 64 | 128 |\n|---|---|---|---|\n| w4gemm, us | 10.0 | 50.0 | 60.0 |" in text
    assert "| gain | 2.00 | 0.80 | 2.00 |" in text and "1 to 64 tokens: 1.26." in " ".join(text.split())
    other = [{**row, "model": "deepseek-v3-5-layers", "us": 2 * row["us"]} for row in stored]
    text = page.text([*engine_rows("w4gemm", 1.0), *stored, *other], "engine.jsonl")
    assert text.count("## One layer of experts") == 1 and "| w4gemm, us | 20.0 | 100.0 | 120.0 |" in text
    assert "One layer of deepseek-v3-5-layers," in text and "| w4gemm, us | 10.0 | 50.0 | 60.0 |" in text


def test_a_layer_of_experts_is_what_is_timed():
    sizes = layer.Sizes(experts=4, top_k=2, hidden=256, width=128)
    assert layer.Sizes.of(model_named("qwen3-30b-a3b")) == layer.Sizes(128, 8, 2048, 768)
    ours, draw = layer.Ours(sizes, "cpu"), layer.drawn(sizes, 3, 0, "cpu")
    assert all(len(set(ids)) == 2 for ids in draw.ids.tolist())
    gate_up, down = ours.layers[1]
    wanted = W4Experts(gate_up, down)(*draw)
    assert torch.equal(ours.call(draw, 1)(), wanted) and wanted.any()


def test_a_page_without_our_rows_has_no_ratios():
    text = page.text([*engine_rows("machete", 1.0), *engine_rows("humming", 1.2)], "engine.jsonl")
    assert "| 250 (4.00) | 300 (3.33) | - | - |" in text


@pytest.mark.skipif(not launch.RESULTS.exists(), reason="no stored rows")
def test_the_stored_page_is_that_of_the_stored_rows():
    stored = read(launch.RESULTS)
    assert page.PAGE.read_text() == page.text(stored, launch.RESULTS.name), "run python -m bench.report"
    assert page.PLOT.exists() and not any(row["dirty"] for row in stored)
