"""The token methods of loops written for verl 0.9: this package's and verl's own give the same tokens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from agent_loop.chat.template import ChatTemplate
from agent_loop.integrations.verl.loops import ContinuousTokens
from tests.helpers import call_text, encoded, small_tokenizer

pytestmark = [pytest.mark.verl, pytest.mark.timeout(240)]

USER = {"role": "user", "content": "Count, please."}
TOOLS = [
    {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}
]
ASSISTANT = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "count", "arguments": {}}}],
}
REPLIES = [
    [{"role": "tool", "name": "count", "tool_call_id": "1", "content": "3"}],
    [{"role": "tool", "name": "count", "tool_call_id": "1", "content": text} for text in ("3", "4")],
    [{"role": "user", "content": "And now?"}],
]


async def conversation(loop: Any, replies: list[dict[str, Any]], *, prompt_length: int = 400) -> list[Any]:
    loop.rollout_config = SimpleNamespace(prompt_length=prompt_length)
    prompt = await loop.ct_build_initial_tokens([USER], tools=TOOLS)
    completion = encoded(call_text("count") + "<|im_end|>")
    logprobs = [-0.5] * len(completion)
    first, mask, values = await loop.ct_merge_assistant_token(
        prompt, completion, [], [], assistant_logprobs=logprobs
    )
    before = [USER, ASSISTANT]
    second, mask, values = await loop.ct_merge_context_msg(
        before, [*before, *replies], first.token_ids, mask, values, tools=TOOLS
    )
    return [prompt, first.token_ids, second.token_ids, mask, values]


@pytest.mark.parametrize("replies", REPLIES)
@pytest.mark.parametrize("prompt_length", [400, 8])
def test_a_conversation_has_verls_tokens(replies: list[dict[str, Any]], prompt_length: int) -> None:
    async def both() -> tuple[list[Any], list[Any]]:
        ours = ContinuousTokens()
        ours.template = ChatTemplate(small_tokenizer())
        verls = object.__new__(type("Loop", (AgentLoopBase,), {"run": None}))
        verls.loop = asyncio.get_running_loop()
        verls.continuous_token_builder = create_continuous_token_builder(
            small_tokenizer(), hf_model_type="qwen3"
        )
        return (
            await conversation(ours, replies, prompt_length=prompt_length),
            await conversation(verls, replies, prompt_length=prompt_length),
        )

    ours, verls = asyncio.run(both())
    assert ours == verls
    assert len(ours[0]) <= prompt_length
