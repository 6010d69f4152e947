"""Reward functions with verl's parameters."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agent_loop.errors import ConfigError
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Message, Row

SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def adapt(
    function: Callable[..., Any], signature: inspect.Signature, *, is_batch: bool
) -> Callable[..., Any] | None:
    """Return a reward function of this package that calls one with verl's parameters; None if it has others.

    Args:
        is_batch: Whether the returned function takes `(outputs, rows)`, and the given one verl's lists.

    Raises:
        ConfigError: The function has the parameters of the other form.
    """
    names, others = (BATCH, SINGLE) if is_batch else (SINGLE, BATCH)
    if others[1] in signature.parameters:
        remedy = "leave reward.batch out" if is_batch else "set reward.batch=true"
        raise ConfigError(
            f"the reward function takes {signature}, as verl calls it for "
            f"{'one solution' if is_batch else 'a batch'}; {remedy}"
        )
    if names[1] not in signature.parameters:
        return None
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    accepted = [n for n, name in enumerate(names) if takes_any or name in signature.parameters]

    def call(columns: Sequence[Any]) -> Any:
        return function(**{names[n]: columns[n] for n in accepted})

    def score(output: AgentLoopOutput, row: Row) -> Any:
        return call(_arguments(output, row))

    def score_all(outputs: list[AgentLoopOutput], rows: list[Row]) -> Any:
        return call([list(column) for column in zip(*map(_arguments, outputs, rows), strict=True)])

    async def score_async(output: AgentLoopOutput, row: Row) -> Any:
        return await score(output, row)

    async def score_all_async(outputs: list[AgentLoopOutput], rows: list[Row]) -> Any:
        return await score_all(outputs, rows)

    if inspect.iscoroutinefunction(function):
        return score_all_async if is_batch else score_async
    return score_all if is_batch else score


def _arguments(output: AgentLoopOutput, row: Row) -> tuple[Any, str, Any, dict[str, Any]]:
    """Return verl's arguments for one trajectory: data source, text, ground truth and further values."""
    model = cast(Mapping[str, Any], row.get("reward_model") or {})
    extra = {**cast(Mapping[str, Any], row.get("extra_info") or {}), "num_turns": output.num_turns}
    extra["rollout_reward_scores"] = {
        "tool_rewards": list(output.tool_rewards),
        "turn_scores": list(output.turn_scores),
    }
    return row.get("data_source"), response_text(output, row), model.get("ground_truth"), extra


def response_text(output: AgentLoopOutput, row: Row) -> str:
    """Return the text after the prompt, as verl passes it: completions, calls in `<tool_call>` tags, and replies."""
    prompt = row.get("raw_prompt")
    start = (
        len(cast(Sequence[Any], prompt))
        if isinstance(prompt, Sequence) and not isinstance(prompt, str)
        else 0
    )
    response = output.messages[start:]
    if not any(message.get("role") == "assistant" for message in response):
        response = [message for message in output.messages if message.get("role") == "assistant"]
    return "\n".join(filter(None, map(_text, response)))


def _text(message: Message) -> str:
    parts = [str(message[key]) for key in ("reasoning_content", "content") if message.get(key)]
    for call in cast(Sequence[Mapping[str, Any]], message.get("tool_calls") or ()):
        function = cast(Mapping[str, Any], call.get("function") or {})
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            text = f'{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments}}}'
        else:
            text = json.dumps({"name": function.get("name"), "arguments": arguments}, default=str)
        parts.append(f"<tool_call>\n{text}\n</tool_call>")
    return "\n".join(parts)
