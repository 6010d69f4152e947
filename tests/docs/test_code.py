"""The code of README, docs/extending.md and docs/cookbook.md runs unchanged, and so does the notebook."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from typer.testing import CliRunner

from agent_loop import AgentLoopManager, ToolParser
from agent_loop.cli import app
from agent_loop.config import load_config
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.rows import load_rows
from agent_loop.testing import run_virtual
from agent_loop.tools.registry import load_tools
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.cli.project import make_project
from tests.helpers import call_text, encoded, small_tokenizer, text_reply, tool_call_reply, user
from tests.rewards.judges import answer, judging
from tests.rollout.harness import WorkerHarness
from tests.tiny_vision import vision_model, vision_tokenizer
from tests.training.fakes import FakeRollouts, tiny_policy

ROOT = Path(__file__).parents[2]
README, EXTENDING, COOKBOOK = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/extending.md", "docs/cookbook.md")
)
SECTIONS, RECIPES = (
    dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE))
    for page in (EXTENDING, COOKBOOK)
)
NUM_RECIPES = 12
MOST_LINES = 20

Write = Callable[[str], Path]


def blocks_of(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes the files of a section and returns the path of its configuration."""
    monkeypatch.chdir(tmp_path)

    def write(section: str) -> Path:
        for language, block in re.findall(r"```(\w+)\n(.*?)```", SECTIONS[section], flags=re.DOTALL):
            name = re.match(r"# ([\w.]+)\n", block)
            assert name or language == "yaml"
            Path(name[1] if name else "config.yaml").write_text(block, encoding="utf-8")
        return tmp_path / "config.yaml"

    return write


@pytest.fixture
def cook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes the files of a recipe and returns the path of its configuration."""
    monkeypatch.chdir(tmp_path)

    def write(recipe: str) -> Path:
        for block in blocks_of(RECIPES[recipe], "(?:python|yaml|bash)"):
            if name := re.match(r"(?:#!.*\n)?# ([\w.]+)\n", block):
                Path(name[1]).write_text(block, encoding="utf-8")
        return tmp_path / "config.yaml"

    return write


def scripted(*replies: str) -> list[str]:
    """Return the settings of an engine with these replies, in their order."""
    script = f"script_{len(list(Path().glob('script_*.py')))}"  # a file is imported once
    Path(f"{script}.py").write_text(
        "from tests.helpers import text_reply\n"
        f"texts = iter({list(replies)!r})\n"
        "def script(request):\n    return text_reply(next(texts))\n",
        encoding="utf-8",
    )
    return ["rollout.engine=scripted", f"rollout.engine_kwargs.script={script}.py:script"]


def roll_out(
    config_file: Path,
    *replies: str,
    row: dict[str, Any] | None = None,
    runner: Any = run_virtual,
    **settings: Any,
) -> list[Trajectory]:
    """Run one row with scripted turns of the model, or with the engine of the configuration if there are none."""
    if not Path("model").exists():
        small_tokenizer().save_pretrained("model")
    overrides = ["rollout.n=1", "model.path=model", *(f"{key}={value}" for key, value in settings.items())]
    if replies:
        overrides += [*scripted(*replies), "rollout.prompt_length=2048"]
        overrides += ["rollout.response_length=2048"]
    config = load_config(config_file, overrides=overrides)

    async def run() -> list[Trajectory]:
        async with AgentLoopManager.from_config(config) as manager:
            return await manager.run([{"raw_prompt": user("What is 12 * 34?"), **(row or {})}], n=1)

    trajectories = runner(run())
    assert [trajectory.output.failure for trajectory in trajectories] == [None] * len(trajectories)
    return trajectories


def train(config_file: Path, *, num_steps: int = 2) -> dict[str, float]:
    """Train a tiny model with a configuration of a page."""
    model = tiny_policy()
    model.save_pretrained("model")
    rows = [{"prompt": f"{n} {n + 1}"} for n in range(2, 12)]
    Path("rows.json").write_text(json.dumps(rows), encoding="utf-8")
    settings = {
        "data": {"train_files": ["rows.json"], "train_batch_size": 4},
        "model": {"path": "model", "device": "cpu"},
        "rollout": {"n": 4},
        "actor": {"lr": 3e-3},
        "trainer": {"total_steps": num_steps, "run_dir": "run"},
    }
    overrides = [
        f"{name}.{key}={value}" for name, section in settings.items() for key, value in section.items()
    ]
    config = load_config(config_file, overrides=overrides)
    result = asyncio.run(PPOTrainer(config, manager=FakeRollouts(model)).fit())
    assert result.step == num_steps
    assert result.metrics["actor/grad_norm"] > 0
    return dict(result.metrics)


def replies_of_tools(trajectory: Trajectory) -> list[Any]:
    return [message["content"] for message in trajectory.output.messages if message["role"] == "tool"]


# -- README ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def readme() -> dict[str, Any]:
    """Run the README's Python blocks in order and return the names that they define."""
    names: dict[str, Any] = {"__name__": "readme"}
    for block in blocks_of(README, "python"):
        exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_tool_and_the_reward_of_the_readme(readme: dict[str, Any]) -> None:
    turns = [tool_call_reply("multiply", a=12, b=34), text_reply("It is 408.")]
    reward = RewardFunction(readme["reward"], timeout_s=5)
    trajectory = WorkerHarness(turns, tools=[readme["multiply"]], reward=reward).run_one(answer="408")
    assert replies_of_tools(trajectory) == ["408"]
    assert trajectory.reward == 1.0


def test_the_custom_loop_of_the_readme_samples_twice_and_ends_at_a_limit(readme: dict[str, Any]) -> None:
    turns = [text_reply("It is 7."), text_reply("It is 8.")]
    output = WorkerHarness(turns, agent="reflect_once").run_one().output
    assert (output.stop_reason, output.answer, output.num_turns) == (StopReason.ANSWERED, "It is 8.", 4)
    output = WorkerHarness(turns, agent="reflect_once", response_length=8).run_one().output
    assert output.stop_reason is StopReason.RESPONSE_LENGTH


def test_the_loop_on_token_ids_can_be_rewarded_and_respects_the_limits(readme: dict[str, Any]) -> None:
    reward = RewardFunction(readme["reward"], timeout_s=5)
    trajectory = WorkerHarness([text_reply("It is 408.")], agent="bare_tokens", reward=reward).run_one(
        answer="408"
    )
    assert trajectory.output.response_ids.tolist() == encoded("It is 408.<|im_end|>")
    assert trajectory.output.response_mask.all()
    assert trajectory.reward == 1.0
    long = [text_reply("It is 408. " * 40)]
    harness = WorkerHarness(long, agent="bare_tokens", reward=reward, response_length=32)
    trajectory = harness.run_one(answer="408")
    assert len(trajectory.output.response_ids) == 32
    assert trajectory.output.stop_reason is StopReason.RESPONSE_LENGTH
    assert trajectory.reward == 1.0


def test_the_rollout_layer_runs_with_the_readme_s_configuration(
    readme: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small_tokenizer().save_pretrained("model")
    Path("task.py").write_text(blocks_of(README, "python")[0], encoding="utf-8")
    Path("script.py").write_text(
        "from tests.helpers import text_reply, tool_call_reply\n"
        "script = [tool_call_reply('multiply', a=12, b=34), text_reply('It is 408.')]\n",
        encoding="utf-8",
    )
    Path("config.yaml").write_text(blocks_of(README, "yaml")[0], encoding="utf-8")
    engine = ["rollout.engine=scripted", "rollout.engine_kwargs.script=script.py:script", "model.path=model"]
    config = load_config("config.yaml", overrides=engine)
    assert list(load_tools(config.rollout.multi_turn.tools)) == ["multiply"]
    row = json.loads(re.findall(r'\{"prompt".*\}', README)[0])
    rows = [{**row, "raw_prompt": user(row["prompt"])}] * 3
    responses, mask, logprobs, rewards = run_virtual(readme["roll_out"](config, rows))
    assert responses.shape == mask.shape == logprobs.shape
    assert rewards.tolist() == [1.0] * (3 * 8)


# -- docs/extending.md -------------------------------------------------------------------------------------------------


def test_every_example_has_at_most_twenty_lines() -> None:
    for name, section in SECTIONS.items():
        [block] = blocks_of(section, "python")
        assert len(block.splitlines()) <= MOST_LINES, name


def test_the_estimator_the_loss_and_the_sampler_train_a_model(configure: Write) -> None:
    metrics = train(configure("An advantage estimator"))
    assert metrics["reward/advantage_mean"] == pytest.approx(0, abs=1e-5)
    assert metrics["reward/advantage_std"] > 0
    shutil.rmtree("run")
    assert "actor/clip_fraction" in train(configure("A policy loss"))
    shutil.rmtree("run")
    assert train(configure("A sampler of rows"))["rows/seen"] == 4


def test_the_parser_reads_a_completion_and_its_calls_run(configure: Write) -> None:
    config = load_config(configure("A tool parser"))
    parser = ToolParser.get(config.rollout.multi_turn.format)
    parsed = parser.parse('Adding. <call>{"name": "add", "arguments": {"a": 1}}</call>')
    assert [(call.name, call.arguments) for call in parsed.calls] == [("add", {"a": 1})]
    assert parsed.content == "Adding."


def test_the_engine_samples_in_a_rollout(configure: Write) -> None:
    [trajectory] = roll_out(configure("An engine"))
    assert trajectory.output.response_ids.tolist() == trajectory.output.prompt_ids[-3:].tolist()


@pytest.mark.parametrize(("right", "reward"), [("408", 1.0), ("409", 0.0)])
def test_the_reward_scores_a_trajectory(configure: Write, right: str, reward: float) -> None:
    [trajectory] = roll_out(configure("A reward"), "408", row={"answer": right})
    assert trajectory.reward == reward
    assert trajectory.reward_extra["num_tokens"] == len(trajectory.output.response_ids)


def test_the_loop_can_be_named_by_its_file_and_by_its_name(configure: Write) -> None:
    config_file = configure("An agent loop")
    assert roll_out(config_file, "407", "408")[0].output.answer == "408"
    config_file.write_text("rollout: {agent: {loop_files: [loops.py]}}", encoding="utf-8")
    assert roll_out(config_file, "407", "408", row={"agent_name": "second_try"})[0].output.answer == "408"


def test_the_tool_answers_the_model(configure: Write) -> None:
    [trajectory] = roll_out(configure("A tool"), call_text("multiply", a=12, b=34), "It is 408.")
    assert replies_of_tools(trajectory) == ["408"]


def test_the_interaction_answers_the_model_and_scores_it(configure: Write) -> None:
    row = {"interaction_kwargs": {"name": "teacher", "answer": "408"}}
    output = roll_out(configure("An interaction"), "It is 407.", "It is 408.", row=row)[0].output
    replies = [message["content"] for message in output.messages if message["role"] == "user"][1:]
    assert replies == ["Try again.", "Right."]
    assert output.turn_scores == (0.0, 1.0)


# -- docs/cookbook.md --------------------------------------------------------------------------------------------------


def test_the_reward_against_flat_groups_scores_answers_and_gives_credit_for_a_call(cook: Write) -> None:
    config_file = cook("The reward is flat")
    for text, reward in (("42", 1.0), ("41", 0.0)):
        assert roll_out(config_file, text, row={"answer": "42"})[0].reward == reward
    Path("tools.py").write_text(
        "from agent_loop import function_tool\n@function_tool\ndef look_up() -> str:\n"
        '    "Look it up."\n    return "?"\n',
        encoding="utf-8",
    )
    settings = {
        "rollout.agent.default_agent_loop": "tool_agent",
        "rollout.multi_turn.tools": "[tools.py:look_up]",
    }
    assert (
        roll_out(config_file, call_text("look_up"), "41", row={"answer": "42"}, **settings)[0].reward == 0.2
    )


@pytest.mark.slow
def test_the_long_tool_runs_tests(cook: Write) -> None:
    config_file = cook("A tool takes minutes")
    Path("suite").mkdir()
    Path("suite/test_sum.py").write_text(
        "import unittest\nclass T(unittest.TestCase):\n    def test_sum(self): assert 1 + 1 == 2\n",
        encoding="utf-8",
    )
    call = call_text("run_tests", target="suite")
    [trajectory] = roll_out(config_file, call, "It passes.", runner=asyncio.run)
    [reply] = replies_of_tools(trajectory)
    assert reply.rstrip().endswith("OK")


@pytest.mark.slow
async def test_the_judge_and_a_function_are_added(cook: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    config_file = cook("A judge scores the answers")
    small_tokenizer().save_pretrained("model")
    async with judging(lambda _: answer("yes")) as judge:
        monkeypatch.setenv("JUDGE_URL", judge.url)
        config = load_config(config_file, overrides=[*scripted("42"), "model.path=model"])
        async with AgentLoopManager.from_config(config) as manager:
            [trajectory] = await manager.run([{"raw_prompt": user("6 * 7?"), "answer": "42"}], n=1)
    assert trajectory.reward == pytest.approx(1 + 0.1 * (1 - len(trajectory.output.response_ids) / 500))


def test_the_compacting_loop_starts_again_from_its_notes(cook: Write) -> None:
    config_file = cook("The conversation outgrows the context")
    first, second = roll_out(config_file, "a", "b", "c", "d", "so far: abcd", "e DONE")
    assert [first.branch, second.branch] == [0, 1]
    assert first.output.answer == "so far: abcd"
    assert second.output.messages[1]["content"] == "Your notes: so far: abcd"
    assert second.output.answer == "e DONE"


def test_a_row_selects_its_tools(cook: Write) -> None:
    config_file = cook("Several tools, and not all in every row")
    calls = call_text("stock", item="bolt") + call_text("calculator", expression="6 * 7")
    for row, second in (({}, "42"), ({"tool_selection": ["stock"]}, "no tool 'calculator'")):
        replies = replies_of_tools(roll_out(config_file, calls, "I see.", row=row)[0])
        assert (replies[0], second in replies[1]) == ("12", True)


@pytest.mark.slow
def test_images_of_rows_and_tools_are_tokens(cook: Write) -> None:
    config_file = cook("Images")
    vision_model("qwen2_vl").config.save_pretrained("model")
    vision_tokenizer().save_pretrained("model")
    sizes = {"shortest_edge": 256, "longest_edge": 4096}
    Qwen2VLImageProcessorPil(patch_size=4, size=sizes).save_pretrained("model")
    [row] = load_rows("task.py:rows")
    [trajectory] = roll_out(config_file, call_text("zoom", x=1, y=2), "white", row=dict(row))
    assert trajectory.output.answer == "white"
    assert len(trajectory.output.attachments) == 2


def test_the_seats_of_a_game_that_the_policy_plays_are_trajectories(cook: Write) -> None:
    config_file = cook("Self-play")
    row = {"environment": "rps", "players": ["policy", "policy"]}
    trajectories = roll_out(config_file, "rock", "paper", row=row)
    assert [(t.output.extra_fields["seat"], t.reward) for t in trajectories] == [(0, -1.0), (1, 1.0)]
    [trajectory] = roll_out(config_file, "paper", row=row | {"players": ["policy", "first"]})
    assert trajectory.reward == 1.0


@pytest.mark.nightly
@pytest.mark.slow
def test_a_copied_run_resumes_in_another_folder(cook: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    cook("Resume on another machine")
    subprocess.run(["bash", "-n", "move.sh"], check=True)
    here, there = Path("here").resolve(), Path("there").resolve()
    here.mkdir()
    make_project(here)
    for folder, options in ((here, ["trainer.total_steps=2"]), (there, ["--resume"])):
        if folder is there:
            here.rename(there)
        monkeypatch.chdir(folder)
        result = CliRunner().invoke(app, ["train", "config.yaml", *options], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    lines = Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


async def test_the_engine_samples_over_http(cook: Write) -> None:
    config_file = cook("Your own engine")
    small_tokenizer().save_pretrained("model")

    async def respond(request: web.Request) -> web.Response:
        token_ids = (await request.json())["prompt_ids"][-2:]
        return web.json_response({"token_ids": token_ids, "logprobs": [-0.5, -0.25], "stop_reason": "stop"})

    application = web.Application()
    application.router.add_post("/generate", respond)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/generate"
    config = load_config(config_file, overrides=["model.path=model", f"rollout.engine_kwargs.url={url}"])
    async with AgentLoopManager.from_config(config) as manager:
        [trajectory] = await manager.run([{"raw_prompt": user("Hello")}], n=1)
    await runner.cleanup()
    assert trajectory.output.failure is None
    assert trajectory.output.response_ids.tolist() == trajectory.output.prompt_ids[-2:].tolist()


@pytest.mark.nightly
@pytest.mark.slow
def test_the_estimator_trains_a_model(cook: Write) -> None:
    train(cook("Your own estimator"), num_steps=1)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_cell_of_a_notebook_runs(cook: Write, tmp_path: Path) -> None:
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


def test_the_job_of_slurm_runs_without_slurm(cook: Write, tmp_path: Path) -> None:
    cook("On Slurm")
    commands = tmp_path / "commands"
    (tmp_path / "bin").mkdir()
    for name in ("agent-loop", "srun"):
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> "{commands}"\n', encoding="utf-8")
        path.chmod(0o755)
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    subprocess.run(["bash", "train.sbatch"], env={"PATH": path}, check=True, timeout=30)
    assert commands.read_text(encoding="utf-8").splitlines() == [
        "agent-loop train config.yaml --dry-run",
        "srun --ntasks=1 agent-loop train config.yaml --resume",
    ]


def test_every_section_and_every_recipe_has_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in SECTIONS if f'configure("{name}")' not in source] == []
    assert [name for name in RECIPES if f'cook("{name}")' not in source] == []
    assert len(RECIPES) == NUM_RECIPES


NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

source, target, folder = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}}).execute()
nbformat.write(notebook, target)
"""


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_stored_notebook_has_no_outputs() -> None:
    assert [cell for cell in code_cells(NOTEBOOK) if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_cell_runs_and_shows_progress_and_trajectories(tmp_path: Path) -> None:
    target = tmp_path / "executed.ipynb"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(target), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    outputs = [output for cell in code_cells(target) for output in cell["outputs"]]
    pages = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    assert any("trajectories 16/16" in page for page in pages)
    assert sum("<details>" in page for page in pages) == 1
    assert sum("log-prob -" in page for page in pages) == 3
    printed = "".join("".join(output["text"]) for output in outputs if output.get("name") == "stderr")
    assert "Loading weights" not in printed  # (the kernel's own bars would break the page)
    assert "ipywidgets for Jupyter" not in printed
