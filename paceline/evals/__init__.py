"""Evals: what a policy is worth on prompts that it is not trained on."""

from paceline.evals.dispatch import EvalDispatcher, Snapshots
from paceline.evals.estimates import Estimate, estimate, pass_at_k
from paceline.evals.run import EvalResult, EvalRunner, PreparedSet, run_eval, run_evals

__all__ = [
    "Estimate",
    "EvalDispatcher",
    "EvalResult",
    "EvalRunner",
    "PreparedSet",
    "Snapshots",
    "estimate",
    "pass_at_k",
    "run_eval",
    "run_evals",
]
