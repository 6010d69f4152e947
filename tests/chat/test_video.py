from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agent_loop.chat.grids import GridProcessor, grid_positions, video_patches, video_settings
from agent_loop.chat.multimodal import Encoded, MediaProcessor
from agent_loop.chat.sources import Medium, load_video
from agent_loop.chat.template import ChatTemplate, load_chat_template
from agent_loop.errors import ChatTemplateError, DataError
from tests.tiny_vision import (
    FRAME_SIZE,
    TOKENS_PER_SECOND,
    image_message,
    picture,
    template_of,
    video_frames,
    video_message,
    vision_model,
    vision_processor,
    vision_template,
    vision_tokenizer,
)

PAD = "<|video_pad|>"
SETTINGS = video_settings({"size": FRAME_SIZE})


@pytest.fixture
def template() -> ChatTemplate:
    return vision_template()


def patches(frames: list[Image.Image]) -> dict[str, Any]:
    processor = vision_processor().image_processor
    return video_patches(frames, image_processor=processor, settings=SETTINGS)


def reference_patches(frames: list[Image.Image]) -> np.ndarray[Any, Any]:
    """Compute the patches by the formula, pixel by pixel, for frames that need no resizing."""
    processor = vision_processor().image_processor
    depth, patch, merge = processor.temporal_patch_size, processor.patch_size, processor.merge_size
    mean, std = np.array(processor.image_mean), np.array(processor.image_std)
    frames = [*frames, *[frames[-1]] * (-len(frames) % depth)]
    pixels = (np.stack([np.asarray(frame) for frame in frames]) / 255 - mean) / std
    rows, columns = pixels.shape[1] // patch, pixels.shape[2] // patch
    found = []
    for time in range(len(frames) // depth):
        for block_row in range(rows // merge):
            for block_column in range(columns // merge):
                for row in range(block_row * merge, block_row * merge + merge):
                    for column in range(block_column * merge, block_column * merge + merge):
                        y, x = row * patch, column * patch
                        cut = pixels[time * depth : (time + 1) * depth, y : y + patch, x : x + patch]
                        found.append(cut.transpose(3, 0, 1, 2).ravel())
    return np.array(found)


@pytest.mark.parametrize(("num_frames", "width", "height"), [(4, 32, 24), (5, 16, 16), (1, 40, 32)])
def test_patches_match_the_formula(num_frames: int, width: int, height: int) -> None:
    frames = video_frames(num_frames=num_frames, width=width, height=height)
    made = patches(frames)
    assert made["video_grid_thw"].tolist() == [[-(-num_frames // 2), height // 4, width // 4]]
    assert made["pixel_values_videos"] == pytest.approx(reference_patches(frames), abs=1e-5)


def test_frames_are_resized_to_the_size_of_videos_not_of_images() -> None:
    frames = video_frames(num_frames=2, width=96, height=64)
    _, height, width = patches(frames)["video_grid_thw"][0].tolist()
    assert FRAME_SIZE["shortest_edge"] <= 16 * height * width <= FRAME_SIZE["longest_edge"]
    assert (height % 2, width % 2) == (0, 0)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ({}, {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}),
        ({"min_pixels": 3136, "max_pixels": 9999}, {"shortest_edge": 3136, "longest_edge": 9999}),
        ({"size": {"shortest_edge": 1, "longest_edge": 2}}, {"shortest_edge": 1, "longest_edge": 2}),
    ],
)
def test_the_maximum_size_of_frames_is_read_from_the_models_files(
    written: dict[str, Any], size: dict[str, int]
) -> None:
    assert video_settings(written)["size"] == size


def test_a_video_is_one_run_of_placeholders(template: ChatTemplate) -> None:
    ids, attachments = template.open_encoded(video_message("what happens?", video_frames(num_frames=5)))
    [video] = attachments
    pad_id = template.tokenizer.convert_tokens_to_ids(PAD)
    assert (video.kind, video.placeholder_id, video.num_tokens) == ("video", pad_id, 3 * 12)
    assert set(np.flatnonzero(ids == pad_id).tolist()) == set(range(video.start, video.end))
    assert "<|vision_start|><|video_pad|>" in template.decode(ids)


def test_images_and_videos_keep_their_order(template: ChatTemplate) -> None:
    messages = image_message("a", picture(0))
    messages[0]["content"] += [
        *video_message("b", video_frames())[0]["content"],
        *image_message("c", picture(1))[0]["content"],
    ]
    _, attachments = template.open_encoded(messages)
    assert [a.kind for a in attachments] == ["image", "video", "image"]
    assert [a.num_tokens for a in attachments] == [12, 36, 12]


@pytest.mark.parametrize("content", [PAD, "<|image_pad|>"])
def test_a_placeholder_in_assistant_text_stays_text(template: ChatTemplate, content: str) -> None:
    messages = [
        *image_message("a", picture()),
        {"role": "assistant", "content": content},
        *image_message("b", picture()),
    ]
    encoded = template.open_encoded(messages)
    assert [attachment.kind for attachment in encoded.attachments] == ["image", "image"]
    assert content in template.decode(encoded.token_ids)


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        (
            PAD,
            r"1 placeholders '<\|image_pad\|>' for 1 images, 1 placeholders '<\|video_pad\|>' for 0 videos",
        ),
        ("<|image_pad|>", r"2 placeholders '<\|image_pad\|>' for 1 images"),
    ],
)
def test_placeholders_without_images_or_videos_are_refused(
    template: ChatTemplate, written: str, complaint: str
) -> None:
    assert not isinstance(template.media, str)
    ids = template.encoder.encode(f"<|image_pad|>{written}")
    with pytest.raises(ChatTemplateError, match=complaint):
        template.media.encode(ids, template.media.read([Medium("image", picture())]))


def test_every_form_of_a_video_is_read_equally(tmp_path: Path) -> None:
    frames = video_frames(num_frames=2)
    paths = []
    for number, frame in enumerate(frames):
        paths.append(tmp_path / f"{number}.png")
        frame.save(paths[-1])
    array = np.stack([np.asarray(frame) for frame in frames])
    for form in (frames, tuple(frames), array, list(array), paths, {"frames": frames, "fps": 2}):
        video = load_video(form)
        assert np.array_equal(np.stack([np.asarray(frame) for frame in video.frames]), array)
        assert video.fps == 2.0


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("clip.mp4", r"the file 'clip\.mp4', and files are not decoded; decode it .* give its frames"),
        (b"...", "the file 3 bytes, and files are not decoded"),
        ([], "no frames"),
        ([picture(width=16), picture(width=8)], "frames of several sizes"),
        (picture(), r"a video is given as Image of size \(32, 24\); give its frames"),
        (np.zeros((4, 4, 3), np.uint8), r"an array of shape \[4, 4, 3\]"),
        ({"frames": video_frames(), "fps": -1}, "the fps of a video is -1"),
        ({"frames": video_frames(), "fps": "fast"}, "the fps of a video is 'fast'"),
        ({"frames": video_frames(), "fps": float("nan")}, "the fps of a video is nan"),
        ({"fps": 2}, "a video is given as NoneType"),
    ],
)
def test_a_video_that_cannot_be_read_is_an_error_that_names_it(source: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        load_video(source)


def test_positions_in_time_follow_the_seconds_of_the_video() -> None:
    """Five frames at 2 per second are three steps of one second. The model has four positions per second."""
    encoded = template_of("qwen2_5_vl").open_encoded(video_message("a", video_frames(num_frames=5), fps=2.0))
    [video] = encoded.attachments
    assert video.positions is not None
    assert sorted(set(video.positions[0].tolist())) == [0, TOKENS_PER_SECOND, 2 * TOKENS_PER_SECOND]
    assert video.features["second_per_grid_ts"].tolist() == [1.0]
    assert video.num_positions == 4


def test_time_steps_are_rounded_down_like_in_the_model() -> None:
    grid = np.array([4, 2, 2])
    assert grid_positions(grid, merge_size=2, interval=8 / 3)[0].tolist() == [0, 2, 5, 8]


def test_the_video_processor_of_a_model_is_used_if_there_is_one() -> None:
    media = MediaProcessor(_WithVideos())
    template = ChatTemplate(vision_tokenizer(), media=media)
    [video] = template.open_encoded(video_message("a", video_frames(num_frames=2))).attachments
    assert video.num_tokens == 1
    assert video.features["pixel_values_videos"].shape == (4, 6)


class _WithVideos(GridProcessor):
    def __init__(self) -> None:
        super().__init__(vision_processor().image_processor, vision_tokenizer())

    def video_processor(
        self, *, videos: list[Any], do_sample_frames: bool, return_tensors: str
    ) -> dict[str, Any]:
        assert [video.shape for video in videos] == [(2, 24, 32, 3)]
        assert not do_sample_frames
        return {
            "pixel_values_videos": np.zeros((4, 6)),
            "video_grid_thw": np.array([[1, 2, 2]]),
            "more": None,
        }


def saved_model(folder: Path, kind: str, **files: Any) -> Path:
    """Write a model's folder as it is published. Its processor needs torchvision."""
    vision_tokenizer().save_pretrained(folder)
    vision_model(kind).config.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4, size=FRAME_SIZE, **files).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_a_published_model_is_read_without_torchvision(kind: str, tmp_path: Path) -> None:
    loaded = load_chat_template(str(saved_model(tmp_path, kind)))
    assert loaded.media_kinds == {"image", "video"}
    messages = video_message("a", video_frames(), fps=1.0)
    got, expected = loaded.open_encoded(messages), template_of(kind).open_encoded(messages)
    assert_equal(got, expected)
    images = loaded.open_encoded(image_message("a", picture(), picture(1, width=16)))
    assert_equal(images, template_of(kind).open_encoded(image_message("a", picture(), picture(1, width=16))))


def assert_equal(got: Encoded, expected: Encoded) -> None:
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    assert [a.digest for a in got.attachments] == [a.digest for a in expected.attachments]
    for mine, other in zip(got.attachments, expected.attachments, strict=True):
        assert np.array_equal(mine.positions, other.positions)  # type: ignore[arg-type]
