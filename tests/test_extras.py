"""Tests that arrays with one entry per token stay with their tokens in chunks, segments, files and batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agent_loop.distributed.messages import pack_trajectories, unpack_trajectories
from agent_loop.episode.ledger import TokenLedger
from agent_loop.recording.values import pack, unpack
from agent_loop.rollout.batch import assemble
from agent_loop.rollout.jobs import Job
from agent_loop.storage import StoredRun, to_trajectory, write_trajectories
from agent_loop.storage.json_lines import read_lines, write_lines
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory
from agent_loop.trajectory.codec import decode_completion, encode_completion
from agent_loop.types import Origin, TokenArrays, TokenChunk, TokenOutput, as_token_ids, same_arrays
from tests.harness import examples

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
    ledger.append([1, 2], origin=Origin.PROMPT)
    for part in parts:
        if isinstance(part, int):
            ledger.append([7] * part, origin=Origin.TOOL)
        else:
            ledger.append_completion(part)
    values: dict[str, Any] = {"group": 0, "rollout": 0, "reward": 1.0, "reward_extra": {}, **fields}
    return Trajectory(AgentLoopOutput(segments=ledger.segments()), ROW, **values)


@given(completions(), st.data())
def test_parts_of_a_chunk_join_to_the_chunk(output: TokenOutput, data: st.DataObject) -> None:
    for each in output.chunks:
        cut = data.draw(st.integers(0, len(each.token_ids)))
        head, tail = each.part(0, cut), each.part(cut, len(each.token_ids))
        for part in (head, tail):
            if part.token_ids:
                assert_entries_match_tokens(part.token_ids, part.extras)
        assert TokenChunk.joined([head, tail]) == each
    assert TokenOutput.from_chunks([token for c in output.chunks for token in c.single_tokens()]) == output


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


@given(completions())
def test_the_journal_and_messages_between_processes_keep_all_arrays(output: TokenOutput) -> None:
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
    sent = trajectory(whole, 2, plain, 1, TokenOutput.from_chunks([chunk(3, 2)]))
    jobs = {"group=0/rollout=0": Job(ROW, 0, 0, {})}
    [received] = unpack_trajectories(pack_trajectories([sent]), jobs=jobs)
    write_trajectories(tmp_path / "t.parquet", [sent], step=0, split="rollout")
    stored = to_trajectory(StoredRun(tmp_path).trajectory("rollout", 0, sent.trajectory_id))
    write_lines(tmp_path / "t.jsonl", [sent], split="rollout")
    [line] = read_lines(tmp_path / "t.jsonl")
    for read in (received, stored, to_trajectory(line)):
        for mine, its in zip(read.output.segments, sent.output.segments, strict=True):
            assert same_arrays(mine.extras, its.extras)
            assert [a.dtype for a in mine.extras.values()] == [a.dtype for a in its.extras.values()]


rows = st.lists(st.lists(completions() | st.integers(1, 3), max_size=4), min_size=1, max_size=3)


@examples(40)
@given(rows)
def test_a_batch_has_a_column_for_each_array(parts: list[list[TokenOutput | int]]) -> None:
    trajectories = [trajectory(*each, rollout=number) for number, each in enumerate(parts)]
    batch = assemble(trajectories, pad_token_id=99)
    if not batch["response_mask"].any():
        assert "pair" not in batch.keys()  # noqa: SIM118
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
    assert "pair" not in batch.keys()  # noqa: SIM118
    plain = assemble([trajectory(whole), trajectory(TokenOutput([1], [-0.1], "stop"))], pad_token_id=99)
    assert not {"position", "pair"} & set(plain.keys())


def test_tokens_shared_by_branches_have_their_value_only_in_the_branch_that_trains_on_them() -> None:
    shared = Segment.of_model(chunk(1, 2))
    prompt = Segment(as_token_ids([1]), Origin.PROMPT)
    both = [
        Trajectory(AgentLoopOutput(segments=[prompt, shared]), ROW, 0, 0, 1.0, {}, branch=branch)
        for branch in (0, 1)
    ]
    batch = assemble(both, pad_token_id=99)
    assert batch["response_mask"].tolist() == [[1, 1], [0, 0]]
    assert batch["position"].tolist() == [[1, 2], [0, 0]]


def test_an_array_with_the_name_of_a_column_gets_a_prefix() -> None:
    named = TokenOutput.from_chunks([TokenChunk([4], [-0.1], extras={"reward": np.array([0.25])})])
    batch = assemble([trajectory(named)], pad_token_id=99)
    assert batch["reward"].tolist() == [1.0]
    assert "extras.reward" in batch.keys()  # noqa: SIM118
