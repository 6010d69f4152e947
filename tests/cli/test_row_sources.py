"""Every command that reads rows accepts globs, folders, compressed files, CSV files and saved data sets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.cli.project import Command, make_project

SOURCES = ["shards/*.parquet", "folder", "rows.csv.gz", "saved:train"]
"""Two rows in each."""
INTERACTIONS = "interaction: [{class_name: gsm8k}]"
KWARGS = {"name": "gsm8k", "ground_truth": "7"}


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
def command(project: Path, monkeypatch: pytest.MonkeyPatch, shell: Command) -> Command:
    monkeypatch.chdir(project)
    return shell


PATH = "rollout.multi_turn.interaction_config_path=interactions.yaml"
DATA = [argument for source in SOURCES for argument in ("--data", source)]


def test_rollout_reads_rows_of_every_source(command: Command) -> None:
    result = command("rollout", "config.yaml", PATH, *DATA, "-n", "1", "--out", "sampled.jsonl")

    assert result.exit_code == 0, result.err
    records = [json.loads(line) for line in Path("sampled.jsonl").read_text().splitlines()]
    assert [record["group"] for record in records] == list(range(8))


def test_an_unreadable_source_is_refused(command: Command) -> None:
    for arguments in (
        ["train", "config.yaml", "data.train_files=[x/*.jsonl]"],
        ["eval", "config.yaml", "--data", "x/*.jsonl"],
    ):
        result = command(*arguments)
        assert result.exit_code == 2
        assert "'x/*.jsonl' matches nothing" in result.err
