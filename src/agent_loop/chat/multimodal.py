"""Images in messages: to what a model's processor makes of them, and to runs of placeholder tokens.

The chat template writes one placeholder for each image. Only in the token ids is it replaced by as many as the
features need, so that no text, whatever it holds, becomes a placeholder.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from agent_loop.attachments import Attachment, AttachmentKind
from agent_loop.errors import ChatTemplateError, ConfigError, DataError
from agent_loop.types import IntArray, Message, as_token_ids

TEXT_FEATURES = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""What processors return for the text; the rest is for the images."""

_KINDS: Mapping[str, AttachmentKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
}
_PREVIEW = 60


class Encoded(NamedTuple):
    """Tokens and what is attached to them."""

    token_ids: IntArray
    """Shape [num_tokens]."""
    attachments: tuple[Attachment, ...] = ()
    """Counted from the first of the tokens."""

    def first(self, num_tokens: int) -> Encoded:
        """At most so many tokens of the beginning; an image is kept whole or not at all."""
        cut = next((a.start for a in self.attachments if a.start < num_tokens < a.end), num_tokens)
        return Encoded(self.token_ids[:cut], tuple(a for a in self.attachments if a.end <= cut))

    def last(self, num_tokens: int) -> Encoded:
        """At most so many tokens of the end; an image is kept whole or not at all."""
        start = max(len(self.token_ids) - num_tokens, 0)
        cut = next((a.end for a in self.attachments if a.start < start < a.end), start)
        return Encoded(self.token_ids[cut:], tuple(a.moved(-cut) for a in self.attachments if a.start >= cut))


class Medium(NamedTuple):
    """An image or a video of a message, as it was given."""

    kind: AttachmentKind
    source: Any


def split_media(messages: Sequence[Message]) -> tuple[Sequence[Message], list[Medium]]:
    """The messages as a chat template takes them, and the images and videos in them, in order.

    Raises:
        DataError: A part of a message names no image.
    """
    if not any(isinstance(message.get("content"), list) for message in messages):
        return messages, []
    media: list[Medium] = []
    return [_without_media(message, media) for message in messages], media


class MediaProcessor:
    """A model's processor, asked for one image at a time.

    Args:
        processor: A `transformers` processor with an image processor.

    Raises:
        ConfigError: It reads no images.
    """

    kinds: frozenset[AttachmentKind] = frozenset({"image"})
    """What can be attached. Videos cannot: their processors need more than one run of tokens each."""

    def __init__(self, processor: Any) -> None:
        token = getattr(processor, "image_token", None)
        if not isinstance(token, str) or getattr(processor, "image_processor", None) is None:
            raise ConfigError(
                f"{type(processor).__name__} reads no images: it has no image_token or no image_processor; "
                "give the processor of a vision-language model"
            )
        self._processor = processor
        self._token = token
        self._written_id = int(processor.tokenizer.convert_tokens_to_ids(token))
        placeholder_id = getattr(processor, "image_token_id", None)
        self._placeholder_id = self._written_id if placeholder_id is None else int(placeholder_id)

    def encode(self, token_ids: Sequence[int], media: Sequence[Medium]) -> Encoded:
        """Puts the run of each image in the place of its placeholder.

        Raises:
            ChatTemplateError: There are not as many placeholders as images.
            DataError: An image cannot be read.
        """
        for medium in media:
            if medium.kind not in self.kinds:
                raise ChatTemplateError(
                    f"a message holds a {medium.kind}, which {type(self._processor).__name__} is not asked to read; "
                    "give its frames as images"
                )
        ids = as_token_ids(token_ids)
        places = np.flatnonzero(ids == self._written_id).tolist()
        if len(places) != len(media):
            raise ChatTemplateError(
                f"the chat template wrote {len(places)} placeholders {self._token!r} for {len(media)} images; "
                "send images in messages whose role the template writes them for, and no placeholders in the text "
                "of assistant messages"
            )
        parts: list[IntArray] = []
        attachments: list[Attachment] = []
        done = num_tokens = 0
        for place, medium in zip(places, media, strict=True):
            run, attachment = self._read(medium.source)
            num_tokens += place - done
            attachments.append(attachment.moved(num_tokens))
            parts += (ids[done:place], run)
            num_tokens += len(run)
            done = place + 1
        return Encoded(np.concatenate([*parts, ids[done:]]), tuple(attachments))

    def _read(self, source: Any) -> tuple[IntArray, Attachment]:
        """The tokens of one image, and the image attached to them."""
        image = load_image(source)
        try:
            made: Mapping[str, Any] = self._processor(
                images=[image], text=[self._token], add_special_tokens=False, return_tensors="pt"
            )
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{type(self._processor).__name__} cannot read {describe_source(source)}: {error}"
            ) from error
        run = as_token_ids(np.asarray(made["input_ids"])[0])
        features = {name: np.asarray(value) for name, value in made.items() if name not in TEXT_FEATURES}
        grid_thw = features.get("image_grid_thw")
        positions = None if grid_thw is None else self._grid_positions(grid_thw[0])
        if positions is not None and positions.shape[1] != len(run):
            raise ChatTemplateError(
                f"the features of {describe_source(source)} need {positions.shape[1]} tokens (image_grid_thw "
                f"{grid_thw}), but {type(self._processor).__name__} wrote {len(run)}; the processor and its image "
                "processor must have the same merge_size"
            )
        attachment = Attachment(
            kind="image",
            start=0,
            num_tokens=len(run),
            placeholder_id=self._placeholder_id,
            features=features,
            digest=_digest(features),
            positions=positions,
            num_positions=0 if positions is None else int(positions.max()) + 1,
        )
        return run, attachment

    def _grid_positions(self, grid_thw: NDArray[Any]) -> IntArray:
        """Time, height and width of each token of the grid, as rotary embeddings in three dimensions count them."""
        merge_size = int(self._processor.image_processor.merge_size)
        time, height, width = grid_thw.tolist()
        shape = (time, height // merge_size, width // merge_size)
        return np.indices(shape, dtype=np.int32).reshape(3, -1)


def load_media_processor(
    path: str, *, tokenizer: Any, trust_remote_code: bool = False
) -> MediaProcessor | str:
    """Loads the processor of a model with a vision tower, from a folder or the hub.

    A chat template that only the processor has becomes the tokenizer's.

    Returns:
        The processor; or why there is none, in words that fit behind `nothing reads images: `.
    """
    from transformers import AutoConfig, AutoProcessor  # late: importing transformers takes seconds

    try:
        config = cast(Any, AutoConfig).from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return f"{path!r} has no model config that would tell"
    if getattr(config, "vision_config", None) is None:
        return f"the model {path!r} has no vision tower"
    try:
        processor = cast(Any, AutoProcessor).from_pretrained(path, trust_remote_code=trust_remote_code)
        media = MediaProcessor(processor)
    except (ImportError, OSError, ValueError, ConfigError) as error:
        return f"the processor of {path!r} cannot be loaded: {' '.join(str(error).split())}"
    if not tokenizer.chat_template:
        tokenizer.chat_template = processor.chat_template
    return media


def load_image(source: Any) -> Any:
    """An RGB image of Pillow's.

    Args:
        source: A Pillow image, an array [height, width] or [height, width, channels] of uint8, a path, a data URL,
            the bytes of a file, or a mapping with `bytes` or `path`, as data sets hold them.

    Raises:
        DataError: There is no image at that place, or it would have to be fetched from a network.
    """
    try:
        from PIL import Image, ImageOps  # late: text needs no Pillow
    except ImportError as error:
        raise ConfigError("agent_loop.chat.multimodal needs: pip install pillow") from error
    if isinstance(source, Mapping):
        held = cast(Mapping[str, Any], source)
        source = held.get("bytes") or held.get("path") or held.get("url")
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
    except (OSError, TypeError, ValueError) as error:
        raise DataError(
            f"no image can be read from {describe_source(source)}: {error}; give a Pillow image, a uint8 array "
            "[height, width, 3], a path or a data URL"
        ) from error
    return image.convert("RGB")


def describe_source(source: Any) -> str:
    """An image in a few words, without its pixels."""
    if isinstance(source, np.ndarray):
        array = cast(NDArray[Any], source)
        return f"an array of shape {list(array.shape)} and type {array.dtype}"
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    if isinstance(source, (str, Path)):
        text = str(source)
        return repr(text if len(text) <= _PREVIEW else f"{text[:_PREVIEW]}...")
    size = getattr(source, "size", None)
    name = type(source).__name__
    return name if size is None else f"{name} of size {size}"


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
                f"{describe_source(source)} is no data URL in base64; give data:image/png;base64,..."
            )
        try:
            return io.BytesIO(base64.b64decode(data, validate=True))
        except binascii.Error as error:
            raise DataError(f"{describe_source(source)} holds no base64: {error}") from error
    return Path(source.removeprefix("file://"))


def _without_media(message: Message, media: list[Medium]) -> Message:
    """The message with bare parts in the places of its images, which are added to `media`."""
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
        if source is not None:
            return _url_of(source) if key.endswith("url") else source
    raise DataError(f"a part of a message has type {part['type']!r} but no {kind}; give it under {kind!r}")


def _url_of(url: Any) -> Any:
    return cast(Mapping[str, Any], url).get("url") if isinstance(url, Mapping) else url


def _digest(features: Mapping[str, NDArray[Any]]) -> bytes:
    digest = hashlib.sha256()
    for name, array in sorted(features.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()
