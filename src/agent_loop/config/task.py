"""Settings of the task: its rows, the model and the reward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator

from agent_loop.config.values import Name, NotNegative, Positive, PositiveSeconds, Section, Seed, Share
from agent_loop.errors import ConfigError


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Sources = Annotated[list[str], BeforeValidator(_listed)]
"""Sources of rows. A single one needs no list."""


class SamplerConfig(Section):
    """Selection of the rows of each step. A name alone, as in `data.sampler=curriculum`, sets `name`."""

    name: Name = "uniform"
    """`uniform`, `curriculum`, a name registered with `@row_sampler`, `file.py:name` or `module:name`."""
    floor: Share = 0.1
    """Weight in `curriculum` of rows that are always or never solved; the largest weight is 1."""
    smoothing: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the newest result in the estimate of a row's success."""
    success: Literal["threshold", "reward"] = "threshold"
    """Success of a row: the share of its rollouts with at least `reward.success_threshold`, or their mean reward."""
    skip_solved: Positive | None = None
    """Skip rows whose rollouts were all successes this many times in a row."""
    skip_failed: Positive | None = None
    """Skip rows whose rollouts were all failures this many times in a row."""
    skip_for: Positive | None = None
    """Number of steps for which a row is skipped; None is the rest of the run."""
    replay_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the groups of a step that are groups of earlier steps, trained once more."""
    replay_max_age: Positive = 4
    """Maximum age of a replayed token in weight versions; with `trainer.mode=async`, at least `2 *
    trainer.max_staleness + 1`."""

    @model_validator(mode="before")
    @classmethod
    def _accept_name(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values


class DataConfig(Section):
    """Sources and order of the rows."""

    train_files: Sources = []
    """Files, globs, folders, names of tasks (`suite:task?option=value`) or `file.py:function`. A single source needs no
    list."""
    val_files: Sources = []
    """Sources of the rows for evaluation, as in `train_files`."""
    prompt_key: str = "prompt"
    """Column with the messages, or with the text of one user message."""
    workspace: dict[str, Any] = {}
    """Settings that are merged over the column `workspace` of every row."""
    train_batch_size: Positive = 16
    """Prompts per step, each sampled `rollout.n` times."""
    val_max_rows: Positive | None = None
    """Number of rows to evaluate on, from the first on; None is all."""
    shuffle: bool = True
    seed: Seed = 0
    sampler: SamplerConfig = SamplerConfig()
    """Selection of the rows of each step."""
    allow_changed_rows: bool = False
    """Resume a training even if its training rows have changed since the checkpoint."""


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


def _check_name(name: str) -> str:
    if name in ("reward", "score"):
        raise ValueError("the name is that of the whole reward; choose another")
    return name


PartName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$"), AfterValidator(_check_name)]
"""Name of a part of a reward. It names a metric and a stored column too."""


class RewardPart(Section):
    """One of several reward functions."""

    function: str
    """Reward function, as in `reward.function`."""
    weight: float = 1.0
    """Factor of its reward in the sum. It may be negative. With 0, the part is only recorded."""
    batch: bool = False
    """Call the function once for all trajectories of a row. Needs `reward.batch`."""


class RewardConfig(Section):
    """Scoring of trajectories."""

    function: str | None = None
    """`file.py:name` or `module:name` of `(output, row) -> float | dict`, sync or async; or a YAML file of judges."""
    functions: dict[PartName, RewardPart] = Field(default={})
    """Several reward functions by name, each with `function`, `weight` (1.0) and `batch` (false). The reward is their
    weighted sum."""
    batch: bool = False
    """Call `function` as `(outputs, rows) -> list of float | dict`, once for all trajectories of a row."""
    timeout_s: PositiveSeconds = 60.0
    """Time limit for one call of `function`, but not of judges."""
    success_threshold: float = 1.0
    """Least reward of a trajectory that counts as a success."""

    @model_validator(mode="after")
    def _is_consistent(self) -> RewardConfig:
        if self.function is not None and self.functions:
            raise ConfigError(
                "reward.function and reward.functions are both set; move the function into reward.functions"
            )
        grouped = [name for name, part in self.functions.items() if part.batch]
        if grouped and not self.batch:
            raise ConfigError(
                f"reward.functions.{grouped[0]}.batch is true and reward.batch is false; set reward.batch=true"
            )
        return self
