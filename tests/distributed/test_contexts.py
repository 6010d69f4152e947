"""What a turn carries, and that both sides never disagree unnoticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.distributed.contexts import HeldContexts, SentContexts, UnknownContext, token_bytes
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import as_token_ids

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


class Line:
    """A client and a server, and what went from one to the other."""

    def __init__(self) -> None:
        self.sent = SentContexts()
        self.held = HeldContexts()
        self.num_new: list[int] = []

    def turn(
        self,
        prompt: list[int],
        completion: list[int],
        *,
        session: str = "s",
        attachments: tuple[Attachment, ...] = (),
    ) -> list[int]:
        """The context as the server had it."""
        prompt_ids = as_token_ids(prompt)
        delta = self.sent.delta(session, prompt_ids, attachments)
        try:
            context, _ = self.held.extend(session, delta, client="c")
        except UnknownContext:
            self.sent.forget(session)
            delta = self.sent.delta(session, prompt_ids, attachments)
            context, _ = self.held.extend(session, delta, client="c")
        self.num_new.append(len(delta.new_tokens) // 4)
        self.held.append(session, token_bytes(completion))
        self.sent.keep(
            session,
            delta=delta,
            prompt_ids=prompt_ids,
            attachments=attachments,
            completion=token_bytes(completion),
        )
        return context.tolist()


def test_a_turn_carries_only_what_is_new() -> None:
    line = Line()
    assert line.turn([1, 2, 3], [4, 5]) == [1, 2, 3]
    assert line.turn([1, 2, 3, 4, 5, 6], [7]) == [1, 2, 3, 4, 5, 6]
    assert line.num_new == [3, 1]


def test_a_history_that_was_changed_is_sent_anew() -> None:
    line = Line()
    line.turn([1, 2, 3], [4, 5])
    assert line.turn([1, 9, 3, 4, 5, 6], []) == [1, 9, 3, 4, 5, 6]
    assert line.turn([1, 9], []) == [1, 9]
    assert line.num_new == [3, 6, 2]


def test_a_server_that_lost_the_session_gets_everything_again() -> None:
    line = Line()
    line.turn([1, 2, 3], [4])
    line.held.end("s")
    assert line.turn([1, 2, 3, 4, 5], [6]) == [1, 2, 3, 4, 5]
    assert line.turn([1, 2, 3, 4, 5, 6, 7], []) == [1, 2, 3, 4, 5, 6, 7]
    assert line.num_new == [3, 5, 1]


def test_a_server_that_holds_other_tokens_says_so() -> None:
    line = Line()
    line.turn([1, 2, 3], [4])
    other = line.sent.delta("s", as_token_ids([1, 2, 3, 4, 5]))
    line.held.append("s", token_bytes([99]))
    with pytest.raises(UnknownContext):
        line.held.extend("s", other, client="c")


def test_what_was_handed_out_does_not_change_and_cannot_be_written_to() -> None:
    held = HeldContexts()
    sent = SentContexts()
    first, _ = held.extend("s", sent.delta("s", as_token_ids([1, 2])), client="c")
    held.append("s", token_bytes(range(5000)))
    assert first.tolist() == [1, 2]
    assert not first.flags.writeable


def test_images_travel_once() -> None:
    def image(start: int, digest: bytes) -> Attachment:
        return Attachment("image", start, 1, 7, {"pixels": np.zeros(4)}, digest)

    sent, held = SentContexts(), HeldContexts()
    one, two = image(1, b"one"), image(3, b"two")
    prompt = as_token_ids([1, 7])
    delta = sent.delta("s", prompt, (one,))
    held.extend("s", delta, client="c")
    sent.keep("s", delta=delta, prompt_ids=prompt, attachments=(one,), completion=b"")
    delta = sent.delta("s", as_token_ids([1, 7, 2, 7]), (one, two))
    assert [attachment.digest for attachment in delta.new_attachments] == [b"two"]
    _, attachments = held.extend("s", delta, client="c")
    assert [attachment.digest for attachment in attachments] == [b"one", b"two"]
    changed = sent.delta("s", as_token_ids([1, 7, 2]), (image(1, b"three"),))
    assert (changed.num_held, len(changed.new_attachments)) == (0, 1)


def test_what_a_dead_client_had_is_dropped_and_nothing_else() -> None:
    held, sent = HeldContexts(), SentContexts()
    for session, client in (("a", "dead"), ("b", "dead"), ("c", "alive")):
        held.extend(session, sent.delta(session, as_token_ids([1])), client=client)
    assert set(held.sessions_of("dead")) == {"a", "b"}
    held.drop_client("dead")
    assert (len(held), held.sessions_of("dead"), held.sessions_of("alive")) == (1, (), ("c",))


@given(turns=st.lists(st.tuples(TOKENS, TOKENS, st.sampled_from(["goes on", "anew", "lost"])), max_size=8))
def test_the_server_always_has_what_the_client_means(turns: list[tuple[list[int], list[int], str]]) -> None:
    line, context = Line(), [1]
    for added, completion, what in turns:
        if what == "anew":
            context = [2]
        if what == "lost":
            line.held.end("s")
        context = [*context, *added]
        assert line.turn(context, completion) == context
        context = [*context, *completion]
