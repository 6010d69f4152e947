"""All trajectories' tokens end to end. B rows; N tokens, M of them of responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agent_loop.trajectory import Segment, Trajectory
from agent_loop.types import FloatArray, IntArray, Origin

IndexArray: TypeAlias = NDArray[np.int64]


class FlatTokens:
    """Trajectories' tokens end to end, in the order given; each prompt stands before its response.

    An array is made when it is asked for, so that only the one at hand takes memory.
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        of_prompt = Origin.PROMPT  # (Python 3.11 takes longer to look a member up than all else here)
        prompts = [[s for s in t.output.segments if s.origin is of_prompt] for t in trajectories]
        responses = [[s for s in t.output.segments if s.origin is not of_prompt] for t in trajectories]
        self._trajectories = trajectories
        self._responses = responses
        self._in_order = list(chain.from_iterable(chain.from_iterable(zip(prompts, responses, strict=True))))
        self._of_responses = list(chain.from_iterable(responses))
        self._segment_lengths = _lengths(self._of_responses)
        self.prompt_lengths_B = _row_lengths(prompts)
        self.response_lengths_B = _row_lengths(responses)

    @property
    def lengths_B(self) -> IndexArray:
        """Of prompt and response together."""
        return self.prompt_lengths_B + self.response_lengths_B

    @property
    def token_ids_N(self) -> IntArray:
        return _join([s.token_ids for s in self._in_order], np.int32)

    @property
    def is_model_M(self) -> NDArray[np.bool_]:
        """Whether it is trained on: no token is that of two branches."""
        return self._repeated(_is_trained(self._trajectories, self._responses), np.bool_)

    @property
    def weight_versions_M(self) -> IntArray:
        """-1 where it is not the model's."""
        versions = [-1 if s.weight_version is None else s.weight_version for s in self._of_responses]
        return self._repeated(versions, np.int32)

    @property
    def logprobs_M(self) -> FloatArray | None:
        """None unless every sampled token has one."""
        by_model = Origin.MODEL
        if any(s.logprobs is None and s.origin is by_model for s in self._of_responses):
            return None
        zeros = np.zeros(self._segment_lengths.max(initial=0), np.float32)
        logprobs = [zeros[: len(s)] if s.logprobs is None else s.logprobs for s in self._of_responses]
        return _join(logprobs, np.float32)

    @property
    def extra_names(self) -> list[str]:
        """Names of the extras that every sampled token has, in one shape per token."""
        first, *others = [s.extras for s in self._sampled] or [{}]
        return [
            name
            for name, array in first.items()
            if all(name in other and other[name].shape[1:] == array.shape[1:] for other in others)
        ]

    def extra_M(self, name: str) -> NDArray[Any]:
        """Return one of the extras, shape [M, ...]; 0 where `is_model_M` is false."""
        arrays = [s.extras[name] for s in self._sampled]
        dtype = np.result_type(*[array.dtype for array in arrays]).newbyteorder("=")
        values_M = np.zeros((int(self._segment_lengths.sum()), *arrays[0].shape[1:]), dtype)
        end = 0
        is_trained = _is_trained(self._trajectories, self._responses)
        for segment, trained in zip(self._of_responses, is_trained, strict=True):
            start, end = end, end + len(segment)
            if trained:
                values_M[start:end] = segment.extras[name]
        return values_M

    @property
    def _sampled(self) -> list[Segment]:
        by_model = Origin.MODEL
        return [s for s in self._of_responses if s.origin is by_model and len(s)]

    def _repeated(self, values: Sequence[Any], dtype: Any) -> NDArray[Any]:
        """The value of each segment of the responses, for each of its tokens."""
        return np.repeat(np.array(values, dtype), self._segment_lengths)


def _is_trained(trajectories: Sequence[Trajectory], responses: Sequence[Sequence[Segment]]) -> list[bool]:
    """For each segment of each response whether it is the model's, and nobody before it is trained on it."""
    trained: set[int] = set()
    by_model = Origin.MODEL
    is_trained: list[bool] = []
    for trajectory, segments in zip(trajectories, responses, strict=True):
        is_trained += [s.origin is by_model and id(s) not in trained for s in segments]
        if trajectory.branch is not None and trajectory.reward is not None:
            trained.update(map(id, segments))
    return is_trained


def runs(flat: NDArray[Any], lengths_B: IndexArray) -> Iterator[NDArray[Any]]:
    """What each row has of a flat array; views."""
    end = 0
    for length in lengths_B.tolist():
        start, end = end, end + length
        yield flat[start:end]


def _lengths(segments: Sequence[Segment]) -> IndexArray:
    return np.array([len(s.token_ids) for s in segments], np.int64)


def _row_lengths(rows: Iterable[Sequence[Segment]]) -> IndexArray:
    return np.array([sum([len(s.token_ids) for s in segments]) for segments in rows], np.int64)


def _join(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)
