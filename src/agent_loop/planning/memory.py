"""Memory of an update and of a server, from the sizes of the model and the settings. Pure arithmetic.

The formulae count what the trainer allocates. `benchmarks/bench_plan.py` compares them with measured peaks on a CPU.
T tokens of a micro-batch, N positions with logits, S training processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_loop.config import Config
from agent_loop.planning.shapes import FULL, ModelShape

QUANTIZED = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a number in 4 bits: with a scale of 8 bits per 64 numbers, and one of 32 bits per 256 scales."""
BLOCK_LOGITS = {False: 2**20, True: 2**26}
"""Logits of a block of the head, on a CPU and on a GPU. See `agent_loop.training.losses.vocabulary_blocks`."""
MIN_BLOCK_TOKENS = 256
"""Least tokens of the vocabulary in a block."""


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Bytes of one training process at the peak of an update."""

    weights: float
    """Weights, with the copies in lower precision."""
    optimizer: float
    """Both moments of AdamW."""
    reference: float
    """Weights of the reference model."""
    gradients: float
    activations: float
    """Activations that the layers keep for the backward pass of a micro-batch."""
    logits: float
    """Logits, log-probs and their gradients."""
    working: float
    """Layers that FSDP has gathered, and gradients that are not added up yet."""
    step: float
    """Temporary tensors of the optimiser step, when activations and logits are free."""
    loading: float
    """The model in float32, in which a single process loads it to its device; 0 for processes that shard it, and for a
    base in 4 bits."""

    @property
    def resident(self) -> float:
        """Memory that stays allocated during a rollout."""
        return self.weights + self.optimizer + self.reference

    @property
    def peak(self) -> float:
        passes = self.activations + self.logits + self.working
        return self.resident + self.gradients + max(passes, self.step)


def row_tokens(config: Config) -> int:
    """Return the length of the longest row."""
    return config.rollout.prompt_length + config.rollout.response_length


def rows_per_micro_batch(config: Config) -> int:
    """Return the largest number of rows of full length in a micro-batch."""
    rows = config.data.train_batch_size * config.rollout.n / config.actor.ppo_mini_batches
    own = max(1, int(rows / config.trainer.num_processes))
    return max(1, min(own, config.actor.max_tokens_per_micro_batch // row_tokens(config)))


def itemsize(config: Config) -> int:
    """Return the bytes of a number that the model computes with. `auto` counts as bfloat16."""
    return FULL if config.model.dtype == "float32" else 2


def update_memory(shape: ModelShape, config: Config, *, on_gpu: bool) -> UpdateMemory:
    """Return the memory of a training process.

    Args:
        shape: Sizes of the model.
        config: Settings of the run.
        on_gpu: Whether the process uses a GPU, where the optimiser updates all weights at once.
    """
    size, processes = itemsize(config), config.trainer.num_processes
    rank = config.model.lora_rank
    trained = shape.lora_parameters(rank) if rank else shape.parameters
    frozen = _frozen_bytes(shape, config, size) if rank else 0.0
    rows = rows_per_micro_batch(config)
    tokens, positions = rows * row_tokens(config), rows * config.rollout.response_length
    has_host_copies = processes == 1 and config.actor.optimizer_on_host
    on_host = has_host_copies and on_gpu
    moments = 2 * trained * config.actor.optimizer_bits / 8
    if processes == 1:
        weights = trained * FULL + (trained * size if size < FULL or has_host_copies else 0) + frozen
        if on_host:  # the device keeps the copies that the model computes with
            weights = trained * size + frozen
        reference = shape.parameters * size
        gathered = 0.0
    else:  # FSDP shards float32 weights, and gathers two layers and everything outside them
        weights = (trained + (shape.parameters if rank else 0)) * FULL / processes
        reference = shape.parameters * FULL / processes
        gathered = (2 * shape.layer_parameters + shape.root_parameters) * size
    largest = shape.largest_parameter
    if config.model.base_bits:  # a matrix at a time is dequantised
        gathered = max(weight.numel() for weight in shape.linear) * (size + FULL)
    gradient = 0 if rank else largest * (size + FULL if size < FULL or has_host_copies else FULL)
    return UpdateMemory(
        weights=weights,
        optimizer=0.0 if on_host else moments / processes,
        reference=reference if _has_reference(config) else 0.0,
        gradients=0.0 if on_host else trained * FULL / processes,
        activations=tokens * _activations(shape, config, size),
        logits=_head(shape, positions, size, on_gpu=on_gpu),
        working=gathered + gradient,
        loading=shape.parameters * FULL if processes == 1 and not config.model.base_bits else 0.0,
        step=0.0 if on_host else (trained / processes if on_gpu else largest) * FULL,
    )


def _frozen_bytes(shape: ModelShape, config: Config, size: int) -> float:
    """Return the bytes of the weights below adapters."""
    if config.model.base_bits is None:
        return shape.parameters * size
    quantized = sum(weight.numel() for weight in shape.linear)
    return quantized * QUANTIZED + (shape.parameters - quantized) * size


def _has_reference(config: Config) -> bool:
    """Return whether a reference model is loaded. The policy without its adapters is one that needs no memory."""
    has_penalty = bool(config.actor.kl_loss_coef or config.algorithm.kl_reward_coef)
    return has_penalty and not (config.model.lora_rank and config.actor.reference_path is None)


def _activations(shape: ModelShape, config: Config, size: int) -> float:
    """Return the bytes that all layers keep per token.

    With gradient checkpointing, a layer keeps its input, and one layer at a time is computed again. Selective
    checkpointing also keeps the result of attention.
    """
    activations = shape.activation_bytes(size, is_frozen=bool(config.model.lora_rank))
    if config.actor.gradient_checkpointing:
        kept = (
            shape.hidden if config.actor.gradient_checkpointing is True else shape.hidden + shape.query_width
        )
        return shape.layers * kept * size + activations / shape.layers
    return activations


def _head(shape: ModelShape, positions: int, size: int, *, on_gpu: bool) -> float:
    """Return the bytes of the head, which computes a block of logits at a time, forward and backward.

    A block takes its logits, their exponentials and two gradients in float32.
    """
    block = min(positions * shape.vocabulary, max(BLOCK_LOGITS[on_gpu], MIN_BLOCK_TOKENS * positions))
    return 4 * FULL * block + positions * shape.hidden * (size + FULL)
