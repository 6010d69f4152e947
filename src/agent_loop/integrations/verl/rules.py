"""verl's default reward: the rule of a row's `data_source`, with verl's signature.

`reward.function: agent_loop.integrations.verl.rules:default_compute_score` scores the rows of verl's preprocessing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agent_loop.errors import RewardError, did_you_mean
from agent_loop.integrations.verl.code_tests import score_code
from agent_loop.rewards import rules

Rule = Callable[[str, Any], "float | dict[str, Any] | Awaitable[float]"]

RULES: Mapping[str, Rule] = {
    "openai/gsm8k": rules.gsm8k,
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), rules.math
    ),
    **dict.fromkeys(("math", "math_dapo", "math_dapo_reasoning"), rules.math_with_penalty),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), score_code),
    "hiyouga/geometry3k": rules.geometry,
}
"""Rule of each data source."""

RULES_BY_BEGINNING: Mapping[str, Rule] = {
    "aime": rules.math_with_penalty,
    "numina_": rules.math,
    "searchR1_": rules.exact_match,
}
"""Rule of data sources with these beginnings."""


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> Any:
    """Score a solution by the rule of its data source.

    Returns:
        The score, or a mapping with `score`. For code, an awaitable of the score.

    Raises:
        RewardError: The data source has no rule.
    """
    rule = RULES.get(data_source) or next(
        (rule for start, rule in RULES_BY_BEGINNING.items() if str(data_source).startswith(start)), None
    )
    if rule is None:
        known = [*RULES, *(f"{start}*" for start in RULES_BY_BEGINNING)]
        raise RewardError(
            f"data_source is {data_source!r}, which has no rule{did_you_mean(str(data_source), known)}; set "
            "reward.function to a function of yours"
        )
    return rule(solution_str, ground_truth)


def gsm8k_flexible(solution_str: str, ground_truth: Any, **kwargs: Any) -> float:
    """Score a solution of GSM8K by the number after `####`, or by its last number."""
    return rules.gsm8k(solution_str, ground_truth, flexible=True)
