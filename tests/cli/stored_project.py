"""Project with stored trajectories of a scripted model that calls a tool and answers."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from typer.testing import CliRunner, Result

from agent_loop.cli import app
from tests.cli.project import make_project

SCRIPT = '''
import json
from pathlib import Path

from agent_loop import function_tool
from agent_loop.errors import ToolError
from agent_loop.servers.scripted import ScriptedReply
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")

@function_tool
def add(a: int, b: int) -> str:
    """Add.

    Args:
        a: First.
        b: Second.
    """
    with open("added.log", "a") as log:
        log.write(f"{a}+{b}" + chr(10))
    if b == 3:
        raise ToolError("three is too much")
    return str(a + b)

def answer(request):
    prompt = tokenizer.decode(request.prompt_ids.tolist())
    number = int(prompt.split("question ")[1][0])
    call = json.dumps({"name": "add", "arguments": {"a": 1, "b": number}})
    text = f"<tool_call>" + chr(10) + call + chr(10) + "</tool_call>"
    if "<tool_response>" in prompt:
        text = "now " + str(number) if Path("other").exists() else "sum " + str(1 + number)
    ids = tokenizer.backend_tokenizer.encode(text + "<|im_end|>", add_special_tokens=False).ids
    return ScriptedReply(ids, logprobs=[-0.5 for _ in ids])

def reward(output, row):
    return {"reward": float(output.answer == "sum 3"), "length": len(output.answer)}

def generous(output, row):
    return float(output.answer.startswith("sum"))

def half(output, row):
    if row["prompt"].endswith("2"):
        raise ValueError("not this one")
    return 0.5
'''


def make_stored_project(folder: Path) -> None:
    """Write the project with four rows, of which the tool refuses the last.

    The model answers differently if there is a file `other`.
    """
    path = make_project(folder)
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    rows = [{"prompt": f"question {n}"} for n in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings["rollout"] |= {
        "engine": "scripted",
        "engine_kwargs": {"script": "script.py:answer"},
        "n": 1,
        "prompt_length": 512,
        "response_length": 256,
        "agent": {"default_agent_loop": "tool_agent"},
        "multi_turn": {"tools": ["script.py:add"], "format": "hermes"},
    }
    settings["reward"] = {"function": "script.py:reward"}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")


def run(*arguments: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result
