"""Files that commands read and write: their kinds, rows of every source, and outputs that survive a failed write."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from agent_loop.files import file_kinds
from agent_loop.files.file_kinds import EVALUATION, RECORDS, ROWS, RUN, SETTINGS, STORED_TRAJECTORIES, kind_of
from agent_loop.rollout.journal import HEADER
from agent_loop.storage.exclusive import exclusive_file, exclusive_folder
from tests.cli.project import Command, Result, make_stored_project, run

KINDS = {
    "rows.jsonl": ROWS,
    "rows.json": ROWS,
    "rows.jsonl.gz": ROWS,
    "rows.csv": ROWS,
    "rows.csv.gz": ROWS,
    "saved": file_kinds.SAVED_DATASET,
    "splits": file_kinds.SAVED_DATASET,
    "config.yaml": SETTINGS,
    "model": file_kinds.MODEL,
    "sampled.jsonl": RECORDS,
    "sampled.parquet": STORED_TRAJECTORIES,
    "traces.jsonl": file_kinds.TRACES,
    "torn.jsonl": file_kinds.TRACES,
    "evaluated": EVALUATION,
    "runs/demo/train": RUN,
    "runs/demo/train/metrics.jsonl": file_kinds.METRICS,
    "runs/demo/train/checkpoints/step-000003": file_kinds.CHECKPOINT,
    "rollout.journal": file_kinds.JOURNAL,
    "rows.parquet": file_kinds.OTHER_PARQUET,
    "cut.parquet": file_kinds.DAMAGED_PARQUET,
    "task.py": None,
    "runs": None,
    "missing": None,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file of each kind, written by the commands if they are fast."""
    folder = tmp_path_factory.mktemp("kinds")
    make_stored_project(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trace = ["rollout.trace.backend=file", "rollout.trace.path=${trainer.run_dir}.jsonl"]
        run("rollout", "config.yaml", "--out", "sampled.jsonl", "trainer.run_dir=traces", *trace)
        run("eval", "config.yaml", "--out", "evaluated")
        shutil.copy("evaluated/trajectories.parquet", "sampled.parquet")
    (folder / "torn.jsonl").write_bytes((folder / "traces.jsonl").read_bytes()[:200])
    (folder / "rows.json").write_text('[\n{"prompt": "x"}]')
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "x"}'))
    (folder / "rows.csv").write_text("\ufeffprompt,answer\nx,1\n", encoding="utf-8")
    (folder / "rows.csv.gz").write_bytes(gzip.compress(b"prompt,answer\nx,1\n"))
    for file in ("saved/state.json", "saved/dataset_info.json", "splits/dataset_dict.json"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("{}")
    (folder / "rollout.journal").write_bytes(HEADER)
    parquet.write_table(pa.table({"prompt": ["x"]}), folder / "rows.parquet")
    (folder / "cut.parquet").write_bytes((folder / "sampled.parquet").read_bytes()[:1000])
    train = folder / "runs" / "demo" / "train"
    checkpoint = train / "checkpoints" / "step-000003"
    shutil.copytree(folder / "model", checkpoint / "model")
    (checkpoint / "state.json").write_text("{}")
    (train / "trajectories").mkdir()
    shutil.copy(folder / "sampled.parquet", train / "trajectories" / "eval-000000.parquet")
    (train / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    return folder


@pytest.fixture
def kinds(project: Path, monkeypatch: pytest.MonkeyPatch, shell: Command) -> Command:
    monkeypatch.chdir(project)
    return shell


def test_every_kind_of_file_is_recognised(project: Path) -> None:
    assert {name: kind_of(project / name) for name in KINDS} == KINDS


STORED = [RUN, EVALUATION, STORED_TRAJECTORIES, RECORDS]
READERS = {
    **dict.fromkeys(("show", "view", "rescore", "replay"), STORED),
    "traces": [file_kinds.TRACES],
    "export": [RUN, file_kinds.CHECKPOINT],
    **dict.fromkeys(("train", "rollout", "eval", "check server"), (SETTINGS,)),
}
MORE = {
    "view": ["--no-open"],
    "rescore": ["--reward", "script.py:reward"],
    "replay": ["group=0/rollout=0"],
    "export": ["--out", "exported"],
}


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("name", READERS)
def test_a_file_of_another_kind_is_refused_with_its_kind(kinds: Command, name: str) -> None:
    for file, kind in KINDS.items():
        if kind is None or kind in READERS[name] or file == "torn.jsonl":
            continue
        result = kinds(*name.split(), file, *MORE.get(name, []), exit_code=2)
        output = " ".join((result.out + result.err).split())
        assert file in output
        assert "Traceback" not in output
        assert kind.what in output or "is a folder; give" in output or "holds no run" in output, output
        assert "remove" not in output, output


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("show evaluated --step 99", "there are eval: step 0"),
        ("show evaluated --row group=0/rollout=0 --step 99", "there are eval: step 0"),
        ("rescore evaluated --reward script.py:reward --step 99", "there are eval: step 0"),
        ("serve runs/demo/train --port 0", "runs/demo/train/checkpoints/step-000003/model"),
        ("serve model --max-model-len 40000 --port 0", "has 32768 positions; give at most 32768"),
    ],
)
def test_a_missing_step_or_model_is_refused_with_what_is_there(kinds: Command, line: str, shown: str) -> None:
    assert shown in kinds(*line.split(), exit_code=2).err


def test_the_only_run_in_a_folder_is_used(kinds: Command) -> None:
    kinds("show", "runs/demo")


INTERACTIONS = "interaction: [{class_name: gsm8k}]"
KWARGS = {"name": "gsm8k", "ground_truth": "7"}


def write_sources() -> list[str]:
    """Write sources of two rows each, and return their names."""
    rows = [{"prompt": f"question {n}", "interaction_kwargs": KWARGS} for n in range(2)]
    for name in ("shards", "folder", "saved/train"):
        Path(name).mkdir(parents=True)
    for n, row in enumerate(rows):
        parquet.write_table(pa.Table.from_pylist([row]), f"shards/{n}.parquet")
        Path(f"folder/{n}.jsonl").write_text(json.dumps(row))
    cells = json.dumps(KWARGS).replace('"', '""')
    text = f'prompt,interaction_kwargs\nquestion 0,"{cells}"\nquestion 1,"{cells}"\n'
    Path("rows.csv.gz").write_bytes(gzip.compress(text.encode()))
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream("saved/train/data.arrow", table.schema) as stream:
        stream.write_table(table)
    Path("saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    Path("saved/train/dataset_info.json").write_text("{}")
    Path("saved/train/state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    return ["shards/*.parquet", "folder", "rows.csv.gz", "saved:train"]


def test_rollout_reads_rows_of_every_source(command: Command) -> None:
    Path("interactions.yaml").write_text(INTERACTIONS)
    data = [argument for source in write_sources() for argument in ("--data", source)]
    interactions = "rollout.multi_turn.interaction_config_path=interactions.yaml"
    command("rollout", "config.yaml", interactions, *data, "-n", "1", "--out", "sampled.jsonl")
    records = [json.loads(line) for line in Path("sampled.jsonl").read_text().splitlines()]
    assert [record["group"] for record in records] == list(range(8))


IN_THE_WAY = """
import os
from pathlib import Path

def reward(output, row):
    \"""Puts a folder where the output goes, once the rollout has begun.\"""
    with open("calls.log", "a") as log:
        log.write("x")
    os.makedirs(Path(Path("target").read_text(), "in the way"), exist_ok=True)
    return 1.0
"""


@pytest.fixture
def blocked(command: Command) -> Command:
    """Return a command whose output cannot be written at the end, at the path of its first argument."""

    def run(path: str, name: str, *arguments: str, exit_code: int = 0) -> Result:
        Path("blocks.py").write_text(IN_THE_WAY)
        Path("target").write_text(path)
        options = ["-n", "1", "reward.function=blocks.py:reward", *arguments]
        return command(name, "config.yaml", *options, exit_code=exit_code)

    return run


def test_a_run_with_an_unwritable_output_does_not_start(command: Command) -> None:
    Path("task.py").write_text(
        "from pathlib import Path\ndef reward(output, row):\n    Path('ran').touch()\n    return 1.0\n"
    )
    for out in ("rows.jsonl/out.jsonl", "/proc/out.jsonl", ".", "/proc/out.parquet"):
        result = command("rollout", "config.yaml", "--out", out, "rollout.journal=false", exit_code=2)
        assert f"Error: --out is {out!r}, which" in result.err
    for out in ("rows.jsonl/run", "/proc/run"):
        evaluated = command("eval", "config.yaml", "--out", out, exit_code=2)
        trained = command("train", "config.yaml", f"trainer.run_dir={out}", exit_code=2)
        assert f"OutputError: --out is '{out}', which cannot be written or locked" in evaluated.err
        assert f"Error: trainer.run_dir is '{out}', " in trained.err
    assert not Path("ran").exists()


def test_a_second_run_with_the_same_output_is_refused_and_the_first_is_named(command: Command) -> None:
    with (
        exclusive_folder(Path("run"), name="trainer.run_dir"),
        exclusive_file(Path("sampled.jsonl"), name="--out"),
        exclusive_folder(Path("runs/eval"), name="--out"),
    ):
        for arguments in (
            ["train", "config.yaml"],
            ["train", "config.yaml", "--overwrite"],
            ["rollout", "config.yaml", "--out", "sampled.jsonl"],
            ["eval", "config.yaml"],
        ):
            result = command(*arguments, exit_code=2)
            assert f"which another run is writing: process {os.getpid()} on" in result.err
    assert not Path("sampled.jsonl").exists()


@pytest.mark.parametrize("out", ["sampled.jsonl", "sampled.parquet"])
def test_an_output_that_cannot_be_written_at_the_end_is_in_the_journal(blocked: Command, out: str) -> None:
    result = blocked(out, "rollout", "--out", out, exit_code=2)
    assert f"--out is '{out}', which cannot be written" in result.err
    assert f"the trajectories are in the journal '{out}.journal'" in result.err
    num_scored = len(Path("calls.log").read_text())

    shutil.rmtree(out)
    blocked(out, "rollout", "--out", out, "--resume")
    assert len(Path("calls.log").read_text()) == num_scored
    assert Path(out).is_file()
    assert not Path(f"{out}.journal").exists()


@pytest.mark.parametrize("out", ["sampled.jsonl", "sampled.parquet"])
def test_without_a_journal_trajectories_are_written_to_another_file_that_the_error_names(
    blocked: Command, out: str
) -> None:
    result = blocked(out, "rollout", "rollout.journal=false", "--out", out, exit_code=2)
    [spare] = re.findall(r"the trajectories are in '(.*)', as JSON lines", result.err)
    assert len([json.loads(line) for line in Path(spare).read_text().splitlines()]) == 6
    shutil.rmtree(Path(spare).parent)


def test_the_journal_of_an_earlier_rollout_is_kept_under_another_name(command: Command) -> None:
    journal = Path("sampled.jsonl.journal")
    for number in (1, 2):
        journal.write_bytes(b"an hour of turns %d" % number)
        result = command("rollout", "config.yaml", "--out", "sampled.jsonl", "-n", "1", "--max-rows", "1")
        assert f"its journal is now sampled.jsonl.journal.before-{number}" in " ".join(result.out.split())
    kept = [Path(f"{journal}.before-{number}").read_bytes() for number in (1, 2)]
    assert kept == [b"an hour of turns 1", b"an hour of turns 2"]


def test_an_evaluation_names_its_rows_in_the_first_line_and_in_the_summary(command: Command) -> None:
    for arguments, rows_of in (
        (["--on", "train", "data.val_files=[]"], "data.train_files"),
        ([], "data.val_files"),
        (["--data", "rows.jsonl", "data.val_files=[]"], "--data"),
    ):
        result = command("eval", "config.yaml", "-n", "1", "--max-rows", "2", "--overwrite", *arguments)
        assert result.out.splitlines()[0] == f"rows of {rows_of}: rows.jsonl"
        assert json.loads(Path("runs/eval/summary.json").read_text())["rows_of"] == rows_of
