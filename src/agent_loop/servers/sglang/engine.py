"""Server that starts SGLang's engine in a child process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_loop.errors import WeightsError
from agent_loop.servers.base import Ability, ServerSpec
from agent_loop.servers.prompt_limits import PromptLimits
from agent_loop.servers.publishing import WeightPublisher
from agent_loop.servers.sglang import loader
from agent_loop.servers.sglang.options import engine_environment, engine_options
from agent_loop.servers.sglang.process import SGLangProcess
from agent_loop.servers.sglang.server import CONTROL_TIMEOUT_S, SGLangBase, SGLangConnection

if TYPE_CHECKING:
    from agent_loop.weights import WeightHandle


class SGLangServer(SGLangBase):
    """Server that runs `sgl.Engine`. `engine_kwargs` are fields of SGLang's `ServerArgs`.

    The engine runs in a child process, so a training run survives the death of its engine. In this process, the engine
    would replace signal handlers and the policy of the event loop, and its schedulers would run the user's main module
    again. Its handler for the SIGQUIT of a failing scheduler would kill this process. If the child dies, the requests
    in flight fail with `ServerDied`, which quotes the log.

    Log-probs are `log_softmax(logits / temperature)` before top-k and top-p, and at temperature 1 for greedy
    completions. Seeds of requests need `enable_deterministic_inference: true`.

    `sleep` frees the KV cache and moves the weights to host memory if there is a GPU (`enable_memory_saver` and
    `enable_weights_cpu_backup` are set then). On a CPU, the engine cannot free memory: the server refuses requests
    while asleep, and does not claim `Ability.SLEEP`.
    """

    def __init__(self, spec: ServerSpec) -> None:
        """Create a server. The engine is started by `start`.

        Raises:
            ConfigError: SGLang is missing or has an unsupported version, or an option does not fit.
        """
        self._options = engine_options(spec)
        self._num_ranks = int(self._options.get("tp_size") or 1) * int(self._options.get("pp_size") or 1)
        super().__init__(
            spec,
            publisher=WeightPublisher(
                spec.model, transfer=spec.weight_transfer, is_same_host=True, num_receivers=self._num_ranks
            ),
            takes_seeds=bool(self._options.get("enable_deterministic_inference")),
        )
        if self._options.get("enable_memory_saver") and self._options.get("enable_weights_cpu_backup"):
            self.abilities |= {Ability.SLEEP}
        if not self._options["skip_tokenizer_init"]:
            self.abilities |= {Ability.JSON_SCHEMA}
        self._process = SGLangProcess(server=self.name)
        self._pids: tuple[int, ...] = ()

    @classmethod
    def create(cls, spec: ServerSpec) -> SGLangServer:
        """Create a server for `rollout.engine: sglang`."""
        return cls(spec)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the engine: the child process, its schedulers and its detokenizer."""
        return self._pids

    async def start(self) -> None:
        info = await self._process.start(
            self._options,
            environment=engine_environment(self._spec),
            timeout_s=self._spec.start_timeout_s,
        )
        self._pids = tuple(int(pid) for pid in info["pids"])
        self._limits = PromptLimits(
            server=self.name, max_model_len=self._spec.max_model_len, vocab_size=int(info["vocab_size"])
        )
        self._connection, self._trouble = self._process, ""

    async def close(self) -> None:
        await super().close()
        await self._process.close()

    async def _load(self, connection: SGLangConnection, handle: WeightHandle) -> None:
        with tempfile.TemporaryDirectory(prefix="agent-loop-reports-") as reports:
            payload = loader.payload(handle.to_json(), report_folder=Path(reports))
            await _call_control(connection, "/begin_weight_update", {})
            try:
                await _call_control(
                    connection,
                    "/update_weights_from_tensor",
                    {
                        "serialized_named_tensors": [payload] * self._num_ranks,
                        "load_format": loader.NAME,
                        "flush_cache": self._has_cache,
                    },
                )
            finally:
                await _call_control(connection, "/end_weight_update", {})
            results = loader.read_reports(Path(reports))
        errors = [error for error, _ in results if error]
        if any(is_mixed for _, is_mixed in results) or 0 < len(errors) < self._num_ranks:
            raise self._mixed(errors[0])
        if errors or len(results) < self._num_ranks:
            raise WeightsError(
                f"SGLang did not load the weights of version {handle.weight_version}: "
                f"{errors[0] if errors else f'only {len(results)} of {self._num_ranks} ranks reported'}"
            )
        await connection.call(
            "/update_weight_version", {"new_version": str(handle.weight_version)}, timeout_s=CONTROL_TIMEOUT_S
        )


async def _call_control(connection: SGLangConnection, path: str, body: dict[str, Any]) -> None:
    reply: Any = await connection.call(path, body, timeout_s=CONTROL_TIMEOUT_S)
    if not reply["success"]:
        raise WeightsError(f"SGLang failed at {path}: {reply['message']}")
