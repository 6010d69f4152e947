"""Typed settings: YAML plus `key=value` overrides, every key known, every value checked before work starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, cast, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.files.plain_values import parse_override, read_yaml, resolve_interpolation, shown
from agent_loop.types import StopReason

MOST = 2**31 - 1
"""The largest integer of any setting that has no limit of its own."""
Positive = Annotated[int, Field(ge=1, le=MOST)]
NotNegative = Annotated[int, Field(ge=0, le=MOST)]
Seed = NotNegative
Tokens = Annotated[int, Field(ge=1, le=2**24)]
"""A length of sequences. Memory is reserved in proportion to it."""
Replicas = Annotated[int, Field(ge=1, le=10_000)]
"""Number of servers, workers, processes or threads."""
MAX_SAMPLES = 65_536
Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
"""Trajectories per row."""
PositiveSeconds = Annotated[float, Field(gt=0, le=366 * 86_400)]
"""Seconds, at most a year. Clocks and timers overflow for much larger values."""
Share = Annotated[float, Field(ge=0, le=1)]
Coefficient = Annotated[float, Field(ge=0, le=1e6)]
Beta = Annotated[float, Field(ge=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=10)]
WeightTransfer: TypeAlias = Literal["auto", "shared_memory", "cuda_ipc", "broadcast", "disk"]
OnWeightUpdate: TypeAlias = Literal["auto", "keep", "abort"]
AdvantageEstimator: TypeAlias = Literal[
    "grpo", "rloo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"
]
AggregationMode: TypeAlias = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
Level: TypeAlias = Literal["token", "sequence"]
TraceBackend: TypeAlias = Literal["file", "mlflow", "otel", "weave"]
Logger: TypeAlias = Literal["console", "mlflow", "tensorboard", "wandb"]
OptionsT = TypeVar("OptionsT")
SectionT = TypeVar("SectionT", bound=BaseModel)


def _samples_something(temperature: float) -> float:
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"give 0 (greedy) or at least {LOWEST_TEMPERATURE}")
    return temperature


def _keeps_a_candidate(top_k: int) -> int:
    if top_k == 0:
        raise ValueError("give -1 (no limit) or at least 1")
    return top_k


LOWEST_TEMPERATURE = 1e-4
"""Dividing logits by less loses them in float32."""
Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_samples_something)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=MOST), AfterValidator(_keeps_a_candidate)]


class Section(BaseModel):
    """A group of keys. Unknown keys are refused, and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class DataConfig(Section):
    """Where the rows come from."""

    train_files: list[str] = []
    """`.jsonl`, `.json`, `.csv`, `.parquet` or `.arrow` files; globs or folders of such files; folders saved by
    `datasets` (`folder:split`); or `file.py:function` that returns rows."""
    val_files: list[str] = []
    """The same, for evaluation."""
    prompt_key: str = "prompt"
    """The column with the messages (or with one user message as text)."""
    train_batch_size: Positive = 16
    """Prompts per step; each is sampled `rollout.n` times."""
    val_max_rows: Positive | None = None
    """Evaluate on the first so many rows only."""
    shuffle: bool = True
    seed: Seed = 0
    allow_changed_rows: bool = False
    """Resume a training although its training rows have changed since the checkpoint."""


class ModelConfig(Section):
    """The policy."""

    path: str = ""
    """A folder or hub name that `transformers` loads, tokenizer and chat template included."""
    tokenizer_path: str | None = None
    """Where the tokenizer is, if not with the model."""
    chat_template_path: str | None = None
    """A Jinja file that takes the place of the tokenizer's own template."""
    encoder: Literal["auto", "tokenizers", "tiktoken"] = "auto"
    """The library that encodes texts: `auto` is `tiktoken`, which is several times faster, where it is proved to give
    the tokenizer's own ids. `tiktoken` refuses tokenizers for which it is not."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """What the model computes in, while sampling and in training; `auto` is what its files say. Training moves weights
    in float32 whatever this is."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    trust_remote_code: bool = False
    lora_rank: NotNegative = 0
    """Train low-rank adapters of this rank (LoRA) and leave the weights as they are; 0 trains the weights."""
    lora_alpha: Annotated[float, Field(gt=0, le=1e6)] = 16.0
    """What adapters add is multiplied by this and divided by their rank."""
    target_modules: str | list[str] = "all-linear"
    """Which modules get adapters: names, a regular expression, or `all-linear` for all but the head."""


class ValSamplingConfig(Section):
    """How completions are sampled in evaluation, by `agent-loop eval` and in training (`trainer.val_every`)."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    n: Samples = 1
    """Trajectories per row; more than one gives pass@k."""
    max_turn_tokens: Tokens | None = None
    """Tokens of one assistant turn, where that is less than `rollout.multi_turn.max_turn_tokens`."""


class CustomServerConfig(Section):
    """A server class of the user's."""

    path: str
    """A Python file or a module."""
    name: str
    """The class in it, a subclass of `AsyncServerBase`."""


class AgentConfig(Section):
    """Which loops there are and where they run."""

    num_workers: Replicas = 1
    default_agent_loop: str = "single_turn_agent"
    """For rows without `agent_name`."""
    agent_loop_config_path: str | None = None
    """YAML list of `{name, _target_: module.Class, ...}`: loops beside the registered ones."""
    loop_files: list[str] = []
    """Python files to import first, so that their `@register` takes effect."""
    custom_async_server: CustomServerConfig | None = None


class MultiTurnConfig(Section):
    """The limits of conversations, tools and interactions."""

    max_assistant_turns: Positive | None = None
    max_user_turns: Positive | None = None
    """Replies of tools and interactions, each counted once."""
    max_parallel_calls: Positive = 1
    """Calls of one turn that run at once; the rest queue behind them."""
    max_tool_response_length: Tokens = 256
    """Tokens of one tool reply, the truncation marker included."""
    tool_response_truncate_side: Literal["left", "right", "middle"] = "middle"
    """Where the reply is kept: `left` keeps its beginning, `right` its end, `middle` both ends."""
    max_turn_tokens: Tokens | None = None
    """Tokens of one assistant turn; None is what `response_length` leaves."""
    max_invalid_turns: NotNegative = 3
    """So many turns in a row with nothing but malformed calls are answered; one more ends the trajectory."""
    tools: list[str] = []
    """Short names of the kit, functions decorated with `@function_tool`, or `BaseTool` classes, as `file.py:name` or
    `module:name`."""
    tool_config_path: str | None = None
    """YAML: `tools: [{class_name, config, tool_schema, timeout_s, max_concurrent, retries, on_replay}]`."""
    interaction_config_path: str | None = None
    """YAML: `interaction: [{class_name, name, config}]`."""
    environments: dict[str, str] = {}
    """For `environment_agent`: by name, a class `file.py:Class` or `module:Class` whose public methods are the model's
    tools, with `reset` and where it has one `get_reward`."""
    format: str = "hermes"
    """The tool parser's name; `auto` picks the one that fits the chat template."""
    turn_timeout_s: PositiveSeconds | None = None
    """One turn: from the beginning of its completion until the reply of tools, interaction or loop is there. A longer
    one ends the trajectory with `deadline` and the incident `turn_timeout`, its tokens kept. None is no limit."""
    tool_timeout_s: PositiveSeconds = 60.0
    """One call of a tool."""
    interaction_timeout_s: PositiveSeconds = 120.0
    """One reply of an interaction, or the reset of an environment."""
    close_timeout_s: PositiveSeconds = 10.0
    """Closing one tool or interaction."""

    @property
    def has_tools(self) -> bool:
        """Whether the model may call any."""
        return bool(self.tools or self.tool_config_path or self.environments)


class TraceConfig(Section):
    """Where finished trajectories are told, turn by turn and with their times; see `docs/tracing.md`."""

    backend: TraceBackend | list[TraceBackend] | None = None
    """`file` (lines for `agent-loop traces`), `mlflow`, `otel` (OpenTelemetry), `weave`, or a list of them."""
    project_name: str | None = None
    """MLflow's experiment, Weave's project, OpenTelemetry's service; None is `trainer.project_name`."""
    experiment_name: str | None = None
    """An attribute of every trace; None is `trainer.experiment_name`."""
    token2text: bool = False
    """Tell texts, of tokens and of tools' arguments and replies; else token ids and counts."""
    max_samples_per_step_per_worker: Positive | None = None
    """Of each rollout, tell this many rows per worker, all trajectories of each; always the same ones of a step. None
    tells all."""
    path: str = "traces.jsonl"
    """Of `file`, which appends; `${trainer.run_dir}/traces.jsonl` keeps them with the run."""
    tracking_uri: str | None = None
    """Of `mlflow`, as in `http://host:5000` or `sqlite:///traces.db`; None leaves it to MLFLOW_TRACKING_URI."""
    otlp_endpoint: str | None = None
    """Of `otel`, as in `http://host:4318/v1/traces`; None leaves it to OTEL_EXPORTER_OTLP_ENDPOINT."""
    max_queued: Positive = 1000
    """Trajectories that may wait for a writer; more are dropped, and counted."""
    flush_timeout_s: PositiveSeconds = 10.0
    """At the end, how long to wait for what is not written yet."""

    @property
    def backends(self) -> Sequence[TraceBackend]:
        """None, one or several."""
        given = self.backend
        return given if isinstance(given, list) else [given] if given is not None else []


class RolloutConfig(Section):
    """How trajectories are sampled."""

    engine: str = "embedded"
    """`embedded`, `embedded_process`, `vllm`, `sglang`, `scripted`, or `module:Class` for a server class of your own;
    with `server_urls`, `vllm`, `sglang` or `openai`."""
    engine_kwargs: dict[str, Any] = {}
    """Options of the engine itself, by its own names."""
    num_servers: Replicas = 1
    server_urls: list[str] = []
    """Servers of this engine that run already, as in `http://host:8000`; none are started then."""
    start_timeout_s: PositiveSeconds = 600.0
    """How long an engine may take to come up."""
    request_timeout_s: PositiveSeconds | None = 1800.0
    """A request to the servers that takes longer, its time in line included, fails its trajectory; one that goes on at
    another server when its own dies has the time anew. None leaves it to `trajectory_timeout_s`."""
    generate_timeout_s: PositiveSeconds | None = None
    """An assistant turn's completion that takes longer, all its time in line and at whichever servers included, is cut:
    the trajectory ends with `deadline` and the incident `generate_timeout`, and keeps the tokens that came before. Give
    more than a full line takes, or a busy hour cuts what is well. None leaves it to the other limits."""
    weight_transfer: WeightTransfer = "auto"
    """How new weights reach an engine in another process: `auto` is `cuda_ipc` for weights on a GPU and
    `shared_memory` otherwise, or `disk` for a server that runs already; `broadcast` is torch.distributed."""
    on_weight_update: OnWeightUpdate = "auto"
    """What becomes of completions that run when new weights come: `keep` has the engine go on with them, `abort` breaks
    them off and has it go on from their tokens. `auto` keeps them where the engine can."""
    n: Samples = 1
    """Trajectories per prompt: the size of a group."""
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    prompt_length: Tokens = 512
    """Tokens of the first prompt at most."""
    response_length: Tokens = 512
    """Tokens after the first prompt at most: the model's, tools' and interactions' together."""
    truncate_prompt: Literal["no", "left", "right"] = "no"
    """What to do with a longer prompt: end the trajectory, or cut its beginning or its end."""
    pad_to: Literal["longest", "limits", "none"] = "longest"
    """Width of what `generate_sequences` returns: its longest row, or `prompt_length` + `response_length`; `none` is
    nested tensors without padding. `agent-loop train` pads to the longest."""
    free_cache_engine: bool = True
    """Put the servers to sleep between rollouts."""
    trajectory_timeout_s: PositiveSeconds | None = 600.0
    """A trajectory that takes longer ends with `deadline`, its tokens kept."""
    over_sample: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """In training, start this many times `data.train_batch_size` prompts, keep the groups that end first and cancel the
    rest. Saves waiting for stragglers; favours prompts that are answered quickly."""
    max_concurrent: Positive | Literal["auto"] | None = "auto"
    """Trajectories in flight per worker. `auto` begins new ones as long as the servers do not have to compute again
    what they had in their KV caches, and bounds nothing where servers tell nothing of that; None begins all at once."""
    longest_first: bool = False
    """Of the completions that wait for a place at a server, first the one whose trajectory has the most turns left, as
    the run so far lets one expect; else in the order in which they came."""
    watchdog_s: PositiveSeconds | None = 120.0
    """When nothing has moved for so long, the log says what each trajectory waits for; None says nothing."""
    max_failed_share: Share = 0.5
    """A batch with a larger share of failed trajectories stops the run."""
    journal: bool = True
    """Keep each turn on disk as it happens, so that a training or an `agent-loop rollout` that is killed goes on with
    `--resume` where it was."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Where Prometheus finds `/metrics` while the rollout's manager is open; 0 is any free port, None is none."""
    metrics_host: str = "127.0.0.1"
    """The address of that port; `0.0.0.0` lets other machines read it."""
    seed: Seed = 0
    """Decides, with the embedded engine, what every completion samples: see `deterministic`. Other engines begin with
    it."""
    val: ValSamplingConfig = ValSamplingConfig()
    trace: TraceConfig = TraceConfig()
    """Tells tracing systems of trajectories."""
    agent: AgentConfig = AgentConfig()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    deterministic: bool = False
    """Make two runs with the same settings equal to the last bit, weights included, also when one of them was
    interrupted and resumed. Needs the embedded engine, which then computes each completion by itself and takes several
    times as long, and `trainer.mode=sync`. Without it, runs with the same seed differ by what batches of other shapes
    round differently."""

    @field_validator("deterministic")
    @classmethod
    def _can_be_deterministic(cls, value: bool, info: ValidationInfo) -> bool:
        engine, over_sample = info.data.get("engine"), info.data.get("over_sample", 1.0)
        if not value:
            return value
        if engine not in ("embedded", "embedded_process") or _custom_server(info) is not None:
            raise ValueError("only the embedded engine can; set rollout.engine=embedded")
        if over_sample > 1:
            raise ValueError(
                f"rollout.over_sample is {over_sample}, and which groups end first is chance; set it to 1"
            )
        return value


def _custom_server(info: ValidationInfo) -> CustomServerConfig | None:
    agent: AgentConfig | None = info.data.get("agent")
    return None if agent is None else agent.custom_async_server


class RewardConfig(Section):
    """How trajectories are scored."""

    function: str | None = None
    """`file.py:name` or `module:name` of `(output, row) -> float | dict`, sync or async."""
    batch: bool = False
    """Call `function` as `(outputs, rows) -> list of float | dict`, once for all trajectories of a row."""
    timeout_s: PositiveSeconds = 60.0
    """Scoring one trajectory; with `batch`, all trajectories of a row."""
    success_threshold: float = 1.0
    """A trajectory with at least this reward counts as a success."""


class AlgorithmConfig(Section):
    """How rewards become advantages."""

    adv_estimator: AdvantageEstimator = "grpo"
    """What a trajectory is compared with: `grpo` and `rloo` the others of its group, `remax` a greedy one,
    `reinforce_plus_plus` the whole batch, `reinforce_plus_plus_baseline` its group and then the batch, `gae` what a
    critic expected."""
    norm_adv_by_std_in_grpo: bool = True
    """False, with `actor.loss_agg_mode=seq-mean-token-sum-norm`, is Dr. GRPO."""
    drop_zero_variance_groups: bool = True
    """Groups in which every trajectory got the same reward carry no signal and are left out, where trajectories are
    compared with their group."""
    max_refills: NotNegative = 0
    """Dynamic sampling (DAPO, arXiv 2503.14476): so often, groups in which every trajectory got the same reward are
    replaced by groups of other rows before a step is trained."""
    turn_reward_weight: Coefficient = 0.0
    """How much the rewards of turns (a tool's `execute`, an interaction's score) count beside that of the trajectory; 0
    leaves them out. `grpo`: this times their process advantage (DeepSeekMath, section 4.1.3) is added at each token.
    `rloo`, `remax`: this times their sum is added to the trajectory's reward. Others: they are rewards of their
    tokens."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """`reinforce_plus_plus` and `gae`: a reward counts so much less for each token of the model's before it."""
    lam: Share = 1.0
    """`gae`: 1 trusts rewards alone, 0 the critic's next value."""
    whiten_advantages: bool = True
    """`gae`: give the advantages of all trained tokens mean 0 and variance 1, as `reinforce_plus_plus` always does."""
    kl_reward_coef: Coefficient = 0.0
    """Weight of the KL penalty to the policy at the start of the run that is taken off each token's reward."""
    kl_reward_type: KLEstimator = "k1"
    """How it is estimated."""
    overlong_buffer: Tokens | None = None
    """Responses that end in the last so many tokens of `rollout.response_length` lose reward, the more the longer they
    are (DAPO's soft punishment)."""
    overlong_penalty: Coefficient = 1.0
    """What a response of full length loses."""
    untrained_stop_reasons: list[StopReason] = []
    """Trajectories that ended so are not trained, though their rewards count in their groups; `[response_length]` is
    DAPO's overlong filtering."""


class OptimConfig(Section):
    """How a model is trained."""

    lr: LearningRate = 1e-6
    weight_decay: Coefficient = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    warmup_steps: NotNegative = 0
    """Steps in which the learning rate rises to `lr`."""
    decay_steps: Positive | None = None
    """Steps, from the first one on, in which it falls in a straight line to `min_lr_share` of `lr`; None keeps it."""
    min_lr_share: Share = 0.1
    """Used with `decay_steps`."""
    ppo_epochs: Positive = 1
    """Passes over the batch per step."""
    ppo_mini_batches: Positive = 1
    """Optimiser steps per pass."""
    max_tokens_per_micro_batch: Tokens = 16384
    """Tokens in one forward and backward pass, padding included."""
    use_packing: bool = False
    """Put several short rows into one line of the input instead of padding each. A model that computes such rows
    otherwise than alone is refused at the start."""
    share_prefixes: bool = False
    """Compute what rows of a micro-batch begin with alike, such as the prompt of a group, once for all of them; packs
    rows too. A model that computes such rows otherwise than alone is refused at the start; full attention is needed as
    far as rows are longer than the model's windows."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """The norm to which gradients are cut."""
    loss_agg_mode: AggregationMode = "token-mean"
    """`token-mean`: every token counts the same. `seq-mean-token-mean`: every trajectory does.
    `seq-mean-token-sum-norm`: a trajectory's sum is divided by `loss_length`, whatever its length (Dr. GRPO)."""
    loss_length: Tokens | None = None
    """None is `rollout.response_length`."""
    gradient_checkpointing: bool = False


class CorrectionConfig(Section):
    """What is done about rollout and training giving the same token different log-probs."""

    kind: Literal["none", "truncate", "mask"] = "none"
    """A token's loss is weighed with the ratio of both probabilities: `truncate` cuts it at `max_ratio` (TIS), `mask`
    leaves tokens beyond either bound out (MIS)."""
    level: Level = "token"
    """Whose ratio: the token's own, or the product over its trajectory."""
    min_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Of `mask`."""
    max_ratio: Annotated[float, Field(gt=1, le=1e6)] = 2.0


class ActorConfig(OptimConfig):
    """How advantages become weights of the policy."""

    policy_loss: Literal["ppo", "gspo"] = "ppo"
    """Whose ratio is clipped: `ppo` each token's, `gspo` the geometric mean over the trajectory; the latter wants
    bounds around 0.0003 and `loss_agg_mode=seq-mean-token-mean`."""
    clip_ratio_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_ratio_high: Annotated[float, Field(gt=0, le=1e6)] = 0.28
    clip_ratio_c: Annotated[float, Field(gt=1, le=1e6)] | None = None
    """Dual clip: where the advantage is negative, a ratio above this teaches nothing; None is no such bound."""
    old_log_probs: Literal["rollout", "recompute"] = "rollout"
    """What the ratio is measured against: what the servers gave, or what the trainer finds before its first step.
    Servers that give none are not asked."""
    correction: CorrectionConfig = CorrectionConfig()
    """Needs `old_log_probs=recompute`."""
    kl_loss_coef: Coefficient = 0.0
    """Weight of the KL penalty to the policy at the start of the run; 0 keeps no reference."""
    kl_loss_type: KLEstimator = "k3"
    """How it is estimated; the gradient of `k1` is 0 in the mean, so it only serves to compare."""
    entropy_coeff: Coefficient = 0.0

    @field_validator("correction")
    @classmethod
    def _needs_recomputed_log_probs(cls, value: CorrectionConfig, info: ValidationInfo) -> CorrectionConfig:
        if value.kind != "none" and info.data.get("old_log_probs") != "recompute":
            raise ValueError("it needs the trainer's own log-probs; set actor.old_log_probs=recompute")
        return value


class CriticConfig(OptimConfig):
    """How the critic of `algorithm.adv_estimator=gae` learns what to expect."""

    path: str = ""
    """A folder or hub name that `transformers` loads with a head of one number per token; empty is `model.path`."""
    lr: LearningRate = 1e-5
    clip_range_value: Annotated[float, Field(gt=0, le=1e6)] | None = 0.5
    """How far an update may move a value before the loss stops pulling; None is no bound."""
    head_start: NotNegative = 0
    """Steps in which the critic learns alone."""


class RayConfig(Section):
    """Where servers and workers run under `trainer.runtime: ray`."""

    address: str | None = None
    """Of a Ray cluster that runs already, as in `auto` or `10.0.0.1:6379`; None starts one on this machine and ends it
    with the run."""
    host: str | None = None
    """Address of this machine at which other machines can reach a cluster that is started here; Ray then listens on all
    interfaces. None keeps the cluster to this machine, on loopback."""
    num_cpus_per_worker: Coefficient = 1.0
    """CPUs that Ray sets aside for each of `rollout.agent.num_workers`, which are spread over the nodes."""
    num_cpus_per_server: Coefficient = 1.0
    num_gpus_per_server: Coefficient = 0.0
    """A server runs on a node that has them, and comes back to it if it can."""
    num_cpus_per_learner: Coefficient = 1.0
    """For each of `trainer.num_processes` but the first, which is the driver."""
    num_gpus_per_learner: Coefficient = 0.0
    """The same; 1 for training on GPUs."""
    runtime_env: dict[str, Any] = {}
    """Ray's own: working directory, environment variables, packages. Needed where nodes do not share this folder."""
    restart_timeout_s: PositiveSeconds = 300.0
    """How long a batch without a living worker waits for one to come back."""
    max_row_restarts: Positive = 5
    """A row is run again so often when its worker dies; at last alone, to see whether it is what kills them."""


class TrainerConfig(Section):
    """How long, where to, and how often."""

    total_steps: Positive = 100
    run_dir: Annotated[str, Field(min_length=1)] = "runs/train"
    """Metrics, checkpoints and trajectories go here."""
    project_name: str = "agent_loop"
    """Under which loggers and traces keep the run."""
    experiment_name: str = ""
    """Its name there; empty is that of `run_dir`."""
    logger: Logger | list[Logger] = []
    """Where the metrics of each step go besides `metrics.jsonl` and the console: `mlflow`, `tensorboard`, `wandb`, or a
    list of them. `console` adds nothing."""
    val_every: Positive | None = None
    """Evaluate every so many steps, and at the end."""
    val_before_train: bool = False
    save_every: Positive | None = 20
    """Write a checkpoint every so many steps, and at the end."""
    keep_checkpoints: Positive = 2
    keep_trajectories: NotNegative | None = None
    """The trajectories of the newest so many steps stay in `run_dir/trajectories`, one Parquet file each; 0 keeps none,
    None all."""
    num_threads: Replicas = 1
    """Threads for training on a CPU. A process that trains alone cuts a mini-batch into at least as many micro-batches,
    which it computes at once; of several processes, each gives torch so many threads."""
    num_processes: Replicas = 1
    """So many processes train together, each with a shard of the models: on GPUs of their own, or on the CPU. They are
    processes of this machine, or with `runtime: ray` of the cluster. Leave it at 1 where `torchrun` starts them."""
    seed: Seed = 0
    mode: Literal["sync", "async"] = "sync"
    """`sync`: roll out, train, roll out. `async`: the next steps' rollouts run while a step is trained, and take new
    weights as these come; needs devices of their own for servers and trainer, or a CPU."""
    max_staleness: NotNegative = 1
    """With `mode: async`: the weights that sampled a token are at most so many versions older than those that are
    trained on it. So many steps are rolled out ahead; 0 is the same as `sync`, 1 is one step off."""
    runtime: Literal["local", "ray"] = "local"
    """Where servers, agent loops and further training processes run: on this machine, or on a Ray cluster."""
    ray: RayConfig = RayConfig()
    """Used with `runtime: ray`."""


class Config(Section):
    """All settings of a run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()

    @model_validator(mode="after")
    def _is_synchronous_if_deterministic(self) -> Config:
        if self.rollout.deterministic and self.trainer.mode == "async":
            raise ConfigError(
                "rollout.deterministic is true and trainer.mode is 'async': when new weights reach a completion is "
                "chance; set trainer.mode=sync"
            )
        return self


LONG_NAMES: Mapping[str, str] = {
    "actor_rollout_ref.model": "model",
    "actor_rollout_ref.rollout": "rollout",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.val_kwargs": "rollout.val",
    "actor_rollout_ref.actor": "actor",
    "actor_rollout_ref.actor.optim.lr": "actor.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "actor.weight_decay",
    "actor_rollout_ref.actor.optim.betas": "actor.betas",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "actor.warmup_steps",
    "actor_rollout_ref.actor.loss_scale_factor": "actor.loss_length",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_reward_coef",
    "critic.model.path": "critic.path",
    "critic.optim.lr": "critic.lr",
    "critic.optim.weight_decay": "critic.weight_decay",
    "critic.optim.betas": "critic.betas",
    "critic.optim.lr_warmup_steps": "critic.warmup_steps",
    "critic.cliprange_value": "critic.clip_range_value",
    "trainer.critic_warmup": "critic.head_start",
    "data.max_prompt_length": "rollout.prompt_length",
    "data.max_response_length": "rollout.response_length",
    "trainer.default_local_dir": "trainer.run_dir",
    "trainer.total_training_steps": "trainer.total_steps",
    "trainer.save_freq": "trainer.save_every",
    "trainer.test_freq": "trainer.val_every",
    "custom_reward_function.path": "reward.function",
}
"""Names of other systems' configurations and the keys that they mean here; the longest match counts."""

FIXED_LONG_NAMES: Mapping[str, Any] = {
    "data.return_raw_chat": True,
    "actor_rollout_ref.rollout.mode": "async",
    "actor_rollout_ref.rollout.multi_turn.enable": True,
}
"""Switches of other systems that cannot be set otherwise here: accepted with this value, refused with another."""

WORDS_OF_LONG_NAMES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "reward_model.reward_manager": ("reward.batch", {"naive": False, "batch": True}),
    "reward.reward_manager.name": ("reward.batch", {"naive": False, "batch": True}),
}
"""Names of other systems' configurations whose values are words: the key here, and what each word means."""


def load_config(path: str | Path | None = None, *, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and `key=value` overrides.

    Relative paths in the file are relative to where the command runs. `${...}` interpolation is OmegaConf's; it sees
    the defaults of keys that are not set.

    Raises:
        ConfigError: The file is missing or not YAML, a key is unknown, or a value is out of range.
    """
    where = str(path or "overrides")
    given: Any = {} if path is None else read_yaml(path, what="config file")
    if not isinstance(given, dict):
        raise ConfigError(f"config file {str(path)!r} holds a list; it must hold sections with keys")
    merged = _with_short_names(cast(dict[str, Any], given))
    for override in overrides:
        merged = _merged(merged, _with_short_names(parse_override(override)))
    return parse_section(Config, _resolved(merged, where=where), where=where)


def _resolved(values: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Resolve interpolation, where there is any."""
    if "${" not in repr(values):
        return values
    defaults = Config().model_dump(mode="json")
    return resolve_interpolation(_merged(defaults, values), where=where)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees of keys; where both have a value, that of `above` counts."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(cast(Mapping[str, Any], old), cast(Mapping[str, Any], value)) if both else value
    return merged


def parse_section(section: type[SectionT], values: Mapping[str, Any], *, where: str) -> SectionT:
    """Checks a mapping against a section.

    Raises:
        ConfigError: One line per fault: what, got, do.
    """
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        raise _refusal(error, section, where=where) from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def parse_options(options: type[OptionsT], values: Mapping[str, Any], *, where: str) -> OptionsT:
    """Check a mapping against the fields of a dataclass.

    Raises:
        ConfigError: One line per fault: what, got, do.
    """
    try:
        return TypeAdapter(options).validate_python(dict(values))
    except ValidationError as error:
        raise _refusal(error, None, where=where) from None


def _refusal(error: ValidationError, section: type[BaseModel] | None, *, where: str) -> ConfigError:
    faults: dict[str, list[str]] = {}
    for fault in error.errors():
        what, do = _explain(fault, section or BaseModel)
        faults.setdefault(what, []).append(do)  # a value that may be of several kinds has one for each
    lines = [what + ", or ".join(filter(None, dos)) for what, dos in faults.items()]
    return ConfigError(f"{where}: " + "\n".join(lines))


def _with_short_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrites long names key by key, so that they mix freely with short ones."""
    short: dict[str, Any] = {}
    for key, value in _flatten(values):
        if key in FIXED_LONG_NAMES:
            if value != FIXED_LONG_NAMES[key]:
                raise ConfigError(
                    f"{key} is {value!r}; only {FIXED_LONG_NAMES[key]!r} exists here, so leave it out"
                )
            continue
        if key in WORDS_OF_LONG_NAMES:
            key, value = _read_word(key, value)
        _put(short, _short_name(key).split("."), value)
    return short


def _read_word(name: str, word: Any) -> tuple[str, Any]:
    """Return the key and the value that a word of another system means."""
    key, meanings = WORDS_OF_LONG_NAMES[name]
    if not isinstance(word, str) or word not in meanings:
        raise ConfigError(f"{name} is {word!r}; only {' and '.join(map(repr, meanings))} exist here")
    return key, meanings[word]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and not name.endswith(("engine_kwargs", "runtime_env")):
            flat += _flatten(cast(Mapping[str, Any], value), prefix=f"{name}.")
        else:
            flat.append((name, cast(Any, value)))
    return flat


def _short_name(key: str) -> str:
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        short = LONG_NAMES.get(".".join(parts[:length]))
        if short is not None:
            return ".".join([short, *parts[length:]])
    return key


def _put(target: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(path)}: {part!r} is given both a value and keys of its own")
        target = cast(dict[str, Any], inner)
    target[path[-1]] = value


def _explain(fault: ErrorDetails, section: type[BaseModel]) -> tuple[str, str]:
    """What is wrong, and what to do; nothing where the first says it."""
    location = _without_kind([str(part) for part in fault["loc"]], section)
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        owner = _section_at(section, location[:-1])
        near = did_you_mean(location[-1], owner.model_fields) if owner is not None else ""
        elsewhere = [name for name in all_keys(section) if name.rpartition(".")[2] == location[-1]]
        if elsewhere:
            near = f"; did you mean {elsewhere[0]!r}?"
        return f"unknown key {key!r}{near}", ""
    if fault["type"] == "missing":
        return f"key {key!r} is missing", ""
    if fault["type"] in ("model_type", "model_attributes_type"):
        owner = _section_at(section, location) or section
        return (
            f"{key} is {shown(fault['input'])}: ",
            f"give it keys, such as {key}.{next(iter(owner.model_fields))}",
        )
    message = fault["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{key} is {shown(fault['input'])}: ", message


def _without_kind(location: list[str], section: type[BaseModel]) -> list[str]:
    """Where a value may be of several kinds, pydantic names behind its key the kind that was tried."""
    for depth, name in enumerate(location):
        owner = _section_at(section, location[:depth])
        info = owner.model_fields.get(name) if owner is not None else None
        if info is not None and get_origin(info.annotation) in (Union, UnionType):
            has_kinds = len({*get_args(info.annotation)} - {type(None)}) > 1
            return [*location[: depth + 1], *location[depth + 1 + has_kinds :]]
    return location


def all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key of a section and of those below it, dotted."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += all_keys(inner, prefix=f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def _section_at(section: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    for part in path:
        info = section.model_fields.get(part)
        inner = info.annotation if info is not None else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return None
        section = inner
    return section
