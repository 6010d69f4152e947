"""Stored trajectories are read back by this package and by other libraries, and found by conditions."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec import structs
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from agent_loop.cli import app
from agent_loop.errors import DataError
from agent_loop.storage import (
    Learned,
    StoredRun,
    pieces_of,
    read_vocabulary,
    text_of,
    to_trajectory,
    write_trajectories,
    write_vocabulary,
)
from agent_loop.storage.columns import SCALARS, SCHEMA
from agent_loop.storage.json_lines import read_lines, stored_copy, write_lines
from agent_loop.storage.query import Condition, find, preference_pairs
from agent_loop.storage.row_texts import MAX_LETTERS, text_columns
from agent_loop.training.metrics import FAILURES, RETRIES
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.trajectory import AgentLoopOutput, Failure, FailureKind, Incident, IncidentKind, Trajectory
from agent_loop.types import Message
from tests.helpers import small_tokenizer
from tests.storage.samples import failed, solved, without_logprobs
from tests.training.fakes import tiny_tokenizer


def written(folder: Path, *trajectories: Trajectory, step: int = 12, **more: object) -> Path:
    path = folder / "trajectories" / f"train-{step:06d}.parquet"
    write_trajectories(path, trajectories, step=step, split="train", **more)
    return path


def assert_same(read: AgentLoopOutput, output: AgentLoopOutput) -> None:
    for mine, its in zip(read.segments, output.segments, strict=True):
        assert mine.token_ids.tolist() == its.token_ids.tolist()
        assert (mine.origin, mine.weight_version) == (its.origin, its.weight_version)
        assert (mine.logprobs is None) == (its.logprobs is None)
        if its.logprobs is not None:
            assert mine.logprobs.tobytes() == its.logprobs.tobytes()
    for field in fields(AgentLoopOutput):
        if field.name not in ("segments", "failure"):
            assert getattr(read, field.name) == getattr(output, field.name), field.name


@pytest.mark.parametrize(
    "trajectory",
    [solved(), failed(), without_logprobs(), without_logprobs(some=True)],
    ids=["solved", "failed", "no log-probs", "some log-probs"],
)
def test_a_trajectory_is_read_back_unchanged(trajectory: Trajectory, tmp_path: Path) -> None:
    written(tmp_path, trajectory)
    row = StoredRun(tmp_path).trajectory("train", 12, trajectory.trajectory_id)
    read = to_trajectory(row)
    assert_same(read.output, trajectory.output)
    assert read.trajectory_id == trajectory.trajectory_id
    assert (read.reward, read.reward_extra) == (trajectory.reward, trajectory.reward_extra)
    assert read.trace is None or read.trace.spans == trajectory.trace.spans
    assert (read.trace is None) == (trajectory.trace is None)


@pytest.mark.parametrize("kind", list(FailureKind))
def test_what_failed_a_trajectory_and_its_retries_are_stored(kind: FailureKind, tmp_path: Path) -> None:
    again = Incident(IncidentKind.RETRIED, "the trajectory ran again after Gone")
    failure = Failure("Gone", "Traceback ...", kind)
    lost = structs.replace(solved(), output=solved().output.noted(again).failed(failure), reward=None)
    written(tmp_path, lost)
    row = StoredRun(tmp_path).trajectory("train", 12, lost.trajectory_id)
    read = to_trajectory(row)
    assert row["failure_kind"] == str(kind)
    assert read.reward is None
    assert read.output.failure == failure
    assert read.output.incidents[-1] == again
    metrics = rollout_metrics([read], success_threshold=1.0, weight_version=0)
    assert (metrics[RETRIES], metrics[f"{FAILURES}{kind}"]) == (1, 1)


def test_an_unpaired_surrogate_becomes_a_replacement_character(tmp_path: Path) -> None:
    written(tmp_path, failed())
    read = to_trajectory(StoredRun(tmp_path).trajectory("train", 12, "group=0/rollout=1"))
    assert read.output.failure.error == "ValueError: half a surrogate \ufffd"
    assert read.row == {"raw_prompt": [{"role": "user", "content": "\ufffd"}], "weight": None}


def test_columns_have_the_values_of_the_trajectory(tmp_path: Path) -> None:
    learned = Learned(
        advantages=np.array([1, 1, 9, 9, 9, 1, 5], np.float32),
        train_logprobs=np.array([-0.1, -0.25, 0, 0, 0, -0.3, -0.5], np.float32),
    )
    written(tmp_path, solved(), failed(), learned=[learned, None], weight_version=5, success_threshold=0.1)
    table = StoredRun(tmp_path).scalars()
    assert table.column_names == list(SCALARS)
    first, second = table.to_pylist()
    assert (first["step"], first["split"], first["agent_name"]) == (12, "train", "tool_agent")
    assert (first["reward"], first["is_success"], first["stop_reason"]) == (0.1, True, "answered")
    assert (first["num_turns"], first["num_assistant_turns"], first["num_model_tokens"]) == (4, 2, 4)
    assert (first["prompt_length"], first["response_length"]) == (3, 7)
    assert (first["advantage"], first["staleness"]) == (2.0, 2)
    assert first["logprob_diff_max"] == pytest.approx(0.1)
    assert first["logprob_diff_mean"] == pytest.approx(0.15 / 4)
    assert (first["admission_s"], first["generate_s"], first["prefill_s"]) == (1.0, 3.5, 0.75)
    assert (first["tool_s"], first["other_s"], first["seconds"]) == (0.5, 1.0, 6.0)
    assert second["failure"].startswith("ValueError")
    assert [second[name] for name in ("reward", "seconds", "advantage", "staleness")] == [None] * 4


def test_images_are_described(tmp_path: Path) -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    asked = {"role": "user", "content": [{"type": "image", "image": pixels}, {"type": "text", "text": "?"}]}
    output = AgentLoopOutput(segments=solved().output.segments, messages=[asked])
    row = {"raw_prompt": [asked], "images": [pixels.repeat(100, 0)]}
    shown = Trajectory(output, row, group=0, rollout=0, reward=0.0, reward_extra={})
    stored = StoredRun(written(tmp_path, shown)).trajectory("train", 12, "group=0/rollout=0")
    described = "an array of shape [4, 4, 3] and type uint8"
    assert json.loads(stored["messages"])[0]["content"][0] == {"type": "image", "image": described}
    assert json.loads(stored["row"])["raw_prompt"][0]["content"][0]["image"] == described
    assert json.loads(stored["row"])["images"] == ["an array of shape [400, 4, 3] and type uint8"]


def test_a_run_is_read_by_step_and_split(tmp_path: Path) -> None:
    for step in (1, 2):
        written(tmp_path, *(solved(group=g, rollout=r) for g in range(40) for r in range(2)), step=step)
    val = tmp_path / "trajectories" / "val-000002.parquet"
    write_trajectories(val, [solved()], step=2, split="val")
    run = StoredRun(tmp_path)
    files = [(f.step, f.split, f.num_trajectories) for f in run.files()]
    assert files == [(1, "train", 80), (2, "train", 80), (2, "val", 1)]
    assert len(run.scalars()) == 161
    assert len(run.scalars(split="val")) == 1
    [row] = run.rows(step=2, trajectory_id="group=39/rollout=1")
    assert row["trajectory_id"] == "group=39/rollout=1"
    assert len(StoredRun(tmp_path / "trajectories").files()) == 3
    assert len(StoredRun(val).files()) == 1
    with pytest.raises(DataError, match=r"no trajectory 'group=99/rollout=0' of train step 1"):
        run.trajectory("train", 1, "group=99/rollout=0")


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no stored trajectories"):
        StoredRun(tmp_path)
    (tmp_path / "other.parquet").write_bytes(b"not Parquet")
    with pytest.raises(DataError, match="a Parquet file that is damaged or was cut off"):
        StoredRun(tmp_path).files()


def test_an_empty_step_is_a_file_without_rows(tmp_path: Path) -> None:
    run = StoredRun(written(tmp_path))
    assert run.scalars().num_rows == 0
    assert list(run.rows()) == []


def same(mine: Any, its: Any) -> bool:
    return np.array_equal(mine, its, equal_nan=True) if isinstance(mine, np.ndarray) else mine == its


def test_a_file_of_lines_and_a_parquet_file_hold_the_same(tmp_path: Path) -> None:
    both = [solved(), failed(), without_logprobs()]
    write_lines(tmp_path / "lines.jsonl", both, split="rollout")
    write_trajectories(tmp_path / "a.parquet", both, step=0, split="rollout")
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text("utf-8").splitlines()]
    assert [list(line) for line in lines] == [SCHEMA.names] * 3
    assert all(isinstance(line["row"], dict) for line in lines)
    (tmp_path / "copy").mkdir()
    copy = StoredRun(stored_copy(tmp_path / "lines.jsonl", folder=tmp_path / "copy"))
    for mine, its in zip(copy.rows(), StoredRun(tmp_path / "a.parquet").rows(), strict=True):
        assert [name for name in its if not same(mine[name], its[name])] == []


def test_a_line_without_a_trajectory_is_named_and_one_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    write_lines(path, [solved(rollout=0), solved(rollout=1)], split="rollout")
    whole = path.read_text("utf-8")
    path.write_text(whole[:-40], encoding="utf-8")
    assert [row["rollout"] for row in read_lines(path)] == [0]
    path.write_text(whole[:-40] + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"lines.jsonl' line 2 holds no trajectory: "):
        list(read_lines(path))
    path.write_text('{"trajectory_id": "a", "segments": []}\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 1 holds no trajectory: it has no 'prompt_ids'"):
        list(read_lines(path))


TEXT = "<|im_start|>user\nvier ☃ and 日本<|im_end|>\n"


def test_byte_level_tokens_join_to_the_text(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    write_vocabulary(tmp_path / "vocabulary.json", tokenizer)
    pieces = read_vocabulary(tmp_path / "vocabulary.json")
    ids = tokenizer.backend_tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert len(pieces) == len(tokenizer)
    assert text_of(ids, pieces) == TEXT
    assert any(isinstance(pieces[token], list) for token in ids), (
        "a snowman is three tokens, none of them text"
    )
    assert pieces[tokenizer.convert_tokens_to_ids("<|im_end|>")] == "<|im_end|>"


def test_tokens_with_spaces_keep_them() -> None:
    names = ["<0x41>", "▁hello", "lo", "<unk>"]
    backend = Tokenizer(
        models.BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert pieces_of(tokenizer) == [[0x41], " hello", "lo", "<unk>"]
    assert text_of([1, 2, 0, 99], pieces_of(tokenizer)) == " helloloA<99>"


def test_tokens_of_a_word_level_vocabulary_are_unchanged() -> None:
    assert pieces_of(tiny_tokenizer())[:3] == ["0", "1", "2"]


@pytest.mark.parametrize("text", ["not JSON", "[]", json.dumps({"version": 2, "pieces": []})])
def test_an_invalid_vocabulary_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="vocabulary"):
        read_vocabulary(path)


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    folder = tmp_path / "trajectories"
    trajectories = [solved(reward=0.25), solved(rollout=2, reward=0.75), failed(), without_logprobs()]
    write_trajectories(folder / "train-000001.parquet", trajectories, step=1, split="train")
    write_trajectories(folder / "val-000001.parquet", [solved(group=7)], step=1, split="val")
    return StoredRun(tmp_path)


def ids(table: object) -> list[str]:
    return table.column("trajectory_id").to_pylist()


@pytest.mark.parametrize(
    ("condition", "found"),
    [
        ("reward<1", ["group=0/rollout=0", "group=0/rollout=2", "group=7/rollout=0"]),
        ("reward >= 0.75", ["group=0/rollout=2", "group=1/rollout=0/branch=1"]),
        ("reward=null", ["group=0/rollout=1"]),
        ("branch != null", ["group=1/rollout=0/branch=1"]),
        ("is_success=true", ["group=1/rollout=0/branch=1"]),
        ("stop_reason=failed", ["group=0/rollout=1"]),
        ("stop_reason!=answered", ["group=0/rollout=1", "group=1/rollout=0/branch=1"]),
        ("trajectory_id='group=7/rollout=0'", ["group=7/rollout=0"]),
    ],
)
def test_conditions_compare_columns_with_values(run: StoredRun, condition: str, found: list[str]) -> None:
    assert ids(find(run, where=[Condition.parse(condition)])) == found


def test_conditions_texts_splits_and_orders_can_be_combined(run: StoredRun) -> None:
    conditions = [Condition.parse("reward<1"), Condition.parse("num_tool_calls=1")]
    assert ids(find(run, where=conditions, sort="-reward", split="train")) == [
        "group=0/rollout=2",
        "group=0/rollout=0",
    ]
    assert ids(find(run, text="VIER ☃", split="val")) == ["group=7/rollout=0"]
    assert ids(find(run, text="surrogate")) == ["group=0/rollout=1"]
    assert ids(find(run, text="a text that is in no trajectory")) == []


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("rewrd<1", "did you mean 'reward'"),
        ("messages=x", "no column 'messages' to compare"),
        ("reward", "is not a comparison"),
        ("reward<high", "compares reward, which is a number, with 'high'; give a number after"),
        ("is_success=1", "which is true or false"),
        ("reward<null", "only = and != can"),
    ],
)
def test_an_invalid_condition_is_refused(condition: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Condition.parse(condition)


def test_the_headings_of_the_table_name_its_columns(run: StoredRun) -> None:
    assert Condition.parse("calls=1") == Condition.parse("num_tool_calls=1")
    assert ids(find(run, sort="-tokens")) == ids(find(run, sort="-num_model_tokens"))


def test_an_unknown_order_is_refused(run: StoredRun) -> None:
    with pytest.raises(DataError, match="no column 'lenght' to compare"):
        find(run, sort="-lenght")


PROMPT: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "2 + 2?"}]
REWARDS = {"good": 0.5, "best": 1.0, "bad": 0.0}


def answered(text: str, reward: float | None, *, prompt: list[Message] = PROMPT, **place: Any) -> Trajectory:
    messages = [*prompt, {"role": "assistant", "content": text}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    output = AgentLoopOutput(segments=solved().output.segments, messages=messages, tool_schemas=tools)
    return structs.replace(solved(**place), output=output, reward=reward)


def stored(folder: Path, *trajectories: Trajectory, step: int = 1) -> StoredRun:
    path = folder / "trajectories" / f"train-{step:06d}.parquet"
    write_trajectories(path, list(trajectories), step=step, split="train")
    return StoredRun(folder)


def texts(pairs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(pair["chosen"][-1]["content"], pair["rejected"][-1]["content"]) for pair in pairs]


def test_the_best_and_the_worst_of_each_group_are_a_pair(tmp_path: Path) -> None:
    group = [answered(text, reward, rollout=n) for n, (text, reward) in enumerate(REWARDS.items())]
    one, two = answered("one", 1.0, group=1), answered("two", 0.5, group=1, rollout=1)
    run = stored(tmp_path, *group, one, two)
    pairs = list(preference_pairs(run))
    assert texts(pairs) == [("best", "bad"), ("one", "two")]
    assert pairs[0]["prompt"] == PROMPT
    assert (pairs[0]["chosen_reward"], pairs[0]["rejected_reward"]) == (1.0, 0.0)
    assert pairs[0]["tools"] == [{"type": "function", "function": {"name": "add"}}]
    of_some = list(preference_pairs(run, where=[Condition.parse("reward>0.2")]))
    assert texts(of_some) == [("best", "good"), ("one", "two")]
    with pytest.raises(DataError, match="there is no column"):
        list(preference_pairs(run, where=[Condition.parse("rewards>0.2")]))


def test_groups_without_a_preference_or_with_different_prompts_have_no_pair(tmp_path: Path) -> None:
    other: list[Message] = [{"role": "user", "content": "3 + 3?"}]
    run = stored(
        tmp_path,
        *(answered("a", 1.0, rollout=n) for n in range(2)),
        *(answered("c", 1.0, group=1), answered("d", None, group=1, rollout=1), failed(group=1, rollout=2)),
        *(answered("e", 1.0, group=2), answered("f", 0.0, group=2, rollout=1, prompt=other)),
    )
    assert list(preference_pairs(run)) == []


def test_groups_of_different_steps_are_not_mixed(tmp_path: Path) -> None:
    stored(tmp_path, answered("a", 1.0), step=1)
    run = stored(tmp_path, answered("b", 0.0), step=2)

    assert list(preference_pairs(run)) == []


def test_the_command_writes_a_line_for_each_pair(tmp_path: Path) -> None:
    stored(tmp_path / "run", answered("a", 1.0, rollout=0), answered("b", 0.0, rollout=1))
    out = tmp_path / "new" / "pairs.jsonl"

    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--pairs", "--out", str(out)])

    assert result.exit_code == 0, result.output
    assert "1 preference pairs are in" in result.output
    [line] = map(json.loads, out.read_text().splitlines())
    assert line["prompt"] == PROMPT
    assert line["chosen"] == [{"role": "assistant", "content": "a"}]
    assert line["rejected"] == [{"role": "assistant", "content": "b"}]


def test_conditions_without_pairs_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(tmp_path), "--out", "x", "--where", "reward>0"])

    assert result.exit_code == 2
    assert "needs --pairs" in result.output


def columns_of(**columns: list[Any]) -> dict[str, list[Any]]:
    texts = {
        name: [v if v is None or isinstance(v, str) else json.dumps(v) for v in values]
        for name, values in columns.items()
    }
    found = text_columns(pa.table({name: pa.array(values, pa.string()) for name, values in texts.items()}))
    return {name: column.to_pylist() for name, column in found.items()}


def asked(*messages: Any) -> dict[str, Any]:
    return {"raw_prompt": [{"role": role, "content": content} for role, content in messages]}


@pytest.mark.parametrize(
    ("row", "prompt", "target"),
    [
        ({**asked(("system", "s"), ("user", "How\nmany?")), "answer": 3}, "How many?", "3"),
        (asked(("system", "Play.")), "Play.", None),
        ({"prompt": "x" * 500, "reward_model": {"ground_truth": ["a", "b"]}}, "x" * 199 + "…", "a b"),
        (
            asked(("user", [{"type": "text", "text": "see"}, {"type": "image"}])),
            'see {"type": "image"}',
            None,
        ),
        ([1], None, None),
        ("not json", None, None),
    ],
)
def test_prompt_and_target_are_read_from_the_row(row: Any, prompt: str | None, target: str | None) -> None:
    found = columns_of(row=[row])
    assert (found.get("prompt", [None])[0], found.get("target", [None])[0]) == (prompt, target)
    assert len(found.get("prompt", [""])[0] or "") <= MAX_LETTERS


def test_each_number_of_the_reward_function_is_a_column() -> None:
    extras = ['{"exact": 1, "ok": true, "note": "x", "odd": NaN}', None, {"exact": 0.5}]
    found = columns_of(reward_extra=extras)
    assert found == {"reward/exact": [1.0, None, 0.5], "reward/ok": [1.0, None, None]}


def test_columns_that_are_missing_or_empty_are_left_out() -> None:
    assert text_columns(pa.table({"step": [1]})) == {}
    assert columns_of(answer=["", None], row=[None, None]) == {}
