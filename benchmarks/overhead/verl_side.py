"""Side of verl: its unmodified `AgentLoopWorker`, `ToolAgentLoop`, client and balancer in one process.

    python -m overhead.verl_side FOLDER

Needs an interpreter with verl (`install_verl.sh`). Only the server is a stub: it returns prepared objects in this
process, without delay. Without messages between processes, this is a lower bound for verl's time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import verl.trainer.config
from omegaconf import OmegaConf, open_dict
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from overhead import tools
from overhead.rounds import Columns, Runner, serve
from overhead.shapes import TAIL_TOKENS, Shape, Workload

CONFIG = Path(verl.trainer.config.__file__).parent / "_generated_ppo_trainer.yaml"


class Done:
    """Completed awaitable that replaces a reference to a remote result."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._result
        yield


class InProcess:
    """Wrapper of a local object with the call syntax of a Ray actor."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        remote = Remote(getattr(self._wrapped, name))
        setattr(self, name, remote)
        return remote


class Remote:
    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def remote(self, **arguments: Any) -> Done:
        return Done(self._call(**arguments))


class LookupServer:
    """Server that returns the workload's completion for each context, without delay."""

    def __init__(self, workload: Workload) -> None:
        self._answers = {
            tail: TokenOutput(token_ids=turn.token_ids, log_probs=turn.logprobs, stop_reason="completed")
            for tail, turn in workload.answers.items()
        }

    def generate(self, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        return self._answers[tuple(prompt_ids[-TAIL_TOKENS:])]


class VerlRunner(Runner):
    """Runner with verl's defaults except for lengths, tools and names."""

    def __init__(self, workload: Workload, *, folder: Path) -> None:
        tools.REPLIES.update(workload.replies)
        self._workload = workload
        config = make_config(workload.shape, folder=folder)
        balancer = GlobalRequestLoadBalancer({"lookup": InProcess(LookupServer(workload))})
        self._worker = AgentLoopWorker(
            config, LLMServerClient(config, load_balancer_handle=InProcess(balancer))
        )
        self._worker.tools = make_tools(workload)

    async def run(self) -> Any:
        return await self._worker.generate_sequences(batch_of(self._workload))

    def columns(self, result: Any) -> Columns:
        return columns_of(result)


def batch_of(workload: Workload) -> DataProto:
    """Return the prompts of all conversations as a batch."""
    prompts = np.array([None] * len(workload.conversations), dtype=object)
    prompts[:] = [conversation.messages for conversation in workload.conversations]
    return DataProto.from_dict(non_tensors={"raw_prompt": prompts})


def columns_of(result: Any) -> Columns:
    """Return the columns of a batch of results."""
    batch = result.batch
    return Columns(
        prompts=batch["prompts"].numpy(),
        responses=batch["responses"].numpy(),
        response_mask=batch["response_mask"].numpy(),
        logprobs=batch["rollout_log_probs"].numpy(),
    )


def make_tools(workload: Workload) -> list[FunctionTool]:
    return [
        FunctionTool(
            name=function.__name__,
            fn=function,
            tool_schema=OpenAIFunctionToolSchema.model_validate(schema),
            is_async=True,
        )
        for function, schema in zip(tools.TOOLS, workload.tool_schemas, strict=False)
    ]


def make_config(shape: Shape, *, folder: Path) -> Any:
    config = OmegaConf.load(CONFIG)
    with open_dict(config):
        rollout = config.actor_rollout_ref.rollout
        config.actor_rollout_ref.model.path = str(folder / "model")
        config.data.max_prompt_length = shape.prompt_width
        config.data.max_response_length = shape.response_width
        rollout.name = "vllm"
        rollout.prompt_length = shape.prompt_width
        rollout.response_length = shape.response_width
        rollout.calculate_log_probs = True
        rollout.agent.default_agent_loop = "tool_agent" if shape.has_tools else "single_turn_agent"
        rollout.multi_turn.enable = True
        rollout.multi_turn.max_tool_response_length = 4096  # characters
    return config


def main() -> None:
    folder = Path(sys.argv[1])
    serve(lambda workload: VerlRunner(workload, folder=folder), folder)


if __name__ == "__main__":
    main()
