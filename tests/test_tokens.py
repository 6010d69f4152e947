"""Completions, their chunks, arrays with an entry per token, and tokens that a grammar forced."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray

from agent_loop.config import Config
from agent_loop.distributed.messages import pack_trajectories, unpack_trajectories
from agent_loop.episode.ledger import TokenLedger
from agent_loop.errors import SamplingParamsError, ServerDied
from agent_loop.recording.values import pack, unpack
from agent_loop.rollout.batch import assemble
from agent_loop.rollout.jobs import Job
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply, ScriptedServer
from agent_loop.storage import StoredRun, to_trajectory, write_trajectories
from agent_loop.storage.json_lines import read_lines, write_lines
from agent_loop.testing import run_virtual
from agent_loop.training.learner import load_learner
from agent_loop.training.metrics import MODEL_TOKENS
from agent_loop.training.monitor import why_unlearnable
from agent_loop.training.step_metrics import rollout_metrics
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.trajectory.codec import decode_completion, encode_completion, from_plain, to_plain
from agent_loop.types import (
    FORCED,
    Origin,
    SamplingParams,
    TokenArrays,
    TokenChunk,
    TokenOutput,
    as_logprobs,
    as_token_ids,
    same_arrays,
)
from tests.harness import examples
from tests.training.fakes import PAD, sample_trajectories, tiny_policy


def test_extras_with_different_shapes_are_dropped() -> None:
    both, one = np.zeros((2, 3)), np.zeros((2, 4))
    chunks = [
        TokenChunk([1, 2], None, extras={"a": both, "b": both}),
        TokenChunk([3, 4], None, extras={"a": both, "b": one}),
        TokenChunk([], None, stop_reason="stop"),
    ]
    extras = TokenOutput.from_chunks(chunks).extras
    assert {name: array.shape for name, array in extras.items()} == {"a": (4, 3)}


def test_chunks_of_one_version_are_joined_and_an_incomplete_stream_is_aborted() -> None:
    chunks = [
        TokenChunk([1, 2], [-0.1, -0.2], weight_version=4),
        TokenChunk([3], [-0.3], weight_version=4),
        TokenChunk([], [], weight_version=5, stop_reason="stop"),
    ]
    output = TokenOutput.from_chunks(chunks)
    assert (output.token_ids, output.weight_version, len(output.chunks)) == ([1, 2, 3], 4, 1)
    assert TokenOutput.from_chunks([TokenChunk([1], None)]).stop_reason == "aborted"
    assert TokenOutput.from_chunks([]).token_ids == []


@given(st.lists(st.one_of(st.integers(-(2**31), 2**31 - 1), st.booleans(), st.floats(-9, 9))))
def test_ids_are_packed_as_numpy_packs_them(ids: list[int]) -> None:
    packed, expected = as_token_ids(ids), np.asarray(ids, np.int32)
    assert packed.dtype == np.int32
    assert packed.tolist() == expected.tolist()
    assert as_token_ids(packed) is packed


@given(st.lists(st.floats(width=32)))
def test_logprobs_are_packed_as_numpy_packs_them(logprobs: list[float]) -> None:
    packed = as_logprobs(logprobs)
    assert packed.dtype == np.float32
    np.testing.assert_array_equal(packed, np.asarray(logprobs, np.float32))
    assert as_logprobs(packed) is packed


def test_an_invalid_id_is_an_error() -> None:
    for ids in ([2**31], ["a"], [None]):
        with pytest.raises((OverflowError, ValueError, TypeError)):
            as_token_ids(ids)


def test_limited_returns_a_valid_copy_and_does_not_change_the_original() -> None:
    params = SamplingParams(temperature=0.5, stop_token_ids=(7,))
    expected = SamplingParams(temperature=0.5, max_tokens=3, stop_token_ids=(7, 8))
    assert params.limited(3, more_stop_token_ids=(8,)) == expected
    assert params == SamplingParams(temperature=0.5, stop_token_ids=(7,))
    with pytest.raises(SamplingParamsError, match="max_tokens is 0"):
        SamplingParams().limited(0)


def test_parameters_after_two_interruptions_count_the_tokens_before_both() -> None:
    params = SamplingParams(max_tokens=9).after(2).after(3)
    assert (params.max_tokens, params.num_sampled) == (4, 5)


def test_the_journal_keeps_log_probs_to_the_bit() -> None:
    output = TokenOutput([1, 2], [-0.1, -1e-300], "stop")
    assert decode_completion(encode_completion(output)).log_probs == [-0.1, -1e-300]


IDS = np.array([1, 2], np.int32)
ROW: dict[str, Any] = {"raw_prompt": [{"role": "user", "content": "?"}]}


def top(first: int, num_tokens: int) -> dict[str, NDArray[Any]]:
    """Return arrays whose entries are the positions of their tokens."""
    positions = np.arange(first, first + num_tokens)
    return {
        "position": positions.astype(np.int32),
        "pair": np.stack([positions, -positions], axis=1).astype(np.float32),
    }


def chunk(first: int, num_tokens: int, **fields: Any) -> TokenChunk:
    return TokenChunk(
        list(range(first, first + num_tokens)), [-0.5] * num_tokens, extras=top(first, num_tokens), **fields
    )


@st.composite
def completions(draw: st.DrawFn) -> TokenOutput:
    versions = sorted(draw(st.lists(st.integers(0, 5), max_size=5)))
    chunks: list[TokenChunk] = []
    for version in versions:
        first = sum(len(each.token_ids) for each in chunks)
        chunks.append(chunk(first, draw(st.integers(1, 5)), weight_version=version))
    return TokenOutput.from_chunks([*chunks, TokenChunk([], [], stop_reason="stop")])


@st.composite
def varied_completions(draw: st.DrawFn) -> TokenOutput:
    """Return a completion that may lack log-probs, and has counts and a reason for its end."""
    has_logprobs = draw(st.booleans())
    chunks = [each if has_logprobs else replace(each, logprobs=None) for each in draw(completions()).chunks]
    reason = draw(st.sampled_from(["stop", "length", "aborted"]))
    counts = {
        "num_preempted": draw(st.integers(0, 2)),
        "num_cached_tokens": draw(st.sampled_from([None, 0, 7])),
    }
    return TokenOutput.from_chunks([*chunks, TokenChunk([], [], stop_reason=reason, **counts)])


def assert_entries_match_tokens(token_ids: Any, extras: TokenArrays) -> None:
    """Check that every entry of every array belongs to its token."""
    positions = np.asarray(token_ids)
    if not len(positions):
        return
    assert same_arrays(extras, top(int(positions[0]), len(positions)))
    assert {name: array.dtype for name, array in extras.items()} == {"position": np.int32, "pair": np.float32}


def trajectory(*parts: TokenOutput | int, **fields: Any) -> Trajectory:
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


def branches(chunk: TokenChunk) -> list[Trajectory]:
    """Return two branches that share their only completion."""
    segments = [Segment(as_token_ids([1]), Origin.PROMPT), Segment.of_model(chunk)]
    output = AgentLoopOutput(segments=segments)
    return [Trajectory(output, ROW, 0, 0, 1.0, {}, branch=branch) for branch in (0, 1)]


def sent(each: Trajectory) -> Trajectory:
    """Return a trajectory after its way between processes."""
    [received] = unpack_trajectories(pack_trajectories([each]), jobs={each.trajectory_id: Job(ROW, 0, 0, {})})
    return received


def stored(each: Trajectory, folder: Path) -> dict[str, Any]:
    """Return the row of a stored trajectory."""
    write_trajectories(folder / "t.parquet", [each], step=0, split="rollout")
    return StoredRun(folder).trajectory("rollout", 0, each.trajectory_id)


@given(completions(), st.data())
def test_parts_of_a_chunk_join_to_the_chunk(output: TokenOutput, data: st.DataObject) -> None:
    for each in output.chunks:
        cut = data.draw(st.integers(0, len(each.token_ids)))
        head, tail = each.part(0, cut), each.part(cut, len(each.token_ids))
        for part in (head, tail):
            if part.token_ids:
                assert_entries_match_tokens(part.token_ids, part.extras)
        assert TokenChunk.joined([head, tail]) == each


@given(completions(), st.data())
def test_an_aborted_completion_and_its_continuation_join_to_the_whole(
    output: TokenOutput, data: st.DataObject
) -> None:
    tokens = [token for each in output.chunks for token in each.single_tokens()]
    cut = data.draw(st.integers(0, len(tokens)))
    begun, rest = TokenOutput.from_chunks(tokens[:cut]), TokenOutput.from_chunks(tokens[cut:])
    joined = begun.then(rest)
    assert joined.token_ids == output.token_ids
    if output.token_ids:
        assert_entries_match_tokens(joined.token_ids, joined.extras)


@given(varied_completions())
def test_the_journal_and_messages_between_processes_keep_completions(output: TokenOutput) -> None:
    assert TokenOutput.from_chunks(output.chunks) == output
    assert TokenOutput.from_chunks([token for c in output.chunks for token in c.single_tokens()]) == output
    assert from_plain(to_plain(output), TokenOutput) == output
    for read in (
        decode_completion(unpack(pack(encode_completion(output)))),
        decode_completion(encode_completion(output)),
    ):
        assert read == output
        for mine, its in zip(read.chunks, output.chunks, strict=True):
            assert {n: a.dtype for n, a in mine.extras.items()} == {n: a.dtype for n, a in its.extras.items()}


@given(completions(), st.data())
def test_a_segment_cut_at_a_limit_keeps_the_arrays_of_its_tokens(
    output: TokenOutput, data: st.DataObject
) -> None:
    for segment in [Segment.of_model(each) for each in output.chunks if each.token_ids]:
        start = data.draw(st.integers(0, len(segment)))
        part = segment.part(start, data.draw(st.integers(start, len(segment))))
        if len(part):
            assert_entries_match_tokens(part.token_ids, part.extras)


def test_a_trajectory_keeps_its_arrays_between_processes_and_in_files(tmp_path: Path) -> None:
    whole = TokenOutput.from_chunks([chunk(0, 2, weight_version=3), chunk(2, 1, weight_version=4)])
    plain = TokenOutput([5, 6], [-0.1, -0.2], "stop")
    kept = trajectory(whole, 2, plain, 1, TokenOutput.from_chunks([chunk(3, 2)]))
    write_lines(tmp_path / "t.jsonl", [kept], split="rollout")
    [line] = read_lines(tmp_path / "t.jsonl")
    for read in (sent(kept), to_trajectory(stored(kept, tmp_path)), to_trajectory(line)):
        for mine, its in zip(read.output.segments, kept.output.segments, strict=True):
            assert same_arrays(mine.extras, its.extras)
            assert [a.dtype for a in mine.extras.values()] == [a.dtype for a in its.extras.values()]


rows = st.lists(st.lists(completions() | st.integers(1, 3), max_size=4), min_size=1, max_size=3)


@examples(40)
@given(rows)
def test_a_batch_has_a_column_for_each_array(parts: list[list[TokenOutput | int]]) -> None:
    trajectories = [trajectory(*each, rollout=number) for number, each in enumerate(parts)]
    batch = assemble(trajectories, pad_token_id=99)
    if not batch["response_mask"].any():
        assert not {"pair", "position"} & set(batch.keys())
        return
    mask, ids = batch["response_mask"].bool(), batch["responses"]
    assert batch["pair"].shape == (*mask.shape, 2)
    assert batch["pair"].dtype == torch.float32
    assert torch.equal(batch["position"].long(), ids * mask)
    assert torch.equal(batch["pair"].long(), torch.stack([ids, -ids], dim=-1) * mask[..., None])


def test_a_column_is_absent_if_a_sampled_token_lacks_the_value() -> None:
    whole = TokenOutput.from_chunks([chunk(0, 3)])
    partial = TokenOutput.from_chunks(
        [replace(chunk(3, 2), extras={"position": np.arange(3, 5, dtype=np.int32)})]
    )
    batch = assemble([trajectory(whole, 1, partial)], pad_token_id=99)
    assert batch["position"].tolist() == [[0, 1, 2, 0, 3, 4]]
    assert "pair" not in set(batch.keys())
    plain = assemble([trajectory(whole), trajectory(TokenOutput([1], [-0.1], "stop"))], pad_token_id=99)
    assert not {"position", "pair"} & set(plain.keys())


def test_tokens_shared_by_branches_have_their_value_only_in_the_branch_that_trains_on_them() -> None:
    batch = assemble(branches(chunk(1, 2)), pad_token_id=99)
    assert batch["response_mask"].tolist() == [[1, 1], [0, 0]]
    assert batch["position"].tolist() == [[1, 2], [0, 0]]


def test_an_array_with_the_name_of_a_column_gets_a_prefix() -> None:
    named = TokenOutput.from_chunks([TokenChunk([4], [-0.1], extras={"reward": np.array([0.25])})])
    batch = assemble([trajectory(named)], pad_token_id=99)
    assert batch["reward"].tolist() == [1.0]
    assert "extras.reward" in set(batch.keys())


REPLY = ScriptedReply([5, 6, 7, 8], logprobs=[-0.5, 0.0, -0.25, 0.0])
ANY_OBJECT = '{"type": "object"}'


def ask(*servers: AsyncServerBase, json_schema: str = ANY_OBJECT) -> TokenOutput:
    params = {"json_schema": json_schema}
    return run_virtual(
        AsyncLLMServerManager([*servers]).generate("s", prompt_ids=IDS, sampling_params=params)
    )


def scripted(**options: Any) -> ScriptedServer:
    return ScriptedServer([REPLY], more_abilities=[Ability.JSON_SCHEMA], **options)


@pytest.mark.parametrize("streams", [False, True])
def test_tokens_with_a_log_prob_of_zero_are_forced_if_the_request_has_a_grammar(streams: bool) -> None:
    output = ask(scripted(streams=streams))
    assert output.extras[FORCED].dtype == np.uint8
    assert output.extras[FORCED].tolist() == [0, 1, 0, 1]
    assert FORCED not in ask(scripted(streams=streams), json_schema="").extras
    unknown = TokenChunk([5], None)
    assert unknown.with_forced() is unknown


def test_a_completion_that_two_servers_sampled_has_marks_for_all_its_tokens() -> None:
    class Dying(ScriptedServer):
        async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[TokenChunk]:
            yield TokenChunk([5, 6], [-0.5, 0.0])
            raise ServerDied("the engine was killed", server=self.name)

    rest = ScriptedReply([7, 8], logprobs=[-0.1, 0.0])
    options: dict[str, Any] = {"more_abilities": [Ability.JSON_SCHEMA], "streams": True}
    second = ScriptedServer([rest], name="second", **options)
    output = ask(Dying([], name="first", **options), second)
    assert second.requests[0].sampling_params.num_sampled == 2
    assert output.token_ids == [5, 6, 7, 8]
    assert output.extras[FORCED].tolist() == [0, 1, 0, 1]


def test_forced_tokens_have_mask_0_and_stay_sampled_tokens() -> None:
    output = trajectory(ask(scripted()), 2).output
    assert output.response_mask.tolist() == [1, 0, 1, 0, 0, 0]
    assert output.response_mask.dtype == np.int8
    assert output.weight_versions.tolist() == [0, 0, 0, 0, -1, -1]
    assert output.num_model_tokens == 4
    assert output.response_logprobs is not None
    assert output.response_logprobs[:4].tolist() == [-0.5, 0.0, -0.25, 0.0]
    metrics = rollout_metrics([trajectory(ask(scripted()), 2)], weight_version=0, success_threshold=1.0)
    assert metrics[MODEL_TOKENS] == 4


def test_batches_train_only_on_tokens_that_were_chosen() -> None:
    plain = TokenOutput([3, 4], [0.0, -0.2], "stop")
    trajectories = [trajectory(ask(scripted()), 1, plain), trajectory(plain, rollout=1)]
    padded = assemble(trajectories, pad_token_id=PAD)
    assert padded["response_mask"].tolist() == [[1, 0, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0]]
    assert padded["weight_versions"][0].tolist() == [0, 0, 0, 0, -1, 0, 0]


def test_branches_that_share_forced_tokens_train_on_no_token_twice() -> None:
    both = branches(ask(scripted()).chunks[0])
    assert assemble(both, pad_token_id=PAD)["response_mask"].tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]


def test_processes_and_files_keep_the_marks(tmp_path: Path) -> None:
    kept = trajectory(ask(scripted()), 1)
    row = stored(kept, tmp_path)
    for each in (sent(kept), to_trajectory(row)):
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
    assert why_unlearnable([trajectory(forced), trajectory(ask(scripted()))]) is None
    assert "a grammar forced every sampled token of 1" in (why_unlearnable([trajectory(forced)]) or "")


def with_a_forced_token(sampled: Trajectory, *, logprob: float, is_marked: bool) -> Trajectory:
    """Return the trajectory with another log-prob of the second token of each completion."""
    segments: list[Segment] = []
    for segment in sampled.output.segments:
        if segment.origin is Origin.MODEL and segment.logprobs is not None and len(segment) > 1:
            logprobs, forced = segment.logprobs.tolist(), np.zeros(len(segment), np.uint8)
            logprobs[1], forced[1] = logprob, is_marked
            segment = structs.replace(segment, logprobs=as_logprobs(logprobs), extras={FORCED: forced})
        segments.append(segment)
    return structs.replace(sampled, output=replace(sampled.output, segments=segments))


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
