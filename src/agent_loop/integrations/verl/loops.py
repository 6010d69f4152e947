"""Base class of agent loops with verl's constructor, configuration, tokenizer and server client."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

from omegaconf import DictConfig

from agent_loop import trajectory
from agent_loop.errors import EpisodeError, did_you_mean
from agent_loop.integrations.verl.configuration import verl_config
from agent_loop.integrations.verl.continuous_tokens import USE_EPISODE, ContinuousTokens
from agent_loop.integrations.verl.parsing import CallsOnlyToolParser, ToolParser
from agent_loop.loops import base
from agent_loop.servers.completion_memory import RememberingServerManager
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.trajectory import AgentLoopMetrics
from agent_loop.types import TokenIds, TokenOutput


@dataclass(frozen=True, slots=True)
class DataConfigWrapper:
    """The `data_config` of loops with verl's constructor."""

    config: DictConfig


@dataclass(frozen=True, slots=True)
class TrainerConfigWrapper:
    """The `trainer_config` of loops with verl's constructor."""

    config: DictConfig
    context: base.LoopContext

    @property
    def actor_rollout_ref(self) -> DictConfig:
        """Section for loops that use `trainer_config` as the configuration itself."""
        return self.config.actor_rollout_ref


class AgentLoopBase(ContinuousTokens, base.AgentLoopBase):
    """`agent_loop.AgentLoopBase` with verl's constructor and attributes.

    `config` is an OmegaConf `DictConfig` with the settings of the run under verl's names.
    """

    _class_initialized = False

    def __init__(
        self,
        trainer_config: TrainerConfigWrapper,
        server_manager: LLMServerClient,
        tokenizer: Any,
        processor: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(trainer_config.context)
        self.tokenizer = tokenizer
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.processor = processor
        self.data_config = self.config.data
        self.apply_chat_template_kwargs = self.data_config.apply_chat_template_kwargs
        self.server_manager = cast(Any, server_manager)
        self.loop = asyncio.get_running_loop()

    @classmethod
    def from_context(cls, context: base.LoopContext, **kwargs: Any) -> Self:
        config, tokenizer = verl_config(context), _tokenizer_of(context)
        processor = getattr(context.template.media, "processor", None)
        more = {"processor": processor, "dataset_cls": None, "data_config": DataConfigWrapper(config.data)}
        cls.init_class(config=config, tokenizer=tokenizer, **_accepted_arguments(cls.init_class, more))
        manager = context.server_manager
        if context.completions is not None:
            manager = RememberingServerManager(manager, context.completions)
        arguments = {**_accepted_arguments(cls.__init__, more), **kwargs}
        loop: Any = cls(
            TrainerConfigWrapper(config, context), LLMServerClient(manager), tokenizer, **arguments
        )
        if "messages" in inspect.signature(loop.run).parameters:
            loop.run = partial(_run_with_messages, loop.run)
        return loop

    @classmethod
    def init_class(cls, config: DictConfig, tokenizer: Any, **kwargs: Any) -> None:
        """Initialize the class. Called before each loop is created; overrides check `_class_initialized`."""

    @classmethod
    def get_tool_parser(cls, name: str) -> CallsOnlyToolParser:
        """Return a parser with the interface of verl's first versions. The class needs a `tokenizer`."""
        return CallsOnlyToolParser(ToolParser.get_tool_parser(name, cast(Any, cls).tokenizer))


class SampledTokens(list[int]):
    """Completion as a list of token ids, with the fields of `TokenOutput`."""

    def __init__(self, output: TokenOutput) -> None:
        super().__init__(output.token_ids)
        self.token_ids = output.token_ids
        self.log_probs = output.log_probs
        self.stop_reason = output.stop_reason
        self.weight_version = output.weight_version
        self.num_preempted = output.num_preempted
        self.routed_experts = None
        version = output.weight_version
        self.extra_fields = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), version)


class LLMServerClient:
    """The `server_manager` of a loop. Also exported as `AsyncLLMServerManager`, its earlier name in verl."""

    def __init__(self, manager: AsyncLLMServerManager) -> None:
        self._manager = manager

    async def generate(
        self, request_id: str, *, prompt_ids: TokenIds, sampling_params: Mapping[str, Any], **media: Any
    ) -> SampledTokens:
        """Sample one completion.

        Raises:
            EpisodeError: Images or videos were passed, which only `AgentLoopBase.episode` supports.
            ServerError: The server failed.
        """
        for name, value in media.items():
            if value:
                raise EpisodeError(f"generate got {name}; {USE_EPISODE}")
        params = {name: value for name, value in sampling_params.items() if name != "logprobs"}
        return SampledTokens(
            await self._manager.generate(request_id, prompt_ids=list(prompt_ids), sampling_params=params)
        )


class AgentLoopOutput(trajectory.AgentLoopOutput):
    """`agent_loop.AgentLoopOutput` that accepts `metrics` as a mapping, such as `simple_timer` fills."""

    def __init__(
        self, *, metrics: AgentLoopMetrics | Mapping[str, float] | None = None, **fields: Any
    ) -> None:
        """Create the output.

        Raises:
            EpisodeError: A metric is unknown, or the lists differ in length.
        """
        if isinstance(metrics, Mapping):
            known = AgentLoopMetrics.__struct_fields__
            for name in metrics:
                if name not in known:
                    raise EpisodeError(
                        f"metrics has the unknown name {name!r}{did_you_mean(name, known)}; put other values into "
                        "extra_fields"
                    )
            metrics = AgentLoopMetrics(**cast(Mapping[str, Any], metrics))
        super().__init__(metrics=metrics, **fields)


def _accepted_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function accepts."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}


def _tokenizer_of(context: base.LoopContext) -> Any:
    """Return the tokenizer with an `apply_chat_template` that returns a list of ids by default."""
    tokenizer = copy.copy(context.template.tokenizer)
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
    return tokenizer


async def _run_with_messages(
    run: Callable[..., Awaitable[Any]], sampling_params: dict[str, Any], **row: Any
) -> Any:
    """Call the `run(messages, sampling_params)` of verl's first versions."""
    return await run(messages=list(row["raw_prompt"]), sampling_params=sampling_params)
