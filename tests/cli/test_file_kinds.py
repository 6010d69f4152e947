"""A command refuses a file of another kind, with the kind of the file and the command that reads it."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from agent_loop.files.file_kinds import (
    CHECKPOINT,
    DAMAGED_PARQUET,
    EVALUATION,
    JOURNAL,
    METRICS,
    MODEL,
    OTHER_PARQUET,
    RECORDS,
    ROWS,
    RUN,
    SAVED_DATASET,
    SETTINGS,
    STORED_TRAJECTORIES,
    TRACES,
    FileKind,
    kind_of,
)
from agent_loop.rollout.journal import HEADER
from tests.cli.project import Command
from tests.cli.stored_project import make_stored_project, run

KINDS = {
    "rows.jsonl": ROWS,
    "rows.json": ROWS,
    "rows.jsonl.gz": ROWS,
    "rows.csv": ROWS,
    "rows.csv.gz": ROWS,
    "saved": SAVED_DATASET,
    "splits": SAVED_DATASET,
    "config.yaml": SETTINGS,
    "model": MODEL,
    "sampled.jsonl": RECORDS,
    "sampled.parquet": STORED_TRAJECTORIES,
    "traces.jsonl": TRACES,
    "torn.jsonl": TRACES,
    "evaluated": EVALUATION,
    "runs/demo/train": RUN,
    "runs/demo/train/metrics.jsonl": METRICS,
    "runs/demo/train/checkpoints/step-000003": CHECKPOINT,
    "rollout.journal": JOURNAL,
    "rows.parquet": OTHER_PARQUET,
    "cut.parquet": DAMAGED_PARQUET,
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
    for name, files in {
        "saved": ["state.json", "dataset_info.json"],
        "splits": ["dataset_dict.json"],
    }.items():
        (folder / name).mkdir()
        for file in files:
            (folder / name / file).write_text("{}")
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
def command(project: Path, monkeypatch: pytest.MonkeyPatch, shell: Command) -> Command:
    monkeypatch.chdir(project)
    return shell


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_every_kind_of_file_is_recognised(project: Path, name: str, kind: FileKind | None) -> None:
    assert kind_of(project / name) is kind


READERS = {
    "show": [RUN, EVALUATION, STORED_TRAJECTORIES, RECORDS],
    "view": [RUN, EVALUATION, STORED_TRAJECTORIES, RECORDS],
    "rescore": [RUN, EVALUATION, STORED_TRAJECTORIES, RECORDS],
    "replay": [RUN, EVALUATION, STORED_TRAJECTORIES, RECORDS],
    "traces": [TRACES],
    "export": [RUN, CHECKPOINT],
    "train": [SETTINGS],
    "rollout": [SETTINGS],
    "eval": [SETTINGS],
    "check server": [SETTINGS],
}
MORE = {
    "view": ["--no-open"],
    "rescore": ["--reward", "script.py:reward"],
    "replay": ["group=0/rollout=0"],
    "export": ["--out", "exported"],
}


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("name", READERS)
def test_a_file_of_another_kind_is_refused_with_its_kind(command: Command, name: str) -> None:
    for file, kind in KINDS.items():
        if kind is None or kind in READERS[name] or file == "torn.jsonl":
            continue
        result = command(*name.split(), file, *MORE.get(name, []))
        output = " ".join((result.out + result.err).split())
        assert result.exit_code == 2, (name, file)
        assert file in output
        assert "Traceback" not in output
        assert kind.what in output or "is a folder; give" in output or "holds no run" in output, output
        assert "remove" not in output, output


def test_a_missing_step_is_refused_with_the_stored_steps(command: Command) -> None:
    for arguments in (
        ["show", "evaluated", "--step", "99"],
        ["show", "evaluated", "--row", "group=0/rollout=0", "--step", "99"],
        ["rescore", "evaluated", "--reward", "script.py:reward", "--step", "99"],
        ["replay", "evaluated", "group=0/rollout=0", "--step", "99", "--config", "config.yaml"],
    ):
        result = command(*arguments)
        assert result.exit_code == 2
        assert "there are eval: step 0" in result.err


def test_the_only_run_in_a_folder_is_used(command: Command) -> None:
    for arguments in (["show", "runs/demo"], ["view", "runs/demo", "--export", "page.html"]):
        result = command(*arguments)
        assert result.exit_code == 0, result.err


def test_serve_names_the_model_in_a_run_and_the_longest_context(command: Command) -> None:
    result = command("serve", "runs/demo/train", "--port", "0")
    assert result.exit_code == 2
    assert "runs/demo/train/checkpoints/step-000003/model" in result.err
    result = command("serve", "model", "--max-model-len", "40000", "--port", "0")
    assert "--max-model-len is 40000, but the model has 32768 positions; give at most 32768" in result.err
