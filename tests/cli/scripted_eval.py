"""Project with easy and hard rows, and a scripted engine that solves easy rows always and hard rows half the time."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.cli.project import make_project

SCRIPT = """
import asyncio
import signal
from pathlib import Path

from agent_loop.servers.scripted import ScriptedReply
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")

def interrupt_when_the_others_have_ended():
    if len(Path("runs/eval/trajectories.jsonl").read_text().splitlines()) < 6:
        asyncio.get_running_loop().call_later(0.02, interrupt_when_the_others_have_ended)
    else:
        signal.raise_signal(signal.SIGINT)

def names(file, number):
    return Path(file).is_file() and number in Path(file).read_text()

def answer(request):
    prompt = tokenizer.decode(request.prompt_ids.tolist())
    number = prompt.split("question ")[1][0]
    with open("calls.log", "a") as log:
        log.write(number + " " + str(request.sampling_params.temperature) + chr(10))
    calls = Path("calls.log").read_text().split()[::2].count(number)
    is_right = int(number) % 2 == 0 or calls % 2 == 1
    if names("interrupt", number):
        interrupt_when_the_others_have_ended()
    hangs = names("hang", number) or names("interrupt", number)
    text = "right" if is_right else "wrong"
    ids = tokenizer.backend_tokenizer.encode(text + "<|im_end|>", add_special_tokens=False).ids
    latency_s = 1000.0 if hangs else 0.01 * int(number)
    return ScriptedReply(ids, logprobs=[-0.5 for _ in ids], latency_s=latency_s)

def reward(output, row):
    if Path("breaks").is_file():
        raise ValueError("no answer is good enough")
    return float(output.messages[-1]["content"] == "right")

def together(outputs, rows):
    with open("judged.log", "a") as log:
        log.write(" ".join(row["prompt"][-1] for row in rows) + chr(10))
    return [float(output.messages[-1]["content"] == "right") for output in outputs]
"""


def make_eval_project(folder: Path) -> None:
    """Write the project with the easy rows 0, 2 and 4 and the hard rows 1, 3 and 5.

    `calls.log` lists the row and temperature of each call.
    Three files control the script: rows named in `hang` get no completion, a row named in `interrupt` sends Ctrl-C
    after six trajectories, and the reward function raises if `breaks` exists.
    """
    path = make_project(folder)
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    rows = [{"prompt": f"question {n}", "level": "hard" if n % 2 else "easy"} for n in range(6)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    settings["rollout"] |= {
        "engine": "scripted",
        "engine_kwargs": {"script": "script.py:answer"},
        "val": {"n": 2},
    }
    settings["reward"] = {"function": "script.py:reward"}
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
