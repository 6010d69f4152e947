"""Conversion of trajectories to padded tensors and back, with branches, images and videos."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.chat.multimodal import MediaProcessor
from agent_loop.chat.parsers import ToolParser
from agent_loop.chat.template import ChatTemplate
from agent_loop.config import ActorConfig
from agent_loop.episode.limits import EpisodeLimits
from agent_loop.errors import DataError
from agent_loop.loops.base import AgentLoopBase, LoopContext
from agent_loop.loops.registry import LoopRegistry, register
from agent_loop.rewards.function import RewardFunction
from agent_loop.rollout.batch import assemble, timing_metrics
from agent_loop.rollout.jobs import Job
from agent_loop.rollout.worker import AgentLoopWorker
from agent_loop.servers.embedded import EmbeddedConfig, EmbeddedServer
from agent_loop.servers.manager import AsyncLLMServerManager
from agent_loop.servers.scripted import ScriptedReply
from agent_loop.testing.virtual_time import REAL_WAIT_S
from agent_loop.tools.base import BaseTool, ToolResponse
from agent_loop.training.actor import Actor
from agent_loop.trajectory import AgentLoopMetrics, AgentLoopOutput, Segment, Trajectory
from agent_loop.types import Origin, ParsedCompletion, StopReason, ToolCall, as_token_ids
from tests.harness import examples
from tests.helpers import call_text, encoded, text_reply, tool_call_reply, user
from tests.rollout.harness import SCHEMA, Adder, WorkerHarness, as_line, error_of
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

PAD = 99


def trajectory(
    *,
    prompt: list[int] | None = None,
    response: list[tuple[Origin, list[int]]] | None = None,
    has_logprobs: bool = True,
    group: int = 0,
    rollout: int = 0,
    reward: float | None = 1.0,
    metrics: AgentLoopMetrics | None = None,
    reward_extra: Mapping[str, Any] | None = None,
    extra_fields: Mapping[str, Any] | None = None,
) -> Trajectory:
    segments = [Segment(as_token_ids([1, 2, 3] if prompt is None else prompt), Origin.PROMPT)]
    for version, (origin, ids) in enumerate(response or []):
        logprobs = np.array([-0.5 - i for i in ids], np.float32) if has_logprobs else None
        sampled = (logprobs, version) if origin is Origin.MODEL else ()
        segments.append(Segment(as_token_ids(ids), origin, *sampled))
    output = AgentLoopOutput(
        segments=segments, stop_reason=StopReason.ANSWERED, metrics=metrics, extra_fields=extra_fields
    )
    return Trajectory(output, {}, group, rollout, reward=reward, reward_extra=reward_extra or {})


tokens = st.lists(st.integers(0, 98), max_size=6)
trajectories = st.lists(
    st.builds(
        trajectory,
        prompt=tokens,
        response=st.lists(
            st.tuples(st.sampled_from([Origin.MODEL, Origin.TOOL, Origin.INTERACTION]), tokens)
        ),
        group=st.integers(0, 3),
        rollout=st.integers(0, 3),
        reward=st.none() | st.floats(-1, 1, width=32),
    ),
    max_size=5,
)


@examples(80)
@given(trajectories=trajectories, extra_width=st.integers(0, 3))
def test_trajectories_can_be_read_back_from_tensors(trajectories: list[Trajectory], extra_width: int) -> None:
    prompt_width = max((len(t.output.prompt_ids) for t in trajectories), default=0) + extra_width
    response_width = max((len(t.output.response_ids) for t in trajectories), default=0) + extra_width

    batch = assemble(trajectories, pad_token_id=PAD, prompt_width=prompt_width, response_width=response_width)

    assert batch.batch_size == torch.Size([len(trajectories)])
    assert batch["prompts"].shape == (len(trajectories), prompt_width)
    assert batch["responses"].shape == (len(trajectories), response_width)
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], dim=1))
    for row, expected in zip(batch, trajectories, strict=True):
        output = expected.output
        attended = row["attention_mask"].bool()
        start, end = prompt_width - len(output.prompt_ids), prompt_width + len(output.response_ids)
        assert attended.nonzero().flatten().tolist() == list(range(start, end))
        assert row["input_ids"][attended].tolist() == [*output.prompt_ids, *output.response_ids]
        assert (row["input_ids"][~attended] == PAD).all()
        assert row["position_ids"][attended].tolist() == list(range(end - start))
        assert (row["position_ids"][~attended] == 0).all()
        length = len(output.response_ids)
        for column, value, fill in (
            ("response_mask", output.response_mask, 0),
            ("weight_versions", output.weight_versions, -1),
            ("rollout_log_probs", output.response_logprobs, 0),
        ):
            assert value is not None
            assert row[column][:length].tolist() == value.tolist()
            assert (row[column][length:] == fill).all()
        assert (row["group"], row["rollout"]) == (expected.group, expected.rollout)
        assert row["num_turns"] == row["__num_turns__"] == output.num_turns
        assert bool(row["is_scored"]) == (expected.reward is not None)
        reward = float(row["reward"])
        assert math.isnan(reward) if expected.reward is None else reward == expected.reward


def test_a_batch_that_is_mostly_padding_has_the_same_values_and_is_writable() -> None:
    both = [trajectory(response=[(Origin.MODEL, [4, 5]), (Origin.TOOL, [6])]), trajectory(prompt=[7])]
    narrow = assemble(both, pad_token_id=PAD)
    wide = assemble(both, pad_token_id=PAD, prompt_width=3, response_width=2**18)
    for name in ("input_ids", "attention_mask", "position_ids", "response_mask", "rollout_log_probs"):
        width, fill = narrow[name].shape[1], PAD if name == "input_ids" else 0
        assert torch.equal(wide[name][:, :width], narrow[name])
        assert (wide[name][:, width:] == fill).all()
        wide[name][1, width:] += 1
        assert torch.equal(wide[name][0, :width], narrow[name][0])
        assert (wide[name][1, width:] == fill + 1).all()


def test_columns_have_the_types_that_trainers_expect_and_an_empty_batch_has_them_too() -> None:
    batch = assemble([trajectory(response=[(Origin.MODEL, [4, 5])])], pad_token_id=PAD)
    for name in ("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids"):
        assert batch[name].dtype == torch.int64
        assert batch[name].is_contiguous()
    assert batch["rollout_log_probs"].dtype == torch.float32
    assert batch["weight_versions"].dtype == torch.int32
    assert batch["is_scored"].dtype == torch.bool
    empty = assemble([], pad_token_id=PAD)
    assert empty.batch_size == torch.Size([0])
    assert empty["input_ids"].shape == (0, 0)
    assert list(empty["stop_reason"]) == []


def test_the_logprob_column_is_omitted_if_one_trajectory_has_no_logprobs() -> None:
    rows = [trajectory(response=[(Origin.MODEL, [4])], has_logprobs=has_them) for has_them in (True, False)]
    assert "rollout_log_probs" not in assemble(rows, pad_token_id=PAD)
    assert "rollout_log_probs" in assemble(rows[:1], pad_token_id=PAD)


def test_object_columns_come_from_all_rows_with_none_for_missing_values() -> None:
    rows = [
        trajectory(reward_extra={"accuracy": 1.0}),
        trajectory(rollout=1, extra_fields={"notes": ["a", "b"], "reward": 3}, reward_extra={"reward": 4}),
    ]
    batch = assemble(rows, pad_token_id=PAD)
    assert list(batch["accuracy"]) == [1.0, None]
    assert list(batch["notes"]) == [None, ["a", "b"]]
    assert list(batch["reward_extra.reward"]) == [None, 4]
    assert list(batch["extra_fields.reward"]) == [None, 3]
    assert list(batch["trajectory_id"]) == ["group=0/rollout=0", "group=0/rollout=1"]
    assert batch[1]["stop_reason"] == "answered"


def test_the_error_for_a_row_over_the_fixed_width_names_the_row() -> None:
    rows = [trajectory(), trajectory(group=7, rollout=2, response=[(Origin.MODEL, [1, 2, 3])])]
    of_response = r"response of group=7/rollout=2 has 3 tokens.*width of 2.*response_length"
    with pytest.raises(DataError, match=of_response):
        assemble(rows, pad_token_id=PAD, response_width=2)
    with pytest.raises(DataError, match=r"prompt of group=0/rollout=0 has 3 tokens"):
        assemble(rows, pad_token_id=PAD, prompt_width=2)


def test_the_timing_names_the_row_that_took_longest_in_generation_and_tools() -> None:
    short, long = (
        AgentLoopMetrics(generate_sequences=2.0, tool_calls=0.5),
        AgentLoopMetrics(generate_sequences=1.0, tool_calls=3.0, num_preempted=2),
    )
    response = [(Origin.MODEL, [1, 2, 3, 4])]
    rows = [trajectory(metrics=short), trajectory(prompt=[1, 2], response=response, metrics=long)]
    metrics = timing_metrics(rows)
    expected = {
        "generate_sequences/min": 1.0,
        "generate_sequences/max": 2.0,
        "tool_calls/mean": 1.75,
        "num_preempted/max": 2.0,
        "slowest/tool_calls": 3.0,
        "slowest/prompt_length": 2.0,
        "slowest/response_length": 4.0,
    }
    assert {name: metrics[f"agent_loop/{name}"] for name in expected} == expected
    assert timing_metrics([]) == {}


@register("best_of_two")
class BestOfTwo(AgentLoopBase):
    """Loop that samples one shared turn and then two answers in branches."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        async with self.episode(row["raw_prompt"]) as episode:
            await episode.generate(sampling_params)
            await episode.observe(user("go on"))
            async with episode.branch() as other:
                await other.generate(sampling_params)
                second = other.output()
            await episode.generate(sampling_params)
            return [episode.output(), second]


@register("tools_in_branches")
class ToolsInBranches(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        add = ToolCall("add", {"a": 1, "b": 2})
        async with self.episode(row["raw_prompt"], tools=self.context.tools) as episode:
            await episode.generate(sampling_params)
            await episode.call_tools([add])
            async with episode.branch() as other:
                await other.call_tools([add])
                await other.finish()
            await episode.finish()
            return [episode.output(), other.output()]


def run_best_of_two(reward: Any = lambda output, row: 1.0) -> tuple[list[Trajectory], WorkerHarness]:
    replies = (text_reply(f"answer {number}") for number in range(3))
    harness = WorkerHarness(
        lambda _: next(replies), agent="best_of_two", reward=RewardFunction(reward, timeout_s=1)
    )
    return harness.run([{"raw_prompt": user("?")}]), harness


def test_a_loop_may_return_branches_that_share_the_segments_of_their_prefix() -> None:
    (first, second), harness = run_best_of_two()
    names = [trajectory.trajectory_id for trajectory in (first, second)]
    assert names == [f"group=0/rollout=0/branch={branch}" for branch in range(2)]
    assert (first.output.answer, second.output.answer) == ("answer 2", "answer 1")
    assert first.output.stop_reason is second.output.stop_reason is StopReason.ANSWERED
    assert [m["role"] for m in second.output.messages] == ["user", "assistant"] * 2
    pairs = zip(first.output.segments, second.output.segments, strict=True)
    assert [a is b for a, b in pairs] == [True, True, True, False]
    shared, of_branch, *_ = harness.server.requests
    record = np.concatenate([s.token_ids for s in second.output.segments]).tolist()
    assert record[: len(of_branch.prompt_ids)] == of_branch.prompt_ids.tolist()
    assert of_branch.request_id != shared.request_id


@pytest.mark.parametrize("is_first_scored", [True, False])
def test_tokens_that_branches_share_are_trained_in_the_first_with_a_reward(is_first_scored: bool) -> None:
    def reward(output: AgentLoopOutput, row: Any) -> float:
        if output.answer == "answer 2" and not is_first_scored:
            raise ValueError
        return 1.0

    trajectories, _ = run_best_of_two(reward)
    assert [t.reward for t in trajectories] == [1.0 if is_first_scored else None, 1.0]
    batch = assemble(trajectories, pad_token_id=0)
    shared, own = (len(encoded(f"answer {number}<|im_end|>")) for number in range(2))
    of_second = own if is_first_scored else shared + own
    assert batch["response_mask"].sum(dim=1).tolist() == [shared + own, of_second]
    assert batch["group"].tolist() == batch["rollout"].tolist() == [0, 0]
    assert batch["branch"].tolist() == [0, 1]


def test_each_branch_has_its_own_tool_instances_and_all_are_released() -> None:
    tool, script = Adder(), [tool_call_reply("add", a=1, b=2)]
    harness = WorkerHarness(script, agent="tools_in_branches", tools=[tool])
    first, second = harness.run([{"raw_prompt": user("?")}])
    assert (tool.num_created, tool.num_released) == (2, 2)
    assert first.output.response_segments[0] is second.output.response_segments[0]
    assert [s.origin for s in second.output.response_segments] == [Origin.MODEL]


PAD_ID = vision_tokenizer().convert_tokens_to_ids("<|image_pad|>")
VIDEO_PAD_ID = vision_tokenizer().convert_tokens_to_ids("<|video_pad|>")
GRIDS = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts"}


class Camera(BaseTool):
    """Tool that returns images."""

    def __init__(self, response: ToolResponse) -> None:
        super().__init__({}, {**SCHEMA, "function": {**SCHEMA["function"], "name": "look"}})
        self._response = response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
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
    message = "tool 'look' returned an image, but this model accepts only text; return text"
    assert message in error_of(
        WorkerHarness(script, tools=[Camera(ToolResponse(image=[picture()]))]).run_one()
    )


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


def test_an_unreadable_image_fails_its_trajectory_alone() -> None:
    images = ("nowhere.png", picture())
    rows = [{"raw_prompt": image_message("a", image)} for image in images]
    bad, good = make_harness(ToolResponse()).run(rows)
    assert "'nowhere.png'" in error_of(bad)
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
