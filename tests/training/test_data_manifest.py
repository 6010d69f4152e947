"""A resumed run compares the files of its rows with the manifest, and reports changes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_loop.errors import CheckpointError
from agent_loop.rollout.rows import load_row_files
from agent_loop.training.checkpoint import Checkpoint
from agent_loop.training.manifest import DataManifest
from agent_loop.training.run import check_rows_unchanged


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with two shards."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "shards"
    folder.mkdir()
    for name in "ab":
        rows = [{"prompt": f"{name} {number}"} for number in range(5)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def manifest(*sources: str) -> DataManifest:
    return DataManifest.of(load_row_files(sources or ["shards"], prompt_key="prompt"))


def checkpoint(**rows: DataManifest) -> Checkpoint:
    return Checkpoint(
        path=Path("run/checkpoints/step-000002"),
        step=2,
        config={},
        rows=rows,
    )


def add(folder: Path) -> None:
    (folder / "c.jsonl").write_text('{"prompt": "c"}\n')


def add_many(folder: Path) -> None:
    for name in "cdefghi":
        (folder / f"{name}.jsonl").write_text(f'{{"prompt": "{name}"}}\n')


def remove(folder: Path) -> None:
    (folder / "b.jsonl").unlink()


def change_a_byte(folder: Path) -> None:
    path = folder / "b.jsonl"
    path.write_text(path.read_text().replace("b 3", "b 4"))


def swap(folder: Path) -> None:
    (folder / "a.jsonl").rename(folder / "c.jsonl")


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (add, "added: shards/c.jsonl"),
        (add_many, "added: shards/g.jsonl; and 2 more"),
        (remove, "removed: shards/b.jsonl"),
        (change_a_byte, "changed: shards/b.jsonl"),
        (swap, "removed: shards/a.jsonl"),
    ],
)
def test_changes_are_reported_and_other_training_rows_are_refused(
    folder: Path, change: Callable[[Path], None], reported: str
) -> None:
    before = manifest()
    change(folder)
    now = manifest()

    assert reported in str(now.changes_since(before))
    with pytest.raises(CheckpointError, match=r"set data\.allow_changed_rows=true") as refused:
        check_rows_unchanged(checkpoint(train=before), {"train": now}, allow_changed=False)
    assert reported in str(refused.value)
    assert "step-000002" in str(refused.value)
    [note] = check_rows_unchanged(checkpoint(train=before), {"train": now}, allow_changed=True)
    assert reported in note
    [note] = check_rows_unchanged(checkpoint(val=before), {"val": now}, allow_changed=False)
    assert note.startswith("the rows of data.val_files changed since that checkpoint")


def test_the_same_rows_in_other_files_are_not_a_change(folder: Path, tmp_path: Path) -> None:
    before = manifest()
    text = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    (tmp_path / "moved.jsonl.gz").write_bytes(gzip.compress(text))

    assert manifest("moved.jsonl.gz").changes_since(before) is None
    assert manifest(str(folder)).changes_since(before) is None
    assert manifest("shards", "shards").changes_since(before) == ("the files come in another order or number")
