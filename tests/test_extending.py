"""Tests that run every example of docs/extending.md unchanged."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_loop import AgentLoopManager, ToolParser
from agent_loop.config import load_config
from agent_loop.testing import run_virtual
from agent_loop.training.ppo_trainer import PPOTrainer
from agent_loop.trajectory import Trajectory
from tests.helpers import small_tokenizer, user
from tests.training.fakes import FakeRollouts, tiny_policy

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE))
MOST_LINES = 20

Configure = Callable[[str], Path]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Return a function that writes the files of a section and returns the path of its configuration."""
    monkeypatch.chdir(tmp_path)

    def write(section: str) -> Path:
        for language, block in re.findall(r"```(\w+)\n(.*?)```", SECTIONS[section], flags=re.DOTALL):
            name = re.match(r"# ([\w.]+)\n", block)
            assert name or language == "yaml"
            Path(name[1] if name else "config.yaml").write_text(block, encoding="utf-8")
        return tmp_path / "config.yaml"

    return write


def roll_out(config_file: Path, row: dict[str, Any], *replies: str) -> Trajectory:
    """Run one row with a configuration of the page.

    Args:
        config_file: The configuration.
        row: Columns of the row, without its prompt.
        *replies: The model's turns. Without replies, the engine of the configuration samples.
    """
    small_tokenizer().save_pretrained("model")
    overrides = ["model.path=model"]
    if replies:
        Path("script.py").write_text(
            f"from tests.helpers import text_reply\nscript = [text_reply(text) for text in {list(replies)!r}]\n",
            encoding="utf-8",
        )
        overrides += ["rollout.engine=scripted", "rollout.engine_kwargs.script=script.py:script"]
    config = load_config(config_file, overrides=overrides)

    async def run() -> list[Trajectory]:
        async with AgentLoopManager.from_config(config) as manager:
            return await manager.run([{"raw_prompt": user("What is 12 * 34?"), **row}], n=1)

    [trajectory] = run_virtual(run())
    assert trajectory.output.failure is None
    return trajectory


def train(config_file: Path) -> dict[str, float]:
    """Train a tiny model for two steps with a configuration of the page."""
    model = tiny_policy()
    model.save_pretrained("model")
    Path("rows.json").write_text(
        json.dumps([{"prompt": f"{n} {n + 1}"} for n in range(2, 12)]), encoding="utf-8"
    )
    overrides = [
        "data.train_files=[rows.json]",
        "data.train_batch_size=4",
        "model.path=model",
        "model.device=cpu",
        "rollout.n=4",
        "actor.lr=3e-3",
        "trainer.total_steps=2",
        "trainer.run_dir=run",
    ]
    config = load_config(config_file, overrides=overrides)
    result = asyncio.run(PPOTrainer(config, manager=FakeRollouts(model)).fit())
    assert result.step == 2
    return dict(result.metrics)


def test_every_example_has_at_most_twenty_lines() -> None:
    for name, section in SECTIONS.items():
        blocks = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
        assert len(blocks) == 1, name
        assert len(blocks[0].splitlines()) <= MOST_LINES, name


def test_the_estimator_trains_a_model(configure: Configure) -> None:
    metrics = train(configure("An advantage estimator"))
    assert metrics["reward/advantage_mean"] == pytest.approx(0, abs=1e-5)
    assert metrics["reward/advantage_std"] > 0
    assert metrics["actor/grad_norm"] > 0


def test_the_loss_trains_a_model(configure: Configure) -> None:
    metrics = train(configure("A policy loss"))
    assert metrics["actor/grad_norm"] > 0
    assert "actor/clip_fraction" in metrics


def test_the_sampler_selects_the_rows_of_a_training(configure: Configure) -> None:
    metrics = train(configure("A sampler of rows"))
    assert metrics["rows/seen"] == 4
    assert metrics["actor/grad_norm"] > 0


def test_the_parser_reads_a_completion_and_its_calls_run(configure: Configure) -> None:
    config = load_config(configure("A tool parser"))
    parser = ToolParser.get(config.rollout.multi_turn.format)
    parsed = parser.parse('Adding. <call>{"name": "add", "arguments": {"a": 1}}</call>')
    assert [(call.name, call.arguments) for call in parsed.calls] == [("add", {"a": 1})]
    assert parsed.content == "Adding."


def test_the_engine_samples_in_a_rollout(configure: Configure) -> None:
    trajectory = roll_out(configure("An engine"), {})
    output = trajectory.output
    assert output.response_ids.tolist() == output.prompt_ids[-3:].tolist()


@pytest.mark.parametrize(("answer", "reward"), [("408", 1.0), ("409", 0.0)])
def test_the_reward_scores_a_trajectory(configure: Configure, answer: str, reward: float) -> None:
    trajectory = roll_out(configure("A reward"), {"answer": answer}, "408")
    assert trajectory.reward == reward
    assert trajectory.reward_extra["num_tokens"] == len(trajectory.output.response_ids)


def test_the_loop_can_be_named_by_its_file_and_by_its_name(configure: Configure) -> None:
    config_file = configure("An agent loop")
    assert roll_out(config_file, {}, "407", "408").output.answer == "408"
    config_file.write_text("rollout: {agent: {loop_files: [loops.py]}}", encoding="utf-8")
    assert roll_out(config_file, {"agent_name": "second_try"}, "407", "408").output.answer == "408"


def test_the_tool_answers_the_model(configure: Configure) -> None:
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 12, "b": 34}}\n</tool_call>'
    messages = roll_out(configure("A tool"), {}, call, "It is 408.").output.messages
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["408"]


def test_the_interaction_answers_the_model_and_scores_it(configure: Configure) -> None:
    row = {"interaction_kwargs": {"name": "teacher", "answer": "408"}}
    output = roll_out(configure("An interaction"), row, "It is 407.", "It is 408.").output
    replies = [message["content"] for message in output.messages if message["role"] == "user"][1:]
    assert replies == ["Try again.", "Right."]
    assert output.turn_scores == (0.0, 1.0)


def test_every_section_has_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in SECTIONS if f'configure("{name}")' not in source] == []
