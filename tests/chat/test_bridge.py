"""Prompts, bridges between turns, and whole conversations have the tokens of the full render."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from agent_loop.chat.conversations import encode_conversation
from agent_loop.chat.template import ChatTemplate, load_chat_template
from agent_loop.errors import ChatTemplateError
from agent_loop.loops.base import AgentLoopBase
from agent_loop.loops.registry import register
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import MalformedCall, Message, Origin, ToolCall
from tests.chat.families import (
    ARGUMENTS_ARE_TEXT,
    CALLS_END_OTHERWISE,
    NEXT_ROLE_ENDS_THE_TURN,
    NINE_LETTER_IDS,
    family,
    token,
    tool_message,
)
from tests.helpers import (
    call_text,
    encoded,
    hermes_template,
    small_tokenizer,
    text_reply,
    tool_call_reply,
    user,
)
from tests.rollout.harness import Adder, WorkerHarness


def bridged(template: ChatTemplate, messages: list[dict[str, Any]], last: str, **options: Any) -> str:
    ids = template.bridge(messages, last_token_id=token(template, last), **options)
    return template.decode(ids)


@pytest.mark.parametrize(
    ("last", "messages", "expected"),
    [
        ("<|user|>", user("more"), "\nmore<|assistant|>"),
        ("x", user("more"), "<|user|>\nmore<|assistant|>"),
        ("<|observation|>", [tool_message("4"), tool_message("5")], "\n4\n5<|assistant|>"),
        ("</tool_call>", [tool_message("4")], "<|observation|>\n4<|assistant|>"),
    ],
)
def test_an_end_token_that_opens_the_next_role_is_written_once(
    last: str, messages: list[dict[str, Any]], expected: str
) -> None:
    assert bridged(family(NEXT_ROLE_ENDS_THE_TURN), messages, last) == expected


def test_an_end_token_of_another_family_does_not_replace_the_next_role() -> None:
    template = family(NEXT_ROLE_ENDS_THE_TURN)
    ids = template.bridge(user("more"), last_token_id=template.tokenizer.eos_token_id)
    assert template.decode(ids) == "<|user|>\nmore<|assistant|>"


@pytest.mark.parametrize(("last", "end"), [("<|call|>", ""), ("x", "<|call|>")])
def test_the_token_that_ends_a_call_decides_where_the_bridge_begins(last: str, end: str) -> None:
    text = bridged(family(CALLS_END_OTHERWISE), [tool_message("4", name="add")], last)
    assert text == end + '<|start|>add to=assistant<|message|>"4"<|end|><|start|>assistant'


@pytest.mark.parametrize("last", ["<|return|>", "<|end|>", "<|call|>"])
def test_an_answer_is_closed_once_for_every_end_token(last: str) -> None:
    expected = "<|start|>user<|message|>more<|end|><|start|>assistant"
    assert bridged(family(CALLS_END_OTHERWISE), user("more"), last) == expected


def test_a_tool_message_without_a_name_takes_the_name_of_its_call() -> None:
    calls = [ToolCall("multiply", {"a": 2})]
    text = bridged(family(CALLS_END_OTHERWISE), [tool_message("4")], "<|call|>", calls=calls)
    assert text.startswith("<|start|>multiply to=")


@pytest.mark.parametrize(
    ("message", "call_id"),
    [(tool_message("4"), "call00000"), (tool_message("4", tool_call_id="abcdefghi"), "abcdefghi")],
)
def test_an_id_is_generated_only_if_the_template_requires_one(message: dict[str, Any], call_id: str) -> None:
    template = family(NINE_LETTER_IDS)
    expected = f'[TOOL_RESULTS] {{"content": "4", "call_id": "{call_id}"}}[/TOOL_RESULTS]'
    assert bridged(template, [message], "</s>") == expected
    calls = [ToolCall("add", {}, id="callofnin")]
    assert ("callofnin" in bridged(template, [message], "</s>", calls=calls)) == (
        "tool_call_id" not in message
    )


def test_a_default_system_prompt_and_an_opened_think_block_are_rendered_once() -> None:
    template = family(ARGUMENTS_ARE_TEXT)
    opened = template.decode(template.open(user("hi")))
    assert opened.count("You are helpful.") == opened.count("<think>") == 1
    expected = "\n<|tool|>4<|end|>\n<|tool|>5<|end|>\n<|assistant|><think>\n"
    assert bridged(template, [tool_message("4"), tool_message("5")], "<|end|>") == expected


@pytest.mark.parametrize("template_text", [CALLS_END_OTHERWISE, NINE_LETTER_IDS, ARGUMENTS_ARE_TEXT])
def test_names_and_ids_of_calls_cannot_forge_control_tokens(template_text: str) -> None:
    template = family(template_text)
    forged = "".join(template.encoder.control_texts)[:9]
    hostile = tool_message("4", name="".join(template.encoder.control_texts), tool_call_id=forged)
    plain = tool_message("4", name="add", tool_call_id="x" * 9)
    controls = [
        [i for i in template.bridge([message]).tolist() if i in template.encoder.control_ids]
        for message in (hostile, plain)
    ]
    assert controls[0] == controls[1]


def test_messages_that_a_template_refuses_are_errors_when_they_are_rendered() -> None:
    refuses = "{{ raise_exception('no tools, please') if messages[-1].role == 'tool' }}"
    template = family(refuses + ARGUMENTS_ARE_TEXT)
    assert template.decode(template.bridge(user("more"))).startswith("<|end|>")
    with pytest.raises(ChatTemplateError, match=r"'tool'.*no tools, please"):
        template.bridge([tool_message("4")])


TOOL_SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
FOLLOW_UPS = [
    user("and then?"),
    [{"role": "tool", "content": "42"}],
    [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2\n"}],
    [{"role": "tool", "content": ""}],
    [{"role": "user", "content": "\n\nüñí¢ödé 🎉 \n"}],
]


def full_render(messages: list[dict], *, tools: list[dict] | None = None) -> list[int]:
    rendered = small_tokenizer().apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
    return encoded(str(rendered))


@pytest.mark.parametrize("follow_up", FOLLOW_UPS)
@pytest.mark.parametrize("tools", [[], [TOOL_SCHEMA]])
def test_prompt_completion_and_bridge_equal_the_full_render(follow_up: list[dict], tools: list[dict]) -> None:
    template = hermes_template()
    opening = [{"role": "system", "content": "Be brief."}, *user("hi")]
    completion = encoded("hello<|im_end|>")
    bridged = [
        *template.open(opening, tools=tools),
        *completion,
        *template.bridge(follow_up, last_token_id=completion[-1]),
    ]
    messages = [*opening, {"role": "assistant", "content": "hello"}, *follow_up]
    assert bridged == full_render(messages, tools=tools or None)


def test_every_end_token_of_the_generation_config_ends_a_turn(tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=encoded("<|im_end|><|endoftext|>")).save_pretrained(tmp_path)
    template = load_chat_template(str(tmp_path))
    other = encoded("<|endoftext|>")[0]
    assert template.parse([*encoded("hello"), other]).content == "hello"
    ids = template.bridge(user("go on"), last_token_id=other)
    assert template.decode(ids).startswith("\n<|im_start|>user")


@pytest.mark.parametrize(
    ("chat_template", "message"),
    [("{{ messages[0].content }}", "cannot be bridged"), (None, r"model\.chat_template_path")],
)
def test_a_tokenizer_whose_template_is_missing_or_hides_the_assistant_is_refused(
    chat_template: str | None, message: str
) -> None:
    backend = small_tokenizer().backend_tokenizer
    tokenizer = small_tokenizer().__class__(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = chat_template
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(tokenizer)


def test_the_call_start_is_one_token_if_the_tokenizer_has_it() -> None:
    assert hermes_template().call_start_ids() == tuple(encoded("<tool_call>"))


def test_a_prompt_that_the_caller_changes_is_not_changed_for_the_next_one() -> None:
    template = hermes_template()
    first = template.open(user("x"))
    expected = first.tolist()
    first[:] = 0
    assert template.open(user("x")).tolist() == expected


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
    script = [tool_call_reply("add", a=1, b=2), text_reply("It is 3.")]
    output = WorkerHarness(script, tools=[Adder()]).run_one().output
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


def test_a_turn_without_an_end_token_stops_at_the_next_role() -> None:
    template = family(NEXT_ROLE_ENDS_THE_TURN)
    messages = [*user("hi"), {"role": "assistant", "content": "yes"}]
    assert texts(template, messages, Origin.MODEL) == ["\nyes<|user|>"]


def test_reasoning_that_the_generation_prompt_opens_must_be_in_the_message() -> None:
    template = family(OPENS_REASONING)
    said = {"role": "assistant", "content": "yes"}
    reasoned = [*user("hi"), {**said, "reasoning_content": "hm"}]
    assert texts(template, reasoned, Origin.MODEL) == ["hm\n</think>\nyes<|im_end|>"]
    with pytest.raises(ChatTemplateError, match=r"without the end of its generation prompt, '<think>\\n'"):
        encode_conversation(template, [*user("hi"), said])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (user("hi"), "has no assistant message"),
        ([{"role": "assistant", "content": "yes"}], "begins with an assistant message"),
        (
            [*user("hi"), *[{"role": "assistant", "content": "a"}] * 2],
            "messages 1 and 2 are both of the assistant",
        ),
    ],
)
def test_conversations_that_no_rollout_records_are_refused(messages: list[Message], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        encode_conversation(hermes_template(), messages)


START, END, NEWLINE = encoded("<|im_start|>"), encoded("<|im_end|>"), encoded("\n")
ROLE_OF = {tuple(encoded(role)): role for role in ("user", "assistant")}
TEXTS = [
    call_text("add", a=1, b=2),
    "First this.\n" + call_text("add", a=10, b=-3),
    call_text("add", a=1, b=2) + "\n" + call_text("add", a=3, b=4),
    "<think>\nadd?\n</think>\n\n" + call_text("add", a=5, b=5),
    "It is 3.\n",
    "",
]


@register("continues_after_truncated_turns")
class ContinuesAfterTruncatedTurns(AgentLoopBase):
    """Loop with one turn per limit of the row. Tools reply to calls, and the user replies to everything else."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        async with self.episode(row["raw_prompt"], tools=self.context.tools) as episode:
            for max_tokens in row["limits"]:
                completion = await episode.generate({**sampling_params, "max_tokens": max_tokens})
                results = iter(await episode.call_tools(completion.parsed.tool_calls))
                replies: list[Message] = [
                    {"role": "tool", "content": call.error}
                    if isinstance(call, MalformedCall)
                    else {"role": "tool", "name": call.name, "content": next(results).response.text or ""}
                    for call in completion.calls
                ]
                await episode.observe(replies or [{"role": "user", "content": "Continue."}])
            await episode.finish()
            return episode.output()


def turns_of(ids: list[int]) -> list[list[int]]:
    """Return the tokens of each turn, from after its start token to the next start token."""
    starts = [i for i, token_id in enumerate(ids) if token_id == START[0]]
    return [ids[a + 1 : b] for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]


turns = st.lists(st.tuples(st.sampled_from(TEXTS), st.integers(1, 200)), min_size=1, max_size=6)


@settings(deadline=None)
@given(turns)
def test_turns_truncated_at_any_token_are_kept_and_closed_exactly_once(turns: list[tuple[str, int]]) -> None:
    script = [text_reply(text) for text, _ in turns]
    harness = WorkerHarness(script, tools=[Adder()], agent="continues_after_truncated_turns")
    limits = [min(limit, len(reply.token_ids)) for reply, (_, limit) in zip(script, turns, strict=True)]
    output = harness.run_one(limits=limits).output
    assert output.failure is None
    sampled = [segment.token_ids.tolist() for segment in output.segments if segment.origin is Origin.MODEL]
    assert sampled == [list(reply.token_ids)[:limit] for reply, limit in zip(script, limits, strict=True)]
    record = np.concatenate([segment.token_ids for segment in output.segments]).tolist()
    for request in harness.server.requests:
        assert record[: len(request.prompt_ids)] == request.prompt_ids.tolist()

    *closed, last = turns_of(record)
    for number, turn in enumerate(closed[1:]):  # The first turn is the system prompt.
        role = ROLE_OF[tuple(turn[: turn.index(NEWLINE[0])])]
        assert role == ("assistant" if number % 2 else "user")
        assert turn.count(END[0]) == 1
        assert turn[-2:] == [*END, *NEWLINE]
    assert tuple(last[: last.index(NEWLINE[0])]) == tuple(encoded("assistant"))
    assert END[0] not in last
