"""`AsyncServerBase` for an embedded engine in its own process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from agent_loop.servers.base import AsyncServerBase, ServerHealth, ServerSpec
from agent_loop.servers.embedded.server import ABILITIES, embedded_config
from agent_loop.servers.embedded_process.process import EmbeddedEngineProcess
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.servers.scores import TokenScores
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput

if TYPE_CHECKING:
    import torch


class EmbeddedProcess(AsyncServerBase):
    """An `EmbeddedServer` in a child process, so that engine and rollouts do not share the GIL.

    Useful if a second CPU core is free: the start takes seconds, because `torch` is imported again, and the process
    needs its own memory. The process loads the model itself and receives weight updates through shared memory. See
    `EmbeddedServer` for everything else.
    """

    def __init__(self, spec: ServerSpec) -> None:
        """Validate the options. `start` starts the process.

        Raises:
            ConfigError: An option is invalid.
        """
        self.name = spec.name
        self.abilities = ABILITIES
        self.max_concurrent = embedded_config(spec).max_slots
        self._spec = spec
        self._process = EmbeddedEngineProcess(spec.name)
        self._publisher = WeightPublisher(
            spec.model, transfer=spec.weight_transfer, is_same_host=True, num_receivers=1
        )

    @classmethod
    def create(cls, spec: ServerSpec) -> EmbeddedProcess:
        """Create the server for `rollout.engine: embedded_process`. `engine_kwargs` are fields of `EmbeddedConfig`."""
        return cls(spec)

    async def start(self) -> None:
        self.abilities = await self._process.start(self._spec)

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        return await self._process.call(
            "generate", prompt_ids, sampling_params, request_id, attachments, request_id=request_id
        )

    async def stream(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> AsyncGenerator[TokenChunk]:
        parts = self._process.call_streamed(
            "stream", prompt_ids, sampling_params, request_id, attachments, request_id=request_id
        )
        async with aclosing(parts):
            async for chunk in parts:
                yield chunk

    async def score(self, token_ids: IntArray, *, start: int = 1, top_logprobs: int = 0) -> TokenScores:
        return await self._process.call("score", token_ids, start, top_logprobs)

    async def abort(self, request_id: str) -> None:
        if self._process.end_reason is None:
            await self._process.call("abort", request_id)

    def end_session(self, request_id: str) -> None:
        self._process.notify("end_session", request_id)

    async def wake_up(self) -> None:
        await self._process.call("wake_up")

    async def sleep(self) -> None:
        await self._process.call("sleep")

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        async with self._publisher.offer(weights, weight_version=weight_version) as handle:
            await self._process.call("update_weights", handle.to_json(), weight_version)

    async def health(self) -> ServerHealth:
        reason = self._process.end_reason
        if reason is not None:
            return ServerHealth(
                is_alive=False, num_running=0, num_waiting=0, weight_version=-1, detail=reason
            )
        return await self._process.call("health")

    async def close(self) -> None:
        self._publisher.close()
        await self._process.stop()
