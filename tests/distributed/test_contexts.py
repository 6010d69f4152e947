"""A turn sends only new tokens, and a difference between the two sides is detected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.distributed.contexts import ReceivedContexts, SentContexts, UnknownContext, token_bytes
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import as_token_ids

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


class SessionPair:
    """Contexts of a client and of a server, and the number of tokens that were sent in each turn."""

    def __init__(self) -> None:
        self.sent = SentContexts()
        self.received = ReceivedContexts()
        self.num_new: list[int] = []

    def turn(
        self,
        prompt: list[int],
        completion: list[int],
        *,
        session: str = "s",
        attachments: tuple[Attachment, ...] = (),
    ) -> list[int]:
        """Run a turn and return the context that the server had."""
        prompt_ids = as_token_ids(prompt)
        delta = self.sent.delta(session, prompt_ids, attachments)
        try:
            context, _ = self.received.extend(session, delta, client="c")
        except UnknownContext:
            self.sent.forget(session)
            delta = self.sent.delta(session, prompt_ids, attachments)
            context, _ = self.received.extend(session, delta, client="c")
        self.num_new.append(len(delta.new_tokens) // 4)
        self.received.append(session, token_bytes(completion))
        self.sent.keep(
            session,
            delta=delta,
            prompt_ids=prompt_ids,
            attachments=attachments,
            completion=token_bytes(completion),
        )
        return context.tolist()


def test_a_turn_sends_only_new_tokens() -> None:
    pair = SessionPair()
    assert pair.turn([1, 2, 3], [4, 5]) == [1, 2, 3]
    assert pair.turn([1, 2, 3, 4, 5, 6], [7]) == [1, 2, 3, 4, 5, 6]
    assert pair.num_new == [3, 1]


def test_a_history_that_was_changed_is_sent_again() -> None:
    pair = SessionPair()
    pair.turn([1, 2, 3], [4, 5])
    assert pair.turn([1, 9, 3, 4, 5, 6], []) == [1, 9, 3, 4, 5, 6]
    assert pair.turn([1, 9], []) == [1, 9]
    assert pair.num_new == [3, 6, 2]


def test_a_server_that_lost_the_session_gets_everything_again() -> None:
    pair = SessionPair()
    pair.turn([1, 2, 3], [4])
    pair.received.end("s")
    assert pair.turn([1, 2, 3, 4, 5], [6]) == [1, 2, 3, 4, 5]
    assert pair.turn([1, 2, 3, 4, 5, 6, 7], []) == [1, 2, 3, 4, 5, 6, 7]
    assert pair.num_new == [3, 5, 1]


def test_a_server_that_has_other_tokens_refuses_the_delta() -> None:
    pair = SessionPair()
    pair.turn([1, 2, 3], [4])
    other = pair.sent.delta("s", as_token_ids([1, 2, 3, 4, 5]))
    pair.received.append("s", token_bytes([99]))
    with pytest.raises(UnknownContext):
        pair.received.extend("s", other, client="c")


def test_a_returned_context_does_not_change_and_is_read_only() -> None:
    received = ReceivedContexts()
    sent = SentContexts()
    first, _ = received.extend("s", sent.delta("s", as_token_ids([1, 2])), client="c")
    received.append("s", token_bytes(range(5000)))
    assert first.tolist() == [1, 2]
    assert not first.flags.writeable


def test_images_are_sent_once() -> None:
    def image(start: int, digest: bytes) -> Attachment:
        return Attachment("image", start, 1, 7, {"pixels": np.zeros(4)}, digest)

    sent, received = SentContexts(), ReceivedContexts()
    one, two = image(1, b"one"), image(3, b"two")
    prompt = as_token_ids([1, 7])
    delta = sent.delta("s", prompt, (one,))
    received.extend("s", delta, client="c")
    sent.keep("s", delta=delta, prompt_ids=prompt, attachments=(one,), completion=b"")
    delta = sent.delta("s", as_token_ids([1, 7, 2, 7]), (one, two))
    assert [attachment.digest for attachment in delta.new_attachments] == [b"two"]
    _, attachments = received.extend("s", delta, client="c")
    assert [attachment.digest for attachment in attachments] == [b"one", b"two"]
    changed = sent.delta("s", as_token_ids([1, 7, 2]), (image(1, b"three"),))
    assert (changed.num_held, len(changed.new_attachments)) == (0, 1)


def test_dropping_a_client_drops_its_sessions_only() -> None:
    received, sent = ReceivedContexts(), SentContexts()
    for session, client in (("a", "dead"), ("b", "dead"), ("c", "alive")):
        received.extend(session, sent.delta(session, as_token_ids([1])), client=client)
    assert set(received.sessions_of("dead")) == {"a", "b"}
    received.drop_client("dead")
    assert (len(received), received.sessions_of("dead"), received.sessions_of("alive")) == (1, (), ("c",))


@given(
    turns=st.lists(st.tuples(TOKENS, TOKENS, st.sampled_from(["extended", "replaced", "lost"])), max_size=8)
)
def test_the_server_always_has_the_context_of_the_client(
    turns: list[tuple[list[int], list[int], str]],
) -> None:
    pair, context = SessionPair(), [1]
    for added, completion, what in turns:
        if what == "replaced":
            context = [2]
        if what == "lost":
            pair.received.end("s")
        context = [*context, *added]
        assert pair.turn(context, completion) == context
        context = [*context, *completion]
