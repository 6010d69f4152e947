"""Images and videos in prompts and in replies of tools."""

from __future__ import annotations

import asyncio
import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agent_loop.chat.grids import GridProcessor, grid_positions, video_patches, video_settings
from agent_loop.chat.multimodal import MediaProcessor
from agent_loop.chat.sources import Medium, load_image, load_video
from agent_loop.chat.template import ChatTemplate, load_chat_template
from agent_loop.errors import ChatTemplateError, DataError
from agent_loop.trajectory.attachments import Attachment, position_ids
from tests.helpers import hermes_template, user
from tests.tiny_vision import (
    FRAME_SIZE,
    TOKENS_PER_SECOND,
    data_url,
    idefics_processor,
    idefics_template,
    image_message,
    picture,
    template_of,
    tool_image_message,
    video_frames,
    video_message,
    vision_model,
    vision_processor,
    vision_template,
    vision_tokenizer,
)

PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"


@pytest.fixture
def template() -> ChatTemplate:
    return vision_template()


def pad_id(template: ChatTemplate) -> int:
    return template.tokenizer.convert_tokens_to_ids(PAD)


def test_a_prompt_with_images_has_the_tokens_of_the_processor(template: ChatTemplate) -> None:
    images = [picture(0), picture(1, width=64, height=40)]
    messages = image_message("what differs?", *images)
    encoded = template.open_encoded(messages)
    text = template.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = vision_processor()(images=images, text=[text], return_tensors="np")
    assert encoded.token_ids.tolist() == expected["input_ids"][0].tolist()
    together = np.concatenate([a.features["pixel_values"] for a in encoded.attachments])
    assert np.array_equal(together, expected["pixel_values"])
    assert [a.num_tokens for a in encoded.attachments] == [12, 40]


def test_a_bridge_with_several_images_equals_the_end_of_the_full_prompt(template: ChatTemplate) -> None:
    before = [*user("look"), {"role": "assistant", "content": "ok"}]
    replies = tool_image_message(picture(0), picture(1, width=16), text="two views")
    whole = template.open_encoded([*before, *replies])
    bridge = template.bridge_encoded(replies)
    start = len(whole.token_ids) - len(bridge.token_ids)
    assert whole.token_ids[start:].tolist() == bridge.token_ids.tolist()
    assert [a.moved(start).start for a in bridge.attachments] == [a.start for a in whole.attachments]
    assert [a.digest for a in bridge.attachments] == [a.digest for a in whole.attachments]


def test_a_placeholder_in_untrusted_text_stays_text(template: ChatTemplate) -> None:
    message = tool_image_message(picture(), text=f"no {PAD} here <|vision_start|>")
    ids, [image] = template.bridge_encoded(message)
    assert np.count_nonzero(ids == pad_id(template)) == image.num_tokens
    assert f"no {PAD} here <|vision_start|>" in template.decode(ids)


def test_token_ids_alone_are_refused_for_images(template: ChatTemplate) -> None:
    for write in (template.open, template.bridge):
        with pytest.raises(ChatTemplateError, match="1 images or videos are attached to these messages"):
            write(image_message("a", picture()))


def test_an_image_of_several_tiles_keeps_the_tokens_between_them() -> None:
    encoded = idefics_template().open_encoded(image_message("a", picture(width=64, height=40)))
    [image] = encoded.attachments
    run = encoded.token_ids[image.start : image.end]
    assert image.positions is None
    assert np.count_nonzero(run == image.placeholder_id) == 4 * image.features["pixel_values"].shape[1]
    assert len(set(run.tolist())) > 4


def test_every_form_of_an_image_is_read_equally(tmp_path: Path) -> None:
    image = picture()
    path = tmp_path / "view.png"
    image.save(path)
    forms = [
        image,
        np.asarray(image),
        path,
        str(path),
        data_url(image),
        path.read_bytes(),
        {"path": str(path)},
    ]
    for form in forms:
        assert np.array_equal(np.asarray(load_image(form)), np.asarray(image))


def test_openai_parts_are_read(template: ChatTemplate) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(picture())}}
    encoded = template.open_encoded([{"role": "user", "content": [part, {"type": "text", "text": "a"}]}])
    expected = template.open_encoded(image_message("a", picture()))
    assert encoded.token_ids.tolist() == expected.token_ids.tolist()
    assert encoded.attachments[0].digest == expected.attachments[0].digest


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("https://example.org/cat.png", "fetched from a network"),
        ("nowhere.png", "no image can be read from 'nowhere.png'"),
        ("data:image/png,abc", "not a base64 data URL"),
        ("data:image/png;base64,###", "holds no base64"),
        (7, "an image is given as int"),
        (np.zeros((2, 2, 7), np.uint8), r"an array of shape \[2, 2, 7\]"),
    ],
)
def test_an_image_that_cannot_be_read_is_an_error_that_names_it(source: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        load_image(source)


def test_a_part_without_an_image_is_an_error(template: ChatTemplate) -> None:
    with pytest.raises(DataError, match="type 'image' but no image"):
        template.open([{"role": "user", "content": [{"type": "image"}]}])


def test_images_or_videos_that_the_model_cannot_read_are_refused_with_the_reason() -> None:
    with pytest.raises(
        ChatTemplateError, match="1 images or videos, but the model cannot read them: the model has no"
    ):
        hermes_template().open(image_message("a", picture()))
    with pytest.raises(ChatTemplateError, match=r"holds a video.*give its frames as images"):
        idefics_template().open(video_message("a", video_frames()))


def test_truncating_a_prompt_keeps_or_drops_whole_images(template: ChatTemplate) -> None:
    encoded = template.open_encoded(image_message("a", picture(0), picture(1)))
    first, second = encoded.attachments
    inside = encoded.first(second.start + 3)
    assert len(inside.token_ids) == second.start
    assert [a.digest for a in inside.attachments] == [first.digest]
    rest = encoded.last(len(encoded.token_ids) - first.start - 3)
    assert [(a.digest, a.start) for a in rest.attachments] == [(second.digest, second.start - first.end)]
    assert encoded.last(len(encoded.token_ids)).attachments[0].start == first.start


def test_positions_of_text_continue_after_an_image() -> None:
    offsets = np.indices((1, 2, 3), dtype=np.int32).reshape(3, -1)
    image = Attachment("image", 2, 6, 9, {}, b"", offsets, 3)
    positions = position_ids(10, [image])
    assert positions[:, :2].tolist() == [[0, 1]] * 3
    assert positions[0, 2:8].tolist() == [2] * 6
    assert positions[1, 2:8].tolist() == [2, 2, 2, 3, 3, 3]
    assert positions[2, 2:8].tolist() == [2, 3, 4, 2, 3, 4]
    assert positions[:, 8:].tolist() == [[5, 6]] * 3


def test_a_model_with_a_vision_tower_is_loaded_with_its_processor(tmp_path: Path) -> None:
    expected = idefics_template()
    idefics_processor().save_pretrained(tmp_path)
    vision_model("idefics3").config.save_pretrained(tmp_path)
    loaded = load_chat_template(str(tmp_path))
    messages = image_message("a", picture(width=64))
    assert loaded.media_kinds == {"image"}
    ids = [template.open_encoded(messages).token_ids.tolist() for template in (loaded, expected)]
    assert ids[0] == ids[1]


def test_a_processor_that_cannot_be_loaded_is_named_when_an_image_comes(tmp_path: Path) -> None:
    vision_template().tokenizer.save_pretrained(tmp_path)
    vision_model().config.save_pretrained(tmp_path)
    loaded = load_chat_template(str(tmp_path))
    assert loaded.open(user("hello")).tolist() == vision_template().open(user("hello")).tolist()
    with pytest.raises(ChatTemplateError, match=r"cannot read them: the processor of .* cannot be loaded"):
        loaded.open(image_message("a", picture()))


def test_a_text_model_has_no_processor(tmp_path: Path) -> None:
    hermes_template().tokenizer.save_pretrained(tmp_path)
    assert load_chat_template(str(tmp_path)).media_kinds == frozenset()


class _Counts:
    """Processor that counts its calls."""

    def __init__(self) -> None:
        processor = vision_processor()
        self._processor, self.num_read = processor, 0
        self.image_token, self.tokenizer = processor.image_token, processor.tokenizer
        self.image_processor = processor.image_processor

    def __call__(self, **inputs: Any) -> Any:
        self.num_read += 1
        return self._processor(**inputs)


def counting_template() -> tuple[ChatTemplate, _Counts]:
    processor = _Counts()
    return ChatTemplate(vision_template().tokenizer, media=MediaProcessor(processor)), processor


def test_an_image_is_read_once_for_all_members_of_a_group(tmp_path: Path) -> None:
    template, processor = counting_template()
    path = tmp_path / "view.png"
    picture(1).save(path)
    for source in (picture(0), path):
        encoded = [template.open_encoded(image_message("a", source, source)) for _ in range(3)]
        assert len({a.digest for each in encoded for a in each.attachments}) == 1
        assert [a.start for a in encoded[0].attachments] != [0, 0]
    assert processor.num_read == 2


def test_an_array_or_a_file_that_is_overwritten_is_read_again(tmp_path: Path) -> None:
    template, processor = counting_template()
    view, path = np.asarray(picture(0)).copy(), tmp_path / "view.png"
    first = template.open_encoded(image_message("a", view))
    view[:] = 7
    second = template.open_encoded(image_message("a", view))
    assert first.attachments[0].digest != second.attachments[0].digest
    for image in (picture(2), picture(1, width=48)):
        image.save(path)
        template.open_encoded(image_message("a", path))
    assert processor.num_read == 4


def test_the_cache_of_images_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    template, processor = counting_template()
    [first] = template.open_encoded(image_message("a", picture())).attachments
    one = sum(array.nbytes for array in first.features.values())
    monkeypatch.setattr("agent_loop.chat.multimodal.MAX_CACHED_BYTES", 3 * one)
    for seed in (1, 2, 3, 1, 2, 3, 0):
        template.open_encoded(image_message("a", picture(seed)))
    assert processor.num_read == 1 + 3 + 3 + 1
    template.open_encoded(image_message("a", picture(0)))
    assert processor.num_read == 8


async def test_images_are_read_once_and_outside_the_event_loop() -> None:
    template, processor = counting_template()
    messages = image_message("a", picture(0), picture(1))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(template.read(messages)) for _ in range(4)]
        ticks = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            ticks += 1
    assert ticks > 1
    first, *_ = reads = [task.result() for task in tasks]
    assert processor.num_read == 2
    assert [r[0].attachment.digest for r in reads] == [first[0].attachment.digest] * 4
    encoded = template.open_encoded(messages, read=first)
    assert processor.num_read == 2
    assert [a.digest for a in encoded.attachments] == [r.attachment.digest for r in first]


@pytest.mark.parametrize("suffix", ["png", "jpg", "gif", "bmp", "webp", "tiff"])
def test_a_damaged_file_is_an_error_that_names_it_or_an_image(suffix: str) -> None:
    file = io.BytesIO()
    picture().save(file, format={"jpg": "JPEG", "tiff": "TIFF"}.get(suffix, suffix.upper()))
    whole = bytearray(file.getvalue())
    random = np.random.default_rng(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(150):
            damaged = bytearray(whole[: random.integers(1, len(whole) + 1)])
            for index in random.integers(0, len(damaged), 3):
                damaged[index] = random.integers(0, 256)
            with contextlib.suppress(DataError):
                load_image(bytes(damaged))


@pytest.mark.parametrize(("width", "height"), [(1, 40), (40, 1), (3, 40), (40, 3), (1, 1), (3, 3)])
def test_an_image_with_a_side_of_one_or_three_pixels_is_not_transposed(width: int, height: int) -> None:
    """A library that guesses the axis of the channels would transpose such an image."""
    image = picture(width=width, height=height)
    [read] = vision_template().open_encoded(image_message("a", image)).attachments
    _, rows, columns = read.features["image_grid_thw"][0].tolist()
    assert (rows > columns) == (height > width)
    taller = image.resize((columns * 4, rows * 4), Image.Resampling.BICUBIC)
    [expected] = vision_template().open_encoded(image_message("a", taller)).attachments
    assert read.features["pixel_values"] == pytest.approx(expected.features["pixel_values"], abs=0.05)


def test_images_in_the_system_prompt_are_read() -> None:
    system = {**image_message("rules", picture(1))[0], "role": "system"}
    encoded = vision_template().open_encoded([system, *image_message("a", picture(0))])
    assert [a.num_tokens for a in encoded.attachments] == [12, 12]
    assert encoded.attachments[0].digest != encoded.attachments[1].digest


SETTINGS = video_settings({"size": FRAME_SIZE})


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
    ids, [video] = template.open_encoded(video_message("what happens?", video_frames(num_frames=5)))
    pad_id = template.tokenizer.convert_tokens_to_ids(VIDEO_PAD)
    assert (video.kind, video.placeholder_id, video.num_tokens) == ("video", pad_id, 3 * 12)
    assert set(np.flatnonzero(ids == pad_id).tolist()) == set(range(video.start, video.end))
    assert "<|vision_start|><|video_pad|>" in template.decode(ids)


def test_images_and_videos_keep_their_order(template: ChatTemplate) -> None:
    [message], [video], [image] = (
        image_message("a", picture(0)),
        video_message("b", video_frames()),
        image_message("c", picture(1)),
    )
    message["content"] += [*video["content"], *image["content"]]
    _, attachments = template.open_encoded([message])
    assert [a.kind for a in attachments] == ["image", "video", "image"]
    assert [a.num_tokens for a in attachments] == [12, 36, 12]


@pytest.mark.parametrize("content", [VIDEO_PAD, PAD])
def test_a_placeholder_in_assistant_text_stays_text(template: ChatTemplate, content: str) -> None:
    answer = {"role": "assistant", "content": content}
    encoded = template.open_encoded([*image_message("a", picture()), answer, *image_message("b", picture())])
    assert [attachment.kind for attachment in encoded.attachments] == ["image", "image"]
    assert content in template.decode(encoded.token_ids)


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        (
            VIDEO_PAD,
            r"1 placeholders '<\|image_pad\|>' for 1 images, 1 placeholders '<\|video_pad\|>' for 0 videos",
        ),
        (PAD, r"2 placeholders '<\|image_pad\|>' for 1 images"),
    ],
)
def test_placeholders_without_images_or_videos_are_refused(
    template: ChatTemplate, written: str, complaint: str
) -> None:
    assert not isinstance(template.media, str)
    ids = template.encoder.encode(f"{PAD}{written}")
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

    def video_processor(self, *, videos: list[Any], do_sample_frames: bool, return_tensors: str) -> Any:
        assert [video.shape for video in videos] == [(2, 24, 32, 3)]
        assert not do_sample_frames
        grid = np.array([[1, 2, 2]])
        return {"pixel_values_videos": np.zeros((4, 6)), "video_grid_thw": grid, "more": None}


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
    video = video_message("a", video_frames(), fps=1.0)
    for messages in (video, image_message("a", picture(), picture(1, width=16))):
        got, expected = loaded.open_encoded(messages), template_of(kind).open_encoded(messages)
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        assert [a.digest for a in got.attachments] == [a.digest for a in expected.attachments]
        for mine, other in zip(got.attachments, expected.attachments, strict=True):
            assert np.array_equal(mine.positions, other.positions)  # type: ignore[arg-type]
