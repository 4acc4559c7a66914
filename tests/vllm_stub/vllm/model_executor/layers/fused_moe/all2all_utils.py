"""The first and the last step of a mixture of experts."""

import stub_dispatch


def maybe_make_prepare_finalize(moe, quant_config, routing_tables=None, allow_new_interface=False):
    assert allow_new_interface
    batched = moe.moe_parallel_config.all2all_backend == "deepep_low_latency"
    return stub_dispatch.Batched(moe) if batched else stub_dispatch.NoDPEP(moe)
