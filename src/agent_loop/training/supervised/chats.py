"""Conversations in rows: messages in the OpenAI form, from files or from the logs of another system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from agent_loop.chat.conversations import TokenRun, encode_conversation
from agent_loop.chat.messages import normalise_tools
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError, DataError
from agent_loop.trajectory import UNKNOWN_VERSION, Segment
from agent_loop.types import Message, Origin, Row

WEIGHT = "weight"
"""Key of an assistant message: 0 if its tokens are not trained, as in OpenAI's files for fine-tuning."""
ROLES = frozenset({"system", "user", "assistant", "tool"})


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
    messages = [{key: value for key, value in message.items() if key != WEIGHT} for message in given]
    tools = normalise_tools(row.get(tools_key), where=f"{where}, column {tools_key!r}")
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
    if message["role"] not in ROLES:  # templates leave out the messages of other roles
        raise DataError(
            f"{where}: a message has the role {message['role']!r}; give one of {', '.join(sorted(ROLES))}"
        )
    weight = message.get(WEIGHT, 1)
    if weight not in (0, 1):
        raise DataError(f"{where}: the {WEIGHT} of a message is {weight!r}; give 0 or 1")
    return message.get("role") == "assistant" and bool(weight)
