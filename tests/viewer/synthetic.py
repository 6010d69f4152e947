"""Synthetic runs, and collections of runs and evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from agent_loop.storage import write_trajectories, writer
from agent_loop.storage.columns import Learned, StepFacts, columns_of
from agent_loop.storage.schema import VOCABULARY_FILE
from agent_loop.training.evaluation.scores import summarise
from agent_loop.training.evaluation.summary import EvaluationSummary
from agent_loop.trajectory import (
    AgentLoopMetrics,
    AgentLoopOutput,
    Feedback,
    Incident,
    IncidentKind,
    Segment,
    Trajectory,
)
from agent_loop.trajectory.incidents import Failure, Span, Trace
from agent_loop.types import Origin, StopReason, as_token_ids

TEXT = "the| shelf| of| part| order| is| find| look| up|?|.|\n| 41| 7| naïve"
WORDS = TEXT.split("|")
BYTES = [[0xE2, 0x82], [0xAC]]
"""Two tokens that form one character."""
PIECES: list[Any] = [*WORDS, *BYTES, "<|im_end|>", "<tool_call>", "</tool_call>"]
BEGAN_AT = 1_790_000_000.0


def write_run(folder: Path, *, num_steps: int = 6, num_groups: int = 4, n: int = 4, seed: int = 0) -> Path:
    """Write a run with metrics, settings, vocabulary and one file per step, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("trainer:\n  total_steps: 40\nrollout:\n  n: 4\n", encoding="utf-8")
    (folder / VOCABULARY_FILE).write_text(json.dumps({"version": 1, "pieces": PIECES}), encoding="utf-8")
    random = np.random.default_rng(seed)
    for step in range(1, num_steps + 1):
        add_step(folder, step=step, num_groups=num_groups, n=n, random=random)
    return folder


def add_step(
    folder: Path, *, step: int, num_groups: int = 4, n: int = 4, random: np.random.Generator | None = None
) -> Path:
    """Add a step: first its file, then its line of metrics, as training writes them."""
    random = random or np.random.default_rng(step)
    rows = [
        row
        for group in range(num_groups)
        for rollout in range(n)
        for row in trajectory_rows(step, group=group, rollout=rollout, random=random)
    ]
    path = write_rows(folder / "trajectories" / f"train-{step:06d}.parquet", rows)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(_metrics(step, rows)) + "\n")
    return path


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a file of stored trajectories. Columns that the rows lack are null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_rows(path, rows, success_threshold=1.0)
    return path


def trajectory_rows(
    step: int, *, group: int, rollout: int, random: np.random.Generator, num_turns: int | None = None
) -> Iterator[dict[str, Any]]:
    """Return one trajectory, or its branches. Group 1 has branches; group 2 has a failed trajectory."""
    facts = StepFacts(step, "train", step - 1, success_threshold=1.0)
    for branch in (0, 1) if group == 1 and rollout == 0 else (None,):
        episode = _Episode(group, step=step, random=random)
        last = num_turns or 2 + (rollout + step) % 3
        for turn in range(1, last + 1):
            episode.say(num_tokens=6 + (rollout * 3 + turn - 1) % 7, calls=turn < last)
        failure = Failure(FAILURE, "Traceback (most recent call last):\n  ...\nToolBug")
        output = episode.output(failure if (group, rollout) == (2, 1) else None)
        reward = None if output.failure else float((rollout + step) % 3 == 0)
        extra, row = (
            {"acc": 1, "odd": float("nan")},
            {"raw_prompt": PROMPT, "answer": 41, "agent_name": "tool_agent"},
        )
        trajectory = Trajectory(output, row, group, rollout, reward, extra, branch, episode.trace())
        mask = output.response_mask.astype(np.float32)
        noise = random.normal(0, 0.01, len(mask)).astype(np.float32)
        advantages = None if output.failure else mask * np.float32(0.5)
        learned = Learned(advantages, (output.response_logprobs + noise) * mask)
        row = columns_of(trajectory, facts=facts, learned=learned)
        yield row | {"reward_extra": json.dumps(extra)}  # as another program writes it


PROMPT = [
    {"role": "system", "content": "Look things up."},
    {"role": "user", "content": "On which shelf is the part? <script>alert(1)</script> \u202e\U0001f600 €"},
]
FAILURE = "ToolBug: <img src=x onerror=alert(1)> raised"


class _Episode:
    """Builder of one output and its trace, turn by turn."""

    def __init__(self, group: int, *, step: int, random: np.random.Generator) -> None:
        self._random, self._step, self._time = random, step, 0.02
        prompt = [(group + place) % len(WORDS) for place in range(12 + group)]
        self._segments = [Segment(as_token_ids(prompt), Origin.PROMPT)]
        self._messages: list[dict[str, Any]] = [*PROMPT]
        self._spans = [Span("queue", "", 0.0, 0.02)]
        self._feedback: list[Feedback] = []
        self._incidents: list[Incident] = []

    def say(self, *, num_tokens: int, calls: bool) -> None:
        start = sum(map(len, self._segments))
        ids = self._random.integers(0, len(PIECES), num_tokens).astype(np.int32)
        ids[1:3] = [len(WORDS), len(WORDS) + 1]
        logprobs = -np.abs(self._random.gamma(0.6, 0.8, num_tokens)).astype(np.float32)
        version = max(0, self._step - 1)
        self._segments.append(Segment(ids, Origin.MODEL, weight_version=version, logprobs=logprobs))
        seconds = float(self._random.gamma(2.0, 0.05) + 0.01 * num_tokens)
        details = {"num_prompt_tokens": start, "num_tokens": num_tokens, "num_cached_tokens": start - 2}
        details |= {"prefill_s": seconds / 4, "num_preempted": 0}
        self._wait("generate", f"server-{int(self._random.integers(2))}", seconds, details)
        self._messages.append({"role": "assistant", "content": "" if calls else "It is on shelf 41."})
        if calls:
            self._call(place=start + num_tokens - len(self._segments[0]) - 1)

    def _call(self, *, place: int) -> None:
        part, name = int(self._random.integers(100)), "part_of_order"
        arguments = json.dumps({"order": part, "note": "näher\n<b>"}, ensure_ascii=False)
        call = {"type": "function", "id": f"call_{place}", "function": {"name": name, "arguments": arguments}}
        reply, incident = f"part {part}", None
        if part % 5 == 0:
            reply, incident = f"Error: there is no order {part}", IncidentKind.TOOL_ERROR
            self._incidents.append(Incident(incident, reply, len(self._feedback) + 1))
        self._messages[-1]["tool_calls"] = [call]
        self._messages.append({"role": "tool", "name": name, "content": reply})
        self._wait("tool", name, 0.05 + 0.3 * float(self._random.random()), {"place": place, "number": 0})
        self._feedback.append(Feedback(Origin.TOOL, name, place, 0.1, incident))
        ids = self._random.integers(0, len(WORDS), 5).astype(np.int32)
        self._segments.append(Segment(ids, Origin.TOOL))

    def _wait(self, kind: str, name: str, seconds: float, details: Mapping[str, Any]) -> None:
        self._spans.append(Span(kind, name, self._time, self._time + seconds, details))
        self._time += seconds + 0.005

    def output(self, failure: Failure | None) -> AgentLoopOutput:
        self._wait("reward", "", 0.01, {})
        return AgentLoopOutput(
            segments=self._segments,
            messages=self._messages,
            stop_reason=StopReason.FAILED if failure else StopReason.ANSWERED,
            metrics=AgentLoopMetrics(num_tool_calls=len(self._feedback)),
            feedback=self._feedback,
            incidents=self._incidents,
            failure=failure,
        )

    def trace(self) -> Trace:
        return Trace(BEGAN_AT + 10.0 * self._step, self._time, tuple(self._spans))


def _metrics(step: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return {
        "step": step,
        "reward/mean": float(np.mean(rewards)),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/success_share": float(np.mean(rewards)),
        "rollout/num_turns/mean": float(np.mean([row["num_turns"] for row in rows])),
        "rollout/response_length/mean": float(np.mean([row["response_length"] for row in rows])),
        "rollout/stop_reason/answered": 0.9,
        "rollout/stop_reason/failed": 0.1,
        "actor/loss": -0.1 / step,
        "actor/rollout_train_logprob_diff_max": None if step == 2 else 0.01,
        "timing_s/rollout": 1.0,
        "timing_s/update": 0.5,
        "timing_s/step": 1.5,
        "perf/model_tokens_per_s": 900.0 + step,
        "unknown/number": step,
    }


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
        rows = [
            row | {"row": json.dumps({"raw_prompt": [{"role": "user", "content": prompt_of(group)}]})}
            for group in (0, 1)
            for n in range(4)
            for row in trajectory_rows(step, group=group, rollout=n, random=random)
        ]
        write_rows(folder / "trajectories" / f"train-{step:06d}.parquet", rows)
        if step % 3 == 0:
            metrics["val/reward/mean"] = reward - 0.1
            share = step / NUM_STEPS
            write_trajectories(
                folder / "trajectories" / f"val-{step:06d}.parquet",
                [sample_of(group, 0, group < share * NUM_ROWS) for group in range(NUM_ROWS)],
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
        sample_of(group, rollout, solved(group, rollout)) for group in range(NUM_ROWS) for rollout in range(n)
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


def sample_of(group: int, rollout: int, is_right: bool) -> Trajectory:
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
