"""Conversations in rows become examples, of which exactly the assistant's tokens are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer
from agent_loop.chat.template import ChatTemplate
from agent_loop.config import SftConfig
from agent_loop.errors import DataError
from agent_loop.rollout.batch import assemble
from agent_loop.training.supervised.examples import Examples, load_examples
from agent_loop.types import Origin
from tests.helpers import call_text, hermes_template, user

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    *user("1 + 2?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "assistant", "content": "three"},
]


def loaded(tmp_path: Path, *rows: Any, template: ChatTemplate | None = None, **config: Any) -> Examples:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_examples([str(path)], config=SftConfig(**config), template=template or hermes_template())


def trained_texts(examples: Examples) -> list[str]:
    """Return the text of the trained tokens of each example, as the trainer gets them."""
    batch = assemble(examples.trajectories, pad_token_id=0)
    return [
        hermes_template().decode(response[mask.bool()].tolist())
        for response, mask in zip(batch["responses"], batch["response_mask"], strict=True)
    ]


def test_the_tokens_of_the_assistant_are_trained_and_no_others(tmp_path: Path) -> None:
    examples = loaded(tmp_path, {"messages": CHAT, "tools": TOOLS})

    assert trained_texts(examples) == [call_text("add", a=1) + "<|im_end|>three<|im_end|>"]
    [trajectory] = examples.trajectories
    prompt = hermes_template().decode(trajectory.output.prompt_ids)
    assert "Be brief." in prompt
    assert '"name": "add"' in prompt
    assert "<tool_response>\n3\n</tool_response>" in hermes_template().decode(trajectory.output.response_ids)
    assert examples.num_trained_tokens == int(trajectory.output.response_mask.sum())


def test_a_message_of_weight_0_is_context_only(tmp_path: Path) -> None:
    chat = [*CHAT[:2], {**CHAT[2], "weight": 0}, *CHAT[3:]]

    examples = loaded(tmp_path, {"messages": chat})

    assert trained_texts(examples) == ["three<|im_end|>"]
    assert call_text("add", a=1) in hermes_template().decode(examples.trajectories[0].output.response_ids)


def test_other_columns_hold_messages_and_schemas_as_json(tmp_path: Path) -> None:
    definitions = {"Number": {"type": "integer"}}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Number"}}, "$defs": definitions}
    row = {"chat": CHAT, "schemas": json.dumps([{"name": "add", "parameters": parameters}])}

    examples = loaded(tmp_path, row, messages_key="chat", tools_key="schemas")

    prompt = hermes_template().decode(examples.trajectories[0].output.prompt_ids)
    shown = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert json.dumps({"type": "function", "function": {"name": "add", "parameters": shown}}) in prompt


def test_results_of_parallel_calls_follow_the_order_of_the_calls(tmp_path: Path) -> None:
    calls = [{**CALL, "id": name} for name in ("one", "two")]
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in ("two", "one")]

    examples = loaded(
        tmp_path, {"messages": [*CHAT[:2], {**CHAT[2], "tool_calls": calls}, *results, CHAT[4]]}
    )

    response = hermes_template().decode(examples.trajectories[0].output.response_ids)
    assert "of one\n</tool_response>\n<tool_response>\nof two" in response


THINKS = """\
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>{{ m.content }}
{%- else -%}<|assistant|>{{ m.content.split('</think>')[-1] }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|><think>\n{% endif -%}
"""
"""Opens reasoning in its prompt, and drops reasoning from messages, as DeepSeek's templates do."""
CHANNELS = """\
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>{{ m.content }}<|end|>
{%- else -%}<|assistant|>
{%- if 'thinking' in m and loop.last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|assistant|>{% endif -%}
<|channel|>final<|message|>{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{% endif -%}
"""
"""Reads reasoning under another name, as that of gpt-oss does."""


@pytest.mark.parametrize(
    ("source", "turn", "expected"),
    [
        (THINKS, {"reasoning_content": "It is 3."}, "It is 3.\n</think>\n\nthree<|end|>"),
        (THINKS, {"content": "<think>\nIt is 3.\n</think>\n\nthree"}, "It is 3.\n</think>\n\nthree<|end|>"),
        (
            CHANNELS,
            {"reasoning": "It is 3."},
            "<|channel|>analysis<|message|>It is 3.<|end|><|assistant|><|channel|>final<|message|>three<|end|>",
        ),
    ],
)
def test_reasoning_is_trained_with_templates_that_drop_it_or_have_another_name_for_it(
    tmp_path: Path, source: str, turn: dict[str, Any], expected: str
) -> None:
    template = ChatTemplate(placeholder_tokenizer(source))
    answer = {"role": "assistant", "content": "three", **turn}
    row = {"messages": [*user("1 + 2?"), answer, *user("Sure?"), answer]}

    [trajectory] = loaded(tmp_path, row, template=template).trajectories

    trained = [s.token_ids for s in trajectory.output.segments if s.origin is Origin.MODEL]
    assert [template.decode(token_ids) for token_ids in trained] == [expected] * 2


def test_reasoning_that_the_template_leaves_out_is_named(tmp_path: Path) -> None:
    row = {
        "messages": [*user("1 + 2?"), {"role": "assistant", "content": "3", "reasoning_content": "It is 3."}]
    }
    with pytest.raises(DataError, match="leaves out the reasoning of assistant message 1"):
        loaded(tmp_path, row)


def test_long_conversations_are_left_out_and_counted(tmp_path: Path) -> None:
    long = [*user("hello " * 400), {"role": "assistant", "content": "yes"}]

    examples = loaded(tmp_path, {"messages": long}, {"messages": CHAT}, max_tokens=300)

    assert (len(examples.trajectories), examples.num_overlong) == (1, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": user("hi")}, "conversation 1: the conversation has no assistant message"),
        (
            {"messages": [{"role": "robot", "content": "hi"}]},
            "conversation 1: a message has the role 'robot'",
        ),
        (
            {"messages": [*user("hi"), {"role": "assistant", "content": "a", "weight": 2}]},
            "the weight of a message is 2; give 0 or 1",
        ),
        ({"messages": CHAT, "tools": "{"}, "column 'tools' is not valid JSON"),
        ({"messages": CHAT, "tools": {"a": 1}}, "column 'tools' is .*; give a list of tool schemas"),
        (
            {"messages": [*CHAT[:2], {"role": "assistant", "tool_calls": [{"function": {}}], "content": ""}]},
            r"messages\[2\].tool_calls\[0\] is not a function call with a name",
        ),
        ({"prompt": "hi"}, "has no 'messages'"),
    ],
)
def test_a_wrong_conversation_is_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        loaded(tmp_path, row)


def test_examples_without_a_trained_token_are_refused(tmp_path: Path) -> None:
    chat = [*user("hi"), {"role": "assistant", "content": "yes", "weight": 0}]

    with pytest.raises(DataError, match="none of 1 examples can be trained: 1 have no trained token"):
        loaded(tmp_path, {"messages": chat})
