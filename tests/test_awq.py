"""Folders quantized by AWQ hold the producer's numbers bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from quantized_model import Numbers, Writer, assert_loads, configure, refusals, stream, write_model
from tiny_model import LAYERS
from w4gemm import FormatError
from w4gemm.checkpoints import open_checkpoint

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 32}
DOWN = "model.layers.1.mlp.down_proj"
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of the word that each nibble holds."""


def writer(group_size: int = 32, order: tuple[int, ...] = ORDER, **numbers: Any) -> Writer:
    def write(name: str, n: int, k: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        actual = Numbers.random(n, k, group_size, **numbers)
        return {
            "qweight": stream(actual.codes.T, 1, order=order),
            "qzeros": stream(actual.zeros.T, 1, order=order),
            "scales": actual.scales.T,
        }, actual.weight

    return write


@pytest.mark.parametrize(
    ("config", "write", "format"),
    [
        (CONFIG, writer(zeros=(0, 15)), "int4_g32_zint_fp16"),
        (CONFIG, writer(zeros=(0, 15), dtype=torch.bfloat16), "int4_g32_zint"),
        (CONFIG | {"sym": True}, writer(zeros=(0, 15)), "int4_g32_zint_fp16"),  # as transformers 5 writes it again
        (CONFIG | {"zero_point": False, "version": "GEMM"}, writer(), "int4_g32_fp16"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": -1}, writer(-1, zeros=(0, 15)), "int4_col_zint_fp16"),
        (CONFIG | {"pack_method": "reorder"}, writer(zeros=(0, 15)), "int4_g32_zint_fp16"),  # Quark's
        (CONFIG | {"pack_method": "order"}, writer(order=tuple(range(8)), zeros=(0, 15)), "int4_g32_zint_fp16"),
        (AUTO_ROUND | {"sym": True}, writer(), "int4_g32_fp16"),
        (AUTO_ROUND | {"sym": False}, writer(zeros=(0, 15)), "int4_g32_zint_fp16"),
    ],
    ids=["asym", "bf16", "rewritten", "sym", "col", "reorder", "order", "auto-round", "auto-round-asym"],
)
def test_weights_and_logits(tmp_path: Path, config: dict[str, Any], write: Writer, format: str) -> None:
    assert_loads(tmp_path, write_model(tmp_path, config, write), {format: 7 * LAYERS})


def test_lm_head_and_layers_that_were_not_converted(tmp_path: Path) -> None:
    config = CONFIG | {"modules_to_not_convert": ["k_proj"]}
    expected = write_model(tmp_path, config, writer(zeros=(0, 15)), dense=("k_proj",), architecture="llama")
    assert "lm_head" in expected
    assert_loads(tmp_path, expected, {"int4_g32_zint_fp16": 6 * LAYERS + 1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 3}, "its weight has 3 bits, wanted 4"),
        ({"bits": 8}, "its weight has 8 bits, wanted 4"),
        ({"group_size": 64}, "groups of 64 do not divide its 96 input features"),
        ({"pack_method": "blocks"}, "pack_method is 'blocks', wanted 'reorder' or 'order'"),
        ({"checkpoint_format": "gemv_fast"}, "checkpoint_format is 'gemv_fast', which packs in another order; wanted"),
        *(({"version": v}, f"version is '{v}'.*wanted 'gemm'") for v in ("gemv", "gemv_fast", "llm-awq", "marlin")),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    write_model(tmp_path, CONFIG, writer())
    configure(tmp_path, **settings)
    with pytest.raises(FormatError, match=message):
        open_checkpoint(tmp_path)


def test_damaged_folders(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIG, writer(zeros=(0, 15)))
    refused = refusals(tmp_path)
    refused(f"{DOWN}: there is no qweight beside its qzeros, scales", lambda t: t.pop(f"{DOWN}.qweight"))
    refused(f"{DOWN}: there is no qzeros", lambda t: t.pop(f"{DOWN}.qzeros"))
    refused(f"no tensor for {DOWN}.weight", lambda t: [t.pop(f"{DOWN}.{x}") for x in ("qweight", "qzeros", "scales")])
    refused(f"{DOWN}: qweight is I64, wanted I32", lambda t: t.update({f"{DOWN}.qweight": t[f"{DOWN}.qweight"].long()}))
    refused(f"{DOWN}: qzeros has shape", lambda t: t.update({f"{DOWN}.qzeros": torch.ones(2, 8).int()}))
    refused(
        r"no place for model\.layers\.1\.mlp\.down_proj\.g_idx", lambda t: t.update({f"{DOWN}.g_idx": torch.ones(96)})
    )
    configure(tmp_path, zero_point=False)
    refused("down_proj: config.json says that it is symmetric, but its zero points are 0 to 15", lambda t: None)
