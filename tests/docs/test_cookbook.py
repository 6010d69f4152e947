"""Tests that run every recipe of docs/cookbook.md unchanged."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from typer.testing import CliRunner

from agent_loop import AgentLoopManager
from agent_loop.cli import app
from agent_loop.config import load_config
from agent_loop.rollout.rows import load_rows
from agent_loop.testing import run_virtual
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.trajectory import Trajectory
from tests.cli.project import make_project
from tests.helpers import call_text, small_tokenizer, user
from tests.rewards.judges import answer, judging
from tests.tiny_vision import vision_model, vision_tokenizer
from tests.training.fakes import FakeRollouts, tiny_policy

PAGE = (Path(__file__).parents[2] / "docs" / "cookbook.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))
NUM_RECIPES = 12

Cook = Callable[[str], Path]


@pytest.fixture
def cook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cook:
    """Return a function that writes the files of a recipe and returns the path of its configuration."""
    monkeypatch.chdir(tmp_path)

    def write(recipe: str) -> Path:
        for block in re.findall(r"```(?:python|yaml|bash)\n(.*?)```", RECIPES[recipe], flags=re.DOTALL):
            if name := re.match(r"(?:#!.*\n)?# ([\w.]+)\n", block):
                Path(name[1]).write_text(block, encoding="utf-8")
        return tmp_path / "config.yaml"

    return write


def roll_out(
    config_file: Path, *replies: str, row: dict[str, Any] | None = None, runner: Any = run_virtual
) -> list[Trajectory]:
    """Run one row with scripted turns of the model, once per test."""
    if not Path("model").exists():
        small_tokenizer().save_pretrained("model")
    Path("script.py").write_text(
        "from tests.helpers import text_reply\n"
        f"texts = iter({list(replies)!r})\n"
        "def script(request):\n    return text_reply(next(texts))\n",
        encoding="utf-8",
    )
    engine = ["rollout.engine=scripted", "rollout.engine_kwargs.script=script.py:script", "rollout.n=1"]
    lengths = ["rollout.prompt_length=2048", "rollout.response_length=2048"]
    config = load_config(config_file, overrides=[*engine, *lengths, "model.path=model"])

    async def run() -> list[Trajectory]:
        async with AgentLoopManager.from_config(config) as manager:
            return await manager.run([{"raw_prompt": user("How many?"), **(row or {})}], n=1)

    trajectories = runner(run())
    assert [trajectory.output.failure for trajectory in trajectories] == [None] * len(trajectories)
    return trajectories


def run_command(*arguments: str) -> None:
    result = CliRunner().invoke(app, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def replies_of_tools(trajectory: Trajectory) -> list[Any]:
    return [message["content"] for message in trajectory.output.messages if message["role"] == "tool"]


@pytest.mark.parametrize(("text", "reward"), [("42", 1.0), ("41", 0.0)])
def test_the_reward_against_flat_groups(cook: Cook, text: str, reward: float) -> None:
    [trajectory] = roll_out(cook("The reward is flat"), text, row={"answer": "42"})
    assert trajectory.reward == reward


def test_the_reward_against_flat_groups_gives_credit_for_a_call(cook: Cook) -> None:
    config = cook("The reward is flat")
    Path("tools.py").write_text(
        "from agent_loop import function_tool\n@function_tool\ndef look_up() -> str:\n"
        '    "Look it up."\n    return "?"\n',
        encoding="utf-8",
    )
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    settings["rollout"] |= {
        "agent": {"default_agent_loop": "tool_agent"},
        "multi_turn": {"tools": ["tools.py:look_up"]},
    }
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    [trajectory] = roll_out(config, call_text("look_up"), "41", row={"answer": "42"})
    assert trajectory.reward == 0.2


@pytest.mark.slow
def test_the_long_tool_runs_tests(cook: Cook) -> None:
    config = cook("A tool takes minutes")
    Path("suite").mkdir()
    Path("suite/test_sum.py").write_text(
        "import unittest\nclass T(unittest.TestCase):\n    def test_sum(self): assert 1 + 1 == 2\n",
        encoding="utf-8",
    )
    [trajectory] = roll_out(config, call_text("run_tests", target="suite"), "It passes.", runner=asyncio.run)
    [reply] = replies_of_tools(trajectory)
    assert reply.rstrip().endswith("OK")


@pytest.mark.slow
def test_the_judge_and_a_function_are_added(cook: Cook, monkeypatch: pytest.MonkeyPatch) -> None:
    config_file = cook("A judge scores the answers")
    small_tokenizer().save_pretrained("model")
    Path("script.py").write_text(
        "from tests.helpers import text_reply\nscript = [text_reply('42')]\n", encoding="utf-8"
    )

    async def run() -> Trajectory:
        async with judging(lambda _: answer("yes")) as judge:
            monkeypatch.setenv("JUDGE_URL", judge.url)
            engine = ["rollout.engine=scripted", "rollout.engine_kwargs.script=script.py:script"]
            config = load_config(config_file, overrides=[*engine, "model.path=model"])
            async with AgentLoopManager.from_config(config) as manager:
                [trajectory] = await manager.run([{"raw_prompt": user("6 * 7?"), "answer": "42"}], n=1)
            return trajectory

    trajectory = asyncio.run(run())
    num_tokens = len(trajectory.output.response_ids)
    assert trajectory.reward == pytest.approx(1 + 0.1 * (1 - num_tokens / 500))


def test_the_compacting_loop_starts_again_from_its_notes(cook: Cook) -> None:
    config = cook("The conversation outgrows the context")
    first, second = roll_out(config, "a", "b", "c", "d", "so far: abcd", "e DONE")
    assert [first.branch, second.branch] == [0, 1]
    assert first.output.answer == "so far: abcd"
    assert second.output.messages[1]["content"] == "Your notes: so far: abcd"
    assert second.output.answer == "e DONE"


@pytest.mark.parametrize(
    ("row", "second"), [({}, "42"), ({"tool_selection": ["stock"]}, "no tool 'calculator'")]
)
def test_a_row_selects_its_tools(cook: Cook, row: dict[str, Any], second: str) -> None:
    config = cook("Several tools, and not all in every row")
    calls = call_text("stock", item="bolt") + call_text("calculator", expression="6 * 7")
    [trajectory] = roll_out(config, calls, "I see.", row=row)
    replies = replies_of_tools(trajectory)
    assert replies[0] == "12"
    assert second in replies[1]


@pytest.mark.slow
def test_images_of_rows_and_tools_are_tokens(cook: Cook) -> None:
    config = cook("Images")
    vision_model("qwen2_vl").config.save_pretrained("model")
    vision_tokenizer().save_pretrained("model")
    sizes = {"shortest_edge": 256, "longest_edge": 4096}
    Qwen2VLImageProcessorPil(patch_size=4, size=sizes).save_pretrained("model")
    [row] = load_rows("task.py:rows")
    [trajectory] = roll_out(config, call_text("zoom", x=1, y=2), "white", row=dict(row))
    assert trajectory.output.answer == "white"
    assert len(trajectory.output.attachments) == 2


def test_both_seats_of_a_game_are_trajectories(cook: Cook) -> None:
    row = {"environment": "rps", "players": ["policy", "policy"]}
    trajectories = roll_out(cook("Self-play"), "rock", "paper", row=row)
    assert [(t.output.extra_fields["seat"], t.reward) for t in trajectories] == [(0, -1.0), (1, 1.0)]


def test_a_player_with_random_moves_is_no_trajectory(cook: Cook) -> None:
    row = {"environment": "rps", "players": ["policy", "first"]}
    [trajectory] = roll_out(cook("Self-play"), "paper", row=row)
    assert trajectory.reward == 1.0


@pytest.mark.nightly
@pytest.mark.slow
def test_a_copied_run_resumes_in_another_folder(cook: Cook, monkeypatch: pytest.MonkeyPatch) -> None:
    cook("Resume on another machine")
    subprocess.run(["bash", "-n", "move.sh"], check=True)
    here, there = Path("here").resolve(), Path("there").resolve()
    here.mkdir()
    make_project(here)
    monkeypatch.chdir(here)
    run_command("train", "config.yaml", "trainer.total_steps=2")
    shutil.copytree(here, there)
    shutil.rmtree(here)
    monkeypatch.chdir(there)
    run_command("train", "config.yaml", "--resume")
    lines = Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_the_engine_samples_over_http(cook: Cook) -> None:
    config_file = cook("Your own engine")
    small_tokenizer().save_pretrained("model")

    async def respond(request: web.Request) -> web.Response:
        body = await request.json()
        token_ids = body["prompt_ids"][-2:]
        return web.json_response({"token_ids": token_ids, "logprobs": [-0.5, -0.25], "stop_reason": "stop"})

    async def run() -> Trajectory:
        application = web.Application()
        application.router.add_post("/generate", respond)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/generate"
        overrides = ["model.path=model", f"rollout.engine_kwargs.url={url}"]
        config = load_config(config_file, overrides=overrides)
        try:
            async with AgentLoopManager.from_config(config) as manager:
                [trajectory] = await manager.run([{"raw_prompt": user("Hello")}], n=1)
        finally:
            await runner.cleanup()
        return trajectory

    output = asyncio.run(run()).output
    assert output.failure is None
    assert output.response_ids.tolist() == output.prompt_ids[-2:].tolist()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_estimator_trains_a_model(cook: Cook) -> None:
    config_file = cook("Your own estimator")
    model = tiny_policy()
    model.save_pretrained("model")
    rows = [{"prompt": f"{n} {n + 1}"} for n in range(2, 12)]
    Path("rows.json").write_text(json.dumps(rows), encoding="utf-8")
    overrides = [
        "data.train_files=[rows.json]",
        "data.train_batch_size=4",
        "model.path=model",
        "model.device=cpu",
        "rollout.n=4",
        "trainer.total_steps=1",
        "trainer.run_dir=run",
    ]
    config = load_config(config_file, overrides=overrides)
    result = asyncio.run(PPOTrainer(config, manager=FakeRollouts(model)).fit())
    assert result.metrics["actor/grad_norm"] > 0


@pytest.mark.nightly
@pytest.mark.slow
def test_the_cell_of_a_notebook_runs(cook: Cook, tmp_path: Path) -> None:
    cook("In a notebook")
    make_project(tmp_path)
    names: dict[str, Any] = {}
    code = compile(Path("cell.py").read_text(encoding="utf-8"), "cell.py", "exec")

    async def cell() -> None:  # a notebook's event loop is running
        exec(code, names)

    asyncio.run(cell())
    assert len(names["found"]) == 4
    assert names["worst"].reward == min(trajectory.reward for trajectory in names["found"])
    assert names["success"]["val/reward/mean"] >= 0


def test_the_job_of_slurm_runs_without_slurm(cook: Cook, tmp_path: Path) -> None:
    cook("On Slurm")
    commands = tmp_path / "commands"
    for name in ("agent-loop", "srun"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> "{commands}"\n', encoding="utf-8")
        path.chmod(0o755)
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    subprocess.run(["bash", "train.sbatch"], env={"PATH": path}, check=True, timeout=30)
    assert commands.read_text(encoding="utf-8").splitlines() == [
        "agent-loop train config.yaml --dry-run",
        "srun --ntasks=1 agent-loop train config.yaml --resume",
    ]


def test_every_recipe_has_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in RECIPES if f'cook("{name}")' not in source] == []
    assert len(RECIPES) == NUM_RECIPES
