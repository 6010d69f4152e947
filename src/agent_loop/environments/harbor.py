"""Tasks in the folder format of Harbor and Terminal-Bench 2: folders become rows with a workspace."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Field

from agent_loop.config.validation import parse_section
from agent_loop.config.values import Positive, PositiveSeconds, Section
from agent_loop.errors import ConfigError, DataError
from agent_loop.files.plain_values import merge_mappings
from agent_loop.workspaces.settings import read_workspace

TASK_FILE = "task.toml"
INSTRUCTION = "instruction.md"
ENVIRONMENT = "environment"
DOCKERFILE = "Dockerfile"
TESTS = "tests"
TEST_SCRIPT = "test.sh"
SOLUTION = "solution"
SOLUTION_SCRIPT = "solve.sh"
_MARKS = (TASK_FILE, INSTRUCTION, ENVIRONMENT)
"""Files and folders of a task. A folder with at least two of them is taken for a task."""
UNUSABLE_LOOP = "unusable_row"
"""The agent loop of rows that cannot be used. It fails with the row's `error`."""
_METADATA_COLUMNS = ("difficulty", "category", "tags")
COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
"""Line that marks the data of a benchmark. It is not shown to the agent."""
DEFAULT_USERS = (None, "root", 0)
_MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
TESTS_FOLDER = "/tests"
SOLUTION_FOLDER = "/solution"
LOG_FOLDER = "/logs/verifier"
TEST_OUTPUT = f"{LOG_FOLDER}/test-stdout.txt"
REWARD_FILE = f"{LOG_FOLDER}/reward"
_TEST_SCRIPT = f"""\
mkdir -p {LOG_FOLDER} /logs/agent /logs/artifacts
rm -f {LOG_FOLDER}/reward.txt {LOG_FOLDER}/reward.json {REWARD_FILE}
chmod +x {TESTS_FOLDER}/test.sh
{TESTS_FOLDER}/test.sh > {TEST_OUTPUT} 2>&1
if [ -e {LOG_FOLDER}/reward.json ]; then cp {LOG_FOLDER}/reward.json {REWARD_FILE}
elif [ -e {LOG_FOLDER}/reward.txt ]; then cp {LOG_FOLDER}/reward.txt {REWARD_FILE}
else tail -c 2000 {TEST_OUTPUT} >&2; exit 1
fi
"""
"""Runs the tests. `reward.json` comes before `reward.txt`. Their exit status does not matter, their reward does."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def find_tasks(path: Path) -> list[Path]:
    """Return the folders of tasks at a path, sorted by name: the path itself, or the tasks directly in it.

    A folder in which only `task.toml` or another part is missing counts as a task. The list is empty if no folder has
    a `task.toml`.
    """
    if not path.is_dir():
        return []
    if (path / TASK_FILE).is_file():
        return [path]
    folders = [inner for inner in sorted(path.iterdir()) if inner.is_dir() and _looks_like_a_task(inner)]
    return folders if any((folder / TASK_FILE).is_file() for folder in folders) else []


def folder_name(folder: Path) -> str:
    """Return the name of a task's folder, also if the path is `.`."""
    return folder.resolve().name


def task_digest(folder: Path) -> str:
    """Return a digest of the names and contents of a task's files."""
    digest = sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content = sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def _looks_like_a_task(folder: Path) -> bool:
    return (folder / TASK_FILE).is_file() or sum((folder / name).exists() for name in _MARKS) > 1


def harbor_rows(source: str, workspace: Mapping[str, Any]) -> Iterator[tuple[str, Any]] | None:
    """Return the rows of a folder of tasks, or of one task, with their locations. Return None for other sources.

    A task that cannot be used becomes a row that fails with the reason, so that the other tasks can run.
    """
    folders = find_tasks(Path(source))
    if not folders:
        return None
    rows = [_row(folder, workspace=workspace) for folder in folders]
    errors = [row["error"] for row in rows if "error" in row]
    if len(errors) == len(rows):
        raise DataError(f"none of the {len(rows)} tasks in {source!r} can be used; the first: {errors[0]}")
    return iter([(f"task {str(folder)!r}", row) for folder, row in zip(folders, rows, strict=True)])


def task_row(task: HarborTask, *, workspace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a task."""
    owner, slash, _ = task.name.rpartition("/")
    timeout_s = task.file.agent.timeout_sec
    metadata = {name: task.file.metadata[name] for name in _METADATA_COLUMNS if name in task.file.metadata}
    return {
        "raw_prompt": [{"role": "user", "content": task.instruction}],
        "task": task.name,
        "data_source": owner if slash else task.folder.resolve().parent.name,
        "workspace": task_workspace(task, settings=workspace),
        "task_digest": task_digest(task.folder),
        **({} if timeout_s is None else {"trajectory_timeout_s": timeout_s}),
        **({"extra_info": metadata} if metadata else {}),
    }


def _row(folder: Path, *, workspace: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return task_row(read_task(folder), workspace=workspace)
    except DataError as error:
        name = folder_name(folder)
        return {
            "raw_prompt": [{"role": "user", "content": f"(task {name}: see {INSTRUCTION})"}],
            "task": name,
            "agent_name": UNUSABLE_LOOP,
            "error": str(error),
        }


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task that was read and validated."""

    folder: Path
    instruction: str
    file: TaskFile
    ignored: tuple[str, ...] = ()
    """Keys of `task.toml` that have no effect, each with the reason."""

    @property
    def name(self) -> str:
        """Published name, such as `org/name`, or the name of the folder."""
        return folder_name(self.folder) if self.file.task is None else self.file.task.name

    @property
    def tests(self) -> Path:
        return self.folder / TESTS

    @property
    def solution(self) -> Path | None:
        """Folder of the solution, if the task has one."""
        folder = self.folder / SOLUTION
        return folder if (folder / SOLUTION_SCRIPT).is_file() else None


def read_task(folder: Path) -> HarborTask:
    """Read a task."""
    where = f"task {str(folder)!r}"
    file = _read_file(folder / TASK_FILE, where=where)
    instruction = _read_instruction(folder / INSTRUCTION, where=where)
    faults = unsupported_keys(file)
    if faults:
        raise DataError(
            f"{where}: {TASK_FILE} asks for {', '.join(faults)}, which is not supported; leave the task out"
        )
    _check_files(folder, file, where=where)
    return HarborTask(folder, instruction, file, tuple(ignored_keys(file)))


def _read_file(path: Path, *, where: str) -> TaskFile:
    try:
        values: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{where} has no {TASK_FILE}; write one") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{where}: {TASK_FILE} is not valid TOML ({error}); fix it") from error
    try:
        return parse_section(TaskFile, values, where=TASK_FILE)
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from error


def _read_instruction(path: Path, *, where: str) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{where} has no {INSTRUCTION}; write the text that the agent gets") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: {INSTRUCTION} cannot be read ({error})") from error
    while lines and _CANARY.fullmatch(lines[0].strip()):
        del lines[0]
    text = "\n".join(lines).strip()
    if not text:
        raise DataError(f"{where}: {INSTRUCTION} is empty; write the text that the agent gets")
    return text


def _check_files(folder: Path, file: TaskFile, *, where: str) -> None:
    environment = folder / ENVIRONMENT
    compose = [name for name in COMPOSE_FILES if (environment / name).is_file()]
    if compose:
        raise DataError(
            f"{where}: {ENVIRONMENT}/{compose[0]} describes several containers, which is not supported; leave the "
            "task out"
        )
    if file.environment.docker_image is None and not (environment / DOCKERFILE).is_file():
        raise DataError(
            f"{where} has neither {ENVIRONMENT}/{DOCKERFILE} nor environment.docker_image in {TASK_FILE}; give one of "
            "them"
        )
    if not (folder / TESTS / TEST_SCRIPT).is_file():
        raise DataError(f"{where} has no {TESTS}/{TEST_SCRIPT}; write the script that judges the result")


CpuCount = Annotated[float, Field(gt=0, le=4096)]
Size = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?[KMGkmg]$")]
"""Size in the older form of the format, such as `2G`."""
Environment = dict[str, str]
NetworkMode = Literal["no-network", "public", "allowlist"]


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


def task_workspace(task: HarborTask, *, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a task's workspace."""
    environment, verifier = task.file.environment, task.file.verifier
    container: dict[str, Any] = {
        "cpus": environment.cpus,
        "memory": None if environment.memory_limit_mb is None else f"{environment.memory_limit_mb}m",
        "env": resolve_variables(environment.env, task=task, settings=settings),
        "folder": environment.workdir,
        "image": environment.docker_image,
    }
    if environment.docker_image is None:
        container["dockerfile"] = str(task.folder / ENVIRONMENT)
    check = {
        "command": ["sh", "-c", _TEST_SCRIPT],
        "files": str(task.tests),
        "files_to": TESTS_FOLDER,
        "env": resolve_variables(verifier.env, task=task, settings=settings),
        "reward_file": REWARD_FILE,
        "timeout_s": verifier.timeout_sec,
    }
    given = {
        "container": _without_empty(container),
        "check": _without_empty(check),
        "start_timeout_s": environment.build_timeout_sec,
    }
    try:
        read_workspace(given)
    except ConfigError as error:
        raise DataError(f"task {str(task.folder)!r}: {error}") from error
    merged = merge_mappings(given, settings)
    if merged.get("provider"):
        options: Mapping[str, Any] = merged.get("options") or {}
        merged["options"] = {**options, "container": merged.pop("container")}
    elif not merged.get("container"):
        raise ConfigError(
            "data.workspace takes the container from tasks, whose tests would write to this machine; leave container "
            "as it is, or name a provider"
        )
    read_workspace(merged, where="data.workspace")
    return merged


def resolve_variables(
    env: Mapping[str, str], *, task: HarborTask, settings: Mapping[str, Any]
) -> dict[str, str]:
    """Return variables with `${NAME}` and `${NAME:-default}` replaced.

    The values come from `container.env` of the settings, never from the environment of this process, whose secrets a
    task could name.
    """
    container: Mapping[str, Any] = settings.get("container") or {}
    given: Mapping[str, Any] = container.get("env") or {}

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = given.get(name, default)
        if found is None:
            raise DataError(
                f"task {str(task.folder)!r} needs the variable {name}; give it as container.env.{name} in "
                "data.workspace"
            )
        return str(found)

    return {name: _VARIABLE.sub(value, text) for name, text in env.items()}


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, {})}
