"""Tests of scores and likeliest tokens: checks of requests and replies, `ScriptedServer`, rollouts and batches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.config import ModelConfig
from agent_loop.errors import BadPrompt, BadServerReply, ConfigError, ServerDied, ServerError
from agent_loop.rollout.batch import assemble
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.base import Ability, AsyncServerBase, ServerSpec, refuse_sampling_params
from agent_loop.servers.openai_compatible import OpenAIServer
from agent_loop.servers.scores import TokenScores, checked_scores
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.storage import StoredRun, to_trajectory, write_trajectories
from agent_loop.testing import run_virtual
from agent_loop.trajectory import Trajectory
from agent_loop.types import IntArray, SamplingParams, same_arrays
from tests.engines.common import EngineCase, make_model_folder

TEXT = np.array([3, 0, 2, 1], np.int32)


def distribution(token_ids: IntArray) -> Any:
    """Prefer the token after the last one, in a vocabulary of four."""
    scores = np.full((len(token_ids) - 1, 4), 0.1)
    scores[np.arange(len(token_ids) - 1), (token_ids[:-1] + 1) % 4] = 0.7
    return np.log(scores)


def score(server: ScriptedServer, text: Any = TEXT, **options: int) -> Any:
    return run_virtual(server.score(np.asarray(text, np.int32), **options))


def test_a_scripted_server_scores_with_a_distribution_of_the_vocabulary() -> None:
    server = ScriptedServer([], scorer=distribution, vocab_size=4)
    assert Ability.SCORE in server.abilities
    scores = score(server, start=1, top_logprobs=2)
    np.testing.assert_allclose(np.exp(scores.logprobs), [0.7, 0.1, 0.1], rtol=1e-6)
    assert scores.top_ids.tolist() == [[0, 1], [1, 0], [3, 0]]
    np.testing.assert_allclose(np.exp(scores.top_logprobs), [[0.7, 0.1]] * 3, rtol=1e-6)
    assert score(server, top_logprobs=9).top_ids.shape == (3, 4), "a smaller vocabulary returns all"
    later = score(server, start=3)
    np.testing.assert_array_equal(later.logprobs, scores.logprobs[2:])
    assert later.top_ids is None
    assert [text.tolist() for text in server.scored] == [TEXT.tolist()] * 3


def test_a_scripted_server_scores_with_one_log_prob_per_token() -> None:
    server = ScriptedServer([], scorer=lambda token_ids: -np.arange(1.0, len(token_ids)))
    assert score(server, start=2).logprobs.tolist() == [-2.0, -3.0]
    with pytest.raises(ServerError, match="return those of the whole vocabulary for top_logprobs"):
        score(server, top_logprobs=1)


def test_a_scripted_server_is_created_with_a_scorer_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "teacher.py").write_text(
        "def scorer(token_ids):\n    return [-0.25] * (len(token_ids) - 1)\n"
    )
    options = {"scorer": f"{tmp_path / 'teacher.py'}:scorer", "vocab_size": 4}
    spec = ServerSpec("teacher", ModelConfig(path="none"), max_model_len=16, engine_kwargs=options)
    assert score(ScriptedServer.create(spec)).logprobs.tolist() == [-0.25] * 3


def test_a_server_without_a_scorer_or_that_died_says_so() -> None:
    with pytest.raises(ServerError, match="ScriptedServer does not define score, so it cannot be a teacher"):
        score(ScriptedServer([ScriptedReply([1])]))
    server = ScriptedServer([], scorer=distribution)
    server.die()
    with pytest.raises(ServerDied, match="killed"):
        score(server)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ([], {}, "the text to score is empty"),
        ([1] * 9, {}, "has 9 tokens, but the server takes 8; shorten the text"),
        ([1, 2], {"start": 0}, "start is 0, but the text to score has 2 tokens; give 1 to 2"),
        ([1, 2], {"start": 3}, "start is 3"),
        ([1, 4], {}, "token id 4, which is outside the vocabulary"),
        ([1, -1], {}, "token id -1"),
        ([1, 2], {"top_logprobs": -1}, "top_logprobs is -1; give 0 or more"),
    ],
)
def test_a_bad_text_is_refused(text: list[int], options: dict[str, int], message: str) -> None:
    server = ScriptedServer([], scorer=distribution, vocab_size=4, max_model_len=8)
    with pytest.raises(BadPrompt, match=message):
        score(server, text, **options)


NONE = np.zeros((2, 1))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (None, "score returned an object of type NoneType, not TokenScores"),
        (TokenScores([-1.0]), r"logprobs has shape \[1\], expected \[2\]"),
        (TokenScores([-1.0, float("nan")]), "logprobs has nan, which is not a log-prob"),
        (TokenScores([-1.0, 0.5]), "logprobs has 0.5"),
        (TokenScores(["a", "b"]), "logprobs is not an array"),
        (TokenScores([-1.0, -1.0]), "top_ids is not an array"),
        (TokenScores([-1.0, -1.0], [[4], [0]], NONE), "top_ids has ids from 0 to 4"),
        (TokenScores([-1.0, -1.0], [[0.5], [0]], NONE), "top_ids is not an array"),
        (TokenScores([-1.0, -1.0], [[1], [0]], NONE + 1), "top_logprobs has 1.0"),
    ],
)
def test_bad_scores_are_refused(reply: Any, message: str) -> None:
    with pytest.raises(BadServerReply, match=message):
        checked_scores(reply, num_scores=2, top_logprobs=1, server="s", vocab_size=4)


def test_scores_are_copied_and_rounding_above_zero_is_cut() -> None:
    given = np.array([5e-4, -np.inf], np.float32)
    checked = checked_scores(TokenScores(given), num_scores=2, top_logprobs=0, server="s")
    given[:] = 7
    assert checked.logprobs.tolist() == [0, -np.inf]


# -- the likeliest tokens of completions -------------------------------------------------------------------------------


@pytest.mark.parametrize("server", [ScriptedServer([]), OpenAIServer("http://nowhere", name="openai-0")])
def test_a_server_without_the_ability_is_refused_by_name(server: AsyncServerBase) -> None:
    refuse_sampling_params(server, SamplingParams())
    with pytest.raises(ConfigError, match=rf"top_logprobs is 5, which server '{server.name}' .* does not"):
        refuse_sampling_params(server, SamplingParams(top_logprobs=5))


def test_a_rollout_has_the_likeliest_tokens_in_its_batch_and_its_files(tmp_path: Path) -> None:
    path = make_model_folder(tmp_path / "model", is_tied=False)
    config = EngineCase("embedded").config(path, rollout__n=2, rollout__top_logprobs=4)
    rows = load_rows(config.data.val_files, prompt_key=config.data.prompt_key)[:3]

    async def scenario() -> list[Trajectory]:
        async with AgentLoopManager.from_config(config) as manager:
            return await manager.run(rows)

    trajectories = asyncio.run(scenario())
    batch = assemble(trajectories, pad_token_id=0)
    mask, ids, logprobs = (batch[name] for name in ("response_mask", "responses", "rollout_log_probs"))
    assert batch["top_token_ids"].shape == batch["top_logprobs"].shape == (*mask.shape, 4)
    assert not batch["top_logprobs"][mask == 0].any()
    is_listed = (batch["top_token_ids"] == ids[..., None]) & mask.bool()[..., None]
    assert is_listed.any()
    listed = (batch["top_logprobs"] * is_listed).sum(-1)[is_listed.any(-1)]
    torch.testing.assert_close(listed, logprobs[is_listed.any(-1)], atol=1e-6, rtol=0)
    write_trajectories(tmp_path / "t.parquet", trajectories, step=0, split="rollout")
    for trajectory in trajectories:
        stored = StoredRun(tmp_path / "t.parquet").trajectory("rollout", 0, trajectory.trajectory_id)
        for mine, its in zip(to_trajectory(stored).output.segments, trajectory.output.segments, strict=True):
            assert same_arrays(mine.extras, its.extras)
