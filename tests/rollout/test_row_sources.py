"""Sources of rows: globs, folders of shards, compressed files, CSV files and folders saved by `datasets`."""

from __future__ import annotations

import csv
import gzip
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.rows import load_row_files, load_rows
from tests.harness import examples

ROWS = [{"prompt": f"question {n}", "answer": str(n)} for n in range(6)]
MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1, 2?"}]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, rows: list[dict[str, Any]]) -> None:
    """Write rows in the format of the file's suffix."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    kind = path.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif kind == "arrow":
        write_stream(path, rows)
    else:
        text = io.StringIO(newline="")
        if kind == "csv":
            writer = csv.DictWriter(text, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        else:
            text.write(
                json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows)
            )
        data = text.getvalue().encode()
        Path(path).write_bytes(gzip.compress(data) if path.endswith(".gz") else data)


def write_stream(path: str, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


def write_saved(path: str, rows: list[dict[str, Any]], **state: Any) -> None:
    """Write a folder of two shards as `Dataset.save_to_disk` does."""
    Path(path).mkdir(parents=True)
    names = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for name, part in zip(names, (rows[:2], rows[2:]), strict=True):
        write_stream(f"{path}/{name}", part)
    Path(path, "dataset_info.json").write_text("{}")
    files = {"_data_files": [{"filename": name} for name in names]}
    Path(path, "state.json").write_text(json.dumps(files | state))


def load(*sources: str) -> list[dict[str, Any]]:
    """Return the rows without the messages that were created from their prompts."""
    rows = load_rows(sources, prompt_key="prompt")
    return [{name: value for name, value in row.items() if name != "raw_prompt"} for row in rows]


def refusal(*sources: str, kind: type[Exception] = DataError) -> str:
    with pytest.raises(kind) as refused:
        load(*sources)
    return str(refused.value)


KINDS = ["jsonl", "json", "csv", "parquet", "arrow", "jsonl.gz", "json.gz", "csv.gz"]


@pytest.mark.parametrize("kind", KINDS)
def test_files_globs_and_folders_of_every_kind_are_read_in_the_order_of_their_names(kind: str) -> None:
    write(f"data/b.{kind}", ROWS[2:4])
    write(f"data/a.{kind}", ROWS[:2])
    write(f"data/deep/c.{kind}", ROWS[4:])

    assert load(f"data/b.{kind}") == ROWS[2:4]
    assert load("data") == load("data/") == load(f"data/*.{kind}") == ROWS[:4]
    assert load(f"data/**/*.{kind}") == ROWS
    assert load(f"data/[b-z].{kind}", "data/deep") == ROWS[2:]


def test_each_file_is_listed_with_its_rows(folder: Path) -> None:
    write("data/a.jsonl", ROWS[:2])
    write("data/b.jsonl", ROWS[2:])
    (folder / "task.py").write_text("def rows():\n    return [{'prompt': 'x'}]\n")
    files = load_row_files(["data", "task.py:rows"], prompt_key="prompt")
    named = [(file.name, len(file.rows)) for file in files]
    assert named == [("data/a.jsonl", 2), ("data/b.jsonl", len(ROWS) - 2), ("task.py:rows", 1)]


def test_a_glob_that_matches_nothing_is_refused_with_the_nearest_folder() -> None:
    write("data/train.parquet", ROWS)

    refused = refusal("data/trian/*.parquet")
    assert "'data/trian/*.parquet' matches nothing" in refused
    assert "the nearest folder that exists is 'data', with train.parquet" in refused
    assert "matches only folders, such as 'data'" in refusal("d*")
    assert "missing.jsonl' does not exist (the nearest folder that exists is 'data'" in refusal(
        "data/missing.jsonl"
    )
    assert "is neither a folder nor a file of a known kind" in refusal("data/missing", kind=ConfigError)
    assert "is a URL; download it" in refusal("hf://datasets/x", kind=ConfigError)


def test_the_error_for_a_folder_without_rows_states_what_the_folder_is(folder: Path) -> None:
    write("outer/inner/a.jsonl", ROWS)
    (folder / "empty").mkdir()
    (folder / "run" / "checkpoints").mkdir(parents=True)

    assert "folder 'outer' holds no file with rows" in refusal("outer")
    assert "as 'outer/**/*.jsonl' does" in refusal("outer")
    assert "folder 'empty' holds no file with rows" in refusal("empty")
    assert "'run' is the folder of a training run" in refusal("run")


def test_files_that_do_not_belong_together_are_refused(folder: Path) -> None:
    write("kinds/a.jsonl", ROWS)
    write("kinds/b.parquet", ROWS)
    write("splits/test-00000-of-00001.parquet", ROWS)
    write("splits/train-00000-of-00001.parquet", ROWS)
    write("notes/a.jsonl", ROWS)
    (folder / "notes" / "a.txt").write_text("x")

    assert "several kinds: .jsonl (a.jsonl) and .parquet (b.parquet); name one kind" in refusal("kinds")
    assert "several kinds" in refusal("kinds/*")
    assert "several splits: test, train; name those of one, as in folder/test*.parquet" in refusal("splits")
    assert load("splits/train*.parquet", "splits/test*.parquet") == ROWS * 2
    assert "the kind of data file 'notes/a.txt' is unknown" in refusal("notes/*", kind=ConfigError)


def test_a_bad_row_is_refused_with_its_shard_and_line() -> None:
    write("data/a.jsonl.gz", ROWS)
    write("data/b.jsonl.gz", [ROWS[0], {"answer": "1"}])

    assert refusal("data").startswith("data/b.jsonl.gz line 2 has no 'prompt'")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "json"])
def test_damaged_gzip_is_refused_with_its_location(folder: Path, kind: str) -> None:
    write(f"whole.{kind}.gz", [{"prompt": f"{n}" * 50} for n in range(1000)])
    data = Path(f"whole.{kind}.gz").read_bytes()
    Path(f"cut.{kind}.gz").write_bytes(data[: len(data) // 2])
    Path(f"bits.{kind}.gz").write_bytes(data[:-8] + b"\0" * 8)
    Path(f"plain.{kind}.gz").write_bytes(gzip.decompress(data))

    assert f"cut.{kind}.gz is damaged after line" in refusal(f"cut.{kind}.gz")
    assert f"bits.{kind}.gz is damaged after line" in refusal(f"bits.{kind}.gz")
    assert "Not a gzipped file" in refusal(f"plain.{kind}.gz")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.jsonl.gz", "rows.csv.gz"])
def test_bytes_that_are_not_utf8_are_refused_with_their_line(folder: Path, name: str) -> None:
    data = (
        b'prompt\nfine\n"caf\xe9"\n' if ".csv" in name else b'{"prompt": "fine"}\n\n{"prompt": "caf\xe9"}\n'
    )
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)

    assert f"{name} line 3 cannot be read as UTF-8 text" in refusal(name)


def test_a_file_may_begin_with_a_byte_order_mark(folder: Path) -> None:
    (folder / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "x"}')
    (folder / "rows.csv").write_bytes(b"\xef\xbb\xbfprompt\r\nx\r\n")

    assert load("rows.jsonl", "rows.csv") == [{"prompt": "x"}] * 2


def test_cells_of_csv_are_text_except_messages_and_mappings_in_known_columns(folder: Path) -> None:
    cells = {
        "prompt": json.dumps(MESSAGES),
        "answer": "007",
        "level": "3",
        "nothing": "",
        "shape": "[1, 2]",
        "extra_info": '{"level": 3}',
        "tools_kwargs": '{"add": {"create_kwargs": {"x": 1}}}',
        "tool_selection": '["add"]',
    }
    write("rows.csv", [cells])

    [row] = load("rows.csv")

    assert row == cells | {
        "prompt": MESSAGES,
        "nothing": None,
        "extra_info": {"level": 3},
        "tools_kwargs": {"add": {"create_kwargs": {"x": 1}}},
        "tool_selection": ["add"],
    }


@pytest.mark.parametrize(
    "prompt", ["Why, 'so'?", "[1, 2] is a list", "[INST] x", '{"a": 1}', '[{"a": 1}]', "7"]
)
def test_other_prompts_of_csv_become_one_user_message(prompt: str) -> None:
    write("rows.csv", [{"question": prompt}])

    [row] = load_rows(["rows.csv"], prompt_key="question")

    assert row["raw_prompt"] == [{"role": "user", "content": prompt}]


def test_a_cell_of_csv_may_be_long_and_have_lines(folder: Path) -> None:
    limit = csv.field_size_limit()
    rows = [
        {"prompt": "first\nsecond\r\nthird " + "x" * 200_000, "answer": "a"},
        {"prompt": "y", "answer": "b"},
    ]
    write("rows.csv", rows)
    (folder / "bad.csv").write_text('prompt\n"a\nb"\n\nc,d\n')

    assert load("rows.csv") == rows
    assert "bad.csv line 5 does not have one cell per column" in refusal("bad.csv")
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "there are no rows in rows.csv"),
        ("prompt,answer\n", "there are no rows in rows.csv"),
        ("prompt;answer\nx;1\n", "has no 'prompt' (columns: prompt;answer)"),
        ("prompt,a\nx,1\ny\n", "rows.csv line 3 does not have one cell per column"),
        ("prompt,a\nx,1,2\n", "rows.csv line 2 does not have one cell per column"),
        ('prompt,a\nx,1\n"y,2\nz,3\n', "rows.csv is not CSV after line 2 (unexpected end of data)"),
        ('prompt,a\nx,1\n"y"z,2\n', "rows.csv is not CSV after line 2"),
        ("prompt,a\n,1\n", "rows.csv line 2 has no 'prompt'"),
        ("prompt\n\"[{'role': 'user', 'content': 'x'}]\"\n", "rows.csv line 2, column 'prompt' is not JSON"),
        ('prompt,tools_kwargs\nx,"{a: 1}"\n', "rows.csv line 2, column 'tools_kwargs' is not JSON"),
        ("prompt,tools_kwargs\nx,add\n", "rows.csv line 2: tools_kwargs is 'add' (str)"),
    ],
)
def test_invalid_csv_is_refused_with_its_location(folder: Path, text: str, complaint: str) -> None:
    (folder / "rows.csv").write_text(text)

    assert complaint in refusal("rows.csv")


@examples(50)
@given(cells=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=3))
def test_any_text_is_read_back_from_csv(cells: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    write(str(path), [{"prompt": "x", "answer": cell} for cell in cells])

    assert [row["answer"] for row in load(str(path))] == cells


def test_a_split_of_a_saved_folder_is_selected_after_a_colon(folder: Path) -> None:
    write_saved("saved/train", ROWS[:4])
    write_saved("saved/test", ROWS[3:])
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')

    assert load("saved:train") == load("saved/train") == ROWS[:4]
    assert "is a DatasetDict with the splits train, test; name one, as in saved:train" in refusal("saved")
    assert "'saved' has no split 'tset'; did you mean 'test'?" in refusal("saved:tset")
    assert "'saved/test' is one Dataset without splits" in refusal("saved/test:test")
    write("data/a.jsonl", ROWS)
    assert "which is not a folder saved by `datasets`" in refusal("data:train")
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert load("saved") == ROWS[:4]


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("state.json", b"{", "state.json', which `datasets` writes, is damaged"),
        (
            "state.json",
            b'{"_data_files": [{"filename": "x.arrow"}]}',
            "x.arrow cannot be read as Arrow",
        ),
        ("state.json", b'{"_data_files": [], "_indices_files": [{}]}', "was saved with an indices mapping"),
        ("data-00001-of-00002.arrow", b"x" * 100, "it has no end marker, so it was truncated; copy it again"),
        ("data-00001-of-00002.arrow", b"ARROW1" + b"x" * 100, "cannot be read as Arrow"),
    ],
)
def test_a_damaged_saved_folder_is_refused_by_file(
    folder: Path, file: str, content: bytes, complaint: str
) -> None:
    write_saved("saved", ROWS)
    (folder / "saved" / file).write_bytes(content)

    assert complaint in refusal("saved")


def test_a_truncated_arrow_file_is_refused_and_no_changed_byte_crashes() -> None:
    write("rows.arrow", ROWS)
    whole = Path("rows.arrow").read_bytes()
    for place in range(0, len(whole), 11):
        Path("damaged.arrow").write_bytes(whole[:place])
        assert "damaged.arrow cannot be read as Arrow" in refusal("damaged.arrow")
        Path("damaged.arrow").write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with suppress(DataError):  # (a changed letter of a text is not detected)
            load("damaged.arrow")


@pytest.mark.skipif(not hasattr(pa, "json_"), reason="this pyarrow has no JSON type")
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns_of_json_are_decoded(kind: str) -> None:
    field = pa.json_(pa.string())
    message = pa.struct([("role", pa.string()), ("content", field)])
    content = pa.array(['[{"type": "text", "text": "x"}]', '"y"', None], pa.string())
    roles = pa.array(["user", "user", "assistant"])
    messages = pa.StructArray.from_arrays(
        [roles, pa.ExtensionArray.from_storage(field, content)], fields=list(message)
    )
    prompts = pa.ListArray.from_arrays(pa.array([0, 1, 3], pa.int32()), messages)
    answers = pa.ExtensionArray.from_storage(field, pa.array(["[1]", None], pa.string()))
    table = pa.table({"prompt": prompts, "answer": answers})
    if kind == "parquet":
        parquet.write_table(table, "rows.parquet")
    else:
        with pa.ipc.new_stream("rows.arrow", table.schema) as stream:
            stream.write_table(table)

    first, second = load(f"rows.{kind}")

    assert first == {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "answer": [1],
    }
    assert second["prompt"][0]["content"] == "y"
    assert second["prompt"][1]["content"] is None
    assert second["answer"] is None


def test_folders_that_the_datasets_package_saved_are_read(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": MESSAGES, "answer": n, "label": "a"} for n in range(7)]
    dataset = datasets.Dataset.from_list(rows)
    quiet = datasets.utils.logging
    quiet.disable_progress_bar()
    dataset.save_to_disk("one", num_shards=3)
    dataset.select([5, 1]).save_to_disk("picked")
    dataset.select([]).save_to_disk("none")
    datasets.DatasetDict(train=dataset, test=dataset.select([2])).save_to_disk("both")

    assert load("one") == load("both:train") == rows
    assert load("picked") == [rows[5], rows[1]]
    assert load("both:test") == [rows[2]]
    assert "there are no rows in none" in refusal("none")
    assert "with the splits train, test" in refusal("both")


def test_arrow_files_with_random_access_are_read_too() -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file("rows.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=4)

    assert load("rows.arrow") == ROWS
