"""Images and videos that belong to runs of tokens. Needs numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

AttachmentKind: TypeAlias = Literal["image", "video"]


@dataclass(frozen=True, slots=True, eq=False)
class Attachment:
    """Image or video, and the run of placeholder tokens for it."""

    kind: AttachmentKind
    start: int
    """Position of the run's first token: in the segment, or in the whole context for servers and batches."""
    num_tokens: int
    """Length of the run: placeholders and the tokens that the processor writes between them."""
    placeholder_id: int
    """Token id of placeholders. Each stands for one row of the embedding that the model computes from the features."""
    features: Mapping[str, NDArray[Any]]
    """Output of the model's processor, by the names of the model's arguments."""
    digest: bytes
    """Digest of the features. Equal digests mean equal features."""
    positions: NDArray[np.int32] | None = None
    """Shape [3, num_tokens], relative to `start`: time, height and width. None if the model counts tokens."""
    num_positions: int = 0
    """With `positions`: distance from the first position of the run to the position of the text after it."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def moved(self, by: int) -> Attachment:
        """Return the same attachment with `start` increased by `by`."""
        return replace(self, start=self.start + by)


def position_ids(num_tokens: int, attachments: Iterable[Attachment]) -> NDArray[np.int32]:
    """Return the positions of a context in time, height and width. Text counts on in all three dimensions.

    Args:
        num_tokens: Number of tokens of the context.
        attachments: Attachments in order, with `start` counted from the first token of the context.
    """
    positions = np.empty((3, num_tokens), np.int32)
    done = position = 0
    for attachment in attachments:
        if attachment.positions is None:
            continue
        positions[:, done : attachment.start] = np.arange(attachment.start - done) + position
        position += attachment.start - done
        positions[:, attachment.start : attachment.end] = attachment.positions + position
        position += attachment.num_positions
        done = attachment.end
    positions[:, done:] = np.arange(num_tokens - done) + position
    return positions
