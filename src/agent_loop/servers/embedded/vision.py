"""Images and videos in the embedded engine: how a prompt with some is told from others, and what the model makes of
them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_loop.errors import AgentLoopError
from agent_loop.trajectory.attachments import Attachment, AttachmentKind, position_ids
from agent_loop.types import IntArray

VISION_MODELS = frozenset({"qwen2_vl", "qwen2_5_vl", "idefics3", "smolvlm"})
"""Kinds of models in which an image is nothing but embeddings in the places of its tokens. Others also mask its
tokens in another way, or add features in later layers."""

VIDEO_MODELS = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Those of them in which a video is the same."""

_METHODS: dict[AttachmentKind, str] = {"image": "get_image_features", "video": "get_video_features"}
_OF_THE_FORWARD = frozenset({"second_per_grid_ts"})
"""Features that say where tokens stand, not what they hold."""


class FeaturesError(AgentLoopError):
    """What the model makes of an image does not fit its tokens."""


class ImageRows(NamedTuple):
    """Rows of a step that get features in the place of token embeddings."""

    rows: NDArray[np.int64]
    features: Tensor
    """Shape [rows, hidden]."""


@dataclass(slots=True, eq=False)
class PromptImages:
    """The images of one request's prompt."""

    attachments: tuple[Attachment, ...]
    keys: IntArray
    """Shape [num_tokens]: the prompt's ids, placeholders replaced by negative numbers made of their image's digest.
    Prompts with equal keys mean the same."""
    positions: IntArray | None
    """Shape [3, num_tokens + 1], of the prompt and the token behind it; None where the model counts tokens."""
    places: tuple[NDArray[np.int64], ...]
    """For each image the places of its placeholders."""
    features: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """By the number of the image, of those that are still to compute: shape [placeholders, hidden]."""

    def positions_between(self, start: int, end: int) -> NDArray[np.integer]:
        """Of tokens of the prompt or behind it, shape [3, end - start]."""
        num_tokens = len(self.keys)
        if self.positions is None:
            return np.tile(np.arange(start, end), (3, 1))
        behind = np.arange(max(start, num_tokens), end) - num_tokens + int(self.positions[0, num_tokens])
        return np.concatenate(
            [self.positions[:, start : min(end, num_tokens)], np.tile(behind, (3, 1))], axis=1
        )

    def rows_between(self, start: int, end: int, *, first_row: int) -> list[ImageRows]:
        """The features of the tokens from `start` to `end`, which are rows of a step."""
        found: list[ImageRows] = []
        for number, places in enumerate(self.places):
            low, high = np.searchsorted(places, (start, end)).tolist()
            if low < high:
                found.append(ImageRows(places[low:high] - start + first_row, self.features[number][low:high]))
        return found


def read_attachments(
    prompt_ids: IntArray, attachments: Sequence[Attachment], *, image_token_id: int, counts_in_3d: bool
) -> PromptImages:
    """Finds the placeholders of each image and video.

    Raises:
        FeaturesError: An attachment lies beside its tokens, or has those of another model.
    """
    keys = prompt_ids.copy()
    all_places: list[NDArray[np.int64]] = []
    end = 0
    for number, attachment in enumerate(attachments):
        run = prompt_ids[attachment.start : attachment.end]
        places = np.flatnonzero(run == attachment.placeholder_id)
        where = f"{attachment.kind} {number} at tokens {attachment.start} to {attachment.end}"
        if attachment.kind == "image" and attachment.placeholder_id != image_token_id:
            raise _foreign(where, attachment, image_token_id)
        if attachment.start < end or len(run) < attachment.num_tokens or not len(places):
            raise FeaturesError(
                f"{where} of a prompt of {len(prompt_ids)} tokens lies on {len(places)} placeholders; send the "
                "attachments with the tokens that they came with, in order"
            )
        if counts_in_3d and attachment.positions is None:
            raise FeaturesError(
                f"{where} has no positions, but the model needs them in three dimensions; use its own processor"
            )
        end = attachment.end
        all_places.append(places + attachment.start)
        keys[all_places[-1]] = _codes(attachment.digest, len(places))
    return PromptImages(
        attachments=tuple(attachments),
        keys=keys,
        positions=position_ids(len(prompt_ids) + 1, attachments) if counts_in_3d else None,
        places=tuple(all_places),
    )


def media_features(model: Any, attachment: Attachment, *, num_placeholders: int) -> Tensor:
    """What the model puts in the places of the placeholders of an image or a video, [num_placeholders, hidden].

    Raises:
        FeaturesError: The model cannot read it, or makes more or less of it than there are placeholders.
    """
    kind, config = attachment.kind, model.config
    if kind == "video":
        where = f"a video of {attachment.num_tokens} tokens"
        if config.model_type not in VIDEO_MODELS:
            raise FeaturesError(f"{where}: {config.model_type} is given images only; send frames as images")
        if attachment.placeholder_id != config.video_token_id:
            raise _foreign(where, attachment, config.video_token_id)
    weight: Tensor = model.get_input_embeddings().weight
    given = {name: array for name, array in attachment.features.items() if name not in _OF_THE_FORWARD}
    inputs = {name: _as_input(array, like=weight) for name, array in given.items()}
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in given.items())
    what = f"{'an' if kind == 'image' else 'a'} {kind} of {shapes}"
    try:
        output: Any = getattr(model, _METHODS[kind])(**inputs, return_dict=True).pooler_output
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise FeaturesError(
            f"{type(model).__name__} cannot read {what}: {error}; use the processor of this model"
        ) from error
    parts: Sequence[Tensor] = (output,) if isinstance(output, Tensor) else output
    features = torch.cat([part.flatten(0, -2) for part in parts]).to(weight.dtype)
    if len(features) != num_placeholders:
        raise FeaturesError(
            f"{type(model).__name__} makes {len(features)} rows of {what}, but {num_placeholders} placeholders stand "
            "for it; use the processor of this model, with the same merge and patch sizes"
        )
    return features


def auto_model_class(path: Any, *, trust_remote_code: bool) -> Any:
    """What of `transformers` loads the model: one with its vision tower where it has one.

    Raises:
        OSError: There is no model at that place.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = cast(Any, AutoConfig).from_pretrained(path, trust_remote_code=trust_remote_code)
    has_vision = getattr(config, "vision_config", None) is not None
    return AutoModelForImageTextToText if has_vision else AutoModelForCausalLM


def _foreign(where: str, attachment: Attachment, expected: int) -> FeaturesError:
    return FeaturesError(
        f"{where} has placeholders {attachment.placeholder_id}, but the model's are {expected}; use the processor of "
        "the model that the server runs"
    )


def _codes(digest: bytes, count: int) -> IntArray:
    """Negative numbers, which no token has; other digests give others."""
    codes = np.frombuffer(hashlib.shake_128(digest).digest(4 * count), dtype="<i4").astype(np.int32)
    return codes | np.int32(-(2**31))


def _as_input(array: NDArray[Any], *, like: Tensor) -> Tensor:
    tensor = cast(Any, torch).from_numpy(np.ascontiguousarray(array)).to(like.device)
    return tensor.to(like.dtype) if tensor.is_floating_point() else tensor
