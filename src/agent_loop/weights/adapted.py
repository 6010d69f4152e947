"""Weights of a model with low-rank adapters: constant base weights, and the factors of the adapters.

The base is sent to each receiver once. Later updates contain only the factors, which the receiver merges into its base.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, NamedTuple

from agent_loop.errors import WeightsError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MERGE_BLOCK_ELEMENTS = 1 << 20
"""Number of elements that are merged at once. 4 MB in float32 fit the CPU cache, and the free memory of a GPU with an
engine. Merging whole matrices took six times as long, because of fresh memory pages."""
LEFT, RIGHT = "left.", "right."


class Factors(NamedTuple):
    """Factors of an adapter, which adds `left_OR @ right_RI` to a weight of shape [O, I]. Both are contiguous
    float32."""

    left_OR: Tensor
    right_RI: Tensor


class AdaptedWeights(Iterable[tuple[str, "Tensor"]], Sized):
    """Base weights and adapters. Iterating yields the full, merged weights, as for weights without adapters."""

    def __init__(self, base: Mapping[str, Tensor], *, base_id: str, factors: Mapping[str, Factors]) -> None:
        """Combine a base and factors.

        Args:
            base: Weights in the dtype of the servers. They must not change afterwards.
            base_id: Identifies the base: equal for equal tensors, different for different ones.
            factors: Factors of the weights that have an adapter.
        """
        for name, (left_OR, right_RI) in factors.items():
            found = None if name not in base else tuple(base[name].shape)
            product = (*left_OR.shape[:1], *right_RI.shape[1:])
            if found != product or left_OR.shape[1:] != right_RI.shape[:1]:
                raise WeightsError(
                    f"the adapter of weight {name!r} adds {tuple(left_OR.shape)} times {tuple(right_RI.shape)}, but "
                    f"the base has {found or 'no such weight'} there; publish the adapters of this base"
                )
        self.base = base
        self.base_id = base_id
        self.factors = factors
        some = next((each.left_OR for each in factors.values()), next(iter(base.values()), None))
        self.device: torch.device | None = None if some is None else some.device
        """Device of the merged weights, which is that of the factors. None if there are no weights."""

    def merged(self, name: str) -> Tensor:
        """Return a merged weight, or the base weight if it has no adapter."""
        if name in self.factors:
            return merge(self.base[name], self.factors[name])
        return self.base[name].to(self.device)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.base:
            yield name, self.merged(name)

    def __len__(self) -> int:
        return len(self.base)

    def to_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the factors under the names of their weights, with the prefix `left.` or `right.`."""
        for name, factors in self.factors.items():
            yield LEFT + name, factors.left_OR
            yield RIGHT + name, factors.right_RI

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], *, base: Mapping[str, Tensor], base_id: str
    ) -> AdaptedWeights:
        """Create adapted weights from the tensors of `to_tensors`."""
        names = [key.removeprefix(LEFT) for key in tensors if key.startswith(LEFT)]
        factors = {name: Factors(tensors[LEFT + name], tensors[RIGHT + name]) for name in names}
        return cls(base, base_id=base_id, factors=factors)


def merge(base_OI: Tensor, factors: Factors) -> Tensor:
    """Return a weight with its adapter merged, in the dtype of the weight and on the device of the factors.

    The sum is computed in float32. The same tensors give the same bits on the same type of device.
    """
    base_OI, left_OR, right_RI = base_OI.detach(), factors.left_OR.detach(), factors.right_RI.detach()
    merged_OI = base_OI.new_empty(base_OI.shape, device=left_OR.device)
    num_rows = max(1, MERGE_BLOCK_ELEMENTS // max(1, base_OI.shape[1]))
    buffer = left_OR.new_empty(min(num_rows, len(base_OI)), base_OI.shape[1])
    for start in range(0, len(base_OI), num_rows):
        rows = slice(start, start + num_rows)
        part = buffer[: len(base_OI[rows])].copy_(base_OI[rows])
        merged_OI[rows] = part.addmm_(left_OR[rows], right_RI)
    return merged_OI
