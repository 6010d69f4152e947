"""Weights of a model with low-rank adapters: a base that stays as it is, and what adapters add to it.

The base travels once to each receiver. From then on an update is the factors alone, which the receiver merges into the
base that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, NamedTuple

from agent_loop.errors import WeightsError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MERGED_AT_ONCE = 1 << 20
"""Elements: 4 MB in float32, which fits the cache, and a GPU that an engine has filled. Whole matrices took six times
as long, most of it for fresh pages from the kernel."""
LEFT, RIGHT = "left.", "right."


class Factors(NamedTuple):
    """What is added to a weight of shape [O, I] is `left_OR @ right_RI`. Both are contiguous float32."""

    left_OR: Tensor
    right_RI: Tensor


class AdaptedWeights(Iterable[tuple[str, "Tensor"]], Sized):
    """Iterating gives full, merged weights, one after the other: whoever takes weights can take these."""

    def __init__(self, base: Mapping[str, Tensor], *, base_id: str, factors: Mapping[str, Factors]) -> None:
        """Args:
        base: In the dtype in which servers get them. Nobody writes to them any more.
        base_id: Another one for another base; the same as long as these tensors are the same.
        factors: Of those weights that have an adapter.

        Raises:
            WeightsError: Factors do not fit the weights that they are for.
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
        """Where merged weights are: with the factors. None if there is nothing."""

    def merged(self, name: str) -> Tensor:
        """One weight; the base's own if it has no adapter."""
        if name in self.factors:
            return merge(self.base[name], self.factors[name])
        return self.base[name].to(self.device)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.base:
            yield name, self.merged(name)

    def __len__(self) -> int:
        return len(self.base)

    def to_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What an update is, under names that tell which is which."""
        for name, factors in self.factors.items():
            yield LEFT + name, factors.left_OR
            yield RIGHT + name, factors.right_RI

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], *, base: Mapping[str, Tensor], base_id: str
    ) -> AdaptedWeights:
        """Puts together what `to_tensors` took apart.

        Raises:
            WeightsError: They are something else, or do not fit the base.
        """
        names = [key.removeprefix(LEFT) for key in tensors if key.startswith(LEFT)]
        if set(tensors) != {side + name for name in names for side in (LEFT, RIGHT)}:
            raise WeightsError("these are no factors of adapters: some lack the other half; publish again")
        factors = {name: Factors(tensors[LEFT + name], tensors[RIGHT + name]) for name in names}
        return cls(base, base_id=base_id, factors=factors)


def merge(base_OI: Tensor, factors: Factors) -> Tensor:
    """A weight with what its adapter adds, in the weight's dtype; the sum is computed in float32, where the factors
    are. On the same kind of device the same tensors give the same bits."""
    base_OI, left_OR, right_RI = base_OI.detach(), factors.left_OR.detach(), factors.right_RI.detach()
    merged_OI = base_OI.new_empty(base_OI.shape, device=left_OR.device)
    num_rows = max(1, MERGED_AT_ONCE // max(1, base_OI.shape[1]))
    buffer = left_OR.new_empty(min(num_rows, len(base_OI)), base_OI.shape[1])
    for start in range(0, len(base_OI), num_rows):
        rows = slice(start, start + num_rows)
        part = buffer[: len(base_OI[rows])].copy_(base_OI[rows])
        merged_OI[rows] = part.addmm_(left_OR[rows], right_RI)
    return merged_OI
