from __future__ import annotations

import asyncio
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
from agent_loop.tools.results import ToolResult
from agent_loop.tools.search.index import Passage, SearchIndex, corpus_files, read_passages
from agent_loop.tools.search.tool import SearchTool
from agent_loop.tools.session import ToolSession, ToolSessionConfig
from agent_loop.trajectory import IncidentKind
from agent_loop.types import ToolCall
from tests.tools.web_service import serving

ROWS = [
    {"title": "Otter", "text": "Otters are mammals that swim in rivers and hold hands while they sleep."},
    {"title": "Oak", "text": "Oaks are trees. An oak may live a thousand years."},
    {"id": "7", "contents": '"River"\nA river carries water to the sea. Rivers flow downhill.'},
]


def write_corpus(folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tool_of(tmp_path: Path, **config: Any) -> SearchTool:
    return SearchTool(
        {"corpus": [str(tmp_path / "corpus.jsonl")], "cache_dir": str(tmp_path / "cache"), **config}
    )


def ask(tool: SearchTool, **arguments: Any) -> ToolResult:
    async def main() -> ToolResult:
        session = ToolSession({"search": tool}, config=ToolSessionConfig(timeout_s=20, close_timeout_s=5))
        try:
            return await session.execute(ToolCall("search", arguments))
        finally:
            assert await session.close() == []
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return asyncio.run(main())


def test_the_best_passages_come_first_in_the_format_of_search_r1(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    result = ask(tool_of(tmp_path, topk=2), query_list=["swimming in a river", "how old do oaks get?"])
    assert result.response.text == (
        "Doc 1 (Title: Otter)\nOtters are mammals that swim in rivers and hold hands while they sleep.\n\n"
        "Doc 2 (Title: River)\nA river carries water to the sea. Rivers flow downhill.\n---\n"
        "Doc 1 (Title: Oak)\nOaks are trees. An oak may live a thousand years."
    )
    assert result.extra == {"query_count": 2, "total_results": 3}


def test_query_syntax_of_sqlite_is_treated_as_text(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    tool = tool_of(tmp_path)
    for query in ['oak" OR title:"x', "NEAR(oak, 3)", "oak*", "-oak", "oak AND", "(oak", "ôäk oak", "oak\0"]:
        assert "Title: Oak" in str(ask(tool, query_list=[query]).response.text), query
    assert ask(tool, query_list=["zebra"]).response.text == "No search results found."
    nothing = ask(tool, query_list=["?!"])
    assert nothing.incident is not None
    assert nothing.incident.kind is IncidentKind.TOOL_ERROR


def test_a_long_passage_is_shown_around_the_matches(tmp_path: Path) -> None:
    words = " ".join(f"word{n}" for n in range(300))
    write_corpus(tmp_path, [{"title": "Long", "text": words}])
    text = str(ask(tool_of(tmp_path, snippet_words=8), query_list=["word200"]).response.text)
    assert "word200" in text
    assert len(text.split()) < 20
    assert words in str(ask(tool_of(tmp_path, snippet_words=None), query_list=["word200"]).response.text)


def test_a_single_query_and_the_json_format_of_verl_are_supported(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    schema = {"type": "function", "function": {"name": "search", "parameters": parameters}}
    config = {
        "corpus": [str(tmp_path / "corpus.jsonl")],
        "cache_dir": str(tmp_path),
        "as_json": True,
        "topk": 1,
    }
    result = ask(SearchTool(config, schema), query="oak")
    assert json.loads(str(result.response.text)) == {
        "result": "Doc 1 (Title: Oak)\nOaks are trees. An oak may live a thousand years."
    }


def test_the_index_is_built_once_and_rebuilt_when_the_corpus_changes(tmp_path: Path) -> None:
    corpus, cache = write_corpus(tmp_path), tmp_path / "cache"
    first = SearchIndex([str(corpus)], cache_dir=cache)
    built = first.path.stat().st_mtime_ns
    assert SearchIndex([str(corpus)], cache_dir=cache).path == first.path
    assert first.path.stat().st_mtime_ns == built
    write_corpus(tmp_path, [*ROWS, {"title": "Fig", "text": "A fruit."}])
    second = SearchIndex([str(corpus)], cache_dir=cache)
    assert second.path != first.path
    assert (len(first), len(second)) == (3, 4)


def test_a_damaged_or_outdated_index_is_rebuilt(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    path = SearchIndex([str(corpus)], cache_dir=tmp_path).path
    path.write_bytes(b"no database")
    assert len(SearchIndex([str(corpus)], cache_dir=tmp_path)) == 3


def test_a_failed_build_leaves_no_files(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [*ROWS, {"title": "empty"}])
    with pytest.raises(DataError, match="line 4 has none of the fields"):
        SearchIndex([str(corpus)], cache_dir=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


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
    assert list(read_passages(files[0]))[1] == Passage(
        "Oak", "Oaks are trees. An oak may live a thousand years."
    )
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


def test_a_retrieval_service_like_search_r1_can_be_used(tmp_path: Path) -> None:
    asked: list[Any] = []

    async def retrieve(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if len(asked) < 3:
            return web.Response(status=503)
        found = [
            {"document": {"contents": f'"{query}"\nall about it'}, "score": 1.5}
            for query in asked[-1]["queries"]
        ]
        return web.json_response({"result": [[document] for document in found]})

    with serving(web.post("/retrieve", retrieve)) as url:
        (tmp_path / "tools.yaml").write_text(
            f"""
            tools:
              - class_name: verl.tools.search_tool.SearchTool
                config:
                  retrieval_service_url: {url}/retrieve
                  num_workers: 120
                  rate_limit: 100
                  timeout: 30
                  type: native
            """
        )
        tool = load_tools([], config_path=tmp_path / "tools.yaml")["search"]
        assert isinstance(tool, SearchTool)
        assert tool.max_concurrent == 100
        result = ask(tool, query_list=["otter", "oak"])
    assert result.response.text == "Doc 1 (Title: otter)\nall about it\n---\nDoc 1 (Title: oak)\nall about it"
    assert asked == [{"queries": ["otter", "oak"], "topk": 3, "return_scores": True}] * 3


def test_get_services_are_supported_and_invalid_responses_are_errors(tmp_path: Path) -> None:
    async def find(request: web.Request) -> web.Response:
        if request.query["query"] == "nonsense":
            return web.json_response({"hits": [{"no": "text"}]})
        return web.json_response(
            {"hits": [{"title": request.query["query"], "text": request.query["topk"]}] * 5}
        )

    with serving(web.get("/find", find)) as url:
        tool = SearchTool({"retrieval_service_url": f"{url}/find", "method": "get", "topk": 2})
        assert ask(tool, query_list=["oak"]).response.text == "Doc 1 (Title: oak)\n2\n\nDoc 2 (Title: oak)\n2"
        nonsense = ask(tool, query_list=["nonsense"])
    assert nonsense.incident is not None
    assert nonsense.incident.kind is IncidentKind.TOOL_ERROR


def test_an_unreachable_service_is_unavailable() -> None:
    tool = SearchTool({"retrieval_service_url": "http://127.0.0.1:9/retrieve"})
    result = ask(tool, query_list=["oak"])
    assert result.incident is not None
    assert result.incident.kind is IncidentKind.TOOL_UNAVAILABLE
    assert "tried 3 times" in str(result.response.text)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000], ids=["digits", "deep"])
def test_a_document_that_cannot_be_read_is_reported(tmp_path: Path, value: str) -> None:
    path = write_corpus(tmp_path)
    with path.open("a") as file:
        file.write(f'{{"text": "x", "more": {value}}}')
    with pytest.raises(DataError, match=r"corpus.jsonl line 4 is not JSON: it (holds|is nested)"):
        tool_of(tmp_path)
