"""Creation of servers from a configuration."""

from __future__ import annotations

from agent_loop.config import ModelConfig, PlacementConfig, RolloutConfig, WeightTransfer
from agent_loop.config.placement import devices_per_server
from agent_loop.errors import ConfigError
from agent_loop.planning.devices import UNASSIGNED, Assignment
from agent_loop.registries import load_class
from agent_loop.servers.abort_and_resume import AbortAndResumeServer
from agent_loop.servers.base import Ability, AsyncServerBase, ServerSpec
from agent_loop.types import SamplingParams

ENGINES = {
    "embedded": "agent_loop.servers.embedded:EmbeddedServer",
    "embedded_process": "agent_loop.servers.embedded_process:EmbeddedProcess",
    "scripted": "agent_loop.servers.scripted:ScriptedServer",
    "sglang": "agent_loop.servers.sglang:SGLangServer",
    "vllm": "agent_loop.servers.vllm:VLLMServer",
}
"""Engines that `agent_loop` starts itself."""

REMOTE_ENGINES: dict[str, str] = {
    "openai": "agent_loop.servers.openai_compatible:OpenAIServer",
    "sglang": "agent_loop.servers.sglang:SGLangClient",
    "vllm": "agent_loop.servers.vllm:VLLMClient",
}
"""Engines that run elsewhere and are reached by their URL."""


def create_servers(
    model: ModelConfig,
    *,
    rollout: RolloutConfig,
    placement: PlacementConfig | None = None,
    assignment: Assignment = UNASSIGNED,
) -> list[AsyncServerBase]:
    """Create one server for each of `rollout.server_urls`, or else `rollout.num_servers` servers.

    Each server has its own seed.
    """
    server_class = find_server_class(rollout)
    specs = make_server_specs(model, rollout=rollout, placement=placement, assignment=assignment)
    return [create_server(server_class, spec) for spec in specs]


def create_server(server_class: type[AsyncServerBase], spec: ServerSpec) -> AsyncServerBase:
    """Create one server. Wrap it in `AbortAndResumeServer` if weight updates have to abort its requests."""
    server = server_class.create(spec)
    # A server that knows its abilities only once it has started is expected to keep its requests.
    cannot_keep = (
        Ability.WEIGHT_UPDATE in server.abilities and Ability.UPDATE_IN_FLIGHT not in server.abilities
    )
    if spec.on_weight_update == "abort" or (spec.on_weight_update == "auto" and cannot_keep):
        return AbortAndResumeServer(server)
    return server


def make_server_specs(
    model: ModelConfig,
    *,
    rollout: RolloutConfig,
    placement: PlacementConfig | None = None,
    assignment: Assignment = UNASSIGNED,
) -> list[ServerSpec]:
    """Return the specifications of all servers of a configuration. See `create_servers` for the arguments."""
    urls = rollout.server_urls or [None] * rollout.num_servers
    return [
        ServerSpec(
            name=f"{rollout.engine.rpartition(':')[2]}-{replica}",
            model=model,
            max_model_len=rollout.prompt_length + rollout.response_length,
            seed=rollout.seed + replica,
            deterministic=rollout.deterministic,
            engine_kwargs=rollout.engine_kwargs,
            url=url,
            start_timeout_s=rollout.start_timeout_s,
            devices=assignment.of_server(replica),
            tensor_parallel_size=devices_per_server(placement or PlacementConfig(), rollout),
            shares_devices=assignment.is_colocated,
            weight_transfer=_transfer(rollout.weight_transfer, assignment, replica),
            on_weight_update=rollout.on_weight_update,
            sampling=SamplingParams.parse(rollout.sampling_params()),
        )
        for replica, url in enumerate(urls)
    ]


def _transfer(configured: WeightTransfer, assignment: Assignment, replica: int) -> WeightTransfer:
    """Return the transport of weights to a server, which may not see the device of the trainer's weights."""
    devices, trainer = assignment.of_server(replica), assignment.trainer
    if not devices or not trainer or devices == trainer or configured not in ("auto", "cuda_ipc"):
        return configured
    if configured == "cuda_ipc":
        raise ConfigError(
            f"rollout.weight_transfer is 'cuda_ipc', but a server has devices {', '.join(devices)} and the trainer "
            f"{', '.join(trainer)}; set shared_memory, broadcast or auto"
        )
    return "shared_memory"


def find_server_class(rollout: RolloutConfig) -> type[AsyncServerBase]:
    """Return the server class that a configuration names."""
    engines = REMOTE_ENGINES if rollout.server_urls else ENGINES
    custom = rollout.agent.custom_async_server
    key = "rollout.engine" if custom is None else "rollout.agent.custom_async_server"
    if custom is not None:
        reference = f"{custom.path}:{custom.name}"
    elif ":" in rollout.engine:
        reference = rollout.engine
    elif rollout.engine in engines:
        reference = engines[rollout.engine]
    elif rollout.engine in (ENGINES | REMOTE_ENGINES):
        given = "set, but this engine is not reached by a URL" if rollout.server_urls else "empty"
        raise ConfigError(
            f"{key} is {rollout.engine!r} and rollout.server_urls is {given}; set URLs for one of "
            f"{', '.join(sorted(REMOTE_ENGINES))}, or leave them empty for one of {', '.join(sorted(ENGINES))}"
        )
    else:
        names = ", ".join(sorted(ENGINES | REMOTE_ENGINES))
        raise ConfigError(
            f"{key} is {rollout.engine!r}; set it to one of {names}, or to your own module:Class"
        )
    return load_class(reference, base=AsyncServerBase, key=key)
