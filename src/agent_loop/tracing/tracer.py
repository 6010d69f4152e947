"""Hand-over of finished trajectories to the trace writers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import Config, RolloutConfig, TraceConfig
from agent_loop.runtime.background_writer import BackgroundWriter, BatchWriter
from agent_loop.tracing.documents import Json, TokenDecoder, trace_document
from agent_loop.tracing.spans import ROOT_NAME
from agent_loop.trajectory import Trajectory
from agent_loop.types import IntArray, Row

TrajectoryCallback = Callable[[Trajectory], None]
FinishedTrajectory: TypeAlias = tuple[Trajectory, Json]
"""Trajectory that is queued for the writers, and its attributes."""

WRITERS: Mapping[str, tuple[str, str]] = {
    "file": ("trace_files", "FileWriter"),
    "mlflow": ("mlflow", "MlflowWriter"),
    "otel": ("otel", "OtelWriter"),
    "weave": ("weave", "WeaveWriter"),
}

_STEP = re.compile(r"\bstep=(\d+)")


class Tracer:
    """Sender of finished trajectories to the writers that `rollout.trace` names. It never waits for them.

    Args:
        config: Settings of the rollout.
        template: Decodes tokens with `token2text`.

    Raises:
        ConfigError: A writer's package is not installed.
    """

    def __init__(self, config: RolloutConfig, *, template: ChatTemplate) -> None:
        trace = config.trace
        decode = make_token_decoder(template) if trace.token2text and trace.backends else None
        self.background_writers: Sequence[BackgroundWriter[FinishedTrajectory]] = [
            BackgroundWriter(
                make_writer(backend, trace),
                name=f"traces to {backend}",
                max_queued=trace.max_queued,
                convert=lambda item: trace_document(*item, decode=decode),
            )
            for backend in trace.backends
        ]
        self._config = trace
        self._seed = config.seed
        self._num_workers = config.agent.num_workers
        self._default_agent = config.default_agent_loop

    def trace_callback(
        self, rows: Sequence[Row], *, label: str, validate: bool, then: TrajectoryCallback | None
    ) -> TrajectoryCallback | None:
        """Return the callback to call with each trajectory of a rollout as it ends.

        Args:
            rows: Rows of the rollout.
            label: Label of the rollout; `step=N` in it is the training step.
            validate: Whether the rollout is a validation.
            then: Further callback for every trajectory.
        """
        if not self.background_writers:
            return then
        found = _STEP.search(label)
        step = None if found is None else int(found[1])
        traced = self._traced_rows(len(rows), step=step)

        def put_and_pass_on(trajectory: Trajectory) -> None:
            if traced is None or trajectory.group in traced:
                self._put(trajectory, step=step, label=label, validate=validate)
            if then is not None:
                then(trajectory)

        return put_and_pass_on

    def num_dropped(self) -> dict[str, int]:
        """Return the number of trajectories that were not written, by backend."""
        numbers = (background_writer.num_dropped for background_writer in self.background_writers)
        return dict(zip(self._config.backends, numbers, strict=True))

    def close(self) -> None:
        """Wait until queued trajectories are written, for `rollout.trace.flush_timeout_s` at most."""
        if not self.background_writers:
            return
        with ThreadPoolExecutor(len(self.background_writers)) as threads:
            for background_writer in self.background_writers:
                threads.submit(background_writer.close, timeout_s=self._config.flush_timeout_s)

    def _put(self, trajectory: Trajectory, *, step: int | None, label: str, validate: bool) -> None:
        if trajectory.trace is None:  # it ended before a crash and was traced then
            return
        row = trajectory.row
        attributes = {
            "trajectory_id": f"{label}/{trajectory.trajectory_id}" if label else trajectory.trajectory_id,
            "step": step,
            "sample_index": _index_of(row, otherwise=trajectory.group),
            "rollout_n": trajectory.rollout,
            "validate": validate,
            "agent_name": str(row.get("agent_name") or self._default_agent),
            "experiment_name": self._config.experiment_name or "",
            "name": ROOT_NAME,
        }
        for background_writer in self.background_writers:
            background_writer.put((trajectory, attributes))

    def _traced_rows(self, num_rows: int, *, step: int | None) -> frozenset[int] | None:
        """Return the rows whose trajectories are traced; None for all. The choice depends on the seed and step only."""
        per_worker = self._config.max_samples_per_step_per_worker
        if per_worker is None or per_worker * self._num_workers >= num_rows:
            return None
        random = np.random.default_rng([self._seed, step or 0])
        return frozenset(random.permutation(num_rows)[: per_worker * self._num_workers].tolist())


def make_writer(backend: str, config: TraceConfig) -> BatchWriter[Json]:
    """Return the writer of a backend. It connects in `open`."""
    module, name = WRITERS[backend]
    make: Callable[[TraceConfig], Any] = getattr(import_module(f"agent_loop.tracing.{module}"), name)
    return make(config)


def send_traces(documents: Iterable[Json], *, writer: BatchWriter[Json]) -> int:
    """Write stored documents with a writer, and return their number."""
    left, count = iter(documents), 0
    writer.open()
    try:
        while batch := list(islice(left, writer.max_batch)):
            writer.write(batch)
            count += len(batch)
    finally:
        writer.close()
    return count


def make_token_decoder(template: ChatTemplate) -> TokenDecoder:
    """Return a thread-safe function that decodes token ids, control tokens included. Unknown ids are skipped."""
    token_bytes = template.encoder.token_bytes
    if token_bytes is None:
        # A copy, because a tokenizer raises if one thread changes it while another thread uses it.
        tokenizer: Any = copy.deepcopy(template.tokenizer.backend_tokenizer)
        return lambda ids: tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def decode(ids: IntArray) -> str:
        known: list[int] = ids[ids < len(token_bytes)].tolist()
        return b"".join(map(token_bytes.__getitem__, known)).decode("utf-8", "replace")

    return decode


def with_trace_names(config: Config) -> RolloutConfig:
    """Return the rollout's settings, with the run's project and experiment names where `rollout.trace` has none."""
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
