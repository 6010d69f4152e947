"""Commands that read stored trajectories, and summaries of trajectories with branches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent_loop.cli.rollout import _summary
from agent_loop.errors import ConfigError, DataError
from agent_loop.storage import StoredRun, write_vocabulary
from agent_loop.storage.schema import parquet
from agent_loop.storage.writer import write_trajectories
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, as_token_ids
from tests.cli.project import make_stored_project, run
from tests.helpers import HERMES_TEMPLATE, small_tokenizer

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


def test_a_damaged_page_is_named(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.parquet"
    data = bytearray(Path("run/rollout.parquet").read_bytes())
    group = parquet.ParquetFile("run/rollout.parquet").metadata.row_group(0)
    columns = {group.column(n).path_in_schema: group.column(n) for n in range(group.num_columns)}
    start = columns["reward"].dictionary_page_offset or columns["reward"].data_page_offset
    data[start : start + 20] = bytes(20)
    damaged.write_bytes(data)
    named = re.escape(f"{str(damaged)!r} is damaged (")
    for command in (["show"], ["show", "--row", ROW], ["rescore", "--reward", "script.py:generous"]):
        with pytest.raises(DataError, match=named):
            run(command[0], str(damaged), *command[1:])
    exported = run("view", str(damaged), "--export", str(tmp_path / "x.html")).output
    assert "Unreadable: damaged.parquet: " in exported


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
def branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    write_trajectories(
        Path("run/rollout.parquet"), TRAJECTORIES, step=0, split="rollout", success_threshold=1.0
    )
    Path("task.py").write_text("def reward(output, row):\n    return float(len(output.answer) == 2)\n")
    return tmp_path


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
