"""verl's module names for code that imports them where verl is not installed.

`from verl.tools.base_tool import BaseTool` then gets the class of `agent_loop.integrations.verl`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES = "agent_loop.integrations.verl"
"""Module that has the names."""
LEAVES = (
    "verl.experimental.agent_loop.agent_loop",
    "verl.experimental.agent_loop.single_turn_agent_loop",
    "verl.experimental.agent_loop.tool_agent_loop",
    "verl.experimental.agent_loop.tool_parser",
    "verl.interactions.base",
    "verl.interactions.gsm8k_interaction",
    "verl.interactions.utils.interaction_registry",
    "verl.tools.base_tool",
    "verl.tools.gsm8k_tool",
    "verl.tools.schemas",
    "verl.tools.search_tool",
    "verl.tools.utils.tool_registry",
    "verl.utils.profiler.performance",
    "verl.utils.reward_score",
    "verl.utils.rollout_trace",
    "verl.workers.rollout.llm_server",
    "verl.workers.rollout.replica",
)
"""Modules of verl from which loops, tools, interactions and rewards import."""
MODULES = frozenset(
    ".".join(parts[:length])
    for parts in (leaf.split(".") for leaf in LEAVES)
    for length in range(1, len(parts) + 1)
)
"""The same modules, and the packages that they are in."""


def offer() -> bool:
    """Let verl's modules be imported from now on. Return False if verl is installed, which then provides them."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    if importlib.util.find_spec("verl") is not None:
        return False
    sys.meta_path.append(_Finder())
    return True


class _Finder(MetaPathFinder):
    """Finder of the modules in `MODULES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            return ModuleSpec(fullname, _Loader(), is_package=True)
        if fullname.startswith("verl."):
            raise ModuleNotFoundError(
                f"{fullname} has no counterpart in agent_loop, and verl is not installed; docs/from-verl.md lists the "
                "names that have one",
                name=fullname,
            )
        return None


class _Loader(Loader):
    """Loader of a module whose attributes are those of `NAMES`."""

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> Any:
            if name.startswith("__") or f"{module.__name__}.{name}" in MODULES:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return getattr(importlib.import_module(NAMES), name)

        vars(module)["__getattr__"] = attribute
