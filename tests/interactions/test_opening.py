"""Tests of interactions that open the conversation, in runs that resume after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_loop.interactions.base import BaseInteraction
from agent_loop.recording.record import RecordKind
from agent_loop.recording.values import unpack
from agent_loop.rollout.journal import HEADER, framed, read_records
from agent_loop.runtime.instances import OnReplay
from agent_loop.types import Message
from tests.helpers import text_reply, user
from tests.rollout.harness import WorkerHarness
from tests.rollout.journaled import run_journaled

ROWS = [{"raw_prompt": user("Begin."), "interaction_kwargs": {"name": "guide"}}]


class Guide(BaseInteraction):
    """Opens each conversation with a numbered message."""

    opens_conversation = True

    def __init__(self, *, on_replay: OnReplay, words: str) -> None:
        super().__init__({"name": "guide"})
        self.on_replay = on_replay
        self.words = words
        self.num_started = 0
        self.num_replies = 0

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str:
        self.num_started += 1
        return f"{self.words} {self.num_started}"

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        self.num_replies += 1
        return len(messages) > 4, f"{self.words}!", 0.5, {"turn": self.num_replies}


def make_harness(guide: Guide) -> WorkerHarness:
    return WorkerHarness(lambda request: text_reply(f"answer {request.turn}"), interactions={"guide": guide})


@pytest.mark.parametrize("on_replay", [OnReplay.RECORDED, OnReplay.RERUN, OnReplay.RESTART])
def test_a_resumed_conversation_keeps_its_opening_unless_it_restarts(
    tmp_path: Path, on_replay: OnReplay
) -> None:
    path = tmp_path / "journal"
    [whole] = run_journaled(path, make_harness(Guide(on_replay=on_replay, words="old")), ROWS)
    assert whole.output.messages[0]["content"] == "Begin.\n\nold 1"
    payloads = read_records(path.read_bytes())[0]
    num_kept = [unpack(payload)["is"] for payload in payloads].index(RecordKind.OBSERVATION) + 1
    path.write_bytes(HEADER + b"".join(framed(payload) for payload in payloads[:num_kept]))

    guide = Guide(on_replay=on_replay, words="new")
    [resumed] = run_journaled(path, make_harness(guide), ROWS, resume=True)
    opening, first_reply = (resumed.output.messages[index]["content"] for index in (0, 2))
    assert resumed.output.failure is None
    if on_replay is OnReplay.RESTART:
        assert (opening, first_reply) == ("Begin.\n\nnew 1", "new!")
    else:
        assert (opening, first_reply) == ("Begin.\n\nold 1", "old!")
        assert guide.num_started == 1
        assert guide.num_replies == (3 if on_replay is OnReplay.RERUN else 2)
    assert len(resumed.output.turn_scores) == len(whole.output.turn_scores)
