"""Conversations in rows: messages in the OpenAI form, from files or from the logs of another system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from pydantic import ValidationError

from agent_loop.chat.conversations import TokenRun, encode_conversation
from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.conversation import conversation_of
from agent_loop.completions.requests import ChatMessage
from agent_loop.errors import ChatTemplateError, DataError, RequestError
from agent_loop.files.plain_values import parse_json
from agent_loop.runtime.describe import describe_value
from agent_loop.trajectory import UNKNOWN_VERSION, Segment
from agent_loop.types import Message, Origin, Row

WEIGHT = "weight"
"""Key of an assistant message: 0 if its tokens are not trained, as in OpenAI's files for fine-tuning."""
OTHER_REASONING = ("reasoning", "thinking")
"""Keys of other systems for `reasoning_content`."""


def chat_segments(row: Row, *, template: ChatTemplate, tools_key: str, where: str) -> list[Segment]:
    """Return the segments of a conversation, as if a model had sampled its assistant turns.

    Args:
        row: Row with the messages in `raw_prompt`.
        template: Chat template of the model.
        tools_key: Column with the tool schemas.
        where: Location of the row, for errors.

    Raises:
        DataError: A message or a schema is not valid, or the template cannot render the conversation.
    """
    given = cast(list[Message], row["raw_prompt"])
    trained = frozenset(index for index, message in enumerate(given) if _is_trained(message, where=where))
    messages = _read_messages(given, where=where)
    tools = _read_tools(row.get(tools_key), where=f"{where}, column {tools_key!r}")
    try:
        runs = encode_conversation(template, messages, tools=tools)
    except ChatTemplateError as error:
        raise DataError(f"{where}: {error}") from error
    return list(_segments(runs, trained=trained))


def _segments(runs: Sequence[TokenRun], *, trained: frozenset[int]) -> Iterator[Segment]:
    for run in runs:
        if run.origin is not Origin.MODEL:
            yield Segment(run.token_ids, run.origin)
        elif run.message in trained:
            yield Segment(run.token_ids, Origin.MODEL, weight_version=UNKNOWN_VERSION)
        else:
            yield Segment(run.token_ids, Origin.PREFIX)


def _is_trained(message: Message, *, where: str) -> bool:
    weight = message.get(WEIGHT, 1)
    if weight not in (0, 1):
        raise DataError(f"{where}: the {WEIGHT} of a message is {weight!r}; give 0 or 1")
    return message.get("role") == "assistant" and bool(weight)


def _read_messages(given: Sequence[Message], *, where: str) -> list[Message]:
    try:
        return conversation_of([ChatMessage.model_validate(_in_openai_form(message)) for message in given])
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{where}: a message has {key!r}: {first['msg']}; give messages in the OpenAI form"
        ) from error
    except RequestError as error:
        raise DataError(f"{where}: {error}") from error


def _in_openai_form(message: Message) -> Message:
    """Return a message without its weight, and with reasoning under the name of the OpenAI form."""
    kept = {key: value for key, value in message.items() if key != WEIGHT}
    for name in OTHER_REASONING:
        reasoning = kept.pop(name, None)
        if isinstance(reasoning, str):
            kept.setdefault("reasoning_content", reasoning)
    return kept


def _read_tools(value: Any, *, where: str) -> list[dict[str, Any]]:
    """Return tool schemas, which columnar files often hold as JSON."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise DataError(f"{where} is not valid JSON ({error}); give a list of tool schemas") from error
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in cast(list[Any], value)):
        raise DataError(f"{where} is {describe_value(cast(Any, value))}; give a list of tool schemas")
    return cast(list[dict[str, Any]], value)
