"""Agent loops with verl's constructor, configuration, tokenizer and client: a base class, and the shipped loops."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, TypeAlias, cast

from omegaconf import DictConfig

from agent_loop import trajectory
from agent_loop.chat.sources import split_media
from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import EpisodeError, did_you_mean
from agent_loop.integrations.verl.configuration import verl_config
from agent_loop.integrations.verl.parsing import CallsOnlyToolParser, ToolParser
from agent_loop.loops import agent_data, base, single_turn, tool_agent
from agent_loop.loops.partial import AsyncPartialToolAgentLoop as PartialToolAgentLoop
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.trajectory import AgentLoopMetrics
from agent_loop.types import Message, TokenIds, TokenOutput

USE_EPISODE = "use self.episode(messages), which takes images and videos"


@dataclass(frozen=True, slots=True)
class MergeResult:
    """Tokens after a merge, with verl's attributes."""

    token_ids: list[int]
    """The prompt and everything after it."""
    appended_token_count: int
    kind: Literal["assistant", "context"]
    inserted_token_ids: tuple[int, ...] = ()
    """Empty: the tokens that close a turn count as appended."""
    removed_prefix_token_count: int = 0


Merged: TypeAlias = tuple[MergeResult, list[int], list[float] | None]
"""The tokens, the response mask and the log-probs after a merge."""


class ContinuousTokens:
    """Methods of verl's `AgentLoopBase` for tokens and media."""

    template: ChatTemplate
    rollout_config: Any

    async def process_multi_modal_info(self, messages: list[Message]) -> dict[str, Any]:
        """Return no media."""
        _, media = split_media(messages)
        if media:
            raise EpisodeError(f"messages contain images or videos; {USE_EPISODE}")
        return {}

    async def process_vision_info(self, messages: list[Message]) -> dict[str, Any]:
        """Return no media, as `process_multi_modal_info`, whose earlier name this is."""
        return await self.process_multi_modal_info(messages)

    async def ct_build_initial_tokens(
        self, messages: list[Message], tools: Sequence[Mapping[str, Any]] | None = None, **media: Any
    ) -> list[int]:
        """Return the first prompt. A prompt that is too long loses its beginning, as in verl."""
        given = [name for name, value in media.items() if value and name != "mm_inputs_out"]
        if given:
            raise EpisodeError(f"ct_build_initial_tokens got {given[0]}; {USE_EPISODE}")
        encoded = self.template.open_encoded(messages, tools=tools or ())
        return encoded.token_ids.tolist()[-self.rollout_config.prompt_length :]

    async def ct_merge_context_msg(
        self,
        previous_messages: list[Message],
        updated_messages: list[Message],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Merged:
        """Append messages of tools or users, and the prompt of the next turn, with a mask of 0."""
        if updated_messages[: len(previous_messages)] != previous_messages:
            raise EpisodeError(
                "messages before the new ones changed; ct_merge_context_msg can only append messages"
            )
        new = updated_messages[len(previous_messages) :]
        appended: list[int] = []
        if new:
            last = runtime_token_ids[-1] if runtime_token_ids else None
            appended = self.template.bridge_encoded(new, last_token_id=last).token_ids.tolist()
        return (
            MergeResult([*runtime_token_ids, *appended], len(appended), "context"),
            [*response_mask, *[0] * len(appended)],
            None if response_logprobs is None else [*response_logprobs, *[0.0] * len(appended)],
        )

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> Merged:
        """Append a completion, with a mask of 1."""
        logprobs: list[float] | None = None
        if response_logprobs is not None:
            new = list(assistant_logprobs or ())
            if len(new) != len(assistant_token_ids):
                raise EpisodeError(
                    f"assistant_logprobs has {len(new)} values for {len(assistant_token_ids)} tokens; pass those of "
                    "the completion"
                )
            logprobs = [*response_logprobs, *new]
        return (
            MergeResult([*runtime_token_ids, *assistant_token_ids], len(assistant_token_ids), "assistant"),
            [*response_mask, *[1] * len(assistant_token_ids)],
            logprobs,
        )


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
        arguments = {**_accepted_arguments(cls.__init__, more), **kwargs}
        loop: Any = cls(
            TrainerConfigWrapper(config, context),
            LLMServerClient(context.server_manager),
            tokenizer,
            **arguments,
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
        """Sample one completion."""
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
        """Create the output."""
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


class AgentData(agent_data.AgentData):
    """`agent_loop.loops.agent_data.AgentData` with verl's token lists."""

    @property
    def prompt_ids(self) -> list[int]:
        """All tokens so far: the prompt of the next completion."""
        return [*super().prompt_ids, *super().response_ids]

    @property
    def response_ids(self) -> list[int]:
        """Tokens of the last completion."""
        return [] if self.completion is None else list(self.completion.token_ids)


class SingleTurnAgentLoop(AgentLoopBase, single_turn.SingleTurnAgentLoop):
    """`agent_loop.SingleTurnAgentLoop` with verl's constructor."""


class ToolAgentLoop(AgentLoopBase, tool_agent.ToolAgentLoop):
    """`agent_loop.ToolAgentLoop` with verl's constructor and `AgentData`."""

    agent_data_class = AgentData


class AsyncPartialToolAgentLoop(ToolAgentLoop, PartialToolAgentLoop):
    """`agent_loop.AsyncPartialToolAgentLoop` with verl's constructor."""
