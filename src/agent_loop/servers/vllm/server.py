"""vLLM server that this run starts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from agent_loop.runtime.threads import run_in_thread
from agent_loop.servers.base import Ability, ServerSpec
from agent_loop.servers.http import HttpClient
from agent_loop.servers.process import EngineProcess, require_version
from agent_loop.servers.vllm.client import GENERATE_TIMEOUT_S, EngineInfo, VLLMEngine
from agent_loop.servers.vllm.limits import ModelInfo
from agent_loop.servers.vllm.logprobs import LogProbs
from agent_loop.servers.vllm.options import PACKAGE, SUPPORTED, engine_options


class VLLMServer(VLLMEngine):
    """Server that runs `vllm serve` in processes of its own. `engine_kwargs` are options of `vllm serve`.

    Log-probs are `log_softmax(logits / temperature)` before top-k and top-p, and at temperature 1 for greedy
    completions. vLLM itself has no such mode. A worker extension replaces the last stage of vLLM's sampler.

    `update_weights` pauses the engine and empties its caches. Requests in flight keep their tokens. Their context is
    prefilled again under the new weights, which counts as a preemption. vLLM records the weight version of each token.

    `sleep` frees the KV cache and moves the weights to host memory (vLLM's level 1) if `engine_kwargs` has
    `enable_sleep_mode: true` and the engine runs on a GPU. vLLM for CPUs has no sleep mode: the server refuses requests
    while asleep, frees nothing, and does not claim `Ability.SLEEP`.
    """

    _stop_grace_s = 20.0

    def __init__(self, spec: ServerSpec) -> None:
        """Create a server. The engine is started by `start`."""
        require_version(PACKAGE, supported=SUPPORTED)
        self._options = engine_options(spec)
        process = EngineProcess(spec.name)
        self._options["uds"] = str(process.folder / "socket")
        http = HttpClient(
            "http://localhost",
            server=spec.name,
            timeout_s=GENERATE_TIMEOUT_S,
            socket_path=self._options["uds"],
        )
        self._spec = spec
        super().__init__(spec.name, http, process=process)
        self._are_weights_awake = True

    async def start(self) -> None:
        model = await run_in_thread(ModelInfo.read, self._spec.model)
        options = self._options | {"max_model_len": model.context_for_scores(self._spec.max_model_len)}

        async def inspect() -> None:
            workers = await self._prepare_workers()
            await self._set_weight_version(0)
            info = EngineInfo(
                model=str(options["model"]),
                logprobs=LogProbs.SCALED,
                reports_cached_tokens=True,
                workers=workers,
                max_model_len=options["max_model_len"],
            )
            self._set_info(info, model, is_same_host=True)
            if options.get("skip_tokenizer_init"):
                self.abilities -= {Ability.JSON_SCHEMA}
            if options.get("enable_sleep_mode") and all(each["device"] == "cuda" for each in workers):
                self.abilities |= {Ability.SLEEP}

        await self._launch(
            self._spec,
            "agent_loop.servers.vllm.options",
            options,
            inspect=inspect,
            # The development mode has the endpoints for weights and sleep. Only this user can open the socket.
            environment={"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": ""},
        )

    async def _allocate(self) -> None:
        if Ability.SLEEP in self.abilities and self._is_asleep:
            await self._post(f"/wake_up{'?tags=kv_cache' if self._are_weights_awake else ''}", {})
            self._are_weights_awake = True

    async def _release(self) -> None:
        await self._post("/sleep?level=1", {})
        self._are_weights_awake = False

    @asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None]:
        """Pause the engine, and wake up its weights. An engine that is asleep on a GPU is paused already."""
        if not self._are_weights_awake:
            await self._post("/wake_up?tags=weights", {})
            self._are_weights_awake = True
        if self._is_asleep and Ability.SLEEP in self.abilities:
            yield
            return
        async with super()._paused():
            yield
