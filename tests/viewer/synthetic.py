"""Synthetic runs, collections of runs and evaluations, and a run of one long trajectory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from agent_loop.storage import SCHEMA, write_trajectories
from agent_loop.storage.schema import METADATA, ROWS_PER_GROUP, VOCABULARY_FILE
from agent_loop.training.evaluation.scores import summarise
from agent_loop.training.evaluation.summary import EvaluationSummary
from agent_loop.trajectory import AgentLoopOutput, Trajectory
from agent_loop.types import StopReason

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
    path = write_rows(folder / "trajectories" / f"train-{step:06d}.parquet", rows, step=step)
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(_metrics(step, rows)) + "\n")
    return path


def write_rows(path: Path, rows: Sequence[dict[str, Any]], *, step: int, split: str = "train") -> Path:
    """Write a file of stored trajectories. Columns that the rows lack are null."""
    table = pa.Table.from_pylist(list(rows), schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {
        METADATA.schema_version: "1",
        METADATA.step: str(step),
        METADATA.split: split,
        METADATA.success_threshold: "1.0",
    }
    temporary = path.with_name(f".{path.name}.tmp")
    pq.write_table(
        table.replace_schema_metadata(metadata), temporary, compression="zstd", row_group_size=ROWS_PER_GROUP
    )
    temporary.replace(path)
    return path


def trajectory_rows(
    step: int, *, group: int, rollout: int, random: np.random.Generator, num_turns: int | None = None
) -> Iterator[dict[str, Any]]:
    """Return one trajectory, or its branches. Group 1 has branches; group 2 has a failed trajectory."""
    for branch in (0, 1) if group == 1 and rollout == 0 else (None,):
        yield _row(step, group, rollout, branch, random, num_turns or 2 + (rollout + step) % 3)


def _row(
    step: int, group: int, rollout: int, branch: int | None, random: np.random.Generator, num_turns: int
) -> dict[str, Any]:
    prompt = [(group + place) % len(WORDS) for place in range(12 + group)]
    row = _Row(prompt, step=step, random=random)
    for turn in range(num_turns):
        row.say(num_tokens=6 + (rollout * 3 + turn) % 7, calls=turn < num_turns - 1)
    has_failed = group == 2 and rollout == 1
    reward = None if has_failed else float((rollout + step) % 3 == 0)
    return row.finish(
        step=step,
        split="train",
        trajectory_id=f"group={group}/rollout={rollout}" + ("" if branch is None else f"/branch={branch}"),
        group=group,
        rollout=rollout,
        branch=branch,
        agent_name="tool_agent",
        weight_version=step - 1,
        reward=reward,
        is_success=reward == 1.0,
        stop_reason="failed" if has_failed else "answered",
        failure="ToolBug: <img src=x onerror=alert(1)> raised" if has_failed else None,
        failure_traceback="Traceback (most recent call last):\n  ...\nToolBug" if has_failed else None,
        advantage=None if has_failed else float(random.normal()),
        staleness=step % 2,
    )


class _Row:
    """Builder of one row, turn by turn."""

    def __init__(self, prompt: list[int], *, step: int, random: np.random.Generator) -> None:
        self._random = random
        self._split_and_step = step
        self._prompt = prompt
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._segments: list[dict[str, Any]] = [
            {"origin": "prompt", "num_tokens": len(prompt), "weight_version": None}
        ]
        self._messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Look things up."},
            {
                "role": "user",
                "content": "On which shelf is the part? <script>alert(1)</script> \u202e\U0001f600 €",
            },
        ]
        self._spans: list[list[Any]] = [["queue", "", 0.0, 0.02, {}]]
        self._feedback: list[dict[str, Any]] = []
        self._incidents: list[dict[str, Any]] = []
        self._time = 0.02

    def say(self, *, num_tokens: int, calls: bool) -> None:
        start = len(self._prompt) + len(self._ids)
        ids = [int(token) for token in self._random.integers(0, len(PIECES), num_tokens)]
        ids[1:3] = [len(WORDS), len(WORDS) + 1]
        self._add("model", ids, version=max(0, self._split_and_step - 1))
        seconds = float(self._random.gamma(2.0, 0.05) + 0.01 * num_tokens)
        details = {"num_prompt_tokens": start, "num_tokens": num_tokens, "num_cached_tokens": start - 2}
        details |= {"prefill_s": seconds / 4, "num_preempted": 0}
        self._wait("generate", f"server-{int(self._random.integers(2))}", seconds, details)
        message: dict[str, Any] = {"role": "assistant", "content": "" if calls else "It is on shelf 41."}
        if calls:
            self._call(message, place=len(self._ids) - 1)
        else:
            self._messages.append(message)

    def _call(self, message: dict[str, Any], *, place: int) -> None:
        part = int(self._random.integers(100))
        function = {
            "name": "part_of_order",
            "arguments": json.dumps({"order": part, "note": "näher\n<b>"}, ensure_ascii=False),
        }
        message["tool_calls"] = [{"type": "function", "id": f"call_{place}", "function": function}]
        fails = part % 5 == 0
        reply = f"Error: there is no order {part}" if fails else f"part {part}"
        self._messages += [message, {"role": "tool", "name": "part_of_order", "content": reply}]
        self._wait(
            "tool", "part_of_order", 0.05 + 0.3 * float(self._random.random()), {"place": place, "number": 0}
        )
        feedback = {"origin": "tool", "name": "part_of_order", "place": place, "reward": 0.1}
        self._feedback.append(feedback | {"incident": "tool_error" if fails else None, "extra": {}})
        if fails:
            turns = sum(segment["origin"] == "model" for segment in self._segments)
            self._incidents.append({"kind": "tool_error", "detail": reply, "assistant_turn": turns})
        self._add("tool", [int(token) for token in self._random.integers(0, len(WORDS), 5)], version=None)

    def _add(self, origin: str, ids: list[int], *, version: int | None) -> None:
        self._segments.append({"origin": origin, "num_tokens": len(ids), "weight_version": version})
        self._ids += ids
        self._mask += [int(origin == "model")] * len(ids)

    def _wait(self, kind: str, name: str, seconds: float, details: dict[str, Any]) -> None:
        self._spans.append([kind, name, self._time, self._time + seconds, details])
        self._time += seconds + 0.005

    def finish(self, **more: Any) -> dict[str, Any]:
        mask = np.array(self._mask, np.float32)
        logprobs = -np.abs(self._random.gamma(0.6, 0.8, len(mask))).astype(np.float32) * mask
        trained = logprobs + (self._random.normal(0, 0.01, len(mask)).astype(np.float32)) * mask
        differences = np.abs(trained - logprobs)[mask > 0]
        self._wait("reward", "", 0.01, {})
        kinds = {
            kind: sum(s[3] - s[2] for s in self._spans if s[0] == kind)
            for kind in ("queue", "generate", "tool", "reward")
        }
        num_turns = sum(segment["origin"] == "model" for segment in self._segments)
        version = max(0, self._split_and_step - 1)
        return {
            "row": json.dumps({"raw_prompt": self._messages[:2], "answer": 41}),
            "num_turns": len(self._segments),
            "num_assistant_turns": num_turns,
            "num_tool_calls": len(self._feedback),
            "num_failed_calls": len(self._incidents),
            "num_incidents": len(self._incidents),
            "prompt_length": len(self._prompt),
            "response_length": len(self._ids),
            "num_model_tokens": int(mask.sum()),
            "logprob_diff_max": float(differences.max()),
            "logprob_diff_mean": float(differences.mean()),
            "began_at": BEGAN_AT + 10.0 * self._split_and_step,
            "seconds": self._time,
            **{f"{kind}_s": value for kind, value in kinds.items()},
            "prompt_ids": self._prompt,
            "response_ids": self._ids,
            "response_mask": self._mask,
            "response_logprobs": logprobs,
            "weight_versions": [version if kept else -1 for kept in self._mask],
            "advantages": (mask * 0.5).tolist() if more["advantage"] is not None else None,
            "train_logprobs": trained,
            "segments": self._segments,
            "messages": json.dumps(self._messages, ensure_ascii=False),
            "tool_schemas": "[]",
            "answer": "It is on shelf 41.",
            "feedback": json.dumps(self._feedback),
            "incidents": json.dumps(self._incidents),
            "spans": json.dumps(self._spans),
            "metrics": "{}",
            "reward_extra": json.dumps({"acc": 1, "odd": float("nan")}),
            "extra_fields": "{}",
            **more,
        }


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
        write_rows(folder / "trajectories" / f"train-{step:06d}.parquet", rows, step=step)
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


def write_long(folder: Path, *, num_tokens: int) -> Path:
    """Write a run with one trajectory of `num_tokens` tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / VOCABULARY_FILE).write_text(json.dumps({"version": 1, "pieces": PIECES}), encoding="utf-8")
    random = np.random.default_rng(0)
    turns = [("model", 1500), ("tool", 500)] * (num_tokens // 2000)
    segments = [
        {"origin": origin, "num_tokens": length, "weight_version": 0 if origin == "model" else None}
        for origin, length in [("prompt", 500), *turns]
    ]
    mask = [int(origin == "model") for origin, length in turns for _ in range(length)]
    length = len(mask)
    row: dict[str, Any] = {
        "step": 1,
        "split": "train",
        "trajectory_id": "group=0/rollout=0",
        "group": 0,
        "rollout": 0,
        "reward": 1.0,
        "is_success": True,
        "stop_reason": "answered",
        "prompt_length": segments[0]["num_tokens"],
        "response_length": length,
        "prompt_ids": random.integers(0, len(WORDS), segments[0]["num_tokens"]),
        "response_ids": random.integers(0, len(PIECES), length),
        "response_mask": mask,
        "response_logprobs": -random.gamma(0.6, 0.8, length).astype(np.float32),
        "train_logprobs": -random.gamma(0.6, 0.8, length).astype(np.float32),
        "weight_versions": [0 if kept else -1 for kept in mask],
        "segments": segments,
        "messages": json.dumps([{"role": "user", "content": "word " * 50_000}]),
        "spans": "[]",
    }
    write_rows(folder / "trajectories" / "train-000001.parquet", [row], step=1)
    return folder
