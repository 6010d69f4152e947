"""Plugin of verl: its FSDP engine on a CPU, and the embedded engine as a rollout that is called `embedded`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from verl.workers import engine_workers
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout import base, replica


@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")
class CpuEngine(FSDPEngineWithLMHead): ...


class EngineActor:
    """Actor of Ray with an embedded engine, which answers as verl's servers do."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        from agent_loop.servers.embedded.server import EmbeddedServer

        self._server = EmbeddedServer(AutoModelForCausalLM.from_pretrained(model))
        self._global_steps: int | None = None

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **more: Any
    ) -> replica.TokenOutput:
        from tests.verl.harness import completion

        return await completion(
            self._server,
            request_id,
            prompt_ids=prompt_ids,
            sampling_params=sampling_params,
            global_steps=self._global_steps,
        )

    async def update_weights(self, weights: dict[str, Any], global_steps: int) -> None:
        tensors = {name: torch.from_numpy(np.copy(array)) for name, array in weights.items()}
        await self._server.update_weights(tensors.items(), weight_version=global_steps)
        self._global_steps = global_steps

    async def wake_up(self) -> None: ...

    async def sleep(self) -> None: ...


class EngineReplica(replica.RolloutReplica):
    async def launch_servers(self) -> None:
        actor = ray.remote(EngineActor).options(name="engine", num_cpus=0)
        self.servers = [actor.remote(self.model_config.path)]
        self._server_handle, self._server_address = self.servers[0], "engine"


class EngineRollout(base.BaseRollout):
    """The trainer's side of the engine, which sends it weights."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, *, global_steps: int, **more: Any) -> None:
        arrays = {name: tensor.detach().float().numpy() for name, tensor in weights}
        await ray.get_actor("engine").update_weights.remote(arrays, global_steps)


# verl names a backend for the CPU and one for the device, which torch refuses if the device is the CPU.
engine_workers.initialize_global_process_group_ray = partial(
    engine_workers.initialize_global_process_group_ray, backend="gloo"
)
base._ROLLOUT_REGISTRY["embedded", "async"] = f"{__name__}.{EngineRollout.__name__}"
replica.RolloutReplicaRegistry.register("embedded", lambda: EngineReplica)
