"""Generators of reasoning-gym as a suite of tasks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from threading import RLock
from typing import Any, ClassVar

from pydantic import ConfigDict

from agent_loop.config import Section
from agent_loop.environments.base import Environment
from agent_loop.environments.suite import SizedOptions, SolutionTurn, TaskSuite, option_value
from agent_loop.errors import ConfigError, DataError, did_you_mean
from agent_loop.interactions.simulated_user import text_of
from agent_loop.loading import import_extra
from agent_loop.runtime.describe import describe_error
from agent_loop.types import Message

EXTRA = "reasoning-gym"
ENTRIES_PER_SEED = 500
"""Entries that are taken from one seed. Some generators make all entries of a seed at once, so that an entry depends
on their number."""
NOT_LISTED = frozenset({"composite"})
"""Generators that make no entries of their own: name the generators to mix as sources of their own."""
_lock = RLock()


class ReasoningGymOptions(SizedOptions):
    """Options of a generator. Further options belong to the generator's own configuration, as JSON values."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    system_prompt: str = "default"
    """Name of one of reasoning-gym's system prompts, or a text. "" adds no system message."""


class ReasoningGymSuite(TaskSuite):
    """Generators of reasoning-gym. The reward is the generator's own score of the answer."""

    name = "reasoning_gym"
    extra = EXTRA
    summary = "procedural puzzles and exercises of reasoning-gym, one turn each"
    options: ClassVar[type[Section]] = ReasoningGymOptions
    reward_parts: ClassVar[Mapping[str, str]] = {
        "reward": "the generator's score of the text in the last <answer> tags, else of the whole last message",
        "scorer_error": "why the generator could not read the answer, which then scores 0",
    }

    def tasks(self) -> Sequence[str]:
        return sorted(_module("factory").DATASETS.keys() - NOT_LISTED)

    def rows(self, task: str, options: Any) -> Iterator[dict[str, Any]]:
        config = _read_config(task, options.model_extra or {})
        system = _module("utils").SYSTEM_PROMPTS.get(options.system_prompt, options.system_prompt)
        messages = [{"role": "system", "content": system.strip()}] if system else []
        for index in count():
            chunk, position = divmod(index, ENTRIES_PER_SEED)
            seed = options.seed + chunk * ENTRIES_PER_SEED
            key = {"generator": task, "config": config, "seed": seed, "index": position}
            question = str(make_entry(key)["question"])
            yield {"raw_prompt": [*messages, {"role": "user", "content": question}], "task": key}

    def environment(self) -> Environment:
        return ReasoningGymEnvironment()

    def solution(self, row: Mapping[str, Any]) -> Sequence[SolutionTurn] | None:
        answer: Any = make_entry(row["task"])["answer"]
        return None if answer is None else [SolutionTurn(text=f"<answer>{answer}</answer>")]

    def identity(self, row: Mapping[str, Any]) -> str:
        return f"{row['task']['generator']}\n{row['raw_prompt'][-1]['content']}"


class ReasoningGymEnvironment(Environment):
    """One entry of a generator, made again from the row."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self._key: Mapping[str, Any] = row["task"]
        self._entry = make_entry(self._key)
        if str(self._entry["question"]).strip() != text_of(row["raw_prompt"][-1]):
            raise DataError(
                f"reasoning-gym makes another question than the row's for {dict(self._key)}; make the rows again with "
                "the installed version"
            )

    def reward(self, messages: Sequence[Message]) -> Mapping[str, Any]:
        text = text_of(messages[-1]) if messages[-1]["role"] == "assistant" else ""
        answer = _module("utils").extract_answer(text)
        given = text.strip() if answer is None else answer
        try:
            return {"reward": float(_dataset_of(self._key).score_answer(given, entry=self._entry))}
        except Exception as error:  # noqa: BLE001  (some scorers raise for an answer that they cannot parse)
            return {"reward": 0.0, "scorer_error": describe_error(error)}


def make_entry(key: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of a generator, always the same for the same key."""
    dataset = _dataset_of(key)
    with _lock:  # some generators draw from Python's global generator of random numbers
        state = random.getstate()
        random.seed(f"{key['seed']} {key['index']}")
        try:
            return dataset[key["index"]]
        except Exception as error:
            raise DataError(f"reasoning-gym cannot make {dict(key)}: {describe_error(error)}") from error
        finally:
            random.setstate(state)


def _dataset_of(key: Mapping[str, Any]) -> Any:
    with _lock:
        return _dataset(key["generator"], json.dumps(key["config"], sort_keys=True), key["seed"])


@lru_cache(maxsize=64)
def _dataset(generator: str, config: str, seed: int) -> Any:
    create = _module("factory").create_dataset
    try:
        return create(generator, seed=seed, size=ENTRIES_PER_SEED, **json.loads(config))
    except Exception as error:
        raise ConfigError(
            f"reasoning_gym:{generator} refuses {config}: {describe_error(error)}; change the options"
        ) from error


def _read_config(generator: str, options: Mapping[str, Any]) -> dict[str, Any]:
    config_class = _module("factory").DATASETS[generator][1]
    known = config_class.__dataclass_fields__.keys() - {"seed", "size"}
    for name in options:
        if name not in known:
            near = did_you_mean(name, {*known, *ReasoningGymOptions.model_fields, "split"})
            raise ConfigError(f"reasoning_gym:{generator} has no option {name!r}{near}")
    return {name: option_value(value) for name, value in options.items()}


def _module(name: str) -> Any:
    """Import a module of reasoning-gym; the import of the package registers its generators."""
    import_extra("reasoning_gym", extra=EXTRA, by="the suite reasoning_gym")
    return import_extra(f"reasoning_gym.{name}", extra=EXTRA, by="the suite reasoning_gym")
