"""Rewards by judges: a rubric of weighted criteria, or a ranking of the trajectories of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, Field, model_validator

from agent_loop.config import Section, parse_section
from agent_loop.config.task import PartName
from agent_loop.errors import ConfigError, RewardError, RewardUnavailable
from agent_loop.files.plain_values import read_yaml
from agent_loop.rewards.judge import (
    Judge,
    JudgeCache,
    JudgeSettings,
    Question,
    Scale,
    Verdict,
    YesNo,
    criterion_question,
    ranking_question,
)
from agent_loop.runtime.concurrency import run_together
from agent_loop.runtime.describe import describe_error
from agent_loop.trajectory import AgentLoopOutput
from agent_loop.types import Message, Row

SUFFIXES = (".yaml", ".yml")


def _check_scale(scale: Scale) -> Scale:
    if scale[0] >= scale[1]:
        raise ValueError("give the worst score and then a higher one, as in [1, 5]")
    return scale


class Criterion(Section):
    """One criterion of a rubric."""

    question: str = Field(min_length=1)
    """Question to the judge. `{field}` inserts a field of the row; write `{{` and `}}` for literal braces."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    answer: YesNo | Annotated[Scale, AfterValidator(_check_scale)] = "yes_no"
    """`yes_no`, or the worst and the best score as whole numbers, as in `[1, 5]`."""


class JudgedFile(Section):
    """Content of a file that `reward.function` names. It has either `criteria` or a `ranking`."""

    judges: list[JudgeSettings] = Field(min_length=1)
    criteria: dict[PartName, Criterion] = Field(default={})
    """Criteria by name. The reward is their weighted mean."""
    ranking: str | None = None
    """Instruction that tells the judge which trajectory of a group is better. `{field}` inserts a field of the row."""
    vote: Literal["mean", "median"] = "mean"
    """How the answers of several judges become one. The median of yes and no is the majority."""
    shows: Literal["conversation", "answer"] = "conversation"
    """Messages in the request: `conversation` sends all of them, `answer` the task and the last answer."""
    explain: bool = False
    """Ask for a reason before each answer, and record it."""
    cache: str | None = None
    """File that keeps the judges' replies for later runs. None keeps them in memory."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if bool(self.criteria) == (self.ranking is not None):
            raise ConfigError("give either criteria or a ranking")
        if any(judge in self.judges[:index] for index, judge in enumerate(self.judges)):
            raise ConfigError(
                "judges holds the same judge twice, whose replies would be the same; remove one"
            )
        return self


class _Jury:
    """All judges of a file."""

    def __init__(self, settings: JudgedFile) -> None:
        cache = JudgeCache(None if settings.cache is None else Path(settings.cache))
        self._judges = [Judge(each, cache=cache) for each in settings.judges]
        self._vote = fmean if settings.vote == "mean" else median

    async def ask(self, questions: dict[str, Question]) -> list[Verdict]:
        """Return the verdicts in the order of the questions. All judges end before an error is raised."""

        async def ask(name: str, judge: Judge) -> Verdict | RewardUnavailable:
            try:
                return await judge.ask(questions[name])
            except RewardUnavailable as error:
                named = RewardUnavailable(f"{name}: {error}")
                named.__cause__ = error
                return named

        found = await run_together(ask(name, judge) for name in questions for judge in self._judges)
        verdicts: list[Verdict] = []
        for verdict in found:
            if isinstance(verdict, RewardUnavailable):
                raise verdict
            verdicts.append(verdict)
        count = len(self._judges)
        return [self._combine(verdicts[start : start + count]) for start in range(0, len(verdicts), count)]

    def _combine(self, verdicts: Sequence[Verdict]) -> Verdict:
        values = zip(*(verdict.values for verdict in verdicts), strict=True)
        reasons = " | ".join(verdict.reason for verdict in verdicts)
        return Verdict(tuple(float(self._vote(each)) for each in values), reasons)


def is_judged_file(reference: str) -> bool:
    """Return whether a reference to a reward function names a file with questions to judges."""
    return reference.endswith(SUFFIXES)


def load_rubric(reference: str) -> Callable[..., Any]:
    """Return the reward function of a file with criteria, which asks judges about each criterion of a trajectory.

    It returns the weighted mean of the criteria as `reward`, and the value of each criterion, from 0 to 1.
    """
    settings = _load(reference)
    if settings.ranking is not None:
        raise ConfigError(
            f"{reference} has a ranking, which compares the trajectories of a row; set batch to true for it"
        )
    jury, criteria = _Jury(settings), settings.criteria

    async def score(output: AgentLoopOutput, row: Row) -> dict[str, Any]:
        messages = _seen(output, shows=settings.shows)
        verdicts = await jury.ask(
            {
                f"criterion {name!r}": criterion_question(
                    _filled(criterion.question, row, where=f"criterion {name!r}"),
                    messages=messages,
                    answer=criterion.answer,
                    explains=settings.explain,
                )
                for name, criterion in criteria.items()
            }
        )
        values = {name: each.values[0] for name, each in zip(criteria, verdicts, strict=True)}
        reasons = {f"{name}.reason": each.reason for name, each in zip(criteria, verdicts, strict=True)}
        weights = [criterion.weight for criterion in criteria.values()]
        return {
            "reward": fmean(values.values(), weights),
            **values,
            **(reasons if settings.explain else {}),
        }

    return score


def load_ranking(reference: str) -> Callable[..., Any]:
    """Return the batch reward function of a file with a ranking, which asks judges to compare a group.

    It returns for each trajectory its score from 0 to 1 as `reward`, and its `rank`, of which 1 is the best.
    """
    settings = _load(reference)
    text = settings.ranking
    if text is None:
        raise ConfigError(f"{reference} has criteria, which are asked about each trajectory; leave batch out")
    jury = _Jury(settings)

    async def score(outputs: list[AgentLoopOutput], rows: list[Row]) -> list[dict[str, Any]]:
        question = ranking_question(
            _filled(text, rows[0], where="ranking"),
            attempts=[_seen(output, shows=settings.shows) for output in outputs],
            explains=settings.explain,
        )
        [verdict] = await jury.ask({"ranking": question})
        reason = {"reason": verdict.reason} if settings.explain else {}
        return [
            {"reward": value, "rank": 1 + sum(other > value for other in verdict.values), **reason}
            for value in verdict.values
        ]

    return score


def _load(reference: str) -> JudgedFile:
    values: Any = read_yaml(reference, what="reward file", resolve=True)
    if not isinstance(values, dict):
        raise ConfigError(
            f"reward file {reference!r} holds a list; it must hold the keys of a rubric or a ranking"
        )
    return parse_section(JudgedFile, cast("dict[str, Any]", values), where=reference)


def _seen(output: AgentLoopOutput, *, shows: Literal["conversation", "answer"]) -> list[Message]:
    """Return the messages that a judge sees."""
    messages = list(output.messages)
    if not messages:
        raise RewardError("the trajectory has no messages that a judge could read; record them in the loop")
    if shows == "conversation":
        return messages
    first = next(
        (n for n, message in enumerate(messages) if message.get("role") == "assistant"), len(messages)
    )
    return [*messages[:first], {"role": "assistant", "content": output.answer}]


def _filled(text: str, row: Row, *, where: str) -> str:
    try:
        return text.format(**row)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise RewardError(
            f"{where} cannot be filled with the columns {sorted(map(str, row))} of the row: {describe_error(error)}"
        ) from error
