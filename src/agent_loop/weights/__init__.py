"""Transfer of new weights from a trainer to engine processes.

    with WeightSender("shared_memory") as sender:                     # trainer; long-lived
        with sender.offer(weights, weight_version=7) as handle:
            control_channel.send(handle.to_json())                    # returns when all receivers are done

    with WeightReceiver() as receiver:                                # engine's process; long-lived
        for name, tensor in receiver.receive(handle_json): ...

Weights are names and tensors, or `AdaptedWeights`, whose base is sent once and whose updates are small.

A handle is a short text for the engine's control channel; the transport carries the tensors.
"""
