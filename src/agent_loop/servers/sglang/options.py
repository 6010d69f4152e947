"""Options and environment variables that an engine is started with, and its process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from agent_loop.errors import ConfigError
from agent_loop.servers.base import ServerSpec, refuse_unknown_options
from agent_loop.servers.process import end_with_children, import_engine, refuse_option, require_version
from agent_loop.servers.sglang import loader

SUPPORTED = ">=0.5.23,<0.5.24"
"""Tested with 0.5.23. Earlier versions report no weight versions of tokens. Later versions are not tested."""
CONTEXT_MARGIN = 8
"""Tokens of its context that SGLang reserves: prompts end 6 tokens before its end, completions 2 tokens."""

SET_BY: Mapping[str, str] = {
    "model_path": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "context_length": "rollout.prompt_length and rollout.response_length",
    "random_seed": "rollout.seed",
    "device": "model.device",
    "dtype": "model.dtype",
}
"""Options that are set by other keys of the configuration, and those keys."""
FIXED = ("incremental_streaming_output", "weight_version", "tokenizer_worker_num", "host", "port", "api_key")
"""Options that have a required value."""


def engine_options(spec: ServerSpec) -> dict[str, Any]:
    """Return fields of SGLang's `ServerArgs`."""
    require_version("sglang", supported=SUPPORTED)
    given = dict(spec.engine_kwargs)
    for key in given:
        if key in SET_BY:
            raise ConfigError(f"rollout.engine_kwargs.{key} is set by {SET_BY[key]}; set it there")
        if key in FIXED:
            raise ConfigError(
                f"rollout.engine_kwargs.{key} cannot be set: the server depends on it; leave it out"
            )
    fields = import_engine("sglang.srt.arg_groups.field_order", package="sglang", supported=SUPPORTED)
    known = [str(name) for name in fields.POSITIONAL_FIELD_ORDER]
    refuse_unknown_options(given, known=known)
    if int(given.get("dp_size") or 1) > 1:
        raise ConfigError(
            "rollout.engine_kwargs.dp_size is above 1, but SGLang cannot update the weights of such an engine; set "
            "rollout.num_servers instead"
        )
    loaders: Any = given.pop("custom_weight_loader", None) or []
    options: dict[str, Any] = {
        "log_level": "warning",
        "skip_tokenizer_init": True,  # only grammars need a tokenizer
        "tokenizer_path": spec.model.tokenizer_path,
        **_sleep_options(spec),
        **given,
        "custom_weight_loader": [*([loaders] if isinstance(loaders, str) else loaders), loader.NAME],
        "model_path": spec.model.path,
        "trust_remote_code": spec.model.trust_remote_code,
        "context_length": spec.max_model_len + CONTEXT_MARGIN,
        "random_seed": spec.seed,
        "dtype": spec.model.dtype,
        "incremental_streaming_output": True,
        "weight_version": "0",
        "skip_server_warmup": True,
    }
    if spec.tensor_parallel_size > 1:
        options["tp_size"] = spec.tensor_parallel_size
    if spec.model.device != "auto":
        options["device"] = spec.model.device
    return options


def engine_environment(spec: ServerSpec) -> dict[str, str]:
    """Return the environment variables that SGLang needs in addition to those of this process."""
    # The margin may exceed the positions of a model whose whole context is used. No token is placed there.
    environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    if spec.model.device == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    return environment


def _sleep_options(spec: ServerSpec) -> dict[str, Any]:
    """Return the options for `sleep`. Releasing memory needs an allocator that exists for GPUs only."""
    if spec.model.device == "cpu" or not torch.cuda.is_available():
        return {}
    return {"enable_memory_saver": True, "enable_weights_cpu_backup": True}


def main(options_file: str) -> None:
    """Run SGLang's HTTP server until the process is terminated. Called in the process of `SGLangServer`."""
    options = json.loads(Path(options_file).read_text(encoding="utf-8"))
    launch = import_engine("sglang.launch_server", package="sglang", supported=SUPPORTED)
    arguments = import_engine("sglang.srt.server_args", package="sglang", supported=SUPPORTED)
    try:
        server_args = arguments.ServerArgs(**options)
    except (TypeError, ValueError, AssertionError) as error:
        refuse_option(error)
    end_with_children()
    launch.run_server(server_args)
