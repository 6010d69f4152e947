"""Tasks of tau2-bench: customer service with tools, a data base and a user, as the package `inspect-evals` has them."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import RLock
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, Protocol

from agent_loop.config import NotNegative, PositiveSeconds, Section, Temperature, Tokens
from agent_loop.environments.base import Environment, EnvironmentTool, Reply, RewardValue
from agent_loop.environments.suite import SolutionTurn, TaskSuite
from agent_loop.errors import (
    ConfigError,
    DataError,
    ToolError,
)
from agent_loop.interactions.simulated_user import SimulatedUser, num_replies, text_of
from agent_loop.loading import import_extra
from agent_loop.runtime.describe import describe_error
from agent_loop.runtime.instances import OnReplay
from agent_loop.runtime.threads import run_in_thread
from agent_loop.tools.base import ArgumentChecking
from agent_loop.types import Message, ToolCall

INSTRUCTIONS = """\
<instructions>
You work in customer service. Help the customer as far as the <policy> below allows.
In each turn, either write to the customer or call tools.
</instructions>
"""
STOP_PHRASES = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""Texts with which the simulated user ends a conversation, as the benchmark's rules define them."""
MAX_SCRIPTED_REPLIES = 10
CONSENT = "Yes, please go ahead. I have told you everything that I know."
_ID = "user"
REWARD_PARTS: Mapping[str, str] = {
    "reward": "1 if the data base is right and the user was told what they should be, else 0",
    "db": "whether the data base is as the gold actions leave it",
    "communicate": "whether the agent told the user all that it should",
}
EXTRA = "tau2"
DOMAINS = ("retail", "airline")
_TOOLS_CLASSES = {"retail": "RetailAgentTools", "airline": "AirlineAgentTools"}
_DATA_BASES = {"retail": "RetailDB", "airline": "FlightDB"}
_lock = RLock()


class Tau2Options(Section):
    """Options of the domains."""

    user: Literal["scripted", "model"] = "scripted"
    """Who plays the user: `model` is a language model behind `user_url`. `scripted` needs none, and is for checks."""
    user_url: str | None = None
    """URL of an endpoint with OpenAI's chat completions, such as `http://127.0.0.1:8000/v1`."""
    user_model: str | None = None
    """Name of the user's model at the endpoint."""
    user_key_env: str | None = None
    """Environment variable that holds the API key. None if the endpoint needs no key."""
    user_temperature: Temperature = 0.0
    """Sampling temperature of the user's model."""
    user_max_tokens: Tokens = 512
    """Maximum number of tokens in one reply of the user."""
    user_timeout_s: PositiveSeconds = 60.0
    """Time limit for one attempt at a reply of the user."""
    user_max_retries: NotNegative = 3
    """Number of retries of a request to the user's model."""


class Tau2Suite(TaskSuite):
    """Domains of tau2-bench. The reward is that of the benchmark's own scorers."""

    name = "tau2"
    extra = EXTRA
    summary = "customer service of tau2-bench: a policy, tools on a data base, and a user"
    options: ClassVar[type[Section]] = Tau2Options
    reward_parts: ClassVar[Mapping[str, str]] = REWARD_PARTS

    def tasks(self) -> Sequence[str]:
        _module("inspect_evals")
        return DOMAINS

    def rows(self, task: str, options: Any) -> Iterator[dict[str, Any]]:
        domain, user = load_domain(task), _served_user(options)
        system = {"role": "system", "content": INSTRUCTIONS + domain.policy}
        for task_id in domain.samples:
            yield {"raw_prompt": [system], "task": {"domain": task, "id": task_id, "user": user}}

    def environment(self) -> Environment:
        return Tau2Environment()

    def solution(self, row: Mapping[str, Any]) -> Sequence[SolutionTurn]:
        """Return the gold actions in one turn, and a turn that tells the user what they should be told."""
        criteria: Any = load_domain(row["task"]["domain"]).task(row["task"]["id"]).evaluation_criteria
        calls = tuple(ToolCall(action.name, action.arguments) for action in criteria.actions or ())
        text = "; ".join(criteria.communicate_info or ()) or "Done."
        return [*([SolutionTurn(calls=calls)] if calls else []), SolutionTurn(text=text)]

    def identity(self, row: Mapping[str, Any]) -> str:
        return f"{row['task']['domain']} {row['task']['id']}"


def _served_user(options: Tau2Options) -> dict[str, Any] | None:
    """Return the settings of the user's model as plain values, or None for a scripted user."""
    if options.user == "scripted":
        if options.user_url is not None or options.user_model is not None:
            raise ConfigError("tau2: user_url or user_model is set for a scripted user; add user=model")
        return None
    if options.user_url is None or options.user_model is None:
        raise ConfigError(
            "tau2: user=model needs user_url and user_model, the server and the name of the user's model"
        )
    served = options.model_dump(exclude={"user"})
    return {name.removeprefix("user_"): value for name, value in served.items()}


class Tau2Environment(Environment):
    """A data base, the tools of an agent that works on it, and a user."""

    _user: User | None = None

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the policy and the user's first message."""
        await run_in_thread(self._load, row["task"])
        assert self._user is not None
        return [
            {"role": "system", "content": row["raw_prompt"][0]["content"]},
            {"role": "user", "content": await self._user.opening()},
        ]

    def tools(self) -> Sequence[EnvironmentTool]:
        # Inspect checks the arguments itself, and its error is the reply that the benchmark's own agents get.
        return [
            EnvironmentTool.of(
                tool.name,
                tool.description,
                tool.parameters.model_dump(exclude_none=True),
                check_arguments=ArgumentChecking.OFF,
            )
            for tool in self._domain.tools
        ]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        call = inspect("tool").ToolCall(id=str(len(self._calls)), function=name, arguments=arguments)
        self._calls.append(call)
        turn = inspect("model").ChatMessageAssistant(content="", tool_calls=[call])
        stores: Any = inspect("util._store")
        stores.init_subtask_store(self._store)
        try:
            with stores.suspend_store_events():  # they compare the whole data base before and after each call
                result = asyncio.run(inspect("model").execute_tools([turn], list(self._domain.tools)))
        except Exception as error:
            # The benchmark makes every error of a tool its reply.
            raise ToolError(describe_error(error)) from error
        [message] = result.messages
        if message.error is not None:
            raise ToolError(message.error.message)
        return message.text

    async def reply(self, messages: Sequence[Message]) -> Reply:
        assert self._user is not None
        solved = await is_solved(self._domain, self._task_id, messages, self._calls)
        return await self._user.reply(messages, is_solved=solved)

    def reward(self, messages: Sequence[Message]) -> RewardValue:
        inspect("util._store").init_subtask_store(self._store)
        return asyncio.run(score(self._domain, self._task_id, messages))

    async def close(self) -> None:
        if self._user is not None:
            await self._user.close()

    def _load(self, task: Mapping[str, Any]) -> None:
        self._domain: Domain = load_domain(task["domain"])
        self._task_id: str = task["id"]
        self._store = self._domain.store()
        self._calls: list[Any] = []
        served = task["user"]
        if served is None:
            self.on_replay = OnReplay.RERUN
            self._user = ScriptedUser(self._domain.task(self._task_id).user_scenario.instructions)
        else:
            self.on_replay = OnReplay.RESTART
            rules = self._domain.sample(self._task_id).input[0].text
            begin = tau2("common.dataset").USER_MESSAGE.text
            self._user = ModelUser(served, rules=rules, begin=begin)


class User(Protocol):
    """User of one trajectory."""

    async def opening(self) -> str:
        """Return the first message."""
        ...

    async def reply(self, messages: Sequence[Message], *, is_solved: bool) -> Reply:
        """Return the reply to the last message, which calls no tool."""
        ...

    async def close(self) -> None: ...


class ScriptedUser:
    """User that tells all it knows, then agrees to everything, until the task is solved.

    It is deterministic and needs no model. Use it for checks; it does not behave like a person.
    """

    def __init__(self, instructions: Any) -> None:
        self._parts = [instructions] if isinstance(instructions, str) else _parts(instructions)

    async def opening(self) -> str:
        return self._parts[0]

    async def reply(self, messages: Sequence[Message], *, is_solved: bool) -> Reply:
        number = num_replies(messages) + 1
        if is_solved or number > MAX_SCRIPTED_REPLIES:
            return Reply(STOP_PHRASES[0], is_over=True)
        return Reply(self._parts[number] if number < len(self._parts) else CONSENT)

    async def close(self) -> None:
        pass


class ModelUser:
    """User that a language model plays, by the benchmark's rules."""

    def __init__(self, served: Mapping[str, Any], *, rules: str, begin: str) -> None:
        settings: Mapping[str, Any] = {
            "name": "user of tau2",
            "model": served["model"],
            "base_url": served["url"],
            "api_key_env": served["key_env"],
            "persona": "{rules}",
            "opens": True,
            "greeting": begin,
            "stop_phrases": list(STOP_PHRASES),
            **{name: served[name] for name in ("temperature", "max_tokens", "timeout_s", "max_retries")},
        }
        self._user = SimulatedUser(settings)
        self._rules = rules

    async def opening(self) -> str:
        return await self._user.start_interaction(_ID, rules=self._rules) or ""

    async def reply(self, messages: Sequence[Message], *, is_solved: bool) -> Reply:
        # As in the benchmark, the user does not see what the agent writes next to its calls.
        seen = [message for message in messages if not message.get("tool_calls")]
        is_over, text, score, extra = await self._user.generate_response(_ID, seen)
        return Reply(text, score, is_over, extra)

    async def close(self) -> None:
        await self._user.finalize_interaction(_ID)


def _parts(instructions: Any) -> list[str]:
    first = (instructions.reason_for_call, instructions.known_info)
    later = (instructions.unknown_info, instructions.task_instructions)
    return ["\n".join(filter(None, first)), "\n".join(filter(None, later)) or CONSENT]


async def score(domain: Domain, task_id: str, messages: Sequence[Message]) -> dict[str, float]:
    """Return the reward and its parts. The current store of Inspect holds the data base."""
    scorers: Any = tau2("common.scorer")
    state, target = _state(domain, task_id, messages), inspect("scorer").Target("")
    db = await scorers.db_match(domain=domain.name)(state, target)
    communicate = await scorers.score_communicated_info()(state, target)
    both = scorers.complete_if_all_complete([db, communicate])
    return {"reward": _value(both), "db": _value(db), "communicate": _value(communicate)}


async def is_solved(domain: Domain, task_id: str, messages: Sequence[Message], calls: Sequence[Any]) -> bool:
    """Return whether all gold actions were called, and the user was told what they should be."""
    scorers: Any = tau2("common.scorer")
    state = _state(domain, task_id, messages)
    communicate = await scorers.score_communicated_info()(state, inspect("scorer").Target(""))
    turn = inspect("model").ChatMessageAssistant(content="", tool_calls=list(calls))
    missing = scorers.find_unused_actions(SimpleNamespace(messages=[turn]), state, domain.task(task_id))
    return not missing and _value(communicate) == 1


def _state(domain: Domain, task_id: str, messages: Sequence[Message]) -> Any:
    """Return what the scorers read of a conversation: the agent's turns without calls, as its user saw them."""
    model: Any = inspect("model")
    sample = domain.sample(task_id)
    said = [
        model.ChatMessageUser(content=text_of(message))
        for message in messages
        if message["role"] == "assistant" and not message.get("tool_calls")
    ]
    return inspect("solver").TaskState(
        model=model.ModelName("none/none"),
        sample_id=task_id,
        epoch=1,
        input=sample.input,
        messages=said,
        metadata=sample.metadata,
    )


def _value(result: Any) -> float:
    return float(result.value == inspect("scorer").CORRECT)


@dataclass(frozen=True, slots=True)
class Domain:
    """One domain, loaded once per process."""

    name: str
    policy: str
    tools: Sequence[Any]
    """Definitions of Inspect."""
    samples: Mapping[str, Any]
    """Samples of the benchmark's own data set, by task id. Their first message is the system prompt of the user."""
    stored_db: bytes
    """The data base, pickled: reading it is several times faster than copying it or loading its file."""

    def sample(self, task_id: str) -> Any:
        """Return the sample of a task."""
        if task_id not in self.samples:
            raise DataError(
                f"tau2:{self.name} has no task {task_id!r}; make the rows again with this inspect-evals"
            )
        return self.samples[task_id]

    def task(self, task_id: str) -> Any:
        """Return the benchmark's own form of a task."""
        return tau2("data_model.tasks").Task.model_validate(self.sample(task_id).metadata["task"])

    def store(self) -> Any:
        """Return a new store of Inspect, in which the domain's tools find a data base of their own."""
        return _store_class()(self.stored_db)


@cache
def load_domain(name: str) -> Domain:
    """Return a domain."""
    with _lock:
        tools: Any = getattr(tau2(f"{name}.tools"), f"all_{name}_tools")
        definition: Any = inspect("tool").ToolDef
        agents, dataset = tau2(f"{name}.agents"), tau2(f"{name}.dataset").read_dataset(instance=name)
        file = tau2("utils").TAU2_DATA_DIR / "domains" / name / "db.json.gz"
        db: Any = getattr(tau2(f"{name}.data_model"), _DATA_BASES[name]).load(str(file))
        return Domain(
            name=name,
            policy=agents.get_domain_policy(),
            tools=tuple(definition(tool()) for tool in tools),
            samples={str(sample.id): sample for sample in dataset},
            stored_db=pickle.dumps(db),
        )


def tau2(module: str) -> Any:
    """Import a module of the benchmark."""
    return _module(f"inspect_evals.tau2.{module}")


def inspect(module: str) -> Any:
    """Import a module of Inspect."""
    return _module(f"inspect_ai.{module}")


def _module(name: str) -> Any:
    with _lock:  # environments start in threads of their own
        return import_extra(name, extra=EXTRA, by="the suite tau2")


@cache
def _store_class() -> Any:
    base: Any = inspect("util").Store

    class LoadedStore(base):
        """Store in which tools find their data base loaded, where they would read its file again."""

        def __init__(self, stored_db: bytes) -> None:
            base.__init__(self)
            self._stored_db = stored_db

        def set(self, key: str, value: Any) -> None:
            is_of_tools = key.partition(":")[0] in _TOOLS_CLASSES.values()
            if is_of_tools and key not in self:
                if key.endswith(":initialized"):
                    value = True
                elif key.endswith(":db"):
                    value = pickle.loads(self._stored_db)
            base.set(self, key, value)

    return LoadedStore
