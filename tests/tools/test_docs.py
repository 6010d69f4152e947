"""Examples of the page on tools, executed."""

from __future__ import annotations

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
SERVER = """
from mcp.server import MCPServer
app = MCPServer('notes')
@app.tool()
def search_notes(text: str) -> str:
    'Finds notes.'
    return text
app.run('stdio')
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


ENTRIES: list[dict[str, Any]] = [entry for text in blocks("yaml") for entry in yaml.safe_load(text)["tools"]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a project with the files that the page's examples use."""
    [code] = blocks("python")
    files = {
        "my_tools.py": code,
        "my_server.py": SERVER,
        "data/wiki.jsonl": '{"title": "Oak", "text": "A tree."}\n',
        "notes/first.md": "Otters swim.\n",
        "shop.yaml": SPEC,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("RETRIEVER_TOKEN", "SERVICE_KEY", "MCP_TOKEN", "WEATHER_TOKEN", "SHOP_KEY"):
        monkeypatch.setenv(name, "xyzzy")
    return tmp_path


def load(entry: dict[str, Any], **config: Any) -> dict[str, BaseTool]:
    changed = entry if not config else {**entry, "config": {**entry["config"], **config}}
    Path("tools.yaml").write_text(yaml.safe_dump({"tools": [changed]}))
    return load_tools([], config_path="tools.yaml")


def test_each_built_in_tool_has_its_section() -> None:
    assert sorted(re.findall(r"^### `(\w+)`$", PAGE, flags=re.MULTILINE)) == sorted(BUILTIN_TOOLS)


def test_the_entries_of_the_page_load_as_tools(folder: Path) -> None:
    names: list[str] = []
    for entry in ENTRIES:
        parse_section(ToolEntry, entry, where="docs/tools.md")
        config = entry.get("config", {})
        if entry["class_name"] == "mcp":
            names += load(entry, command=sys.executable) if "command" in config else []
        else:
            names += load(entry, **({"cache_dir": str(folder)} if "corpus" in config else {}))
    expected = "calculator notebook search search notes_search_notes shell edit_file weather"
    assert sorted(names) == sorted([*expected.split(), "shop_get_item", "shop_put_item"])


async def test_the_class_of_the_page_keeps_the_contract() -> None:
    notebook = load(ENTRIES[1])["notebook"]
    assert (notebook.timeout_s, notebook.max_concurrent) == (5, 8)
    (await check_tool(notebook, calls=[{"text": "a"}, {"text": "b"}])).raise_if_failed()


def test_the_row_of_the_page_chooses_its_tool() -> None:
    tools = [load(ENTRIES[1])["notebook"], load({"class_name": "calculator"})["calculator"]]
    [row] = [json.loads(text) for text in blocks("json")]
    turn = call_text("notebook", text="6 * 7") + call_text("calculator", expression="6 * 7")
    output = WorkerHarness([text_reply(turn), text_reply("42")], tools=tools).run_one(**row).output
    assert [m["content"] for m in output.messages if m["role"] == "tool"] == ["2 notes", "42"]
    assert output.feedback[0].extra == {"num_notes": 2}
