from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.cli.project import Command


def metrics_of(run_dir: str) -> list[dict]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def test_train_writes_metrics_and_a_model_that_transformers_loads(command: Command) -> None:
    result = command("train", "config.yaml")
    assert result.exit_code == 0, result.err
    assert [line["step"] for line in metrics_of("run")] == [1, 2, 3]
    assert AutoModelForCausalLM.from_pretrained("run/checkpoints/step-000003/model").config.hidden_size == 16


def test_train_continues_with_resume_and_refuses_to_mix_runs(command: Command) -> None:
    assert command("train", "config.yaml").exit_code == 0
    mixed = command("train", "config.yaml")
    assert mixed.exit_code == 2
    assert "holds a run already" in mixed.err
    assert command("train", "config.yaml", "--resume", "trainer.total_steps=5").exit_code == 0
    assert [line["step"] for line in metrics_of("run")] == [1, 2, 3, 4, 5]


def test_rollout_writes_complete_trajectories(command: Command) -> None:
    result = command("rollout", "config.yaml", "--max-rows", "3", "-n", "2", "--out", "out/sampled.jsonl")
    assert result.exit_code == 0, result.err
    records = [json.loads(line) for line in Path("out/sampled.jsonl").read_text().splitlines()]
    assert [(r["group"], r["rollout"]) for r in records] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    for record in records:
        prompt, sampled = record["segments"]
        assert (prompt["origin"], prompt["num_tokens"]) == ("prompt", len(record["prompt_ids"]))
        assert sampled["num_tokens"] == len(record["response_ids"]) == len(record["response_logprobs"]) <= 8
        assert record["reward"] == len(record["response_ids"]) % 2
        assert record["row"]["raw_prompt"] == record["messages"][:1]


def test_a_stopped_rollout_keeps_its_finished_trajectories(command: Command) -> None:
    result = command("rollout", "config.yaml", "reward.function=task.py:breaks", "--out", "sampled.jsonl")
    assert result.exit_code == 2
    assert "ZeroDivisionError" in result.err
    records = [json.loads(line) for line in Path("sampled.jsonl").read_text().splitlines()]
    assert records
    assert all(record["failure"].startswith("RewardError") for record in records)
    assert f"the {len(records)} finished trajectories are in sampled.jsonl" in result.out


def test_eval_prints_pass_at_k_and_a_line_per_row(command: Command) -> None:
    result = command("eval", "config.yaml", "-n", "4", "--max-rows", "2")
    assert result.exit_code == 0, result.err
    for shown in ("pass@1", "pass@4", "mean reward", "question 0", "question 1"):
        assert shown in result.out


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("rollout.engine_kwargs.max_slot=3", "did you mean 'max_slots'"),
        ("data.train_files=[task.py:crawls]", "task.py:crawls raised TypeError"),
        ("rollout.multi_turn.format=hermis", "did you mean 'hermes'"),
        ("rollout.agent.default_agent_loop=tool_agnet", "did you mean 'tool_agent'"),
        ("rollout.prompt_length=40000", "the model has 32768 positions; give at most 32768"),
    ],
)
def test_settings_that_are_checked_against_the_model_and_the_code_are_explained(
    command: Command, override: str, complaint: str
) -> None:
    result = command("train", "config.yaml", override)
    assert result.exit_code == 2
    assert complaint in result.err


def test_train_stops_if_every_prompt_is_too_long_and_starts_once_that_is_fixed(command: Command) -> None:
    result = command("train", "config.yaml", "rollout.prompt_length=1", "rollout.response_length=32")
    assert result.exit_code == 2
    assert "step 1 has nothing to learn from: the prompts of all 4 trajectories are over" in " ".join(
        result.err.split()
    )
    assert not Path("run/checkpoints").exists()
    assert command("train", "config.yaml", "trainer.total_steps=1").exit_code == 0
