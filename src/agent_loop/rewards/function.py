"""Reward functions: loading, calling, and validation of what they return. verl's parameters are accepted."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from agent_loop.errors import ConfigError, RewardError
from agent_loop.loading import load_object
from agent_loop.rewards.judged import is_judged_file, load_ranking, load_rubric
from agent_loop.runtime.describe import describe_error, describe_value
from agent_loop.runtime.incidents import IncidentCollector
from agent_loop.runtime.isolated_task import DeadlineExpired
from agent_loop.runtime.numeric import REWARD_LIMIT, as_reward
from agent_loop.runtime.user_code import call_function, run_bounded
from agent_loop.runtime.user_values import plain_mapping
from agent_loop.trajectory import AgentLoopOutput, Incident
from agent_loop.trajectory.copying import copied
from agent_loop.types import Message, Row

SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


def _from_verl(function: Callable[..., Any], signature: inspect.Signature, *, is_batch: bool) -> Any:
    """Return a reward function of this package that calls one with verl's parameters."""
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    names = BATCH if is_batch else SINGLE
    accepted = [n for n, name in enumerate(names) if takes_any or name in signature.parameters]

    async def call(columns: Sequence[Any]) -> Any:
        return await call_function(function, **{names[n]: columns[n] for n in accepted})

    async def score(output: AgentLoopOutput, row: Row) -> Any:
        return await call(_arguments(output, row))

    async def score_all(outputs: list[AgentLoopOutput], rows: list[Row]) -> Any:
        return await call([list(column) for column in zip(*map(_arguments, outputs, rows), strict=True)])

    return score_all if is_batch else score


def _arguments(output: AgentLoopOutput, row: Row) -> tuple[Any, str, Any, dict[str, Any]]:
    """Return verl's arguments for one trajectory: data source, text, ground truth and further values."""
    model = cast(Mapping[str, Any], row.get("reward_model") or {})
    extra = {**cast(Mapping[str, Any], row.get("extra_info") or {}), "num_turns": output.num_turns}
    extra["rollout_reward_scores"] = {
        "tool_rewards": list(output.tool_rewards),
        "turn_scores": list(output.turn_scores),
    }
    return row.get("data_source"), response_text(output, row), model.get("ground_truth"), extra


def response_text(output: AgentLoopOutput, row: Row) -> str:
    """Return the text after the prompt, as verl passes it: completions, calls in `<tool_call>` tags, and replies."""
    prompt = row.get("raw_prompt")
    start = len(cast(list[Any], prompt)) if isinstance(prompt, list | tuple) else 0
    response = output.messages[start:]
    if not any(message.get("role") == "assistant" for message in response):
        response = [message for message in output.messages if message.get("role") == "assistant"]
    return "\n".join(filter(None, map(_text, response)))


def _text(message: Message) -> str:
    parts = [str(message[key]) for key in ("reasoning_content", "content") if message.get(key)]
    for call in cast(Sequence[Mapping[str, Any]], message.get("tool_calls") or ()):
        function = cast(Mapping[str, Any], call.get("function") or {})
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            text = f'{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments}}}'
        else:
            text = json.dumps({"name": function.get("name"), "arguments": arguments}, default=str)
        parts.append(f"<tool_call>\n{text}\n</tool_call>")
    return "\n".join(parts)


ResultT = TypeVar("ResultT")

FUNCTION_KEY = "reward.function"
REWARD_NAMES = ("reward", "score")
"""Keys of a returned mapping that may hold the reward. The first one present is used."""


@dataclass(frozen=True, slots=True)
class Score:
    """Reward of a trajectory."""

    reward: float
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Other values that the function returned. They become columns of the batch."""


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Result of a batch reward function for one trajectory: a score, or an error."""

    score: Score | None = None
    error: RewardError | None = None
    incidents: Sequence[Incident] = ()
    """Incidents about values of its mapping that cannot be stored."""


class _UserFunction:
    """A user's function with a time limit.

    Args:
        function: Called by position. An async function runs on the event loop, any other function in a thread.
        timeout_s: Time limit for one call. None is for functions that limit themselves.
        name: Name of the function in errors.
    """

    def __init__(
        self, function: Callable[..., Any], *, timeout_s: float | None, name: str | None = None
    ) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.name = name or str(getattr(function, "__qualname__", type(function).__qualname__))

    @property
    def _source(self) -> str:
        return f"reward function {self.name}"

    async def _run(self, score: Callable[[], Awaitable[ResultT]]) -> ResultT:
        try:
            return await run_bounded(score, timeout_s=self.timeout_s, name=self._source)
        except DeadlineExpired as error:
            raise RewardError(f"{self._source} {error}; fix it, or raise reward.timeout_s") from error
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"{self._source} raised {describe_error(error)}; fix it") from error


class RewardFunction(_UserFunction):
    """A user's `(output, row) -> float | dict`, with a time limit.

    A returned mapping holds `reward` (or `score`); its other values are extra. Booleans count as 0 and 1.
    """

    async def __call__(self, output: AgentLoopOutput, row: Row) -> Score:
        """Score one trajectory. The function gets copies of the messages, the fields and the row."""

        async def score() -> Score:
            returned = await call_function(self.function, output.copied(), copied(dict(row)))
            return read_score(returned, source=self._source)

        return await self._run(score)


class BatchRewardFunction(_UserFunction):
    """A user's `(outputs, rows) -> list of float | dict`, with a time limit, called once for a group of trajectories.

    The elements of the list are as in `RewardFunction`, and the function runs in the same place.
    """

    async def __call__(self, outputs: Sequence[AgentLoopOutput], rows: Sequence[Row]) -> list[ScoreResult]:
        """Score a group, in the order of its outputs. The function gets copies of the messages, the fields and rows."""
        source = self._source

        async def score() -> list[ScoreResult]:
            returned = await call_function(
                self.function, [output.copied() for output in outputs], [copied(dict(row)) for row in rows]
            )
            values = _listed(returned, count=len(outputs), source=source)
            return [_result(value, source=f"{source}, at index {n},") for n, value in enumerate(values)]

        return await self._run(score)


def load_reward(reference: str, *, timeout_s: float) -> RewardFunction:
    """Load a reward function that is called for each trajectory."""
    if is_judged_file(reference):
        return RewardFunction(load_rubric(reference), timeout_s=None, name=reference)
    return RewardFunction(_load(reference, is_batch=False), timeout_s=timeout_s, name=reference)


def load_batch_reward(reference: str, *, timeout_s: float) -> BatchRewardFunction:
    """Load a reward function that is called once for each group."""
    if is_judged_file(reference):
        return BatchRewardFunction(load_ranking(reference), timeout_s=None, name=reference)
    return BatchRewardFunction(_load(reference, is_batch=True), timeout_s=timeout_s, name=reference)


def read_score(returned: Any, *, source: str) -> Score:
    """Validate what a reward function returned for one trajectory: a number, or a mapping with `reward`."""
    what, value, values = f"{source} returned", returned, dict[str, Any]()
    if isinstance(returned, Mapping):
        values = dict(cast(Mapping[str, Any], returned))
        key = next((name for name in REWARD_NAMES if name in values), None)
        if key is None:
            raise RewardError(f"{what} a mapping with the keys {sorted(map(str, values))}; add 'reward'")
        what, value = f"{what} {key}", values.pop(key)
    number = as_reward(value)
    if number is None:
        raise RewardError(
            f"{what} {describe_value(value)}; return a finite number, or a mapping with 'reward' {REWARD_LIMIT}"
        )
    return Score(number, plain_mapping(values, where=f"reward_extra of {source}"))


def _listed(returned: Any, *, count: int, source: str) -> list[Any]:
    """Return what a batch reward function returned as a list."""
    is_list = isinstance(returned, Collection) and not isinstance(returned, str | bytes | Mapping | Set)
    values = list(cast("Collection[Any]", returned)) if is_list else None
    if values is None or len(values) != count:
        found = describe_value(returned) if values is None else f"{len(values)} values"
        raise RewardError(
            f"{source} returned {found} for {count} outputs; return a list with one reward for each, in their order"
        )
    return values


def _result(value: Any, *, source: str) -> ScoreResult:
    with IncidentCollector(source) as notes:
        try:
            score = read_score(value, source=source)
        except RewardError as error:
            return ScoreResult(error=error)
    return ScoreResult(score, incidents=tuple(notes.incidents))


def _load(reference: str, *, is_batch: bool) -> Callable[..., Any]:
    forms = {
        True: (("outputs", "rows"), BATCH, "list of float | dict", "set reward.batch=true"),
        False: (("output", "row"), SINGLE, "float | dict", "leave reward.batch=true out"),
    }
    own, names, returns, _ = forms[is_batch]
    other, other_names, _, remedy = forms[not is_batch]
    form = f"({', '.join(own)})"
    function = load_object(reference, key=FUNCTION_KEY)
    if not callable(function) or isinstance(function, type):
        kind = "a class" if isinstance(function, type) else f"an object of type {type(function).__name__}"
        raise ConfigError(f"{FUNCTION_KEY} is {reference!r}, {kind}; name a function {form} -> {returns}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return function
    called = f"{FUNCTION_KEY} is {reference!r}, which takes {signature}; it is called as {form}: "
    parameters = {*[*signature.parameters][:2]}
    if other_names[1] in signature.parameters or (parameters & {*other} and not parameters & {*own}):
        raise ConfigError(
            f"{called}{remedy} (`--batch` of `agent-loop rescore`), or name its parameters {form}"
        )
    if names[1] in signature.parameters:
        return _from_verl(function, signature, is_batch=is_batch)
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{called}{error}") from None
    return function
