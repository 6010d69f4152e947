"""Side of this package on Ray: a manager with `trainer.runtime: ray` turns rows into a padded batch.

    python -m overhead.ours_on_ray FOLDER ENCODER [--workers N] [--copies N] [--batches N] [--halves]

`--copies` is the number of copies of the workload in a batch, and `--batches` the number of batches in a round. Only
the engine is a stub, which returns completions without delay in its own server actor. Needs `pip install
"agent-loop[ray]"`.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from agent_loop.config import AgentConfig, Config, ModelConfig, RayConfig, TrainerConfig
from agent_loop.distributed.manager import ClusterManager
from agent_loop.types import Row
from overhead.halves import AlternatingWorkers
from overhead.ours import columns_of, rollout_config
from overhead.processes import tree_cpu_seconds
from overhead.rounds import Columns, Runner, serve
from overhead.shapes import Shape, Workload

REPLIES_MODULE = """
from pathlib import Path

from overhead import tools
from overhead.shapes import Workload

tools.REPLIES.update(Workload.read(Path({folder!r}), {scenario!r}).replies)
"""
"""Source of a module that loads the tools' results. Each worker imports it."""


class OurRunnerOnRay(Runner):
    """Runner with default settings except for lengths and names.

    Args:
        workload: The workload.
        config: The configuration of the cluster.
        num_copies: Number of copies of the workload in a batch.
        on_halves: Whether each worker runs on half a core.
    """

    def __init__(self, workload: Workload, *, config: Config, num_copies: int, on_halves: bool) -> None:
        self._manager = ClusterManager(config)
        self._num_workers = config.rollout.agent.num_workers
        self._on_halves = on_halves
        self._halves: AlternatingWorkers | None = None
        self._rows: list[Row] = [{"raw_prompt": c.messages} for c in workload.conversations] * num_copies

    async def start(self) -> None:
        await self._manager.start()
        if self._on_halves:
            await self.run()  # (starts all threads)
            self._halves = AlternatingWorkers(num_workers=self._num_workers)

    async def run(self) -> Any:
        with nullcontext() if self._halves is None else self._halves.taking_turns():
            return await self._manager.generate_sequences(self._rows)

    def columns(self, result: Any) -> Columns:
        return columns_of(result)

    async def close(self) -> None:
        if self._halves is not None:
            self._halves.close()
        await self._manager.close()


def make_config(shape: Shape, *, folder: Path, encoder: Any, num_workers: int) -> Config:
    replies_module = folder / f"replies_{shape.name.replace('-', '_')}.py"
    replies_module.write_text(REPLIES_MODULE.format(folder=str(folder), scenario=shape.name))
    rollout = rollout_config(shape)
    agent = AgentConfig(
        num_workers=num_workers,
        default_agent_loop=rollout.default_agent_loop,
        loop_files=[str(replies_module)],
    )
    engine_kwargs = {"folder": str(folder), "scenario": shape.name}
    return Config(
        model=ModelConfig(path=str(folder / "model"), encoder=encoder),
        rollout=rollout.model_copy(
            update={"engine": "overhead.ours:LookupServer", "engine_kwargs": engine_kwargs, "agent": agent}
        ),
        trainer=TrainerConfig(runtime="ray", ray=RayConfig()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("encoder")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--halves", action="store_true", help="run each worker on half a core")
    arguments = parser.parse_args()

    def make(workload: Workload) -> Runner:
        config = make_config(
            workload.shape, folder=arguments.folder, encoder=arguments.encoder, num_workers=arguments.workers
        )
        return OurRunnerOnRay(
            workload, config=config, num_copies=arguments.copies, on_halves=arguments.halves
        )

    serve(make, arguments.folder, cpu_seconds=tree_cpu_seconds, num_batches=arguments.batches)


if __name__ == "__main__":
    main()
