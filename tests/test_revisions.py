"""Nobody forgets a kernel's revision: a change of its device sources wants an answer, once."""

from __future__ import annotations

import json

import pytest

import revisions
from w4gemm.kernels import KERNELS, Kernel


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_revision_is_of_these_sources(kernel: Kernel):
    recorded = json.loads(revisions.RECORDED.read_text())
    now = {"revision": kernel.revision, "sources": revisions.source_hash(kernel.name)}
    assert recorded.get(kernel.name) == now, (
        f"{kernel.name}: its device sources or its revision changed since tests/revisions.json was written. If "
        "times measured before may no longer say which config is fastest, raise its `revision` in "
        f"{type(kernel).__module__}, "
        "so that tuned records are passed over; if not (python tests/same_code.py compares the machine code), keep it. "
        "Then run `python tests/revisions.py`."
    )


def test_what_counts_as_source():
    decode = [path.relative_to(revisions.ROOT).as_posix() for path in revisions.sources("sm90_decode")]
    assert "src/w4gemm/kernels/sm90_decode/kernel.py" in decode
    assert any("/device/" in path for path in decode)
    assert not any(path.endswith(("spec.py", "space.py")) or "sm80" in path for path in decode)
    assert revisions.sources("sm90_fp8_gemm") == revisions.sources("sm90_mixed_gemm")


def test_words_do_not_count(tmp_path):
    bare, told = tmp_path / "bare.py", tmp_path / "told.py"
    bare.write_text("A = 1\ndef f():\n    return '#'\n")
    told.write_text('"""What."""\n\nA = 1  # one\n\n\ndef f():\n    """Why."""\n    # so\n    return \'#\'\n')
    assert revisions.code(bare) == revisions.code(told)
