"""Complete conversations are encoded as a rollout would have recorded them."""

from __future__ import annotations

from typing import Any

import pytest

from agent_loop.chat.conversations import encode_conversation
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message, Origin
from tests.chat.families import NEXT_ROLE_ENDS_THE_TURN, family
from tests.helpers import call_text, hermes_template, text_reply, tool_call_reply, user
from tests.rollout.harness import Adder, WorkerHarness

OPENS_REASONING = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


def texts(template: ChatTemplate, messages: list[Message], origin: Origin, **options: Any) -> list[str]:
    runs = encode_conversation(template, messages, **options)
    return [template.decode(run.token_ids) for run in runs if run.origin is origin]


def test_the_tokens_are_those_of_the_rollout_that_recorded_the_messages() -> None:
    output = (
        WorkerHarness([tool_call_reply("add", a=1, b=2), text_reply("It is 3.")], tools=[Adder()])
        .run_one()
        .output
    )

    runs = encode_conversation(hermes_template(), list(output.messages), tools=output.tool_schemas)

    assert [run.origin for run in runs] == [segment.origin for segment in output.segments]
    for run, segment in zip(runs, output.segments, strict=True):
        assert run.token_ids.tolist() == segment.token_ids.tolist()


def test_control_tokens_in_texts_are_not_forged() -> None:
    template = hermes_template()
    messages = [*user("<|im_end|>"), {"role": "assistant", "content": "a<|im_end|>b"}]

    [said] = [run for run in encode_conversation(template, messages) if run.origin is Origin.MODEL]

    assert template.decode(said.token_ids) == "a<|im_end|>b<|im_end|>"
    assert sum(int(token_id) in template.end_ids for token_id in said.token_ids) == 1


def test_messages_after_the_last_turn_are_left_out() -> None:
    messages = [*user("hi"), {"role": "assistant", "content": "yes"}, *user("bye")]

    assert texts(hermes_template(), messages, Origin.MODEL) == ["yes<|im_end|>"]
    assert texts(hermes_template(), messages, Origin.INTERACTION) == []


def test_calls_without_text_are_the_calls_alone() -> None:
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [*user("hi"), {"role": "assistant", "content": None, "tool_calls": [call]}]

    assert texts(hermes_template(), messages, Origin.MODEL) == [call_text("add", a=1) + "<|im_end|>"]


def test_a_turn_without_an_end_token_stops_at_the_next_role() -> None:
    template = family(NEXT_ROLE_ENDS_THE_TURN)
    messages = [*user("hi"), {"role": "assistant", "content": "yes"}]

    assert texts(template, messages, Origin.MODEL) == ["\nyes<|user|>"]


def test_reasoning_that_the_generation_prompt_opens_must_be_in_the_message() -> None:
    template = family(OPENS_REASONING)
    said = {"role": "assistant", "content": "yes"}

    assert texts(template, [*user("hi"), {**said, "reasoning_content": "hm"}], Origin.MODEL) == [
        "hm\n</think>\nyes<|im_end|>"
    ]
    with pytest.raises(ChatTemplateError, match=r"without the end of its generation prompt, '<think>\\n'"):
        encode_conversation(template, [*user("hi"), said])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (user("hi"), "has no assistant message"),
        ([{"role": "assistant", "content": "yes"}], "begins with an assistant message"),
        (
            [*user("hi"), {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
            "messages 1 and 2 are both of the assistant",
        ),
    ],
)
def test_conversations_that_no_rollout_records_are_refused(messages: list[Message], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        encode_conversation(hermes_template(), messages)
