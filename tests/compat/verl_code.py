"""Code written for verl. Only its imports are from this package."""

import asyncio
import json
import re
from typing import Any
from uuid import uuid4

from agent_loop.integrations.verl import (
    AgentLoopBase,
    AgentLoopOutput,
    BaseInteraction,
    BaseTool,
    FunctionCall,
    OpenAIFunctionToolSchema,
    ToolParser,
    ToolResponse,
    initialize_tools_from_config,
    register,
    rollout_trace_op,
    simple_timer,
)


@register("one_shot_with_logprobs")
class OneShotAgentLoop(AgentLoopBase):
    """Loop in verl's newer form, in which a completion has its log-probs. A row may have it repeated."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prompt_length = self.rollout_config.prompt_length

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        metrics = {}
        prompt_ids = self.tokenizer.apply_chat_template(
            list(kwargs["raw_prompt"]), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        with simple_timer("generate_sequences", metrics):
            output = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=prompt_ids[: self.prompt_length],
                sampling_params={**sampling_params, "logprobs": True},
                image_data=None,
            )
        metrics["num_preempted"] = output.num_preempted
        times = kwargs.get("times", 1)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids * times,
            response_mask=[1] * len(output.token_ids) * times,
            response_logprobs=output.log_probs and output.log_probs * times,
            num_turns=2,
            metrics=metrics,
        )


@register("own_tool_loop")
class OwnToolLoop(AgentLoopBase):
    """Custom tool loop on class attributes, with a parser that returns text and calls."""

    @classmethod
    def init_class(cls, config, tokenizer, **kwargs):
        if cls._class_initialized:
            return
        cls._class_initialized = True
        multi_turn = config.actor_rollout_ref.rollout.multi_turn
        cls.tokenizer = tokenizer
        cls.max_tool_response_length = multi_turn.max_tool_response_length
        tools = initialize_tools_from_config(multi_turn.tool_config_path)
        cls.tools = {tool.name: tool for tool in tools}
        cls.tool_schemas = [
            tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools
        ]
        cls.tool_parser = cls.make_parser(multi_turn.format)
        cls.system_prompt = tokenizer.apply_chat_template([{}], add_generation_prompt=False, tokenize=True)

    @classmethod
    def make_parser(cls, name):
        return ToolParser.get_tool_parser(name, cls.tokenizer)

    async def read_calls(self, response_ids):
        _, tool_calls = await self.tool_parser.extract_tool_calls(response_ids)
        return tool_calls

    async def run(self, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> AgentLoopOutput:
        prompt_ids = self.tokenizer.apply_chat_template(
            messages, tools=self.tool_schemas, add_generation_prompt=True, tokenize=True
        )
        request_id, response_mask, num_turns = uuid4().hex, [], 1
        while True:
            response_ids = await self.server_manager.generate(
                request_id=request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
            prompt_ids += response_ids
            response_mask += [1] * len(response_ids)
            num_turns += 1
            tool_calls = await self.read_calls(response_ids)
            if not tool_calls:
                break
            replies = await asyncio.gather(*[self._call_tool(tool_call) for tool_call in tool_calls])
            reply_ids = self.tokenizer.apply_chat_template(
                replies, add_generation_prompt=True, tokenize=True
            )[len(self.system_prompt) :]
            prompt_ids += reply_ids
            response_mask += [0] * len(reply_ids)
            num_turns += 1
        return AgentLoopOutput(
            prompt_ids=prompt_ids[: -len(response_mask)],
            response_ids=prompt_ids[-len(response_mask) :],
            response_mask=response_mask,
            num_turns=num_turns,
            metrics={},
        )

    async def _call_tool(self, tool_call: FunctionCall) -> dict[str, str]:
        tool = self.tools[tool_call.name]
        instance_id = await tool.create()
        try:
            tool_response, _, _ = await tool.execute(instance_id, json.loads(tool_call.arguments))
        finally:
            await tool.release(instance_id)
        if len(tool_response) > self.max_tool_response_length:
            tool_response = tool_response[: self.max_tool_response_length] + "...(truncated)"
        return {"role": "tool", "content": tool_response}


@register("early_tool_loop")
class EarlyToolLoop(OwnToolLoop):
    """Tool loop in verl's older form: the parser returns only calls, and the first argument is the configuration."""

    _class_initialized = False

    def __init__(self, config, server_manager, tokenizer):
        super().__init__(config, server_manager, tokenizer)
        self.response_length = config.actor_rollout_ref.rollout.response_length

    @classmethod
    def make_parser(cls, name):
        return cls.get_tool_parser(name)

    async def read_calls(self, response_ids):
        return await self.tool_parser.extract_tool_calls(response_ids)


@ToolParser.register("shouted")
class ShoutedParser(ToolParser):
    """Parser of `CALL name {...}`."""

    async def extract_tool_calls(self, responses_ids: list[int]) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids)
        found = re.findall(r"CALL (\w+) ({.*})", text)
        return text, [FunctionCall(name=name, arguments=arguments) for name, arguments in found]


class ScoreTool(BaseTool):
    """Tool that scores an answer. An answer that is not better than the previous one has a penalty."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.argument = tool_schema.function.parameters.required[0]
        self._instance_dict = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs) -> str:
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    @rollout_trace_op
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs
    ) -> tuple[ToolResponse, float, dict]:
        answer = parameters.get(self.argument, "")
        self._instance_dict[instance_id]["response"] = answer
        reward = await self.calc_reward(instance_id)
        tool_reward = 0.0 if reward > self._instance_dict[instance_id]["reward"] else -0.05
        self._instance_dict[instance_id]["reward"] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), tool_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        record = self._instance_dict[instance_id]
        return self.config["right"] if record["response"] == record["ground_truth"] else 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]


class PatientInteraction(BaseInteraction):
    """Interaction that replies whether the last answer is right."""

    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs
    ) -> str:
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs
    ) -> tuple[bool, str, float, dict]:
        content = ""
        for item in reversed(messages):
            if item.get("role") == "assistant":
                content = item.get("content")
                break
        self._instance_dict[instance_id]["response"] = content
        score = await self.calculate_score(instance_id)
        if score == 1.0:
            return True, "Right.", score, {}
        return False, self.config["wrong"], score, {"checked": content}

    async def calculate_score(self, instance_id: str, **kwargs) -> float:
        record = self._instance_dict[instance_id]
        found = re.findall(r"#### (-?[0-9.,]+)", record["response"] or "")
        return 1.0 if found and found[-1] == record["ground_truth"] else 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
