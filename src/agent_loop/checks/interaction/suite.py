"""Run the conformance checks on an interaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from agent_loop.checks.interaction.checked_interaction import CheckedInteraction
from agent_loop.checks.interaction.contract import INTERACTION_CHECKS
from agent_loop.errors import ConfigError
from agent_loop.interactions.base import BaseInteraction
from agent_loop.testing.conformance import CheckReport, OnResult
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
    on_result: OnResult | None = None,
) -> CheckReport:
    """Check that an interaction follows the contract of `BaseInteraction`.

    The checks start and finalize one or two dozen trajectories.

    Args:
        interaction_kwargs: The `interaction_kwargs` of a row.
        prompt: The messages of a row.
        answers: The model's messages, one per turn. Give one of each kind that the interaction distinguishes.
        timeout_s: Time limit of each check.
        on_result: Called with each result as soon as it is known.

    Raises:
        ConfigError: `answers` is empty.
    """
    if not answers:
        raise ConfigError("check_interaction needs at least one answer of the model")
    kwargs = {key: value for key, value in (interaction_kwargs or {}).items() if key != "name"}
    subject = CheckedInteraction(interaction, kwargs, prompt, answers, _numbers=count())
    return await INTERACTION_CHECKS.run(
        subject, name=f"interaction {interaction.name!r}", timeout_s=timeout_s, on_result=on_result
    )
