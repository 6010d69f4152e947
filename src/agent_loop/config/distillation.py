"""Settings of distillation: teachers, whose probabilities the policy learns on its own trajectories."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from agent_loop.config.values import Coefficient, Positive, PositiveSeconds, Section, Tokens
from agent_loop.errors import ConfigError

Objective: TypeAlias = Literal["forward_kl", "reverse_kl", "sampled_kl", "reward"]

TeacherName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
"""Name of a teacher. It names metrics too."""


class TeacherConfig(Section):
    """A model on a server of its own that scores the tokens of trajectories. It needs the policy's vocabulary."""

    path: str = ""
    """Folder or hub name of the model; empty is `model.path`, the policy at the start of the run. With `server_url`,
    the name of the model at the server."""
    tokenizer_path: str | None = None
    """Folder or hub name of the teacher's tokenizer, to compare its vocabulary with the policy's; None is `path`."""
    engine: str = "embedded"
    """Engine of the server, as in `rollout.engine`. With `server_url`: `vllm`, `sglang` or `openai`."""
    engine_kwargs: dict[str, Any] = {}
    """Options of the engine, under its own names."""
    server_url: str | None = None
    """URL of a running server of this engine, such as `http://host:8000`. None starts a server."""
    sources: list[str] = []
    """Values of the column `data_source` whose rows it teaches. Empty: all rows whose source no other teacher names."""
    hint: str | None = None
    """Text that the teacher sees before the last user message of the prompt, and the policy does not."""
    hint_key: str | None = None
    """Column of the rows, such as a solution, whose text follows the hint."""
    context_length: Tokens | None = None
    """Most tokens of a text that the teacher scores; longer trajectories are not taught. None is
    `rollout.prompt_length` + `rollout.response_length`, and 1024 more with a hint."""
    max_concurrent: Positive = 16
    """Maximum number of concurrent requests to the teacher."""
    timeout_s: PositiveSeconds = 600.0
    """Time limit of a request. A trajectory whose request fails is not taught."""


class DistillationConfig(Section):
    """Distillation from teachers on the policy's own trajectories."""

    teachers: dict[TeacherName, TeacherConfig] = Field(default={})
    """Teachers by name, each with `path`, `tokenizer_path`, `engine`, `engine_kwargs`, `server_url`, `sources`, `hint`,
    `hint_key`, `context_length`, `max_concurrent` and `timeout_s`."""
    objective: Objective = "forward_kl"
    """`forward_kl`, `reverse_kl` or `sampled_kl` in the loss, or `reward` in the advantage."""
    top_k: Annotated[int, Field(ge=1, le=2**20)] = 64
    """Number of the teacher's likeliest tokens that `forward_kl` and `reverse_kl` compare. All other tokens count as
    one."""
    coef: Coefficient = 1.0
    """Weight of the teachers' objective."""
    reward_coef: Coefficient = 1.0
    """Factor of the advantages from rewards; with 0, the policy learns from the teachers alone."""

    @property
    def num_candidates(self) -> int:
        """Number of likeliest tokens that teachers are asked for."""
        return self.top_k if self.objective in ("forward_kl", "reverse_kl") else 0

    @model_validator(mode="after")
    def _has_one_teacher_for_each_source(self) -> DistillationConfig:
        counts = Counter(source for teacher in self.teachers.values() for source in set(teacher.sources))
        for source, count in counts.items():
            if count > 1:
                raise ConfigError(
                    f"{count} of distillation.teachers teach the source {source!r}; give each source one teacher"
                )
        others = [name for name, teacher in self.teachers.items() if not teacher.sources]
        if len(others) > 1:
            raise ConfigError(
                f"distillation.teachers.{others[0]} and {others[1]} both teach all sources; name the sources of one"
            )
        return self
