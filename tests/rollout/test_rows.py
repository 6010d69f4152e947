"""Rows of files, folders and functions, how they are refused, and their selection by the step alone."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.errors import ConfigError, DataError
from agent_loop.rollout.rows import RowSampler, load_row_files, load_rows, prepare_rows
from tests.harness import examples
from tests.helpers import user

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
        write_stream(path, pa.Table.from_pylist(rows))
    else:
        text = io.StringIO(newline="")
        if kind == "csv":
            writer = csv.DictWriter(text, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        else:
            lines = (json.dumps(row) + "\n\n" for row in rows)
            text.write(json.dumps(rows) if kind == "json" else "".join(lines))
        data = text.getvalue().encode()
        Path(path).write_bytes(gzip.compress(data) if path.endswith(".gz") else data)


def write_stream(path: str, table: pa.Table) -> None:
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


def write_saved(path: str, rows: list[dict[str, Any]]) -> None:
    """Write a folder of two shards as `Dataset.save_to_disk` does."""
    Path(path).mkdir(parents=True)
    names = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for name, part in zip(names, (rows[:2], rows[2:]), strict=True):
        write_stream(f"{path}/{name}", pa.Table.from_pylist(part))
    Path(path, "dataset_info.json").write_text("{}")
    Path(path, "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


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


def test_each_file_is_listed_with_its_rows() -> None:
    write("data/a.jsonl", ROWS[:2])
    write("data/b.jsonl", ROWS[2:])
    Path("task.py").write_text(f"def rows():\n    yield {{'prompt': {MESSAGES}}}\n")
    files = load_row_files(["data", "task.py:rows"], prompt_key="prompt")
    named = [(file.name, len(file.rows)) for file in files]
    assert named == [("data/a.jsonl", 2), ("data/b.jsonl", len(ROWS) - 2), ("task.py:rows", 1)]
    assert files[-1].rows == [{"prompt": MESSAGES, "raw_prompt": MESSAGES}]


def test_a_source_without_rows_is_refused_with_what_is_there_instead() -> None:
    write("data/train.parquet", ROWS)
    write("outer/inner/a.jsonl", ROWS)
    for name in ("empty", "run/checkpoints"):
        Path(name).mkdir(parents=True)
    refused = refusal("data/trian/*.parquet")
    assert "'data/trian/*.parquet' matches nothing" in refused
    assert "the nearest folder that exists is 'data', with train.parquet" in refused
    assert "matches only folders, such as 'data'" in refusal("d*")
    assert "does not exist (the nearest folder that exists is 'data'" in refusal("data/missing.jsonl")
    assert "is neither a folder nor a file of a known kind" in refusal("data/missing", kind=ConfigError)
    assert "is a URL; download it" in refusal("hf://datasets/x", kind=ConfigError)
    assert "folder 'outer' holds no file with rows" in refusal("outer")
    assert "as 'outer/**/*.jsonl' does" in refusal("outer")
    assert "folder 'empty' holds no file with rows" in refusal("empty")
    assert "'run' is the folder of a training run" in refusal("run")


def test_files_that_do_not_belong_together_are_refused() -> None:
    for name in ("kinds/a.jsonl", "kinds/b.parquet", "notes/a.jsonl"):
        write(name, ROWS)
    for split in ("test", "train"):
        write(f"splits/{split}-00000-of-00001.parquet", ROWS)
    Path("notes/a.txt").write_text("x")
    assert "several kinds: .jsonl (a.jsonl) and .parquet (b.parquet); name one kind" in refusal("kinds")
    assert "several kinds" in refusal("kinds/*")
    assert "several splits: test, train; name those of one, as in folder/test*.parquet" in refusal("splits")
    assert load("splits/train*.parquet", "splits/test*.parquet") == ROWS * 2
    assert "the kind of data file 'notes/a.txt' is unknown" in refusal("notes/*", kind=ConfigError)


def test_messages_have_one_form_whatever_wrote_them() -> None:
    def chat(name: str, arguments: Any, content: Any = "hi") -> list[dict[str, Any]]:
        call = {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}
        return [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]

    text, image = {"type": "text", "text": "hi"}, {"type": "image", "image": "a.png"}
    messages = [
        chat("calculate", {"expression": "1 + 2"}),
        chat("search", {"query": "a", "options": {"top": 3}}),
        chat("list", {}, content=[text, image]),
    ]
    of_text = [{"prompt": prompt} for prompt in messages[:2]]
    write("rows.parquet", of_text)
    write("rows.jsonl", of_text)
    write("image.parquet", [{"prompt": messages[2][:1]}])
    nested = {"query": "a", "options": {"top": np.int64(3)}}
    in_memory = [
        chat("calculate", '{"expression": "1 + 2"}', content=np.array([text], dtype=object)),
        np.array(chat("search", nested, content=[text])),
        chat("list", "", content=[text, image]),
    ]
    for path in ("rows.jsonl", "rows.parquet"):
        assert [row["raw_prompt"] for row in load_rows([path])] == messages[:2]
    assert load_rows(["image.parquet"])[0]["raw_prompt"] == messages[2][:1]
    prepared = prepare_rows([{"prompt": prompt} for prompt in in_memory], prompt_key="prompt")
    assert [row["raw_prompt"] for row in prepared] == messages


def test_text_becomes_one_user_message_and_raw_prompt_is_unchanged() -> None:
    write("rows.jsonl", [{"question": "Why?"}, {"raw_prompt": user("How?")}])
    first, second = load_rows(["rows.jsonl"], prompt_key="question")
    assert first == {"question": "Why?", "raw_prompt": user("Why?")}
    assert second["raw_prompt"] == user("How?")


def test_loading_rows_does_not_import_torch() -> None:
    code = "import sys, agent_loop.rollout.rows; sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def with_columns(**columns: Any) -> str:
    return json.dumps({"prompt": "What is 1 + 2?", **columns})


def with_message(**fields: Any) -> str:
    return with_columns(prompt=[{"role": "user", "content": "", **fields}])


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("rows.jsonl", '{"prompt": "a"}\n{"prompt": \n', "rows.jsonl line 2 is not JSON"),
        ("rows.json", '[\n{"prompt": }]', "rows.json is not JSON: Expecting value at line 2 column 12"),
        ("rows.json", '{"prompt": "a"}', "holds a dict; a .json data file holds a list"),
        ("rows.jsonl", "[1]\n", "line 1 is a list; a row is a mapping"),
        ("rows.jsonl", '{"prompts": "a", "b": 1}', "line 1 has no 'prompt' (columns: prompts, b)"),
        ("rows.jsonl", '{"prompts": "a", "b": 1}', "mean 'prompts'"),
        ("rows.json", '[{"prompt": "a"}, {"prompt": null}]', "row 2 has no 'prompt'"),
        ("rows.json", '[{"prompt": 3}]', "row 1, column 'prompt' is a int; give text"),
        ("rows.json", '[{"prompt": []}]', "is an empty list"),
        ("rows.json", '[{"prompt": ["hi"]}]', "messages[0] is 'hi'"),
        ("rows.json", '[{"prompt": [{"content": "hi"}]}]', "messages[0] has the keys ['content']"),
        ("rows.json", "[]", "there are no rows in rows.json"),
        ("rows.json", f"[{'9' * 5000}]", "an integer of thousands of digits"),
        ("rows.jsonl", "9" * 5000, "an integer of thousands of digits"),
        ("rows.parquet", "PAR", "cannot be read as Parquet"),
        ("rows.jsonl", with_columns(tools_kwargs=5), "line 1: tools_kwargs is 5 (int); give a mapping"),
        ("rows.jsonl", with_columns(tools_kwargs={"add": 5}), "tools_kwargs.add is 5 (int)"),
        (
            "rows.jsonl",
            with_columns(tools_kwargs={"add": {"create_kwargs": [1]}}),
            "tools_kwargs.add.create_kwargs is [1] (list)",
        ),
        ("rows.jsonl", with_columns(extra_info={"tools_kwargs": 5}), "tools_kwargs is 5"),
        ("rows.jsonl", with_columns(interaction_kwargs=[1]), "interaction_kwargs is [1] (list)"),
        ("rows.jsonl", with_columns(agent_name=5), "agent_name is 5 (int)"),
        ("rows.jsonl", with_columns(self=1), "column 'self', which is an argument of every agent loop"),
        ("rows.jsonl", with_columns(sampling_params=1), "a column 'sampling_params'"),
        ("rows.jsonl", with_message(content=5), "messages[0].content is 5 (int)"),
        ("rows.jsonl", with_message(content=[5]), "messages[0].content[0] is 5"),
        ("rows.jsonl", with_message(tool_calls=5), "messages[0].tool_calls is 5 (int)"),
        ("rows.csv", "", "there are no rows in rows.csv"),
        ("rows.csv", "prompt,answer\n", "there are no rows in rows.csv"),
        ("rows.csv", "prompt;answer\nx;1\n", "has no 'prompt' (columns: prompt;answer)"),
        ("rows.csv", "prompt,a\nx,1\ny\n", "rows.csv line 3 does not have one cell per column"),
        ("rows.csv", "prompt,a\nx,1,2\n", "rows.csv line 2 does not have one cell per column"),
        ("rows.csv", 'prompt\n"a\nb"\n\nc,d\n', "rows.csv line 5 does not have one cell per column"),
        ("rows.csv", 'prompt,a\nx,1\n"y,2\nz,3\n', "not CSV after line 2 (unexpected end of data)"),
        ("rows.csv", 'prompt,a\nx,1\n"y"z,2\n', "rows.csv is not CSV after line 2"),
        ("rows.csv", "prompt,a\n,1\n", "rows.csv line 2 has no 'prompt'"),
        ("rows.csv", "prompt\n\"[{'role': 'user', 'content': 'x'}]\"\n", "column 'prompt' is not JSON"),
        ("rows.csv", 'prompt,tools_kwargs\nx,"{a: 1}"\n', "line 2, column 'tools_kwargs' is not JSON"),
        ("rows.csv", "prompt,tools_kwargs\nx,add\n", "rows.csv line 2: tools_kwargs is 'add' (str)"),
        ("rows.jsonl", '{"prompt": "fine"}\n\n{"prompt": "caf\xe9"}\n', "line 3 cannot be read as UTF-8"),
        ("rows.csv", 'prompt\nfine\n"caf\xe9"\n', "line 3 cannot be read as UTF-8"),
    ],
)
def test_an_invalid_file_is_refused_with_its_location(name: str, text: str, complaint: str) -> None:
    Path(name).write_bytes(text.encode("latin-1"))
    refused = refusal(name)
    assert complaint in refused
    assert name in refused


def test_a_bad_row_of_a_compressed_shard_is_refused_with_its_line() -> None:
    write("data/a.jsonl.gz", ROWS)
    write("data/b.jsonl.gz", [ROWS[0], {"answer": "1"}])
    assert refusal("data").startswith("data/b.jsonl.gz line 3 has no 'prompt'")
    Path("rows.csv.gz").write_bytes(gzip.compress(b'prompt\nfine\n"caf\xe9"\n'))
    assert "rows.csv.gz line 3 cannot be read as UTF-8 text" in refusal("rows.csv.gz")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "json"])
def test_damaged_gzip_is_refused_with_its_location(kind: str) -> None:
    write(f"whole.{kind}.gz", [{"prompt": f"{n}" * 50} for n in range(1000)])
    data = Path(f"whole.{kind}.gz").read_bytes()
    for name, damaged in {"cut": data[: len(data) // 2], "bits": data[:-8] + b"\0" * 8}.items():
        Path(f"{name}.{kind}.gz").write_bytes(damaged)
        assert f"{name}.{kind}.gz is damaged after line" in refusal(f"{name}.{kind}.gz")
    Path(f"plain.{kind}.gz").write_bytes(gzip.decompress(data))
    assert "Not a gzipped file" in refusal(f"plain.{kind}.gz")


DATA = """
def raises():
    raise KeyError("x")

def raises_later():
    yield {"prompt": "x"}
    raise RuntimeError("no more")

def ends_the_process():
    raise SystemExit(3)

def needs_arguments(count):
    return []

async def is_async():
    return []

def returns_nothing():
    pass
"""


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("raises", "raised KeyError: 'x' (data.py line 3); fix the function"),
        ("raises_later", "raised RuntimeError: no more (data.py line 7)"),
        ("ends_the_process", "raised SystemExit: 3"),
        ("needs_arguments", "missing 1 required positional argument: 'count'"),
        ("is_async", "define it with def, not with async def"),
        ("returns_nothing", "returned None"),
    ],
)
def test_the_error_of_a_data_function_names_its_line(function: str, complaint: str) -> None:
    Path("data.py").write_text(DATA)
    refused = refusal(f"data.py:{function}")
    assert complaint in refused
    assert f"data.py:{function}" in refused


def test_a_file_may_begin_with_a_byte_order_mark() -> None:
    Path("rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "x"}')
    Path("rows.csv").write_bytes(b"\xef\xbb\xbfprompt\r\nx\r\n")
    assert load("rows.jsonl", "rows.csv") == [{"prompt": "x"}] * 2


def test_cells_of_csv_are_text_except_messages_and_mappings_in_known_columns() -> None:
    cells = {"prompt": json.dumps(MESSAGES), "answer": "007", "nothing": "", "shape": "[1, 2]"}
    known = {
        "extra_info": {"level": 3},
        "tools_kwargs": {"add": {"create_kwargs": {"x": 1}}},
        "tool_selection": ["add"],
    }
    write("rows.csv", [cells | {name: json.dumps(value) for name, value in known.items()}])
    assert load("rows.csv") == [cells | known | {"prompt": MESSAGES, "nothing": None}]


@pytest.mark.parametrize(
    "prompt", ["Why, 'so'?", "[1, 2] is a list", "[INST] x", '{"a": 1}', '[{"a": 1}]', "7"]
)
def test_other_prompts_of_csv_become_one_user_message(prompt: str) -> None:
    write("rows.csv", [{"question": prompt}])
    [row] = load_rows(["rows.csv"], prompt_key="question")
    assert row["raw_prompt"] == user(prompt)


def test_a_cell_of_csv_may_be_long_and_have_lines() -> None:
    limit = csv.field_size_limit()
    rows = [{"prompt": "first\nsecond\r\nthird " + "x" * 200_000, "answer": "a"}, ROWS[0]]
    write("rows.csv", rows)
    assert load("rows.csv") == rows
    assert csv.field_size_limit() == limit


@examples(50)
@given(cells=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=3))
def test_any_text_is_read_back_from_csv(cells: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    write(str(path), [{"prompt": "x", "answer": cell} for cell in cells])
    assert [row["answer"] for row in load(str(path))] == cells


def test_a_split_of_a_saved_folder_is_selected_after_a_colon() -> None:
    write_saved("saved/train", ROWS[:4])
    write_saved("saved/test", ROWS[3:])
    write("data/a.jsonl", ROWS)
    Path("saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert load("saved:train") == load("saved/train") == ROWS[:4]
    assert "is a DatasetDict with the splits train, test; name one, as in saved:train" in refusal("saved")
    assert "'saved' has no split 'tset'; did you mean 'test'?" in refusal("saved:tset")
    assert "'saved/test' is one Dataset without splits" in refusal("saved/test:test")
    assert "which is not a folder saved by `datasets`" in refusal("data:train")
    Path("saved/dataset_dict.json").write_text('{"splits": ["train"]}')
    assert load("saved") == ROWS[:4]


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("state.json", b"{", "state.json', which `datasets` writes, is damaged"),
        ("state.json", b'{"_data_files": [{"filename": "x.arrow"}]}', "x.arrow cannot be read as Arrow"),
        ("state.json", b'{"_data_files": [], "_indices_files": [{}]}', "was saved with an indices mapping"),
        ("data-00001-of-00002.arrow", b"x" * 100, "it has no end marker, so it was truncated; copy it again"),
        ("data-00001-of-00002.arrow", b"ARROW1" + b"x" * 100, "cannot be read as Arrow"),
    ],
)
def test_a_damaged_saved_folder_is_refused_by_file(file: str, content: bytes, complaint: str) -> None:
    write_saved("saved", ROWS)
    Path("saved", file).write_bytes(content)
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
    def decoded_later(*values: str | None) -> Any:
        return pa.ExtensionArray.from_storage(field, pa.array(values, pa.string()))

    field = pa.json_(pa.string())
    message = pa.struct([("role", pa.string()), ("content", field)])
    contents = decoded_later('[{"type": "text", "text": "x"}]', '"y"', None)
    messages = pa.StructArray.from_arrays(
        [pa.array(["user", "user", "assistant"]), contents], fields=list(message)
    )
    prompts = pa.ListArray.from_arrays(pa.array([0, 1, 3], pa.int32()), messages)
    table = pa.table({"prompt": prompts, "answer": decoded_later("[1]", None)})
    if kind == "parquet":
        parquet.write_table(table, "rows.parquet")
    else:
        write_stream("rows.arrow", table)
    first, second = load(f"rows.{kind}")
    text = [{"type": "text", "text": "x"}]
    assert first == {"prompt": [{"role": "user", "content": text}], "answer": [1]}
    assert [part["content"] for part in second["prompt"]] == ["y", None]
    assert second["answer"] is None


def test_folders_that_the_datasets_package_saved_are_read() -> None:
    import datasets  # late: it is slow

    rows = [{"prompt": MESSAGES, "answer": n, "label": "a"} for n in range(7)]
    dataset = datasets.Dataset.from_list(rows)
    datasets.utils.logging.disable_progress_bar()
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


def test_every_epoch_contains_every_row_once_in_a_different_order() -> None:
    sampler = RowSampler([{"n": n} for n in range(10)], batch_size=4, seed=3)
    drawn = [row["n"] for step in range(1, 11) for row in sampler.batch(step)]
    epochs = [drawn[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_batch_depends_on_step_and_seed_only() -> None:
    rows = [{"n": n} for n in range(10)]
    sampler = RowSampler(rows, batch_size=4, seed=3)
    sampler.batch(1)
    assert sampler.batch(7) == RowSampler(rows, batch_size=4, seed=3).batch(7)
    assert sampler.batch(7) != RowSampler(rows, batch_size=4, seed=4).batch(7)


def test_a_data_set_smaller_than_the_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"has 2 rows, fewer than data.train_batch_size=3"):
        RowSampler([{}, {}], batch_size=3)
