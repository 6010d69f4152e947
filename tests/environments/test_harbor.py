"""Tasks in Harbor's form: their files, their rows, and rollouts in folders and in containers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from agent_loop.checks import check_tasks
from agent_loop.config import RolloutConfig
from agent_loop.environments.harbor import find_tasks, read_task
from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.rows import load_rows
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row, StopReason
from agent_loop.workspaces.settings import read_workspace
from tests.environments.harbor_tasks import RELOCATED, Act, roll_out, run_tasks, solve, write_task
from tests.helpers import text_reply

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


def test_a_published_task_file_is_read_whole_and_keys_without_effect_are_named(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "recover", task_toml=PUBLISHED))
    assert task.name == "some-bench/recover-branch"
    assert task.file.agent.timeout_sec == 800.0
    assert task.file.verifier.timeout_sec == 900.0
    assert task.file.environment.docker_image == "someone/recover-branch:20260403"
    assert task.file.environment.memory_limit_mb == 2048
    ignored = [key.partition(":")[0] for key in task.ignored]
    assert ignored == ["environment.network_mode", "environment.storage_mb"]


def test_an_older_file_with_sizes_as_text_is_read(tmp_path: Path) -> None:
    text = 'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "10G"\n'
    task = read_task(write_task(tmp_path / "old", task_toml=text))
    assert task.file.schema_version == "1.0"
    assert task.file.environment.memory_limit_mb == 2048
    assert task.name == "old"


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


def test_tasks_are_found_in_a_folder_and_alone_also_without_their_file(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_task(tmp_path / name)
    (tmp_path / "b/task.toml").unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / "dataset.toml").write_text("")
    assert find_tasks(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert find_tasks(tmp_path / "a") == [tmp_path / "a"]
    assert find_tasks(tmp_path / "notes") == []


def test_the_tasks_of_the_examples_can_be_used() -> None:
    tasks = [read_task(folder) for folder in find_tasks(EXAMPLES)]
    names = ("find-in-logs", "fix-failing-test", "pick-commit", "repair-config", "write-script")
    assert [task.name for task in tasks] == [f"agent-loop/{name}" for name in names]
    assert all(task.solution is not None and not task.ignored for task in tasks)


def rows_of(*sources: Path, **workspace: Any) -> list[dict[str, Any]]:
    return load_rows([str(source) for source in sources], prompt_key="prompt", workspace=workspace)


def workspace_of(folder: Path, task_toml: str, **workspace: Any) -> Any:
    """Return the workspace of the row of a task with this file."""
    (row,) = rows_of(write_task(folder, task_toml=task_toml), **workspace)
    return read_workspace(row["workspace"])


def test_a_row_has_the_instruction_and_the_name(tmp_path: Path) -> None:
    text = "[task]\nname = 'bench/answer'\n[metadata]\ndifficulty = 'easy'\n"
    (row,) = rows_of(write_task(tmp_path / "answer", task_toml=text))
    assert row["raw_prompt"] == [{"role": "user", "content": "Write 42 to answer.txt."}]
    assert (row["task"], row["data_source"]) == ("bench/answer", "bench")
    assert row["extra_info"] == {"difficulty": "easy"}
    assert "agent_name" not in row


def test_the_workspace_is_the_container_that_the_tests_judge(tmp_path: Path) -> None:
    text = (
        "[environment]\ncpus = 2\nmemory = '1G'\nworkdir = '/src'\nbuild_timeout_sec = 90\nenv = {MODE = 'fast'}\n"
        "[verifier]\ntimeout_sec = 70\nenv = {STRICT = '1'}\n"
    )
    workspace = workspace_of(tmp_path, text)
    container, check = workspace.container, workspace.check
    assert container.dockerfile == str(tmp_path / "environment")
    assert (container.cpus, container.memory) == (2.0, "1024m")
    assert (container.folder, container.env) == ("/src", {"MODE": "fast"})
    assert workspace.start_timeout_s == 90.0
    assert (check.files, check.files_to) == (str(tmp_path / "tests"), "/tests")
    assert (check.timeout_s, check.env) == (70.0, {"STRICT": "1"})


def test_a_prebuilt_image_is_used_instead_of_the_dockerfile(tmp_path: Path) -> None:
    container = workspace_of(tmp_path, "[environment]\ndocker_image = 'debian:12'\n").container
    assert (container.image, container.dockerfile) == ("debian:12", "")


def test_settings_are_merged_over_the_workspaces_of_tasks(tmp_path: Path) -> None:
    settings = {"runtime": "docker", "cpus": 1, "build_args": {"BASE_IMAGE": "mine"}}
    text = "[environment]\ncpus = 2\nmemory_mb = 64\n"
    container = workspace_of(tmp_path, text, container=settings).container
    assert (container.runtime, container.cpus, container.memory) == ("docker", 1.0, "64m")
    assert container.build_args == {"BASE_IMAGE": "mine"}


def test_a_provider_gets_the_settings_of_the_container(tmp_path: Path) -> None:
    settings = {"provider": "cloud.py:Cloud", "options": {"region": "north"}}
    workspace = workspace_of(tmp_path, "[environment]\ncpus = 2\n", **settings)
    assert workspace.container is None
    container = {"cpus": 2.0, "dockerfile": str(tmp_path / "environment")}
    assert workspace.options == {"region": "north", "container": container}


def test_settings_are_merged_over_the_workspaces_of_other_rows_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "workspace": {"check": {"command": ["true"]}}}\n{"prompt": "b"}')
    with_check, without = rows_of(path, folder="some/folder")
    assert with_check["workspace"] == {"check": {"command": ["true"]}, "folder": "some/folder"}
    assert without["workspace"] == {"folder": "some/folder"}
    assert "workspace" not in rows_of(path)[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"container": {"cpu": 1}}, r"data\.workspace.*container\.cpu"),
        ({"container": None, "folder": "/tmp"}, "would write to this machine"),
    ],
)
def test_settings_that_do_not_fit_a_task_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rows_of(write_task(tmp_path / "answer"), **settings)


def test_variables_come_from_the_settings_and_never_from_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "secret of the parent")
    text = "[environment]\nenv = {LEVEL = '${LEVEL:-low}'}\n[verifier]\nenv = {KEY = 'Bearer ${API_KEY}'}\n"
    write_task(tmp_path / "tasks/answer", task_toml=text)
    write_task(tmp_path / "tasks/plain")
    unusable, _ = rows_of(tmp_path / "tasks")
    assert "API_KEY" in unusable["error"]
    assert "secret of the parent" not in str(unusable)
    row, _ = rows_of(tmp_path / "tasks", container={"env": {"API_KEY": "given"}})
    workspace = read_workspace(row["workspace"])
    assert workspace.check is not None
    assert workspace.container is not None
    assert workspace.check.env == {"KEY": "Bearer given"}
    assert workspace.container.env["LEVEL"] == "low"


def test_a_changed_file_of_a_task_changes_its_row(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "answer")
    before = rows_of(folder)
    assert rows_of(folder) == before
    (folder / "tests/test.sh").write_text("#!/bin/sh\necho 0 > /logs/verifier/reward.txt\n")
    assert rows_of(folder) != before


def test_a_bad_task_fails_its_own_row_by_name(tmp_path: Path) -> None:
    write_task(tmp_path / "bad", task_toml="[environment]\ncpu = 1\n")
    with pytest.raises(DataError, match=r"none of the 1 tasks.*environment\.cpu"):
        rows_of(tmp_path)
    write_task(tmp_path / "good")
    rows = rows_of(tmp_path)
    assert [row["task"] for row in rows] == ["bad", "good"]
    bad, good = run([rows[0], {**rows[1], "agent_name": "single_turn_agent"}])
    assert bad.output.stop_reason is StopReason.FAILED
    assert bad.output.failure is not None
    assert "bad" in bad.output.failure.error
    assert "environment.cpu" in bad.output.failure.error
    assert good.output.stop_reason is StopReason.ANSWERED


def test_the_time_limit_of_the_agent_ends_its_trajectory(tmp_path: Path) -> None:
    (row,) = rows_of(write_task(tmp_path / "answer", task_toml="[agent]\ntimeout_sec = 0.05\n"))
    assert row["trajectory_timeout_s"] == 0.05
    (trajectory,) = run([{**row, "agent_name": "single_turn_agent"}], hangs=True)
    assert trajectory.output.stop_reason is StopReason.DEADLINE


def run(rows: list[Row], *, hangs: bool = False) -> list[Trajectory]:
    """Run the rows with a model that answers at once, or never."""
    reply = text_reply("Done.", latency_s=math.inf if hangs else 0.0)
    config = RolloutConfig(prompt_length=512, response_length=64)
    return roll_out(rows, lambda request: reply, config=config)


JUDGES_THE_ANSWER = """\
#!/bin/sh
if [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.fixture
def answer(tmp_path: Path) -> Path:
    """Write a task whose tests judge the answer, and return its folder."""
    return write_judged(tmp_path / "answer")


def write_judged(folder: Path) -> Path:
    write_task(folder)
    (folder / "tests/test.sh").write_text(JUDGES_THE_ANSWER)
    return folder


def run_in_folders(path: Path, command: Act | None) -> list[Trajectory]:
    return run_tasks(path, workspace={"provider": RELOCATED}, command=command)


def test_an_agent_that_solves_the_task_with_its_shell_gets_the_reward_of_the_tests(answer: Path) -> None:
    (trajectory,) = run_in_folders(answer, solve)
    assert trajectory.reward == 1.0
    assert trajectory.output.stop_reason is StopReason.ANSWERED
    assert trajectory.output.metrics.num_tool_calls == 1


@pytest.mark.parametrize("command", [None, lambda task: "echo 41 > answer.txt"], ids=["nothing", "wrong"])
def test_an_agent_that_does_nothing_or_something_wrong_gets_0(answer: Path, command: Act | None) -> None:
    (trajectory,) = run_in_folders(answer, command)
    assert trajectory.reward == 0.0


def test_an_agent_sees_neither_the_tests_nor_the_solution(answer: Path) -> None:
    (trajectory,) = run_in_folders(answer, lambda task: "find . | sort")
    (reply,) = [message["content"] for message in trajectory.output.messages if message["role"] == "tool"]
    assert reply == "."


def test_a_bad_task_fails_alone_and_is_not_scored(answer: Path) -> None:
    write_judged(answer.parent / "a-bad-one")
    (answer.parent / "a-bad-one/tests/test.sh").unlink()
    bad, good = run_in_folders(answer.parent, solve)
    assert (bad.reward, bad.output.stop_reason) == (None, StopReason.FAILED)
    assert bad.output.failure is not None
    assert "a-bad-one" in bad.output.failure.error
    assert good.reward == 1.0


def test_tests_that_run_after_the_deadline_may_take_their_own_time(
    answer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_loop.rollout.worker.DEADLINE_GRACE_S", 0.1)
    (answer / "task.toml").write_text("[agent]\ntimeout_sec = 1.0\n")
    (answer / "tests/test.sh").write_text(f"{JUDGES_THE_ANSWER}\nsleep 1\n")
    (trajectory,) = run_in_folders(answer, lambda task: f"{solve(task)}\nsleep 600")
    assert (trajectory.output.stop_reason, trajectory.reward) == (StopReason.DEADLINE, 1.0)


BUILT = {
    "container": {
        "build_args": {"BASE_IMAGE": "localhost/agent-loop-base"},
        "build_options": ["--network=none"],
    }
}


@pytest.mark.containers
@pytest.mark.timeout(600)
class TestContainers:
    async def test_the_solution_of_every_example_scores_1_and_doing_nothing_scores_0(self) -> None:
        reports = await check_tasks(EXAMPLES, settings=BUILT, concurrency=2)
        assert len(reports) == 5
        assert {report.name: report.problems for report in reports if not report.is_passed} == {}
        assert {(report.nothing, report.solution) for report in reports} == {(0.0, 1.0)}

    @pytest.mark.parametrize(("command", "reward"), [(solve, 1.0), (None, 0.0)], ids=["solves", "idle"])
    def test_an_agent_with_a_shell_solves_every_example_and_one_without_calls_none(
        self, command: Act | None, reward: float
    ) -> None:
        played = run_tasks(EXAMPLES, workspace=BUILT, command=command)
        assert len(played) == 5
        assert {str(t.row["task"]): t.reward for t in played} == {str(t.row["task"]): reward for t in played}

    async def test_an_image_that_cannot_be_built_is_a_problem_of_its_task(self, tmp_path: Path) -> None:
        folder = write_task(tmp_path / "broken")
        dockerfile = "FROM localhost/agent-loop-busybox\nRUN no_such_program\n"
        (folder / "environment/Dockerfile").write_text(dockerfile)
        (report,) = await check_tasks(folder, settings=BUILT)
        assert report.problems[0].startswith("doing nothing has no reward")
        assert "no_such_program" in report.problems[0]

    async def test_tests_and_solution_are_not_in_the_container_before_they_are_needed(
        self, tmp_path: Path
    ) -> None:
        folder = write_task(tmp_path / "hidden")
        (folder / "environment/Dockerfile").write_text("FROM localhost/agent-loop-busybox\nWORKDIR /app\n")
        (folder / "solution/solve.sh").write_text("#!/bin/sh\nls / > listing\n")
        (folder / "tests/test.sh").write_text(
            "#!/bin/sh\n"
            "if [ -e /app/listing ] && ! grep -q tests /app/listing; then reward=1; else reward=0; fi\n"
            "if [ ! -e /app/listing ] && [ -e /solution ]; then reward=1; fi\n"
            "echo $reward > /logs/verifier/reward.txt\n"
        )
        (report,) = await check_tasks(folder, settings=BUILT)
        assert report.problems == ()
