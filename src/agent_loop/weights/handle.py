"""Handle of an offer of weights: the tensors, and where receivers find them."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

import msgspec

from agent_loop.errors import WeightsError

Transport = Literal["shared_memory", "cuda_ipc", "broadcast", "disk"]
Count = Annotated[int, msgspec.Meta(ge=0)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of an offer."""

    name: str
    dtype: str
    """Torch's name of the dtype."""
    shape: tuple[Count, ...]
    item_bytes: Count
    """Bytes of one element."""
    bucket: Count
    """Index of the block, file or message that holds the tensor."""
    offset: Count
    """Offset of the first byte in the bucket; 0 if tensors are found by name."""
    checksum: Count
    """See `agent_loop.weights.tensors.checksum`. The receiver verifies it before it returns a tensor."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


class WeightHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Handle of one offer. Its JSON has about 100 bytes per tensor."""

    transport: Transport
    weight_version: Count
    tensors: tuple[TensorSpec, ...]
    """Tensors in the order in which they were given to the sender. Names are unique."""
    source: dict[str, Any]
    """Where the bytes are. The keys depend on the transport."""
    base: WeightHandle | None = None
    """Handle of the base weights if the tensors are factors of adapters (see `agent_loop.weights.adapted`). It stays
    open while offers refer to it, for receivers that do not have the base yet."""
    base_id: str = ""
    """Identifies the base. A receiver that has this base does not read it again."""

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> WeightHandle:
        """Parse a handle that `to_json` wrote."""
        try:
            return msgspec.json.decode(text, type=WeightHandle)
        except msgspec.DecodeError as error:
            raise WeightsError(
                f"this is not a weight handle: {error}; pass on the result of WeightHandle.to_json() unchanged, and "
                "use the same version of agent-loop on both sides"
            ) from None
