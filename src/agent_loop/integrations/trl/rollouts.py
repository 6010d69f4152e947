"""Rollout layer of one configuration for TRL's trainers, in a thread beside the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from types import TracebackType
from typing import Any, Self, cast

from agent_loop.config import Config, RolloutConfig
from agent_loop.errors import ConfigError, DataError
from agent_loop.integrations.trl.completions import agent_loop_reward, rollout_output
from agent_loop.integrations.trl.worker import AgentLoopRolloutWorker, LoopThread, policy_weights
from agent_loop.loading import import_extra
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import RowSampler, load_rows, prepare_rows
from agent_loop.types import Message, Row


class AgentLoopRollouts:
    """Loops, tools, rewards and servers of a configuration, for `GRPOTrainer` and `AsyncGRPOTrainer`.

    Open it with `with`, which starts the servers. Single use. The sections `model`, `rollout`, `reward` and `data` of
    the configuration are used; TRL decides what the other sections would.

    Args:
        config: Configuration as for `agent-loop train`. The servers start with the weights at `model.path`.
        manager: Replaces the manager that the configuration describes. It is closed on exit.
    """

    reward_func = staticmethod(agent_loop_reward)
    """For `reward_funcs`: the reward from the configuration's reward function, the tools or the loop."""

    def __init__(self, config: Config, *, manager: AgentLoopManager | None = None) -> None:
        self._config = config
        self._given_manager = manager
        self._row_store = RowStore()
        self._thread: LoopThread | None = None
        self._manager: AgentLoopManager | None = None
        self._workers: list[AgentLoopRolloutWorker] = []
        self._published: tuple[Any, int] | None = None
        """Trainer whose weights the servers have, and the step of these weights."""

    def dataset(self, rows: Iterable[Row] | None = None) -> Any:
        """Return the data set for a trainer. Its prompts refer to the rows, whose columns stay unchanged.

        Args:
            rows: Rows with the column `data.prompt_key` or `raw_prompt`; None loads `data.train_files`.

        Raises:
            DataError: A row has no prompt, or there are no rows.
            ConfigError: TRL is not installed.
        """
        return self._row_store.dataset(self._prepared(rows))

    def rollout_func(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Publish the trainer's weights and run one trajectory per prompt. For `GRPOTrainer(rollout_func=...)`.

        Evaluation uses the sampling parameters of `rollout.val`.

        Raises:
            ConfigError: The trainer's arguments do not agree with the configuration.
            DataError: The trainer's data set is not from `dataset`, or the loop's output is not supported by TRL.
            RolloutError: More trajectories failed than `rollout.max_failed_share` allows.
            WeightsError: The trainer's model is not the servers' model.
        """
        thread, manager = self._require_open()
        check_grpo_trainer(trainer, config=self._config.rollout)
        rows, size = self._row_store.rows_of(prompts)
        step: int = trainer.state.global_step
        self._publish(trainer, step=step)
        trajectories = thread.run(
            manager.run(rows, n=size, validate=not trainer.model.training, label=f"step={step}")
        )
        return rollout_output(
            trajectories,
            max_tokens=trainer.args.max_completion_length,
            pad_token_id=manager.template.pad_token_id,
        )

    def worker(self, rows: Iterable[Row] | None = None, *, args: Any) -> AgentLoopRolloutWorker:
        """Return a worker for `AsyncGRPOTrainer(rollout_worker=worker, weight_transfer=worker.weight_transfer)`.

        Args:
            rows: Rows as for `dataset`, repeated without limit in the order of `data.shuffle` and `data.seed`.
            args: The trainer's `AsyncGRPOConfig`.

        Raises:
            ConfigError: The arguments do not agree with the configuration.
            DataError: A row has no prompt, or there are no rows.
        """
        thread, manager = self._require_open()
        check_async_args(args, config=self._config.rollout)
        data = self._config.data
        sampler: RowSampler[Row] = RowSampler(
            self._prepared(rows), batch_size=1, shuffle=data.shuffle, seed=data.seed
        )
        worker = AgentLoopRolloutWorker(manager, thread=thread, sampler=sampler, args=args)
        self._workers.append(worker)
        return worker

    def __enter__(self) -> Self:
        self._thread = LoopThread("agent-loop-trl")
        try:
            self._manager = self._thread.run(self._open())
        except BaseException:
            self._thread.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread, manager = self._require_open()
        try:
            for worker in self._workers:
                worker.stop()
            thread.run(manager.close())
        finally:
            self._thread = self._manager = self._published = None
            thread.close()

    async def _open(self) -> AgentLoopManager:
        manager = self._given_manager or AgentLoopManager.from_config(self._config)
        await manager.start()
        return manager

    def _require_open(self) -> tuple[LoopThread, AgentLoopManager]:
        if self._thread is None or self._manager is None:
            raise RuntimeError(
                "AgentLoopRollouts is not open; use it inside `with AgentLoopRollouts(config) as rollouts:`"
            )
        return self._thread, self._manager

    def _publish(self, trainer: Any, *, step: int) -> None:
        """Publish the trainer's weights once per step. All rollouts of a step, as in evaluation, use the same
        weights."""
        if self._published is not None and self._published[0] is trainer and self._published[1] == step:
            return
        thread, manager = self._require_open()
        model = trainer.accelerator.unwrap_model(trainer.model)
        thread.run(manager.update_weights(policy_weights(model), weight_version=step))
        self._published = trainer, step

    def _prepared(self, rows: Iterable[Row] | None) -> list[dict[str, Any]]:
        data = self._config.data
        if rows is None:
            return load_rows(data.train_files, prompt_key=data.prompt_key, workspace=data.workspace)
        return prepare_rows(rows, prompt_key=data.prompt_key)


def check_grpo_trainer(trainer: Any, *, config: RolloutConfig) -> None:
    """Check that a `GRPOTrainer` trains on exactly what the servers sample."""
    if trainer.tools or trainer.environment_factories is not None:
        raise ConfigError(
            "GRPOTrainer has tools= or environment_factory=, which it would run in addition to the agent loop; "
            "remove them and name them in rollout.multi_turn.tools or rollout.multi_turn.environments"
        )
    if trainer.args.use_vllm:
        raise ConfigError(
            "GRPOConfig.use_vllm is True, but the servers of the configuration sample; set use_vllm=False, and "
            "rollout.engine=vllm to sample with vLLM"
        )
    if trainer.accelerator.num_processes > 1:
        raise ConfigError(
            f"GRPOTrainer runs in {trainer.accelerator.num_processes} processes, each of which would start its own "
            "servers; run it in one process, or train with agent-loop train"
        )
    _check_sampling(trainer.args, config=config)


def check_async_args(args: Any, *, config: RolloutConfig) -> None:
    """Check that the arguments of an `AsyncGRPOTrainer` agree with the configuration."""
    if args.distributed_state is not None and args.distributed_state.num_processes > 1:
        raise ConfigError(
            f"AsyncGRPOConfig is for {args.distributed_state.num_processes} processes, each of which would create a "
            "worker; run it in one process, or train with agent-loop train"
        )
    _check_sampling(args, config=config)


def _check_sampling(args: Any, *, config: RolloutConfig) -> None:
    name = type(args).__name__
    if args.temperature != config.temperature:
        raise ConfigError(
            f"{name}.temperature is {args.temperature} but rollout.temperature is {config.temperature}, so the trainer "
            "would compute log-probs of another policy than the sampling one; make them equal"
        )
    if args.max_completion_length < config.response_length:
        raise ConfigError(
            f"{name}.max_completion_length is {args.max_completion_length}, below rollout.response_length "
            f"{config.response_length}; raise the first or lower the second"
        )


ROW_KEY = "agent_loop_row"
"""Key in each message of a TRL prompt that holds the number of the row."""


class RowStore:
    """Store of unchanged rows, whose numbers are carried by the prompts for TRL."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def dataset(self, rows: Sequence[Row]) -> Any:
        """Return a `datasets.Dataset` with one column, `prompt`, whose messages hold the number of their row."""
        first = len(self._rows)
        self._rows.extend(rows)
        prompts = [
            [_with_row_number(message, number=number) for message in row["raw_prompt"]]
            for number, row in enumerate(rows, start=first)
        ]
        datasets = import_extra("datasets", extra="trl", by=__name__)
        return datasets.Dataset.from_dict({"prompt": prompts})

    def rows_of(self, prompts: Sequence[Any]) -> tuple[list[Row], int]:
        """Return the rows of prompts, and the number of samples per row.

        Returns:
            Each row once and the group size if every row is repeated equally often, as TRL does. Otherwise one row per
            prompt and 1. In both cases the order of the samples is the order of the prompts.
        """
        numbers = [self._number_of(prompt) for prompt in prompts]
        runs = [(number, len(list(run))) for number, run in groupby(numbers)]
        sizes = {size for _, size in runs}
        if len(sizes) == 1:
            return [self._rows[number] for number, _ in runs], sizes.pop()
        return [self._rows[number] for number in numbers], 1

    def _number_of(self, prompt: Any) -> int:
        messages = cast(list[Any], prompt) if isinstance(prompt, list) else []
        first = cast(dict[str, Any], messages[0]) if messages and isinstance(messages[0], dict) else {}
        number = first.get(ROW_KEY)
        if not isinstance(number, int) or not 0 <= number < len(self._rows):
            raise DataError(
                f"a prompt has {ROW_KEY}={number!r}, which is not a row of these rollouts; pass "
                "train_dataset=rollouts.dataset(rows) to the trainer, and eval_dataset likewise"
            )
        return number


def _with_row_number(message: Message, *, number: int) -> dict[str, Any]:
    return {"role": message["role"], "content": _text(message.get("content")), ROW_KEY: number}


def _text(content: Any) -> str:
    if not isinstance(content, list):
        return str(content or "")
    parts = [
        cast(dict[str, Any], part) if isinstance(part, dict) else {"text": part}
        for part in cast(list[Any], content)
    ]
    return "".join(str(part.get("text") or "") for part in parts)
