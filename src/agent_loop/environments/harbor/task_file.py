"""The sections of `task.toml`, and which of their keys are supported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Field

from agent_loop.config.values import Positive, PositiveSeconds, Section

CpuCount = Annotated[float, Field(gt=0, le=4096)]
Size = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?[KMGkmg]$")]
"""Size in the older form of the format, such as `2G`."""
Environment = dict[str, str]
NetworkMode = Literal["no-network", "public", "allowlist"]
DEFAULT_USERS = (None, "root", 0)
_MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}


class PackageSection(Section):
    """`[task]`: the name under which the task is published."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    keywords: list[str] = []


class AgentSection(Section):
    """`[agent]`: limits of the agent."""

    timeout_sec: PositiveSeconds | None = None
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None


class VerifierSection(Section):
    """`[verifier]`: limits and environment of the tests."""

    timeout_sec: PositiveSeconds = 600.0
    env: Environment = {}
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None
    collect: list[Any] = []


class EnvironmentSection(Section):
    """`[environment]`: the container."""

    build_timeout_sec: PositiveSeconds = 600.0
    docker_image: str | None = None
    cpus: CpuCount | None = None
    memory_mb: Positive | None = None
    memory: Size | None = None
    storage_mb: Positive | None = None
    storage: Size | None = None
    env: Environment = {}
    workdir: str | None = None
    network_mode: NetworkMode | None = None
    allow_internet: bool | None = None
    allowed_hosts: list[str] | None = None
    os: str = "linux"
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = []
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None

    @property
    def memory_limit_mb(self) -> int | None:
        """The memory limit in either of its two forms."""
        if self.memory_mb is not None or self.memory is None:
            return self.memory_mb
        return max(1, int(float(self.memory[:-1]) * _MB[self.memory[-1].upper()]))

    @property
    def wants_network(self) -> bool:
        """Whether the task asks for the network in so many words."""
        return self.network_mode in ("public", "allowlist") or (
            self.network_mode is None and bool(self.allow_internet)
        )


class SolutionSection(Section):
    """`[solution]`: environment of the solution."""

    env: Environment = {}


class TaskFile(Section):
    """The content of `task.toml`."""

    schema_version: str = Field("", validation_alias=AliasChoices("schema_version", "version"))
    task: PackageSection | None = None
    metadata: dict[str, Any] = {}
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    environment: EnvironmentSection = EnvironmentSection()
    solution: SolutionSection = SolutionSection()
    source: str | None = None
    steps: list[Any] | None = None
    multi_step_reward_strategy: str | None = None
    artifacts: list[Any] = []


def unsupported_keys(file: TaskFile) -> list[str]:
    """Return the keys that ask for something this package cannot do, each with its value."""
    return [f"{key} = {value!r}" for key, value in _unsupported(file)]


def ignored_keys(file: TaskFile) -> list[str]:
    """Return the keys that have no effect, each with the reason. The task runs without them."""
    environment = file.environment
    ignored: list[str] = []
    if environment.wants_network:
        ignored.append(
            "environment.network_mode: the network is off; set container.network=host to switch it on"
        )
    if environment.storage_mb is not None or environment.storage is not None:
        ignored.append("environment.storage_mb: disk space is not limited")
    if file.artifacts:
        ignored.append("artifacts: no files are collected")
    if environment.skills_dir is not None:
        ignored.append("environment.skills_dir: skills are not copied to the agent")
    return ignored


def _unsupported(file: TaskFile) -> Iterator[tuple[str, Any]]:
    environment, verifier = file.environment, file.verifier
    if file.steps:
        yield "steps", f"{len(file.steps)} steps"
    if environment.os.lower() != "linux":
        yield "environment.os", environment.os
    for key in ("gpus", "tpu", "mcp_servers", "healthcheck"):
        if value := getattr(environment, key):
            yield f"environment.{key}", value
    if file.agent.user not in DEFAULT_USERS:
        yield "agent.user", file.agent.user
    if verifier.user not in DEFAULT_USERS:
        yield "verifier.user", verifier.user
    if verifier.environment_mode == "separate" or verifier.environment is not None:
        yield "verifier.environment_mode", "separate"
    if verifier.collect:
        yield "verifier.collect", verifier.collect
