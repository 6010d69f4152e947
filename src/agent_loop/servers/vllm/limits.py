"""Validation of requests, and vLLM's sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from transformers import AutoConfig, GenerationConfig

from agent_loop.config import ModelConfig
from agent_loop.errors import ConfigError, SamplingParamsError
from agent_loop.servers.base import Ability, refuse_params_of_request
from agent_loop.servers.prompt_limits import PromptLimits
from agent_loop.servers.vllm.logprobs import SAMPLING_ABILITIES, num_logprobs
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams

LOWEST_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = 2.0
"""vLLM rounds lower temperatures up, and refuses higher ones."""
DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the model that requests depend on."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_positions: int = 0
    """Number of positions that the model computes in the same way; 0 if unknown."""

    @classmethod
    def read(cls, model: ModelConfig) -> ModelInfo:
        """Read the model's configuration files."""
        loader: Any = AutoConfig
        try:
            config = loader.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path is {model.path!r}, which has no readable configuration ({error}); set it to the folder "
                "or the hub name of the model"
            ) from error
        text_config = config.get_text_config()
        eos = text_config.eos_token_id
        with suppress(OSError):  # not every folder has one
            eos = cast(Any, GenerationConfig).from_pretrained(model.path).eos_token_id or eos
        ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        return cls(
            vocab_size=text_config.vocab_size,
            eos_token_ids=tuple(ids),
            num_positions=_num_positions(text_config),
        )

    def context_for_scores(self, max_model_len: int) -> int:
        """Return the context that the engine needs to score a text of `max_model_len` tokens, after which vLLM samples
        one further token. Without a further position, such a text cannot be scored."""
        return max_model_len + (max_model_len < self.num_positions)


def _num_positions(text_config: Any) -> int:
    rope: dict[str, Any] = getattr(text_config, "rope_parameters", None) or {}
    # longrope computes longer contexts differently.
    if str(rope.get("rope_type", "")) == "longrope":
        return int(rope.get("original_max_position_embeddings") or 0)
    return int(getattr(text_config, "max_position_embeddings", None) or 0)


@dataclass(frozen=True, slots=True)
class VLLMRequestLimits:
    """Limits of requests to vLLM."""

    server: str
    max_model_len: int
    model: ModelInfo
    abilities: frozenset[Ability] = SAMPLING_ABILITIES
    """Abilities of the server, without which parameters are refused."""

    def sampling(
        self,
        request_id: str,
        *,
        prompt_ids: IntArray,
        params: SamplingParams,
        attachments: Sequence[Attachment],
    ) -> dict[str, Any]:
        """Check a request, and return its sampling parameters under vLLM's names.

        End tokens are passed as stop tokens. vLLM would also stop at the end tokens of its tokenizer, which other
        servers do not know.
        """
        limits = PromptLimits(self.server, self.max_model_len, self.model.vocab_size)
        room = limits.check(request_id, prompt_ids=prompt_ids, attachments=attachments)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self.model.eos_token_ids)
        self._check_params(params, has_stops=bool(stops))
        optional = {
            name: getattr(params, name)
            for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
            if getattr(params, name) != getattr(DEFAULTS, name)
        }
        if params.json_schema:
            optional["structured_outputs"] = {"json": params.json_schema}
        return optional | {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_tokens": room if params.max_tokens is None else min(room, params.max_tokens),
            "stop_token_ids": sorted(stops),
            "ignore_eos": True,
            "seed": params.seed,
            "logprobs": num_logprobs(params),
        }

    def _check_params(self, params: SamplingParams, *, has_stops: bool) -> None:
        if params.min_p:
            raise SamplingParamsError(
                f"min_p is {params.min_p}; vLLM servers offer only 0 (none), because log-probs would be of the "
                "candidates that min_p leaves"
            )
        refuse_params_of_request(params, abilities=self.abilities, server=self.server, resumes_schemas=False)
        if params.json_schema and not has_stops:
            raise SamplingParamsError(
                "json_schema is set without a stop token, and vLLM would continue with any text after the JSON; leave "
                "out ignore_eos, or set stop_token_ids"
            )
        if params.temperature and not LOWEST_TEMPERATURE <= params.temperature <= HIGHEST_TEMPERATURE:
            raise SamplingParamsError(
                f"temperature is {params.temperature}; vLLM accepts 0 (greedy), or from {LOWEST_TEMPERATURE} to "
                f"{HIGHEST_TEMPERATURE:g}"
            )
