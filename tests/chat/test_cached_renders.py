"""Cached renders have exactly the tokens of full renders."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from agent_loop.chat import cached_prompts
from agent_loop.chat.cached_render import CachedRender
from agent_loop.chat.encoding import ControlledEncoder, EncoderChoice
from agent_loop.chat.placeholder_tokenizer import placeholder_tokenizer
from agent_loop.chat.probes import PROBE_TOOLS
from agent_loop.chat.rendering import SENTINEL, Renderer
from agent_loop.chat.slot_check import SLOT, SlotCheck
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import ChatTemplateError
from agent_loop.types import Message, ToolCall
from tests.chat.families import (
    ARGUMENTS_ARE_TEXT,
    CALLS_END_OTHERWISE,
    NEXT_ROLE_ENDS_THE_TURN,
    NINE_LETTER_IDS,
    PRINTS_VALUES,
    PUTS_REASONING_BEFORE,
    READS_REASONING,
    tool_message,
)
from tests.chat.test_encoding import KINDS, encoder_of
from tests.chat.test_trl_templates import TEMPLATES
from tests.harness import examples
from tests.helpers import HERMES_TEMPLATE, user

LOOKS_AT_TEXTS = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string and m.content.startswith('<ask>') and m.content.endswith('</ask>') -%}
{{ m.content | upper }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""Only a text with both tags is rendered differently; one of the tags is not enough."""
NEW_EACH_MINUTE = "{{ strftime_now('%H:%M') }}<|im_end|>" + LOOKS_AT_TEXTS
SMALL = {
    "hermes": HERMES_TEMPLATE,
    "arguments are text": ARGUMENTS_ARE_TEXT,
    "calls end otherwise": CALLS_END_OTHERWISE,
    "next role ends the turn": NEXT_ROLE_ENDS_THE_TURN,
    "nine letters": NINE_LETTER_IDS,
    "looks at texts": LOOKS_AT_TEXTS,
    "reads reasoning": READS_REASONING,
    "puts reasoning before": PUTS_REASONING_BEFORE,
    "prints values": PRINTS_VALUES,
}
OF_FAMILIES = ["qwen3", "qwen3_5_think", "llama3_1", "gptoss", "glm4moe"]
"""Shipped templates that every test run compares. The slow tests compare all templates."""
CHOICES: list[EncoderChoice] = ["auto", "tokenizers"]
MARKS = [
    "<|im_end|>",
    "<|im_",
    "<ask>",
    "</ask>",
    "</think>",
    "[INST]",
    SLOT,
    "@mask.3c;",
    "@mask:3c;",
]
texts = st.text(max_size=30) | st.lists(
    st.sampled_from([*MARKS, " ", "\n", "x", "<"]) | st.text(max_size=3), max_size=6
).map("".join)


@cache
def template_of(name: str, choice: EncoderChoice = "auto") -> ChatTemplate:
    return ChatTemplate(placeholder_tokenizer(SMALL.get(name) or TEMPLATES[name]), encoder=choice)


def rendered_prompt(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
    """Return the tokens of a prompt by running the template."""
    return template.encoder.encode(template.renderer.text(messages, tools=tools))


def replies_of(first: str, second: str) -> list[list[Message]]:
    """Return the replies to compare: of a user, of one tool and of several, with names and ids and without."""
    named = {"name": "get_weather", "tool_call_id": "abcdefghi"}
    other = tool_message(second, name="other", tool_call_id="ABCDEFGHI")
    return [
        user(first),
        [tool_message(first, **named)],
        [tool_message(first, name="get_weather")],
        [tool_message(first, **named), other],
        [tool_message(first, **named), other, tool_message("", name="get_weather", tool_call_id="a1b2c3d4e")],
        [tool_message(first, **named), *user(second)],
    ]


def check(template: ChatTemplate, reference: ChatTemplate, first: str, second: str) -> None:
    """Compare bridges and prompts with a template that runs each time and is encoded by `tokenizers`."""
    calls = [ToolCall("get_weather", {"city": "Lisbon"}, id="abcdefghi")]
    for replies in replies_of(first, second):
        try:
            expected = reference.bridges.rendered_ids(replies, calls=calls)
        except ChatTemplateError:
            with pytest.raises(ChatTemplateError):
                template.bridge(replies, calls=calls)
        else:
            assert template.bridge(replies, calls=calls).tolist() == expected
    system: Message = {"role": "system", "content": second}
    for messages in (user(first), [system, *user(first)]):
        for tools in ((), PROBE_TOOLS):
            try:
                expected = rendered_prompt(reference, messages, tools)
            except ChatTemplateError:
                with pytest.raises(ChatTemplateError):
                    template.open(messages, tools=tools)
            else:
                assert template.open(messages, tools=tools).tolist() == expected


def hard_texts(template: ChatTemplate, source: str) -> dict[str, str]:
    """Return one text of each kind that a cached render could get wrong."""
    controls = template.encoder.control_texts
    return {
        "plain": "It is 21 degrees.",
        "empty": "",
        "white space": " \n\t ",
        "white space around": "\n\n  x \n",
        "unicode": "¿Qué? 你好 🌦️ e\u0301 \ufb01 \u2028",
        "control tokens": "".join(controls),
        "control token at the ends": f"{controls[0]}x{controls[-1]}",
        "strings of the source": "".join(re.findall(r"'([^']*)'", source)[:100]),
        "tags of reasoning": "<think>a</think>b",
        "own markers": f"{SLOT} {SENTINEL} @mask.3c; @mask:3c;",
        "Jinja": "{{ x }} {% if %} {# #}",
        "quotes": "\"a\" 'b' \\n \\u0041 &amp;",
        "long": "a long text. " * 300,
    }


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    "name",
    [
        *SMALL,
        *(pytest.param(name, marks=[] if name in OF_FAMILIES else pytest.mark.slow) for name in TEMPLATES),
    ],
)
def test_cached_renders_equal_full_renders_for_every_kind_of_text(name: str, choice: EncoderChoice) -> None:
    template, reference = template_of(name, choice), template_of(name, "tokenizers")
    texts_of_kinds = list(hard_texts(template, SMALL.get(name) or TEMPLATES[name]).values())
    for first, second in zip(texts_of_kinds, [*texts_of_kinds[1:], *texts_of_kinds[:1]], strict=True):
        check(template, reference, first, second)


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", SMALL)
@examples(25)
@given(first=texts, second=texts)
def test_cached_renders_equal_full_renders_for_generated_texts(
    name: str, choice: EncoderChoice, first: str, second: str
) -> None:
    check(template_of(name, choice), template_of(name, "tokenizers"), first, second)


@pytest.mark.nightly(keep=6)
@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_cached_renders_equal_full_renders_of_every_shipped_template(
    name: str, choice: EncoderChoice
) -> None:
    template, reference = template_of(name, choice), template_of(name, "tokenizers")
    chance = random.Random(name)
    pieces = [
        *MARKS,
        *template.encoder.control_texts,
        *TEMPLATES[name].split("'")[1:200:2],
        " ",
        "\n",
        "x",
        "é你",
    ]
    for _ in range(6):
        first, second = ("".join(chance.choices(pieces, k=chance.randrange(5))) for _ in range(2))
        check(template, reference, first, second)


names = st.sampled_from([None, "tool", "other", "get_weather"])
call_ids = st.sampled_from([None, "abcdefghi", "ABCDEFGHI"])


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Message], list[ToolCall]]:
    """Draw tool replies with or without names and ids, and calls whose number may differ from the replies."""
    replies: list[Message] = []
    for _ in range(draw(st.integers(1, 3))):
        reply: Message = {"role": draw(st.sampled_from(["tool", "tool", "user"])), "content": draw(texts)}
        keys = {
            "name": draw(names),
            "tool_call_id": draw(call_ids),
            "more": draw(st.sampled_from([None, "1"])),
        }
        replies.append(reply | {key: value for key, value in keys.items() if value is not None})
    calls = [
        ToolCall(draw(names) or "last", {}, id=draw(call_ids) or "") for _ in range(draw(st.integers(0, 3)))
    ]
    return replies, calls


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("name", SMALL)
@examples(60)
@given(conversation=conversations())
def test_replies_with_similar_forms_are_rendered_correctly(
    name: str, conversation: tuple[list[Message], list[ToolCall]]
) -> None:
    template, (replies, calls) = template_of(name), conversation
    try:
        expected = template.bridges.rendered_ids(replies, calls=calls)
    except ChatTemplateError:
        return
    assert template.bridge(replies, calls=calls).tolist() == expected


class CountedRenders:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_renders = 0
        render = Renderer.text

        def counted(renderer: Renderer, *args: Any, **options: Any) -> str:
            self.num_renders += 1
            return render(renderer, *args, **options)

        monkeypatch.setattr(Renderer, "text", counted)

    def during(self, work: Any) -> int:
        before = self.num_renders
        work()
        return self.num_renders - before


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CountedRenders:
    return CountedRenders(monkeypatch)


def test_a_template_runs_once_for_all_questions_and_system_prompts(counted: CountedRenders) -> None:
    template = template_of("hermes")
    system: Message = {"role": "system", "content": "Use the tools."}

    def ask(text: str) -> None:
        template.open([system, *user(text)], tools=PROBE_TOOLS)

    ask("first")
    assert counted.during(lambda: [ask(str(number)) for number in range(10)]) == 0
    system = {"role": "system", "content": "Use no tools."}
    assert counted.during(lambda: [ask(str(number)) for number in range(10)]) == 0


def test_a_template_that_does_not_render_ids_runs_once_for_calls_with_new_ids(
    counted: CountedRenders,
) -> None:
    template = template_of("hermes")

    def answer(number: int) -> None:
        template.bridge([tool_message("x", name="add", tool_call_id=f"call_{number}")])

    answer(0)
    assert counted.during(lambda: [answer(number) for number in range(10)]) == 0


def test_a_schema_that_is_changed_in_place_is_rendered_again() -> None:
    template = template_of("hermes")
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    before = template.open(user("x"), tools=[schema])
    schema["function"]["name"] = "multiply"
    assert "multiply" in template.decode(template.open(user("x"), tools=[schema]))
    assert "multiply" not in template.decode(before)


def test_a_schema_with_objects_that_are_not_json_is_rendered() -> None:
    template = template_of("hermes")
    schema = {"type": "function", "function": {"name": "add", "parameters": {"default": range(0)}}}
    for _ in range(2):
        assert template.open(user("x"), tools=[schema]).tolist() == rendered_prompt(
            template, user("x"), [schema]
        )


def test_a_prompt_has_the_time_of_its_render(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached parts are valid as long as the template's clock shows the same time."""
    template = template_of_source(NEW_EACH_MINUTE)
    first = template.decode(template.open(user("x")))
    reference = template_of_source(NEW_EACH_MINUTE)
    assert first == reference.encoder.unmask(reference.renderer.text(user("x")))

    class Later(cached_prompts.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return super().now(tz).replace(year=2001, hour=3, minute=7)

    monkeypatch.setattr(cached_prompts, "datetime", Later)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Later)
    template.renderer.text(user("compiled again"))
    assert template.decode(template.open(user("x"))) == template.renderer.text(user("x"))
    assert template.decode(template.open(user("x"))).startswith("03:07")


SYSTEM_IN_FRONT = """\
{%- if messages[0].role == 'system' and messages[0].content.strip() %}<|im_start|>system
{{ messages[0].content }}
Tools:
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>
{% endif %}{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
LOOKS_AT_SYSTEM = (
    "{%- if messages[0].content.startswith('<ask>') and messages[0].content.endswith('</ask>') %}Ask.{% endif -%}"
    + SYSTEM_IN_FRONT
)
SYSTEM_IN_TURN = """\
{%- set head = namespace(text='') %}
{%- for m in messages %}
{%- if m.role == 'system' %}{% set head.text = m.content | trim %}{% else %}<|im_start|>{{ m.role }}
{{ head.text }}
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}Next: {{ m.content }}<|im_end|>
{% set head.text = '' %}{% endif %}{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
"""No anchor stands between the system prompt, the tools and the question."""
SYSTEM_BEHIND = SYSTEM_IN_TURN.replace("{{ head.text }}", "{{ m.content }}").replace(
    "Next: {{ m.content }}", "Next: {{ head.text }}"
)
WITH_SYSTEM = {
    "system in front": SYSTEM_IN_FRONT,
    "looks at system": LOOKS_AT_SYSTEM,
    "system in turn": SYSTEM_IN_TURN,
    "system behind": SYSTEM_BEHIND,
    **{name: SMALL[name] for name in ("hermes", "looks at texts")},
    **{name: TEMPLATES[name] for name in OF_FAMILIES},
}
descriptions = st.lists(st.sampled_from([*MARKS, "\n", "\nThen ", " ", "é", "/"]), max_size=5).map("".join)


@cache
def pair_of(name: str, choice: EncoderChoice) -> tuple[ChatTemplate, ChatTemplate]:
    """Return a template, and one of the same source that encodes with `tokenizers`."""
    tokenizer = placeholder_tokenizer(WITH_SYSTEM[name])
    return ChatTemplate(tokenizer, encoder=choice), ChatTemplate(tokenizer, encoder="tokenizers")


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", WITH_SYSTEM)
@examples(25)
@given(
    systems=st.lists(texts, min_size=2, max_size=3),
    question=texts,
    described=descriptions,
    num_tools=st.integers(0, 3),
)
def test_prompts_with_any_system_prompt_and_tools_equal_full_renders(
    name: str, choice: EncoderChoice, systems: list[str], question: str, described: str, num_tools: int
) -> None:
    template, reference = pair_of(name, choice)
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "description": described, "parameters": {}}}
        for n in range(num_tools)
    ]
    for system in systems:
        messages = [{"role": "system", "content": system}, *user(question)]
        try:
            expected = rendered_prompt(reference, messages, tools)
        except ChatTemplateError:
            continue
        assert template.open(messages, tools=tools).tolist() == expected


@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_5_think", "llama3_1", "gptoss", "glm4moe", "system in front", "system in turn"]
)
def test_a_template_runs_once_for_a_list_of_tools(name: str, counted: CountedRenders) -> None:
    template, _ = pair_of(name, "auto")

    def ask(number: int) -> None:
        template.open([{"role": "system", "content": f"You are {number}."}, *user("x")], tools=PROBE_TOOLS)

    ask(0)
    assert counted.during(lambda: [ask(number) for number in range(1, 10)]) == 0


def test_the_check_of_a_template_renders_one_of_many_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    template = template_of_source(HERMES_TEMPLATE)
    rendered: list[int] = []
    render = Renderer.text

    def noted(renderer: Renderer, *args: Any, tools: Sequence[Any] = (), **options: Any) -> str:
        rendered.append(len(tools))
        return render(renderer, *args, tools=tools, **options)

    monkeypatch.setattr(Renderer, "text", noted)
    template.open([{"role": "system", "content": "s"}, *user("x")], tools=list(PROBE_TOOLS) * 20)
    assert sum(number > 1 for number in rendered) == 1


def template_of_source(source: str) -> ChatTemplate:
    return ChatTemplate(placeholder_tokenizer(source))


def test_the_number_of_cached_system_prompts_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_prompts, "MAX_PROMPTS", 3)
    template = template_of_source(HERMES_TEMPLATE)
    for number in range(10):
        system: Message = {"role": "system", "content": f"You are number {number}."}
        assert f"number {number}." in template.decode(template.open([system, *user("x")]))
    assert len(template._prompts._prompts) == 3  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    "around", [("", ""), ("a ", " b"), (" <s>", "<s> "), ("<s>\n", "[INST]\n"), ("<s>a", "b")]
)
@pytest.mark.parametrize("kind", KINDS)
@examples(30)
@given(first=texts, second=texts)
def test_a_form_has_the_tokens_of_the_whole_text(
    kind: str, around: tuple[str, str], first: str, second: str
) -> None:
    encoder = encoder_of(kind)
    first, second = encoder.mask(first), encoder.mask(second)
    before, after = around
    parts = [f"{before}<|im_start|> user\n", "\n <|im_end|>\n<tool_call> ", after]
    form = CachedRender(parts, encoder=encoder)
    assert form.ids([first, second]).tolist() == encoder.encode(
        f"{parts[0]}{first}{parts[1]}{second}{parts[2]}"
    )


QUIRKS = {"rstrip": {"rstrip": True}, "lstrip": {"lstrip": True}, "both": {"lstrip": True, "rstrip": True}}


@pytest.mark.parametrize("quirk", QUIRKS)
@examples(60)
@given(text=st.text(st.sampled_from("a \n<>")))
def test_tokens_that_strip_spaces_strip_those_of_a_blank_too(quirk: str, text: str) -> None:
    tokenizer = placeholder_tokenizer("x").backend_tokenizer
    tokenizer.add_tokens([AddedToken("<a>", **QUIRKS[quirk]), AddedToken("<b>", **QUIRKS[quirk])])
    encoder = ControlledEncoder(tokenizer)
    parts = ["x <a>", "<b> x"]
    text = encoder.mask(text)
    assert CachedRender(parts, encoder=encoder).ids([text]).tolist() == encoder.encode(f"x <a>{text}<b> x")


@pytest.mark.parametrize("tokens", [["<a>", "<a>b"], ["<a>", "x<a>y"], ["<a>", "b<"], ["<a>", "=<a"]])
@examples(60)
@given(text=st.text(st.sampled_from("a<>bxy=")))
def test_a_text_is_not_split_at_a_token_that_overlaps_with_another(tokens: list[str], text: str) -> None:
    tokenizer = placeholder_tokenizer("x").backend_tokenizer
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    for choice in CHOICES:
        encoder = ControlledEncoder(tokenizer, choice=choice)
        parts = ["x<a>", "<a>y"]
        masked = encoder.mask(text)
        whole = encoder.encode(f"x<a>{masked}<a>y")
        assert CachedRender(parts, encoder=encoder).ids([masked]).tolist() == whole


def test_a_template_that_reads_both_ends_of_a_text_runs_each_time() -> None:
    check_ = SlotCheck(mask=str, chat_template=LOOKS_AT_TEXTS)

    def render(given: Sequence[str]) -> str:
        [text] = given
        is_marked = text.startswith("<ask>") and text.endswith("</ask>")
        return f"({text.upper() if is_marked else text})"

    assert check_.find_rule(render, num_slots=1) is None
    assert SlotCheck(mask=str, chat_template="").find_rule(render, num_slots=1) == "verbatim"


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("{text}", "verbatim"),
        ("{stripped}", "stripped"),
        ("{upper}", None),
        ("{text}{text}", None),
        ("constant", None),
    ],
)
def test_a_rule_is_derived_only_for_texts_that_are_copied_once(written: str, rule: str | None) -> None:
    def render(given: Sequence[str]) -> str:
        [text] = given
        return f"<{written.format(text=text, stripped=text.strip(), upper=text.upper())}>"

    assert SlotCheck(mask=str, chat_template="").find_rule(render, num_slots=1) == rule


@pytest.mark.slow
def test_most_shipped_templates_do_not_run_for_each_reply(counted: CountedRenders) -> None:
    """A check that refuses every template would pass all comparisons above."""
    cached = 0
    for name in TEMPLATES:
        template = template_of(name)
        template.bridge(user("first"))
        cached += counted.during(lambda template=template: template.bridge(user("second"))) == 0
    assert cached > 60
