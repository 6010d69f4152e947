"""SGLang server that this run starts."""

from __future__ import annotations

import secrets
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_loop.errors import WeightsError
from agent_loop.servers.base import ServerSpec
from agent_loop.servers.engine_client import CONTROL_TIMEOUT_S
from agent_loop.servers.http import HttpClient, HttpStatusError
from agent_loop.servers.process import EngineProcess
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.servers.sglang import loader
from agent_loop.servers.sglang.client import SGLangEngine
from agent_loop.servers.sglang.options import engine_environment, engine_options

if TYPE_CHECKING:
    from agent_loop.weights.handle import WeightHandle


class SGLangServer(SGLangEngine):
    """Server that runs SGLang's HTTP server in processes of its own. `engine_kwargs` are fields of `ServerArgs`.

    A training run survives the death of its engine. If a process of the engine dies, the requests in flight fail with
    `ServerDied`, which quotes the log.

    Log-probs are `log_softmax(logits / temperature)` before top-k and top-p, and at temperature 1 for greedy
    completions. Seeds of requests need `enable_deterministic_inference: true`.

    `sleep` frees the KV cache and moves the weights to host memory if there is a GPU (`enable_memory_saver` and
    `enable_weights_cpu_backup` are set then). On a CPU, the engine cannot free memory: the server refuses requests
    while asleep, and does not claim `Ability.SLEEP`.
    """

    def __init__(self, spec: ServerSpec) -> None:
        """Create a server. The engine is started by `start`."""
        options = engine_options(spec)
        self._num_ranks = int(options.get("tp_size") or 1) * int(options.get("pp_size") or 1)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        api_key = secrets.token_hex(16)
        self._options = options | {"host": "127.0.0.1", "port": port, "api_key": api_key}
        super().__init__(
            spec,
            HttpClient(
                f"http://127.0.0.1:{port}",
                server=spec.name,
                timeout_s=CONTROL_TIMEOUT_S,
                headers={"Authorization": f"Bearer {api_key}"},
            ),
            publisher=WeightPublisher(
                spec.model, transfer=spec.weight_transfer, is_same_host=True, num_receivers=self._num_ranks
            ),
            process=EngineProcess(spec.name),
        )

    async def start(self) -> None:
        await self._launch(
            self._spec,
            "agent_loop.servers.sglang.options",
            self._options,
            inspect=lambda: self._inspect(has_scaled_logprobs=True),
            environment=engine_environment(self._spec),
        )

    async def _load(self, handle: WeightHandle) -> None:
        with tempfile.TemporaryDirectory(prefix="agent-loop-sglang-") as reports:
            payload = loader.payload(handle.to_json(), report_folder=Path(reports))
            await self._update_call("/begin_weight_update", {})
            try:
                await self._update_call(
                    "/update_weights_from_tensor",
                    {
                        "serialized_named_tensors": [payload] * self._num_ranks,
                        "load_format": loader.NAME,
                        "flush_cache": self._has_cache,
                    },
                )
            finally:
                await self._update_call("/end_weight_update", {})
            results = loader.read_reports(Path(reports))
        errors = [error for error, _ in results if error]
        if any(is_mixed for _, is_mixed in results) or 0 < len(errors) < self._num_ranks:
            raise self._mixed(errors[0])
        if errors or len(results) < self._num_ranks:
            raise WeightsError(
                f"SGLang did not load the weights of version {handle.weight_version}: "
                f"{errors[0] if errors else f'only {len(results)} of {self._num_ranks} ranks reported'}"
            )
        await self._update_call(
            "/update_weight_version",
            {"new_version": str(handle.weight_version), "abort_all_requests": False},
        )

    async def _update_call(self, path: str, body: dict[str, Any]) -> None:
        try:
            await self._post(path, body)
        except HttpStatusError as error:
            raise WeightsError(f"SGLang failed to update its weights: {error}") from error
