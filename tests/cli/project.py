"""Projects of a user: a tiny model or a script, rows, a reward and a configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer.testing
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from agent_loop.cli import app
from tests.helpers import small_tokenizer

ROOT = Path(__file__).parents[2]
AGENT_LOOP = [sys.executable, "-c", "from agent_loop.cli import main; main()"]
"""Command line of `agent-loop`."""


@dataclass(frozen=True)
class Result:
    """Output of a command."""

    out: str
    err: str


Command = Callable[..., Result]
TASK = """
def reward(output, row):
    return float(len(output.response_ids) % 2)

def breaks(output, row):
    return 1.0 / 0

def crawls(output, row):
    return [].index("nothing")
"""
SCRIPT = """
import asyncio
import json
import os
import random
import signal
from pathlib import Path

from agent_loop import function_tool
from agent_loop.errors import ToolError
from agent_loop.servers.scripted import ScriptedReply
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")

def reply_with(text, **options):
    ids = tokenizer.backend_tokenizer.encode(text + "<|im_end|>", add_special_tokens=False).ids
    return ScriptedReply(ids, logprobs=[-0.5 for _ in ids], **options)

def prompt_of(request):
    prompt = tokenizer.decode(request.prompt_ids.tolist())
    return prompt, prompt.split("question ")[1][0]

def names(file, number):
    return Path(file).is_file() and number in Path(file).read_text()
"""
"""Start of the scripts of models."""
CALLING = '''
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
    prompt, number = prompt_of(request)
    number = int(number)
    call = json.dumps({"name": "add", "arguments": {"a": 1, "b": number}})
    text = f"<tool_call>" + chr(10) + call + chr(10) + "</tool_call>"
    if "<tool_response>" in prompt:
        text = "now " + str(number) if Path("other").exists() else "sum " + str(1 + number)
    return reply_with(text)

def reward(output, row):
    return {"reward": float(output.answer == "sum 3"), "length": len(output.answer)}

def generous(output, row):
    return float(output.answer.startswith("sum"))

def half(output, row):
    if row["prompt"].endswith("2"):
        raise ValueError("not this one")
    return 0.5
'''
SOLVING = """
def interrupt_when_the_others_have_ended():
    if len(Path("runs/eval/trajectories.jsonl").read_text().splitlines()) < 6:
        asyncio.get_running_loop().call_later(0.02, interrupt_when_the_others_have_ended)
    else:
        signal.raise_signal(signal.SIGINT)

def answer(request):
    _, number = prompt_of(request)
    with open("calls.log", "a") as log:
        log.write(number + " " + str(request.sampling_params.temperature) + chr(10))
    calls = Path("calls.log").read_text().split()[::2].count(number)
    is_right = int(number) % 2 == 0 or calls % 2 == 1
    if names("interrupt", number):
        interrupt_when_the_others_have_ended()
    hangs = names("hang", number) or names("interrupt", number)
    return reply_with("right" if is_right else "wrong", latency_s=1000.0 if hangs else 0.01 * int(number))

def reward(output, row):
    if Path("breaks").is_file():
        raise ValueError("no answer is good enough")
    return float(output.messages[-1]["content"] == "right")

def together(outputs, rows):
    with open("judged.log", "a") as log:
        log.write(" ".join(row["prompt"][-1] for row in rows) + chr(10))
    return [float(output.messages[-1]["content"] == "right") for output in outputs]
"""


def save_model(folder: Path) -> Path:
    """Write a tiny model with its tokenizer, and return its folder."""
    tokenizer = small_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **sizes,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def make_project(folder: Path) -> Path:
    """Write the project and return its configuration file."""
    save_model(folder)
    (folder / "task.py").write_text(TASK, encoding="utf-8")
    write_json_lines(folder / "rows.jsonl", [{"prompt": f"question {n}"} for n in range(6)])
    settings = {
        "data": {"train_files": ["rows.jsonl"], "val_files": ["rows.jsonl"], "train_batch_size": 2},
        "model": {"path": "model"},
        "reward": {"function": "task.py:reward"},
        "rollout": {"n": 2, "prompt_length": 64, "response_length": 8, "engine_kwargs": {"max_slots": 8}},
        "actor": {"lr": 1e-3},
        "trainer": {"total_steps": 3, "run_dir": "run", "save_every": 2},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def add_script(folder: Path, script: str, **sections: Mapping[str, Any]) -> None:
    """Replace the model of a new project by the function `answer` of a script, and add settings to sections."""
    path = make_project(folder)
    (folder / "script.py").write_text(SCRIPT + script, encoding="utf-8")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings["rollout"] |= {"engine": "scripted", "engine_kwargs": {"script": "script.py:answer"}}
    for name, section in sections.items():
        settings[name] |= section
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")


def make_stored_project(folder: Path) -> None:
    """Write a project whose model calls a tool in each of four rows, of which the tool refuses the last.

    The model answers differently if there is a file `other`.
    """
    rollout = {
        "n": 1,
        "prompt_length": 512,
        "response_length": 256,
        "agent": {"default_agent_loop": "tool_agent"},
        "multi_turn": {"tools": ["script.py:add"], "format": "hermes"},
    }
    add_script(folder, CALLING, rollout=rollout, reward={"function": "script.py:reward"})
    write_json_lines(folder / "rows.jsonl", [{"prompt": f"question {n}"} for n in range(4)])


def make_eval_project(folder: Path) -> None:
    """Write a project whose model solves the rows 0, 2 and 4 always, and the rows 1, 3 and 5 half the time.

    `calls.log` lists the row and temperature of each call.
    Three files control the script: rows named in `hang` get no completion, a row named in `interrupt` sends Ctrl-C
    after six trajectories, and the reward function raises if `breaks` exists.
    """
    add_script(folder, SOLVING, rollout={"val": {"n": 2}}, reward={"function": "script.py:reward"})
    rows = [{"prompt": f"question {n}", "level": "hard" if n % 2 else "easy"} for n in range(6)]
    write_json_lines(folder / "rows.jsonl", rows)


def run(*arguments: str, exit_code: int = 0) -> typer.testing.Result:
    """Run `agent-loop ...` in this process, and let its exceptions pass."""
    result = typer.testing.CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result
