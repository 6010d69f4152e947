"""Inspection of a running vLLM server: what it offers, and whether it fits the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

from agent_loop.errors import BadServerReply, ConfigError
from agent_loop.servers.base import ServerSpec
from agent_loop.servers.http import HttpClient, HttpStatusError
from agent_loop.servers.vllm.logprobs import NUM_TOKENS, LogProbs, identify_logprobs
from agent_loop.servers.vllm.logprobs import num_logprobs as num_logprobs_of
from agent_loop.servers.vllm.options import SUPPORTED, WORKER_EXTENSION
from agent_loop.servers.vllm.replies import cached_tokens, top_tokens
from agent_loop.servers.weight_versions import as_version

GENERATE = "/inference/v1/generate"
PROBE_PROMPT = [1, 2, 3]
PROBE_TIMEOUT_S = 60.0
FOR_WEIGHTS = f"VLLM_SERVER_DEV_MODE=1 in its environment and --worker-extension-cls {WORKER_EXTENSION}"


@dataclass(frozen=True, slots=True)
class RemoteServerInfo:
    """Capabilities of a running server."""

    model: str
    """The server's name for the model."""
    logprobs: LogProbs
    reports_cached_tokens: bool
    workers: Sequence[Mapping[str, Any]]
    """Descriptions of the workers, if the server has our worker extension and vLLM's development mode, which is needed
    to call it. Weights can be published then."""
    weight_version: int = 0
    max_model_len: int | None = None
    """Context length; None if the server does not report it."""


async def inspect_server(http: HttpClient, *, spec: ServerSpec) -> RemoteServerInfo:
    """Find out what a server offers. If the server has our worker extension, switch it to exact log-probs."""
    await _check_version(http, url=http.url)
    model, max_model_len = await _find_model(http, spec=spec)
    workers: list[dict[str, Any]] = []
    version = 0
    if await _has_extension(http):
        workers = await prepare_workers(http)
        info = await http.get_json("/weight_info", timeout_s=PROBE_TIMEOUT_S)
        with http.validating("/weight_info"):
            version = as_version(info.get("weight_version"))
        await set_weight_version(http, version)
    num_logprobs = max(NUM_TOKENS, num_logprobs_of(spec.sampling))
    plain = await _probe(http, model=model, num_logprobs=num_logprobs, temperature=1.0, top_k=-1)
    hot_top_1 = await _probe(http, model=model, num_logprobs=num_logprobs, temperature=2.0, top_k=1)
    with http.validating(GENERATE):
        found = [
            dict(top_tokens(reply["choices"][0]["logprobs"]["content"][0])) for reply in (plain, hot_top_1)
        ]
    return RemoteServerInfo(
        model=model,
        logprobs=identify_logprobs(*found),
        reports_cached_tokens=cached_tokens(plain) is not None,
        workers=workers,
        weight_version=version,
        max_model_len=max_model_len,
    )


async def prepare_workers(http: HttpClient) -> list[dict[str, Any]]:
    """Switch workers with our extension to exact log-probs, and return their descriptions."""
    for result in await _call_workers(http, "agent_loop_scale_logprobs"):
        if "error" in result:
            raise ConfigError(f"vLLM cannot return exact log-probs: {result['error']}")
    return await _call_workers(http, "agent_loop_hello")


async def set_weight_version(http: HttpClient, version: int) -> None:
    """Set the weight version that the engine records for each token that it samples from now on."""
    await http.post_json("/update_weight_version", {"new_version": str(version)}, timeout_s=PROBE_TIMEOUT_S)


async def _check_version(http: HttpClient, *, url: str) -> None:
    try:
        version = str((await http.get_json("/version", timeout_s=PROBE_TIMEOUT_S))["version"])
        is_supported = SpecifierSet(SUPPORTED, prereleases=True).contains(version)
    except (HttpStatusError, BadServerReply, InvalidVersion, KeyError, TypeError) as error:
        raise ConfigError(
            f"{url} does not report a version of vLLM ({error}); give the URL of a vLLM server, without /v1"
        ) from error
    if not is_supported:
        raise ConfigError(
            f"{url} runs vLLM {version}, but only {SUPPORTED} is supported; install that version there"
        )


async def _find_model(http: HttpClient, *, spec: ServerSpec) -> tuple[str, int | None]:
    """Return the server's name for the model, and its context length if the server reports it."""
    reply = await http.get_json("/v1/models", timeout_s=PROBE_TIMEOUT_S)
    with http.validating("/v1/models"):
        served = [dict[str, Any](entry) for entry in reply["data"]]
    wanted = spec.engine_kwargs.get("served_model_name")
    base = PurePath(spec.model.path).name
    for entry in served:
        names = (str(entry.get("id")), str(entry.get("root")))
        if wanted in names or (wanted is None and base in [PurePath(name).name for name in names]):
            longest = entry.get("max_model_len")
            if longest is not None and int(longest) < spec.max_model_len:
                raise ConfigError(
                    f"{http.url} accepts contexts of {longest} tokens, but rollout.prompt_length and "
                    f"rollout.response_length add up to {spec.max_model_len}; start it with --max-model-len "
                    f"{spec.max_model_len}, or lower them"
                )
            return names[0], None if longest is None else int(longest)
    have = ", ".join(repr(entry.get("id")) for entry in served)
    raise ConfigError(
        f"{http.url} serves {have}, not {wanted or base!r}; start it with the model in model.path, or, if it is the "
        "same model under another name, set rollout.engine_kwargs.served_model_name to that name"
    )


async def _has_extension(http: HttpClient) -> bool:
    """Return whether our worker extension is loaded and can be called.

    The workers are not asked, because an engine dies if they are called with an unknown method.
    """
    try:
        info = await http.get_json("/server_info?config_format=json", timeout_s=PROBE_TIMEOUT_S)
        return info["vllm_config"]["parallel_config"]["worker_extension_cls"] == WORKER_EXTENSION
    except (HttpStatusError, BadServerReply, KeyError, TypeError):
        return False  # vLLM without its development mode has no such page


async def _call_workers(http: HttpClient, method: str) -> list[dict[str, Any]]:
    reply = await http.post_json("/collective_rpc", {"method": method}, timeout_s=PROBE_TIMEOUT_S)
    with http.validating("/collective_rpc"):
        return [dict[str, Any](result) for result in reply["results"]]


async def _probe(
    http: HttpClient, *, model: str, num_logprobs: int, temperature: float, top_k: int
) -> dict[str, Any]:
    body = {
        "model": model,
        "token_ids": PROBE_PROMPT,
        "sampling_params": {
            "temperature": temperature,
            "top_k": top_k,
            "max_tokens": 1,
            "seed": 0,
            "logprobs": num_logprobs,
            "ignore_eos": True,
        },
    }
    try:
        return await http.post_json(GENERATE, body, request_id="probe", timeout_s=PROBE_TIMEOUT_S)
    except HttpStatusError as error:
        if error.status == 400 and num_logprobs > NUM_TOKENS:
            raise ConfigError(
                f"{http.url} does not return {num_logprobs} log-probs per token ({error}); start it with "
                f"--max-logprobs {num_logprobs}, or lower the number that the rollout asks for"
            ) from error
        if error.status != 404:
            raise
        raise ConfigError(
            f"{http.url} has no {GENERATE}, the endpoint for token ids; start it with --enable-scale-out"
        ) from error
