"""bench.agreement: what it compares, and that it finds a model with other numbers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import agreement

from tiny_model import write_gguf


def reading(logits: list[list[float]], following: list[int], continued: list[int]) -> agreement.Reading:
    predicted = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1)
    return agreement.Reading(predicted, torch.tensor(following), [continued])


def test_the_figures_of_two_readings() -> None:
    even, other = [0.0, 0.0], [math.log(3), 0.0]  # (1/2, 1/2) and (3/4, 1/4)
    matrices = reading([even, other], [0, 0], [1, 2, 3])
    same = agreement.compare(matrices, matrices)
    assert (same["kl_mean"], same["kl_max"], same["top1"], same["equal_prefix"]) == (0, 0, 1, 3)
    found = agreement.compare(reading([other, [0.0, 1.0]], [0, 0], [1, 2, 4]), matrices)
    assert found["kl_max"] > found["kl_mean"] > 0 and found["top1"] == 0.5 and found["equal_prefix"] == 2
    assert found["perplexity_matrices"] == pytest.approx(1 / math.sqrt(1 / 2 * 3 / 4), rel=1e-3)


def test_a_tiny_model_agrees_with_its_matrices_and_less_so_with_fp8_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    monkeypatch.setattr(agreement, "tokens_of", lambda folder: ([5, 6, 7, 8, 9],))
    source, out = write_gguf(tmp_path / "model.gguf", tied=False), tmp_path / "rows.jsonl"
    formats = ["ct-int4-g32", "ct-int4-g32-fp8"]
    agreement.main(["--checkpoint", str(source), "--format", *formats, "--tokens-out", "4", "--out", str(out)])
    wide, fp8 = (json.loads(line) for line in out.read_text().splitlines())
    assert [row["format"] for row in (wide, fp8)] == formats and wide["positions"] == 4
    assert wide["kl_max"] < 1e-9 and wide["top1"] == 1 and wide["equal_prefix"] == 4
    assert fp8["kl_mean"] > 1e-9 and fp8["perplexity"] != fp8["perplexity_matrices"] == wide["perplexity_matrices"]
