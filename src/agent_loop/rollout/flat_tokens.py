"""Concatenated tokens of all trajectories. B rows; N tokens, M of them in responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agent_loop.trajectory import Segment, Trajectory
from agent_loop.trajectory.segments import without_forced
from agent_loop.types import FloatArray, IntArray, Origin

IndexArray: TypeAlias = NDArray[np.int64]


class FlatTokens:
    """Concatenated tokens of trajectories, in the given order, each prompt before its response.

    Arrays are built on every access and not stored, so that only one of them uses memory at a time.
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        of_prompt = (
            Origin.PROMPT
        )  # In Python 3.11, looking up the member takes longer than the rest of this loop.
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
        """Number of tokens in prompt and response."""
        return self.prompt_lengths_B + self.response_lengths_B

    @property
    def token_ids_N(self) -> IntArray:
        return _join([s.token_ids for s in self._in_order], np.int32)

    @property
    def is_model_M(self) -> NDArray[np.bool_]:
        """Whether a token is trained on. Tokens that branches share are trained on once, forced tokens never."""
        sampled_M = self._repeated(_is_trained(self._trajectories, self._responses), np.bool_)
        return without_forced(sampled_M, self._of_responses)

    @property
    def weight_versions_M(self) -> IntArray:
        """Weight versions. -1 where the model did not sample the token."""
        versions = [-1 if s.weight_version is None else s.weight_version for s in self._of_responses]
        return self._repeated(versions, np.int32)

    @property
    def logprobs_M(self) -> FloatArray | None:
        """Log-probs; None unless every sampled token has one."""
        by_model = Origin.MODEL
        if any(s.logprobs is None and s.origin is by_model for s in self._of_responses):
            return None
        zeros = np.zeros(self._segment_lengths.max(initial=0), np.float32)
        logprobs = [zeros[: len(s)] if s.logprobs is None else s.logprobs for s in self._of_responses]
        return _join(logprobs, np.float32)

    @property
    def extra_names(self) -> list[str]:
        """Names of the extras that every sampled token has, with the same shape for all tokens."""
        first, *others = [s.extras for s in self._sampled] or [{}]
        return [
            name
            for name, array in first.items()
            if all(name in other and other[name].shape[1:] == array.shape[1:] for other in others)
        ]

    def extra_M(self, name: str) -> NDArray[Any]:
        """Return an extra by name, with shape [M, ...]. The values are 0 in segments that are not trained on."""
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
        """Return the value of each response segment, repeated for each of its tokens."""
        return np.repeat(np.array(values, dtype), self._segment_lengths)


def _is_trained(trajectories: Sequence[Trajectory], responses: Sequence[Sequence[Segment]]) -> list[bool]:
    """Return, for each response segment, whether the model sampled it and no earlier branch trains on it."""
    trained: set[int] = set()
    by_model = Origin.MODEL
    is_trained: list[bool] = []
    for trajectory, segments in zip(trajectories, responses, strict=True):
        is_trained += [s.origin is by_model and id(s) not in trained for s in segments]
        if trajectory.branch is not None and trajectory.reward is not None:
            trained.update(map(id, segments))
    return is_trained


def _lengths(segments: Sequence[Segment]) -> IndexArray:
    return np.array([len(s.token_ids) for s in segments], np.int64)


def _row_lengths(rows: Iterable[Sequence[Segment]]) -> IndexArray:
    return np.array([sum([len(s.token_ids) for s in segments]) for segments in rows], np.int64)


def _join(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)
