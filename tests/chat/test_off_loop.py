from __future__ import annotations

import threading

import pytest

from agent_loop.chat.multimodal import Encoded
from agent_loop.chat.off_loop import LONG_CHARACTERS, encoded_off_loop
from agent_loop.testing import run_virtual
from agent_loop.types import Message
from tests.helpers import hermes_template, user


@pytest.mark.parametrize(
    ("content", "is_long"),
    [
        ("x" * (LONG_CHARACTERS - 1), False),
        ("x" * LONG_CHARACTERS, True),
        ([{"type": "text", "text": "x"}], False),
    ],
)
def test_only_long_texts_are_encoded_in_a_thread(content: object, is_long: bool) -> None:
    template = hermes_template()
    messages: list[Message] = [{"role": "user", "content": content}]
    threads: list[threading.Thread] = []

    def encode() -> Encoded:
        threads.append(threading.current_thread())
        return template.open_encoded(user("x"))

    encoded = run_virtual(encoded_off_loop(messages, encode))
    assert encoded.token_ids.tolist() == template.open(user("x")).tolist()
    assert [thread is not threading.main_thread() for thread in threads] == [is_long]


def test_threads_share_the_cached_forms_of_a_template() -> None:
    """Each thread renders with different system prompts, more of them than the cache holds."""
    template = hermes_template()
    results: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        results[number] = [
            template.decode(
                template.open([{"role": "system", "content": f"{number % 3}.{i}"}, *user(f"q{number}")])
            )
            for i in range(80)
        ]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, texts in results.items():
        for i, text in enumerate(texts):
            assert f"system\n{number % 3}.{i}<" in text
            assert f"user\nq{number}<" in text
    assert len(results) == 6
