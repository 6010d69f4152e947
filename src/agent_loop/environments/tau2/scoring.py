"""The benchmark's scorers, applied to a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from agent_loop.environments.tau2.domains import Domain, inspect, tau2
from agent_loop.interactions.swapped_roles import text_of
from agent_loop.types import Message

REWARD_PARTS: Mapping[str, str] = {
    "reward": "1 if the data base is right and the user was told what they should be, else 0",
    "db": "whether the data base is as the gold actions leave it",
    "communicate": "whether the agent told the user all that it should",
}


async def score(domain: Domain, task_id: str, messages: Sequence[Message]) -> dict[str, float]:
    """Return the reward and its parts. The current store of Inspect holds the data base.

    Args:
        domain: The task's domain.
        task_id: Id of the task.
        messages: The whole conversation.
    """
    scorers: Any = tau2("common.scorer")
    state, target = _state(domain, task_id, messages), inspect("scorer").Target("")
    db = await scorers.db_match(domain=domain.name)(state, target)
    communicate = await scorers.score_communicated_info()(state, target)
    both = scorers.complete_if_all_complete([db, communicate])
    return {"reward": _value(both), "db": _value(db), "communicate": _value(communicate)}


async def is_solved(domain: Domain, task_id: str, messages: Sequence[Message], calls: Sequence[Any]) -> bool:
    """Return whether all gold actions were called, and the user was told what they should be.

    Args:
        domain: The task's domain.
        task_id: Id of the task.
        messages: The conversation.
        calls: Calls of the agent, in Inspect's form.
    """
    scorers: Any = tau2("common.scorer")
    state = _state(domain, task_id, messages)
    communicate = await scorers.score_communicated_info()(state, inspect("scorer").Target(""))
    turn = inspect("model").ChatMessageAssistant(content="", tool_calls=list(calls))
    missing = scorers.find_unused_actions(SimpleNamespace(messages=[turn]), state, domain.task(task_id))
    return not missing and _value(communicate) == 1


def _state(domain: Domain, task_id: str, messages: Sequence[Message]) -> Any:
    """Return what the scorers read of a conversation: the agent's turns without calls, as its user saw them."""
    model: Any = inspect("model")
    sample = domain.sample(task_id)
    said = [
        model.ChatMessageUser(content=text_of(message))
        for message in messages
        if message["role"] == "assistant" and not message.get("tool_calls")
    ]
    return inspect("solver").TaskState(
        model=model.ModelName("none/none"),
        sample_id=task_id,
        epoch=1,
        input=sample.input,
        messages=said,
        metadata=sample.metadata,
    )


def _value(result: Any) -> float:
    return float(result.value == inspect("scorer").CORRECT)
