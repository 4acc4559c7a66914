"""Folders quantized by GPTQ or AutoRound hold the producer's numbers bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import test_awq
from quantized_model import Numbers, Writer, assert_loads, change, configure, put, refusals, stream, write_model
from tiny_model import LAYERS
from w4gemm import FormatError
from w4gemm.checkpoints import gptq, open_checkpoint
from w4gemm.integrations.transformers import load

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
DOWN = "model.layers.1.mlp.down_proj"
WIDTHS = ("int2_g32_fp16", "int8_g32_fp16", "int3_g32_fp16")


def writer(added: int, group_size: int = 32, g_idx: bool = True, **numbers: Any) -> Writer:
    """Pack modules as GPTQ does; ``added`` to a zero point before it is stored."""

    def write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        actual = Numbers.random(n, k, group_size, **numbers)
        bits = numbers.get("bits", 4)
        parts = {
            "qweight": stream(actual.codes.T, 0, bits),
            "qzeros": stream(actual.zeros.T + added & 2**bits - 1, 1, bits),
            "scales": actual.scales.T,
        }
        return parts | ({"g_idx": torch.from_numpy(actual.groups).int()} if g_idx else {}), actual.weight

    return write


@pytest.mark.parametrize(
    ("config", "write", "format"),
    [
        ({}, writer(-1), "int4_g32_fp16"),
        ({"checkpoint_format": "gptq_v2"}, writer(0), "int4_g32_fp16"),
        ({"checkpoint_format": "gptq_v2"}, writer(-1), "int4_g32_fp16"),  # mislabelled
        ({"sym": False}, writer(-1, zeros=(1, 15)), "int4_g32_zint_fp16"),
        ({"sym": False, "format": "gptq_v2"}, writer(0, zeros=(0, 15)), "int4_g32_zint_fp16"),
        ({"desc_act": True, "sym": False}, writer(-1, zeros=(1, 15), act_order=True), "int4_g32_zint_fp16"),
        ({"group_size": -1}, writer(-1, -1, g_idx=False, dtype=torch.bfloat16), "int4_col"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, writer(-1), "int4_g32_fp16"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel", "sym": False},
            writer(0, zeros=(0, 15), g_idx=False),
            "int4_g32_zint_fp16",
        ),
        (  # before 0.5 there was no packing_format
            {"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2", "sym": False},
            writer(0, zeros=(0, 15), g_idx=False),
            "int4_g32_zint_fp16",
        ),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:gptq:tritonv2", "sym": False},
            writer(-1, zeros=(1, 15), g_idx=False),
            "int4_g32_zint_fp16",
        ),
    ],
    ids=[
        *("v1", "v2", "mislabelled", "v1-asym", "v2-asym", "act-order", "col-bf16"),
        *("auto-round", "auto-round-v2", "auto-round-0.4", "auto-round-gptq-kernel"),
    ],
)
def test_weights_and_logits(tmp_path: Path, config: dict[str, Any], write: Writer, format: str) -> None:
    expected = write_model(tmp_path, CONFIG | config, write)
    model = assert_loads(tmp_path, expected, {format: 7 * LAYERS})
    biases = [layer.self_attn.q_proj.bias for layer in model.model.layers]
    assert all(bias is not None and bias.any() for bias in biases)
    scattered = config.get("desc_act", False)
    assert (model.model.layers[0].mlp.down_proj.weight.perm is not None) == scattered


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_other_bits(tmp_path: Path, bits: int) -> None:
    """Of 3 bits codes and zero points straddle words. GPTQModel's zero points of 0 come back, other files' are asked
    for."""
    middle, key = 2 ** (bits - 1), f"zero_stored_as_{2**bits - 1}"
    expected = write_model(tmp_path, CONFIG | {"bits": bits}, writer(-1, bits=bits, zeros=(middle, middle)))
    assert_loads(tmp_path, expected, {f"int{bits}_g32_fp16": 7 * LAYERS})
    v2 = CONFIG | {"bits": bits, "sym": False, "checkpoint_format": "gptq_v2", "desc_act": True}
    expected = write_model(tmp_path, v2, writer(0, bits=bits, zeros=(0, 2**bits - 1), act_order=True))
    assert_loads(tmp_path, expected, {f"int{bits}_g32_zint_fp16": 7 * LAYERS})
    expected = write_model(
        tmp_path, CONFIG | {"bits": bits, "sym": False}, writer(-1, bits=bits, zeros=(1, 2**bits - 1))
    )
    assert_loads(tmp_path, expected, {f"int{bits}_g32_zint_fp16": 7 * LAYERS})
    expected = write_model(tmp_path, CONFIG | {"bits": bits, "sym": False}, writer(-1, bits=bits, zeros=(0, 1)))
    with pytest.raises(FormatError, match=rf"stored as {2**bits - 1}, .* say which by {key}: 0 or {2**bits} in"):
        load(tmp_path)
    configure(tmp_path, **{key: 0})
    assert_loads(tmp_path, expected, {f"int{bits}_g32_zint_fp16": 7 * LAYERS})
    configure(tmp_path, **{key: 2**bits})
    layer = open_checkpoint(tmp_path).weight(DOWN)
    assert layer.format.zero == "float" and layer.dequantize().min() < expected[DOWN].min()
    configure(tmp_path, **{key: 3})
    with pytest.raises(FormatError, match=f"{key} is 3, wanted 0 or {2**bits}" if bits != 2 else "holds no|wanted"):
        open_checkpoint(tmp_path)


def planes(numbers: np.ndarray, axis: int, bits: int) -> torch.Tensor:
    """int32: numbers along ``axis`` as planar_pack_rows and planar_pack_cols of GPTQModel 8b1fa41 pack them
    (utils/planar_packing.py): of 32 numbers the words of the lowest 8, 4, 2 or 1 bits, then of the next ones."""
    moved = np.moveaxis(numbers, axis, 0)
    blocks = moved.reshape(-1, 32, moved.shape[1])
    words, offset = [], 0
    for width in {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}[bits]:
        plane = (blocks >> offset & (1 << width) - 1).reshape(len(blocks), width, 32 // width, -1)
        words.append((plane << (np.arange(32 // width) * width)[:, None]).sum(2))
        offset += width
    rows = np.concatenate(words, 1).reshape(-1, moved.shape[1]).astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(rows, 0, axis)))


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_codes_in_planes(tmp_path: Path, bits: int) -> None:
    """gptq_p stores z itself. No integer of 7 bits is a format's, so that int8 holds them."""

    def write(sym: bool) -> Writer:
        def module(name: str, n: int, k: int) -> Any:
            middle = 2 ** (bits - 1)
            numbers = Numbers.random(
                n, k, 32, zeros=(middle, middle) if sym else (0, 2**bits - 1), act_order=not sym, bits=bits
            )
            parts = {
                "qweight": planes(numbers.codes.T, 0, bits),
                "qzeros": planes(numbers.zeros.T, 1, bits),
                "scales": numbers.scales.T,
            }
            return {**parts, "g_idx": torch.from_numpy(numbers.groups).int()}, numbers.weight

        return module

    config, element = CONFIG | {"bits": bits, "checkpoint_format": "gptq_p"}, f"int{8 if bits == 7 else bits}"
    sym = write_model(tmp_path / "sym", config, write(True))
    asym = write_model(tmp_path / "asym", config | {"sym": False, "desc_act": True}, write(False))
    for folder, expected, zero in (("sym", sym, ""), ("asym", asym, "_zint")):
        checkpoint = open_checkpoint(tmp_path / folder)
        assert {str(module.format) for module in checkpoint.modules.values()} == {f"{element}_g32{zero}_fp16"}
        assert all(torch.equal(checkpoint.weight(name).dequantize(), weight) for name, weight in expected.items())
    if bits != 3:
        configure(tmp_path / "sym", checkpoint_format="gptq_v2")
        with pytest.raises(
            FormatError, match=f"{bits} bits, which checkpoint_format 'gptq_p' alone has, got 'gptq_v2'"
        ):
            open_checkpoint(tmp_path / "sym")
    put(tmp_path / "asym", f"{DOWN}.qweight", torch.zeros(bits + 1, 64).int())
    with pytest.raises(FormatError, match=f"{DOWN}: its qweight has {bits + 1} rows, wanted a multiple of {bits}"):
        open_checkpoint(tmp_path / "asym")


def test_planes_of_codes_that_fill_words(tmp_path: Path) -> None:
    """Of 2, 4 and 8 bits there is one plane, so that gptq_p is gptq_v2."""
    config = CONFIG | {"sym": False, "checkpoint_format": "gptq_p"}
    for bits in (2, 4, 8):
        write = writer(0, bits=bits, zeros=(0, 2**bits - 1))
        expected = write_model(tmp_path / str(bits), config | {"bits": bits}, write)
        checkpoint = open_checkpoint(tmp_path / str(bits))
        assert torch.equal(checkpoint.weight(DOWN).dequantize(), expected[DOWN])


def test_lm_head_and_layers_that_were_not_converted(tmp_path: Path) -> None:
    expected = write_model(tmp_path, CONFIG, writer(-1), dense=("k_proj", "0.mlp.up_proj"))
    assert "lm_head" in expected
    assert_loads(tmp_path, expected, {"int4_g32_fp16": 7 * LAYERS + 1 - 3})


def test_layers_with_their_own_settings(tmp_path: Path) -> None:
    coarse = writer(-1, 64)

    def write(name: str, n: int, k: int) -> Any:
        return (coarse if name.endswith("q_proj") else writer(-1))(name, n, k)

    expected = write_model(
        tmp_path, CONFIG | {"dynamic": {"-:.*lm_head": {}, r"+:.*\.q_proj$": {"group_size": 64}}}, write
    )
    formats = {"int4_g32_fp16": 6 * LAYERS, "int4_g64_fp16": LAYERS}
    assert_loads(tmp_path, expected, dict(sorted(formats.items(), reverse=True)))
    configure(tmp_path, dynamic=None, extra_config={".*q_proj": {"group_size": 64}, DOWN: {"sym": True}})
    assert_loads(tmp_path, expected, formats)
    configure(tmp_path, dynamic={f"-:{DOWN}": {}})
    with pytest.raises(FormatError, match=f"{DOWN}: config.json says by '-:{DOWN}' that it is dense"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "auto-round"])
def test_layers_with_their_own_bits(method: str, tmp_path: Path) -> None:
    """A mixed folder of GPTQModel or AutoRound. A model that computes gates and ups in one product reads both."""
    bits = {"up_proj": 8, "down_proj": 3, "o_proj": 2}

    def write(name: str, n: int, k: int) -> Any:
        own = bits.get(name.rpartition(".")[2], 4)
        return writer(-1, bits=own, zeros=(2 ** (own - 1),) * 2)(name, n, k)

    settings = {f".*{leaf}": {"bits": own} for leaf, own in bits.items()}
    if method == "gptq":
        mixed = CONFIG | {"dynamic": {f"+:{pattern}": own for pattern, own in settings.items()}}
    else:
        mixed = CONFIG | {"quant_method": method, "packing_format": "auto_round:auto_gptq", "extra_config": settings}
    expected = write_model(tmp_path, mixed, write)
    model = assert_loads(tmp_path, expected, {"int4_g32_fp16": 4 * LAYERS} | dict.fromkeys(WIDTHS, LAYERS))
    assert model.model.layers[0].mlp.up_proj.weight.format.bits == 8


def test_a_bias_of_zeros_that_the_model_does_not_have(tmp_path: Path) -> None:
    expected = write_model(tmp_path, CONFIG, writer(-1))
    change(tmp_path, lambda tensors: tensors.update({f"{DOWN}.bias": torch.zeros(64)}))
    model = assert_loads(tmp_path, expected, {"int4_g32_fp16": 7 * LAYERS})
    assert model.get_submodule(DOWN).bias is None
    change(tmp_path, lambda tensors: tensors.update({f"{DOWN}.bias": torch.ones(64)}))
    with pytest.raises(FormatError, match="down_proj has a bias, its config wants none"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("dynamic", "size"),
    [
        ({r".*\.q_proj": {"group_size": 32}, ".*": {"group_size": 64}}, 32),
        ({".*": {"group_size": 64}, r".*\.q_proj": {"group_size": 32}}, 64),
        ({r"model\.": {"group_size": 32}, "-:.*": {}}, 32),
        ({"-:layers": {}, "q_proj": {"group_size": 64}}, 128),  # these are in the middle of the name
    ],
    ids=["first", "last", "before a dense one", "middle"],
)
def test_the_first_pattern_that_matches_from_the_beginning(dynamic: dict[str, Any], size: int) -> None:
    packing = gptq.GPTQPacking({"group_size": 128, "dynamic": dynamic})
    settings = packing._settings("model.layers.0.self_attn.q_proj")
    assert settings["group_size"] == size


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_folder_whose_config_is_in_a_file_of_its_own(method: str, tmp_path: Path) -> None:
    """AutoGPTQ and AutoAWQ wrote such folders in 2023. What the error asks for helps."""
    source, file = {
        "gptq": ((CONFIG, writer(-1)), "quantize_config.json"),
        "awq": ((test_awq.CONFIG, test_awq.writer()), "quant_config.json"),
    }[method]
    expected = write_model(tmp_path, *source)
    config = json.loads((tmp_path / "config.json").read_text())
    own = {key: value for key, value in config.pop("quantization_config").items() if key != "quant_method"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / file).write_text(json.dumps(own))
    with pytest.raises(FormatError, match=f'its {file} is of a quantized model.* with "quant_method": "{method}"$'):
        load(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "quantized-4bit.safetensors")  # names of theirs were such
    with pytest.raises(FormatError, match=f'its weights are packed.* with "quant_method": "{method}"$'):
        open_checkpoint(tmp_path)  # as `w4gemm inspect` does, which listed dense layers
    (tmp_path / "quantized-4bit.safetensors").rename(tmp_path / "model.safetensors")
    quantization = {**json.loads((tmp_path / file).read_text()), "quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    checkpoint = open_checkpoint(tmp_path)
    assert all(torch.equal(checkpoint.weight(name).dequantize(), weight) for name, weight in expected.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"bits": 5},
            "its weight has 5 bits, which checkpoint_format 'gptq_p' alone has, got 'gptq'; wanted 2 or 3 or",
        ),
        ({"bits": 9}, "its weight has 9 bits, wanted 2 or 3 or 4 or 8"),
        ({"bits": 8}, r"scales has shape \(3, 64\), wanted \(2, 64\)"),
        ({"group_size": 20}, "group_size: wanted a positive multiple of 16"),
        ({"group_size": 64}, r"scales has shape \(\d, \d+\), wanted \(\d, \d+\)"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', whose packing is not known; wanted gptq or"),
        ({"rotation": "hadamard"}, "rotation rotates activations while the model runs, which cannot"),
        ({"adapter": {"name": "lora", "path": "eora", "rank": 64}}, "adapter is 'eora', whose product of low rank"),
        ({"spinquant_config": {"r4": True}}, "spinquant_config rotates activations while the model runs"),
        ({"pack_dtype": "int16"}, "pack_dtype is 'int16', wanted 'int32'"),
        ({"dynamic": {"(": {}}}, r"dynamic: '\(' is no regular expression: .*unterminated"),
        ({"quant_method": "eetq"}, "quantized by 'eetq', which cannot be loaded yet; what can be loaded.*gptq, awq"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:mlx"},
            "packing_format is 'auto_round:mlx', wanted one of",
        ),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_model(tmp_path, CONFIG, writer(-1))
    configure(tmp_path, **settings)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path)


def test_act_order_without_the_group_of_each_column(tmp_path: Path) -> None:
    """In order, the columns would have the scales of other groups."""
    write_model(tmp_path, CONFIG | {"desc_act": True}, writer(-1, act_order=True))
    refusals(tmp_path)(f"{DOWN}: it has no g_idx, which says", lambda t: t.pop(f"{DOWN}.g_idx"))


def test_damaged_folders(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIG, writer(-1))
    refused = refusals(tmp_path)
    refused(f"{DOWN}: there is no qweight beside its g_idx, qzeros, scales", lambda t: t.pop(f"{DOWN}.qweight"))
    refused(f"{DOWN}: there is no scales", lambda t: t.pop(f"{DOWN}.scales"))
    refused(
        f"no tensor for {DOWN}.weight",
        lambda t: [t.pop(f"{DOWN}.{x}") for x in ("qweight", "qzeros", "scales", "g_idx")],
    )
    refused(f"{DOWN}: scales is F32, wanted F16 or BF16", lambda t: t.update({f"{DOWN}.scales": torch.ones(3, 64)}))
    refused(f"{DOWN}: qzeros has shape", lambda t: t.update({f"{DOWN}.qzeros": torch.ones(2, 8).int()}))
    refused(f"{DOWN}: g_idx: group 0 wants 32", lambda t: t.update({f"{DOWN}.g_idx": torch.ones(96).int()}))
    refused(
        f"{DOWN}: scales: the weights of 192 groups would not be finite",
        lambda t: t[f"{DOWN}.scales"].fill_(float("nan")),
    )
    refused(f"{DOWN}: config.json says that it is symmetric, but", lambda t: t[f"{DOWN}.qzeros"][0].fill_(0x77777776))
    refused(
        f"weight of {DOWN} has shape",
        lambda t: t.update(
            {
                f"{DOWN}.{x}": t[f"model.layers.1.mlp.up_proj.{x}"].clone()
                for x in ("qweight", "qzeros", "scales", "g_idx")
            }
        ),
    )
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match="is not a whole safetensors file"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FormatError, match="there is no model.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("activation", "expected"), [("w4afp8", "fp8"), ({"mode": "w4afp8"}, "fp8"), ("w4a_nvfp4", None), (None, None)]
)
def test_activations_that_gptqmodel_wants(tmp_path: Path, activation: Any, expected: str | None) -> None:
    weights = write_model(tmp_path, CONFIG | {"activation": activation}, writer(-1))
    checkpoint = open_checkpoint(tmp_path)
    w = checkpoint.weight(DOWN)
    assert checkpoint.modules[DOWN].activations == w.activations == expected
    assert torch.equal(w.dequantize(), weights[DOWN])


def test_zero_points_stored_as_15(tmp_path: Path) -> None:
    """They are 0 or 16, as the config says; without its word they are refused."""
    expected = write_model(tmp_path, CONFIG | {"sym": False}, writer(-1, zeros=(13, 16)))
    with pytest.raises(
        FormatError,
        match=f"{DOWN}: .* of its zero points are stored as 15, which in version 1 of the format means 0 to some "
        "readers and 16 to others; say which by zero_stored_as_15: 0 or 16 in quantization_config",
    ):
        open_checkpoint(tmp_path).weight(DOWN)
    configure(tmp_path, zero_stored_as_15=16)
    assert_loads(tmp_path, expected, {"int4_g32_zfloat_fp32": 7 * LAYERS})
    configure(tmp_path, zero_stored_as_15=15)
    with pytest.raises(FormatError, match="zero_stored_as_15 is 15, wanted 0 or 16"):
        open_checkpoint(tmp_path)
    configure(tmp_path, zero_stored_as_15=0)
    w = open_checkpoint(tmp_path).weight(DOWN)
    numbers = Numbers.random(w.n, w.k, 32, zeros=(13, 16))
    as_0 = replace(numbers, zeros=numbers.zeros % 16)
    assert str(w.format) == "int4_g32_zint_fp16" and torch.equal(w.dequantize(), as_0.weight)
    assert (numbers.zeros == 16).any()


@pytest.mark.parametrize("meta", [{"quantizer": ["optimum:1.24", "gptqmodel:2.2.0"]}, {"quantizer": "gptqmodel:7.7.0"}])
def test_zero_points_of_0_that_gptqmodel_wrote(tmp_path: Path, meta: dict[str, Any]) -> None:
    """It subtracts 1 from each of eight zero points in one word, so that 0 borrows from the one above."""

    def write(name: str, n: int, k: int) -> Any:
        parts, expected = writer(0, zeros=(0, 15))(name, n, k)
        words = parts["qzeros"].long() - 0x11111111
        return {**parts, "qzeros": torch.where(words < -(2**31), words + 2**32, words).int()}, expected

    expected = write_model(tmp_path, CONFIG | {"sym": False, "meta": meta}, write)
    assert_loads(tmp_path, expected, {"int4_g32_zint_fp16": 7 * LAYERS})
    # "meta" is free for whatever tools note
    for noted in ({"quantizer": ["auto_gptq:0.7"]}, "mine", ["mine"], {"quantizer": 7}, {"quantizer": [7, None]}):
        configure(tmp_path, meta=noted)
        with pytest.raises(FormatError, match="zero points are stored as 15"):
            open_checkpoint(tmp_path).weight(DOWN)
