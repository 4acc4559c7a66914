"""Faults of the layer of experts in one launch: handoffs between its warps, CTAs and launches."""

from __future__ import annotations

from planted_faults.fault import Fault

_EXPERT_LAYER = "src/w4gemm/kernels/expert_layer/kernel.py"
_SHARES = "src/w4gemm/kernels/expert_layer/shares.py"
_REQUESTS = "src/w4gemm/kernels/expert_layer/requests.py"
_TALLY = "src/w4gemm/kernels/expert_layer/tally.py"
_ONE_LAUNCH = "tests/test_expert_layer.py -k "

FAULTS = (
    Fault(
        "rows are published while threads still store them",
        _EXPERT_LAYER,
        "            cute.arch.sync_threads()  # the rows of all threads are stored\n",
        "",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "a flag is stored without release",
        "src/w4gemm/ptx/memory.py",
        "st.release.gpu.global.b32 [$0], $1;",
        "st.relaxed.gpu.global.b32 [$0], $1;",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "a flag is read without acquire",
        "src/w4gemm/ptx/memory.py",
        "ld.acquire.gpu.global.b32 $0, [$1];",
        "ld.relaxed.gpu.global.b32 $0, [$1];",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "a share that a CTA has begun counts as computed",
        _EXPERT_LAYER,
        "vote_ballot_sync(flag != epoch * 2) == 0",
        "vote_ballot_sync(flag != epoch * 2 and flag != epoch * 2 - 1) == 0",
        _ONE_LAUNCH + "at_once",
    ),
    Fault(
        "rows are read although other CTAs have not stored all",
        _EXPERT_LAYER,
        "left = cutlass.select_(preferred > 0, Int32(0), first.left)",
        "left = first.left",
        _ONE_LAUNCH + "at_once",
    ),
    Fault(
        "lanes read a row of down that others have not stored",
        _EXPERT_LAYER,
        "            ahead[j] = ahead[4 + j]\n        cute.arch.sync_warp()\n",
        "            ahead[j] = ahead[4 + j]\n",
        _ONE_LAUNCH + "layers",
    ),
    Fault(
        "flags of the last launch are taken for this one's",
        _EXPERT_LAYER,
        "* 4, 1, Boolean(True))[0] + 1",
        "* 4, 1, Boolean(True))[0]",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "a warp that begins late takes the next launch's epoch for this one's",
        _EXPERT_LAYER,
        """        cute.arch.sync_threads()  # x of all threads is there
        if thread == 0:  # only now, because until the barrier warps read it
            store_relaxed(flags + Int64(EPOCHS_AT + cta) * 4, epoch)
""",
        """        if thread == 0:
            store_relaxed(flags + Int64(EPOCHS_AT + cta) * 4, epoch)
        cute.arch.sync_threads()
""",
        _ONE_LAUNCH + "begin_late",
    ),
    Fault(
        "of experts that several tokens chose, the share is that of different ones",
        _EXPERT_LAYER,
        "if active != layer.choices:",
        "if active > layer.choices:",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "a CTA that begins late zeroes parts of strips of down that others have left",
        _EXPERT_LAYER,
        "            if owned:\n",
        "            if lane >= 0:\n",
        _ONE_LAUNCH + "divided",
    ),
    Fault(
        "a part of zeros is taken for none",
        _EXPERT_LAYER,
        "Int32(-(2**31)), own[0]))",
        "Int32(0), own[0]))",
        _ONE_LAUNCH + "divided",
    ),
    Fault(
        "CTAs of a strip meet where those of other strips do",
        _EXPERT_LAYER,
        "right * neighbours + member, token",
        "right * neighbours, token",
        _ONE_LAUNCH + "divided",
    ),
    Fault(
        "of three parts of a strip, the first two and the last one do not meet",
        _EXPERT_LAYER,
        "            begin -= begin & width\n",
        "            begin -= 0\n",
        _ONE_LAUNCH + "divided",
    ),
    Fault(
        "all CTAs take the first one's epoch",
        _EXPERT_LAYER,
        "epoch = load_l2(flags + Int64(EPOCHS_AT + cta) * 4",
        "epoch = load_l2(flags + Int64(EPOCHS_AT) * 4",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "copies for down still arrive when a CTA computes another one's share",
        _EXPERT_LAYER,
        "                copies_wait()\n",
        "",
        _ONE_LAUNCH + "at_once",
    ),
    Fault(
        "the stages of another CTA's share begin where those of the own one ended",
        _EXPERT_LAYER,
        "cursor, stage = self.requests.at_row(t, memory, share, self.requests.first_step(share, rank)), Int32(0)\n",
        "cursor = self.requests.at_row(t, memory, share, self.requests.first_step(share, rank))\n",
        _ONE_LAUNCH + "at_once",
    ),
    Fault(
        "a CTA computes its own share in the place of another one's",
        _SHARES,
        "for c in (index, index + 1):",
        "for c in (cta, cta + 1):",
        _ONE_LAUNCH + "at_once",
    ),
    Fault(
        "of fewer steps than warps, warps without one lie between those that have one",
        _SHARES,
        "dealt = cutlass.max(steps, layer.warps)",
        "dealt = cutlass.max(steps, 1)",
        _ONE_LAUNCH + "layers",
    ),
    Fault(
        "an expert chosen twice counts twice by the weight of the first choice",
        _EXPERT_LAYER,
        "first, factor = c.firsts[choice], c.weights[choice]",
        "first, factor = c.firsts[choice], c.weights[cutlass.max(c.firsts[choice], 0)]",
        _ONE_LAUNCH + "sums_in_order",
    ),
    Fault(
        "weights are requested into a stage that lanes still read",
        _EXPERT_LAYER,
        "        cute.arch.sync_warp()\n        return self.requests.request(",
        "        return self.requests.request(",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "weights of gate_up are read a step too early",
        _EXPERT_LAYER,
        "        cute.arch.cp_async_wait_group(layer.num_stages - 1)\n        cute.arch.sync_warp()",
        "        cute.arch.cp_async_wait_group(layer.num_stages)\n        cute.arch.sync_warp()",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "a step of one block takes the second one of the step before",
        _EXPERT_LAYER,
        "if k_step < layer.steps_up - 1:",
        "if k_step < layer.steps_up:",
        _ONE_LAUNCH + "layers",
    ),
    Fault(
        "the second block of a step has the scales of the first",
        _REQUESTS,
        "second * block.stride + block.code_bytes",
        "block.code_bytes",
        _ONE_LAUNCH + "layers",
    ),
    Fault(
        "the last block of a strip of down is requested with the one behind it",
        _REQUESTS,
        "~(last & is_up) if layer.ragged_up else ~(last & ~is_up)",
        "~(last & is_up)",
        _ONE_LAUNCH + "layers",
    ),
    Fault(
        "activated rows are not as much larger as x",
        _EXPERT_LAYER,
        "return value * Float32(self.larger) if self.larger != 1.0 else value",
        "return value",
        _ONE_LAUNCH + "powers",
    ),
    Fault(
        "rows of the next expert's strip of down have the scales of the last one's",
        _EXPERT_LAYER,
        "if expert_done and not last:",
        "if column_done and not last:",
        _ONE_LAUNCH + "layers",
    ),
    Fault(
        "x is read before all threads have made theirs larger",
        _EXPERT_LAYER,
        "        cute.arch.sync_threads()  # x of all threads is there\n",
        "",
        _ONE_LAUNCH + "powers",
    ),
    Fault(
        "a round stores its partial sums over those of the round before",
        _EXPERT_LAYER,
        "memory.partials + round % 2 * (",
        "memory.partials + 0 * (",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "partial sums are added from the last warp on",
        _EXPERT_LAYER,
        "load_shared_f32x4(own.partials + warp * self.layer.slot_bytes)",
        "load_shared_f32x4(own.partials + (own.warps - 1 - warp) * self.layer.slot_bytes)",
        _ONE_LAUNCH + "ascending",
    ),
    Fault(
        "rows of tokens that did not choose an expert are read",
        _EXPERT_LAYER,
        "else (c.masks[slot] >> (lane // 4)) & 1 != 0",
        "else c.masks[slot] != 0",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "columns of experts without gates change places",
        _EXPERT_LAYER,
        "strip % 2 * 8 + quotient(quad, 2) * 4",
        "quotient(quad, 2) * 8 + strip % 2 * 4",
        _ONE_LAUNCH + "gates",
    ),
    Fault(
        "an expert that a token chose twice has one of both weights",
        _TALLY,
        "cutlass.select_(c.ids[other] == expert, c.weights[other]",
        "cutlass.select_(other == choice, c.weights[other]",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "the same where each warp tallies by itself",
        _TALLY,
        "cutlass.select_(same & (token == i // layer.top_k), weight",
        "cutlass.select_(same & (lane == i), weight",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "an expert that a token chose twice has two slots",
        _TALLY,
        "((other == expert) & (lane > i))",
        "((other == expert) & (lane > i + 1))",
        _ONE_LAUNCH + "routings",
    ),
    Fault(
        "the latter of two chains of sums is left out",
        "src/w4gemm/kernels/device/warp_product.py",
        "for others in sums[1:]:",
        "for others in sums[2:]:",
        _ONE_LAUNCH + "layers",
    ),
    Fault(
        "of equal experts the higher number is chosen",
        "src/w4gemm/kernels/device/router.py",
        "_BEYOND - warp_maximum(_where(key == top, _BEYOND - number, 0))",
        "warp_maximum(_where(key == top, number, 0))",
        "tests/test_router.py -k compiled",
    ),
    Fault(
        "a group with a bias has the value of one expert",
        "src/w4gemm/kernels/device/router.py",
        "        if const_expr(router.groups > 1):\n            size",
        "        if const_expr(router.groups > 1):\n            bias = None\n            size",
        "tests/test_router.py -k compiled",
    ),
    Fault(
        "the router's bias is in the weights",
        "src/w4gemm/kernels/device/router.py",
        "for e, other in zip(experts, scores, strict=True):",
        "for e, other in zip(experts, values, strict=True):",
        "tests/test_router.py -k compiled",
    ),
    Fault(
        "a launch reads what the launch in front may still write",
        _EXPERT_LAYER,
        "        cute.arch.griddepcontrol_wait()\n        cute.arch.griddepcontrol_launch_dependents()\n",
        "        cute.arch.griddepcontrol_launch_dependents()\n        cute.arch.griddepcontrol_wait()\n",
        _ONE_LAUNCH + "in_front",
    ),
)
