"""Tells writers of finished trajectories."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import Config, RolloutConfig
from agent_loop.tracing.delivery import BatchWriter, Delivery
from agent_loop.tracing.events import TraceAttributes
from agent_loop.tracing.forms import Finished, Form, TextsOf, forms_of
from agent_loop.tracing.texts import decoder_of
from agent_loop.tracing.writers import make_writer
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row

Told = Callable[[Trajectory], None]

_STEP = re.compile(r"\bstep=(\d+)")


class Tracer:
    """Hands finished trajectories to the writers that `rollout.trace` names, without waiting for them.

    Args:
        config: Of the rollout.
        template: Decodes tokens, where texts are asked for.

    Raises:
        ConfigError: A writer's package is not installed.
    """

    def __init__(self, config: RolloutConfig, *, template: ChatTemplate) -> None:
        trace = config.trace
        texts_of = decoder_of(template) if trace.token2text and trace.backends else None
        self.deliveries: Sequence[Delivery[Finished]] = [
            Delivery(
                FormWriter(make_writer(backend, trace), texts_of=texts_of),
                name=f"traces to {backend}",
                max_queued=trace.max_queued,
            )
            for backend in trace.backends
        ]
        self._config = trace
        self._seed = config.seed
        self._num_workers = config.agent.num_workers
        self._default_agent = config.agent.default_agent_loop

    def telling(self, rows: Sequence[Row], *, label: str, validate: bool, then: Told | None) -> Told | None:
        """What to tell of each trajectory of a rollout as it ends.

        Args:
            label: Of the rollout; `step=N` in it is the step.
            then: Told of each too.
        """
        if not self.deliveries:
            return then
        found = _STEP.search(label)
        step = None if found is None else int(found[1])
        chosen = self._chosen(len(rows), step=step)

        def tell(trajectory: Trajectory) -> None:
            if chosen is None or trajectory.group in chosen:
                self._put(trajectory, step=step, label=label, validate=validate)
            if then is not None:
                then(trajectory)

        return tell

    def num_dropped(self) -> dict[str, int]:
        """Trajectories that were not written, by backend."""
        numbers = (delivery.num_dropped for delivery in self.deliveries)
        return dict(zip(self._config.backends, numbers, strict=True))

    def close(self) -> None:
        """Waits until what is queued is written, for `rollout.trace.flush_timeout_s` at most."""
        if not self.deliveries:
            return
        with ThreadPoolExecutor(len(self.deliveries)) as threads:
            for delivery in self.deliveries:
                threads.submit(delivery.close, timeout_s=self._config.flush_timeout_s)

    def _put(self, trajectory: Trajectory, *, step: int | None, label: str, validate: bool) -> None:
        if trajectory.trace is None:  # it ended before a crash, and was told then
            return
        row = trajectory.row
        attributes = TraceAttributes(
            trajectory_id=f"{label}/{trajectory.trajectory_id}" if label else trajectory.trajectory_id,
            step=step,
            sample_index=_index_of(row, otherwise=trajectory.group),
            rollout_n=trajectory.rollout,
            validate=validate,
            agent_name=str(row.get("agent_name") or self._default_agent),
            experiment_name=self._config.experiment_name or "",
        )
        finished = Finished(trajectory, attributes, trajectory.trace)
        for delivery in self.deliveries:
            delivery.put(finished)

    def _chosen(self, num_rows: int, *, step: int | None) -> frozenset[int] | None:
        """The rows whose trajectories are told: the same for the same step, whatever runs beside it. None is all."""
        per_worker = self._config.max_samples_per_step_per_worker
        if per_worker is None or per_worker * self._num_workers >= num_rows:
            return None
        random = np.random.default_rng([self._seed, step or 0])
        return frozenset(random.permutation(num_rows)[: per_worker * self._num_workers].tolist())


class FormWriter:
    """Hands a writer the forms of trajectories, made in the writer's thread."""

    def __init__(self, writer: BatchWriter[Form], *, texts_of: TextsOf | None) -> None:
        self.open = writer.open
        self.close = writer.close
        self.max_batch = writer.max_batch
        self._write = writer.write
        self._texts_of = texts_of

    def write(self, items: Iterable[Finished], /) -> None:
        self._write(forms_of(list(items), texts_of=self._texts_of))


def with_trace_names(config: Config) -> RolloutConfig:
    """The rollout's settings, with the names of the run where `rollout.trace` gives none."""
    trainer, trace = config.trainer, config.rollout.trace
    names = {
        "project_name": trace.project_name or trainer.project_name,
        "experiment_name": trace.experiment_name or trainer.experiment_name or Path(trainer.run_dir).name,
    }
    return config.rollout.model_copy(update={"trace": trace.model_copy(update=names)})


def _index_of(row: Row, *, otherwise: int) -> int:
    index: Any = row.get("index")
    is_number = isinstance(index, (int, np.integer))
    return int(cast(int, index)) if is_number else otherwise
