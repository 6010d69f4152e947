"""Every command that reads rows accepts globs, folders, compressed files, CSV files and saved data sets."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from agent_loop.cli import main
from tests.cli.project import make_project

SOURCES = ["shards/*.parquet", "folder", "rows.csv.gz", "saved:train"]
"""Two rows in each."""
INTERACTIONS = "interaction: [{class_name: gsm8k}]"
KWARGS = {"name": "gsm8k", "ground_truth": "7"}
Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    make_project(folder)
    rows = [{"prompt": f"question {n}", "interaction_kwargs": KWARGS} for n in range(2)]
    for name in ("shards", "folder", "saved/train"):
        (folder / name).mkdir(parents=True)
    for n, row in enumerate(rows):
        parquet.write_table(pa.Table.from_pylist([row]), folder / "shards" / f"{n}.parquet")
        (folder / "folder" / f"{n}.jsonl").write_text(json.dumps(row))
    cells = json.dumps(KWARGS).replace('"', '""')
    text = f'prompt,interaction_kwargs\nquestion 0,"{cells}"\nquestion 1,"{cells}"\n'
    (folder / "rows.csv.gz").write_bytes(gzip.compress(text.encode()))
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(folder / "saved/train/data.arrow", table.schema) as stream:
        stream.write_table(table)
    (folder / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (folder / "saved/train/dataset_info.json").write_text("{}")
    (folder / "saved/train/state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (folder / "interactions.yaml").write_text(INTERACTIONS)
    return folder


@pytest.fixture
def command(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(project)
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["agent-loop", *arguments])
        exit_code = 0
        try:
            main()
        except SystemExit as ended:
            exit_code = int(ended.code or 0)
        captured = capsys.readouterr()
        return exit_code, captured.out + captured.err

    return call


PATH = "rollout.multi_turn.interaction_config_path=interactions.yaml"
DATA = [argument for source in SOURCES for argument in ("--data", source)]


def test_rollout_reads_rows_of_every_source(command: Command) -> None:
    exit_code, output = command("rollout", "config.yaml", PATH, *DATA, "-n", "1", "--out", "sampled.jsonl")

    assert exit_code == 0, output
    records = [json.loads(line) for line in Path("sampled.jsonl").read_text().splitlines()]
    assert [record["group"] for record in records] == list(range(8))


def test_eval_reads_rows_of_every_source(command: Command) -> None:
    exit_code, output = command("eval", "config.yaml", PATH, *DATA, "-n", "1", "--out", "evaluated", "--json")

    assert exit_code == 0, output
    assert len(json.loads(Path("evaluated/summary.json").read_text())["evaluation"]["rows"]) == 8


def test_train_reads_rows_of_every_source(command: Command) -> None:
    files = f"data.train_files=[{','.join(SOURCES)}]"

    exit_code, output = command(
        "train", "config.yaml", PATH, files, "trainer.total_steps=1", "trainer.save_every=1"
    )

    assert exit_code == 0, output
    state = json.loads(Path("run/checkpoints/step-000001/state.json").read_text())
    files_of_rows = [(file["name"], file["num_rows"]) for file in state["rows"]["train"]["files"]]
    assert files_of_rows == [
        ("shards/0.parquet", 1),
        ("shards/1.parquet", 1),
        ("folder/0.jsonl", 1),
        ("folder/1.jsonl", 1),
        ("rows.csv.gz", 2),
        ("saved/train/data.arrow", 2),
    ]


@pytest.mark.parametrize("source", SOURCES)
def test_check_interaction_reads_rows_of_every_source(command: Command, source: str) -> None:
    exit_code, output = command("check", "interaction", "config.yaml", f"data.train_files=['{source}']", PATH)

    assert exit_code == 0, output
    assert "no row of the data names it" not in output


@pytest.mark.parametrize("name", ["rollout", "eval", "train"])
def test_an_unreadable_source_is_refused_on_one_line(command: Command, name: str) -> None:
    source = ["data.train_files=[shards/*.jsonl]"] if name == "train" else ["--data", "shards/*.jsonl"]

    exit_code, output = command(name, "config.yaml", *source)

    assert exit_code == 2
    assert "'shards/*.jsonl' matches nothing" in output
    assert "Traceback" not in output
