"""Domains of tau2-bench: their tasks, tools, data bases and scorers, which are those of `inspect-evals`."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import RLock
from typing import Any

from agent_loop.errors import DataError
from agent_loop.loading import import_extra

EXTRA = "tau2"
DOMAINS = ("retail", "airline")
_TOOLS_CLASSES = {"retail": "RetailAgentTools", "airline": "AirlineAgentTools"}
_DATA_BASES = {"retail": "RetailDB", "airline": "FlightDB"}
_lock = RLock()


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
        """Return the sample of a task.

        Raises:
            DataError: There is no such task.
        """
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
    """Return a domain.

    Raises:
        ConfigError: `inspect-evals` is not installed.
    """
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


def check_installed() -> None:
    """Check that the benchmark is installed.

    Raises:
        ConfigError: It is not.
    """
    _module("inspect_evals")


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
