"""Small chat templates, each with one property of a model family."""

from __future__ import annotations

from typing import Any

from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer
from agent_loop.chat.template import ChatTemplate

NEXT_ROLE_ENDS_THE_TURN = """\
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif -%}
{{ '\\n' + m.content }}
{%- else -%}
<|{{ m.role }}|>{{ '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
{%- set unused = '<|user|><|system|>' -%}
"""
"""Turns have no end token: the model stops at the token that opens the next turn."""

CALLS_END_OTHERWISE = """\
{%- set ns = namespace(name=none) -%}
{%- for m in messages -%}
{%- if m.tool_calls -%}
{%- set ns.name = m.tool_calls[0].function.name -%}
<|start|>assistant to={{ ns.name }}<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'tool' -%}
{{- raise_exception('a tool message without a call') if ns.name is none -}}
<|start|>{{ ns.name }} to=assistant<|message|>{{ m.content | tojson }}<|end|>
{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt -%}
<|start|>assistant<|message|>{{ m.content }}<|return|>
{%- else -%}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""
"""A call and an answer end with different tokens, and so do the last answer and earlier answers. The name in a tool
message is the name of the call before it."""

NINE_LETTER_IDS = """\
{%- for m in messages -%}
{%- if m.role == 'user' -%}[INST] {{ m.content | trim }} [/INST]
{%- elif m.tool_calls -%}[TOOL_CALLS] [
{%- for call in m.tool_calls -%}
{{- raise_exception('ids have nine letters') if (call.id or '') | length != 9 -}}
{{ call.function | tojson }}, "id": "{{ call.id }}"{{ '' if loop.last else ', ' }}
{%- endfor -%}]</s>
{%- elif m.role == 'tool' -%}
{{- raise_exception('ids have nine letters') if (m.tool_call_id or '') | length != 9 -}}
[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif m.role == 'assistant' -%}{{ ' ' + m.content }}</s>
{%- else -%}{{ raise_exception('no role ' + m.role) }}
{%- endif -%}
{%- endfor -%}
"""
"""Tool messages and calls need an id of nine letters. There are no system messages and no generation prompt."""

ARGUMENTS_ARE_TEXT = """\
{%- if messages[0].role != 'system' %}<|system|>You are helpful.<|end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' -%}
{{- raise_exception('a tool message without a call') -}}
{%- endif -%}
<|{{ m.role }}|>{{ m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name + '(' + call.function.arguments + ')' }}{% endfor -%}
<|end|>
{% endfor -%}
{%- if add_generation_prompt %}<|assistant|><think>
{% endif -%}
{%- set unused = '<|user|><|tool|>' -%}
"""
"""Arguments must be text, a default system prompt is rendered, and the generation prompt opens reasoning."""

READS_REASONING = """\
{%- for m in messages -%}
{%- set content = m.content -%}
{%- set reasoning = m.reasoning_content or '' -%}
{%- if m.role == 'assistant' and not reasoning and '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{% endif -%}
{{ content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""The template finds reasoning in an assistant's content and renders it between control tokens."""

PUTS_REASONING_BEFORE = """\
{%- for m in messages -%}
{%- set content = m.content -%}
{%- if m.role == 'assistant' and '<think>' not in content and '</think>' not in content -%}
{%- set content = '<think></think>' ~ content -%}
{%- endif -%}
{%- if m.role == 'assistant' and not loop.last and '</think>' in content -%}
{%- set content = '<think></think>' ~ content.split('</think>')[-1] -%}
{%- endif -%}
<|im_start|>{{ m.role }}
{{ content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""The template searches its own output for the same strings as the content of an assistant."""

PRINTS_VALUES = """\
{%- for m in messages -%}
<start_of_turn>{{ m.role }}
{{ m.content }}
{%- if m.tool_calls %}{{ m.tool_calls }}{{ m.tool_calls | tojson(ensure_ascii=true) }}{% endif %}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif -%}
"""
"""The template prints lists of parts as Python values, and lists of calls as ASCII JSON."""


def family(chat_template: str) -> ChatTemplate:
    return ChatTemplate(placeholder_tokenizer(chat_template))


def token(template: ChatTemplate, text: str) -> int:
    [token_id] = template.encoder.encode(text)
    return token_id


def tool_message(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **fields}
