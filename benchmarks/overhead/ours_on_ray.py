"""This package's side under Ray: `trainer.runtime: ray`, rows to a padded batch.

    python -m overhead.ours_on_ray FOLDER ENCODER [--workers N] [--copies N] [--batches N] [--halves]

Each batch has so many copies of the workload, and each round so many batches. Only the engine is faked: it answers at
once, in a server actor of its own. Needs `pip install "agent-loop[ray]"`.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from agent_loop.config import AgentConfig, Config, ModelConfig, RayConfig, TrainerConfig
from agent_loop.distributed.manager import ClusterManager
from agent_loop.types import Row
from overhead.halves import Halves
from overhead.ours import columns_of, rollout_config
from overhead.processes import tree_cpu_seconds
from overhead.rounds import Columns, Runner, serve
from overhead.shapes import Shape, Workload

LOADS_REPLIES = """
from pathlib import Path

from overhead import tools
from overhead.shapes import Workload

tools.REPLIES.update(Workload.read(Path({folder!r}), {scenario!r}).replies)
"""
"""A file that each worker imports, so that the tools know what to answer."""


class OurRunnerOnRay(Runner):
    """The default settings but for lengths and names."""

    def __init__(self, workload: Workload, *, config: Config, num_copies: int, on_halves: bool) -> None:
        """Args: on_halves: Each worker gets half a core."""
        self._manager = ClusterManager(config)
        self._num_workers = config.rollout.agent.num_workers
        self._on_halves = on_halves
        self._halves: Halves | None = None
        self._rows: list[Row] = [{"raw_prompt": c.messages} for c in workload.conversations] * num_copies

    async def start(self) -> None:
        await self._manager.start()
        if self._on_halves:
            await self.run()  # (by then all threads are there)
            self._halves = Halves(num_workers=self._num_workers)

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("encoder")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--halves", action="store_true", help="each worker gets half a core")
    given = parser.parse_args()

    def make(workload: Workload) -> Runner:
        config = make_config(
            workload.shape, folder=given.folder, encoder=given.encoder, num_workers=given.workers
        )
        return OurRunnerOnRay(workload, config=config, num_copies=given.copies, on_halves=given.halves)

    serve(make, given.folder, cpu_seconds=tree_cpu_seconds, num_batches=given.batches)


if __name__ == "__main__":
    main()
