"""Runs the checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from agent_loop.errors import ConfigError
from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.check.contract import CHECKS
from agent_loop.interactions.check.subject import Subject
from agent_loop.testing.checks import CheckReport, CheckResult, run_checks
from agent_loop.types import Message

PROMPT: Sequence[Message] = ({"role": "user", "content": "Begin."},)
ANSWERS = ("I do not know.", "#### 42", "Goodbye.")


async def check_interaction(
    interaction: BaseInteraction,
    *,
    interaction_kwargs: Mapping[str, Any] | None = None,
    prompt: Sequence[Message] = PROMPT,
    answers: Sequence[str] = ANSWERS,
    timeout_s: float = 60.0,
    on_result: Callable[[CheckResult], None] | None = None,
) -> CheckReport:
    """Holds an interaction against the contract of `BaseInteraction`.

    Every check starts and finalizes trajectories of its own: a dozen or two of them in all.

    Args:
        interaction_kwargs: A row's.
        prompt: A row's messages.
        answers: What the model says, turn by turn: best something of each kind that the interaction tells apart.
        timeout_s: Of each check. One that takes longer has failed.
        on_result: Told of each result as it comes.

    Raises:
        ConfigError: There are no answers.
    """
    if not answers:
        raise ConfigError("check_interaction needs at least one answer of the model")
    kwargs = {key: value for key, value in (interaction_kwargs or {}).items() if key != "name"}
    subject = Subject(interaction, kwargs, prompt, answers, _numbers=count())
    checks = {name: partial(check, subject) for name, check in CHECKS.items()}
    results = await run_checks(checks, timeout_s=timeout_s, on_result=on_result)
    return CheckReport(f"interaction {interaction.name!r}", results)
