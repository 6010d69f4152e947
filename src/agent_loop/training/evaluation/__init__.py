"""Scores of trajectories: pass@k and rewards with confidence intervals, per category, and compared; groups of runs."""

from agent_loop.training.evaluation.categories import categories_of, score_categories
from agent_loop.training.evaluation.comparison import (
    EvaluationDifference,
    changed_pairs,
    difference,
    is_passed,
    pair_rows,
)
from agent_loop.training.evaluation.estimates import MeanEstimate, pass_at_k
from agent_loop.training.evaluation.run_groups import (
    RunGroup,
    TrainingRun,
    choose_metrics,
    read_groups,
    read_run,
)
from agent_loop.training.evaluation.scores import (
    Evaluation,
    RowResult,
    Scores,
    prompt_digest,
    score,
    summarise,
)
from agent_loop.training.evaluation.seeds import MetricComparison, compare_metric
from agent_loop.training.evaluation.summary import (
    SUMMARY_FILE,
    Comparison,
    EvaluationSummary,
    compare_evaluations,
    read_summary,
)

__all__ = [
    "SUMMARY_FILE",
    "Comparison",
    "Evaluation",
    "EvaluationDifference",
    "EvaluationSummary",
    "MeanEstimate",
    "MetricComparison",
    "RowResult",
    "RunGroup",
    "Scores",
    "TrainingRun",
    "categories_of",
    "changed_pairs",
    "choose_metrics",
    "compare_evaluations",
    "compare_metric",
    "difference",
    "is_passed",
    "pair_rows",
    "pass_at_k",
    "prompt_digest",
    "read_groups",
    "read_run",
    "read_summary",
    "score",
    "score_categories",
    "summarise",
]
