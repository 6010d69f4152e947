"""Tests that tokens which a grammar forced are marked at the servers' door, kept everywhere, and never trained on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from agent_loop.config import Config
from agent_loop.distributed.messages import pack_trajectories, unpack_trajectories
from agent_loop.episode.ledger import TokenLedger
from agent_loop.errors import ServerDied
from agent_loop.recording.values import pack, unpack
from agent_loop.rollout.batch import assemble
from agent_loop.rollout.jobs import Job
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.storage import StoredRun, to_trajectory, write_trajectories
from agent_loop.testing import run_virtual
from agent_loop.training.learner import load_learner
from agent_loop.training.metrics import MODEL_TOKENS
from agent_loop.training.monitor import why_unlearnable
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.trajectory.codec import decode_completion, encode_completion
from agent_loop.types import FORCED, Origin, TokenChunk, TokenOutput, as_logprobs, as_token_ids
from tests.training.fakes import PAD, sample_trajectories, tiny_policy

ROW: dict[str, Any] = {"raw_prompt": [{"role": "user", "content": "?"}]}
IDS = np.array([1, 2], np.int32)
REPLY = ScriptedReply([5, 6, 7, 8], logprobs=[-0.5, 0.0, -0.25, 0.0])
ANY_OBJECT = '{"type": "object"}'


def ask(server: AsyncServerBase, *, json_schema: str = ANY_OBJECT, **options: Any) -> TokenOutput:
    manager = AsyncLLMServerManager([server])
    params = {"json_schema": json_schema}
    return run_virtual(manager.generate("s", prompt_ids=IDS, sampling_params=params, **options))


def scripted(**options: Any) -> ScriptedServer:
    return ScriptedServer([REPLY], more_abilities=[Ability.JSON_SCHEMA], **options)


def of(*parts: TokenOutput | int, **fields: Any) -> Trajectory:
    """Return a trajectory of a prompt, completions, and replies with a number of tokens."""
    ledger = TokenLedger()
    ledger.append(IDS, origin=Origin.PROMPT)
    for part in parts:
        if isinstance(part, int):
            ledger.append([9] * part, origin=Origin.TOOL)
        else:
            ledger.append_completion(part)
    values: dict[str, Any] = {"group": 0, "rollout": 0, "reward": 1.0, "reward_extra": {}, **fields}
    return Trajectory(AgentLoopOutput(segments=ledger.segments()), ROW, **values)


@pytest.mark.parametrize("streams", [False, True])
def test_tokens_with_a_log_prob_of_zero_are_forced_if_the_request_has_a_grammar(streams: bool) -> None:
    output = ask(scripted(streams=streams))
    assert output.extras[FORCED].dtype == np.uint8
    assert output.extras[FORCED].tolist() == [0, 1, 0, 1]
    assert FORCED not in ask(scripted(streams=streams), json_schema="").extras


def test_a_token_is_not_known_to_be_forced_without_log_probs() -> None:
    chunk = TokenChunk([5], None)
    assert chunk.with_forced() is chunk


def test_a_completion_that_two_servers_sampled_has_marks_for_all_its_tokens() -> None:
    class Dying(ScriptedServer):
        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[TokenChunk]:
            yield TokenChunk([5, 6], [-0.5, 0.0])
            raise ServerDied("the engine was killed", server=self.name)

    rest = ScriptedReply([7, 8], logprobs=[-0.1, 0.0])
    options: dict[str, Any] = {"more_abilities": [Ability.JSON_SCHEMA], "streams": True}
    second = ScriptedServer([rest], name="second", **options)
    manager = AsyncLLMServerManager([Dying([], name="first", **options), second])
    params = {"json_schema": ANY_OBJECT}
    output = run_virtual(manager.generate("s", prompt_ids=IDS, sampling_params=params))
    assert second.requests[0].sampling_params.num_sampled == 2
    assert output.token_ids == [5, 6, 7, 8]
    assert output.extras[FORCED].tolist() == [0, 1, 0, 1]


def test_forced_tokens_have_mask_0_and_stay_sampled_tokens() -> None:
    output = of(ask(scripted()), 2).output
    assert output.response_mask.tolist() == [1, 0, 1, 0, 0, 0]
    assert output.response_mask.dtype == np.int8
    assert output.weight_versions.tolist() == [0, 0, 0, 0, -1, -1]
    assert output.num_model_tokens == 4
    assert output.response_logprobs is not None
    assert output.response_logprobs[:4].tolist() == [-0.5, 0.0, -0.25, 0.0]
    metrics = rollout_metrics([of(ask(scripted()), 2)], weight_version=0, success_threshold=1.0)
    assert metrics[MODEL_TOKENS] == 4


def test_batches_train_only_on_tokens_that_were_chosen() -> None:
    plain = TokenOutput([3, 4], [0.0, -0.2], "stop")
    trajectories = [of(ask(scripted()), 1, plain), of(plain, rollout=1)]
    padded = assemble(trajectories, pad_token_id=PAD)
    assert padded["response_mask"].tolist() == [[1, 0, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0]]
    assert padded["weight_versions"][0].tolist() == [0, 0, 0, 0, -1, 0, 0]


def test_branches_that_share_forced_tokens_train_on_no_token_twice() -> None:
    shared = Segment.of_model(ask(scripted()).chunks[0])
    prompt = Segment(as_token_ids([1]), Origin.PROMPT)
    both = [
        Trajectory(AgentLoopOutput(segments=[prompt, shared]), ROW, 0, 0, 1.0, {}, branch=branch)
        for branch in (0, 1)
    ]
    assert assemble(both, pad_token_id=PAD)["response_mask"].tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]


def test_the_journal_processes_and_files_keep_the_marks(tmp_path: Path) -> None:
    output = ask(scripted())
    for read in (
        decode_completion(unpack(pack(encode_completion(output)))),
        decode_completion(encode_completion(output)),
    ):
        assert read == output
    sent = of(output, 1)
    [received] = unpack_trajectories(
        pack_trajectories([sent]), jobs={"group=0/rollout=0": Job(ROW, 0, 0, {})}
    )
    write_trajectories(tmp_path / "t.parquet", [sent], step=0, split="rollout")
    row = StoredRun(tmp_path).trajectory("rollout", 0, sent.trajectory_id)
    for each in (received, to_trajectory(row)):
        assert each.output.response_mask.tolist() == [1, 0, 1, 0, 0]
    assert (row["num_model_tokens"], list(row["response_mask"])) == (4, [1, 0, 1, 0, 0])


def test_the_reward_of_a_turn_is_at_its_last_chosen_token() -> None:
    ledger = TokenLedger()
    ledger.append(IDS, origin=Origin.PROMPT)
    ledger.append_completion(ask(scripted()))
    ledger.append([9], origin=Origin.TOOL)
    assert ledger.last_sampled == 2
    ledger.append_completion(TokenOutput([4], [0.0], "stop", extras={FORCED: np.ones(1, np.uint8)}))
    assert ledger.last_sampled == 5  # (nothing was chosen in the turn)


def test_a_step_in_which_every_token_was_forced_has_nothing_to_learn_from() -> None:
    forced = TokenOutput([4], [0.0], "stop", extras={FORCED: np.ones(1, np.uint8)})
    assert why_unlearnable([of(forced), of(ask(scripted()))]) is None
    assert "a grammar forced every sampled token of 1" in (why_unlearnable([of(forced)]) or "")


def with_a_forced_token(trajectory: Trajectory, *, logprob: float, is_marked: bool) -> Trajectory:
    """Return the trajectory with another log-prob of the second token of each completion."""
    segments: list[Segment] = []
    for segment in trajectory.output.segments:
        if segment.origin is Origin.MODEL and segment.logprobs is not None and len(segment) > 1:
            logprobs, forced = segment.logprobs.tolist(), np.zeros(len(segment), np.uint8)
            logprobs[1], forced[1] = logprob, is_marked
            segment = structs.replace(segment, logprobs=as_logprobs(logprobs), extras={FORCED: forced})
        segments.append(segment)
    return structs.replace(trajectory, output=dataclasses.replace(trajectory.output, segments=segments))


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_an_update_ignores_forced_tokens(tmp_path: Path, estimator: str) -> None:
    tiny_policy().save_pretrained(tmp_path)
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path), "device": "cpu"},
            "actor": {"lr": 1e-2, "old_log_probs": "recompute", "correction": {"kind": "truncate"}},
            "algorithm": {"adv_estimator": estimator},
        }
    )
    sampled = sample_trajectories(tiny_policy(), num_groups=4, n=8)

    def updated(*, logprob: float, is_marked: bool) -> torch.Tensor:
        changed = [with_a_forced_token(t, logprob=logprob, is_marked=is_marked) for t in sampled]
        learner = load_learner(config)
        learner.learn(assemble(changed, pad_token_id=PAD))
        return torch.cat([weight.detach().flatten() for _, weight in learner.weights()])

    forced = updated(logprob=0.0, is_marked=True)
    assert torch.equal(forced, updated(logprob=math.log(1e-3), is_marked=True))
    assert not torch.equal(forced, updated(logprob=0.0, is_marked=False))
