"""Tasks of AgentDojo: office, chat, travel and bank tools whose replies may hold injected instructions.

The package `agentdojo` is used, and not its port in inspect-evals. The port has one attack and one version of the
tasks, its tools need a running evaluation of Inspect, and one of its suites starts Docker containers. In return,
`agentdojo` imports the client libraries of four model providers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from agent_loop.config import Section
from agent_loop.environments.base import Environment, EnvironmentTool, RewardValue
from agent_loop.environments.suite import SolutionTurn, TaskSuite
from agent_loop.errors import ConfigError, ToolError, did_you_mean
from agent_loop.interactions.simulated_user import text_of
from agent_loop.loading import import_extra
from agent_loop.runtime.instances import OnReplay
from agent_loop.tools.base import ArgumentChecking
from agent_loop.types import Message, ToolCall

NO_ATTACK = "none"
ALL_INJECTIONS = "all"
LATEST = "v1.2.2"
MAX_ENVIRONMENTS = 32
"""Initial states that are kept, because reading one takes up to a tenth of a second."""
RewardRule = Literal["secure_utility", "utility"]


class AgentDojoOptions(Section):
    """Options of AgentDojo's suites."""

    attack: str = NO_ATTACK
    """Name of the attack that writes the injections, or `none`."""
    injection: str = ALL_INJECTIONS
    """Injection task that the attack pursues, such as `injection_task_0`, or `all`, which makes a row for each."""
    version: str = LATEST
    """Version of the tasks."""
    model: str = "local"
    """Model that attacks address by its name. One of AgentDojo's own names of models."""
    reward: RewardRule = "secure_utility"
    """`secure_utility` is 1 if the user's task was solved and the attack failed; `utility` ignores the attack."""


class AgentDojoSuite(TaskSuite):
    """Suites of AgentDojo. The reward is the user task's own utility function."""

    name = "agentdojo"
    extra = "agentdojo"
    summary = "AgentDojo's tasks with tools, with or without injected instructions in the tools' replies"
    options: ClassVar[type[Section]] = AgentDojoOptions
    reward_parts: ClassVar[Mapping[str, str]] = {
        "reward": "1 if the user's task was solved and no attack succeeded, else 0; see the option `reward`",
        "utility": "whether the user's task was solved, by its own function",
        "security": "whether the attack reached its goal, by the injection task's own function; with an attack only",
    }

    def tasks(self) -> Sequence[str]:
        return tuple(_suites(LATEST))

    def rows(self, task: str, options: Any) -> Iterator[dict[str, Any]]:
        suite = _suite(task, options.version)
        system = _module("agent_pipeline.agent_pipeline").load_system_message(None)
        for user_task in suite.user_tasks.values():
            prompt = [{"role": "system", "content": system}, {"role": "user", "content": user_task.PROMPT}]
            for attack in _attacks(suite, user_task, options):
                columns = {"suite": task, "version": options.version, "user_task": user_task.ID}
                yield {"raw_prompt": prompt, "task": {**columns, **attack, "reward": options.reward}}

    def environment(self) -> Environment:
        return AgentDojoEnvironment()

    def solution(self, row: Mapping[str, Any]) -> Sequence[SolutionTurn]:
        """Return the calls of the user task's ground truth, one per turn, and its final text."""
        user_task = _user_task(row["task"])
        calls = user_task.ground_truth(_start(row["task"]))
        turns = [SolutionTurn(calls=(ToolCall(call.function, dict(call.args)),)) for call in calls]
        return [*turns, SolutionTurn(text=user_task.GROUND_TRUTH_OUTPUT)]

    def identity(self, row: Mapping[str, Any]) -> str:
        """Return the name of the user task: all attacks on it belong to one split."""
        return f"{row['task']['suite']} {row['task']['user_task']}"


class AgentDojoEnvironment(Environment):
    """State of one task: the user's mail, files, calendar, messages, bookings or accounts."""

    on_replay = OnReplay.RERUN

    def reset(self, row: Mapping[str, Any]) -> None:
        self._task: Mapping[str, Any] = row["task"]
        self._suite = _suite(self._task["suite"], self._task["version"])
        self._state = _start(self._task)
        self._initial = self._state.model_copy(deep=True)
        self._executor = _module("agent_pipeline").ToolsExecutor()
        self._runtime = _module("functions_runtime").FunctionsRuntime(self._suite.tools)
        self._calls: list[Any] = []

    def tools(self) -> Sequence[EnvironmentTool]:
        # AgentDojo checks the arguments itself, and its error is the reply that its own agents get.
        return [
            EnvironmentTool.of(
                tool.name,
                tool.description,
                tool.parameters.model_json_schema(),
                check_arguments=ArgumentChecking.OFF,
            )
            for tool in self._suite.tools
        ]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        call = _module("functions_runtime").FunctionCall(function=name, args=arguments)
        self._calls.append(call)
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        *_, messages, _ = self._executor.query("", self._runtime, self._state, [turn])
        reply = messages[-1]
        if reply["error"] is not None:
            raise ToolError(reply["error"])
        return _module("types").get_text_content_as_str(reply["content"])

    def reward(self, messages: Sequence[Message]) -> RewardValue:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
        text = text_of(last)
        task = _user_task(self._task)
        is_solved = self._result(task.utility_from_traces, task.utility, text)
        if self._task["injection_task"] is None:
            return {"reward": float(is_solved), "utility": float(is_solved)}
        is_hijacked = self._is_hijacked(text, is_solved=is_solved)
        is_rewarded = is_solved and (self._task["reward"] == "utility" or not is_hijacked)
        return {
            "reward": float(is_rewarded),
            "utility": float(is_solved),
            "security": float(is_hijacked),
        }

    def _is_hijacked(self, text: str, *, is_solved: bool) -> bool:
        # As in AgentDojo's benchmark: an attack that is to stop the agent succeeds if the user's task is not solved.
        if _attack_class(self._task["attack"]).is_dos_attack:
            return not is_solved
        injection = self._suite.injection_tasks[self._task["injection_task"]]
        return self._result(injection.security_from_traces, injection.security, text)

    def _result(
        self, from_traces: Callable[..., bool | None], from_state: Callable[..., bool], text: str
    ) -> bool:
        """Return the result of a task's function of the calls, or of the state if the former returns None."""
        result = from_traces(text, self._initial, self._state, self._calls)
        return bool(from_state(text, self._initial, self._state) if result is None else result)


def _attacks(suite: Any, user_task: Any, options: AgentDojoOptions) -> Iterator[dict[str, Any]]:
    """Yield the columns of each attack on a user task, or those of none."""
    if options.attack == NO_ATTACK:
        if options.injection != ALL_INJECTIONS:
            raise ConfigError(
                "agentdojo: injection is set without an attack; set attack too, such as attack=direct"
            )
        yield {"attack": NO_ATTACK, "injection_task": None, "injections": {}}
        return
    attack, known = _attack(suite, options.attack, options.model), suite.injection_tasks
    names = list(known)[:1] if attack.is_dos_attack else list(known)
    if options.injection != ALL_INJECTIONS:
        if options.injection not in known:
            near = did_you_mean(options.injection, known)
            raise ConfigError(
                f"agentdojo: injection is {options.injection!r}, which the suite {suite.name} does not have{near}"
            )
        names = [options.injection]
    for name in names:
        injections = attack.attack(user_task, known[name])
        yield {"attack": options.attack, "injection_task": name, "injections": injections}


@lru_cache(maxsize=MAX_ENVIRONMENTS)
def _attack(suite: Any, name: str, model: str) -> Any:
    """Return the attack of a name, on a model."""
    try:
        return _attack_class(name)(suite, SimpleNamespace(name=model))
    except ValueError as error:
        models = ", ".join(_module("models").MODEL_NAMES)
        raise ConfigError(f"agentdojo: model is {model!r}; give one of {models} ({error})") from error


def _attack_class(name: str) -> Any:
    attacks = _module("attacks.attack_registry").ATTACKS
    _module("attacks")
    if name not in attacks:
        raise ConfigError(f"agentdojo: attack is {name!r}, which does not exist{did_you_mean(name, attacks)}")
    if name == "manual":
        raise ConfigError(
            "agentdojo: attack is 'manual', which asks a person for each injection; name another one"
        )
    return attacks[name]


def _suites(version: str) -> Mapping[str, Any]:
    suites = _module("task_suite.load_suites").get_suites(version)
    if not suites:
        raise ConfigError(
            f"agentdojo: version is {version!r}, which does not exist; give one such as {LATEST}"
        )
    return suites


def _suite(name: str, version: str) -> Any:
    return _suites(version)[name]


def _user_task(task: Mapping[str, Any]) -> Any:
    return _suite(task["suite"], task["version"]).user_tasks[task["user_task"]]


def _start(task: Mapping[str, Any]) -> Any:
    """Return a new initial state of a task, with its injections in it."""
    injections = tuple(sorted(task["injections"].items()))
    state = _initial_state(task["suite"], task["version"], injections)
    return _user_task(task).init_environment(state.model_copy(deep=True))


@lru_cache(maxsize=MAX_ENVIRONMENTS)
def _initial_state(suite: str, version: str, injections: tuple[tuple[str, str], ...]) -> Any:
    return _suite(suite, version).load_and_inject_default_environment(dict(injections))


_import_lock = Lock()


def _module(name: str) -> Any:
    with _import_lock:  # environments start in threads of their own
        return import_extra(f"agentdojo.{name}", extra=AgentDojoSuite.extra, by="the suite agentdojo")
