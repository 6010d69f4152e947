"""Teachers score the tokens that the policy sampled, after their own prompts, while other trajectories run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import DistillationConfig
from agent_loop.servers.scores import TokenScores
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.training import metrics as names
from agent_loop.training.distillation.scoring import Lessons, Scoring, open_scoring
from agent_loop.training.distillation.teachers import Teacher, Teachers
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import FloatArray, IntArray, Origin, StopReason, as_token_ids
from tests.helpers import small_tokenizer

TEMPLATE = ChatTemplate(small_tokenizer())
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the quick brown fox"}]
ANSWER = "says hello"


def scorer(token_ids: IntArray) -> FloatArray:
    """Return a log-prob for each token but the first, which its place and its id determine."""
    return -(np.arange(1, len(token_ids)) + token_ids[1:] / 1000).astype(np.float32)


class Bench:
    """A teacher on a scripted server, and the lines that are reported."""

    def __init__(self, server: ScriptedServer, **teacher: Any) -> None:
        self.server = server
        self.lines: list[str] = []
        self.config = DistillationConfig.model_validate(
            {"teachers": {"big": teacher}, "objective": "sampled_kl"}
        )
        [settings] = self.config.teachers.values()
        self.teachers = Teachers(
            self.config,
            {
                "big": Teacher(
                    "big",
                    config=settings,
                    server=server,
                    template=TEMPLATE,
                    context_length=settings.context_length or 1000,
                    num_candidates=0,
                )
            },
        )

    @asynccontextmanager
    async def scoring(self) -> AsyncGenerator[Scoring]:
        async with open_scoring(self.teachers, report=self.lines.append) as scoring:
            yield scoring

    def lessons(self, trajectories: Sequence[Trajectory]) -> Lessons:
        async def ask() -> Lessons:
            async with self.scoring() as scoring:
                return await scoring.finish(trajectories, label="step 3")

        return asyncio.run(ask())


def trajectory(
    answer: str = ANSWER,
    *,
    row: Mapping[str, Any] | None = None,
    rollout: int = 0,
    stop_reason: StopReason = StopReason.ANSWERED,
    attachments: tuple[Attachment, ...] = (),
) -> Trajectory:
    """Return a trajectory with a completion, an observation, and another completion."""
    answer_ids = TEMPLATE.encoder.encode(answer)
    segments = [
        Segment(TEMPLATE.open(QUESTION), Origin.PROMPT, attachments=attachments),
        Segment(as_token_ids(answer_ids), Origin.MODEL, np.full(len(answer_ids), -1, np.float32), 0),
        Segment(as_token_ids([5, 6]), Origin.TOOL),
        Segment(as_token_ids([7, 8, 9]), Origin.MODEL, np.full(3, -1, np.float32), 0),
    ]
    messages = [*QUESTION, {"role": "assistant", "content": answer}]
    return Trajectory(
        output=AgentLoopOutput(segments=segments, messages=messages, stop_reason=stop_reason),
        row=dict(row or {}),
        group=0,
        rollout=rollout,
        reward=0.0,
        reward_extra={},
    )


@pytest.mark.parametrize(
    ("teacher", "row", "hint"),
    [
        ({"hint": "It says hello."}, {}, "It says hello."),
        ({"hint_key": "solution"}, {"solution": "hello"}, "hello"),
        ({"hint": "The solution:", "hint_key": "solution"}, {"solution": 42}, "The solution:\n42"),
    ],
)
def test_a_hint_changes_the_prompt_of_the_teacher_and_no_token_of_the_response(
    teacher: dict[str, Any], row: dict[str, Any], hint: str
) -> None:
    bench, one = Bench(ScriptedServer((), scorer=scorer), **teacher), trajectory(row=row)

    [lesson] = bench.lessons([one]).of_trajectories

    system, user = QUESTION
    prompt = TEMPLATE.open([system, {**user, "content": f"{hint}\n\n{user['content']}"}])
    [text] = bench.server.scored
    np.testing.assert_array_equal(text[: len(prompt)], prompt)
    np.testing.assert_array_equal(text[len(prompt) :], one.output.response_ids)
    assert lesson is not None
    assert len(lesson.scores.logprobs) == len(one.output.response_ids)


def test_equal_texts_are_scored_once() -> None:
    bench = Bench(ScriptedServer((), scorer=scorer))

    lessons = bench.lessons([trajectory(rollout=0), trajectory(rollout=1), trajectory("hello")])

    assert len(bench.server.scored) == 2
    assert all(lessons.of_trajectories)


def test_trajectories_that_failed_are_not_asked_about() -> None:
    bench = Bench(ScriptedServer((), scorer=scorer))

    lessons = bench.lessons([trajectory(stop_reason=StopReason.FAILED), trajectory()])

    first, second = lessons.of_trajectories
    assert first is None
    assert second is not None
    assert not bench.lines


IMAGE = Attachment(
    "image", start=0, num_tokens=1, placeholder_id=int(TEMPLATE.open(QUESTION)[0]), features={}, digest=b""
)


@pytest.mark.parametrize(
    ("teacher", "other", "kind", "detail"),
    [
        ({"context_length": 60}, trajectory("hello " * 30), "too_long", "over context_length=60"),
        ({"hint_key": "solution"}, trajectory(), "hint", "no column 'solution' for its hint"),
        ({}, trajectory(attachments=(IMAGE,)), "attachments", "has images or videos"),
    ],
)
def test_a_trajectory_that_cannot_be_scored_is_counted_and_named(
    teacher: dict[str, Any], other: Trajectory, kind: str, detail: str
) -> None:
    bench = Bench(ScriptedServer((), scorer=scorer), **teacher)

    lessons = bench.lessons([trajectory(row={"solution": "x"}), other])

    assert [lesson is None for lesson in lessons.of_trajectories] == [False, True]
    assert lessons.metrics()[names.NOT_TAUGHT + kind] == 1
    [line] = bench.lines
    assert line.startswith(
        f"step 3: not scored by their teachers: 1 by big ({kind}), first group=0/rollout=0 by big"
    )
    assert detail in line


def failing_on(text: str) -> Any:
    """Return a scorer that returns NaN for responses with a text."""
    bad = TEMPLATE.encoder.encode(text)

    def score(token_ids: IntArray) -> FloatArray:
        found = scorer(token_ids)
        return found * np.nan if bad[0] in token_ids[-8:] else found

    return score


def test_a_reply_that_is_no_log_prob_leaves_out_its_trajectory_alone() -> None:
    bench = Bench(ScriptedServer((), scorer=failing_on("model")))

    lessons = bench.lessons([trajectory(), trajectory("model")])

    assert [lesson is None for lesson in lessons.of_trajectories] == [False, True]
    assert lessons.metrics()[names.NOT_TAUGHT + "server"] == 1
    assert "is not a log-prob" in bench.lines[0]


class WaitingServer(ScriptedServer):
    """Server whose scores wait until the test releases them.

    Args:
        num_expected: Number of running requests at which `is_busy` is set.
    """

    def __init__(self, *, num_expected: int = 1) -> None:
        super().__init__((), scorer=scorer)
        self.released, self.is_busy, self.has_cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.num_scoring = self.most_running = 0
        self._num_expected = num_expected

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        self.num_scoring += 1
        self.most_running = max(self.most_running, self.num_scoring)
        if self.num_scoring == self._num_expected:
            self.is_busy.set()
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.has_cancelled.set()
            raise
        finally:
            self.num_scoring -= 1
        return await super().score(token_ids, start=start, top_logprobs=top_logprobs)


def test_scores_are_asked_for_as_trajectories_end_and_those_of_dropped_ones_are_cancelled() -> None:
    async def roll_out() -> None:
        server = WaitingServer(num_expected=2)
        async with Bench(server).scoring() as scoring:
            for each in (trajectory(), trajectory("hello")):
                scoring.begin(each)
            await server.is_busy.wait()
            finishing = asyncio.ensure_future(scoring.finish([trajectory()], label="step 1"))
            await server.has_cancelled.wait()
            server.released.set()
            lessons = await finishing
        assert [lesson is None for lesson in lessons.of_trajectories] == [False]
        assert len(server.scored) == 1

    asyncio.run(roll_out())
