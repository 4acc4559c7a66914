"""The choice of a kernel and a config for a problem.

- table.py: configs that were measured, in tables.
- model.py: intervals of m, and configs by predicted time; cost/ predicts.
- plan.py: which of both runs a problem. plan_cache.py: the plans that are kept.

Up to 256 tokens a plan is chosen once for an interval of m, as if m were the interval's last value, so that a call with
another number of tokens rarely has to choose. For more tokens a plan is chosen for m itself, from a shortlist of
configs, so that only a few kernels are compiled. Importing this does not import CuTe DSL.
"""

from w4gemm.choice.explanation import Explanation, Verdict, explain, why
from w4gemm.choice.model import (
    BOUNDS,
    WAVES_FROM,
    first_rows,
    interval,
    interval_end,
    interval_of,
    invariant_order,
    plan_m,
    plan_rows,
    ragged,
    span,
)
from w4gemm.choice.plan import Plan, choose, configs, measured_record, problems_of_interval
from w4gemm.choice.plan_cache import PlanKey, Prepared, forget, plan_for, prepare, tokens_of_all_plans, tuning_with

__all__ = [
    "BOUNDS",
    "WAVES_FROM",
    "Explanation",
    "Plan",
    "PlanKey",
    "Prepared",
    "Verdict",
    "choose",
    "configs",
    "explain",
    "first_rows",
    "forget",
    "interval",
    "interval_end",
    "interval_of",
    "invariant_order",
    "measured_record",
    "plan_for",
    "plan_m",
    "plan_rows",
    "prepare",
    "problems_of_interval",
    "ragged",
    "span",
    "tokens_of_all_plans",
    "tuning_with",
    "why",
]
