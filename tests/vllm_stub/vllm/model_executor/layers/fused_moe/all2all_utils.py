"""The first and the last step of a mixture of experts."""

import stub_dispatch


def maybe_make_prepare_finalize(moe, quant_config, routing_tables=None, allow_new_interface=False):
    assert allow_new_interface
    parallel = moe.moe_parallel_config
    if parallel.use_deepep_ll_kernels:
        return stub_dispatch.Batched(moe)
    received = parallel.use_deepep_ht_kernels or parallel.use_deepep_v2_kernels
    return stub_dispatch.Received(moe) if received else stub_dispatch.NoDPEP(moe)
