"""Patches of the Qwen2-VL family: grids in time, height and width.

A frame is resized so that both sides are multiples of a merged patch, and cut into patches as an image is. Where an
image repeats itself to fill a patch in time, a video has as many frames as that patch is long, the last one repeated
at the end. This is what the models' own video processors do, which need torchvision; resized frames differ from
theirs by rounding, because Pillow resizes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.types import IntArray

GRID_MODELS = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Model types whose images are grids of patches."""

VIDEO_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
"""Minimum and maximum number of pixels of a frame, if the model's files do not state them."""

_SETTINGS = (
    "do_resize",
    "size",
    "resample",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
    "patch_size",
    "temporal_patch_size",
    "merge_size",
)


class GridProcessor:
    """Processor of images that equals the family's own processor, without its part for videos."""

    image_token, video_token = "<|image_pad|>", "<|video_pad|>"

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.image_token_id = int(tokenizer.convert_tokens_to_ids(self.image_token))
        self.video_token_id = int(tokenizer.convert_tokens_to_ids(self.video_token))

    def __call__(self, *, images: Sequence[Any], **_: Any) -> dict[str, Any]:
        """Return the features of one image, and its placeholder tokens."""
        features = dict(self.image_processor(images=list(images), return_tensors="np"))
        count = num_grid_tokens(features["image_grid_thw"][0], merge_size=self.image_processor.merge_size)
        return {**features, "input_ids": np.full((1, count), self.image_token_id)}


def takes_grids(processor: Any) -> bool:
    """Return whether a processor belongs to the family."""
    names = {base.__name__ for base in type(processor).__mro__}
    return bool(names & {"Qwen2VLProcessor", "Qwen2_5_VLProcessor", GridProcessor.__name__})


def video_settings(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the video settings of a model's files, as arguments for its image processor."""
    settings = {key: written[key] for key in _SETTINGS if written.get(key) is not None}
    size = dict(settings.get("size") or VIDEO_SIZE)
    for edge, older_name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if written.get(older_name) is not None:
            size[edge] = written[older_name]
    return {**settings, "size": size}


def video_patches(
    frames: Sequence[Any], *, image_processor: Any, settings: Mapping[str, Any]
) -> dict[str, NDArray[Any]]:
    """Return the features of a video.

    Args:
        frames: RGB images, all of one size.
        image_processor: Image processor of the model.
        settings: See `video_settings`.

    Returns:
        `pixel_values_videos`, shape [time * height * width, channels * patch in time * patch * patch], and
        `video_grid_thw`, shape [1, 3].
    """
    depth = int(settings.get("temporal_patch_size", image_processor.temporal_patch_size))
    patch = int(settings.get("patch_size", image_processor.patch_size))
    padded = [*frames, *[frames[-1]] * (-len(frames) % depth)]
    cut = image_processor(images=padded, **settings, return_tensors="np")
    _, height, width = np.asarray(cut["image_grid_thw"])[0].tolist()
    time = len(padded) // depth
    # An image contains the same patch `depth` times.
    still = np.asarray(cut["pixel_values"]).reshape(time, depth, height * width, -1, depth, patch * patch)
    moving = still[:, :, :, :, 0].transpose(0, 2, 3, 1, 4)
    return {
        "pixel_values_videos": np.ascontiguousarray(moving.reshape(time * height * width, -1)),
        "video_grid_thw": np.array([[time, height, width]], np.int64),
    }


def num_grid_tokens(grid_thw: NDArray[Any], *, merge_size: int) -> int:
    """Return the number of placeholder tokens of a grid."""
    return int(np.prod(grid_thw)) // merge_size**2


def grid_positions(grid_thw: NDArray[Any], *, merge_size: int, interval: float = 1) -> IntArray:
    """Return the time, height and width of each token of a grid, for rotary embeddings in three dimensions.

    Args:
        grid_thw: Patches in each dimension.
        merge_size: Number of patches, in height and in width, that are one token.
        interval: Distance of two steps in time.

    Returns:
        Shape [3, num_tokens].
    """
    time, height, width = grid_thw.tolist()
    shape = (time, height // merge_size, width // merge_size)
    positions = np.indices(shape, dtype=np.int32).reshape(3, -1)
    positions[0] = (positions[0].astype(np.float32) * np.float32(interval)).astype(np.int32)
    return positions
