"""What vLLM is asked, in its own words; and the calls that run."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

from transformers import AutoConfig, GenerationConfig

from agent_loop.config import ModelConfig
from agent_loop.errors import ConfigError, SamplingParamsError, ServerError
from agent_loop.servers.prompt_limits import PromptLimits
from agent_loop.servers.vllm.logprobs import num_logprobs
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams

LOWEST_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = 2.0
"""vLLM rounds up what is lower and refuses what is higher."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a request must fit."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def read(cls, model: ModelConfig) -> ModelFacts:
        """From the model's configuration files.

        Raises:
            ConfigError: There are none.
        """
        loader: Any = AutoConfig
        try:
            config = loader.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path is {model.path!r}, which holds no configuration that can be read ({error}); give the "
                "folder or hub name of the model"
            ) from error
        text_config = config.get_text_config()
        eos = text_config.eos_token_id
        with suppress(OSError):  # not every folder has one
            eos = cast(Any, GenerationConfig).from_pretrained(model.path).eos_token_id or eos
        ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        return cls(vocab_size=text_config.vocab_size, eos_token_ids=tuple(ids))


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Refuses what vLLM would refuse, in the same words for both ways to reach it."""

    server: str
    max_model_len: int
    model: ModelFacts

    def sampling(
        self,
        request_id: str,
        *,
        prompt_ids: IntArray,
        params: SamplingParams,
        attachments: Sequence[Attachment],
    ) -> dict[str, Any]:
        """Checks a request and gives its sampling parameters under vLLM's names.

        End tokens are passed as stop tokens: vLLM would also stop at those of its tokenizer, which other servers do
        not know of.

        Raises:
            BadPrompt: See `PromptLimits`.
            SamplingParamsError: A parameter that this server does not offer.
        """
        limits = PromptLimits(self.server, self.max_model_len, self.model.vocab_size)
        room = limits.check(request_id, prompt_ids=prompt_ids, attachments=attachments)
        _check_params(params)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self.model.eos_token_ids)
        return {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_tokens": room if params.max_tokens is None else min(room, params.max_tokens),
            "stop_token_ids": sorted(stops),
            "ignore_eos": True,
            "seed": params.seed,
            "logprobs": num_logprobs(params),
        }


def _check_params(params: SamplingParams) -> None:
    if params.repetition_penalty != 1.0:
        raise SamplingParamsError(
            f"repetition_penalty is {params.repetition_penalty}; vLLM servers offer only 1.0 (none), because their "
            "log-probs would not be the model's otherwise"
        )
    if params.temperature and not LOWEST_TEMPERATURE <= params.temperature <= HIGHEST_TEMPERATURE:
        raise SamplingParamsError(
            f"temperature is {params.temperature}; vLLM takes 0 (greedy), or from {LOWEST_TEMPERATURE} to "
            f"{HIGHEST_TEMPERATURE:g}"
        )


@dataclass(slots=True)
class Call:
    """A completion that runs. Written to by the server that runs it."""

    request_id: str
    num_preempted: int = 0
    """So far."""
    engine_request_id: str = ""
    """Its name in the engine, where that is not the session's."""
    is_over: bool = False


class RunningCalls:
    """The completions that run, at most one per session."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._calls: dict[str, Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def get(self, request_id: str) -> Call | None:
        return self._calls.get(request_id)

    @property
    def all(self) -> list[Call]:
        return list(self._calls.values())

    @contextmanager
    def enter(self, request_id: str) -> Generator[Call]:
        """Counts a call while the context is open.

        Raises:
            ServerError: One of this session runs already.
        """
        if request_id in self._calls:
            raise ServerError(
                "a request of this session is already running; await or abort it first",
                server=self._server,
                request_id=request_id,
            )
        call = self._calls[request_id] = Call(request_id)
        try:
            yield call
        finally:
            call.is_over = True
            del self._calls[request_id]
