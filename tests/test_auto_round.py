"""Folders that AutoRound wrote in 4-bit floats or MXINT4 hold its numbers bit for bit, weights in MXFP8 beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from quantized_model import Writer, assert_loads, configure, write_model
from tiny_model import LAYERS
from w4gemm import FormatError, WeightFormat
from w4gemm.checkpoints import open_checkpoint
from w4gemm.integrations.transformers import load, summarize

MX = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:llm_compressor",
    "bits": 4,
    "data_type": "mx_fp",
    "group_size": 32,
    "act_bits": 4,
    "act_data_type": "mx_fp_rceil",
}
NV = MX | {"data_type": "nv_fp", "group_size": 16, "act_data_type": "nv_fp4_with_static_gs"}
INT = MX | {"packing_format": "auto_round", "data_type": "mx_int"}
E2M1 = torch.tensor(WeightFormat.parse("mxfp4").element_rule.values)
QUARTERS = torch.cat((torch.arange(8), -torch.arange(8))) / 4


def writer(values: torch.Tensor = E2M1, nv: bool = False, fp8: str = " ") -> Writer:
    """``fp8``: a part of the names of modules in MXFP8."""

    def write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        g = torch.Generator().manual_seed(n + k)
        exponents = torch.randint(116, 124, (n, k // 32), generator=g)
        scales = torch.exp2(exponents - 127.0)
        if fp8 in name:
            weight = (torch.randn(n, k, generator=g) * 100).to(torch.float8_e4m3fn)
            numbers = weight.float() * scales.repeat_interleave(32, 1)
            return {"weight": weight, "weight_scale": exponents.to(torch.uint8)}, numbers
        codes = torch.randint(0, 16, (n, k), generator=g)
        stored = {"weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
        if not nv:
            return stored | {"weight_scale": exponents.to(torch.uint8)}, values[codes] * scales.repeat_interleave(32, 1)
        scales = (torch.rand(n, k // 16, generator=g) * 400).to(torch.float8_e4m3fn)
        stored |= {"weight_global_scale": torch.tensor([2.0**14]), "input_global_scale": torch.ones(1)}
        return stored | {"weight_scale": scales}, values[codes] * scales.float().repeat_interleave(16, 1) / 2**14

    return write


@pytest.mark.parametrize(
    ("config", "write", "format"),
    [(MX, writer(), "mxfp4"), (NV, writer(nv=True), "nvfp4"), (INT, writer(QUARTERS), "int4_g32")],
    ids=["mxfp4", "nvfp4", "mxint4"],
)
def test_weights_and_logits(tmp_path: Path, config: dict[str, Any], write: Writer, format: str) -> None:
    expected = write_model(tmp_path, config, write)
    assert_loads(tmp_path, expected, {str(WeightFormat.parse(format)): 7 * LAYERS})
    assert {module.activations for module in open_checkpoint(tmp_path).modules.values()} == {None}


def test_mxfp8_beside_mxfp4(tmp_path: Path) -> None:
    expected = write_model(tmp_path, MX, writer(fp8="self_attn"))
    configure(tmp_path, extra_config={".*self_attn.*": {"bits": 8}}, act_bits=8)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.modules.keys() == expected.keys()
    assert {module.activations for name, module in checkpoint.modules.items() if "mlp" in name} == {"fp8"}
    for name, weight in expected.items():
        assert torch.equal(checkpoint.weight(name).dequantize(), weight), name
    assert summarize(load(tmp_path)[0]).formats == {"e4m3_g32_e8m0": 4 * LAYERS, "e2m1_g32_e8m0": 3 * LAYERS}


@pytest.mark.parametrize("packing", ["auto_round:fp8", "auto_round:fp8_static"])
def test_fp8(tmp_path: Path, packing: str) -> None:
    config = {"quant_method": "auto-round", "packing_format": packing, "bits": 8, "data_type": "fp"}

    def write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        codes, scale = torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(n, 1) + 0.5
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}, codes.float() * scale

    expected = write_model(tmp_path, config, write)
    checkpoint = open_checkpoint(tmp_path)
    assert {str(module.format) for module in checkpoint.modules.values()} == {"e4m3_col_fp32"}
    assert all(torch.equal(checkpoint.weight(name).dequantize(), weight) for name, weight in expected.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing_format": ["auto_round"]}, r"packing_format is \['auto_round'\], wanted one of auto"),
        ({"packing_format": "auto_round:mlx"}, "packing_format is 'auto_round:mlx', wanted one of auto"),
        ({"data_type": "nvfp4_v2"}, "its format is 'nvfp4_v2', wanted"),
        ({"bits": 8}, "its weight has 8 bits, wanted 4"),
        ({"rotation_config": {"hadamard_type": "random"}}, "rotation_config rotates activations while the model runs"),
        # of AutoRound 0.12
        ({"hadamard_config": {"block_size": 32, "hadamard_type": "hadamard"}}, "hadamard_config rotates activations"),
        ({"data_type": "nv_fp"}, "weight_scale is U8, wanted F8_E4M3"),
        ({"data_type": "int", "packing_format": "auto_round"}, "weight_packed is U8 of shape .*, wanted qweight or"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_model(tmp_path, MX, writer())
    configure(tmp_path, **settings)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path)
