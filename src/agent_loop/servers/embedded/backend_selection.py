"""Selection of the fastest backend that computes a model exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.backend import CacheKind, ComputationBackend
from agent_loop.servers.embedded.config import EmbeddedConfig
from agent_loop.servers.embedded.per_request_backend import PerRequestBackend
from agent_loop.servers.embedded.request import EngineLimits
from agent_loop.servers.embedded.runner import ModelRunner
from agent_loop.servers.embedded.shared_cache_backend import SharedCacheBackend
from agent_loop.servers.embedded.verify import prepare_verification

logger = logging.getLogger(__name__)


class _BackendOption(NamedTuple):
    kind: CacheKind
    name: str
    build: Callable[[], ComputationBackend]


def choose_backend(
    runner: ModelRunner, *, config: EmbeddedConfig, limits: EngineLimits
) -> ComputationBackend:
    """Return the fastest backend whose log-probs equal those of a plain forward.

    `config.cache` restricts the choice to one kind. No log-probs are compared if `config.verify` is off.

    Raises:
        ConfigError: No backend is exact for this model, or the model cannot be trained with its plain forward.
    """
    verification = prepare_verification(runner, limits=limits) if config.verify else None
    reasons: dict[str, str] = {}
    for option in _options(runner, config=config):
        try:
            backend = option.build()
            if verification is not None:
                verification.check(backend, limits=limits)
        except Exception as error:  # noqa: BLE001  (the model's code may raise anything)
            runner.restore_attention()
            reasons[option.name] = (
                str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            )
            continue
        backend.drop_idle()
        if reasons:
            _log_slower_backend(option, runner=runner, server=limits.server, reasons=reasons)
        return backend
    details = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ConfigError(
        f"{type(runner.model).__name__} is not supported by the embedded server ({details}); use another server"
    )


def _options(runner: ModelRunner, *, config: EmbeddedConfig) -> list[_BackendOption]:
    """Return the backends that the configuration allows, fastest first."""

    def per_request(kind: CacheKind, *, resumes_turns: bool) -> Callable[[], ComputationBackend]:
        return lambda: PerRequestBackend(runner, config=config, kind=kind, resumes_turns=resumes_turns)

    options = [
        _BackendOption(
            "shared", "one cache for all requests", lambda: SharedCacheBackend(runner, config=config)
        ),
        _BackendOption("per_request", "a cache per request", per_request("per_request", resumes_turns=True)),
        _BackendOption(
            "per_request", "a cache per completion", per_request("per_request", resumes_turns=False)
        ),
        _BackendOption("none", "no cache", per_request("none", resumes_turns=False)),
    ]
    if config.deterministic:
        options = options[2:]  # a shared or resumed cache is computed in a different order each time
    return [option for option in options if config.cache in ("auto", option.kind)]


def _log_slower_backend(
    option: _BackendOption, *, runner: ModelRunner, server: str, reasons: dict[str, str]
) -> None:
    logger.warning(
        "server %s: %s runs one request at a time with %s, which is slower with many requests (%s)",
        server,
        type(runner.model).__name__,
        option.name,
        "; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
    )
