"""Settings of the policy model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agent_loop.config.values import NotNegative, Section


class ModelConfig(Section):
    """The policy model."""

    path: str = ""
    """Folder or hub name of a `transformers` model with tokenizer and chat template."""
    tokenizer_path: str | None = None
    """Folder or hub name of the tokenizer; None is `path`."""
    chat_template_path: str | None = None
    """Jinja file that replaces the tokenizer's chat template."""
    encoder: Literal["auto", "tokenizers", "tiktoken"] = "auto"
    """Library that encodes text. `auto` is `tiktoken`, which is several times faster, if it is proved to give the
    tokenizer's own ids. `tiktoken` refuses tokenizers without that proof."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Precision of sampling and training; `auto` is that of the model's files. The optimiser updates float32 weights in
    any case."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    trust_remote_code: bool = False
    lora_rank: NotNegative = 0
    """Rank of the low-rank adapters (LoRA) to train; 0 trains the weights themselves."""
    lora_alpha: Annotated[float, Field(gt=0, le=1e6)] = 16.0
    """The product of an adapter is multiplied by this value and divided by the rank."""
    target_modules: str | list[str] = "all-linear"
    """Modules with adapters: names, a regular expression, or `all-linear` for all but the head."""
