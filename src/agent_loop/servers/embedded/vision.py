"""Images and videos in the embedded engine: their placeholders, their features, and prefix-cache keys for them."""

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
"""Types of models that process an image only through embeddings at its placeholders. Other models also mask its tokens
differently, or add features in later layers."""

VIDEO_MODELS = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""The vision models that process videos in the same way."""

_METHODS: dict[AttachmentKind, str] = {"image": "get_image_features", "video": "get_video_features"}
_POSITION_FEATURES = frozenset({"second_per_grid_ts"})
"""Features that determine the positions of tokens, not their embeddings."""


class FeaturesError(AgentLoopError):
    """The features of an image or video do not fit its placeholders or the model."""


class ImageRows(NamedTuple):
    """Rows of a step that get image features instead of token embeddings."""

    rows: NDArray[np.int64]
    features: Tensor
    """Shape [rows, hidden]."""


@dataclass(slots=True, eq=False)
class PromptImages:
    """Images and videos of one request's prompt."""

    attachments: tuple[Attachment, ...]
    cache_keys: IntArray
    """Shape [num_tokens]: the prompt's ids, with negative numbers derived from the image's digest for placeholders.
    Prompts with equal keys have equal images."""
    positions: IntArray | None
    """Shape [3, num_tokens + 1], for the prompt and the token after it. None if the model has one-dimensional
    positions."""
    placeholder_indices: tuple[NDArray[np.int64], ...]
    """Indices of the placeholders of each image."""
    features: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """Features of the images in the prompt's uncached part, by number of the image: shape [placeholders, hidden]."""

    def positions_between(self, start: int, end: int) -> NDArray[np.integer]:
        """Return the positions of tokens of the prompt and of the completion, shape [3, end - start]."""
        num_tokens = len(self.cache_keys)
        if self.positions is None:
            return np.tile(np.arange(start, end), (3, 1))
        behind = np.arange(max(start, num_tokens), end) - num_tokens + int(self.positions[0, num_tokens])
        return np.concatenate(
            [self.positions[:, start : min(end, num_tokens)], np.tile(behind, (3, 1))], axis=1
        )

    def rows_between(self, start: int, end: int, *, first_row: int) -> list[ImageRows]:
        """Return the features of the tokens from `start` to `end`, whose rows in the step begin at `first_row`."""
        found: list[ImageRows] = []
        for number, indices in enumerate(self.placeholder_indices):
            low, high = np.searchsorted(indices, (start, end)).tolist()
            if low < high:
                found.append(
                    ImageRows(indices[low:high] - start + first_row, self.features[number][low:high])
                )
        return found


def build_prompt_images(
    prompt_ids: IntArray, attachments: Sequence[Attachment], *, image_token_id: int, counts_in_3d: bool
) -> PromptImages:
    """Find the placeholders of each image and video in a prompt."""
    cache_keys = prompt_ids.copy()
    all_indices: list[NDArray[np.int64]] = []
    end = 0
    for number, attachment in enumerate(attachments):
        run = prompt_ids[attachment.start : attachment.end]
        indices = np.flatnonzero(run == attachment.placeholder_id)
        where = f"{attachment.kind} {number} at tokens {attachment.start} to {attachment.end}"
        if attachment.kind == "image" and attachment.placeholder_id != image_token_id:
            raise _wrong_placeholder(where, attachment, image_token_id)
        if attachment.start < end or len(run) < attachment.num_tokens or not len(indices):
            raise FeaturesError(
                f"{where} of a prompt of {len(prompt_ids)} tokens has {len(indices)} placeholders; send the "
                "attachments with the tokens that belong to them, in order"
            )
        if counts_in_3d and attachment.positions is None:
            raise FeaturesError(
                f"{where} has no positions, but the model needs three-dimensional positions; use the model's processor"
            )
        end = attachment.end
        all_indices.append(indices + attachment.start)
        cache_keys[all_indices[-1]] = _codes(attachment.digest, len(indices))
    return PromptImages(
        attachments=tuple(attachments),
        cache_keys=cache_keys,
        positions=position_ids(len(prompt_ids) + 1, attachments) if counts_in_3d else None,
        placeholder_indices=tuple(all_indices),
    )


def media_features(model: Any, attachment: Attachment, *, num_placeholders: int) -> Tensor:
    """Compute the features for the placeholders of an image or video, [num_placeholders, hidden]."""
    kind, config = attachment.kind, model.config
    if kind == "video":
        where = f"a video of {attachment.num_tokens} tokens"
        if config.model_type not in VIDEO_MODELS:
            raise FeaturesError(f"{where}: {config.model_type} supports images only; send frames as images")
        if attachment.placeholder_id != config.video_token_id:
            raise _wrong_placeholder(where, attachment, config.video_token_id)
    weight: Tensor = model.get_input_embeddings().weight
    given = {name: array for name, array in attachment.features.items() if name not in _POSITION_FEATURES}
    inputs = {name: _as_input(array, like=weight) for name, array in given.items()}
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in given.items())
    what = f"{'an' if kind == 'image' else 'a'} {kind} of {shapes}"
    try:
        output: Any = getattr(model, _METHODS[kind])(**inputs, return_dict=True).pooler_output
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise FeaturesError(
            f"{type(model).__name__} cannot process {what}: {error}; use the processor of this model"
        ) from error
    parts: Sequence[Tensor] = (output,) if isinstance(output, Tensor) else output
    features = torch.cat([part.flatten(0, -2) for part in parts]).to(weight.dtype)
    if len(features) != num_placeholders:
        raise FeaturesError(
            f"{type(model).__name__} computes {len(features)} features for {what}, but it has {num_placeholders} "
            "placeholders; use the processor of this model, with the same merge and patch sizes"
        )
    return features


def auto_model_class(path: Any, *, trust_remote_code: bool) -> Any:
    """Return the auto class of `transformers` that loads a model, including its vision tower if it has one."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = cast(Any, AutoConfig).from_pretrained(path, trust_remote_code=trust_remote_code)
    has_vision = getattr(config, "vision_config", None) is not None
    return AutoModelForImageTextToText if has_vision else AutoModelForCausalLM


def _wrong_placeholder(where: str, attachment: Attachment, expected: int) -> FeaturesError:
    return FeaturesError(
        f"{where} has placeholders {attachment.placeholder_id}, but the model's are {expected}; use the processor of "
        "the model that the server runs"
    )


def _codes(digest: bytes, count: int) -> IntArray:
    """Return negative numbers, which are not token ids, derived from a digest."""
    codes = np.frombuffer(hashlib.shake_128(digest).digest(4 * count), dtype="<i4").astype(np.int32)
    return codes | np.int32(-(2**31))


def _as_input(array: NDArray[Any], *, like: Tensor) -> Tensor:
    tensor = cast(Any, torch).from_numpy(np.ascontiguousarray(array)).to(like.device)
    return tensor.to(like.dtype) if tensor.is_floating_point() else tensor
