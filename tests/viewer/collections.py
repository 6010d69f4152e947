"""Several runs with seeds and validations, and evaluations of the same rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from agent_loop.storage import write_trajectories
from agent_loop.training.evaluation.scores import summarise
from agent_loop.training.evaluation.summary import EvaluationSummary
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import StopReason
from tests.viewer.synthetic import trajectory_rows, write_rows

NUM_STEPS = 6
NUM_ROWS = 12
RATES = {"low": 1e-6, "high": 1e-5}
SEEDS = (0, 1)


def prompt_of(group: int) -> str:
    return f"On which shelf is part {group}?"


def write_collection(root: Path) -> Path:
    """Write four runs of two learning rates and two seeds, and two evaluations of the same rows."""
    for name, rate in RATES.items():
        for seed in SEEDS:
            write_training(root / f"{name}-{seed}", rate=rate, seed=seed)
    write_evaluation(root / "evals" / "base", model="tiny-base", solved=lambda group, rollout: group % 3 == 0)
    write_evaluation(
        root / "evals" / "trained", model="tiny-trained", solved=lambda group, rollout: group not in (3, 7)
    )
    return root


def write_training(folder: Path, *, rate: float, seed: int) -> Path:
    """Write a run with metrics, trajectories and validations. A higher rate learns faster."""
    folder.mkdir(parents=True)
    settings = {
        "trainer": {"seed": seed, "run_dir": str(folder), "total_steps": NUM_STEPS},
        "actor": {"optim": {"lr": rate}},
        "model": {"path": "models/tiny"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    random = np.random.default_rng(seed)
    lines: list[str] = []
    for step in range(1, NUM_STEPS + 1):
        reward = min(1.0, step / NUM_STEPS * (0.4 if rate < 5e-6 else 0.9) + 0.05 * seed)
        metrics: dict[str, Any] = {"step": step, "reward/mean": reward, "actor/entropy": 1 / step}
        metrics["reward/success_share"] = reward
        rows = [row for group in (0, 1) for n in range(4) for row in _rows(step, group, n, random)]
        write_rows(folder / "trajectories" / f"train-{step:06d}.parquet", rows, step=step)
        if step % 3 == 0:
            metrics["val/reward/mean"] = reward - 0.1
            share = step / NUM_STEPS
            write_trajectories(
                folder / "trajectories" / f"val-{step:06d}.parquet",
                [_trajectory(group, 0, group < share * NUM_ROWS) for group in range(NUM_ROWS)],
                step=step,
                split="val",
                success_threshold=1.0,
            )
        lines.append(json.dumps(metrics))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_evaluation(folder: Path, *, model: str, solved: Callable[[int, int], bool], n: int = 2) -> Path:
    """Write the folder of an evaluation. `solved` tells whether a sample of a row is a success."""
    folder.mkdir(parents=True)
    trajectories = [
        _trajectory(group, rollout, solved(group, rollout))
        for group in range(NUM_ROWS)
        for rollout in range(n)
    ]
    write_trajectories(
        folder / "trajectories.parquet", trajectories, step=0, split="eval", success_threshold=1.0
    )
    levels = ["hard" if group % 2 else "easy" for group in range(NUM_ROWS)]
    EvaluationSummary.of(
        summarise(trajectories, success_threshold=1.0),
        model=model,
        rows_of="data.val_files",
        settings={},
        columns={"level": levels},
    ).write(folder / "summary.json")
    return folder


def _trajectory(group: int, rollout: int, is_right: bool) -> Trajectory:
    prompt = {"role": "user", "content": prompt_of(group)}
    answer = f"Part {group} is on shelf {group if is_right else group + 1}."
    return Trajectory(
        output=AgentLoopOutput(
            prompt_ids=[1, 2, 3],
            response_ids=[4, 5 + is_right],
            response_mask=[1, 1],
            messages=[prompt, {"role": "assistant", "content": answer}],
            stop_reason=StopReason.ANSWERED,
        ),
        row={"raw_prompt": [prompt], "level": "hard" if group % 2 else "easy", "extra_info": {"id": group}},
        group=group,
        rollout=rollout,
        reward=float(is_right),
        reward_extra={},
    )


def _rows(step: int, group: int, rollout: int, random: np.random.Generator) -> list[dict[str, Any]]:
    row = json.dumps({"raw_prompt": [{"role": "user", "content": prompt_of(group)}]})
    return [
        found | {"row": row} for found in trajectory_rows(step, group=group, rollout=rollout, random=random)
    ]
