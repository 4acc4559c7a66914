"""bench.counters, on pages as ncu prints them; it needs a GPU and ncu for more."""

from __future__ import annotations

import pytest
from bench import counters

RAW = """==PROF== Connected to process 7
"ID","Kernel Name","gpu__time_duration.sum","dram__cycles_active.avg.pct_of_peak_sustained_elapsed",\
"smsp__issue_active.avg.pct_of_peak_sustained_active","sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",\
"sm__inst_executed_pipe_fma_type_fp16.avg.pct_of_peak_sustained_active",\
"sm__inst_executed_pipe_uniform.avg.pct_of_peak_sustained_active",\
"sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",\
"l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed","l1tex__data_bank_writes.avg.pct_of_peak_sustained_elapsed",\
"l1tex__m_xbar2l1tex_read_sectors.avg.pct_of_peak_sustained_elapsed","smsp__inst_executed.sum",\
"smsp__pcsamp_sample_count","smsp__pcsamp_warps_issue_stalled_long_scoreboard",\
"smsp__pcsamp_warps_issue_stalled_long_scoreboard_not_issued","smsp__pcsamp_warps_issue_stalled_warpgroup_arrive",\
"smsp__pcsamp_warps_issue_stalled_selected"
"","","{unit}","%","%","%","%","%","%","%","%","%","inst","","warp","warp","warp","warp"
"0","kernel_w4gemm","57.79","75.98","64.75","46.33","28.55","8.5","13.44","31.0","22.26","40.1","29,672.00","1,000","300","290","100","150"
""".replace("\\\n", "")
SOURCE = """"Kernel Name","kernel_w4gemm",
"Address","Source","stall_long_sb"
"1","SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR7], R4","4"
"2","MOV R1, R2","0"
"3","@!P2 BRA 0x10","250"
"4","LDS R1, [R2]","30"
"5","BRA 0x20","16"
"""


@pytest.mark.parametrize("unit, us", [("us", 57.79), ("ms", 57790.0), ("ns", 0.06)])
def test_numbers_of_a_kernel(unit, us):
    (found,) = counters.counted(RAW.replace("{unit}", unit), SOURCE)
    assert found["us"] == us and found["instructions"] == 29672
    of_memory = {"dram": 76.0, "shared_reads": 31.0, "shared_writes": 22.3, "from_l2": 40.1}
    assert found["percent"] == of_memory | {"issue": 64.8, "alu": 46.3, "half": 28.6, "uniform": 8.5, "tensor": 13.4}
    assert found["share"] == {"mbarrier": 0.25, "selected": 0.15, "gmma": 0.1, "loads": 0.05}


def test_a_kernel_without_its_source_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        list(counters.counted(RAW.replace("{unit}", "us"), ""))


def test_layers():
    assert counters.shapes("8192x4096,128x1536x2048") == ((0, 8192, 4096), (128, 1536, 2048))
    with pytest.raises(ValueError, match="wanted layers like 8192x8192"):
        counters.shapes("8192")


def test_without_ncu(monkeypatch):
    with pytest.raises(SystemExit, match="no program 'nothing'"):
        counters.main(["--ncu", "nothing"])
