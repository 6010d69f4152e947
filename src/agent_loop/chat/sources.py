"""Loading of images and videos from the forms in which messages contain them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import struct
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from agent_loop.errors import ConfigError, DataError
from agent_loop.trajectory.attachments import AttachmentKind
from agent_loop.types import Message

DEFAULT_FPS = 2.0
"""Frame rate of a video that is given without a rate."""

_KINDS: Mapping[str, AttachmentKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
}
_PREVIEW = 60
_VIDEO_FORMS = (
    "give its frames, as a list of images or a uint8 array [frames, height, width, 3], "
    'or {"frames": ..., "fps": ...}'
)


class Medium(NamedTuple):
    """Image or video of a message, as the message contains it."""

    kind: AttachmentKind
    source: Any


@dataclass(frozen=True, slots=True)
class Video:
    """Sampled frames of a video."""

    frames: Sequence[Any]
    """Pillow images in RGB, all of one size."""
    fps: float
    """Frames per second, as they were sampled."""


def split_media(messages: Sequence[Message]) -> tuple[Sequence[Message], list[Medium]]:
    """Return the messages in the form of chat templates, and their images and videos in order."""
    media: list[Medium] = []
    for message in messages:
        if isinstance(message.get("content"), list):
            return [_without_media(message, media) for message in messages], media
    return messages, media


def load_image(source: Any) -> Any:
    """Return an image as a Pillow image in RGB.

    Args:
        source: A Pillow image, an array [height, width] or [height, width, channels] of uint8, a path, a data URL,
            the bytes of a file, or a mapping with `bytes` or `path`, as data sets hold them.
    """
    try:
        from PIL import Image, ImageOps  # late: text needs no Pillow
    except ImportError as error:
        raise ConfigError("agent_loop.chat.sources needs: pip install pillow") from error
    source = _unwrapped(source)
    try:
        if isinstance(source, np.ndarray):
            image = Image.fromarray(cast(NDArray[Any], source))
        elif isinstance(source, (str, Path, bytes)):
            opened = Image.open(_file_of(source))
            opened.load()
            image = ImageOps.exif_transpose(opened)
        elif isinstance(source, Image.Image):
            image = source
        else:
            raise DataError(
                f"an image is given as {type(source).__name__}; give a Pillow image, a uint8 array, a path or a "
                "data URL"
            )
        if not min(image.size):
            raise DataError(f"an image of size {image.size} has no pixels; give one that has some")
        return image.convert("RGB")
    except (
        OSError,
        TypeError,
        ValueError,
        # What Pillow's readers raise for damaged or enormous files:
        SyntaxError,
        IndexError,
        EOFError,
        struct.error,
        Image.DecompressionBombError,
    ) as error:
        raise DataError(
            f"no image can be read from {describe_source(source)}: {error}; give a Pillow image, a uint8 array "
            "[height, width, 3], a path or a data URL"
        ) from error


def load_video(source: Any) -> Video:
    """Return the frames of a video.

    Args:
        source: A list of images in any form that `load_image` reads, an array [frames, height, width, 3] of uint8, or
            a mapping with these as `frames` and their rate as `fps`. Files are not decoded.
    """
    fps = DEFAULT_FPS
    if isinstance(source, Mapping):
        held = cast(Mapping[str, Any], source)
        fps = held.get("fps") or DEFAULT_FPS
        source = next((held[key] for key in ("frames", "video", "path", "url", "bytes") if key in held), None)
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < math.inf:
        raise DataError(f"the fps of a video is {fps!r}; give the frames per second as a positive number")
    if isinstance(source, (str, Path, bytes)):
        raise DataError(
            f"a video is given as the file {describe_source(source)}, and files are not decoded; decode it with a "
            f"library of your choice and {_VIDEO_FORMS}"
        )
    is_array = isinstance(source, np.ndarray) and cast(NDArray[Any], source).ndim == 4
    if not is_array and not isinstance(source, (list, tuple)):
        raise DataError(f"a video is given as {describe_source(source)}; {_VIDEO_FORMS}")
    frames = [load_image(frame) for frame in cast(Sequence[Any], source)]
    sizes = sorted({frame.size for frame in frames})
    if len(sizes) != 1:
        got = f"frames of several sizes, {sizes[:3]}" if sizes else "no frames"
        raise DataError(f"a video has {got}; give one or more, all of one width and height")
    return Video(frames, float(fps))


def medium_key(medium: Medium) -> Hashable:
    """Return a key that is equal for equal media, without decoding files."""
    if medium.kind == "image":
        return ("image", _image_key(medium.source))
    video = load_video(medium.source)
    return ("video", video.fps, tuple(_image_key(frame) for frame in video.frames))


def describe_source(source: Any) -> str:
    """Return a short description of an image or a video, without its pixels."""
    if isinstance(source, np.ndarray):
        array = cast(NDArray[Any], source)
        return f"an array of shape {list(array.shape)} and type {array.dtype}"
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    if isinstance(source, (str, Path)):
        text = str(source)
        return repr(text if len(text) <= _PREVIEW else f"{text[:_PREVIEW]}...")
    if isinstance(source, (list, tuple)):
        frames = cast(Sequence[Any], source)
        return f"{len(frames)} frames" + (f", the first {describe_source(frames[0])}" if frames else "")
    if isinstance(source, Mapping):
        held = cast(Mapping[str, Any], source)
        rate = f" at {held['fps']} per second" if held.get("fps") else ""
        known = (
            held[key] for key in ("frames", "video", "bytes", "path", "url") if held.get(key) is not None
        )
        return f"{describe_source(next(known, None))}{rate}"
    size = getattr(source, "size", None)
    name = type(source).__name__
    return name if size is None else f"{name} of size {size}"


def without_pixels(message: Message) -> Message:
    """Return the message with descriptions in the place of its images and videos."""
    [bare], media = split_media([message])
    if not media:
        return message
    sources = iter(media)
    described = [
        {**part, part["type"]: describe_source(next(sources).source)}
        if part.get("type") in ("image", "video")
        else part
        for part in bare["content"]
    ]
    return {**message, "content": described}


def _unwrapped(source: Any) -> Any:
    if not isinstance(source, Mapping):
        return source
    held = cast(Mapping[str, Any], source)
    return held.get("bytes") or held.get("path") or held.get("url")


def _image_key(source: Any) -> Hashable:
    source = _unwrapped(source)
    if isinstance(source, bytes):
        return hashlib.sha256(source).digest()
    if isinstance(source, str) and source.startswith("data:"):
        return hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
    if isinstance(source, (str, Path)):
        file = _file_of(source)
        try:
            found = cast(Path, file).stat()
        except (OSError, ValueError):
            return ("missing", str(file))
        return (str(file), found.st_mtime_ns, found.st_size)
    image = load_image(source)
    return (image.size, hashlib.sha256(image.tobytes()).digest())


def _file_of(source: str | Path | bytes) -> Path | io.BytesIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if isinstance(source, Path):
        return source
    if source.startswith(("http://", "https://")):
        raise DataError(
            f"the image {describe_source(source)} would have to be fetched from a network; download it and give its "
            "path or a data URL"
        )
    if source.startswith("data:"):
        head, found, data = source.partition(",")
        if not found or not head.endswith(";base64"):
            raise DataError(
                f"{describe_source(source)} is not a base64 data URL; give data:image/png;base64,..."
            )
        try:
            return io.BytesIO(base64.b64decode(data, validate=True))
        except (binascii.Error, ValueError) as error:
            raise DataError(f"{describe_source(source)} holds no base64: {error}") from error
    return Path(source.removeprefix("file://"))


def _without_media(message: Message, media: list[Medium]) -> Message:
    """Return the message with bare parts in the place of its images, and append the images to `media`."""
    if not isinstance(message.get("content"), list):
        return message
    parts: list[Any] = []
    for part in cast(list[Any], message["content"]):
        kind = _KINDS.get(str(cast(dict[str, Any], part).get("type"))) if isinstance(part, dict) else None
        if kind is None:
            parts.append(part)
            continue
        media.append(Medium(kind, _source_of(cast(dict[str, Any], part), kind)))
        parts.append({"type": kind})
    return {**message, "content": parts}


def _source_of(part: Mapping[str, Any], kind: AttachmentKind) -> Any:
    for key in (kind, f"{kind}_url", "url", "path"):
        source = part.get(key)
        if source is None:
            continue
        if key.endswith("url") and isinstance(source, Mapping):
            source = cast(Mapping[str, Any], source).get("url")
        return {"frames": source, "fps": part["fps"]} if kind == "video" and "fps" in part else source
    raise DataError(f"a part of a message has type {part['type']!r} but no {kind}; give it under {kind!r}")
