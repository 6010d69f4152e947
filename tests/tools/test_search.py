"""Search in files through an index, and through services."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web

from agent_loop.errors import ConfigError, DataError
from agent_loop.tools.registry import load_tools
from agent_loop.tools.search.index import Passage, SearchIndex, corpus_files, read_passages
from agent_loop.tools.search.tool import SearchTool
from agent_loop.trajectory import IncidentKind
from tests.tools.harness import execute, kind_of, serving, tool_schema

ROWS = [
    {"title": "Otter", "text": "Otters are mammals that swim in rivers and hold hands while they sleep."},
    {"title": "Oak", "text": "Oaks are trees. An oak may live a thousand years."},
    {"id": "7", "contents": '"River"\nA river carries water to the sea. Rivers flow downhill.'},
]


def write_corpus(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path)


def tool_of(corpus: Path, *schema: Any, **config: Any) -> SearchTool:
    cache_dir = str(corpus.parent / "cache")
    return SearchTool({"corpus": [str(corpus)], "cache_dir": cache_dir, **config}, *schema)


def index_of(corpus: Path) -> SearchIndex:
    return SearchIndex([str(corpus)], cache_dir=corpus.parent / "cache")


async def test_the_best_passages_come_first_in_the_format_of_search_r1(corpus: Path) -> None:
    queries = ["swimming in a river", "how old do oaks get?"]
    result = await execute(tool_of(corpus, topk=2), query_list=queries)
    assert result.response.text == (
        "Doc 1 (Title: Otter)\nOtters are mammals that swim in rivers and hold hands while they sleep.\n\n"
        "Doc 2 (Title: River)\nA river carries water to the sea. Rivers flow downhill.\n---\n"
        "Doc 1 (Title: Oak)\nOaks are trees. An oak may live a thousand years."
    )
    assert result.extra == {"query_count": 2, "total_results": 3}


async def test_query_syntax_of_sqlite_is_treated_as_text(corpus: Path) -> None:
    tool = tool_of(corpus)
    for query in ['oak" OR title:"x', "NEAR(oak, 3)", "oak*", "-oak", "oak AND", "(oak", "ôäk oak", "oak\0"]:
        assert "Title: Oak" in str((await execute(tool, query_list=[query])).response.text), query
    assert (await execute(tool, query_list=["zebra"])).response.text == "No search results found."
    assert kind_of(await execute(tool, query_list=["?!"])) is IncidentKind.TOOL_ERROR


@pytest.mark.parametrize(("snippet_words", "fewest", "most"), [(8, 1, 20), (None, 300, 310)])
async def test_a_long_passage_is_shown_around_the_matches(
    tmp_path: Path, snippet_words: int | None, fewest: int, most: int
) -> None:
    words = " ".join(f"word{n}" for n in range(300))
    tool = tool_of(write_corpus(tmp_path, [{"title": "Long", "text": words}]), snippet_words=snippet_words)
    text = str((await execute(tool, query_list=["word200"])).response.text)
    assert "word200" in text
    assert fewest <= len(text.split()) < most


async def test_a_single_query_and_the_json_format_of_verl_are_supported(corpus: Path) -> None:
    tool = tool_of(corpus, tool_schema("search", "query", query="string"), as_json=True, topk=1)
    result = await execute(tool, query="oak")
    assert json.loads(str(result.response.text)) == {
        "result": "Doc 1 (Title: Oak)\nOaks are trees. An oak may live a thousand years."
    }


def test_the_index_is_built_once_and_rebuilt_when_it_is_damaged_or_the_corpus_changes(corpus: Path) -> None:
    first = index_of(corpus)
    built = first.path.stat().st_mtime_ns
    assert index_of(corpus).path == first.path
    assert first.path.stat().st_mtime_ns == built
    first.path.write_bytes(b"no database")
    assert len(index_of(corpus)) == 3
    write_corpus(corpus.parent, [*ROWS, {"title": "Fig", "text": "A fruit."}])
    second = index_of(corpus)
    assert second.path != first.path
    assert len(second) == 4


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"title": "empty"}', "has none of the fields"),
        (f'{{"text": "x", "more": {"9" * 5000}}}', "is not JSON: it holds"),
        (f'{{"text": "x", "more": {"[" * 100_000}}}', "is not JSON: it is nested"),
    ],
    ids=["without text", "digits", "deep"],
)
def test_a_document_that_cannot_be_read_is_reported_and_leaves_no_files(
    corpus: Path, line: str, says: str
) -> None:
    with corpus.open("a") as file:
        file.write(line)
    with pytest.raises(DataError, match=f"corpus.jsonl line 4 {says}"):
        index_of(corpus)
    assert [path.suffix for path in (corpus.parent / "cache").iterdir()] == [".lock"]


BUILD = """
import sys
from pathlib import Path
from agent_loop.tools.search.index import SearchIndex

index = SearchIndex([sys.argv[1]], cache_dir=Path(sys.argv[2]))
print(len(index), index.path.stat().st_ino)
"""


def test_processes_that_build_concurrently_share_one_index(tmp_path: Path) -> None:
    corpus, cache = write_corpus(tmp_path, ROWS * 500), tmp_path / "cache"
    command = [sys.executable, "-c", BUILD, str(corpus), str(cache)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = [builder.communicate()[0].split() for builder in builders]
    assert {int(size) for size, _ in found} == {1500}
    assert len({inode for _, inode in found}) == 1, "one built it, the others waited"
    assert {path.suffix for path in cache.iterdir()} == {".sqlite", ".lock"}


def test_parquet_and_text_files_and_folders_can_be_searched(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS[:2]), tmp_path / "animals.parquet")
    (tmp_path / "notes.md").write_text("First.\n\n" + "word " * 150 + "\n\nLast.\n")
    files = corpus_files([str(tmp_path)])
    assert [file.name for file in files] == ["animals.parquet", "notes.md"]
    assert list(read_passages(files[0]))[1] == Passage("Oak", ROWS[1]["text"])
    assert [len(passage.text.split()) for passage in read_passages(files[1])] == [1, 150, 1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "needs exactly one of corpus and retrieval_service_url"),
        ({"corpus": ["/no/such/file.jsonl"]}, "is not a supported file or a folder"),
        ({"corpus": ["x.docx"]}, "is not a supported file or a folder"),
        ({"topK": 3, "corpus": ["x.txt"]}, "did you mean 'topk'"),
        ({"retrieval_service_url": "http://x", "headers": {"X": "$NO_SUCH_VARIABLE"}}, "NO_SUCH_VARIABLE"),
    ],
)
def test_a_wrong_config_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SearchTool(config)


async def test_a_retrieval_service_like_search_r1_can_be_used(tmp_path: Path) -> None:
    asked: list[Any] = []

    async def retrieve(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if len(asked) < 3:
            return web.Response(status=503)
        documents = [{"contents": f'"{query}"\nall about it'} for query in asked[-1]["queries"]]
        return web.json_response({"result": [[{"document": each, "score": 1.5}] for each in documents]})

    with serving(web.post("/retrieve", retrieve)) as url:
        config = (
            f"{{retrieval_service_url: '{url}/retrieve', num_workers: 120, rate_limit: 100, timeout: 30}}"
        )
        (tmp_path / "tools.yaml").write_text(
            f"tools: [{{class_name: verl.tools.search_tool.SearchTool, config: {config}}}]"
        )
        tool = load_tools([], config_path=tmp_path / "tools.yaml")["search"]
        assert tool.max_concurrent == 100
        result = await execute(tool, query_list=["otter", "oak"])
    assert result.response.text == "Doc 1 (Title: otter)\nall about it\n---\nDoc 1 (Title: oak)\nall about it"
    assert asked == [{"queries": ["otter", "oak"], "topk": 3, "return_scores": True}] * 3


async def test_get_services_are_supported_and_invalid_responses_are_errors() -> None:
    async def find(request: web.Request) -> web.Response:
        if request.query["query"] == "nonsense":
            return web.json_response({"hits": [{"no": "text"}]})
        hit = {"title": request.query["query"], "text": request.query["topk"]}
        return web.json_response({"hits": [hit] * 5})

    with serving(web.get("/find", find)) as url:
        tool = SearchTool({"retrieval_service_url": f"{url}/find", "method": "get", "topk": 2})
        found = await execute(tool, query_list=["oak"])
        assert found.response.text == "Doc 1 (Title: oak)\n2\n\nDoc 2 (Title: oak)\n2"
        assert kind_of(await execute(tool, query_list=["nonsense"])) is IncidentKind.TOOL_ERROR


async def test_an_unreachable_service_is_unavailable() -> None:
    tool = SearchTool({"retrieval_service_url": "http://127.0.0.1:9/retrieve"})
    result = await execute(tool, query_list=["oak"])
    assert kind_of(result) is IncidentKind.TOOL_UNAVAILABLE
    assert "tried 3 times" in str(result.response.text)
