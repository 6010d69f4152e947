"""Tests of images and videos in the embedded engine, compared with the forward of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from agent_loop.chat.multimodal import Encoded
from agent_loop.errors import ServerError
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.embedded.vision import VIDEO_MODELS, VISION_MODELS, media_features
from agent_loop.trajectory.attachments import position_ids
from agent_loop.types import SamplingParams, TokenOutput
from tests.servers.tiny_embedded import joined, serving, tiny_model
from tests.tiny_vision import (
    image_message,
    picture,
    template_of,
    tool_image_message,
    video_frames,
    video_message,
    vision_model,
    vision_template,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TOLERANCE = 1e-4


def prompt(*images: Any, text: str = "what is it?") -> Encoded:
    return vision_template().open_encoded(image_message(text, *images))


def as_inputs(encoded: Encoded, token_ids: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """Return the model's inputs for the prompt and the tokens after it."""
    ids = joined(encoded.token_ids, token_ids).astype(np.int64)
    kinds = np.zeros_like(ids)
    joint: dict[str, list[Any]] = {}
    for attachment in encoded.attachments:
        kinds[attachment.start : attachment.end] = {"image": 1, "video": 2}[attachment.kind]
        for name, array in attachment.features.items():
            joint.setdefault(name, []).append(array)
    arrays = {"input_ids": ids[None], **{name: np.concatenate(parts) for name, parts in joint.items()}}
    if "image_grid_thw" in joint or "video_grid_thw" in joint:
        arrays["mm_token_type_ids"] = kinds[None]
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def model_logprobs(model: Any, encoded: Encoded, token_ids: Sequence[int]) -> list[float]:
    with torch.no_grad():
        logits = model(**as_inputs(encoded, token_ids), use_cache=False).logits[0]
    logprobs = logits[len(encoded.token_ids) - 1 : -1].double().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


def check(model: Any, encoded: Encoded, output: TokenOutput) -> None:
    """Compare the log-probs of a completion with those of one forward."""
    expected = model_logprobs(model, encoded, output.token_ids)
    assert output.log_probs == pytest.approx(expected, abs=TOLERANCE)


async def check_batch(server: EmbeddedServer, model: Any, prompts: Sequence[Encoded]) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(complete(server, encoded, f"r{i}", temperature=1.0, seed=40 + i))
            for i, encoded in enumerate(prompts)
        ]
    for encoded, task in zip(prompts, tasks, strict=True):
        check(model, encoded, task.result())


async def complete(server: EmbeddedServer, encoded: Encoded, session: str, **changes: Any) -> TokenOutput:
    params = structs.replace(GREEDY, **changes)
    return await server.generate(encoded.token_ids, params, session, attachments=encoded.attachments)


async def test_logprobs_equal_those_of_a_full_forward_for_images_and_text_in_one_batch() -> None:
    model = vision_model()
    prompts = [prompt(picture(0)), prompt(), prompt(picture(1, width=64), picture(0)), prompt(text="hello")]
    async with serving(model, prefill_chunk_tokens=16) as server:
        await check_batch(server, model, prompts)


@pytest.mark.parametrize("kind", sorted(VISION_MODELS))
async def test_every_vision_model_agrees_with_its_own_forward(kind: str) -> None:
    model = vision_model(kind, seed=1)
    encoded = template_of(kind).open_encoded(image_message("what is it?", picture(0, width=64, height=40)))
    async with serving(model, prefill_chunk_tokens=11) as server:
        output = await complete(server, encoded, "a")
    check(model, encoded, output)
    assert len(set(output.token_ids)) > 1


async def test_a_second_turn_with_another_image_computes_only_its_new_tokens() -> None:
    model, template = vision_model(), vision_template()
    first = prompt(picture(0))
    async with serving(model) as server:
        said = (await complete(server, first, "s")).token_ids
        before = server.stats
        bridge = template.bridge_encoded(tool_image_message(picture(1)), last_token_id=said[-1])
        start = len(first.token_ids) + len(said)
        second = Encoded(
            joined(first.token_ids, said, bridge.token_ids),
            (*first.attachments, *(a.moved(start) for a in bridge.attachments)),
        )
        output = await complete(server, second, "s")
        after = server.stats
        assert after.prefilled_tokens - before.prefilled_tokens == len(bridge.token_ids) + 1
        check(model, second, output)


async def test_equal_images_share_their_prefix_across_sessions_and_others_do_not() -> None:
    model = vision_model()
    text = "a long question, so that there is something to share behind it"
    first, again, other = (prompt(picture(number), text=text) for number in (0, 0, 1))
    assert first.token_ids.tolist() == other.token_ids.tolist()
    async with serving(model) as server:
        one = await complete(server, first, "a")
        assert server.stats.reused_tokens == 0
        assert (await complete(server, again, "b")).token_ids == one.token_ids
        reused = server.stats.reused_tokens
        assert reused == len(first.token_ids) - 1
        output = await complete(server, other, "c")
        assert server.stats.reused_tokens - reused <= first.attachments[0].start
        assert one.log_probs != output.log_probs
        check(model, other, output)


async def test_more_features_than_placeholders_fail_only_their_own_request() -> None:
    encoded, larger = prompt(picture(0)), prompt(picture(0, width=64))
    features = larger.attachments[0].features
    wrong = Encoded(encoded.token_ids, (replace(encoded.attachments[0], features=features),))
    async with serving(vision_model()) as server:
        with pytest.raises(
            ServerError, match=r"computes 24 features for an image of .* but it has 12 placeholders"
        ):
            await complete(server, wrong, "a")
        assert len((await complete(server, encoded, "a")).token_ids) == 12


@pytest.mark.parametrize(
    ("make", "kind", "changes", "message"),
    [
        (vision_model, "qwen2_vl", {"start": 0, "num_tokens": 2}, "has 0 placeholders"),
        (vision_model, "qwen2_vl", {"start": 500}, "has 0 placeholders"),
        (vision_model, "qwen2_vl", {"placeholder_id": 3}, "has placeholders 3, but the model's are"),
        (vision_model, "qwen2_vl", {"positions": None}, "has no positions"),
        (vision_model, "qwen2_vl", {"kind": "video"}, "a video of 12 tokens has placeholders"),
        (
            lambda: vision_model("idefics3"),
            "idefics3",
            {"kind": "video"},
            "supports images only; send frames",
        ),
        (lambda: tiny_model(vocab_size=600), "qwen2_vl", {}, "1 attachments, but this model takes none"),
    ],
)
async def test_an_attachment_that_does_not_match_tokens_or_model_is_rejected(
    make: Any, kind: str, changes: dict[str, Any], message: str
) -> None:
    encoded = template_of(kind).open_encoded(image_message("what is it?", picture(0)))
    wrong = Encoded(encoded.token_ids, (replace(encoded.attachments[0], **changes),))
    async with serving(make()) as server:
        with pytest.raises(ServerError, match=message):
            await complete(server, wrong, "a")


async def test_a_sampled_placeholder_token_is_treated_as_text() -> None:
    model = vision_model()
    encoded = prompt(picture(0))
    [image] = encoded.attachments
    context = Encoded(joined(encoded.token_ids, [image.placeholder_id, 5]), (image,))
    async with serving(model) as server:
        output = await complete(server, context, "a", max_tokens=3)
    ids = torch.from_numpy(joined(context.token_ids, output.token_ids).astype(np.int64))
    positions = torch.from_numpy(position_ids(len(ids), [image]))
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
        embeds[image.start : image.end] = media_features(model, image, num_placeholders=image.num_tokens)
        logits = model(inputs_embeds=embeds[None], position_ids=positions[:, None], use_cache=False).logits[0]
    expected = logits[-4:-1].log_softmax(-1).gather(1, ids[-3:, None])[:, 0].tolist()
    assert output.log_probs == pytest.approx(expected, abs=TOLERANCE)


async def test_a_saved_model_is_loaded_with_its_vision_tower(tmp_path: Path) -> None:
    model = vision_model()
    model.save_pretrained(tmp_path)
    encoded = prompt(picture(0))
    server = EmbeddedServer.from_pretrained(tmp_path, config=EmbeddedConfig(max_model_len=256))
    output = await complete(server, encoded, "a")
    await server.close()
    check(model, encoded, output)


def mixed(kind: str) -> Encoded:
    """Return a prompt with an image, a video of odd length, text, a longer video, and another image."""
    messages = image_message("what is it?", picture(0))
    messages[0]["content"] += video_message(
        "and this", video_frames(1), video_frames(2, num_frames=18, width=16), fps=3.0
    )[0]["content"]
    messages[0]["content"] += image_message("then", picture(4, width=64))[0]["content"]
    return template_of(kind).open_encoded(messages)


@pytest.mark.parametrize("kind", sorted(VIDEO_MODELS))
@pytest.mark.parametrize("chunk_tokens", [512, 7])
async def test_logprobs_after_videos_equal_those_of_the_model(kind: str, chunk_tokens: int) -> None:
    model = vision_model(kind, seed=1)
    template = template_of(kind)
    first = template.open_encoded(video_message("what happens?", video_frames(1)))
    two = template.open_encoded(
        video_message("what differs?", video_frames(1), video_frames(2, num_frames=2, width=64))
    )
    async with serving(model, prefill_chunk_tokens=chunk_tokens, max_model_len=512) as server:
        await check_batch(
            server, model, [first, two, mixed(kind), template.open_encoded(image_message("none"))]
        )


async def test_equal_frames_at_different_rates_share_no_prefix() -> None:
    # Keys and values depend on the positions in time, which differ.
    model, template = vision_model("qwen2_5_vl"), template_of("qwen2_5_vl")
    slow = template.open_encoded(video_message("a long question behind the film", video_frames(1), fps=1.0))
    fast = template.open_encoded(video_message("a long question behind the film", video_frames(1), fps=8.0))
    assert slow.token_ids.tolist() == fast.token_ids.tolist()
    async with serving(model) as server:
        await complete(server, slow, "a")
        output = await complete(server, fast, "b")
        assert server.stats.reused_tokens <= fast.attachments[0].start
        check(model, fast, output)


async def test_positions_continue_after_a_video_that_ends_the_prompt() -> None:
    model, template = vision_model(), vision_template()
    whole = template.open_encoded(video_message("a", video_frames(1, num_frames=18, width=16)))
    cut = whole.first(whole.attachments[0].end)
    assert len(cut.token_ids) == cut.attachments[0].end
    async with serving(model) as server:
        output = await complete(server, cut, "a")
    check(model, cut, output)
