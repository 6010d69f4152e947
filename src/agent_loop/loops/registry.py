"""Registry of agent loops by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from agent_loop.errors import ConfigError, DataError, did_you_mean
from agent_loop.files.plain_values import read_yaml, shown
from agent_loop.loading import load_module
from agent_loop.loops.base import AgentLoopBase
from agent_loop.registries import load_class, warn_if_replaced

LoopT = TypeVar("LoopT", bound="type[AgentLoopBase]")

_registered: dict[str, type[AgentLoopBase]] = {}
_REGISTERED_LATER = {
    "agent_program": "agent_loop.serve.program:AgentProgramLoop",
    "claude-code": "agent_loop.harnesses.claude_code:ClaudeCodeLoop",
    "codex": "agent_loop.harnesses.codex:CodexLoop",
    "mini-swe-agent": "agent_loop.harnesses.mini_swe_agent:MiniSweAgentLoop",
    "opencode": "agent_loop.harnesses.opencode:OpenCodeLoop",
    "qwen-code": "agent_loop.harnesses.qwen_code:QwenCodeLoop",
    "verifiers": "agent_loop.harnesses.verifiers:VerifiersLoop",
}
"""Loops that need additional packages. They are loaded when a name is looked up."""


@dataclass(frozen=True, slots=True)
class LoopEntry:
    """A loop class, and the keyword arguments of its constructor."""

    loop_class: type[AgentLoopBase]
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


def register(agent_name: str) -> Callable[[LoopT], LoopT]:
    """Register a loop under a name, for `rollout.agent.default_agent_loop` and the rows' `agent_name`.

    A name that is already registered, also by a loop of this package, is replaced with a warning.
    """

    def decorate(loop_class: LoopT) -> LoopT:
        shipped = _REGISTERED_LATER.get(agent_name, "").replace(":", ".")
        known = _registered.get(agent_name) or shipped or None
        warn_if_replaced(known, loop_class, what=f"agent loop {agent_name!r}")
        _registered[agent_name] = loop_class
        return loop_class

    return decorate


class LoopRegistry:
    """All loops of a run: the registered loops, and the loops of a YAML file.

    Args:
        loop_files: Python files to import first, so that their `@register` takes effect.
        config_path: YAML list of `{name, _target_: module.Class or file.py:Class, ...}`; further keys go to the
            constructor.
    """

    def __init__(self, *, loop_files: list[str] | None = None, config_path: str | None = None) -> None:
        for file in loop_files or []:
            load_module(file, key="rollout.agent.loop_files")
        self._entries = {name: LoopEntry(loop_class) for name, loop_class in _registered.items()}
        if config_path is not None:
            self._entries |= _read_config(Path(config_path))

    def load_default(self, reference: str) -> None:
        """Load the loop that `rollout.agent.default_agent_loop` names: a known name, `file.py:Class` or `module:Class`.

        Rows can name only loops that are known by name, or this one.
        """
        key = "rollout.agent.default_agent_loop"
        if ":" in reference:
            self._entries[reference] = LoopEntry(load_class(reference, base=AgentLoopBase, key=key))
        else:
            self.get(reference, where=key)

    def get(self, agent_name: str, *, where: str = "rollout.agent.default_agent_loop") -> LoopEntry:
        """Return the loop with this name."""
        if agent_name in _REGISTERED_LATER and agent_name not in self._entries:
            loop_class = load_class(_REGISTERED_LATER[agent_name], base=AgentLoopBase, key=where)
            self._entries[agent_name] = LoopEntry(loop_class)
        if agent_name not in self._entries:
            near = did_you_mean(agent_name, self._entries)
            raise DataError(f"{where} is {agent_name!r}: no such agent loop{near}")
        return self._entries[agent_name]


def _read_config(path: Path) -> dict[str, LoopEntry]:
    key = "rollout.agent.agent_loop_config_path"
    entries = read_yaml(path, what=f"{key}: file")
    if not isinstance(entries, list):
        raise ConfigError(f"{key}: {str(path)!r} must hold a list of {{name, _target_}}")
    loops: dict[str, LoopEntry] = {}
    for entry in cast(list[Any], entries):
        if not isinstance(entry, dict) or not {"name", "_target_"} <= set(cast(dict[str, Any], entry)):
            raise ConfigError(f"{key}: entry {shown(entry)} needs the keys name and _target_")
        kwargs = dict(cast(dict[str, Any], entry))
        name, target = str(kwargs.pop("name")), str(kwargs.pop("_target_"))
        loops[name] = LoopEntry(load_class(target, base=AgentLoopBase, key=key), kwargs)
    return loops
