"""Small vision-language models with random weights, their processors and chat templates, and some images."""

from __future__ import annotations

import base64
import copy
import io
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    SmolVLMConfig,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.processing_utils import ProcessorMixin

from agent_loop.chat.multimodal import MediaProcessor
from agent_loop.chat.parsers import ToolParser
from agent_loop.chat.template import ChatTemplate
from tests.helpers import small_tokenizer

VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]

FRAME_SIZE = {"shortest_edge": 4 * 64, "longest_edge": 24 * 64}
TOKENS_PER_SECOND = 4

QWEN_CONFIGS: dict[str, Any] = {"qwen2_vl": Qwen2VLConfig, "qwen2_5_vl": Qwen2_5_VLConfig}
IDEFICS_CONFIGS: dict[str, Any] = {"idefics3": Idefics3Config, "smolvlm": SmolVLMConfig}

TEXT_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

VISION_TEMPLATE = """\
{%- macro write(content) -%}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- else %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + write(message.content) }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class ImagesOnlyProcessor(Qwen2VLProcessor):
    """Processor without videos, which would need torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


@cache
def vision_tokenizer() -> Any:
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": VISION_TOKENS})
    tokenizer.chat_template = VISION_TEMPLATE
    return tokenizer


@cache
def vision_processor() -> Any:
    """Return a processor with patches of 4 by 4 pixels, merged 2 by 2.

    Each token covers 8 by 8 pixels. An image has 4 to 64 tokens.
    """
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 4 * 64, "longest_edge": 64 * 64},
    )
    return ImagesOnlyProcessor(image_processor, vision_tokenizer())


@cache
def vision_template(
    *, tool_parser: ToolParser | str = "hermes", tokens_per_second: int | None = None
) -> ChatTemplate:
    media = MediaProcessor(
        vision_processor(), videos={"size": FRAME_SIZE}, tokens_per_second=tokens_per_second
    )
    return ChatTemplate(vision_tokenizer(), tool_parser=tool_parser, media=media)


def vision_model(kind: str = "qwen2_vl", *, seed: int = 0) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = (_qwen_config if kind in QWEN_CONFIGS else _idefics_config)(kind)
    return AutoModelForImageTextToText.from_config(config).eval()


def _qwen_config(kind: str) -> Any:
    ids = vision_tokenizer().convert_tokens_to_ids
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    own: dict[str, Any] = {
        "qwen2_vl": {"embed_dim": 32, "hidden_size": 64},
        "qwen2_5_vl": {
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": TOKENS_PER_SECOND,
        },
    }
    vision = {"num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return QWEN_CONFIGS[kind](
        text_config={**TEXT_SIZES, "vocab_size": len(vision_tokenizer()), "rope_parameters": rope},
        vision_config={"depth": 2, "initializer_range": 0.3, **vision, **own[kind]},
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )


def _idefics_config(kind: str) -> Any:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokenizer = idefics_template().tokenizer
    return IDEFICS_CONFIGS[kind](
        text_config={**TEXT_SIZES, "model_type": "llama", "vocab_size": len(tokenizer)},
        vision_config={**vision, "image_size": 24, "patch_size": 6, "initializer_range": 0.3},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


@cache
def idefics_template() -> ChatTemplate:
    return ChatTemplate(idefics_processor().tokenizer, media=MediaProcessor(idefics_processor()))


@cache
def idefics_processor() -> Any:
    """Return a processor that cuts an image into tiles of 24 by 24 pixels.

    Each tile has 4 tokens. Separator tokens stand between the tiles.
    """
    tokenizer = copy.deepcopy(small_tokenizer())
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    special = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *tiles]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = VISION_TEMPLATE.replace(
        "<|vision_start|><|image_pad|><|vision_end|>", "<image>"
    )
    image_processor = Idefics3ImageProcessorPil(
        size={"longest_edge": 48}, max_image_size={"longest_edge": 24}
    )
    return Idefics3Processor(image_processor, tokenizer, image_seq_len=4)


def template_of(kind: str) -> ChatTemplate:
    if kind == "qwen2_5_vl":
        return vision_template(tokens_per_second=TOKENS_PER_SECOND)
    return vision_template() if kind in QWEN_CONFIGS else idefics_template()


def picture(seed: int = 0, *, width: int = 32, height: int = 24) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def video_frames(
    seed: int = 0, *, num_frames: int = 5, width: int = 32, height: int = 24
) -> list[Image.Image]:
    return [picture(100 * seed + i, width=width, height=height) for i in range(num_frames)]


def video_message(text: str, *videos: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return a user message with videos before its text."""
    parts = [{"type": "video", "video": video, **fields} for video in videos]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def image_message(text: str, *images: Any) -> list[dict[str, Any]]:
    """Return a user message with images before its text."""
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def tool_image_message(*images: Any, text: str = "") -> list[dict[str, Any]]:
    """Return a tool result with images."""
    return [{**image_message(text, *images)[0], "role": "tool", "name": "look"}]


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
