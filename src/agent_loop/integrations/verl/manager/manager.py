"""The class that verl's trainer loads by `agent_loop_manager_class`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self
from uuid import uuid4

import numpy as np
from omegaconf import DictConfig

from agent_loop.distributed.ray_module import load_ray
from agent_loop.integrations.verl.manager.batch import joined
from agent_loop.integrations.verl.manager.settings import load_verl, read_settings
from agent_loop.integrations.verl.manager.stored import RunFolder, batch_name
from agent_loop.integrations.verl.manager.worker import VerlRolloutWorker

# verl's decorators: `auto_await` lets trainers await the method or not, and `SkipManager` replays stored rollouts.
_auto_await: Any = load_verl("verl.utils.ray_utils:auto_await")
_skippable: Any = load_verl("verl.utils.skip:SkipManager").annotate(role="rollout")


class VerlAgentLoopManager:
    """Agent loop manager for verl's trainer. It sends each batch to `rollout.agent.num_workers` actors."""

    def __init__(self, workers: Sequence[Any], *, folder: RunFolder) -> None:
        self._workers = workers
        self._folder = folder

    @classmethod
    def create(
        cls,
        config: DictConfig,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> Self:
        """Create the manager and its actors, spread over the nodes. Called by verl's trainer."""
        read_settings(config)
        ray = load_ray()
        nodes = [
            node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0
        ]
        affinity = load_verl("ray.util.scheduling_strategies:NodeAffinitySchedulingStrategy")
        actor_class = ray.remote(VerlRolloutWorker)
        return cls(
            [
                actor_class.options(
                    name=f"agent_loop_worker_{number}_{uuid4().hex[:8]}",
                    scheduling_strategy=affinity(node_id=nodes[number % len(nodes)], soft=True),
                ).remote(config, llm_client, teacher_client, reward_loop_worker_handles, number=number)
                for number in range(config.actor_rollout_ref.rollout.agent.num_workers)
            ],
            folder=RunFolder(config),
        )

    def _generate(self, prompts: Any) -> Any:
        """Run a batch of verl's trainer.

        A `DataProto` of any size gives a `DataProto`, which a trainer may await or not. A `TensorDict` returns at once,
        and its trajectories go to TransferQueue.
        """
        if isinstance(prompts, load_verl("tensordict:TensorDict")):
            return self._start_batch(prompts)
        return self._generate_batch(prompts)

    generate_sequences = _auto_await(_generate)

    @_skippable
    async def _generate_batch(self, prompts: Any) -> Any:
        if "priority" not in prompts.non_tensor_batch:
            prompts.non_tensor_batch["priority"] = np.arange(len(prompts), dtype=np.int64)
        bounds = _bounds(len(prompts), len(self._workers))
        uids = prompts.non_tensor_batch.get("uid", range(len(prompts)))
        places = self._folder.places(batch_name(prompts.meta_info), list(uids))
        calls = [
            worker.generate_batch.remote(prompts[start:end], places=places[start:end])
            for worker, (start, end) in zip(self._workers, bounds, strict=False)
        ]
        return joined([await call for call in calls])

    def _start_batch(self, prompts: Any) -> None:
        bounds = _bounds(len(prompts), len(self._workers))
        first = self._folder.first_group(batch_name(prompts), num_groups=len(prompts))
        calls = [
            worker.start_batch.remote(prompts[start:end], first_group=first + start)
            for worker, (start, end) in zip(self._workers, bounds, strict=False)
        ]
        load_ray().get(calls)


def _bounds(num_rows: int, num_workers: int) -> list[tuple[int, int]]:
    """Return the ranges of rows of each worker, without empty ones. Sizes differ by at most one."""
    num_workers = min(num_rows, num_workers)
    cuts = [num_rows * number // num_workers for number in range(num_workers + 1)]
    return list(pairwise(cuts))
