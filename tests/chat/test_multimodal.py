from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.attachments import Attachment, position_ids
from agent_loop.chat.multimodal import Encoded, MediaProcessor, Medium, load_image
from agent_loop.chat.template import ChatTemplate, load_chat_template
from agent_loop.errors import ChatTemplateError, DataError, EpisodeError
from agent_loop.trajectory import Segment
from agent_loop.types import Origin, as_token_ids
from tests.helpers import hermes_template, user
from tests.tiny_vision import (
    asks,
    data_url,
    idefics_processor,
    idefics_template,
    picture,
    shows,
    vision_model,
    vision_processor,
    vision_template,
)

PAD = "<|image_pad|>"


@pytest.fixture
def template() -> ChatTemplate:
    return vision_template()


def pad_id(template: ChatTemplate) -> int:
    return template.tokenizer.convert_tokens_to_ids(PAD)


def test_a_prompt_with_images_has_the_tokens_that_the_processor_itself_writes(template: ChatTemplate) -> None:
    images = [picture(0), picture(1, width=64, height=40)]
    messages = asks("what differs?", *images)
    encoded = template.open_encoded(messages)
    text = template.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    expected = vision_processor()(images=images, text=[text], return_tensors="np")
    assert encoded.token_ids.tolist() == expected["input_ids"][0].tolist()
    together = np.concatenate([a.features["pixel_values"] for a in encoded.attachments])
    assert np.array_equal(together, expected["pixel_values"])
    assert [a.num_tokens for a in encoded.attachments] == [12, 40]


def test_each_run_lies_on_its_placeholders(template: ChatTemplate) -> None:
    ids, attachments = template.open_encoded(asks("a", picture(0), picture(1)))
    runs = [set(range(a.start, a.end)) for a in attachments]
    assert set(np.flatnonzero(ids == pad_id(template)).tolist()) == runs[0] | runs[1]
    assert not runs[0] & runs[1]


def test_a_bridge_with_several_images_ends_as_the_prompt_that_holds_them(template: ChatTemplate) -> None:
    before = [*user("look"), {"role": "assistant", "content": "ok"}]
    replies = shows(picture(0), picture(1, width=16), text="two views")
    whole = template.open_encoded([*before, *replies])
    bridge = template.bridge_encoded(replies)
    start = len(whole.token_ids) - len(bridge.token_ids)
    assert whole.token_ids[start:].tolist() == bridge.token_ids.tolist()
    assert [a.moved(start).start for a in bridge.attachments] == [a.start for a in whole.attachments]
    assert [a.digest for a in bridge.attachments] == [a.digest for a in whole.attachments]


def test_a_placeholder_in_foreign_text_stays_text(template: ChatTemplate) -> None:
    ids, attachments = template.bridge_encoded(shows(picture(), text=f"no {PAD} here <|vision_start|>"))
    [image] = attachments
    assert np.count_nonzero(ids == pad_id(template)) == image.num_tokens
    assert f"no {PAD} here <|vision_start|>" in template.decode(ids)


def test_token_ids_alone_are_refused_for_images(template: ChatTemplate) -> None:
    for write in (template.open, template.bridge):
        with pytest.raises(ChatTemplateError, match="1 images are attached to these messages"):
            write(asks("a", picture()))


def test_an_image_of_several_tiles_keeps_the_tokens_between_them() -> None:
    encoded = idefics_template().open_encoded(asks("a", picture(width=64, height=40)))
    [image] = encoded.attachments
    run = encoded.token_ids[image.start : image.end]
    assert image.positions is None
    assert np.count_nonzero(run == image.placeholder_id) == 4 * image.features["pixel_values"].shape[1]
    assert len(set(run.tolist())) > 4


def test_text_only_messages_have_no_attachments(template: ChatTemplate) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert template.open_encoded(parts).attachments == ()
    assert template.open(parts).tolist() == template.open(user("hello")).tolist()


def test_every_form_of_an_image_is_read_alike(tmp_path: Path) -> None:
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
    expected = template.open_encoded(asks("a", picture()))
    assert encoded.token_ids.tolist() == expected.token_ids.tolist()
    assert encoded.attachments[0].digest == expected.attachments[0].digest


def test_different_images_have_different_digests(template: ChatTemplate) -> None:
    first, second = template.open_encoded(asks("a", picture(0), picture(1))).attachments
    assert first.digest != second.digest


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("https://example.org/cat.png", "fetched from a network"),
        ("nowhere.png", "no image can be read from 'nowhere.png'"),
        ("data:image/png,abc", "no data URL in base64"),
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


def test_a_template_without_a_processor_says_why_it_takes_no_images() -> None:
    with pytest.raises(
        ChatTemplateError, match="1 images or videos, but nothing reads them: the model has no"
    ):
        hermes_template().open(asks("a", picture()))


def test_videos_are_refused_by_name(template: ChatTemplate) -> None:
    with pytest.raises(ChatTemplateError, match=r"holds a video.*give its frames as images"):
        template.open([{"role": "user", "content": [{"type": "video", "video": [picture()]}]}])


def test_a_template_that_leaves_an_image_out_is_refused(template: ChatTemplate) -> None:
    said = {"role": "assistant", "content": f"I say {PAD}"}
    with pytest.raises(ChatTemplateError, match=r"2 placeholders '<\|image_pad\|>' for 1 images"):
        template.open([*asks("a", picture()), said, *user("b")])


def test_features_that_need_other_tokens_than_the_processor_writes_are_refused() -> None:
    processor = vision_processor()
    template = vision_template()
    wrong = as_token_ids([1, 2])
    with pytest.raises(ChatTemplateError, match=r"need 12 tokens .* wrote 2; .* same merge_size"):
        MediaProcessor(_WritesTooFew(processor, wrong)).encode([pad_id(template)], _media(picture()))


class _WritesTooFew:
    def __init__(self, processor: Any, ids: Any) -> None:
        self._processor, self._ids = processor, ids
        self.image_token, self.tokenizer = processor.image_token, processor.tokenizer
        self.image_processor = processor.image_processor

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        return {**self._processor(**inputs), "input_ids": self._ids[None]}


def _media(image: Any) -> Any:
    return [Medium("image", image)]


def test_cutting_a_prompt_keeps_an_image_whole_or_not_at_all(template: ChatTemplate) -> None:
    encoded = template.open_encoded(asks("a", picture(0), picture(1)))
    first, second = encoded.attachments
    inside = encoded.first(second.start + 3)
    assert len(inside.token_ids) == second.start
    assert [a.digest for a in inside.attachments] == [first.digest]
    rest = encoded.last(len(encoded.token_ids) - first.start - 3)
    assert [(a.digest, a.start) for a in rest.attachments] == [(second.digest, second.start - first.end)]
    assert encoded.last(len(encoded.token_ids)).attachments[0].start == first.start


def test_text_counts_on_behind_an_image() -> None:
    offsets = np.indices((1, 2, 3), dtype=np.int32).reshape(3, -1)
    image = Attachment("image", 2, 6, 9, {}, b"", offsets, 3)
    positions = position_ids(10, [image])
    assert positions[:, :2].tolist() == [[0, 1]] * 3
    assert positions[0, 2:8].tolist() == [2] * 6
    assert positions[1, 2:8].tolist() == [2, 2, 2, 3, 3, 3]
    assert positions[2, 2:8].tolist() == [2, 3, 4, 2, 3, 4]
    assert positions[:, 8:].tolist() == [[5, 6]] * 3


@pytest.mark.parametrize(
    ("attachment", "complaint"),
    [
        (Attachment("image", 1, 5, 9, {}, b""), "at tokens 1 to 6 of a segment with 4 tokens"),
        (Attachment("image", 0, 1, 9, {}, b""), "hold no placeholder 9"),
    ],
)
def test_a_run_must_lie_on_its_tokens(attachment: Attachment, complaint: str) -> None:
    with pytest.raises(EpisodeError, match=complaint):
        Segment(as_token_ids([1, 9, 9, 2]), Origin.PROMPT, attachments=(attachment,))


def test_models_attach_nothing() -> None:
    with pytest.raises(EpisodeError, match="a model segment with an image"):
        Segment(as_token_ids([9]), Origin.MODEL, None, 0, (Attachment("image", 0, 1, 9, {}, b""),))


def test_tokens_without_images_are_cut_as_they_are() -> None:
    encoded = Encoded(as_token_ids([1, 2, 3]))
    assert encoded.first(2).token_ids.tolist() == [1, 2]
    assert encoded.last(2).token_ids.tolist() == [2, 3]
    assert encoded.last(9).token_ids.tolist() == [1, 2, 3]


def test_a_model_with_a_vision_tower_is_loaded_with_its_processor(tmp_path: Path) -> None:
    expected = idefics_template()
    idefics_processor().save_pretrained(tmp_path)
    vision_model("idefics3").config.save_pretrained(tmp_path)
    loaded = load_chat_template(str(tmp_path))
    messages = asks("a", picture(width=64))
    assert loaded.media_kinds == {"image"}
    assert (
        loaded.open_encoded(messages).token_ids.tolist() == expected.open_encoded(messages).token_ids.tolist()
    )


def test_a_processor_that_cannot_be_loaded_is_named_when_an_image_comes(tmp_path: Path) -> None:
    vision_template().tokenizer.save_pretrained(tmp_path)
    vision_model().config.save_pretrained(tmp_path)
    loaded = load_chat_template(str(tmp_path))
    assert loaded.open(user("hello")).tolist() == vision_template().open(user("hello")).tolist()
    with pytest.raises(ChatTemplateError, match=r"nothing reads them: the processor of .* cannot be loaded"):
        loaded.open(asks("a", picture()))


def test_a_text_model_has_no_processor(tmp_path: Path) -> None:
    hermes_template().tokenizer.save_pretrained(tmp_path)
    assert load_chat_template(str(tmp_path)).media_kinds == frozenset()
