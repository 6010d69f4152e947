"""Transfer of new weights from a trainer to engine processes.

    with WeightSender("shared_memory") as sender:                     # trainer; long-lived
        with sender.offer(weights, weight_version=7) as handle:
            control_channel.send(handle.to_json())                    # returns when all receivers are done

    with WeightReceiver() as receiver:                                # engine's process; long-lived
        for name, tensor in receiver.receive(handle_json): ...

Weights are names and tensors, or `AdaptedWeights`, whose base is sent once and whose updates are small.

A handle is a short text for the engine's control channel; the transport carries the tensors. Each public name is
imported at its first use, so that code that only passes weights on does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_loop.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agent_loop.weights.adapted import AdaptedWeights, Factors
    from agent_loop.weights.expected import check_weights, expected_weights, tied_weights
    from agent_loop.weights.handle import TensorSpec, WeightHandle
    from agent_loop.weights.receiver import WeightReceiver
    from agent_loop.weights.sender import WeightSender, choose_transport
    from agent_loop.weights.shared import SharedWeights, adapted_weights, offered

__all__ = [
    "AdaptedWeights",
    "Factors",
    "SharedWeights",
    "TensorSpec",
    "WeightHandle",
    "WeightReceiver",
    "WeightSender",
    "adapted_weights",
    "check_weights",
    "choose_transport",
    "expected_weights",
    "offered",
    "tied_weights",
]

_MODULE_OF = {
    "AdaptedWeights": "adapted",
    "Factors": "adapted",
    "SharedWeights": "shared",
    "TensorSpec": "handle",
    "WeightHandle": "handle",
    "WeightReceiver": "receiver",
    "WeightSender": "sender",
    "adapted_weights": "shared",
    "check_weights": "expected",
    "choose_transport": "sender",
    "expected_weights": "expected",
    "offered": "shared",
    "tied_weights": "expected",
}


__getattr__ = lazy_exports(__name__, _MODULE_OF)
