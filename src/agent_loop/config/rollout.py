"""Settings of the rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agent_loop.config.values import (
    NotNegative,
    OnWeightUpdate,
    Positive,
    PositiveSeconds,
    Replicas,
    Samples,
    Section,
    Seed,
    Share,
    Temperature,
    Tokens,
    TopK,
    TopP,
    TraceBackend,
    WeightTransfer,
)
from agent_loop.errors import ConfigError


class ValSamplingConfig(Section):
    """Sampling in evaluations, by `agent-loop eval` and in training (`trainer.val_every`)."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    n: Samples = 1
    """Trajectories per row. More than one gives pass@k."""
    max_turn_tokens: Tokens | None = None
    """Maximum tokens of one assistant turn, if less than `rollout.multi_turn.max_turn_tokens`."""


class CustomServerConfig(Section):
    """Custom server class."""

    path: str
    """Python file or module."""
    name: str
    """Class in that file or module, a subclass of `AsyncServerBase`."""


class AgentConfig(Section):
    """Agent loops and workers."""

    num_workers: Replicas = 1
    default_agent_loop: str | None = None
    """Agent loop of rows without `agent_name`: a registered name, `file.py:Class` or `module:Class`. None is
    `tool_agent` with tools or an interaction, else `single_turn_agent`."""
    agent_loop_config_path: str | None = None
    """YAML list of further loops: `{name, _target_: module.Class, ...}`."""
    loop_files: list[str] = []
    """Python files that are imported first, so that their `@register` takes effect."""
    custom_async_server: CustomServerConfig | None = None


class MultiTurnConfig(Section):
    """Limits of conversations, tools and interactions."""

    max_assistant_turns: Positive | None = None
    max_user_turns: Positive | None = None
    """Maximum replies of tools and interactions, each counted once."""
    max_parallel_calls: Positive = 1
    """Calls of one turn that run concurrently; the others are queued."""
    max_tool_response_length: Tokens = 256
    """Maximum tokens of one tool reply, the truncation marker included."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """Part of a long reply that is kept: `left` keeps its beginning, `right` its end, `middle` both ends."""
    max_turn_tokens: Tokens | None = None
    """Maximum tokens of one assistant turn; None is the rest of `response_length`."""
    max_invalid_turns: NotNegative = 3
    """Consecutive turns of malformed calls alone that get an error message. One more ends the trajectory."""
    tools: list[str] = []
    """Names of built-in tools, or `file.py:name` or `module:name` of functions with `@function_tool` or of `BaseTool`
    classes."""
    tool_config_path: str | None = None
    """YAML: `tools: [{class_name, config, tool_schema, timeout_s, max_concurrent, retries, on_replay}]`."""
    interaction_config_path: str | None = None
    """YAML: `interaction: [{class_name, name, config}]`."""
    environments: dict[str, str] = {}
    """Environments of `environment_agent` by name, as `file.py:Class` or `module:Class`."""
    format: str = "hermes"
    """Tool parser: a registered name, `file.py:ClassName`, or `auto`, which selects it by the chat template."""
    turn_timeout_s: PositiveSeconds | None = None
    """Time limit of a turn with its replies. A longer turn ends the trajectory with `deadline`; its tokens are kept."""
    tool_timeout_s: PositiveSeconds = 60.0
    """Time limit of a tool call."""
    interaction_timeout_s: PositiveSeconds = 120.0
    """Time limit of an interaction's reply, and of an environment's reset."""
    close_timeout_s: PositiveSeconds = 10.0
    """Time limit for closing a tool or interaction."""

    @property
    def has_tools(self) -> bool:
        """Whether the model has tools."""
        return bool(self.tools or self.tool_config_path or self.environments)


class TraceConfig(Section):
    """Traces of finished trajectories; see `docs/tracing.md`."""

    backend: TraceBackend | list[TraceBackend] | None = None
    """`file` (lines for `agent-loop traces`), `mlflow`, `otel` (OpenTelemetry), `weave`, or a list of them."""
    project_name: str | None = None
    """MLflow's experiment, Weave's project, OpenTelemetry's service; None is `trainer.project_name`."""
    experiment_name: str | None = None
    """An attribute of every trace; None is `trainer.experiment_name`."""
    token2text: bool = False
    """Write the texts of tokens and of tools' arguments and replies; otherwise token ids and counts."""
    max_samples_per_step_per_worker: Positive | None = None
    """Rows per worker and rollout whose trajectories are traced; None traces all."""
    path: str = "traces.jsonl"
    """File of `file`, to which traces are appended."""
    tracking_uri: str | None = None
    """URI of `mlflow`; None uses MLFLOW_TRACKING_URI."""
    otlp_endpoint: str | None = None
    """Endpoint of `otel`; None uses OTEL_EXPORTER_OTLP_ENDPOINT."""
    max_queued: Positive = 1000
    """Maximum trajectories that wait for a writer. Further ones are dropped and counted."""
    flush_timeout_s: PositiveSeconds = 10.0
    """Seconds to wait at the end for traces that are not written yet."""

    @property
    def backends(self) -> Sequence[TraceBackend]:
        """The names of `backend` as a list."""
        given = self.backend
        return given if isinstance(given, list) else [given] if given is not None else []


class RolloutConfig(Section):
    """Sampling of trajectories."""

    engine: str = "embedded"
    """`embedded`, `embedded_process`, `vllm`, `sglang`, `scripted`, or `module:Class`. With `server_urls`: `vllm`,
    `sglang` or `openai`."""
    engine_kwargs: dict[str, Any] = {}
    """Options of the engine, under its own names."""
    num_servers: Replicas = 1
    server_urls: list[str] = []
    """URLs of running servers, such as `http://host:8000`. No servers are started then."""
    start_timeout_s: PositiveSeconds = 600.0
    """Time limit for the start of an engine."""
    request_timeout_s: PositiveSeconds | None = 1800.0
    """Time limit of a request to one server, its time in the queue included. A longer request fails its trajectory."""
    generate_timeout_s: PositiveSeconds | None = None
    """Time limit of a completion, queueing and all servers included. A longer one ends the trajectory with `deadline`;
    its tokens are kept."""
    weight_transfer: WeightTransfer = "auto"
    """Transport of new weights to engines in other processes. `auto` depends on where the weights and the engine
    are."""
    on_weight_update: OnWeightUpdate = "auto"
    """Completions in flight during a weight update: `keep` continues them, `abort` aborts and resumes them, `auto`
    keeps them if the engine can."""
    n: Samples = 1
    """Trajectories per prompt, the size of a group."""
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    """Only 1 can be trained with."""
    top_k: TopK = -1
    """Only -1, which is no limit, can be trained with."""
    top_logprobs: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number k of the likeliest tokens whose log-probs are stored for each sampled token. Engines: embedded, vLLM,
    SGLang."""
    prompt_length: Tokens = 512
    """Maximum tokens of the first prompt."""
    response_length: Tokens = 512
    """Maximum tokens after the first prompt, those of tools and interactions included."""
    truncate_prompt: Literal["no", "left", "right"] = "no"
    """End the trajectory of a longer prompt (`no`), or remove the beginning (`left`) or the end (`right`) of the
    prompt."""
    pad_to: Literal["longest", "limits"] = "longest"
    """Width of the batches of `generate_sequences`: that of the longest row, or `prompt_length` + `response_length`."""
    free_cache_engine: bool = True
    """Put the servers to sleep between rollouts."""
    trajectory_timeout_s: PositiveSeconds | None = 600.0
    """Time limit of a trajectory. A longer trajectory ends with `deadline`; its tokens are kept."""
    over_sample: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """In training, start this many times `data.train_batch_size` prompts, and keep the groups that finish first.
    Favours prompts with short answers."""
    max_concurrent: Positive | Literal["auto"] | None = "auto"
    """Maximum trajectories in flight per worker. `auto` starts as many as the servers' KV caches hold. None starts all
    at once."""
    watchdog_s: PositiveSeconds | None = 120.0
    """Seconds without progress after which the log lists what each trajectory waits for; None logs nothing."""
    retries: NotNegative = 2
    """How often a trajectory runs again after a failure of infrastructure. After that it fails without a reward."""
    max_failed_share: Share = 0.5
    """Maximum share of failed trajectories in a batch. A larger share stops the run."""
    journal: bool = True
    """Write each turn to a journal on disk, so that `--resume` can resume a killed run."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of `/metrics` for Prometheus; 0 is any free port, None is no endpoint."""
    metrics_host: str = "127.0.0.1"
    """Address of `metrics_port`; `0.0.0.0` lets other machines connect."""
    seed: Seed = 0
    """Seed of every completion with the embedded engine, and of the start of other engines."""
    val: ValSamplingConfig = ValSamplingConfig()
    trace: TraceConfig = TraceConfig()
    """Traces of finished trajectories."""
    agent: AgentConfig = AgentConfig()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    deterministic: bool = False
    """Make two runs with the same settings equal to the last bit. Needs the embedded engine and `trainer.mode=sync`."""

    @model_validator(mode="after")
    def _is_deterministic_if_asked(self) -> RolloutConfig:
        is_embedded = self.engine in ("embedded", "embedded_process") and not self.agent.custom_async_server
        if self.deterministic and not is_embedded:
            raise ConfigError(
                "rollout.deterministic is True: only the embedded engine is deterministic; set rollout.engine=embedded"
            )
        if self.deterministic and self.over_sample > 1:
            raise ConfigError(
                f"rollout.deterministic is True: rollout.over_sample is {self.over_sample}, and the groups that end "
                "first are random; set it to 1"
            )
        return self

    @property
    def default_agent_loop(self) -> str:
        """The name of the agent loop of rows without `agent_name`."""
        has_turns = self.multi_turn.has_tools or self.multi_turn.interaction_config_path
        return self.agent.default_agent_loop or ("tool_agent" if has_turns else "single_turn_agent")

    def sampling_params(self, *, validate: bool = False) -> dict[str, Any]:
        """Return the sampling parameters of requests by name, in evaluations those of `val`."""
        source = self.val if validate else self
        params: dict[str, Any] = {
            "temperature": source.temperature,
            "top_p": source.top_p,
            "top_k": source.top_k,
            "repetition_penalty": 1.0,  # (no effect; code written for verl reads the key)
        }
        if self.top_logprobs:
            params["top_logprobs"] = self.top_logprobs
        if validate and self.val.max_turn_tokens is not None:
            params["max_tokens"] = self.val.max_turn_tokens
        return params
