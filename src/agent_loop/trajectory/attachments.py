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
    """An image or a video, and the run of tokens that stands for it."""

    kind: AttachmentKind
    start: int
    """Where its run begins: in its segment, or in the whole context when a server or a batch is given it."""
    num_tokens: int
    """The run: placeholders, and what the processor writes between them."""
    placeholder_id: int
    """In the run, each token with this id stands for one row of what the model makes of the features."""
    features: Mapping[str, NDArray[Any]]
    """What the model's processor made of it, by the names under which the model takes it."""
    digest: bytes
    """Of the features. Equal digests, equal features."""
    positions: NDArray[np.int32] | None = None
    """Shape [3, num_tokens], relative to `start`: time, height and width; None where the model counts tokens."""
    num_positions: int = 0
    """With `positions`: how far the text behind it is from where it starts."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def moved(self, by: int) -> Attachment:
        """The same, counted from elsewhere."""
        return replace(self, start=self.start + by)


def position_ids(num_tokens: int, attachments: Iterable[Attachment]) -> NDArray[np.int32]:
    """Positions in time, height and width of a context: text counts on in all three, images bring their own.

    Args:
        num_tokens: Of the context.
        attachments: Counted from its first token, in order.

    Returns:
        Shape [3, num_tokens].
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
