"""Checks of a run before it starts. None of them imports torch or transformers, loads a model or starts a server."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

from agent_loop.config import Config, RolloutConfig
from agent_loop.environments.factory import load_environments
from agent_loop.errors import ChatTemplateError, ConfigError, DataError, did_you_mean
from agent_loop.files.file_kinds import MODEL, kind_of, model_in
from agent_loop.files.plain_values import parse_json
from agent_loop.interactions.registry import load_interactions
from agent_loop.loading import load_object
from agent_loop.loops.registry import LoopEntry
from agent_loop.planning.fit import GB, make_plan, this_machine
from agent_loop.planning.sizes import CONFIG_FILE, hub_folder, read_shape
from agent_loop.rollout.components import load_loops, load_reward_function
from agent_loop.rollout.row_files import find_shards
from agent_loop.rollout.rows import load_rows
from agent_loop.servers.factory import ENGINES, REMOTE_ENGINES, find_server_class
from agent_loop.storage.metrics_file import written_parts
from agent_loop.storage.query import Condition
from agent_loop.tools.registry import BUILTIN_TOOLS, load_tools
from agent_loop.training.monitor import refuse_truncated_sampling, refuse_without_reward
from agent_loop.training.registry import ESTIMATORS, POLICY_LOSSES, SAMPLERS
from agent_loop.training.supervised.sources import check_sources, is_stored
from agent_loop.types import Row

COMPARING_ESTIMATORS = frozenset(
    {"grpo", "rloo", "reinforce_plus_plus_baseline", "gdpo", "turn_grpo", "gigpo"}
)
"""Advantage estimators of this package that compare the trajectories of a group."""
BUILT_IN_ESTIMATORS = COMPARING_ESTIMATORS | {"remax", "reinforce_plus_plus", "gae", "fork"}
BUILT_IN_LOSSES = frozenset({"ppo", "gspo", "cispo", "dppo", "sapo"})
BUILT_IN_SAMPLERS = frozenset({"uniform", "curriculum"})
QUICK_BYTES = 1 << 26
"""Files of rows up to this size are read before a run starts, and larger ones only by `--dry-run`."""
CONNECT_S = 0.5

Checks: TypeAlias = Mapping[str, Callable[[], str]]
"""Checks by name. Each returns its result in one line, empty if it does not apply, or raises an `AgentLoopError`."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Run of a command, before it starts."""

    config: Config
    sources: Mapping[str, Sequence[str]]
    """Sources of the rows, by the setting or option that names them."""
    trains: bool = False
    resumes: bool = False
    overwrites: bool = False
    is_thorough: bool = False
    """Whether to run functions that return rows, read large files, create all tools, interactions and environments,
    load functions of the algorithm, connect to servers, and compute the memory too."""
    rows: list[Row] = field(default_factory=list[Row])
    """Rows that were read."""


def checks_of(run: PlannedRun) -> Checks:
    """Return the checks of a run with rollouts."""
    config, multi_turn = run.config, run.config.rollout.multi_turn
    checks: dict[str, Callable[[], str]] = {}
    checks["engine"] = partial(_check_engine, config, connects=run.is_thorough)
    checks |= {name: partial(_check_rows, run, sources, where=name) for name, sources in run.sources.items()}
    checks["reward"] = partial(_check_reward, run)
    checks["tools"] = partial(_check_tools, run)
    if run.is_thorough:
        checks["interactions"] = lambda: ", ".join(load_interactions(multi_turn.interaction_config_path))
        checks["environments"] = lambda: ", ".join(load_environments(multi_turn.environments))
    checks["agent loop"] = partial(_check_loops, run)
    if run.trains:
        checks["algorithm"] = partial(
            _check_algorithm, config, is_thorough=run.is_thorough
        )  # after the code that may register names
    checks["model"] = partial(
        _check_model, config, loads_weights=run.trains or _starts_engines(config.rollout)
    )
    checks["chat template"] = partial(_check_template, config)
    if run.trains:
        checks["run folder"] = partial(_check_run_dir, run)
        if run.is_thorough:
            checks["memory"] = partial(_check_memory, config)
    return checks


def supervised_checks(run: PlannedRun) -> Checks:
    """Return the checks of supervised training."""
    config, sft = run.config, run.config.sft

    def check_files() -> str:
        check_sources(config)
        return _check_conversations(run, sft.files)

    def check_conditions() -> str:
        for condition in sft.conditions:
            Condition.parse(condition)
        return " and ".join(sft.conditions)

    return {
        "sft.files": check_files,
        "sft.val_files": partial(_check_conversations, run, sft.val_files),
        "sft.where": check_conditions,
        "model": partial(_check_model, config),
        "chat template": partial(_check_template, config),
        "run folder": partial(_check_run_dir, run),
    }


def _check_conversations(run: PlannedRun, sources: list[str]) -> str:
    stored = [source for source in sources if is_stored(source)]
    _, found = _load(
        run, [source for source in sources if source not in stored], key=run.config.sft.messages_key
    )
    return ", ".join(filter(None, [*(f"trajectories of {source}" for source in stored), found]))


def _check_rows(run: PlannedRun, sources: Sequence[str], *, where: str) -> str:
    if not sources:
        raise ConfigError(f"{where} is empty; give at least one file, or file.py:function")
    data = run.config.data
    rows, found = _load(run, sources, key=data.prompt_key)
    is_complete = run.is_thorough or all(map(_is_small, sources))
    if where == "data.train_files" and is_complete and len(rows) < data.train_batch_size:
        raise DataError(
            f"the data set has {len(rows)} rows, fewer than data.train_batch_size={data.train_batch_size}; "
            "give more rows or lower the batch size"
        )
    run.rows.extend(rows)
    return found


def _load(run: PlannedRun, sources: Sequence[str], *, key: str) -> tuple[Sequence[Row], str]:
    """Return the rows of the sources that are read before a start, and what was read."""
    read = sources if run.is_thorough else [source for source in sources if _is_small(source)]
    rows = load_rows(read, prompt_key=key, workspace=run.config.data.workspace) if read else []
    found = [f"{len(rows)} rows of {', '.join(read)}"] if read else []
    return rows, ", ".join([*found, *(f"{source}, not read" for source in sources if source not in read)])


def _is_small(source: str) -> bool:
    files = find_shards(source)
    return files is not None and sum(file.path.stat().st_size for file in files) <= QUICK_BYTES


def _starts_engines(rollout: RolloutConfig) -> bool:
    """Return whether the run starts engines that load the model."""
    is_custom = rollout.agent.custom_async_server is not None
    return rollout.engine in {*ENGINES} - {"scripted"} and not rollout.server_urls and not is_custom


def _check_algorithm(config: Config, *, is_thorough: bool) -> str:
    refuse_truncated_sampling(config)
    estimator, loss = config.algorithm.adv_estimator, config.actor.policy_loss
    names = [
        (estimator, BUILT_IN_ESTIMATORS, ESTIMATORS),
        (loss, BUILT_IN_LOSSES, POLICY_LOSSES),
        (config.data.sampler.name, BUILT_IN_SAMPLERS, SAMPLERS),
    ]
    for name, built_in, registry in names:
        if ":" in name:
            if is_thorough:
                load_object(name, key=registry.key)
        elif "." not in name and name not in built_in and not registry.has(name):
            raise ConfigError(
                f"{registry.key} is {name!r}: no such {registry.kind}{did_you_mean(name, built_in)}; there are "
                f"{', '.join(sorted(built_in))}"
            )
    if config.rollout.n < 2 and estimator in COMPARING_ESTIMATORS:
        raise ConfigError(
            f"rollout.n is {config.rollout.n}, but algorithm.adv_estimator={estimator} compares the trajectories of "
            "one prompt; give at least 2"
        )
    return f"{estimator}, {config.rollout.n} trajectories per prompt"


def _check_engine(config: Config, *, connects: bool) -> str:
    rollout = config.rollout
    known = REMOTE_ENGINES if rollout.server_urls else ENGINES
    if rollout.engine not in known and ":" not in rollout.engine:
        find_server_class(rollout)  # raises, and says which engines there are
    if connects:
        for url in rollout.server_urls:
            _check_reachable(url)
    return f"{rollout.engine} at {', '.join(rollout.server_urls)}" if rollout.server_urls else rollout.engine


def _check_reachable(url: str) -> None:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"rollout.server_urls has {url!r}, which does not answer ({error}); start the server, or correct the URL"
        ) from error


def _check_reward(run: PlannedRun) -> str:
    config = run.config
    load_reward_function(config)
    if run.trains and run.rows and not config.distillation.teachers:
        refuse_without_reward(config, run.rows)
    names = [config.reward.function] if config.reward.function else [*config.reward.functions]
    return ", ".join(filter(None, names)) or "none by its own function"


def _check_tools(run: PlannedRun) -> str:
    """Load the tools. Those that may connect to servers or read an index are loaded by `--dry-run` alone."""
    multi_turn = run.config.rollout.multi_turn
    if run.is_thorough:
        return ", ".join(load_tools(multi_turn.tools, config_path=multi_turn.tool_config_path))
    return ", ".join(load_tools(name for name in multi_turn.tools if name not in BUILTIN_TOOLS))


def _check_loops(run: PlannedRun) -> str:
    config = run.config.rollout
    loops = load_loops(config)
    name = config.default_agent_loop
    for wanted in sorted({name, *(str(row["agent_name"]) for row in run.rows if row.get("agent_name"))}):
        entry = loops.get(wanted, where="agent_name") if wanted != name else loops.get(wanted)
        _check_program(entry, key=f"the program of agent loop {wanted!r}")
    return name


def _check_program(entry: LoopEntry, *, key: str) -> None:
    """Import the program of an agent loop, or find its command."""
    program: Any = entry.kwargs.get("program")
    if isinstance(program, str):
        load_object(program, key=key)
    command: Any = entry.kwargs.get("command")
    if isinstance(command, list) and command and not entry.kwargs.get("workspace"):
        first = str(cast(list[Any], command)[0])
        if shutil.which(first) is None:
            raise ConfigError(
                f"{key}: the command {first!r} is not installed here; install it, or give its path"
            )


def _check_run_dir(run: PlannedRun) -> str:
    """Refuse a folder that cannot be written, or holds a run that is neither resumed nor overwritten."""
    folder = Path(run.config.trainer.run_dir)
    parent = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        what = "is a file" if not parent.is_dir() else "cannot be written"
        raise ConfigError(
            f"trainer.run_dir is {str(folder)!r}, but {str(parent)!r} {what}; give another folder"
        )
    written = written_parts(folder)
    if written and not run.resumes and not run.overwrites:
        raise ConfigError(
            f"trainer.run_dir {str(folder)!r} holds a run already ({' and '.join(written)}); resume it with --resume, "
            "replace it with --overwrite, or set trainer.run_dir to a new folder"
        )
    return f"{folder}, {'resumed' if written and run.resumes else 'new'}"


def _check_memory(config: Config) -> str:
    try:
        shape, machine = read_shape(config.model.path), this_machine()
    except ConfigError:
        return "not computed: the sizes of the model or of the devices are not known here"
    plan = make_plan(config, shape, machine=machine)
    if plan.faults:
        raise ConfigError(f"{'; '.join(plan.faults)}; `agent-loop plan` shows what would make it fit")
    largest = max(plan.loads, key=lambda load: load.total)
    return f"{largest.total / GB:.2f} of {largest.capacity / GB:.2f} GB at most"


HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
"""Files of which a tokenizer has at least one."""
TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.json")
NOT_HERE = "not on this machine; it will be loaded from the hub"


def _check_model(config: Config, *, loads_weights: bool = True) -> str:
    """Return where the model is. Its weights are needed unless `loads_weights` is false."""
    folder = _folder(config.model.path, key="model.path")
    if folder is None:
        return f"{config.model.path}, {NOT_HERE}"
    if loads_weights and not (folder / CONFIG_FILE).is_file():
        inner = model_in(folder)
        such_as = f", such as {str(inner)!r}" if inner is not None else ""
        raise ConfigError(
            f"model.path is {str(folder)!r}, which has no {CONFIG_FILE}; give the folder of a model{such_as}"
        )
    key, tokenizer = _tokenizer(config)
    if tokenizer is not None and not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{key} is {str(tokenizer)!r}, where there is no tokenizer ({TOKENIZER_FILES[0]}); set "
            "model.tokenizer_path to a folder or a hub name with one"
        )
    return str(folder)


def _check_template(config: Config) -> str:
    """Return where the chat template is."""
    path = config.model.chat_template_path
    if path is not None:
        if not Path(path).is_file():
            raise ConfigError(f"model.chat_template_path is {path!r}: no such file")
        return path
    _, folder = _tokenizer(config)
    if folder is None:
        return NOT_HERE
    has_file = (folder / "chat_template.jinja").is_file()
    if not has_file and not any(map(_has_template, (folder / name for name in TEMPLATE_FILES))):
        raise ChatTemplateError(
            f"the tokenizer in {str(folder)!r} has no chat template; set model.chat_template_path to a Jinja file"
        )
    return str(folder)


def _has_template(file: Path) -> bool:
    try:
        values: Any = parse_json(file.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and bool(cast(dict[str, Any], values).get("chat_template"))


def _tokenizer(config: Config) -> tuple[str, Path | None]:
    """Return the setting that names the tokenizer, and its folder."""
    key = "model.tokenizer_path" if config.model.tokenizer_path else "model.path"
    return key, _folder(config.model.tokenizer_path or config.model.path, key=key)


def _folder(name: str, *, key: str) -> Path | None:
    """Return the folder of a model; None if its name is one of the hub that is not on this machine."""
    if not name:
        raise ConfigError(f"{key} is not set; give a folder or a hub name with a model and its tokenizer")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"{key} is {name!r}, which is a file; give the folder of a model")
    cached = hub_folder(name)
    if cached is not None:
        return cached
    if HUB_NAME.fullmatch(name) and not name.startswith("."):
        return None
    beside = path.parent if path.parent.is_dir() else Path()
    models = [str(each) for each in beside.iterdir() if kind_of(each) is MODEL]
    raise ConfigError(
        f"{key} is {name!r}, which is neither a folder nor a hub name such as Qwen/Qwen3-0.6B; give the folder of a "
        f"model{did_you_mean(name, models)}"
    )
