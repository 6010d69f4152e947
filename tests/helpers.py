"""Helpers of many tests: a small tokenizer with a Hermes chat template, and completions in its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agent_loop.chat.template import ChatTemplate
from agent_loop.servers.scripted import ScriptedReply

CONTROL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]

HERMES_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a few hundred tokens, ChatML and Hermes control tokens included."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    texts = [
        "the quick brown fox says hello to the model",
        '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    ] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = HERMES_TEMPLATE
    return tokenizer


@cache
def hermes_template() -> ChatTemplate:
    return ChatTemplate(small_tokenizer(), tool_parser="hermes")


def encoded(text: str) -> list[int]:
    """Return the token ids of a completion. The names of control tokens in `text` become control tokens."""
    return small_tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids


def text_reply(text: str, *, ends: bool = True, **reply: Any) -> ScriptedReply:
    """Return a reply with this text. With `ends=False`, the reply is cut before the end of its turn."""
    return ScriptedReply(encoded(text + ("<|im_end|>" if ends else "")), stops=ends, **reply)


def call_text(tool: str, **arguments: Any) -> str:
    """Return the text of a Hermes tool call."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def tool_call_reply(tool: str, **arguments: Any) -> ScriptedReply:
    return text_reply(call_text(tool, **arguments))


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def roles(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]
