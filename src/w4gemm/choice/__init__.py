"""The choice of a kernel and a config for a problem: intervals of m, plans, measured choices, batch invariance.

Up to 256 tokens a plan is chosen once for an interval of m, as if m were the interval's last value, so that a call with
another number of tokens rarely has to choose. For more tokens a plan is chosen for m itself, from a shortlist of
configs, so that only a few kernels are compiled. Importing this does not import CuTe DSL.
"""

from w4gemm.choice.ahead import Prepared, prepare
from w4gemm.choice.choose import Choice, Decision, Plan, compiled_for, configs, decide, met, plan, recorded
from w4gemm.choice.explanation import Explanation, explain
from w4gemm.choice.intervals import (
    BOUNDS,
    WAVES_FROM,
    first_rows,
    interval,
    interval_of,
    planned,
    ragged,
    representative,
    representative_rows,
    span,
)
from w4gemm.choice.plan_cache import PlanKey, forget, meeting, plan_for, tuning_with
from w4gemm.choice.verdict import Verdict, why

__all__ = [
    "BOUNDS",
    "WAVES_FROM",
    "Choice",
    "Decision",
    "Explanation",
    "Plan",
    "PlanKey",
    "Prepared",
    "Verdict",
    "compiled_for",
    "configs",
    "decide",
    "explain",
    "first_rows",
    "forget",
    "interval",
    "interval_of",
    "meeting",
    "met",
    "plan",
    "plan_for",
    "planned",
    "prepare",
    "ragged",
    "recorded",
    "representative",
    "representative_rows",
    "span",
    "tuning_with",
    "why",
]
