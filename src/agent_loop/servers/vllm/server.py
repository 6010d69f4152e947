"""vLLM server that this run starts."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from agent_loop.errors import ServerDied
from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.base import Ability, ServerHealth, ServerSpec
from agent_loop.servers.http import HttpClient
from agent_loop.servers.packages import require_version
from agent_loop.servers.process import EngineProcess
from agent_loop.servers.vllm.client import GENERATE_TIMEOUT_S, VLLMClient
from agent_loop.servers.vllm.limits import ModelInfo
from agent_loop.servers.vllm.logprobs import LogProbs
from agent_loop.servers.vllm.options import PACKAGE, SUPPORTED, engine_options
from agent_loop.servers.vllm.remote import RemoteServerInfo, prepare_workers, set_weight_version

POLL_S = 0.1
STOP_GRACE_S = 20.0


class VLLMServer(VLLMClient):
    """Server that runs `vllm serve` in processes of its own. `engine_kwargs` are options of `vllm serve`.

    Log-probs are `log_softmax(logits / temperature)` before top-k and top-p, and at temperature 1 for greedy
    completions. vLLM itself has no such mode. A worker extension replaces the last stage of vLLM's sampler.

    `update_weights` pauses the engine and empties its caches. Requests in flight keep their tokens. Their context is
    prefilled again under the new weights, which counts as a preemption. vLLM records the weight version of each token.

    `sleep` frees the KV cache and moves the weights to host memory (vLLM's level 1) if `engine_kwargs` has
    `enable_sleep_mode: true` and the engine runs on a GPU. vLLM for CPUs has no sleep mode: the server refuses requests
    while asleep, frees nothing, and does not claim `Ability.SLEEP`.
    """

    def __init__(self, spec: ServerSpec) -> None:
        """Create a server. The engine is started by `start`."""
        require_version(PACKAGE, supported=SUPPORTED)
        self._options = engine_options(spec)
        self._folder = Path(tempfile.mkdtemp(prefix="agent-loop-vllm-"))
        socket_path = str(self._folder / "socket")
        http = HttpClient(
            "http://localhost", server=spec.name, timeout_s=GENERATE_TIMEOUT_S, socket_path=socket_path
        )
        self._set_up(spec, http)
        self._options["uds"] = socket_path
        self._process = EngineProcess(spec.name)
        self._are_weights_awake = True

    async def start(self) -> None:
        model = await run_in_thread(ModelInfo.read, self._spec.model)
        self._options["max_model_len"] = model.context_for_scores(self._spec.max_model_len)
        options_file = self._folder / "options.json"
        options_file.write_text(json.dumps(self._options), encoding="utf-8")
        self._process.start(
            "agent_loop.servers.vllm.options",
            str(options_file),
            devices=self._spec.devices,
            # The development mode has the endpoints for weights and sleep. Only this user can open the socket.
            environment={"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": ""},
        )
        try:
            info = await self._process.ready(self._inspect, timeout_s=self._spec.start_timeout_s)
        except BaseException:
            await self.close()
            raise
        self._set_info(info, model, is_same_host=True)
        if self._options.get("skip_tokenizer_init"):
            self.abilities -= {Ability.JSON_SCHEMA}
        if self._options.get("enable_sleep_mode") and all(each["device"] == "cuda" for each in info.workers):
            self.abilities |= {Ability.SLEEP}

    async def wake_up(self) -> None:
        async with self._control:
            if Ability.SLEEP in self.abilities and self._is_asleep:
                tags = "?tags=kv_cache" if self._are_weights_awake else ""
                await self._control_call(f"/wake_up{tags}", {})
                self._are_weights_awake = True
            self._is_asleep = False

    async def sleep(self) -> None:
        async with self._control:
            was_asleep = self._is_asleep
            await super().sleep()
            if Ability.SLEEP in self.abilities and not was_asleep:
                await self._control_call("/sleep?level=1", {})
                self._are_weights_awake = False

    async def health(self) -> ServerHealth:
        if self._process.ended.is_set() and not self._trouble:
            return ServerHealth(False, 0, 0, self._weight_version, detail=self._process.end)
        return await super().health()

    async def close(self) -> None:
        await super().close()
        await self._process.close(grace_s=STOP_GRACE_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _inspect(self) -> RemoteServerInfo:
        """Wait until the server responds, and prepare its workers."""
        while True:
            with suppress(ServerDied):  # the socket does not exist yet
                await self._http.get_json("/health")
                break
            await asyncio.sleep(POLL_S)
        workers = await prepare_workers(self._http)
        await set_weight_version(self._http, 0)
        return RemoteServerInfo(
            model=str(self._options["model"]),
            logprobs=LogProbs.SCALED,
            reports_cached_tokens=True,
            workers=workers,
            max_model_len=self._options["max_model_len"],
        )

    @asynccontextmanager
    async def _typed_errors(self, request_id: str) -> AsyncGenerator[None]:
        async with self._process.naming_death(request_id), super()._typed_errors(request_id):
            yield

    @asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None]:
        """Pause the engine, and wake up its weights. An engine that is asleep on a GPU is paused already."""
        if not self._are_weights_awake:
            await self._control_call("/wake_up?tags=weights", {})
            self._are_weights_awake = True
        if self._is_asleep and Ability.SLEEP in self.abilities:
            yield
            return
        async with super()._paused():
            yield

    def _usable(self, request_id: str) -> tuple[RemoteServerInfo, Any]:
        if self._process.ended.is_set() and not self._trouble:
            raise ServerDied(self._process.end, server=self.name, request_id=request_id)
        return super()._usable(request_id)
