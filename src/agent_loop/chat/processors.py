"""Loading of a model's processor of images and videos."""

from __future__ import annotations

from typing import Any, cast

from agent_loop.chat.grids import GRID_MODELS, GridProcessor
from agent_loop.chat.multimodal import MediaProcessor
from agent_loop.errors import ConfigError


def load_media_processor(
    path: str, *, tokenizer: Any, trust_remote_code: bool = False
) -> MediaProcessor | str:
    """Load the processor of a model with a vision tower, from a folder or the hub.

    If only the processor has a chat template, the tokenizer gets the template. If torchvision is not installed, a model
    of the Qwen2-VL family gets a `GridProcessor`.

    Returns:
        The processor, or the reason why there is none, in words that fit after `the model cannot read them: `.
    """
    from transformers import AutoConfig, AutoProcessor  # late: importing transformers takes seconds

    try:
        config = cast(Any, AutoConfig).from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return f"{path!r} has no model config"
    vision_config = getattr(config, "vision_config", None)
    if vision_config is None:
        return f"the model {path!r} has no vision tower"
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
