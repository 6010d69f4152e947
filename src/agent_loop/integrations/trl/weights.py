"""Transfer of weights from TRL's model to the servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from agent_loop.errors import ConfigError
from agent_loop.training.adapters import merged_parameters

Publish = Callable[[list[tuple[str, Tensor]]], None]


def policy_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Return all weights of a model that TRL trains, with LoRA adapters merged and under the names of the servers.

    Raises:
        ConfigError: The model has adapters other than plain LoRA.
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
    """Implementation of TRL's `WeightTransferProtocol` that publishes weights to the servers.

    Servers load new weights between two engine steps while requests are in flight. So `init_weight_transfer`, `pause`,
    `resume` and `destroy` do nothing.
    """

    def __init__(self, publish: Publish) -> None:
        self._publish = publish

    def init_weight_transfer(self) -> None:
        """Do nothing: no setup is needed."""

    def pause(self) -> None:
        """Do nothing: servers load weights while requests are in flight."""

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Publish the weights as the next version.

        Raises:
            WeightsError: The weights do not fit the servers' model; nothing was changed.
        """
        self._publish(list(iterator))

    def resume(self) -> None:
        """Do nothing: `pause` does not pause."""

    def destroy(self) -> None:
        """Do nothing: no resources are held."""
