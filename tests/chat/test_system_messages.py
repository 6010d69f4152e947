"""Tests that no chat template loses a system message in the middle of a conversation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.chat.messages import renders_system_messages, settle_system_messages
from agent_loop.chat.template import ChatTemplate
from tests.chat.families import family
from tests.helpers import hermes_template, user

IN_PLACE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}
"""
REFUSES = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}
"""
HOISTS = """\
{%- for m in messages %}{%- if m.role == 'system' %}{{ m.content }}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- if m.role != 'system' %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}
"""
TEMPLATES = {
    "in_place": lambda: family(IN_PLACE),
    "refuses": lambda: family(REFUSES),
    "hoists": lambda: family(HOISTS),
    "leaves_out": hermes_template,
}


@pytest.fixture(params=TEMPLATES, scope="module")
def template(request: Any) -> ChatTemplate:
    return TEMPLATES[request.param]()


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


ANSWER = {"role": "assistant", "content": "reply"}


def test_a_template_that_renders_them_at_their_place_gets_them_unchanged() -> None:
    template = TEMPLATES["in_place"]()
    messages = [system("1"), system("2"), *user("3"), system("4"), ANSWER, system("5")]
    assert renders_system_messages(template)
    assert settle_system_messages(messages, template) == messages


@pytest.mark.parametrize("name", ["refuses", "hoists", "leaves_out"])
def test_other_templates_get_them_as_text_of_the_user(name: str) -> None:
    later = [*user("3"), system("4"), ANSWER, system("5"), *user("6"), *user("7")]
    messages = [system("1"), system("2"), *later]
    assert settle_system_messages(messages, TEMPLATES[name]()) == [
        system("1\n\n2"),
        *user("3\n\n<system>\n4\n</system>"),
        ANSWER,
        *user("<system>\n5\n</system>\n\n6"),
        *user("7"),
    ]


def test_a_system_message_beside_an_image_becomes_a_part_of_the_users_message() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages = [{"role": "user", "content": [image]}, system("look")]
    text = {"type": "text", "text": "<system>\nlook\n</system>"}
    assert settle_system_messages(messages, hermes_template()) == [{"role": "user", "content": [image, text]}]


def test_the_name_of_a_user_is_kept() -> None:
    named = {"role": "user", "content": "hi", "name": "ann"}
    settled = settle_system_messages([named, system("x"), named], hermes_template())
    assert settled == [named, *user("<system>\nx\n</system>"), named]


roles_of_a_turn = st.lists(st.sampled_from(["system", "user"]), min_size=1, max_size=3)


@settings(deadline=None)
@given(st.lists(roles_of_a_turn, min_size=1, max_size=3))
def test_every_text_is_rendered_in_its_order_and_a_longer_conversation_only_adds(
    template: ChatTemplate, turns: list[list[str]]
) -> None:
    messages: list[dict[str, Any]] = []
    beginnings: list[list[dict[str, Any]]] = []
    for roles in turns:
        for role in roles:
            messages.append({"role": role, "content": f"text.{len(messages)}."})
        beginnings.append(settle_system_messages(messages, template))
        messages.append({"role": "assistant", "content": f"text.{len(messages)}."})
    messages += user(f"text.{len(messages)}.")
    settled = settle_system_messages(messages, template)
    rendered = template.decode(template.open(settled))
    found = [rendered.find(message["content"]) for message in messages]
    assert min(found) >= 0
    assert found == sorted(found)
    for beginning in beginnings:
        assert settled[: len(beginning)] == beginning
        assert settled[len(beginning)]["role"] == "assistant"
