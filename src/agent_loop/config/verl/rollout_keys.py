"""Groups of verl's settings for rollout, machines, data and reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent_loop.config.verl.group import Group, Values, keys
from agent_loop.errors import ConfigError

R = "actor_rollout_ref.rollout"
ENGINES = ("vllm", "sglang")
FUNCTIONS = ("reward.custom_reward_function", "custom_reward_function")
OPTIONS: Mapping[str, tuple[str | None, str | None]] = {
    "gpu_memory_utilization": ("gpu_memory_utilization", "mem_fraction_static"),
    "enforce_eager": ("enforce_eager", "disable_cuda_graph"),
    "max_num_seqs": ("max_num_seqs", "max_running_requests"),
    "max_num_batched_tokens": ("max_num_batched_tokens", None),
    "enable_chunked_prefill": ("enable_chunked_prefill", None),
    "tensor_model_parallel_size": ("tensor_parallel_size", "tp_size"),
    "pipeline_model_parallel_size": ("pipeline_parallel_size", "pp_size"),
}
"""Options of engines in verl, and their names in vLLM and SGLang."""
OWN_OPTIONS = frozenset(
    {
        "max_model_len",
        "dtype",
        "seed",
        "model",
        "model_path",
        "context_length",
        "skip_tokenizer_init",
        "logprobs_mode",
    }
)
"""Options of vLLM and SGLang that other settings of this package determine."""


def _val_sampling(values: Values) -> Mapping[str, Any]:
    temperature = values.verl(f"{R}.val_kwargs.temperature")
    if temperature is None and values.verl(f"{R}.val_kwargs.do_sample") is False:
        temperature = 0.0
    return {} if temperature is None else {"rollout.val.temperature": temperature}


PARALLEL = [f"{R}.tensor_model_parallel_size", f"{R}.pipeline_model_parallel_size"]


def _engine(values: Values) -> Mapping[str, Any]:
    name = values.verl(f"{R}.name")
    if name in ("trtllm", "dynamo"):
        raise ConfigError(f"{R}.name is {name!r}; set rollout.engine=vllm or sglang")
    return {"rollout.engine": {"hf": "embedded", "naive": "embedded"}.get(str(name), name)}


def _option(option: str) -> Group:
    """Return the group of an option whose name depends on the engine."""

    def translate(values: Values) -> Mapping[str, Any]:
        value, engine = values.verl(f"{R}.{option}"), values.own("rollout.engine")
        target = OPTIONS[option][ENGINES.index(engine)] if engine in ENGINES else None
        if target is None or value is None or (value == 1 and "parallel" in option):
            return {}
        return {f"rollout.engine_kwargs.{target}": value}

    return Group([f"{R}.{option}"], translate, ["rollout.engine"])


def _engine_kwargs(engine: str) -> Group:
    """Return the group of the options that verl passes to an engine under the engine's own names."""

    def translate(values: Values) -> Mapping[str, Any]:
        options = cast(Mapping[str, Any], values.verl(f"{R}.engine_kwargs.{engine}") or {})
        if values.own("rollout.engine") != engine:
            return {}
        return {
            f"rollout.engine_kwargs.{key}": value
            for key, value in options.items()
            if key not in OWN_OPTIONS and value is not None
        }

    return Group([f"{R}.engine_kwargs.{engine}"], translate, ["rollout.engine"])


def _machines(values: Values) -> Mapping[str, Any]:
    gpus, nodes = _number(values.verl("trainer.n_gpus_per_node")), _number(values.verl("trainer.nnodes")) or 1
    if not gpus:
        return {}
    tensor, pipeline = (_number(values.verl(key)) or 1 for key in PARALLEL)
    per_server = tensor * pipeline
    apart = _number(values.verl("rollout.nnodes", f"{R}.nnodes")) * _number(
        values.verl("rollout.n_gpus_per_node", f"{R}.n_gpus_per_node")
    )
    found: dict[str, Any] = {"trainer.num_processes": gpus * nodes}
    if nodes > 1:
        found["trainer.runtime"] = "ray"
    if values.own("rollout.engine") in ENGINES:
        num_servers = max(1, (apart or gpus * nodes) // per_server)
        found["rollout.num_servers"] = num_servers
        shares = not apart and nodes == 1 and num_servers * tensor == gpus
        sleeps = values.own("rollout.free_cache_engine") and values.own("trainer.mode") == "sync"
        if shares and sleeps and values.verl("trainer.device") != "cpu":
            found["placement.colocated"] = "all"
    return found


def _number(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _reward_function(values: Values) -> Mapping[str, Any]:
    for section in FUNCTIONS:
        path = values.verl(f"{section}.path")
        if path:
            kwargs = values.verl(f"{section}.reward_kwargs")
            if kwargs:
                raise ConfigError(
                    f"{section}.reward_kwargs is {kwargs!r}; give the parameters of the function these defaults"
                )
            name = values.verl(f"{section}.name") or "compute_score"
            return {"reward.function": str(path) if ":" in str(path) else f"{path}:{name}"}
    return {}


MANAGERS: Mapping[str, bool] = {
    "naive": False,
    "batch": True,
    **dict.fromkeys(("dapo", "prime", "gdpo", "limited", "rate_limited", "remote"), False),
}
"""Reward managers of verl, and whether they score a batch at once."""


def _reward_manager(values: Values) -> Mapping[str, Any]:
    for key in ("reward.reward_manager.name", "reward_model.reward_manager"):
        name = values.verl(key)
        if name is not None and name not in MANAGERS:
            raise ConfigError(
                f"{key} is {name!r}; give {' or '.join(map(repr, MANAGERS))}, or write a reward.function"
            )
        if name is not None:
            return {"reward.batch": MANAGERS[name]}
    return {}


def _every(key: str, target: str) -> Group:
    def translate(values: Values) -> Mapping[str, Any]:
        steps = values.verl(key)
        return {target: steps if isinstance(steps, int) and steps > 0 else None}

    return Group([key], translate)


def _files(key: str) -> Group:
    def translate(values: Values) -> Mapping[str, Any]:
        given = values.verl(key)
        return {key: [given] if isinstance(given, str) else [] if given is None else given}

    return Group([key], translate)


def _limit(key: str, target: str) -> Group:
    def translate(values: Values) -> Mapping[str, Any]:
        limit = values.verl(key)
        return {target: limit} if isinstance(limit, int) and limit > 0 else {}

    return Group([key], translate)


LOGGERS = ("console", "mlflow", "tensorboard", "wandb")


def _loggers(values: Values) -> Mapping[str, Any]:
    given = values.verl("trainer.logger")
    names: list[Any] = [given] if isinstance(given, str) else list(cast(Sequence[Any], given or []))
    others = [name for name in names if name not in LOGGERS and name not in ("file", "tracking")]
    if others:
        raise ConfigError(f"trainer.logger has {others[0]!r}; choose among {', '.join(LOGGERS)}")
    return {"trainer.logger": [name for name in names if name in LOGGERS]}


def _seed(values: Values) -> Mapping[str, Any]:
    seed = values.verl("data.seed")
    return {} if seed is None else {"data.seed": seed}


def _custom_server(values: Values) -> Mapping[str, Any]:
    key = "agent.custom_async_server"
    path, name = values.verl(f"{R}.{key}.path"), values.verl(f"{R}.{key}.name")
    return {f"rollout.{key}": {"path": path, "name": name}} if path and name else {}


def _over_sample(values: Values) -> Mapping[str, Any]:
    rate = values.verl(f"{R}.over_sample_rate")
    return {"rollout.over_sample": 1 + rate} if rate else {}


ROLLOUT_GROUPS: Sequence[Group] = (
    Group(keys(R, "val_kwargs.do_sample val_kwargs.temperature"), _val_sampling),
    Group([f"{R}.name"], _engine),
    *(_option(option) for option in OPTIONS),
    *(_engine_kwargs(engine) for engine in (*ENGINES, "trtllm")),
    Group(
        [
            *keys("trainer", "n_gpus_per_node nnodes"),
            *keys(R, "data_parallel_size nnodes n_gpus_per_node"),
            *keys("rollout", "nnodes n_gpus_per_node"),
        ],
        _machines,
        ["rollout.engine", "rollout.engine_kwargs", "rollout.free_cache_engine", "trainer.mode", *PARALLEL],
    ),
    Group(
        [key for section in FUNCTIONS for key in keys(section, "path name reward_kwargs")], _reward_function
    ),
    Group(["reward_model.reward_manager", "reward.reward_manager.name"], _reward_manager),
    _every("trainer.save_freq", "trainer.save_every"),
    _every("trainer.test_freq", "trainer.val_every"),
    _files("data.train_files"),
    _files("data.val_files"),
    _limit("data.val_max_samples", "data.val_max_rows"),
    _limit("trainer.total_training_steps", "trainer.total_steps"),
    _limit("trainer.max_actor_ckpt_to_keep", "trainer.keep_checkpoints"),
    Group(["trainer.logger"], _loggers),
    Group(["data.seed"], _seed),
    Group(keys(R, "agent.custom_async_server.path agent.custom_async_server.name"), _custom_server),
    Group([f"{R}.over_sample_rate"], _over_sample),
)
