"""An embedded engine in a process of its own, as an `AsyncServerBase`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from agent_loop.servers.base import AsyncServerBase, ServerHealth, ServerSpec
from agent_loop.servers.embedded.server import ABILITIES, embedded_config
from agent_loop.servers.embedded_process.process import EngineProcess
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenChunk, TokenOutput

if TYPE_CHECKING:
    import torch


class EmbeddedProcess(AsyncServerBase):
    """An `EmbeddedServer` in a process that this one starts: engine and rollouts do not share an interpreter's lock.

    Worth its start (seconds, for `torch` is imported once more) and its memory where a second core is free. It loads
    the model itself and is given new weights through shared memory. Otherwise as `EmbeddedServer`.
    """

    def __init__(self, spec: ServerSpec) -> None:
        """Raises: ConfigError: An option is wrong."""
        self.name = spec.name
        self.abilities = ABILITIES
        self.max_concurrent = embedded_config(spec).max_slots
        self._spec = spec
        self._process = EngineProcess(spec.name)
        self._publisher = WeightPublisher(
            spec.model, transfer=spec.weight_transfer, is_same_host=True, num_receivers=1
        )

    @classmethod
    def create(cls, spec: ServerSpec) -> EmbeddedProcess:
        """As `rollout.engine: embedded_process` asks for it; `engine_kwargs` are fields of `EmbeddedConfig`."""
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
        return await self._process.ask(
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
        parts = self._process.ask_streamed(
            "stream", prompt_ids, sampling_params, request_id, attachments, request_id=request_id
        )
        async with aclosing(parts):
            async for chunk in parts:
                yield chunk

    async def abort(self, request_id: str) -> None:
        if self._process.end_reason is None:
            await self._process.ask("abort", request_id)

    def end_session(self, request_id: str) -> None:
        self._process.tell("end_session", request_id)

    async def wake_up(self) -> None:
        await self._process.ask("wake_up")

    async def sleep(self) -> None:
        await self._process.ask("sleep")

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, weight_version: int
    ) -> None:
        async with self._publisher.offer(weights, weight_version=weight_version) as handle:
            await self._process.ask("update_weights", handle.to_json(), weight_version)

    async def health(self) -> ServerHealth:
        reason = self._process.end_reason
        if reason is not None:
            return ServerHealth(
                is_alive=False, num_running=0, num_waiting=0, weight_version=-1, detail=reason
            )
        return await self._process.ask("health")

    async def close(self) -> None:
        self._publisher.close()
        await self._process.stop()
