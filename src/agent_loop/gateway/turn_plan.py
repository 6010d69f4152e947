"""What a request asks for: its position in the conversation tree, and how the model's turn begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from agent_loop.chat.messages import settle_system_messages
from agent_loop.chat.template import ChatTemplate
from agent_loop.completions.conversation import conversation_of, split_prefill
from agent_loop.completions.requests import ChatCompletionRequest
from agent_loop.completions.turn_prefix import template_of
from agent_loop.errors import RequestError
from agent_loop.gateway.conversation_tree import ConversationTree, TreePosition, TurnNode
from agent_loop.gateway.message_keys import MessageKey, message_keys
from agent_loop.types import Message


@dataclass(frozen=True, slots=True)
class WrittenConversation:
    """The conversation of a request."""

    template: ChatTemplate
    """The chat template with the variables of the request."""
    messages: Sequence[Message]
    keys: Sequence[MessageKey]
    has_moved_system: bool
    """Whether system messages became text of the user."""

    @classmethod
    def of(cls, request: ChatCompletionRequest, template: ChatTemplate) -> WrittenConversation:
        """Return the conversation of a request.

        Raises:
            RequestError: A message is not valid.
            ChatTemplateError: The template refuses the variables of the request.
        """
        template = template_of(request, template)
        written = conversation_of(request.messages)
        messages = settle_system_messages(written, template)
        return cls(template, messages, message_keys(messages), messages != written)


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """A turn that a request asks for."""

    request: ChatCompletionRequest
    template: ChatTemplate
    messages: Sequence[Message]
    """Messages before the turn."""
    position: TreePosition
    continued: TurnNode | None = None
    """Cut turn whose tokens are continued; None for a new turn."""
    begun: Message | None = None
    """Last message of the request, if the turn continues it."""
    prefill: str = ""
    """Text of `begun` with which a new turn begins."""
    json_schema: str = ""
    """Schema that the program asked for, also if the servers cannot constrain the completion."""


def plan_turn(
    request: ChatCompletionRequest,
    written: WrittenConversation,
    tree: ConversationTree,
    *,
    json_schema: str,
    trusts_call_ids: bool = False,
) -> TurnPlan:
    """Return the plan of a request's turn.

    With `continue_final_message`, the last message is continued: from the tokens of the turn that it is, if the turn
    was sampled in this session and cut, and otherwise from its text.

    Args:
        request: The request.
        written: Its conversation.
        tree: Conversation tree of the session.
        json_schema: See `TurnPlan`.
        trusts_call_ids: See `ConversationTree.locate`.

    Raises:
        RequestError: The last message cannot be continued exactly.
    """
    messages, keys = written.messages, written.keys
    locate = partial(
        tree.locate,
        tools=request.tools_in_use,
        variables=written.template.variables,
        trusts_call_ids=trusts_call_ids,
    )
    if not request.continue_final_message or messages[-1]["role"] != "assistant":
        messages, _ = split_prefill(request, messages)
        position = locate(messages, keys)
        return TurnPlan(request, written.template, messages, position, json_schema=json_schema)
    *earlier, last = messages
    position = locate(earlier, keys[:-1])
    cut = tree.find_cut_turn(position, keys[-1])
    if cut is None:
        earlier, prefill = split_prefill(request, messages)
        return TurnPlan(
            request, written.template, earlier, position, begun=last, prefill=prefill, json_schema=json_schema
        )
    if last.get("tool_calls"):
        raise RequestError(
            "continue_final_message: the last message has tool calls, and cannot be continued; answer the calls with "
            "tool messages",
            param="continue_final_message",
        )
    return TurnPlan(
        request,
        written.template,
        earlier,
        tree.position_of_rest(cut),
        continued=cut,
        begun=last,
        json_schema=json_schema,
    )
