"""Choice of the transport for weight updates."""

from __future__ import annotations

from agent_loop.config import WeightTransfer
from agent_loop.errors import ConfigError
from agent_loop.weights.handle import Transport


def choose_transport(configured: WeightTransfer, *, weights_on_gpu: bool, same_host: bool) -> Transport:
    """Return the transport for a value of `rollout.weight_transfer`.

    Args:
        configured: `auto`, or a transport.
        weights_on_gpu: Whether the trainer's weights are on a GPU.
        same_host: Whether this run started the engine on this machine, so that it shares memory and devices with the
            trainer. False for a server that was already running.

    Raises:
        ConfigError: The configured transport cannot work here.
    """
    if configured == "auto":
        if not same_host:
            return "disk"
        return "cuda_ipc" if weights_on_gpu else "shared_memory"
    if configured == "cuda_ipc" and not weights_on_gpu:
        raise ConfigError(
            "rollout.weight_transfer is cuda_ipc, but the weights are not on a GPU; set shared_memory or auto"
        )
    if configured in ("cuda_ipc", "shared_memory") and not same_host:
        raise ConfigError(
            f"rollout.weight_transfer is {configured}, but the server was not started by this run and may be on "
            "another machine; set disk, broadcast or auto"
        )
    return configured
