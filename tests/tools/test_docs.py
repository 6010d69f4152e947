"""Examples of the page on tools, executed."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_loop.checks import check_tool
from agent_loop.config import parse_section
from agent_loop.tools.base import BaseTool
from agent_loop.tools.registry import BUILTIN_TOOLS, ToolEntry, load_tools
from tests.helpers import call_text, text_reply
from tests.rollout.harness import WorkerHarness
from tests.tools.test_web import SPEC

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def entries() -> list[dict[str, Any]]:
    return [entry for text in blocks("yaml") for entry in yaml.safe_load(text)["tools"]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a project with the files that the page's examples use."""
    [code] = blocks("python")
    (tmp_path / "my_tools.py").write_text(code)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wiki.jsonl").write_text('{"title": "Oak", "text": "A tree."}\n')
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "first.md").write_text("Otters swim.\n")
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump({**SPEC, "components": SPEC["components"]}))
    monkeypatch.chdir(tmp_path)
    for name in ("RETRIEVER_TOKEN", "SERVICE_KEY", "MCP_TOKEN", "WEATHER_TOKEN", "SHOP_KEY"):
        monkeypatch.setenv(name, "xyzzy")
    return tmp_path


def load(entry: dict[str, Any], folder: Path) -> dict[str, BaseTool]:
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    return load_tools([], config_path=folder / "tools.yaml")


def test_each_built_in_tool_has_its_section() -> None:
    assert sorted(re.findall(r"^### `(\w+)`$", PAGE, flags=re.MULTILINE)) == sorted(BUILTIN_TOOLS)


def test_the_entries_of_the_page_load_as_tools(folder: Path) -> None:
    names: list[str] = []
    for entry in entries():
        parse_section(ToolEntry, entry, where="docs/tools.md")
        if entry["class_name"] == "mcp":
            continue  # needs its server
        if entry["class_name"] == "search" and "corpus" in entry["config"]:
            entry["config"]["cache_dir"] = str(folder)
        names += load(entry, folder)
    assert names == [
        "calculator",
        "notebook",
        "search",
        "search",
        "shell",
        "edit_file",
        "weather",
        "shop_get_item",
        "shop_put_item",
    ]


def test_the_mcp_entry_lists_the_tools_of_a_server(folder: Path) -> None:
    entry = next(entry for entry in entries() if entry["class_name"] == "mcp")
    (folder / "my_server.py").write_text(
        "from mcp.server import MCPServer\n"
        "app = MCPServer('notes')\n"
        "@app.tool()\n"
        "def search_notes(text: str) -> str:\n"
        "    'Finds notes.'\n"
        "    return text\n"
        "app.run('stdio')\n"
    )
    entry["config"]["command"] = sys.executable
    assert list(load(entry, folder)) == ["notes_search_notes"]


def test_the_class_keeps_the_contract_and_the_row_chooses_it(folder: Path) -> None:
    notebook = load(entries()[1], folder)["notebook"]
    assert (notebook.timeout_s, notebook.max_concurrent) == (5, 8)
    asyncio.run(check_tool(notebook, calls=[{"text": "a"}, {"text": "b"}])).raise_if_failed()
    [row] = [json.loads(text) for text in blocks("json")]
    calculator = load({"class_name": "calculator"}, folder)["calculator"]
    turn = call_text("notebook", text="6 * 7") + call_text("calculator", expression="6 * 7")
    output = (
        WorkerHarness([text_reply(turn), text_reply("42")], tools=[notebook, calculator])
        .run_one(**row)
        .output
    )
    assert [m["content"] for m in output.messages if m["role"] == "tool"] == ["2 notes", "42"]
    assert output.feedback[0].extra == {"num_notes": 2}
