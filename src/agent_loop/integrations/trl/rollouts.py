"""Rollout layer of one configuration for TRL's trainers, in a thread beside the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from agent_loop.config import Config
from agent_loop.integrations.trl.argument_checks import check_async_args, check_grpo_trainer
from agent_loop.integrations.trl.completions import agent_loop_reward, rollout_output
from agent_loop.integrations.trl.loop_thread import LoopThread
from agent_loop.integrations.trl.row_store import RowStore
from agent_loop.integrations.trl.weights import policy_weights
from agent_loop.integrations.trl.worker import AgentLoopRolloutWorker
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import RowSampler, load_rows, prepare_rows
from agent_loop.types import Row


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
