"""Settings of the policy model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from agent_loop.config.values import NotNegative, Section
from agent_loop.errors import ConfigError


class ModelConfig(Section):
    """The policy model."""

    path: str = ""
    """Folder or hub name of a `transformers` model with tokenizer and chat template."""
    tokenizer_path: str | None = None
    """Folder or hub name of the tokenizer; None is `path`."""
    chat_template_path: str | None = None
    """Jinja file that replaces the tokenizer's chat template."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Variables of the chat template in every prompt, such as `{enable_thinking: false}`."""
    encoder: Literal["auto", "tokenizers", "tiktoken"] = "auto"
    """Library that encodes text. `auto` is `tiktoken`, which is faster, for the byte-level tokenizers that it
    supports."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Precision of sampling and training; `auto` is that of the model's files."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    trust_remote_code: bool = False
    lora_rank: NotNegative = 0
    """Rank of the low-rank adapters (LoRA) to train; 0 trains the weights themselves."""
    lora_alpha: Annotated[float, Field(gt=0, le=1e6)] = 16.0
    """The product of an adapter is multiplied by this value and divided by the rank."""
    target_modules: str | list[str] = "all-linear"
    """Modules with adapters: names, a regular expression, or `all-linear` for all but the head. Tied weights cannot
    have one."""
    base_bits: Literal[4] | None = None
    """4 trains adapters on base weights in 4 bits (QLoRA), which needs `bitsandbytes` and a single process."""

    @model_validator(mode="after")
    def _has_adapters_on_a_base_of_few_bits(self) -> ModelConfig:
        if self.base_bits is not None and not self.lora_rank:
            raise ConfigError(
                f"model.base_bits is {self.base_bits}, but model.lora_rank is 0, and weights of {self.base_bits} bits "
                "cannot be trained; set model.lora_rank=32, or unset model.base_bits"
            )
        return self
