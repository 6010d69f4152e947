"""Examples of supervised training: conversations and trajectories whose sampled tokens are trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from msgspec import structs

from agent_loop.chat.conversations import TokenRun, encode_conversation
from agent_loop.chat.messages import normalise_tools
from agent_loop.chat.template import ChatTemplate
from agent_loop.config import SftConfig
from agent_loop.errors import ChatTemplateError, DataError
from agent_loop.rollout.batch import RolloutBatch, assemble
from agent_loop.rollout.rows import RowFile, RowSampler, load_row_files
from agent_loop.training.manifest import DataManifest
from agent_loop.training.supervised.sources import is_stored, stored_segments
from agent_loop.trajectory import UNKNOWN_VERSION, AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Message, Origin, Row

WEIGHT = "weight"
"""Key of an assistant message: 0 if its tokens are not trained, as in OpenAI's files for fine-tuning."""
ROLES = frozenset({"system", "user", "assistant", "tool"})


def chat_segments(row: Row, *, template: ChatTemplate, tools_key: str, where: str) -> list[Segment]:
    """Return the segments of a conversation, as if a model had sampled its assistant turns."""
    given = cast(list[Message], row["raw_prompt"])
    trained = frozenset(index for index, message in enumerate(given) if _is_trained(message, where=where))
    messages = [{key: value for key, value in message.items() if key != WEIGHT} for message in given]
    tools = normalise_tools(row.get(tools_key), where=f"{where}, column {tools_key!r}")
    try:
        runs = encode_conversation(template, messages, tools=tools)
    except ChatTemplateError as error:
        raise DataError(f"{where}: {error}") from error
    return list(_segments(runs, trained=trained))


def _segments(runs: Sequence[TokenRun], *, trained: frozenset[int]) -> Iterator[Segment]:
    for run in runs:
        if run.origin is not Origin.MODEL:
            yield Segment(run.token_ids, run.origin)
        elif run.message in trained:
            yield Segment(run.token_ids, Origin.MODEL, weight_version=UNKNOWN_VERSION)
        else:
            yield Segment(run.token_ids, Origin.PREFIX)


def _is_trained(message: Message, *, where: str) -> bool:
    if message["role"] not in ROLES:  # templates leave out the messages of other roles
        raise DataError(
            f"{where}: a message has the role {message['role']!r}; give one of {', '.join(sorted(ROLES))}"
        )
    weight = message.get(WEIGHT, 1)
    if weight not in (0, 1):
        raise DataError(f"{where}: the {WEIGHT} of a message is {weight!r}; give 0 or 1")
    return message.get("role") == "assistant" and bool(weight)


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
    """Load conversations and stored trajectories, and encode the conversations."""
    files: list[RowFile] = []
    found: list[Trajectory] = []
    for source in sources:
        if is_stored(source):
            stored = stored_segments(
                source,
                where=config.conditions,
                best_of_group=config.best_of_group,
                tokenizer=template.tokenizer,
            )
            token_ids = [[int(each) for s in segments for each in s.token_ids] for segments in stored]
            files.append(RowFile(source, [{"token_ids": ids} for ids in token_ids]))
            found += map(_example, stored)
            continue
        chats = load_row_files([source], prompt_key=config.messages_key)
        files += chats
        for file in chats:
            for number, row in enumerate(file.rows, start=1):
                where = f"{file.name}, conversation {number}"
                found.append(
                    _example(chat_segments(row, template=template, tools_key=config.tools_key, where=where))
                )
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
    """Sampler of the training examples of each step, in an order that depends on the step alone."""

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


def _example(segments: Sequence[Segment]) -> Trajectory:
    output = AgentLoopOutput(segments=segments)
    return Trajectory(output, row={}, group=0, rollout=0, reward=None, reward_extra={})
