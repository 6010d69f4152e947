"""Examples of supervised training: trajectories whose sampled tokens are trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import structs

from agent_loop.chat.template import ChatTemplate
from agent_loop.config import SftConfig
from agent_loop.errors import DataError
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.rollout.rows import RowFile, RowSampler, load_row_files
from agent_loop.training.data_manifest import DataManifest
from agent_loop.training.supervised.chats import chat_segments
from agent_loop.training.supervised.stored import is_stored, stored_segments
from agent_loop.trajectory import AgentLoopOutput, Segment, Trajectory


@dataclass(frozen=True, slots=True)
class Examples:
    """Examples of one split."""

    trajectories: Sequence[Trajectory]
    """Each a group of its own. Tokens with the origin `MODEL` are trained, unless a grammar forced them."""
    num_overlong: int
    """Conversations that were left out because they are longer than `sft.max_tokens`."""
    manifest: DataManifest
    """Digests of the sources, with which a resume detects changes."""

    @property
    def num_trained_tokens(self) -> int:
        return sum(int(t.output.response_mask.sum()) for t in self.trajectories)


def load_examples(sources: Sequence[str], *, config: SftConfig, template: ChatTemplate) -> Examples:
    """Load conversations and stored trajectories, and encode the conversations.

    Raises:
        ConfigError: The kind of a source is unknown.
        DataError: A source cannot be read, a conversation is not valid, or no example is left.
    """
    files: list[RowFile] = []
    found: list[Trajectory] = []
    for source in sources:
        if is_stored(source):
            stored = _stored(source, config=config, template=template)
            files.append(RowFile(source, None, [{"token_ids": _token_ids(segments)} for segments in stored]))
            found += map(_example, stored)
        else:
            chats = load_row_files([source], prompt_key=config.messages_key)
            files += chats
            found += map(_example, _conversations(chats, config=config, template=template))
    trained = [t for t in found if t.output.response_mask.any()]
    fitting = [t for t in trained if sum(map(len, t.output.segments)) <= config.max_tokens]
    if not fitting:
        raise DataError(
            f"{', '.join(sources)}: none of {len(found)} examples can be trained: {len(found) - len(trained)} have no "
            f"trained token, and {len(trained)} are longer than sft.max_tokens={config.max_tokens}; give others, raise "
            "the limit, or relax sft.where"
        )
    numbered = [structs.replace(t, group=number) for number, t in enumerate(fitting)]
    return Examples(numbered, len(trained) - len(fitting), DataManifest.of(files))


class ExampleSampler:
    """Sampler of the training examples of each step, in an order that depends on the step alone.

    Args:
        examples: The examples of the training split.
        config: Size of a batch; it has all examples if there are fewer.
        seed: Seed of the order of each epoch.
        pad_token_id: Token id of the padding of batches.
    """

    def __init__(self, examples: Examples, *, config: SftConfig, seed: int, pad_token_id: int) -> None:
        trajectories = examples.trajectories
        self._sampler = RowSampler(trajectories, min(config.batch_size, len(trajectories)), seed=seed)
        self._pad_token_id = pad_token_id

    def batch(self, step: int) -> RolloutBatch:
        """Return the batch of a step. The first step is 1."""
        return assemble(self._sampler.batch(step), pad_token_id=self._pad_token_id)

    def num_steps(self, epochs: float) -> int:
        """Return the number of steps in which each example is trained this many times, rounded up."""
        return math.ceil(epochs * len(self._sampler.rows) / self._sampler.batch_size)


def batches(examples: Sequence[Trajectory], *, batch_size: int, pad_token_id: int) -> Iterator[RolloutBatch]:
    """Yield all examples once, in order."""
    for start in range(0, len(examples), batch_size):
        yield assemble(examples[start : start + batch_size], pad_token_id=pad_token_id)


def _stored(source: str, *, config: SftConfig, template: ChatTemplate) -> list[Sequence[Segment]]:
    return stored_segments(
        source,
        where=config.conditions,
        best_of_group=config.best_of_group,
        tokenizer=template.tokenizer,
    )


def _conversations(
    files: Sequence[RowFile], *, config: SftConfig, template: ChatTemplate
) -> Iterator[Sequence[Segment]]:
    for file in files:
        for number, row in enumerate(file.rows):
            where = f"{file.name}, conversation {number + 1}"
            yield chat_segments(row, template=template, tools_key=config.tools_key, where=where)


def _example(segments: Sequence[Segment]) -> Trajectory:
    output = AgentLoopOutput(segments=segments)
    return Trajectory(output, row={}, group=0, rollout=0, reward=None, reward_extra={})


def _token_ids(segments: Sequence[Segment]) -> list[int]:
    return [token_id for segment in segments for token_id in segment.token_ids.tolist()]
