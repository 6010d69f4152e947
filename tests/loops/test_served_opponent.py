"""Games against another weight version, which `agent-loop serve` serves in a process of its own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from agent_loop.config import Config, load_config
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.training.metrics import FAILURES, read_metrics
from agent_loop.trajectory import FailureKind, Trajectory
from tests.cli.project import make_project
from tests.cli.test_serve import COMMAND, running
from tests.helpers import small_tokenizer
from tests.rollout.outages import retries_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_ROUNDS = 2
GAME = f"""
from agent_loop.environments.game import Game


class EchoGame(Game):
    '''Two seats say something in turns, and hear each other. Every text is legal. The longer texts win.'''

    def reset(self, row):
        self.texts = [[], []]
        self.loser = None
        return 2

    def turn(self):
        num_texts = sum(map(len, self.texts))
        return None if self.loser is not None or num_texts == 2 * {NUM_ROUNDS} else num_texts % 2

    def observe(self, seat):
        theirs = self.texts[1 - seat]
        return f"The other seat said {{' '.join(theirs[-1].split()) or 'nothing'}}." if theirs else "Begin."

    def act(self, seat, text):
        self.texts[seat].append(text)

    def forfeit(self, seat):
        self.loser = seat

    def rewards(self):
        if self.loser is not None:
            return {{seat: -1.0 if seat == self.loser else 1.0 for seat in range(2)}}
        first, second = (sum(map(len, texts)) for texts in self.texts)
        return {{0: float(first > second), 1: float(second > first)}}
"""
OLD = "step-100"
"""Name under which the older weights are served."""
MAX_MOVE_TOKENS = 6
LOGIT_SCALE, END_OF_TURN_SCALE = 1.0, 3.0
"""Standard deviations of the weights that give the logits: large, so that the texts of two models differ, and larger
for the end of a turn, so that moves end after a few tokens."""


def save_model(folder: Path, *, like: Path, seed: int) -> None:
    """Save a model with random weights of a seed that writes ASCII, and the tokenizer of another model."""
    config, tokenizer = AutoConfig.from_pretrained(like), small_tokenizer()
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    is_written = torch.tensor(
        [tokenizer.decode([n]).isalpha() and tokenizer.decode([n]).isascii() for n in range(len(tokenizer))]
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(LOGIT_SCALE * torch.randn(parameter.shape, generator=generator))
        head = model.get_output_embeddings().weight
        head[~is_written] = 0
        head[tokenizer.eos_token_id] = END_OF_TURN_SCALE * torch.randn(head.shape[1], generator=generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a configuration, the present weights, and older weights."""
    folder = tmp_path_factory.mktemp("project")
    path = make_project(folder)
    for name, seed in ((OLD, 1), ("present", 2)):
        save_model(folder / name, like=folder / "model", seed=seed)
    settings = yaml.safe_load(path.read_text())
    settings["model"] = {"path": "present"}
    settings["rollout"] |= {
        "prompt_length": 512,
        "response_length": 512,
        "n": 4,
        "retries": 1,
        "max_failed_share": 1.0,
        "agent": {"default_agent_loop": "game_agent", "agent_loop_config_path": "loops.yaml"},
        "multi_turn": {"environments": {"echo": f"{folder}/game.py:EchoGame"}, "max_turn_tokens": 256},
    }
    settings["trainer"] |= {"total_steps": 2, "save_every": 5}
    del settings["reward"]
    path.write_text(yaml.safe_dump(settings))
    (folder / "game.py").write_text(GAME)
    (folder / "rows.jsonl").write_text('{"prompt": "Talk.", "environment": "echo"}\n' * 4)
    return folder


@pytest.fixture(scope="module")
def served_url(project: Path) -> Iterator[str]:
    """Serve the older weights in a process."""
    with running(project, OLD, "--max-model-len", "512") as served:
        yield served.url


def name_opponent(folder: Path, *, base_url: str, **settings: Any) -> None:
    """Write the entry of the loop of games, whose second seat is the served model."""
    opponent = {"model": OLD, "base_url": base_url, "max_tokens": MAX_MOVE_TOKENS, **settings}
    entry = {
        "name": "game_agent",
        "_target_": "agent_loop.loops.game_agent.GameAgentLoop",
        "players": ["policy", "frozen"],
        "opponents": {"frozen": opponent},
    }
    (folder / "loops.yaml").write_text(yaml.safe_dump([entry]))


def settings_of(folder: Path) -> Config:
    loops = f"rollout.agent.agent_loop_config_path={folder / 'loops.yaml'}"
    return load_config(folder / "config.yaml", overrides=[f"model.path={folder / 'present'}", loops])


async def play(folder: Path) -> list[Trajectory]:
    rows = load_rows([str(folder / "rows.jsonl")], prompt_key="prompt")
    async with AgentLoopManager.from_config(settings_of(folder)) as manager:
        return await manager.run(rows, n=1)


def words_of(text: str) -> str:
    """Return what the other seat is told about a text."""
    return f"The other seat said {' '.join(text.split()) or 'nothing'}."


def contents(trajectory: Trajectory, role: str) -> list[str]:
    return [message["content"] for message in trajectory.output.messages if message["role"] == role]


def replayed(url: str, moves: Sequence[str]) -> list[str]:
    """Return what the policy is told if the served model answers these moves."""
    messages: list[dict[str, Any]] = []
    told: list[str] = []
    with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client:
        for move in moves:
            messages.append({"role": "user", "content": words_of(move)})
            completion = client.chat.completions.create(
                model=OLD, messages=messages, max_tokens=MAX_MOVE_TOKENS, temperature=0
            )
            text = completion.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            told.append(words_of(text))
    return told


def test_the_other_seat_is_played_by_the_weights_that_are_served(project: Path, served_url: str) -> None:
    name_opponent(project, base_url=served_url, temperature=0)
    trajectories = asyncio.run(play(project))
    assert len(trajectories) == 4
    heard: list[list[str]] = []
    for trajectory in trajectories:
        begin, *told = contents(trajectory, "user")
        assert begin == "Begin."
        assert replayed(served_url, contents(trajectory, "assistant"))[: len(told)] == told
        heard.append(told)
    assert max(map(len, heard)) == NUM_ROUNDS
    assert len({text for told in heard for text in told}) > 2
    for trajectory in trajectories:
        assert trajectory.output.failure is None
        assert trajectory.branch is None
        assert trajectory.output.extra_fields["seat"] == 0
        assert trajectory.reward in (-1.0, 0.0, 1.0)


def test_the_games_of_an_opponent_that_is_gone_fail_by_name_and_without_a_reward(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    name_opponent(project, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0)
    trajectories = asyncio.run(play(project))
    assert len(trajectories) == 4
    for trajectory in trajectories:
        assert trajectory.reward is None
        failure = trajectory.output.failure
        assert failure is not None
        assert failure.kind is FailureKind.ENVIRONMENT
        assert f"the opponent 'frozen' (model {OLD!r}) returned no move" in failure.error
        assert len(retries_of(trajectory)) == 1


def test_a_run_is_trained_against_older_weights(project: Path, served_url: str) -> None:
    name_opponent(project, base_url=served_url, temperature=1.0)
    command = [*COMMAND[:-1], "train", "config.yaml"]
    trained = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    steps = list(read_metrics(project / "run" / "metrics.jsonl"))
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert f"{FAILURES}environment" not in step
        assert -1 <= step["reward/seat_0/mean"] <= 1
        assert step["rollout/num_turns/mean"] > 1
