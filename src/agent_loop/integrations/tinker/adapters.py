"""Training of low-rank adapters: many over the weights of one base model, each with its own optimiser.

B rows, R positions, K targets of a position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch
from msgspec import Struct, json
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from agent_loop.config import ModelConfig
from agent_loop.config.training import OptimConfig
from agent_loop.errors import CheckpointError, ConfigError, DataError
from agent_loop.integrations.tinker.losses import TARGETS, Loss
from agent_loop.integrations.tinker.messages import Array, Datum
from agent_loop.servers.embedded.runner import text_config_of
from agent_loop.training.adapters import add_adapters
from agent_loop.training.forward import layout_of, response_logprobs
from agent_loop.training.micro_batches import MicroBatch, micro_batches
from agent_loop.training.policy import device_of, load_base
from agent_loop.training.trained_model import TrainedModel
from agent_loop.types import FloatArray
from agent_loop.weights.adapted import AdaptedWeights, Factors

LORA_ALPHA = 32.0
"""Factor of the product of an adapter, before the division by its rank. The same for all ranks."""
MAX_TOKENS_PER_MICRO_BATCH = 16384
LORA_FILE, WEIGHTS_FILE, OPTIMIZER_FILE = "lora.json", "adapter_model.safetensors", "optimizer.pt"
OPTIM_CONFIG = OptimConfig()
load_tensors: Callable[..., dict[str, Tensor]] = cast(Any, safetensors.torch).load_file
PREFIX = "base_model.model."
"""Prefix of the names of weights in PEFT's files."""


class LoraSettings(Struct, frozen=True):
    """Adapters of a training client."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class AdamSettings(Struct, frozen=True):
    """Settings of one step of AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Maximum norm of the gradient; 0 is no limit."""


class BaseModel:
    """Frozen model whose weights all adapters share."""

    def __init__(self, path: str, *, device: str = "auto") -> None:
        """Load a model in float32 from a folder or the hub."""
        config = ModelConfig.model_validate({"path": path, "device": device})
        model = load_base(config, path=path).requires_grad_(False)
        _untie_head(model)
        self.path = path
        self.model: PreTrainedModel = cast(Any, model).to(device_of(config)).eval()
        self.vocab_size = int(cast(Any, model).get_input_embeddings().weight.shape[0])
        self.max_positions: int = getattr(text_config_of(model.config), "max_position_embeddings", 2048)

    def shared_copy(self) -> PreTrainedModel:
        """Return a model with modules of its own and the same weights in memory."""
        weights = chain(self.model.parameters(), self.model.buffers())
        return deepcopy(self.model, {id(weight): weight for weight in weights})

    def target_modules(self, lora: LoraSettings) -> list[str]:
        """Return the names of the layers that get an adapter, as short as they are unambiguous."""
        head = cast(Any, self.model).get_output_embeddings()

        def is_wanted(name: str, module: nn.Module) -> bool:
            if module is head:
                return lora.train_unembed
            return lora.train_attn if "attn" in name or "attention" in name else lora.train_mlp

        modules: Iterable[tuple[str, nn.Module]] = cast(Any, self.model).named_modules()
        linear = {name: module for name, module in modules if isinstance(module, nn.Linear)}
        wanted = [name for name, module in linear.items() if is_wanted(name, module)]
        short = {name.rpartition(".")[2] for name in wanted}
        others = {name.rpartition(".")[2] for name in linear.keys() - set(wanted)}
        if not wanted:
            raise ConfigError("no layer gets an adapter; set train_attn, train_mlp or train_unembed")
        return wanted if short & others else sorted(short)

    def adapted_weights(self, folder: Path | None) -> AdaptedWeights:
        """Return the base with the adapters of a folder; None is the base alone."""
        base = {name: weight.detach() for name, weight in self.model.named_parameters()}
        factors: dict[str, Factors] = {}
        if folder is not None:
            scale = LORA_ALPHA / read_lora(folder).rank
            saved = load_tensors(folder / WEIGHTS_FILE, device=str(self.model.device))
            for name, right_RI in saved.items():
                if ".lora_A." in name:
                    left_OR = saved[name.replace(".lora_A.", ".lora_B.")] * scale
                    owner = name.removeprefix(PREFIX).replace(".lora_A.weight", ".weight")
                    factors[owner] = Factors(left_OR.contiguous(), right_RI.contiguous())
        return AdaptedWeights(base, base_id=self.path, factors=factors)


def read_lora(folder: Path) -> LoraSettings:
    """Return the settings of the adapters in a folder."""
    return json.decode((folder / LORA_FILE).read_bytes(), type=LoraSettings)


class AdapterTrainer:
    """Adapters of one training client, their gradients and their optimiser. Call one method at a time."""

    def __init__(self, base: BaseModel, lora: LoraSettings, *, seed: int) -> None:
        """Add new adapters to a copy of the base. `seed` is used if the settings have none."""
        self.lora = lora
        self._base = base
        self.model = base.shared_copy()
        config = ModelConfig(
            path=base.path,
            lora_rank=lora.rank,
            lora_alpha=LORA_ALPHA,
            target_modules=base.target_modules(lora),
        )
        add_adapters(self.model, config=config, seed=seed if lora.seed is None else lora.seed)
        self._trained = TrainedModel(self.model, config=OPTIM_CONFIG)
        self._loss_sum = 0.0
        """Sum of the losses since the last step. It is not finite if one of them was not."""

    def forward(
        self, data: Sequence[Datum], loss: Loss, *, has_backward: bool
    ) -> tuple[list[FloatArray], float]:
        """Return the log-probs of the targets of each datum, and the loss. With `has_backward`, add its gradient."""
        self._check(data, loss)
        targets_BRK = _padded([datum.inputs[TARGETS] for datum in data], dtype=torch.long)
        inputs = {
            name: _padded([datum.inputs[name] for datum in data], dtype=torch.float32) for name in loss.inputs
        }
        batch = _batch(data)
        is_next_token = all(
            datum.inputs[TARGETS].ndim == 1
            and np.array_equal(datum.inputs[TARGETS][:-1], datum.token_ids[1:])
            for datum in data
        )
        logprobs_BRK, loss_sum = torch.zeros(targets_BRK.shape), 0.0

        def logprobs_of(micro_batch: MicroBatch) -> Tensor:
            candidates = None if is_next_token else micro_batch.cut(targets_BRK)
            found = response_logprobs(
                self.model,
                micro_batch,
                temperature=1.0,
                entropy_has_gradient=False,
                candidate_ids_BRK=candidates,
            )
            return found.sampled_BR.unsqueeze(-1) if found.candidates_BRK is None else found.candidates_BRK

        with torch.set_grad_enabled(has_backward):
            for micro_batch in micro_batches(
                batch,
                rows=torch.arange(len(data)),
                max_tokens=MAX_TOKENS_PER_MICRO_BATCH,
                device=self.model.device,
                layout=layout_of(self.model),
            ):
                found_BRK = logprobs_of(micro_batch)
                part = loss(found_BRK, {name: micro_batch.cut(values) for name, values in inputs.items()})
                if has_backward:
                    cast(Any, part).backward()
                loss_sum += float(part.detach())
                logprobs_BRK[micro_batch.rows_B, : found_BRK.shape[1]] = found_BRK.detach().cpu()
        if has_backward:
            self._loss_sum += loss_sum
        outputs: list[FloatArray] = []
        for datum, logprobs_RK in zip(data, logprobs_BRK.numpy(), strict=True):
            shape = datum.inputs[TARGETS].shape
            outputs.append(logprobs_RK[: shape[0], : shape[1] if len(shape) == 2 else 1].reshape(shape))
        return outputs, loss_sum

    def step(self, settings: AdamSettings) -> dict[str, float]:
        """Take a step with the gradients so far, clear them, and return metrics. A gradient that is not finite is
        skipped."""
        self._trained.optimizer.set(
            grad_clip=settings.grad_clip_norm if settings.grad_clip_norm > 0 else math.inf,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        norm, self._loss_sum = self._trained.optimizer.step(loss=self._loss_sum), 0.0
        return {"grad_norm": norm} if math.isfinite(norm) else {"skipped_step": 1.0}

    def save(self, folder: Path, *, has_optimizer: bool) -> None:
        """Write the adapters in PEFT's format to a new folder, and the state of the optimiser."""
        self._trained.save(folder)
        (folder / LORA_FILE).write_bytes(json.encode(self.lora))
        if has_optimizer:
            torch.save(self._trained.optimizer.state_dict(), folder / OPTIMIZER_FILE)

    @torch.no_grad()
    def load(self, folder: Path, *, has_optimizer: bool) -> None:
        """Load adapters from a folder, and the state of the optimiser. Without it, the optimiser starts anew."""
        if read_lora(folder).rank != self.lora.rank:
            raise CheckpointError(
                f"the checkpoint has adapters of rank {read_lora(folder).rank}, but this client has {self.lora.rank}; "
                "create the client from the checkpoint"
            )
        saved = load_tensors(folder / WEIGHTS_FILE)
        weights = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        names = {f"{PREFIX}{name.replace('.default.', '.')}": name for name in weights}
        if set(names) != set(saved):
            raise CheckpointError("the checkpoint has adapters on other layers than this client")
        for saved_name, name in names.items():
            weights[name].copy_(saved[saved_name])
            weights[name].grad = None
        self._loss_sum = 0.0
        if not has_optimizer:
            self._trained = TrainedModel(self.model, config=OPTIM_CONFIG)
        elif not (folder / OPTIMIZER_FILE).is_file():
            raise CheckpointError("the checkpoint has no state of an optimiser; load it without")
        else:
            self._trained.optimizer.load_state_dict(torch.load(folder / OPTIMIZER_FILE, weights_only=True))

    def _check(self, data: Sequence[Datum], loss: Loss) -> None:
        wanted = {TARGETS, *loss.inputs}
        for number, datum in enumerate(data):
            if set(datum.inputs) != wanted:
                raise DataError(
                    f"datum {number} has loss_fn_inputs {', '.join(sorted(datum.inputs))}, but {loss.name} takes "
                    f"{', '.join(sorted(wanted))}"
                )
            shapes = {array.shape for array in datum.inputs.values()}
            if len(shapes) > 1:
                raise DataError(
                    f"the loss_fn_inputs of datum {number} have different shapes: {sorted(shapes)}"
                )
            for ids in (datum.token_ids, datum.inputs[TARGETS]):
                if not 0 <= int(ids.min()) <= int(ids.max()) < self._base.vocab_size:
                    raise DataError(
                        f"datum {number} has token ids from {ids.min()} to {ids.max()}, but the model has "
                        f"{self._base.vocab_size}; use this model's tokenizer"
                    )
            if len(datum.token_ids) > self._base.max_positions:
                raise DataError(
                    f"datum {number} has {len(datum.token_ids)} tokens, but the model has {self._base.max_positions} "
                    "positions; send shorter rows"
                )


def _as_matrix(array: Array) -> Array:
    return array if array.ndim == 2 else array[:, None]


def _padded(arrays: Sequence[Array], *, dtype: torch.dtype) -> Tensor:
    """Return arrays [T] or [T, K] as one tensor [B, R, K], 0 at padding."""
    matrices = [_as_matrix(array) for array in arrays]
    width, num_targets = (max(matrix.shape[axis] for matrix in matrices) for axis in (0, 1))
    padded = torch.zeros((len(arrays), width, num_targets), dtype=dtype)
    for row, matrix in enumerate(matrices):
        padded[row, : matrix.shape[0], : matrix.shape[1]] = torch.as_tensor(np.array(matrix))
    return padded


def _batch(data: Sequence[Datum]) -> TensorDict:
    """Return the rows as a batch whose prompts are the first tokens. The last target ends the response.

    Each position of the input thereby predicts a token of the response.
    """
    width = max(len(datum.token_ids) for datum in data) + 1
    input_ids_BW = torch.zeros((len(data), width), dtype=torch.long)
    attention_mask_BW = torch.zeros_like(input_ids_BW)
    for row, datum in enumerate(data):
        length = len(datum.token_ids)
        input_ids_BW[row, :length] = torch.as_tensor(np.array(datum.token_ids))
        input_ids_BW[row, length] = int(datum.inputs[TARGETS][-1].flat[0])
        attention_mask_BW[row, : length + 1] = 1
    columns: Mapping[str, Tensor] = {
        "input_ids": input_ids_BW,
        "prompts": input_ids_BW[:, :1],
        "responses": input_ids_BW[:, 1:],
        "response_mask": attention_mask_BW[:, 1:],
        "attention_mask": attention_mask_BW,
        "position_ids": (attention_mask_BW.cumsum(dim=1) - 1) * attention_mask_BW,
    }
    return TensorDict(dict(columns), batch_size=[len(data)])


def _untie_head(model: PreTrainedModel) -> None:
    """Give a head that shares the weight of the embeddings a weight of its own, so that it can have an adapter."""
    head, embeddings = cast(Any, model).get_output_embeddings(), cast(Any, model).get_input_embeddings()
    if head is not None and head.weight is embeddings.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        text_config_of(model.config).tie_word_embeddings = model.config.tie_word_embeddings = False
