"""Side of this package: an `AgentLoopManager` turns rows into a padded batch.

python -m overhead.ours FOLDER ENCODER
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agent_loop.chat.template import load_chat_template
from agent_loop.config import AgentConfig, MultiTurnConfig, RolloutConfig
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.servers.base import AsyncServerBase, ServerHealth, ServerSpec
from agent_loop.tools.function import function_tool
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, Row, SamplingParams, TokenOutput
from overhead import tools
from overhead.rounds import Columns, Runner, serve
from overhead.shapes import TAIL_TOKENS, Shape, Workload

ENCODERS = ("tiktoken", "tokenizers")
MAX_REPLY_TOKENS = 1024

search = function_tool(tools.search)
read_page = function_tool(tools.read_page)
calculate = function_tool(tools.calculate)


class LookupServer(AsyncServerBase):
    """Server that returns the workload's completion for each context, without delay."""

    def __init__(self, workload: Workload, *, name: str = "lookup") -> None:
        self.name = name
        self._answers = {
            tail: TokenOutput(turn.token_ids, turn.logprobs, "stop")
            for tail, turn in workload.answers.items()
        }

    @classmethod
    def create(cls, spec: ServerSpec) -> LookupServer:
        """Create a server for a specification whose options are the `folder` of the workloads and a `scenario`."""
        options = spec.engine_kwargs
        return cls(Workload.read(Path(options["folder"]), options["scenario"]), name=spec.name)

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        return self._answers[tuple(prompt_ids[-TAIL_TOKENS:].tolist())]

    async def abort(self, request_id: str) -> None: ...

    def end_session(self, request_id: str) -> None: ...

    async def wake_up(self) -> None: ...

    async def sleep(self) -> None: ...

    async def update_weights(self, weights: Iterable[Any], *, weight_version: int) -> None: ...

    async def health(self) -> ServerHealth:
        return ServerHealth(is_alive=True, num_running=0, num_waiting=0, weight_version=0)

    async def close(self) -> None: ...


class OurRunner(Runner):
    """Runner with default settings except for lengths and names."""

    def __init__(self, workload: Workload, *, template: Any, server: AsyncServerBase | None = None) -> None:
        tools.REPLIES.update(workload.replies)
        self.manager = AgentLoopManager(
            rollout_config(workload.shape), servers=[server or LookupServer(workload)], template=template
        )
        self.rows: list[Row] = [{"raw_prompt": c.messages} for c in workload.conversations]

    async def run(self) -> Any:
        return await self.manager.generate_sequences(self.rows)

    def columns(self, result: Any) -> Columns:
        return columns_of(result)


def columns_of(batch: Any) -> Columns:
    """Return the columns of a batch of `generate_sequences`."""
    return Columns(
        prompts=batch["prompts"].numpy(),
        responses=batch["responses"].numpy(),
        response_mask=batch["response_mask"].numpy(),
        logprobs=batch["rollout_log_probs"].numpy(),
    )


def rollout_config(shape: Shape) -> RolloutConfig:
    names = [f"overhead.ours:{function.__name__}" for function in tools.TOOLS] if shape.has_tools else []
    return RolloutConfig(
        prompt_length=shape.prompt_width,
        response_length=shape.response_width,
        pad_to="limits",
        agent=AgentConfig(default_agent_loop="tool_agent" if shape.has_tools else "single_turn_agent"),
        multi_turn=MultiTurnConfig(tools=names, max_tool_response_length=MAX_REPLY_TOKENS),
    )


def load_template(folder: Path, *, encoder: Any) -> Any:
    """Return the workload's chat template, with the encoder `tiktoken` or `tokenizers`."""
    return load_chat_template(str(folder / "model"), encoder=encoder)


def main() -> None:
    folder, encoder = Path(sys.argv[1]), sys.argv[2]
    template = load_template(folder, encoder=encoder)
    serve(lambda workload: OurRunner(workload, template=template), folder)


if __name__ == "__main__":
    main()
