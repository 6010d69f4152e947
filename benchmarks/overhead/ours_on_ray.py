"""This package's side under Ray: `trainer.runtime: ray`, rows to a padded batch.

    python -m overhead.ours_on_ray FOLDER ENCODER [NUM_WORKERS [NUM_COPIES]]

Each batch has so many copies of the workload. Needs `pip install "agent-loop[ray]"`. Only the engine is faked: it
answers at once, in a server actor of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from agent_loop.config import AgentConfig, Config, ModelConfig, RayConfig, TrainerConfig
from agent_loop.distributed.manager import ClusterManager
from agent_loop.types import Row
from overhead.ours import columns_of, rollout_config
from overhead.processes import tree_cpu_seconds
from overhead.rounds import Columns, Runner, serve
from overhead.shapes import Shape, Workload

NUM_BATCHES = 4
"""Of each round, copies counted."""
LOADS_REPLIES = """
from pathlib import Path

from overhead import tools
from overhead.shapes import Workload

tools.REPLIES.update(Workload.read(Path({folder!r}), {scenario!r}).replies)
"""
"""A file that each worker imports, so that the tools know what to answer."""


class OurRunnerOnRay(Runner):
    """The default settings but for lengths and names."""

    def __init__(self, workload: Workload, *, config: Config, num_copies: int) -> None:
        self._manager = ClusterManager(config)
        self._rows: list[Row] = [{"raw_prompt": c.messages} for c in workload.conversations] * num_copies

    async def start(self) -> None:
        await self._manager.start()

    async def run(self) -> Any:
        return await self._manager.generate_sequences(self._rows)

    def columns(self, result: Any) -> Columns:
        return columns_of(result)

    async def close(self) -> None:
        await self._manager.close()


def make_config(shape: Shape, *, folder: Path, encoder: Any, num_workers: int) -> Config:
    loads_replies = folder / f"replies_{shape.name.replace('-', '_')}.py"
    loads_replies.write_text(LOADS_REPLIES.format(folder=str(folder), scenario=shape.name))
    rollout = rollout_config(shape)
    agent = AgentConfig(
        num_workers=num_workers,
        default_agent_loop=rollout.agent.default_agent_loop,
        loop_files=[str(loads_replies)],
    )
    knows = {"folder": str(folder), "scenario": shape.name}
    return Config(
        model=ModelConfig(path=str(folder / "model"), encoder=encoder),
        rollout=rollout.model_copy(
            update={"engine": "overhead.ours:KnowingServer", "engine_kwargs": knows, "agent": agent}
        ),
        trainer=TrainerConfig(runtime="ray", ray=RayConfig()),
    )


def main() -> None:
    folder, encoder = Path(sys.argv[1]), sys.argv[2]
    num_workers, num_copies = [*map(int, sys.argv[3:]), 1, 1][:2]

    def make(workload: Workload) -> Runner:
        config = make_config(workload.shape, folder=folder, encoder=encoder, num_workers=num_workers)
        return OurRunnerOnRay(workload, config=config, num_copies=num_copies)

    serve(make, folder, cpu_seconds=tree_cpu_seconds, num_batches=max(NUM_BATCHES // num_copies, 1))


if __name__ == "__main__":
    main()
