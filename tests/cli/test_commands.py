"""Commands as a shell runs them: train, rollout, dry runs, settings and verbosity."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from transformers import AutoModelForCausalLM
from typer.main import get_command

from agent_loop import __version__
from agent_loop.checks.before_start import (
    BUILT_IN_ESTIMATORS,
    BUILT_IN_LOSSES,
    BUILT_IN_SAMPLERS,
    COMPARING_ESTIMATORS,
)
from agent_loop.cli import app
from agent_loop.cli.verbosity import set_verbosity
from agent_loop.config import load_config
from agent_loop.runtime.describe import short_traceback
from agent_loop.training import samplers
from agent_loop.training.advantages.estimate import estimator_needs
from agent_loop.training.losses import policy
from agent_loop.training.registry import ESTIMATORS, POLICY_LOSSES, SAMPLERS
from tests.cli.project import Command


def metrics_of(run_dir: str) -> list[dict]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def test_train_writes_metrics_and_a_model_and_continues_with_resume_alone(command: Command) -> None:
    command("train", "config.yaml")
    assert [line["step"] for line in metrics_of("run")] == [1, 2, 3]
    assert AutoModelForCausalLM.from_pretrained("run/checkpoints/step-000003/model").config.hidden_size == 16
    assert "holds a run already" in command("train", "config.yaml", exit_code=2).err
    command("train", "config.yaml", "--resume", "trainer.total_steps=5")
    assert [line["step"] for line in metrics_of("run")] == [1, 2, 3, 4, 5]


def test_rollout_writes_complete_trajectories(command: Command) -> None:
    command("rollout", "config.yaml", "--max-rows", "3", "-n", "2", "--out", "out/sampled.jsonl")
    records = [json.loads(line) for line in Path("out/sampled.jsonl").read_text().splitlines()]
    assert [(r["group"], r["rollout"]) for r in records] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    for record in records:
        prompt, sampled = record["segments"]
        assert (prompt["origin"], prompt["num_tokens"]) == ("prompt", len(record["prompt_ids"]))
        assert sampled["num_tokens"] == len(record["response_ids"]) == len(record["response_logprobs"]) <= 8
        assert record["reward"] == len(record["response_ids"]) % 2
        assert record["row"]["raw_prompt"] == record["messages"][:1]


def test_a_stopped_rollout_keeps_its_finished_trajectories(command: Command) -> None:
    result = command(
        "rollout", "config.yaml", "reward.function=task.py:breaks", "--out", "sampled.jsonl", exit_code=2
    )
    assert "ZeroDivisionError" in result.err
    records = [json.loads(line) for line in Path("sampled.jsonl").read_text().splitlines()]
    assert records
    assert all(record["failure"].startswith("RewardError") for record in records)
    assert f"the {len(records)} finished trajectories are in sampled.jsonl" in result.out


def test_settings_that_are_checked_against_the_model_and_the_code_are_explained(command: Command) -> None:
    for override, complaint in (
        ("rollout.engine_kwargs.max_slot=3", "did you mean 'max_slots'"),
        ("data.train_files=[task.py:crawls]", "task.py:crawls raised TypeError"),
        ("rollout.multi_turn.format=hermis", "did you mean 'hermes'"),
        ("rollout.agent.default_agent_loop=tool_agnet", "did you mean 'tool_agent'"),
        ("rollout.prompt_length=40000", "the model has 32768 positions; give at most 32768"),
    ):
        assert complaint in command("train", "config.yaml", override, exit_code=2).err


def test_train_stops_if_every_prompt_is_too_long_and_starts_once_that_is_fixed(command: Command) -> None:
    result = command(
        "train", "config.yaml", "rollout.prompt_length=1", "rollout.response_length=32", exit_code=2
    )
    assert "step 1 has nothing to learn from: the prompts of all 4 trajectories are over" in " ".join(
        result.err.split()
    )
    assert not Path("run/checkpoints").exists()
    command("train", "config.yaml", "trainer.total_steps=1")


assert policy  # (registers the losses)
assert samplers  # (registers the samplers)


def test_the_names_that_are_known_without_torch_are_those_of_the_package() -> None:
    for name in BUILT_IN_ESTIMATORS:
        assert estimator_needs(name).groups == (name in COMPARING_ESTIMATORS)
    for registry, names in (
        (ESTIMATORS, BUILT_IN_ESTIMATORS),
        (POLICY_LOSSES, BUILT_IN_LOSSES),
        (SAMPLERS, BUILT_IN_SAMPLERS),
    ):
        own = {
            name
            for name, function in registry._functions.items()
            if function.__module__.startswith("agent_loop.")
        }
        assert own == names


def test_every_check_has_a_line_and_nothing_is_started(command: Command) -> None:
    result = command("train", "config.yaml", "--dry-run")
    lines = [line for line in result.out.splitlines() if line.startswith("ok")]
    names = ", ".join(line.split(":")[0].split(maxsplit=1)[1] for line in lines)
    parts = (
        "engine, data.train_files, reward, agent loop, algorithm, model, chat template, run folder, memory"
    )
    assert names == parts
    assert "6 rows of rows.jsonl" in result.out
    assert not Path("run").exists()


def test_all_errors_are_printed_at_once(command: Command) -> None:
    arguments = ["algorithm.adv_estimator=gpro", "reward.function=task.py:rewrad", "model.path=modle"]
    result = command("train", "config.yaml", "--dry-run", *arguments, exit_code=2)
    errors = [line for line in result.out.splitlines() if line.startswith("ERROR")]
    names = [line.split(":")[0].split(maxsplit=1)[1] for line in errors]
    assert names == ["reward", "algorithm", "model", "chat template"]
    assert "4 errors; nothing was started" in result.out


def test_rollouts_and_evaluations_are_checked_too(command: Command) -> None:
    for name in ("rollout", "eval"):
        assert "everything is there" in command(name, "config.yaml", "--dry-run").out
        failed = command(name, "config.yaml", "--dry-run", "reward.function=task.py:rewrad", exit_code=2)
        assert "did you mean 'reward'" in failed.out
    assert not Path("runs").exists()
    assert not Path("trajectories.parquet").exists()


def test_supervised_training_is_checked_before_anything_is_loaded(command: Command) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    Path("chats.jsonl").write_text(json.dumps({"messages": messages}), encoding="utf-8")
    result = command("sft", "config.yaml", "sft.files=[chats.jsonl]", "sft.where=reward>=1", "--dry-run")
    for line in ("sft.files: 1 rows of chats.jsonl", "sft.where: reward>=1", "run folder: run, new"):
        assert line in result.out
    for override, complaint in (
        ("sft.files=[]", "sft.files is empty"),
        ("sft.where=rewrd>=1", "did you mean 'reward'"),
        ("model.path=absent", "model.path is 'absent'"),
    ):
        result = command("sft", "config.yaml", "sft.files=[chats.jsonl]", override, exit_code=2)
        assert complaint in result.err
    assert not Path("run").exists()


def test_each_setting_is_printed_with_its_source_as_the_command_line_accepts_it(command: Command) -> None:
    def shown(*arguments: str) -> dict[str, str]:
        text = command("config", "show", "config.yaml", *arguments).out
        return dict(map(str.strip, line.rsplit("#", 1)) for line in text.splitlines())  # pyright: ignore

    sources = shown("rollout.n=3", "trainer.total_steps=3")
    assert sources["rollout.n=3"] == "command line"
    assert sources["trainer.total_steps=3"] == sources["data.train_files=[rows.jsonl]"] == "config.yaml"
    assert "default" not in sources.values()
    overrides = ["rollout.multi_turn.tools=[task.py:a, 'b c']", "data.prompt_key='yes'", "actor.lr=1e-5"]
    printed = list(shown(*overrides, "--all"))
    assert load_config(overrides=printed) == load_config("config.yaml", overrides=overrides)


def test_doctor_names_versions_and_how_to_install_what_is_missing(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\necho {shlex.quote('0, NVIDIA H100, 81559 MiB, 550.1')}\n", encoding="utf-8"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    result = command("doctor", "--json")
    found = {each["name"]: each for each in json.loads(result.out)}
    assert found["agent-loop"]["found"] == __version__
    assert found["GPU 0"]["found"] == "NVIDIA H100, 81559 MiB, 550.1"
    assert found["git"]["is_missing"]
    assert not found["torch"]["is_missing"]
    text = command("doctor").out
    assert "agent-loop check sandbox" in text
    for each in found.values():
        assert each["name"] in text


THROUGH_A_LIBRARY = """
import json

def reward(output, row):
    return json.loads(row["answer"])
"""
TRACEBACK = """Traceback (most recent call last):
  File "{package}/rewards/function.py", line 81, in score
    returned = await call_function(self.function)
               ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/home/me/task.py", line 5, in reward
    return json.loads(row["answer"])
           ^^^^^^^^^^^^^^^^^^^^^^^^^
  File "{library}/json/__init__.py", line 339, in loads
    raise TypeError(f'the JSON object must be str')
TypeError: the JSON object must be str
"""


@pytest.fixture(autouse=True)
def _verbosity() -> Iterator[None]:
    yield
    set_verbosity(verbose=0, quiet=False)


def test_every_command_has_both_options() -> None:
    def options(found: object) -> Iterator[tuple[str, set[str]]]:
        for name, inner in getattr(found, "commands", {}).items():
            if getattr(inner, "commands", None):
                yield from options(inner)
            else:
                yield name, {each for option in inner.params for each in option.opts}

    commands = list(options(get_command(app)))
    assert len(commands) > 25
    assert [name for name, opts in commands if not {"-v", "--verbose", "-q", "--quiet"} <= opts] == []


def test_the_short_traceback_ends_with_the_users_frame() -> None:
    text = TRACEBACK.format(package=Path(typer.__file__).parents[1], library=Path(json.__file__).parents[1])
    assert short_traceback(text) == [
        '  File "/home/me/task.py", line 5, in reward',
        '    return json.loads(row["answer"])',
        "TypeError: the JSON object must be str",
    ]
    assert short_traceback("killed\n") == ["killed"]


def test_an_exception_of_a_reward_is_shown_with_its_line_and_row_and_v_shows_all_of_it(
    command: Command,
) -> None:
    Path("own.py").write_text(THROUGH_A_LIBRARY, encoding="utf-8")
    Path("rows.jsonl").write_text('{"prompt": "What is 2 * 3?", "answer": 6}\n', encoding="utf-8")
    arguments = ["config.yaml", "reward.function=own.py:reward", "-n", "1"]
    short = command("rollout", *arguments, exit_code=2)
    lines = short.err[short.err.index("RolloutError") :].splitlines()
    assert len(lines) <= 5
    assert "first in group=0/rollout=0, 'What is 2 * 3?':" in lines
    assert lines[-3].endswith('own.py", line 5, in reward')
    assert lines[-2] == '    return json.loads(row["answer"])'
    assert lines[-1].startswith("TypeError: the JSON object must be str")
    assert "Traceback" not in short.err

    verbose = command("rollout", *arguments, "-v", "--out", "other.parquet", exit_code=2)
    assert "json/__init__.py" in verbose.err
    assert "RolloutError" in verbose.err


def test_quiet_leaves_the_result(command: Command) -> None:
    loud = command("rollout", "config.yaml", "-n", "1")
    assert "agent-loop view trajectories.parquet" in loud.out
    quiet = command("rollout", "config.yaml", "-n", "1", "-q")
    assert "6 trajectories in trajectories.parquet" in quiet.out
    assert "agent-loop view" not in quiet.out
    both = command("rollout", "config.yaml", "-q", "-v", exit_code=2)
    assert "-v and -q exclude each other" in both.err
