"""verl's default reward: the rule of a row's `data_source`, with verl's signature.

`reward.function: agent_loop.integrations.verl.rules:default_compute_score` scores the rows of verl's preprocessing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from agent_loop.errors import RewardError, did_you_mean
from agent_loop.rewards import rules
from agent_loop.tools.sandbox.sandbox import Sandbox, open_sandbox
from agent_loop.tools.sandbox.settings import SandboxSettings

NUM_TESTS_OF_WRONG = 10
"""Tests that count for a program that fails one."""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PROGRAM = """
import io, sys
sys.stdin = io.StringIO({stdin!r})
try:
    exec(compile({code!r}, "solution.py", "exec"), {{"__name__": "__main__"}})
except SystemExit:
    pass
"""
_FUNCTION = """
import json
namespace = {{"__name__": "solution"}}
exec(compile({code!r}, "solution.py", "exec"), namespace)
function = namespace.get({name!r}) or getattr(namespace["Solution"](), {name!r})
print()
print(json.dumps(function(*json.loads({arguments!r}))))
"""


async def score_code(solution_str: str, ground_truth: Any) -> float:
    """Return the share of tests that the last block of code passes.

    A program that fails a test is scored on the first tests alone.

    Args:
        solution_str: Text with a Markdown block of code, or the code itself.
        ground_truth: Mapping or JSON with `inputs` and `outputs`: standard input and output of each test, or with
            `fn_name` the arguments and the result of each call.
    """
    inputs, outputs, name = _tests(ground_truth)
    blocks = _BLOCK.findall(solution_str)
    code = str(blocks[-1]) if blocks else solution_str
    sandbox = await open_sandbox(SandboxSettings(time_limit_s=10.0, output_limit_bytes=2_000_000))
    passed: list[bool] = []
    try:
        for given, expected in zip(inputs, outputs, strict=True):
            if len(passed) >= NUM_TESTS_OF_WRONG and not all(passed):
                break
            passed.append(await _passes(sandbox, code, given, expected, name=name))
    finally:
        await sandbox.close()
    return sum(passed) / len(passed)


def _tests(ground_truth: Any) -> tuple[Sequence[Any], Sequence[Any], str | None]:
    try:
        tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        inputs, outputs = (list(cast(Sequence[Any], tests[key])) for key in ("inputs", "outputs"))
    except (ValueError, KeyError, TypeError) as error:
        raise RewardError(
            "the ground truth of code has no `inputs` and `outputs`; give a list of each"
        ) from error
    if not inputs or len(inputs) != len(outputs):
        raise RewardError(
            f"the ground truth of code has {len(inputs)} inputs and {len(outputs)} outputs; give as many"
        )
    return inputs, outputs, cast(Mapping[str, Any], tests).get("fn_name")


async def _passes(sandbox: Sandbox, code: str, given: Any, expected: Any, *, name: str | None) -> bool:
    if name is None:
        result = await sandbox.run(_PROGRAM.format(code=code, stdin=_joined(given)))
        return result.ending == "done" and _lines(result.output) == _lines(_joined(expected))
    arguments = given if isinstance(given, str) else json.dumps(given)
    result = await sandbox.run(_FUNCTION.format(code=code, name=name, arguments=arguments))
    printed = result.output.strip().rpartition("\n")[2]
    try:
        value: Any = json.loads(printed)
    except ValueError:
        return False
    return result.ending == "done" and expected in (value, [value])


def _joined(value: Any) -> str:
    return "\n".join(map(str, cast(Sequence[Any], value))) if isinstance(value, list | tuple) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


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
