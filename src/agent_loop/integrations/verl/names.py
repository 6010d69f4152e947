"""Functions with verl's names, lazy loading of others, and explanations of names without a counterpart."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent_loop.interactions.base import BaseInteraction
from agent_loop.interactions.registry import load_interactions
from agent_loop.registries import load_class
from agent_loop.servers.base import AsyncServerBase
from agent_loop.servers.factory import ENGINES

logger = logging.getLogger(__name__)

LOADED_LATER = {
    "AsyncSGLangServer": "agent_loop.servers.sglang:SGLangServer",
    "AsyncvLLMServer": "agent_loop.servers.vllm:VLLMServer",
    "SearchTool": "agent_loop.tools.search.tool:SearchTool",
    "VerlAgentLoopManager": "agent_loop.integrations.verl.manager.manager:VerlAgentLoopManager",
}
"""Classes whose modules are slow to import or need optional packages."""

NO_COUNTERPART = {
    "ActorRolloutRefWorker": "set rollout.engine for the servers, and run agent-loop train",
    "AsyncActorRolloutRefWorker": "servers are separate objects; set rollout.engine",
    "AsyncEngine": "set rollout.engine=sglang, and its options in rollout.engine_kwargs",
    "DataProto": "AgentLoopManager.generate_sequences takes a list of rows and returns a tensordict.TensorDict",
    "RLHFDataset": "name files or a function in data.train_files; agent_loop.rollout.rows.load_rows reads them",
    "RayPPOTrainer": "run agent-loop train, or agent_loop.training",
    "RayWorkerGroup": "set trainer.runtime=ray; AgentLoopManager.from_config makes servers and workers",
    "RolloutWorker": "servers are separate objects; set rollout.engine",
    "SGLangRollout": "set rollout.engine=sglang",
    "TaskRunner": "run agent-loop train",
    "_agent_loop_registry": "register loops with @register; agent_loop.loops.registry.LoopRegistry finds them",
    "copy_to_local": "set model.path to a folder or a name on the Hugging Face hub",
    "hf_tokenizer": "use self.tokenizer of the loop, or transformers.AutoTokenizer",
}
"""Names of verl without a counterpart, and what to use instead."""


def load_name(name: str) -> Any:
    """Return an attribute of `agent_loop.integrations.verl` that is imported on demand.

    Raises:
        ImportError: The name has no counterpart. The message states what to use instead.
        AttributeError: The name is unknown.
    """
    if name in LOADED_LATER:
        module, _, attribute = LOADED_LATER[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name in NO_COUNTERPART:
        raise ImportError(f"{name} has no counterpart in agent_loop: {NO_COUNTERPART[name]}")
    raise AttributeError(f"module 'agent_loop.integrations.verl' has no attribute {name!r}")


def async_server_class(
    rollout_backend: str, rollout_backend_module: str | None = None, rollout_backend_class: str | None = None
) -> type[AsyncServerBase]:
    """Return the server class of an engine, or the class of that name in a module or file."""
    reference = ENGINES.get(rollout_backend, rollout_backend)
    if rollout_backend_module is not None:
        reference = f"{rollout_backend_module}:{rollout_backend_class}"
    return load_class(reference, base=AsyncServerBase, key="rollout_backend")


async def get_trajectory_info(step: int, index: Iterable[Any], validate: bool) -> list[dict[str, Any]]:
    """Return the step, the sample index and the number within the sample of each trajectory."""
    seen: dict[Any, int] = {}
    info: list[dict[str, Any]] = []
    for sample_index in index:
        rollout_n = seen[sample_index] = seen.get(sample_index, -1) + 1
        info.append(
            {"step": step, "sample_index": sample_index, "rollout_n": rollout_n, "validate": validate}
        )
    return info


def initialize_interactions_from_config(interaction_config_file: str | Path) -> Mapping[str, BaseInteraction]:
    """Return the interactions of a YAML file by name."""
    return load_interactions(interaction_config_file)


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Generator[None]:
    """Add the seconds that the body takes to `timing_raw[name]`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started


class RolloutTraceConfig:
    """Arguments of the last call of `init`. The settings `rollout.trace.*` configure the traces of a run."""

    _backend: str | None = None
    _token2text = False

    @classmethod
    def init(
        cls, project_name: str, experiment_name: str, backend: str | None, token2text: bool = False
    ) -> None:
        """Keep the arguments, and log that they do not configure the traces."""
        cls._backend, cls._token2text = backend, token2text
        if backend is not None:
            logger.warning(
                "RolloutTraceConfig.init traces nothing here; set rollout.trace.backend=%s", backend
            )

    @classmethod
    def get_backend(cls) -> str | None:
        """Return the backend."""
        return cls._backend

    @classmethod
    def enable_token2text(cls) -> bool:
        """Return whether tokens are shown as text."""
        return cls._token2text
