"""The names that code written for verl's agent loop imports: changing its imports to this module is enough.

```python
from agent_loop.integrations.verl import AgentLoopBase, AgentLoopOutput, register, rollout_trace_op, simple_timer
```

docs/from-verl.md says what stands for what, and what differs.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABCMeta
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from agent_loop import trajectory
from agent_loop.errors import EpisodeError, did_you_mean
from agent_loop.interactions.base import BaseInteraction as BaseInteraction
from agent_loop.interactions.registry import load_interactions
from agent_loop.loops import base
from agent_loop.loops.registry import register as register
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.tools.base import BaseTool as BaseTool
from agent_loop.tools.base import ToolResponse as ToolResponse
from agent_loop.tools.registry import load_tools
from agent_loop.trajectory import AgentLoopMetrics as AgentLoopMetrics
from agent_loop.types import TokenIds, TokenOutput

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class TrainerConfig(SimpleNamespace):
    """A part of the configuration by verl's names, with `get` as OmegaConf's mappings have it."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@dataclass(frozen=True, slots=True)
class TrainerConfigOf:
    """What verl's loops get as `trainer_config`."""

    config: TrainerConfig
    context: base.LoopContext


class _MadeAsInVerl(ABCMeta):
    """Makes a loop of what a worker has with the arguments that verl gives."""

    def __call__(cls: Any, context: base.LoopContext, **kwargs: Any) -> Any:
        config, tokenizer = _config_of(context), context.template.tokenizer
        cls.init_class(config=config, tokenizer=tokenizer)
        return super().__call__(
            trainer_config=TrainerConfigOf(config, context),
            server_manager=LLMServerClient(context.server_manager),
            tokenizer=tokenizer,
            **kwargs,
        )


class AgentLoopBase(base.AgentLoopBase, metaclass=_MadeAsInVerl):
    """`agent_loop.AgentLoopBase` with verl's constructor and attributes.

    `config.actor_rollout_ref.rollout` has `prompt_length`, `response_length` and `multi_turn`, no more.
    """

    _class_initialized = False

    def __init__(
        self,
        trainer_config: TrainerConfigOf,
        server_manager: LLMServerClient,
        tokenizer: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(trainer_config.context)
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager: Any = server_manager
        self.loop = asyncio.get_running_loop()

    @classmethod
    def init_class(cls, config: TrainerConfig, tokenizer: Any, **kwargs: Any) -> None:
        """Called before each loop is made; those that override it look at `_class_initialized`."""


class SampledTokens(list[int]):
    """A completion: the list of its tokens, with the fields of `TokenOutput`."""

    def __init__(self, output: TokenOutput) -> None:
        super().__init__(output.token_ids)
        self.token_ids = output.token_ids
        self.log_probs = output.log_probs
        self.stop_reason = output.stop_reason
        self.num_preempted = output.num_preempted


class LLMServerClient:
    """`server_manager` of a loop."""

    def __init__(self, manager: AsyncLLMServerManager) -> None:
        self._manager = manager

    async def generate(
        self, request_id: str, *, prompt_ids: TokenIds, sampling_params: Mapping[str, Any], **media: Any
    ) -> SampledTokens:
        """Samples one completion.

        Raises:
            EpisodeError: Images or videos are given: those go through `AgentLoopBase.episode`.
            ServerError: The server failed.
        """
        for name, value in media.items():
            if value:
                raise EpisodeError(
                    f"generate got {name}; use self.episode(messages), which takes images and videos"
                )
        params = {name: value for name, value in sampling_params.items() if name != "logprobs"}
        return SampledTokens(
            await self._manager.generate(request_id, prompt_ids=list(prompt_ids), sampling_params=params)
        )


class AgentLoopOutput(trajectory.AgentLoopOutput):
    """`agent_loop.AgentLoopOutput` that takes `metrics` as a mapping, as `simple_timer` fills it."""

    def __init__(
        self, *, metrics: AgentLoopMetrics | Mapping[str, float] | None = None, **fields: Any
    ) -> None:
        """Raises: EpisodeError: There is no such metric, or the lists do not agree in length."""
        if isinstance(metrics, Mapping):
            known = AgentLoopMetrics.__slots__
            for name in metrics:
                if name not in known:
                    raise EpisodeError(
                        f"metrics has {name!r}{did_you_mean(name, known)}; put others into extra_fields"
                    )
            metrics = AgentLoopMetrics(**cast(Mapping[str, Any], metrics))
        super().__init__(metrics=metrics, **fields)


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Generator[None]:
    """Adds the seconds that the body takes to `timing_raw[name]`."""
    started = time.perf_counter()
    try:
        yield
    finally:
        timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - started


def rollout_trace_op(function: FunctionT) -> FunctionT:
    """Leaves the function as it is: what is traced here is the trajectory, not its functions."""
    return function


def initialize_tools_from_config(tools_config_file: str | Path) -> Sequence[BaseTool]:
    """The tools of a YAML file.

    Raises:
        ConfigError: One cannot be loaded.
    """
    return list(load_tools([], config_path=tools_config_file).values())


def initialize_interactions_from_config(interaction_config_file: str | Path) -> Mapping[str, BaseInteraction]:
    """The interactions of a YAML file, by name.

    Raises:
        ConfigError: One cannot be loaded.
    """
    return load_interactions(interaction_config_file)


def _config_of(context: base.LoopContext) -> TrainerConfig:
    rollout = TrainerConfig(
        prompt_length=context.limits.prompt_length,
        response_length=context.limits.response_length,
        multi_turn=TrainerConfig(**dict(context.multi_turn)),
    )
    return TrainerConfig(actor_rollout_ref=TrainerConfig(rollout=rollout))
