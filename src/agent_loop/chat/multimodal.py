"""Processing of images and videos in messages: features, and runs of placeholder tokens.

The chat template writes one placeholder for each image. The placeholder is expanded to as many tokens as the features
need in the token ids only, so that no text can become a placeholder.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from agent_loop.chat.grids import (
    GRID_MODELS,
    GridProcessor,
    grid_positions,
    num_grid_tokens,
    takes_grids,
    video_patches,
    video_settings,
)
from agent_loop.chat.sources import Medium, describe_source, load_image, load_video, medium_key
from agent_loop.errors import ChatTemplateError, ConfigError, DataError
from agent_loop.trajectory.attachments import Attachment, AttachmentKind
from agent_loop.types import IntArray, as_token_ids

TEXT_FEATURES = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""Outputs of processors for the text; all other outputs are features of the images."""

MAX_CACHED_BYTES = 256 * 2**20
"""Maximum size of the cache of features. The members of a group share the same images."""

NO_SETTINGS: Mapping[str, Any] = {}


class Encoded(NamedTuple):
    """Tokens with their attachments."""

    token_ids: IntArray
    """Shape [num_tokens]."""
    attachments: tuple[Attachment, ...] = ()
    """Attachments; their positions count from the first token."""

    def first(self, num_tokens: int) -> Encoded:
        """Return at most `num_tokens` tokens of the beginning. An image is kept whole or dropped."""
        cut = next((a.start for a in self.attachments if a.start < num_tokens < a.end), num_tokens)
        return Encoded(self.token_ids[:cut], tuple(a for a in self.attachments if a.end <= cut))

    def last(self, num_tokens: int) -> Encoded:
        """Return at most `num_tokens` tokens of the end. An image is kept whole or dropped."""
        start = max(len(self.token_ids) - num_tokens, 0)
        cut = next((a.end for a in self.attachments if a.start < start < a.end), start)
        return Encoded(self.token_ids[cut:], tuple(a.moved(-cut) for a in self.attachments if a.start >= cut))


class ReadMedium(NamedTuple):
    """Image or video that was read: its placeholder tokens and its attachment."""

    token_ids: IntArray
    attachment: Attachment

    @property
    def num_bytes(self) -> int:
        return self.token_ids.nbytes + sum(array.nbytes for array in self.attachment.features.values())


class MediaProcessor:
    """A model's processor, with a cache of the features of recent images and videos.

    Args:
        processor: A `transformers` processor with an image processor.
        videos: Video settings of the model's files, for processors without a video processor.
        tokens_per_second: Positions in time per second of a video; None if the model counts grids.
    """

    def __init__(
        self,
        processor: Any,
        *,
        videos: Mapping[str, Any] = NO_SETTINGS,
        tokens_per_second: float | None = None,
    ) -> None:
        token = getattr(processor, "image_token", None)
        if not isinstance(token, str) or getattr(processor, "image_processor", None) is None:
            raise ConfigError(
                f"{type(processor).__name__} reads no images: it has no image_token or no image_processor; "
                "give the processor of a vision-language model"
            )
        self.kinds: frozenset[AttachmentKind] = frozenset({"image"})
        """Kinds of media that can be attached. Videos need a processor of the Qwen2-VL family."""
        self.processor = processor
        self._token = token
        written_id = int(processor.tokenizer.convert_tokens_to_ids(token))
        placeholder_id = getattr(processor, "image_token_id", None)
        self._image_id = written_id if placeholder_id is None else int(placeholder_id)
        self._kind_of: dict[int, AttachmentKind] = {written_id: "image"}
        if takes_grids(processor):
            self.kinds = frozenset({"image", "video"})
            self._video_id = int(processor.video_token_id)
            self._kind_of[self._video_id] = "video"
        self._video_settings = video_settings(videos)
        self._tokens_per_second = tokens_per_second
        self._cache: OrderedDict[Hashable, ReadMedium] = OrderedDict()
        self._num_cached_bytes = 0
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="media")

    async def read_in_thread(self, media: Sequence[Medium]) -> list[ReadMedium]:
        """Return the result of `read`, which runs in a thread. All media are read in the same thread, one by one."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.read, media)

    def read(self, media: Sequence[Medium]) -> list[ReadMedium]:
        """Return the features of images and videos, from the cache or from the processor."""
        return [self._read(medium) for medium in media]

    def encode(self, token_ids: Sequence[int], media: Sequence[ReadMedium]) -> Encoded:
        """Replace the placeholder of each image by the image's run of tokens."""
        ids = as_token_ids(token_ids)
        places = self._places(ids, media)
        if not places:
            return Encoded(ids)
        parts: list[IntArray] = []
        attachments: list[Attachment] = []
        done = num_tokens = 0
        for place, (run, attachment) in zip(places, media, strict=True):
            num_tokens += place - done
            attachments.append(attachment.moved(num_tokens))
            parts += (ids[done:place], run)
            num_tokens += len(run)
            done = place + 1
        return Encoded(np.concatenate([*parts, ids[done:]]), tuple(attachments))

    def _places(self, ids: IntArray, media: Sequence[ReadMedium]) -> list[int]:
        """Return the positions of the placeholders, one for each medium, in order."""
        places: list[int] = np.flatnonzero(np.isin(ids, list(self._kind_of))).tolist()
        written = [self._kind_of[int(ids[place])] for place in places]
        given = [medium.attachment.kind for medium in media]
        if written != given:
            tokens = {"image": self._token, "video": getattr(self.processor, "video_token", "")}
            counts = ", ".join(
                f"{written.count(kind)} placeholders {tokens[kind]!r} for {given.count(kind)} {kind}s"
                for kind in ("image", "video")
                if kind in written or kind in given
            )
            raise ChatTemplateError(
                f"the chat template wrote {counts}; send images and videos in messages whose role the template "
                "writes them for, in the order in which it writes them"
            )
        return places

    def _read(self, medium: Medium) -> ReadMedium:
        if medium.kind not in self.kinds:
            raise ChatTemplateError(
                f"a message holds a {medium.kind}, which {type(self.processor).__name__} is not asked to read; "
                "give its frames as images"
            )
        key = medium_key(medium)
        with self._lock:
            if (found := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return found
        read = self._read_video(medium.source) if medium.kind == "video" else self._read_image(medium.source)
        with self._lock:
            if key not in self._cache and read.num_bytes <= MAX_CACHED_BYTES:
                self._cache[key] = read
                self._num_cached_bytes += read.num_bytes
                while self._num_cached_bytes > MAX_CACHED_BYTES:
                    _, oldest = self._cache.popitem(last=False)
                    self._num_cached_bytes -= oldest.num_bytes
        return read

    def _read_image(self, source: Any) -> ReadMedium:
        image = load_image(source)
        try:
            made: Mapping[str, Any] = self.processor(
                images=[image], text=[self._token], add_special_tokens=False, return_tensors="pt"
            )
        except (ArithmeticError, TypeError, ValueError) as error:
            raise DataError(
                f"{type(self.processor).__name__} cannot read {describe_source(source)}: {error}"
            ) from error
        run = as_token_ids(np.asarray(made["input_ids"])[0])
        features = {name: np.asarray(value) for name, value in made.items() if name not in TEXT_FEATURES}
        grid_thw = features.get("image_grid_thw")
        positions = None if grid_thw is None else grid_positions(grid_thw[0], merge_size=self._merge_size)
        return self._attached("image", run, features, positions)

    def _read_video(self, source: Any) -> ReadMedium:
        video = load_video(source)
        own_part = getattr(self.processor, "video_processor", None)
        try:
            if own_part is None:
                features = video_patches(
                    video.frames,
                    image_processor=self.processor.image_processor,
                    settings=self._video_settings,
                )
            else:
                frames = np.stack([np.asarray(frame) for frame in video.frames])
                made = own_part(videos=[frames], do_sample_frames=False, return_tensors="pt")
                names = ("pixel_values_videos", "video_grid_thw")
                features = {name: np.asarray(made[name]) for name in names}
        except (ArithmeticError, TypeError, ValueError) as error:
            raise DataError(
                f"{type(self.processor).__name__} cannot read a video of {describe_source(source)}: {error}"
            ) from error
        interval = 1.0
        if self._tokens_per_second is not None:
            seconds = np.float32(self.processor.image_processor.temporal_patch_size / video.fps)
            features["second_per_grid_ts"] = np.array([seconds], np.float32)
            interval = float(np.float32(self._tokens_per_second) * seconds)
        grid_thw = features["video_grid_thw"][0]
        positions = grid_positions(grid_thw, merge_size=self._merge_size, interval=interval)
        run = as_token_ids([self._video_id] * num_grid_tokens(grid_thw, merge_size=self._merge_size))
        return self._attached("video", run, features, positions)

    def _attached(
        self,
        kind: AttachmentKind,
        run: IntArray,
        features: Mapping[str, NDArray[Any]],
        positions: IntArray | None,
    ) -> ReadMedium:
        attachment = Attachment(
            kind=kind,
            start=0,
            num_tokens=len(run),
            placeholder_id=self._video_id if kind == "video" else self._image_id,
            features=features,
            digest=_digest(features),
            positions=positions,
            # The positions of text after a video continue from its height and width, without its time.
            num_positions=0 if positions is None else int(positions[1:].max()) + 1,
        )
        return ReadMedium(run, attachment)

    @property
    def _merge_size(self) -> int:
        return int(self.processor.image_processor.merge_size)


def _digest(features: Mapping[str, NDArray[Any]]) -> bytes:
    digest = hashlib.sha256()
    for name, array in sorted(features.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def load_media_processor(
    path: str, *, tokenizer: Any, trust_remote_code: bool = False
) -> MediaProcessor | str:
    """Load the processor of a model with a vision tower, from a folder or the hub.

    If only the processor has a chat template, the tokenizer gets the template. If torchvision is not installed, a model
    of the Qwen2-VL family gets a `GridProcessor`.

    Returns:
        The processor, or the reason why there is none, in words that fit after `the model cannot read them: `.
    """
    from transformers import AutoConfig  # late: importing transformers takes seconds

    try:
        config = cast(Any, AutoConfig).from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return f"{path!r} has no model config"
    vision_config = getattr(config, "vision_config", None)
    if vision_config is None:
        return f"the model {path!r} has no vision tower"
    from transformers import AutoProcessor

    tokens_per_second = getattr(vision_config, "tokens_per_second", None)
    try:
        try:
            processor = cast(Any, AutoProcessor).from_pretrained(path, trust_remote_code=trust_remote_code)
            media = MediaProcessor(processor, tokens_per_second=tokens_per_second)
            own_template = processor.chat_template
        except ImportError:
            if config.model_type not in GRID_MODELS:
                raise
            media, own_template = _load_grid_processor(
                path, tokenizer=tokenizer, tokens_per_second=tokens_per_second
            )
    except (ImportError, OSError, ValueError, ConfigError) as error:
        return f"the processor of {path!r} cannot be loaded: {' '.join(str(error).split())}"
    if not tokenizer.chat_template:
        tokenizer.chat_template = own_template
    return media


def _load_grid_processor(
    path: str, *, tokenizer: Any, tokens_per_second: float | None
) -> tuple[MediaProcessor, str | None]:
    """Return the processor, and the chat template of the model's own processor."""
    from transformers import AutoImageProcessor
    from transformers.processing_utils import ProcessorMixin
    from transformers.video_processing_utils import BaseVideoProcessor

    image_processor = cast(Any, AutoImageProcessor).from_pretrained(path)
    videos, _ = cast(Any, BaseVideoProcessor).get_video_processor_dict(path)
    written, _ = cast(Any, ProcessorMixin).get_processor_dict(path)
    media = MediaProcessor(
        GridProcessor(image_processor, tokenizer), videos=videos, tokens_per_second=tokens_per_second
    )
    return media, written.get("chat_template")
