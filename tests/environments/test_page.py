"""The example of docs/environments.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent_loop import AgentLoopManager
from agent_loop.config import load_config
from agent_loop.environments.tasks import SUITES, load_suite
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import StopReason
from tests.helpers import small_tokenizer, user

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"^## Your own environment\n(.*?)^## ", PAGE, flags=re.DOTALL | re.MULTILINE)


def roll_out(*replies: str) -> Trajectory:
    assert EXAMPLE is not None
    (code,) = re.findall(r"```python\n(.*?)```", EXAMPLE[1], flags=re.DOTALL)
    (config,) = re.findall(r"```yaml\n(.*?)```", EXAMPLE[1], flags=re.DOTALL)
    body = code.partition("\n\n\n")[2]
    assert len([line for line in body.splitlines() if line]) <= 15
    Path("guess.py").write_text(code, encoding="utf-8")
    Path("config.yaml").write_text(config, encoding="utf-8")
    Path("script.py").write_text(
        f"from tests.helpers import text_reply\nscript = [text_reply(text) for text in {list(replies)!r}]\n",
        encoding="utf-8",
    )
    small_tokenizer().save_pretrained("model")
    overrides = [
        "model.path=model",
        "rollout.engine=scripted",
        "rollout.engine_kwargs.script=script.py:script",
    ]
    settings = load_config("config.yaml", overrides=overrides)

    async def run() -> Trajectory:
        async with AgentLoopManager.from_config(settings) as manager:
            [trajectory] = await manager.run([{"raw_prompt": user("Play."), "number": 17}], n=1)
            return trajectory

    return run_virtual(run())


def test_the_environment_of_the_page_replies_and_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = roll_out("I guess 50.", "Hm", "17")
    assert found.output.failure is None
    texts = [message["content"] for message in found.output.messages[1:]]
    assert texts[:5] == ["I guess 50.", "lower", "Hm", "higher", "17"]
    assert found.reward == 1


def test_the_limit_of_the_page_ends_a_game_without_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lost = roll_out(*["1"] * 8)
    assert (lost.output.stop_reason, lost.reward) == (StopReason.MAX_ASSISTANT_TURNS, 0)


def test_the_page_lists_every_suite_with_its_extra() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|[^|]*\|$", PAGE, flags=re.MULTILINE))
    assert not SUITES.keys() - listed.keys()
    for name in SUITES:
        suite = load_suite(name)
        assert (f"agent-loop[{suite.extra}]" in listed[name]) == bool(suite.extra), name
