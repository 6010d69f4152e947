"""Chooses how the engine computes a model: the fastest way that is proved exact."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.computation import CacheKind, Computation
from agent_loop.servers.embedded.config import EmbeddedConfig
from agent_loop.servers.embedded.request import RequestLimits
from agent_loop.servers.embedded.request_caches import RequestCaches
from agent_loop.servers.embedded.runner import ModelRunner
from agent_loop.servers.embedded.shared_cache import SharedCache
from agent_loop.servers.embedded.verify import prepare_verification

logger = logging.getLogger(__name__)


class _Way(NamedTuple):
    kind: CacheKind
    name: str
    build: Callable[[], Computation]


def choose_computation(runner: ModelRunner, *, config: EmbeddedConfig, limits: RequestLimits) -> Computation:
    """Return the first computation, from the fastest to the slowest, whose log-probs equal a plain forward's.

    `config.cache` leaves only one kind to choose from. With `config.verify` off nothing is proved.

    Raises:
        ConfigError: No computation is exact for this model, or its forward cannot be trained on.
    """
    verification = prepare_verification(runner, limits=limits) if config.verify else None
    reasons: dict[str, str] = {}
    for way in _ways(runner, config=config):
        try:
            computation = way.build()
            if verification is not None:
                verification.check(computation, limits=limits)
        except Exception as error:  # noqa: BLE001  (the model's code, which is not ours)
            runner.restore_attention()
            reasons[way.name] = (
                str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            )
            continue
        computation.forget_idle()
        if reasons:
            _log_slower_way(way, runner=runner, server=limits.server, reasons=reasons)
        return computation
    details = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ConfigError(
        f"{type(runner.model).__name__} is not supported by the embedded server ({details}); use another server"
    )


def _ways(runner: ModelRunner, *, config: EmbeddedConfig) -> list[_Way]:
    def per_request(kind: CacheKind, *, resumes_turns: bool) -> Callable[[], Computation]:
        return lambda: RequestCaches(runner, config=config, kind=kind, resumes_turns=resumes_turns)

    ways = [
        _Way("shared", "one cache for all requests", lambda: SharedCache(runner, config=config)),
        _Way("per_request", "a cache per request", per_request("per_request", resumes_turns=True)),
        _Way("per_request", "a cache per completion", per_request("per_request", resumes_turns=False)),
        _Way("none", "no cache", per_request("none", resumes_turns=False)),
    ]
    if config.deterministic:
        ways = ways[2:]  # a shared or resumed cache was computed in another order each time
    return [way for way in ways if config.cache in ("auto", way.kind)]


def _log_slower_way(way: _Way, *, runner: ModelRunner, server: str, reasons: dict[str, str]) -> None:
    logger.warning(
        "server %s: %s runs one request at a time with %s, which is slower with many requests (%s)",
        server,
        type(runner.model).__name__,
        way.name,
        "; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
    )
