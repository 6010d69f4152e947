"""Options of vLLM: `rollout.engine_kwargs`, and those that this project sets; and the process that runs with them."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_loop.errors import ConfigError
from agent_loop.servers.base import ServerSpec, refuse_unknown_options
from agent_loop.servers.process import end_with_children, import_engine, refuse_option
from agent_loop.servers.vllm.logprobs import num_logprobs

PACKAGE = "vllm"
SUPPORTED = ">=0.32,<0.33"
"""All tests ran with 0.32.0. Earlier versions cannot keep requests during a pause, and record no weight version per
token."""
WORKER_EXTENSION = "agent_loop.servers.vllm.worker.WeightWorker"
LOG_PROBS_MODE = "processed_logprobs"
"""Mode in which the sampler returns the log-probs of the stage that the worker extension replaces."""

REFUSED: Mapping[str, str] = {
    "speculative_config": "log-probs of accepted drafts are not those of the model",
    "kv_transfer_config": "its cache is not emptied by a weight update",
    "data_parallel_size": "set rollout.num_servers instead",
    "enable_lora": "adapters are merged into the weights when they are loaded",
    "api_key": "only this run can reach the server",
    "served_model_name": "only this run can reach the server",
}
"""Options that would break the guarantees of servers, and why."""


def engine_options(spec: ServerSpec) -> dict[str, Any]:
    """Return the options of `vllm serve`: the user's options and the required ones."""
    ours: dict[str, Any] = {
        "model": spec.model.path,
        "trust_remote_code": spec.model.trust_remote_code,
        "dtype": spec.model.dtype,
        "max_model_len": spec.max_model_len,
        "seed": spec.seed,
        "logprobs_mode": LOG_PROBS_MODE,
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_prefix_caching": True,
        "enable_scale_out": True,  # the endpoint for token ids
        "enable_prompt_tokens_details": True,
    }
    if spec.tensor_parallel_size > 1:
        ours["tensor_parallel_size"] = spec.tensor_parallel_size
    needed = num_logprobs(spec.sampling)
    if 0 <= spec.engine_kwargs.get("max_logprobs", -1) < needed:
        ours["max_logprobs"] = needed
    set_by = {
        "model": "model.path",
        "trust_remote_code": "model.trust_remote_code",
        "dtype": "model.dtype",
        "max_model_len": "rollout.prompt_length and rollout.response_length",
        "seed": "rollout.seed",
        "tensor_parallel_size": "placement.tensor_parallel_size",
    }
    for key, value in spec.engine_kwargs.items():
        if key in REFUSED:
            raise ConfigError(f"rollout.engine_kwargs.{key} is not supported: {REFUSED[key]}; leave it out")
        if key in ours and value != ours[key]:
            raise ConfigError(
                f"rollout.engine_kwargs.{key} is {value!r}, but "
                + (
                    f"{set_by[key]} makes it {ours[key]!r}; set that instead"
                    if key in set_by
                    else f"this server needs {ours[key]!r}; leave it out"
                )
            )
    defaults: dict[str, Any] = {
        "max_logprobs": -1,  # no limit, for teachers; vLLM's own limit protects servers of strangers
        "tokenizer": spec.model.tokenizer_path,  # only for grammars
        "disable_uvicorn_access_log": True,
        # The other backends do not know the stop tokens of requests.
        "structured_outputs_config": {"backend": "xgrammar"},
    }
    if spec.shares_devices:
        defaults["enable_sleep_mode"] = True
    return {**defaults, **ours, **spec.engine_kwargs}


def main(options_file: str) -> None:
    """Run vLLM's HTTP server until the process is terminated. Called in the process of `VLLMServer`."""
    options: dict[str, Any] = json.loads(Path(options_file).read_text(encoding="utf-8"))
    parsing, entry, cli_args = (
        import_engine(name, package=PACKAGE, supported=SUPPORTED)
        for name in (
            "vllm.utils.argparse_utils",
            "vllm.entrypoints.launchers.api_server.entry",
            "vllm.entrypoints.launchers.cli_args",
        )
    )
    try:
        parser: Any = cli_args.make_arg_parser(parsing.FlexibleArgumentParser())
        defaults: Namespace = parser.parse_args([])
        refuse_unknown_options(options, known=vars(defaults))
        nested = [key for key, value in options.items() if isinstance(value, dict)]
        # Parsed, so that they become vLLM's own types.
        texts = [f"--{key.replace('_', '-')}={json.dumps(options.pop(key))}" for key in nested]
        args: Namespace = parser.parse_args(texts)
        vars(args).update(options)
        cli_args.validate_parsed_serve_args(args)
        end_with_children()
        asyncio.run(entry.run_server(args))
    except (ConfigError, ValueError, TypeError) as error:
        refuse_option(error)
