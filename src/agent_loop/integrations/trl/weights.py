"""From TRL's model to our servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from agent_loop.errors import ConfigError
from agent_loop.training.adapters import merged_parameters

Publish = Callable[[list[tuple[str, Tensor]]], None]


def policy_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """All weights of a model that TRL trains under the names that servers know, LoRA adapters merged.

    Raises:
        ConfigError: The model has other adapters than plain LoRA.
    """
    for name, adapter in getattr(model, "peft_config", {}).items():
        extras = [key for key in ("use_dora", "modules_to_save") if getattr(adapter, key, None)]
        if str(adapter.peft_type).rpartition(".")[2] != "LORA" or extras:
            raise ConfigError(
                f"the adapter {name!r} is {type(adapter).__name__} with {', '.join(extras) or 'no extras'}, which "
                "cannot be merged for the servers; use a LoraConfig without use_dora and modules_to_save"
            )
    return merged_parameters(model.get_base_model() if hasattr(model, "get_base_model") else model)


class AgentLoopWeightTransfer:
    """Implements TRL's `WeightTransferProtocol`: what it sends is published to the servers.

    Servers take new weights between two steps of their engines, with what is in flight, so there is nothing to set up,
    to pause or to resume.
    """

    def __init__(self, publish: Publish) -> None:
        self._publish = publish

    def init_weight_transfer(self) -> None:
        """Nothing to set up."""

    def pause(self) -> None:
        """Nothing to pause."""

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Publishes the weights as the next version.

        Raises:
            WeightsError: They do not fit the servers' model; nothing was changed.
        """
        self._publish(list(iterator))

    def resume(self) -> None:
        """Nothing to resume."""

    def destroy(self) -> None:
        """Nothing to give back."""
