"""Tests of reading and validating tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_loop.environments.harbor import find_tasks, read_task
from agent_loop.errors import DataError
from tests.environments.harbor.tasks import write_task

EXAMPLES = Path("examples/tasks")

PUBLISHED = """
schema_version = "1.1"
artifacts = []

[task]
name = "some-bench/recover-branch"
description = "Recovers a branch."
keywords = ["git"]
[[task.authors]]
name = "A. Author"

[metadata]
difficulty = "easy"
category = "software-engineering"
expert_time_estimate_min = 5.0

[verifier]
timeout_sec = 900.0

[agent]
timeout_sec = 800.0

[environment]
build_timeout_sec = 600.0
docker_image = "someone/recover-branch:20260403"
cpus = 1
memory_mb = 2048
storage_mb = 10240
gpus = 0
allow_internet = true
mcp_servers = []

[verifier.env]

[environment.env]

[solution.env]
"""
"""A file with every key that published tasks usually have."""


def test_a_published_task_file_is_read_whole(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "recover", task_toml=PUBLISHED))
    assert task.name == "some-bench/recover-branch"
    assert task.file.agent.timeout_sec == 800.0
    assert task.file.verifier.timeout_sec == 900.0
    assert task.file.environment.docker_image == "someone/recover-branch:20260403"
    assert task.file.environment.memory_limit_mb == 2048


def test_an_older_file_with_sizes_as_text_is_read(tmp_path: Path) -> None:
    text = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "10G"\n'
    task = read_task(write_task(tmp_path / "old", task_toml=text))
    assert task.file.schema_version == "1.0"
    assert task.file.environment.memory_limit_mb == 2048
    assert task.name == "old"


def test_keys_without_effect_are_named(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "recover", task_toml=PUBLISHED))
    assert [key.partition(":")[0] for key in task.ignored] == [
        "environment.network_mode",
        "environment.storage_mb",
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[environment]\ncpu = 1\n", ("environment.cpu", "did you mean", "cpus")),
        ("[agents]\n", ("unknown key 'agents'", "agent")),
        ("[task]\ndescription = 'x'\n", ("task.name", "missing")),
        ("[agent]\ntimeout_sec = -1\n", ("agent.timeout_sec", "-1")),
        ("[environment]\nmemory = 'much'\n", ("environment.memory", "much")),
        ("[environment\n", ("not valid TOML",)),
        ("[environment]\ngpus = 1\n", ("environment.gpus = 1", "not supported")),
        ("[environment]\nos = 'windows'\n", ("environment.os", "not supported")),
        ("[[environment.mcp_servers]]\nname = 'x'\n", ("environment.mcp_servers", "not supported")),
        ("[[steps]]\nname = 'first'\n", ("steps", "not supported")),
        ("[agent]\nuser = 'someone'\n", ("agent.user", "not supported")),
        ("[verifier]\nenvironment_mode = 'separate'\n", ("verifier.environment_mode", "not supported")),
    ],
)
def test_a_faulty_file_is_refused_with_its_task_and_key(
    tmp_path: Path, text: str, named: tuple[str, ...]
) -> None:
    folder = write_task(tmp_path / "faulty", task_toml=text)
    with pytest.raises(DataError) as refused:
        read_task(folder)
    assert str(refused.value).startswith(f"task {str(folder)!r}")
    for part in named:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    "missing", ["task.toml", "instruction.md", "tests/test.sh", "environment/Dockerfile"]
)
def test_a_missing_part_is_named(tmp_path: Path, missing: str) -> None:
    folder = write_task(tmp_path / "task")
    (folder / missing).unlink()
    with pytest.raises(DataError, match=missing.replace(".", r"\.")):
        read_task(folder)


def test_the_canary_of_a_benchmark_is_not_shown_to_the_agent(tmp_path: Path) -> None:
    text = "<!-- some-bench-canary GUID 1234 -->\n\nDo it.\n\n# A canary in a cage\n"
    task = read_task(write_task(tmp_path / "task", instruction=text))
    assert task.instruction == "Do it.\n\n# A canary in a cage"


def test_tasks_are_found_in_a_folder_and_alone(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_task(tmp_path / name)
    (tmp_path / "notes").mkdir()
    (tmp_path / "dataset.toml").write_text("")
    assert find_tasks(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert find_tasks(tmp_path / "a") == [tmp_path / "a"]
    assert find_tasks(tmp_path / "notes") == []


def test_a_task_that_lost_its_file_is_still_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_task(tmp_path / name)
    (tmp_path / "b/task.toml").unlink()
    assert find_tasks(tmp_path) == [tmp_path / "a", tmp_path / "b"]


def test_the_tasks_of_the_examples_can_be_used() -> None:
    tasks = [read_task(folder) for folder in find_tasks(EXAMPLES)]
    assert [task.name for task in tasks] == [
        f"agent-loop/{name}"
        for name in ("find-in-logs", "fix-failing-test", "pick-commit", "repair-config", "write-script")
    ]
    assert all(task.solution is not None and not task.ignored for task in tasks)
