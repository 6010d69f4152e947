"""Comparison of a finished trajectory with a full render of its messages."""

from __future__ import annotations

from agent_loop.chat.encoding import num_shared
from agent_loop.chat.report import Cause
from agent_loop.chat.template import ChatTemplate
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Origin


def find_drift(output: AgentLoopOutput, *, template: ChatTemplate) -> Cause | None:
    """Compare a trajectory's tokens with a full render of its messages.

    A trajectory that differs is not wrong: its tokens are those that the model read and sampled. The share of
    differing trajectories measures how far a system that renders the history again would train on other tokens. A call
    costs one render and one encoding of the whole conversation.

    Returns:
        None if the render begins with the trajectory, else the cause of the difference.

    Raises:
        ChatTemplateError: The template does not accept the messages.
    """
    kept = [token for segment in output.segments for token in segment.token_ids.tolist()]
    messages = [template.bridges.adapted(message) for message in output.messages]
    rendered = template.open(messages, tools=output.tool_schemas).tolist()
    position = num_shared(kept, rendered)
    if position == len(kept):
        return None
    if template.decode(rendered[: len(kept) + 1]).startswith(template.decode(kept)):
        return Cause.MERGED_TOKENS
    return _cause(position, output)


def _cause(position: int, output: AgentLoopOutput) -> Cause:
    """Return the cause of a difference, from the segment at its position."""
    end = 0
    for segment in output.segments:
        end += len(segment)
        if position < end:
            break
    else:
        return Cause.OTHER
    if segment.origin is Origin.PROMPT:
        return Cause.INJECTED_PROMPT
    if segment.origin is Origin.MODEL:
        if position == end - 1:
            return Cause.END_TOKEN
        has_reasoning = any("reasoning_content" in message for message in output.messages)
        return Cause.STRIPPED_REASONING if has_reasoning else Cause.RESERIALISED_CALL
    return Cause.REGROUPED_TOOLS if segment.origin is Origin.TOOL else Cause.OTHER
