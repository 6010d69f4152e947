from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.chat.multimodal import MediaProcessor
from agent_loop.chat.parsers import ToolParser
from agent_loop.chat.template import ChatTemplate
from agent_loop.config import ActorConfig
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.loops.base import LoopContext
from agent_loop.loops.registry import LoopRegistry
from agent_loop.rollout.batch import assemble
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.worker import AgentLoopWorker
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.testing.virtual_time import REAL_WAIT_S
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.training.actor import Actor
from agent_loop.trajectory import IncidentKind
from agent_loop.types import ParsedCompletion, StopReason, ToolCall
from tests.helpers import call_text, user
from tests.rollout.harness import SCHEMA, WorkerHarness
from tests.rollout.one_line import as_line
from tests.tiny_vision import (
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

PAD_ID = vision_tokenizer().convert_tokens_to_ids("<|image_pad|>")
VIDEO_PAD_ID = vision_tokenizer().convert_tokens_to_ids("<|video_pad|>")
GRIDS = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}


class Camera(BaseTool):
    """Tool that returns images."""

    def __init__(self, response: ToolResponse) -> None:
        super().__init__({}, {**SCHEMA, "function": {**SCHEMA["function"], "name": "look"}})
        self._response = response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        return self._response, None, {}


def vision_reply(text: str) -> ScriptedReply:
    template = vision_template()
    return ScriptedReply(template.encoder.encode(text + "<|im_end|>"))


def make_harness(response: ToolResponse, **limits: Any) -> WorkerHarness:
    script = [vision_reply(call_text("look", a=1, b=2)), vision_reply("a cat")]
    return WorkerHarness(script, tools=[Camera(response)], template=vision_template(), **limits)


def test_images_of_prompts_and_tools_reach_the_server_and_the_record() -> None:
    harness = make_harness(ToolResponse(text="two views", image=[picture(1), picture(2, width=16)]))
    trajectory = harness.run_one(raw_prompt=image_message("what is it?", picture(0)))
    output = trajectory.output
    assert output.stop_reason is StopReason.ANSWERED
    first, second = harness.server.requests
    assert [a.num_tokens for a in first.attachments] == [12]
    assert [a.num_tokens for a in second.attachments] == [12, 12, 6]
    assert [a.digest for a in output.attachments] == [a.digest for a in second.attachments]
    for attachment in second.attachments:
        assert set(second.prompt_ids[attachment.start : attachment.end]) == {attachment.placeholder_id}
    assert [len(segment.attachments) for segment in output.segments] == [1, 0, 2, 0]


def test_the_error_for_an_image_to_a_text_only_model_names_the_tool() -> None:
    script = [vision_reply(call_text("look", a=1, b=2))]
    failure = WorkerHarness(script, tools=[Camera(ToolResponse(image=[picture()]))]).run_one().output.failure
    assert failure is not None
    assert "tool 'look' returned an image, but this model accepts only text; return text" in failure.error


def test_a_video_of_a_tool_reaches_the_server_and_the_record() -> None:
    video = [{"frames": video_frames(1), "fps": 4.0}]
    harness = make_harness(ToolResponse(text="seen", video=video, image=[picture(2)]))
    output = harness.run_one(raw_prompt=video_message("what happens?", video_frames(0, num_frames=2))).output
    assert output.stop_reason is StopReason.ANSWERED
    found = [(a.kind, a.num_tokens) for a in output.attachments]
    assert found == [("video", 12), ("image", 12), ("video", 36)]
    whole = np.concatenate([output.prompt_ids, output.response_ids])
    mask = np.concatenate([np.zeros(len(output.prompt_ids)), output.response_mask])
    assert not mask[np.isin(whole, [PAD_ID, VIDEO_PAD_ID])].any()
    record = as_line(harness.run_one(raw_prompt=video_message("a", video_frames(0), fps=3)))
    [shown, _] = record["messages"][0]["content"]
    assert shown["video"] == "5 frames, the first Image of size (32, 24) at 3 per second"


def test_a_deadline_while_images_are_loaded_ends_the_episode() -> None:
    class Slow(MediaProcessor):
        def read(self, media: Any) -> Any:
            time.sleep(1.5 * REAL_WAIT_S)
            return super().read(media)

    template = ChatTemplate(vision_tokenizer(), media=Slow(vision_processor()))
    harness = WorkerHarness([], template=template, deadline_s=0.05)
    output = harness.run_one(raw_prompt=image_message("a", picture())).output
    assert output.stop_reason is StopReason.DEADLINE
    assert output.failure is None


def test_an_image_that_does_not_fit_is_reported() -> None:
    length = len(vision_reply(call_text("look", a=1, b=2)).token_ids) + 12
    output = make_harness(ToolResponse(image=[picture(1)]), response_length=length).run_one().output
    assert output.stop_reason is StopReason.RESPONSE_LENGTH
    assert [incident.kind for incident in output.incidents] == [IncidentKind.DROPPED_OBSERVATION]
    assert output.attachments == ()


def test_an_unreadable_image_fails_its_trajectory_alone() -> None:
    images = ("nowhere.png", picture())
    rows = [{"raw_prompt": image_message("a", image)} for image in images]
    bad, good = make_harness(ToolResponse()).run(rows)
    assert bad.output.failure is not None
    assert "'nowhere.png'" in bad.output.failure.error
    assert good.output.stop_reason is StopReason.ANSWERED


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_cut_before_or_after_an_image_and_not_inside_it(side: str) -> None:
    harness = make_harness(ToolResponse(), prompt_length=20, truncate_prompt=side)
    output = harness.run_one(raw_prompt=image_message("what is it?", picture(0))).output
    assert output.failure is None
    assert len(output.prompt_ids) <= 20
    pads = np.count_nonzero(output.prompt_ids == PAD_ID)
    assert sum(a.num_tokens for a in output.attachments) == pads


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_a_batch_has_the_models_own_positions_and_the_features(kind: str) -> None:
    template, model = template_of(kind), vision_model(kind)
    images = [picture(1, width=64), picture(2, width=16)]
    views = ToolResponse(text="views", image=images, video=[video_frames(3, num_frames=14, width=16)])
    script = [vision_reply(call_text("look", a=1, b=2)), vision_reply("a cat")]
    seen = [
        *image_message("what is it?", picture(0)),
        *video_message("and this?", video_frames(1), video_frames(2)),
    ]
    rows = [{"raw_prompt": seen}, {"raw_prompt": user("no image in this one")}]
    trajectories = WorkerHarness(script, tools=[Camera(views)], template=template).run(rows)
    batch = assemble(trajectories, pad_token_id=template.pad_token_id)
    for row, trajectory in enumerate(trajectories):
        attachments = batch["attachments"][row]
        assert attachments == trajectory.output.attachments
        mask = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row, mask][None]
        grids: dict[str, list[Any]] = {}
        for attachment in attachments:
            for name in GRIDS & attachment.features.keys():
                grids.setdefault(name, []).append(attachment.features[name])
        expected, _ = model.model.get_rope_index(
            ids,
            (ids == PAD_ID).int() + 2 * (ids == VIDEO_PAD_ID).int(),
            **{name: torch.from_numpy(np.concatenate(parts)) for name, parts in grids.items()},
        )
        assert torch.equal(batch["multi_modal_position_ids"][row][:, mask], expected[:, 0])
        assert not batch["multi_modal_position_ids"][row, :, : int(mask.int().argmax())].any()
    assert batch["multi_modal_position_ids"].shape == (2, 3, batch["input_ids"].shape[1])


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
async def test_the_trainer_computes_the_logprobs_of_the_engine(kind: str) -> None:
    """Check a rollout on the embedded engine with images in the prompt and in the tool's response."""
    model = vision_model(kind)
    config = EmbeddedConfig(max_model_len=512, max_slots=4)
    server = EmbeddedServer(copy.deepcopy(model), config=config, eos_token_ids=())
    limits = EpisodeLimits(prompt_length=256, response_length=256, max_assistant_turns=2, max_turn_tokens=8)
    view = ToolResponse(text="seen from above", image=[picture(7, height=48)], video=[video_frames(8)])
    context = LoopContext(
        server_manager=AsyncLLMServerManager([server]),
        template=ChatTemplate(vision_tokenizer(), tool_parser=AlwaysLooks(), media=template_of(kind).media),
        limits=limits,
        tools={"look": Camera(view)},
    )
    worker = AgentLoopWorker(context, loops=LoopRegistry(), default_agent_loop="tool_agent")
    prompts = [
        video_message("a", video_frames(0)),
        user("nothing yet"),
        image_message("b", picture(5, width=64), picture(6)),
    ]
    jobs = [
        Job({"raw_prompt": prompt}, i, 0, {"temperature": 1.0, "seed": i}) for i, prompt in enumerate(prompts)
    ]
    trajectories = await worker.run(jobs)
    await server.close()
    for trajectory in trajectories:
        assert trajectory.output.failure is None
        assert trajectory.output.segments[2].attachments
    batch = assemble(trajectories, pad_token_id=vision_template().pad_token_id)
    actor = Actor(model, config=ActorConfig(), temperature=1.0)
    mask = batch["response_mask"].bool()
    assert mask.sum() > 20
    assert torch.allclose(actor.logprobs(batch)[mask], batch["rollout_log_probs"][mask], atol=1e-4)


class AlwaysLooks(ToolParser):
    """Parser that finds a call in any completion, for models with random weights."""

    def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
        return ParsedCompletion(text, (ToolCall("look", {"a": 1, "b": 2}),))
