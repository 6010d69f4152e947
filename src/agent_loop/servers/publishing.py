"""Server side of a weight update: checks the published weights, and offers them to the engine's processes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from agent_loop.config import ModelConfig, WeightTransfer
from agent_loop.errors import WeightsError
from agent_loop.weights.adapted import AdaptedWeights
from agent_loop.weights.expected import check_weights, expected_weights, tied_weights
from agent_loop.weights.handle import WeightHandle
from agent_loop.weights.sender import WeightSender, choose_transport
from agent_loop.weights.shared import adapted_weights, offered


class WeightPublisher:
    """Publisher of weights that fit the model. Other weights are rejected before the engine sees them.

    Engines silently keep the weights that an update lacks. They also fuse weights, so that their own tensors do not
    show which names they expect. The expected names and shapes are read from the headers of the model's files.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        transfer: WeightTransfer,
        is_same_host: bool,
        num_receivers: int,
        folder: Path | None = None,
        as_checkpoints: bool = False,
    ) -> None:
        """Create a publisher for one engine.

        Args:
            model: Model whose weights are published.
            transfer: Value of `rollout.weight_transfer`.
            is_same_host: Whether the engine runs on this machine.
            num_receivers: Number of the engine's ranks.
            folder: Folder of weights that are transferred by disk; None uses a temporary folder.
            as_checkpoints: Whether the engine itself loads weights from disk, as a model folder.
        """
        self._model = model
        self._transfer: WeightTransfer = transfer
        self._is_same_host = is_same_host
        self._num_receivers = num_receivers
        self._folder = folder
        self._as_checkpoints = as_checkpoints
        self._expected: dict[str, tuple[int, ...]] | None = None
        self._tied: tuple[tuple[str, ...], ...] = ()
        self._model_folder: Path | None = None
        self._sender: WeightSender | None = None

    @asynccontextmanager
    async def offer(
        self, weights: Iterable[tuple[str, Tensor]], *, weight_version: int
    ) -> AsyncGenerator[WeightHandle]:
        """Make the weights available to the engine's processes while the context is open.

        Args:
            weights: Weights from `AsyncServerBase.update_weights`. For `AdaptedWeights`, the base is checked.
        """
        if iter(weights) is weights:
            weights = list(weights)
        adapted = adapted_weights(weights)
        tensors = dict(weights if adapted is None else adapted.base.items())
        self._check(tensors, adapted)
        transport = choose_transport(
            self._transfer,
            weights_on_gpu=any(weight.is_cuda for weight in tensors.values()) or self._merges_on_gpu(adapted),
            same_host=self._is_same_host,
        )
        if self._sender is None or self._sender.transport != transport:
            self.close()
            self._sender = WeightSender(
                transport,
                num_receivers=self._num_receivers,
                like=self._model_folder if self._as_checkpoints else None,
                folder=self._folder,
            )
        if new_names := self._embeddings(tensors):
            weights = [(new_names.get(name, name), weight) for name, weight in weights]
        async with offered(weights, sender=self._sender, weight_version=weight_version) as handle:
            yield handle

    def close(self) -> None:
        """Free the resources of all offers."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _merges_on_gpu(self, adapted: AdaptedWeights | None) -> bool:
        """Return whether a base in host memory is merged on a GPU, for an engine that reads GPU memory."""
        device = None if adapted is None else adapted.device
        return self._transfer == "cuda_ipc" and device is not None and device.type == "cuda"

    def _check(self, weights: Mapping[str, Tensor], adapted: AdaptedWeights | None) -> None:
        if self._expected is None:
            folder = local_folder(self._model)
            if folder is None:
                raise WeightsError(
                    f"model.path is {self._model.path!r}, whose files are not on this machine, so that what is "
                    "published cannot be checked; download the model and give its folder"
                )
            self._expected, self._tied = expected_weights(folder), tied_weights(folder)
            self._model_folder = folder
        value_of = None if adapted is None else adapted.merged
        check_weights(self._expected, weights, tied=self._tied, value_of=value_of)

    def _embeddings(self, names: Collection[str]) -> dict[str, str]:
        """Return the names by which engines load tied weights, for those published under another name."""
        return {
            name: group[0] for group in self._tied if group[0] not in names for name in group if name in names
        }


def local_folder(model: ModelConfig) -> Path | None:
    """Return the folder of the model's files on this machine, or None for a hub name that was not downloaded."""
    if Path(model.path).is_dir():
        return Path(model.path)
    import huggingface_hub  # late: only hub names need it
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(cast(Any, huggingface_hub).snapshot_download(model.path, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
