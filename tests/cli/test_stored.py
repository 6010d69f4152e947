"""Commands that read stored trajectories and runs: show, rescore, replay and compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_loop.cli.rollout import _summary
from agent_loop.errors import ConfigError, DataError
from agent_loop.storage import StoredRun, write_vocabulary
from agent_loop.storage.writer import write_trajectories
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids
from tests.cli.project import make_stored_project, run
from tests.helpers import HERMES_TEMPLATE, small_tokenizer
from tests.run_folders import write_rewards, write_run

ROW = "group=2/rollout=0"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    make_stored_project(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("rollout", "config.yaml", "--out", "run/rollout.parquet")
    write_vocabulary(folder / "run" / "vocabulary.json", small_tokenizer())
    (folder / "run" / "config.yaml").write_bytes((folder / "config.yaml").read_bytes())
    return folder


@pytest.fixture(autouse=True)
def in_the_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    (project / "added.log").unlink(missing_ok=True)


def test_rollout_writes_parquet_with_every_column() -> None:
    row = StoredRun("run").trajectory("rollout", 0, ROW)
    assert (row["reward"], row["is_success"], row["answer"]) == (1.0, True, "sum 3")
    assert (row["num_tool_calls"], row["num_failed_calls"], row["num_assistant_turns"]) == (1, 0, 2)
    assert row["seconds"] > 0
    assert [segment["origin"] for segment in row["segments"]] == ["prompt", "model", "tool", "model"]


def test_show_lists_the_trajectories_that_match() -> None:
    text = run("show", "run").output
    assert text.count("group=") == 4
    assert "4 trajectories, mean reward 0.250" in text
    heading, *rows = text.splitlines()
    assert [word in heading for word in ("length", "prompt", "last answer")] == [True] * 3
    assert ["5.000" in row and "question 3" in row and "sum 4" in row for row in rows][:4].count(True) == 1
    text = run("show", "run", "--where", "reward<1", "--where", "num_failed_calls>0").output
    assert "group=3/rollout=0" in text
    assert text.count("group=") == 1
    text = run("show", "run", "--sort", "-group", "--limit", "1").output
    assert "group=3/rollout=0" in text
    assert "4 trajectories, mean reward 0.250, 1 shown (--limit)" in text
    assert run("show", "run", "--text", "too MUCH").output.count("group=") == 1


def test_show_prints_one_trajectory_turn_by_turn() -> None:
    text = run("show", "run", "--row", "group=3/rollout=0").output
    order = ["rollout step 0  group=3/rollout=0  reward 0", "-- user", "question 3", "-> add(", "-- tool add"]
    order += ["(incident tool_error)", "!  tool_error: three is too much", "sum 4", "time:"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_show_prints_one_trajectory_token_by_token() -> None:
    text = run("show", "run", "--row", ROW, "--tokens").output
    assert "log-prob >= -0.1" in text
    assert "<|im_start|>assistant\nsum 3<|im_end|>" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("show run --where rewrd<1", "did you mean 'reward'"),
        ("show run --row group=9/rollout=9", "there is no trajectory 'group=9/rollout=9'"),
        ("show run --tokens", "give the trajectory with --row"),
        ("show run --sort messages", "no column 'messages'"),
        ("rescore run --reward script.py:nothing", "nothing"),
        (
            "rescore run --reward script.py:reward --split val",
            "no trajectories of val; there are rollout: step 0",
        ),
        ("rescore run --reward script.py:reward --out new.jsonl", r"ends in \.parquet"),
        (f"replay run {ROW} --from-turn 4", "can continue at turn 3 at the latest"),
    ],
)
def test_names_that_do_not_exist_are_refused(line: str, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        run(*line.split())


def test_rescore_compares_rewards_and_lists_the_differences() -> None:
    text = run("rescore", "run", "--reward", "script.py:generous", "--out", "new.parquet").output
    assert "0.2500  1.0000" in text
    assert "25.0%   100.0%" in text
    assert "3 of 4 trajectories differ" in text
    assert "rollout step 0 group=1/rollout=0  0 -> 1  'sum 2'" in text
    assert StoredRun("new.parquet").scalars()["reward"].to_pylist() == [1.0] * 4
    old, new = (StoredRun(path).trajectory("rollout", 0, ROW) for path in ("run", "new.parquet"))
    assert new["response_ids"].tolist() == old["response_ids"].tolist()
    assert new["messages"] == old["messages"]
    assert "0 of 4 trajectories differ" in run("rescore", "run", "--reward", "script.py:reward").output
    text = run("rescore", "run", "--reward", "script.py:half", exit_code=1).output
    assert "scored       4       3" in text
    assert "1 -> none  RewardError: reward function script.py:half raised ValueError: not this one" in text


def test_rescore_in_batches_calls_the_function_once_per_row(tmp_path: Path) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text(
        "def together(outputs, rows):\n"
        "    if rows[0]['prompt'].endswith('2'):\n"
        "        raise ValueError('not this one')\n"
        "    return [{'reward': 0.5, 'of': len(outputs)} for _ in outputs]\n"
    )
    options = ["--reward", f"{judge}:together", "--batch", "--out", f"{tmp_path}/new.parquet"]
    text = run("rescore", "run", *options, exit_code=1).output
    assert "scored       4       3" in text
    assert "raised ValueError: not this one" in text
    scalars = StoredRun(tmp_path / "new.parquet").scalars()
    assert scalars["reward"].to_pylist() == [0.5, 0.5, None, 0.5]
    with pytest.raises(ConfigError, match="--batch"):
        run("rescore", "run", "--reward", f"{judge}:together")


def test_replay_reproduces_the_tokens_and_calls_no_tool() -> None:
    for row in (ROW, "group=3/rollout=0"):
        assert f"{row} is identical" in run("replay", "run", row).output
    assert not Path("added.log").exists()


def test_replay_prints_where_another_template_first_differs() -> None:
    changed = HERMES_TEMPLATE.replace("<tool_response>\\n'", "<tool_response>'")
    assert changed != HERMES_TEMPLATE
    Path("changed.jinja").write_text(changed, encoding="utf-8")
    text = run("replay", "run", ROW, "model.chat_template_path=changed.jinja", exit_code=1).output
    assert f"{ROW} differs from token" in text
    assert "(tool tokens, assistant turn 1)" in text
    assert "recorded: [" in text
    assert "'\\n3\\n</tool_response>" in text


def test_replay_from_a_turn_continues_with_the_real_model_and_real_tools() -> None:
    Path("other").touch()
    try:
        text = run("replay", "run", ROW, "--from-turn", "1", "--out", "again.parquet").output
    finally:
        Path("other").unlink()
    assert "reward              1         0" in text
    assert "sum 3" in text
    assert "now 2" in text
    assert Path("added.log").read_text(encoding="utf-8") == "1+2\n"
    again, old = (StoredRun(path).trajectory("rollout", 0, ROW) for path in ("again.parquet", "run"))
    assert again["answer"] == "now 2"
    assert again["prompt_ids"].tolist() == old["prompt_ids"].tolist()


def test_replay_from_a_turn_replays_the_earlier_turns() -> None:
    text = run("replay", "run", ROW, "--from-turn", "2").output
    assert not Path("added.log").exists(), "a tool without state is not called again"
    assert "turns of the model  2         2" in text


def test_replay_needs_the_settings_of_the_run(tmp_path: Path) -> None:
    copy = tmp_path / "alone.parquet"
    copy.write_bytes(Path("run/rollout.parquet").read_bytes())
    with pytest.raises(ConfigError, match="give them with --config"):
        run("replay", str(copy), ROW)
    assert "is identical" in run("replay", str(copy), ROW, "--config", "config.yaml").output


def test_a_scripted_engine_needs_only_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path / "tokenizer")
    out = str(tmp_path / "out.parquet")
    run("rollout", "config.yaml", "--out", out, "--max-rows", "1", f"model.path={tmp_path / 'tokenizer'}")
    assert next(StoredRun(out).rows())["answer"] == "sum 1"


def trajectory(rollout: int, reward: float | None, branch: int | None = None) -> Trajectory:
    segments = [
        Segment(as_token_ids([1]), Origin.PROMPT),
        Segment(as_token_ids([2] * (rollout + 1)), Origin.MODEL, weight_version=0),
    ]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!" * (rollout + 1)}]
    output = AgentLoopOutput(segments=segments, messages=messages)
    return Trajectory(output, {"raw_prompt": messages[:1]}, 0, rollout, reward, {}, branch)


TRAJECTORIES = [trajectory(0, 1.0), *(trajectory(1, 0.0, branch) for branch in range(3))]


@pytest.fixture
def elsewhere(in_the_project: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def branches(elsewhere: Path) -> Path:
    Path("run").mkdir()
    write_trajectories(
        Path("run/rollout.parquet"), TRAJECTORIES, step=0, split="rollout", success_threshold=1.0
    )
    Path("task.py").write_text("def reward(output, row):\n    return float(len(output.answer) == 2)\n")
    return elsewhere


def test_summaries_count_a_rollout_once_although_it_has_several_branches(branches: Path) -> None:
    assert "4 trajectories, mean reward 0.500" in run("show", "run").output
    lines = run("rescore", "run", "--reward", "task.py:reward").output.splitlines()
    cells = {line.split("  ")[0].strip(): line.split()[-2:] for line in lines if line.strip()}
    assert cells["mean reward"] == ["0.5000", "0.5000"]
    assert cells["success"] == ["50.0%", "50.0%"]
    assert cells["scored"] == ["4", "4"]
    columns = {str(column.header): list(column.cells) for column in _summary(TRAJECTORIES).columns}
    assert columns["mean reward"] == ["0.500"]
    assert columns["trajectories"] == ["4"]


compared = pytest.mark.usefixtures("elsewhere")


def write_groups(*, num_steps: int = 20) -> None:
    """Write runs of three seeds whose rewards rise to 0.2 (group a) and 1.0 (group b), plus 0.01 per seed."""
    for seed in range(3):
        for name, end in (("a", 0.2), ("b", 1.0)):
            lines: list[dict[str, float]] = [
                {"reward/mean": end * step / num_steps + seed / 100} for step in range(1, num_steps + 1)
            ]
            for line in lines[4::5]:
                line["val/pass@1"] = line["reward/mean"]
            write_run(Path(f"runs/{name}-{seed}"), seed=seed, lines=lines)


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def numbers(*arguments: str) -> dict[str, Any]:
    return json.loads(run("compare", *arguments, "--json").stdout)


@compared
def test_two_groups_are_printed_with_means_differences_and_curves() -> None:
    write_groups()
    text = run("compare", "runs/a-*", "runs/b-*").output
    lines = lines_of(text)
    # mean of the last value of a: 0.21, and half of the width: 4.3027 * 0.01 / sqrt(3) = 0.0248
    assert lines[:4] == [
        "A runs/a-*: 3 runs, trainer.seed 0, 1, 2",
        "B runs/b-*: 3 runs, trainer.seed 0, 1, 2",
        "Intervals are 95% intervals over runs.",
        "B - A is paired by seed.",
    ]
    first = lines.index("reward/mean: 20 steps")
    assert lines[first + 1 : first + 4] == [
        "last value (step 20) mean of the last 10 values",
        "A 0.210 (0.185 .. 0.235) 0.165 (0.140 .. 0.190)",
        "B 1.010 (0.985 .. 1.035) 0.785 (0.760 .. 0.810)",
    ]
    assert lines[first + 4].startswith("B - A +0.800 ")
    assert "step A B" in lines
    assert "1 0.020 ± 0.025 0.060 ± 0.025" in lines
    assert "20 0.210 ± 0.025 1.010 ± 0.025" in lines
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    first = lines.index("val/pass@1: 4 steps")
    assert "mean of the last 4 values" in lines[first + 1]
    rows = lines[lines.index("step A B", first) + 1 :][:4]
    assert [row.split()[0] for row in rows] == ["5", "10", "15", "20"]


@compared
def test_json_has_the_printed_numbers() -> None:
    write_groups()
    found = numbers("runs/a-*", "runs/b-*", "--last", "1", "--points", "3", "--metric", "reward/mean")
    names = [(each["name"], each["source"]) for each in found["groups"]]
    assert names == [("A", "runs/a-*"), ("B", "runs/b-*")]
    assert found["groups"][1]["runs"][2] == {"path": "runs/b-2", "seed": 2}
    (metric,) = found["metrics"]
    assert (metric["metric"], metric["num_steps"], metric["num_recent"]) == ("reward/mean", 20, 1)
    assert metric["last"] == metric["recent"]
    assert metric["last"]["groups"][0]["value"] == pytest.approx(0.21)
    assert metric["last"]["groups"][0]["high"] == pytest.approx(0.21 + 4.3026527 * 0.01 / 3**0.5)
    assert metric["last"]["differences"][0]["value"] == pytest.approx(0.8)
    assert [point["step"] for point in metric["curve"]] == [1, 11, 20]


@compared
def test_groups_with_other_seeds_are_not_paired_and_steps_that_a_run_lacks_are_left_out() -> None:
    for seed in range(2):
        write_rewards(Path(f"runs/a-{seed}"), seed=seed, rewards=[float(seed)])
        write_rewards(Path(f"runs/b-{seed}"), seed=seed + 1, rewards=[seed + 5.0])
    text = run("compare", "runs/a-*", "runs/b-*").output
    assert "B - A is not paired: the seeds of the groups differ." in text
    assert "+5.000 (+1.958 .. +8.042)" in text  # 4.3027 * sqrt(0.5)
    write_rewards(Path("more/c-0"), seed=0, rewards=[0.5, 0.5, 0.5])
    write_rewards(Path("more/c-1"), seed=1, rewards=[0.5, None])
    assert "reward/mean: 1 step; left out: 2 without a value in more/c-1" in run("compare", "more").output


@compared
def test_one_run_has_no_interval_and_the_output_says_so() -> None:
    write_rewards(Path("a"), seed=0, rewards=[0.5])
    write_rewards(Path("b"), seed=0, rewards=[0.75])
    text = run("compare", "a", "b").output
    assert "There is no interval for A and B: one run does not show a spread." in text
    assert "B - A +0.250" in lines_of(text)
    assert "paired" not in text
