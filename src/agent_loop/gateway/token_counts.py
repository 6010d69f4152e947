"""The number of tokens in the prompt that a request would have."""

from __future__ import annotations

from contextlib import suppress

from agent_loop.completions.turn_prefix import begin_turn
from agent_loop.errors import ChatTemplateError
from agent_loop.gateway.turn_generator import with_model_call_ids
from agent_loop.gateway.turn_plan import TurnPlan
from agent_loop.types import IntArray


async def count_prompt_tokens(plan: TurnPlan) -> int:
    """Return the number of tokens before the first one that would be sampled. Nothing is added to a conversation.

    Raises:
        ChatTemplateError: The template refuses the messages.
        DataError: An image cannot be read.
        RequestError: The turn cannot begin as the request demands.
    """
    if plan.continued is not None and plan.continued.after is not None:
        return plan.continued.after.num_tokens
    context = await _context(plan)
    prefix = begin_turn(plan.request, template=plan.template, context=context, prefill=plan.prefill)
    return len(context) + len(prefix.token_ids)


async def _context(plan: TurnPlan) -> IntArray:
    parent = plan.position.parent
    if parent is not None and parent.after is not None:
        new_messages = with_model_call_ids(plan.position)
        with suppress(ChatTemplateError):  # a request would start a new conversation then
            return await parent.branch.episode.context_with(new_messages, at=parent.after)
    template = plan.template
    read = await template.read(plan.messages)
    return template.open_encoded(plan.messages, tools=plan.request.tools_in_use, read=read).token_ids
