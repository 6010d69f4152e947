"""Agent as a LangGraph graph whose chat model keeps token ids, as users of verl write it."""

import json
from typing import Any
from uuid import uuid4

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.graph import END, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic import ConfigDict, Field

from agent_loop.integrations.verl import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    AsyncLLMServerManager,
    ToolParser,
    register,
)


class TokenChatModel(BaseChatModel):
    """Chat model that sends tokens to the servers and parses messages from the sampled tokens."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model_name: str = Field(alias="model")
    client: AsyncLLMServerManager
    tokenizer: Any
    max_tokens: int
    tool_parser: str = "hermes"
    temperature: float = 1.0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    @property
    def _llm_type(self) -> str:
        return self.model_name

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return super().bind(tools=[convert_to_openai_tool(each) for each in tools], **kwargs)

    def _generate(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        raise NotImplementedError

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        request_id, prompt_ids, mask = self._tokens_of(messages, tools=kwargs["tools"])
        params = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
            **kwargs["sampling_params"],
        }
        response_ids = await self.client.generate(
            request_id=request_id, prompt_ids=prompt_ids, sampling_params=params
        )
        parser = ToolParser.get_tool_parser(self.tool_parser, self.tokenizer)
        content, calls = await parser.extract_tool_calls(response_ids)
        message = AIMessage(
            content=content,
            tool_calls=[
                {"name": call.name, "args": json.loads(call.arguments), "id": f"call-{number}"}
                for number, call in enumerate(calls)
            ],
            response_metadata={
                "request_id": request_id,
                "token_ids": prompt_ids + list(response_ids),
                "mask": mask + [1] * len(response_ids),
            },
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _tokens_of(self, messages: list[BaseMessage], *, tools: Any) -> tuple[str, list[int], list[int]]:
        """Render the first turn in full, and for later turns only the messages after the last completion."""
        places = [place for place, message in enumerate(messages) if message.type == "ai"]
        if not places:
            conversation = convert_to_openai_messages(messages)
            ids = self.tokenizer.apply_chat_template(
                conversation, tools=tools, add_generation_prompt=True, tokenize=True
            )
            return uuid4().hex, ids, []
        known = messages[places[-1]].response_metadata
        replies = convert_to_openai_messages(messages[places[-1] + 1 :])
        system = self.tokenizer.apply_chat_template([{}], add_generation_prompt=False, tokenize=True)
        ids = self.tokenizer.apply_chat_template(replies, add_generation_prompt=True, tokenize=True)
        ids = ids[len(system) :]
        return known["request_id"], known["token_ids"] + ids, known["mask"] + [0] * len(ids)


async def call_model(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
    settings = config["configurable"]
    message = await settings["model"].ainvoke(state["messages"], sampling_params=settings["sampling_params"])
    return {"messages": [message]}


def next_node(state: MessagesState) -> str:
    return "tools" if state["messages"][-1].tool_calls else END


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


@register("graph_agent")
class GraphAgentLoop(AgentLoopBase):
    """Agent loop that runs a graph of two nodes: the model and its tools."""

    @classmethod
    def init_class(cls, config, tokenizer, **kwargs):
        if cls._class_initialized:
            return
        cls._class_initialized = True
        graph = StateGraph(MessagesState)
        graph.add_node("agent", call_model)
        graph.add_node("tools", ToolNode([multiply]))
        graph.set_entry_point("agent")
        graph.add_conditional_edges("agent", next_node, ["tools", END])
        graph.add_edge("tools", "agent")
        cls.graph = graph.compile()

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        path = self.config.actor_rollout_ref.model.path
        rollout = self.config.actor_rollout_ref.rollout
        model = TokenChatModel(
            model="/".join(path.split("/")[-2:]),
            client=self.server_manager,
            tokenizer=self.tokenizer,
            max_tokens=rollout.response_length,
            tool_parser=rollout.multi_turn.format,
        ).bind_tools([multiply])
        config = {"configurable": {"model": model, "sampling_params": sampling_params}}
        state = await self.graph.ainvoke({"messages": list(kwargs["raw_prompt"])}, config=config)
        last = state["messages"][-1].response_metadata
        ids, mask = last["token_ids"], last["mask"]
        return AgentLoopOutput(
            prompt_ids=ids[: len(ids) - len(mask)],
            response_ids=ids[-len(mask) :][: rollout.response_length],
            response_mask=mask[: rollout.response_length],
            num_turns=len(state["messages"]),
            metrics=AgentLoopMetrics(),
            extra_fields={"model": model.bound.model_name},
        )
