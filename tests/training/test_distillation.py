"""Teachers score the tokens that the policy sampled, and the policy approaches them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import Config, DistillationConfig
from agent_loop.errors import ConfigError, RolloutError
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.servers.scores import TokenScores
from agent_loop.servers.scripted import ScriptedServer
from agent_loop.training import metrics as names
from agent_loop.training.distillation.scoring import Lesson, Lessons, open_scoring
from agent_loop.training.distillation.targets import Direction, TeacherTargets, divergence
from agent_loop.training.distillation.teachers import Teacher, Teachers
from agent_loop.training.forward import response_logprobs
from agent_loop.training.micro_batches import micro_batches
from agent_loop.training.run import TrainResult
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import FloatArray, IntArray, Origin, StopReason, as_token_ids
from tests.helpers import small_tokenizer
from tests.training.fakes import (
    PAD,
    VOCABULARY,
    FakeRollouts,
    sample_trajectories,
    tiny_policy,
    tiny_tokenizer,
)
from tests.training.runs import assert_same_policy, changed, lines_of, train

TEACHER, OTHER_TEACHER = 5, 6
"""Seeds of the weights. Those of the policy are 0."""

# -- divergences -------------------------------------------------------------------------------------------------------

DIRECTIONS: tuple[Direction, ...] = ("forward_kl", "reverse_kl")
Array = NDArray[np.float64]
STEP = 1e-5


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def reference(policy_V: Array, teacher_V: Array, *, top: NDArray[np.int64], direction: Direction) -> float:
    """Return the divergence over the teacher's likeliest tokens `top` and the rest, from two distributions."""
    p, q = ([*each[top], np.delete(each, top).sum()] for each in (teacher_V, policy_V))
    if direction == "reverse_kl":
        p, q = q, p
    return float(sum(x * (np.log(x) - np.log(y)) for x, y in zip(p, q, strict=True) if x > 0))


@pytest.mark.parametrize("direction", DIRECTIONS)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 8), spread=st.sampled_from([0.3, 1.0, 3.0]))
def test_divergences_are_those_of_numpy(direction: Direction, seed: int, k: int, spread: float) -> None:
    random = np.random.default_rng(seed)
    logits, teacher_V = random.normal(size=8) * spread, softmax(random.normal(size=8))
    logits_V = torch.tensor(logits, requires_grad=True)
    top = np.argsort(-teacher_V, kind="stable")[:k]

    def expected(logits: Array) -> float:
        return reference(softmax(logits), teacher_V, top=top, direction=direction)

    [[found]] = divergence(
        logits_V.log_softmax(-1)[None, None, torch.from_numpy(top)],
        teacher_logprobs_BRK=torch.from_numpy(np.log(teacher_V[top]))[None, None],
        is_taught_BR=torch.tensor([[True]]),
        direction=direction,
    )
    found.backward()
    assert float(found.detach()) == pytest.approx(expected(logits), abs=1e-6)
    steps = STEP * np.eye(8)
    slopes = [(expected(logits + step) - expected(logits - step)) / (2 * STEP) for step in steps]
    assert logits_V.grad is not None
    np.testing.assert_allclose(logits_V.grad.numpy(), slopes, atol=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("value", [float("-inf"), float("nan"), 3.0])
def test_values_at_tokens_that_are_not_taught_change_nothing(direction: Direction, value: float) -> None:
    logprobs_BRK = torch.tensor([[[-1.0, -2.0], [value, value]]], requires_grad=True)
    found_BR = divergence(
        logprobs_BRK,
        teacher_logprobs_BRK=torch.tensor([[[-0.5, -1.5], [value, value]]]),
        is_taught_BR=torch.tensor([[True, False]]),
        direction=direction,
    )
    found_BR.sum().backward()
    assert found_BR[0, 0] > 0
    assert found_BR[0, 1] == 0
    assert logprobs_BRK.grad is not None
    assert logprobs_BRK.grad[0, 1].tolist() == [0.0, 0.0]
    assert logprobs_BRK.grad[0, 0].isfinite().all()


def response_distributions(model: Any, trajectory: Trajectory) -> Tensor:
    """Return the log-probs [R, V] of all tokens at each place of the response."""
    output = trajectory.output
    ids = torch.tensor([*output.prompt_ids, *output.response_ids])
    return model(ids[None]).logits[0, len(output.prompt_ids) - 1 : -1].log_softmax(-1)


@torch.no_grad()
def taught_batch(trajectories: list[Trajectory], *, k: int) -> tuple[RolloutBatch, list[Tensor]]:
    """Return a batch with the scores of a tiny teacher, and the teacher's log-probs of the whole vocabulary."""
    teacher: Any = tiny_policy(TEACHER)
    whole = [response_distributions(teacher, trajectory) for trajectory in trajectories]
    lessons: list[Lesson | None] = []
    for trajectory, logprobs_RV in zip(trajectories, whole, strict=True):
        top = logprobs_RV.topk(k, dim=-1)
        sampled_R = logprobs_RV.gather(-1, torch.tensor(trajectory.output.response_ids).long()[:, None])[:, 0]
        scores = TokenScores(sampled_R.numpy(), top.indices.int().numpy(), top.values.numpy())
        lessons.append(Lesson(0, scores))
    batch = assemble(trajectories, pad_token_id=PAD)
    Lessons(lessons).add_columns(batch)
    return batch, whole


def targets_of(batch: RolloutBatch, objective: str) -> TeacherTargets:
    config = DistillationConfig.model_validate({"teachers": {"big": {}}, "objective": objective})
    targets = TeacherTargets.of(batch, config=config)
    assert targets is not None
    return targets


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_with_all_tokens_as_candidates_whole_distributions_are_compared(direction: Direction) -> None:
    model: Any = tiny_policy()
    trajectories = sample_trajectories(tiny_policy(), num_groups=2, n=3)
    batch, teacher_of_rows = taught_batch(trajectories, k=VOCABULARY)
    targets = targets_of(batch, direction)
    weight = model.model.norm.weight
    for part in micro_batches(
        batch, rows=torch.arange(len(batch)), max_tokens=40, device=torch.device("cpu")
    ):
        found = response_logprobs(model, part, temperature=1.0, candidate_ids_BRK=targets.candidate_ids(part))
        losses_BR = targets.losses(found, part)
        [gradient] = torch.autograd.grad(losses_BR.sum(), weight)
        total = torch.tensor(0.0)
        for index, row in enumerate(part.rows_B.tolist()):
            sides = (response_distributions(model, trajectories[row]), teacher_of_rows[row])
            log_q, log_p = sides if direction == "forward_kl" else sides[::-1]
            kl_RV = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none")
            expected_R = kl_RV.sum(-1) * torch.tensor(trajectories[row].output.response_mask)
            torch.testing.assert_close(losses_BR[index, : len(expected_R)], expected_R, atol=1e-5, rtol=0)
            total = total + expected_R.sum()
        torch.testing.assert_close(gradient, torch.autograd.grad(total, weight)[0], atol=1e-5, rtol=1e-4)


def test_the_advantage_of_a_token_is_the_difference_of_log_probs_and_zero_where_nothing_is_taught() -> None:
    batch, _ = taught_batch(sample_trajectories(tiny_policy(), num_groups=1, n=2), k=1)
    batch["distillation.teacher"][1] = -1
    found_BR = targets_of(batch, "reward").advantages(batch["rollout_log_probs"])
    mask_BR = batch["response_mask"] * torch.tensor([[1], [0]])
    expected_BR = (batch["distillation.log_probs"] - batch["rollout_log_probs"]) * mask_BR
    torch.testing.assert_close(found_BR, expected_BR)
    assert found_BR[0].count_nonzero() == mask_BR[0].sum()


# -- scoring -----------------------------------------------------------------------------------------------------------

TEMPLATE = ChatTemplate(small_tokenizer())
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the quick brown fox"}]


def scorer(token_ids: IntArray) -> FloatArray:
    """Return a log-prob for each token but the first, or NaN if the response begins with `model`."""
    found = -(np.arange(1, len(token_ids)) + token_ids[1:] / 1000).astype(np.float32)
    return found * np.nan if TEMPLATE.encoder.encode("model")[0] in token_ids[-8:] else found


class Bench:
    """A teacher on a scripted server, and the lines that are reported."""

    def __init__(self, server: ScriptedServer | None = None, **teacher: Any) -> None:
        self.server = server or ScriptedServer((), scorer=scorer)
        self.lines: list[str] = []
        settings = {"teachers": {"big": teacher}, "objective": "sampled_kl"}
        config = DistillationConfig.model_validate(settings)
        big = config.teachers["big"]
        length = big.context_length or 1000
        self.teachers = Teachers(
            config, {"big": Teacher("big", big, self.server, TEMPLATE, length, num_candidates=0)}
        )

    def lessons(self, *trajectories: Trajectory) -> Lessons:
        async def ask() -> Lessons:
            async with open_scoring(self.teachers, report=self.lines.append) as scoring:
                return await scoring.finish(trajectories, label="step 3")

        return asyncio.run(ask())


def trajectory(
    answer: str = "says hello",
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
    output = AgentLoopOutput(segments=segments, messages=messages, stop_reason=stop_reason)
    return Trajectory(output, dict(row or {}), 0, rollout, 0.0, {})


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
    bench, one = Bench(**teacher), trajectory(row=row)
    [lesson] = bench.lessons(one).of_trajectories
    system, user = QUESTION
    prompt = TEMPLATE.open([system, {**user, "content": f"{hint}\n\n{user['content']}"}])
    [text] = bench.server.scored
    np.testing.assert_array_equal(text, [*prompt, *one.output.response_ids])
    assert lesson is not None
    assert len(lesson.scores.logprobs) == len(one.output.response_ids)


def test_equal_texts_are_scored_once_and_failed_trajectories_never() -> None:
    bench = Bench()
    failed = trajectory("fails", stop_reason=StopReason.FAILED)
    lessons = bench.lessons(trajectory(rollout=0), trajectory(rollout=1), trajectory("hello"), failed)
    assert len(bench.server.scored) == 2
    assert [lesson is None for lesson in lessons.of_trajectories] == [False, False, False, True]
    assert not bench.lines


IMAGE = Attachment("image", 0, 1, int(TEMPLATE.open(QUESTION)[0]), {}, b"")


@pytest.mark.parametrize(
    ("teacher", "other", "kind", "detail"),
    [
        ({"context_length": 60}, trajectory("hello " * 30), "too_long", "over context_length=60"),
        ({"hint_key": "solution"}, trajectory(), "hint", "no column 'solution' for its hint"),
        ({}, trajectory(attachments=(IMAGE,)), "attachments", "has images or videos"),
        ({}, trajectory("model"), "server", "is not a log-prob"),
    ],
)
def test_a_trajectory_that_cannot_be_scored_is_left_out_counted_and_named(
    teacher: dict[str, Any], other: Trajectory, kind: str, detail: str
) -> None:
    bench = Bench(**teacher)
    lessons = bench.lessons(trajectory(row={"solution": "x"}), other)
    assert [lesson is None for lesson in lessons.of_trajectories] == [False, True]
    assert lessons.metrics()[names.NOT_TAUGHT + kind] == 1
    [line] = bench.lines
    assert line.startswith(
        f"step 3: not scored by their teachers: 1 by big ({kind}), first group=0/rollout=0 by big"
    )
    assert detail in line


class WaitingServer(ScriptedServer):
    """Server whose scores wait until the test releases them. `is_busy` is set when two of them run."""

    def __init__(self) -> None:
        super().__init__((), scorer=scorer)
        self.released, self.is_busy, self.has_cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.num_scoring = 0

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        self.num_scoring += 1
        if self.num_scoring == 2:
            self.is_busy.set()
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.has_cancelled.set()
            raise
        return await super().score(token_ids, start=start, top_logprobs=top_logprobs)


async def test_scores_are_asked_for_as_trajectories_end_and_those_of_dropped_ones_are_cancelled() -> None:
    server = WaitingServer()
    async with open_scoring(Bench(server).teachers, report=print) as scoring:
        for each in (trajectory(), trajectory("hello")):
            scoring.begin(each)
        await server.is_busy.wait()
        finishing = asyncio.ensure_future(scoring.finish([trajectory()], label="step 1"))
        await server.has_cancelled.wait()
        server.released.set()
        lessons = await finishing
    assert [lesson is None for lesson in lessons.of_trajectories] == [False]
    assert len(server.scored) == 1


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def taught(config: Config, tmp_path: Path) -> Config:
    """Return a run with a teacher of other weights."""
    save_teacher(tmp_path / "teacher", TEACHER)
    config = changed(config, "actor", lr=1e-2, warmup_steps=0)
    config = changed(config, "rollout", prompt_length=16, response_length=16)
    config = changed(config, "trainer", total_steps=1, save_every=None, max_dead_steps=2)
    return with_distillation(config, teachers={"big": {"path": str(tmp_path / "teacher")}}, top_k=VOCABULARY)


def with_distillation(config: Config, **distillation: Any) -> Config:
    given = config.distillation.model_dump() | distillation
    return Config.model_validate(config.model_dump() | {"distillation": given})


def save_teacher(folder: Path, seed: int) -> None:
    tiny_policy(seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def train_without_reward(config: Config, *, sources: Sequence[str] = ("all",), **options: Any) -> TrainResult:
    """Train with rewards of 0. The rows have these data sources in turn."""

    def edit(trajectory: Trajectory, step: int) -> Trajectory:
        source = sources[trajectory.group % len(sources)]
        return structs.replace(trajectory, reward=0.0, row={**trajectory.row, "data_source": source})

    return train(config, FakeRollouts(edit=edit), **options)


def test_a_policy_whose_rewards_are_all_zero_approaches_its_teacher(taught: Config) -> None:
    output = io.StringIO()
    lines = lines_of(train_without_reward(changed(taught, "trainer", total_steps=6), output=output))
    divergences = [line[names.TEACHER_KL + "big"] for line in lines]
    assert divergences[-1] < 0.5 * divergences[0]
    assert {line[names.TAUGHT_SHARE] for line in lines} == {1.0}
    assert {line[names.DEAD_STEPS] for line in lines} == {0.0}
    assert {line[names.ROWS_TRAINED] for line in lines} == {16.0}
    assert all(line[names.TEACHER_WAIT] >= 0 for line in lines)
    assert "nothing to learn from" not in output.getvalue()


@pytest.mark.parametrize("objective", ["reverse_kl", "sampled_kl", "reward"])
def test_one_step_with_any_objective_trains_rows_without_a_signal(taught: Config, objective: str) -> None:
    [line] = lines_of(train_without_reward(with_distillation(taught, objective=objective)))
    assert line[names.SIGNAL_SHARE] == 0
    assert line[names.ROWS_TRAINED] == 16
    assert line[names.GRAD_NORM] > 0
    assert line[names.TEACHER_KL + "big"] > 0
    assert (names.DISTILLATION_LOSS in line) == (objective != "reward")
    assert (line[names.ADVANTAGE_STD] > 0) == (objective == "reward")


def test_rewards_count_besides_the_teacher(taught: Config) -> None:
    both, reward_alone, teacher_alone = (
        lines_of(train(with_distillation(taught, **values), overwrite=True))[0]
        for values in ({}, {"coef": 0.0}, {"reward_coef": 0.0})
    )
    assert both[names.ADVANTAGE_STD] == reward_alone[names.ADVANTAGE_STD] > 0
    assert teacher_alone[names.ADVANTAGE_STD] == 0
    assert len({line[names.LOSS] for line in (both, reward_alone, teacher_alone)}) == 3


def test_each_source_has_its_teacher_and_other_rows_are_not_taught(taught: Config, tmp_path: Path) -> None:
    save_teacher(tmp_path / "other", OTHER_TEACHER)
    teachers = {
        "big": {"path": str(tmp_path / "teacher"), "sources": ["math"]},
        "other": {"path": str(tmp_path / "other"), "sources": ["code"]},
    }
    sources = ["math", "code", "poetry", "math"]
    [line] = lines_of(train_without_reward(with_distillation(taught, teachers=teachers), sources=sources))
    assert line[names.TEACHER_KL + "big"] != line[names.TEACHER_KL + "other"]
    assert line[names.TAUGHT_SHARE] == pytest.approx(3 / 4)
    assert line[names.ROWS_TRAINED] == 12


def test_a_resumed_run_asks_its_teachers_and_ends_with_equal_weights(taught: Config, tmp_path: Path) -> None:
    taught = changed(taught, "trainer", total_steps=4, save_every=2)
    parts = changed(taught, "trainer", run_dir=str(tmp_path / "parts"))
    train_without_reward(changed(parts, "trainer", total_steps=2))
    assert_same_policy(train_without_reward(taught), train_without_reward(parts, resume=True))


def test_a_run_ends_with_the_reason_if_no_trajectory_can_be_scored(taught: Config, tmp_path: Path) -> None:
    teachers = {"big": {"path": str(tmp_path / "teacher"), "context_length": 4}}
    with pytest.raises(RolloutError, match=r"scored none of 16 trajectories \(16 by big \(too_long\)\)"):
        train_without_reward(with_distillation(taught, teachers=teachers))


def test_a_teacher_with_other_tokens_is_refused_before_anything_runs(taught: Config, tmp_path: Path) -> None:
    words = WordLevel({"0": 0, "1": 2, "2": 1}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="0")
    tokenizer.save_pretrained(tmp_path / "teacher")
    rollouts = FakeRollouts()
    message = r"teachers\.big is .*differs from the policy's in \d+ tokens \('1', "
    with pytest.raises(ConfigError, match=message):
        train(taught, rollouts)
    assert not rollouts.rows


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"server_url": "http://host:1", "engine": "vllm"}, r"set .*teachers\.big\.tokenizer_path"),
        ({"path": "no/such/model"}, r"no tokenizer .*set distillation\.teachers\.big\.tokenizer_path"),
        ({"engine": "unheard_of"}, r"the server of distillation\.teachers\.big cannot be created: "),
    ],
)
def test_an_impossible_teacher_is_refused(taught: Config, teacher: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(with_distillation(taught, teachers={"big": teacher}))
