"""Code of a user of verl: a loop, tools and an interaction, with verl's imports."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


@register("two_turns")
class TwoTurnsLoop(AgentLoopBase):
    """Samples two turns, with a question of its own between them."""

    def __init__(self, *args: Any, question: str = "and?", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.question = question

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        if messages[0]["content"] == "break":
            raise RuntimeError("this row breaks")
        prompt_ids = await self.ct_build_initial_tokens(messages)
        request_id = uuid4().hex
        first = await self.server_manager.generate(
            request_id=request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
        )
        between = self.tokenizer.encode(self.question, add_special_tokens=False)
        second = await self.server_manager.generate(
            request_id=request_id,
            prompt_ids=prompt_ids + first.token_ids + between,
            sampling_params=sampling_params,
        )
        response_ids = first.token_ids + between + second.token_ids
        mask = [1] * len(first.token_ids) + [0] * len(between) + [1] * len(second.token_ids)
        logprobs = [*first.log_probs, *[0.0] * len(between), *second.log_probs]
        limit = self.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids[:limit],
            response_mask=mask[:limit],
            response_logprobs=logprobs[:limit],
            num_turns=4,
            metrics={},
            extra_fields={"turn_scores": [], "tool_rewards": [], "seen": kwargs.get("data_source")},
        )


class CounterTool(BaseTool):
    """Counts its calls in the state of the trajectory, as tools of verl do."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self._starts: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id = instance_id or uuid4().hex
        self._starts[instance_id] = kwargs.get("create_kwargs", {}).get("start", 0)
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        agent_data = kwargs["agent_data"]
        count = agent_data.extra_fields.get("count", self._starts[instance_id]) + parameters["step"]
        agent_data.extra_fields["count"] = count
        if count > 100:
            raise ValueError("too large")
        text = f"count {count} after {len(agent_data.messages)} messages" + "!" * self.config["noise"]
        return ToolResponse(text=text), 0.5, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._starts[instance_id]
