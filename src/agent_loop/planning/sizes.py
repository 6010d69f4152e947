"""Memory of an update, from the sizes of the model and the settings.

The sizes are counted on torch's meta device, where tensors take no memory. The formulae count what the trainer
allocates. `benchmarks/bench_plan.py` compares them with measured peaks on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agent_loop.config import Config
from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import parse_json

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "config.json"
FULL = 4
"""Bytes of a float32 number."""
PROBE_TOKENS = 60
"""Tokens of the forward that counts activations; no usual size of a window, a chunk or a head."""
QUANTIZED = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a number in 4 bits: with a scale of 8 bits per 64 numbers, and one of 32 bits per 256 scales."""
BLOCK_LOGITS = {False: 2**20, True: 2**26}
"""Logits of a block of the head, on a CPU and on a GPU. See `agent_loop.training.losses.logprobs`."""
MIN_BLOCK_TOKENS = 256
"""Least tokens of the vocabulary in a block."""


@dataclass(frozen=True, eq=False)
class ModelShape:
    """Sizes of a model. Tied weights count once."""

    model: Any
    """The model, on the meta device."""

    @cached_property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def root_parameters(self) -> int:
        """Parameters of the embedding and the head."""
        embedding, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings()
        return embedding.numel() * (1 if head is None or head.weight is embedding else 2)

    @cached_property
    def linear(self) -> Sequence[Tensor]:
        """Weights of the linear layers but the head. Stacked experts are not linear layers."""
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        head = self.model.get_output_embeddings()
        return [
            m.weight for m in self.model.modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head
        ]

    @property
    def text(self) -> Any:
        """Configuration of the language model."""
        return self.model.config.get_text_config()

    @property
    def layers(self) -> int:
        return int(getattr(self.text, "num_hidden_layers", 1))

    @property
    def vocabulary(self) -> int:
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def hidden(self) -> int:
        return self.model.get_input_embeddings().weight.shape[1]

    @property
    def query_width(self) -> int:
        """Width of the result of attention in a layer; the hidden width if it differs between layers."""
        try:
            heads = int(getattr(self.text, "num_attention_heads", 1) or 1)
            return heads * int(getattr(self.text, "head_dim", None) or self.hidden // heads)
        except RuntimeError:  # raised by configurations with a value per layer
            return self.hidden

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of keys and values of one token in all layers."""
        _, cache_width = self._frozen_probe
        return (cache_width or 2 * self.layers * self.hidden) * itemsize

    def activation_bytes(self, itemsize: int, *, is_frozen: bool) -> float:
        """Return the bytes per token that the forward keeps for the backward pass, of adapters alone if `is_frozen`."""
        numbers, _ = self._frozen_probe if is_frozen else self._probe
        return numbers[2] * itemsize + numbers[FULL] * FULL

    @cached_property
    def _probe(self) -> tuple[Mapping[int, float], int]:
        return _probe(self.model, trained=list(self.model.parameters()), linear=self.linear)

    @cached_property
    def _frozen_probe(self) -> tuple[Mapping[int, float], int]:
        return _probe(self.model, trained=self.linear, linear=self.linear)


def read_shape(path: str | Path) -> ModelShape:
    """Count the sizes of a model: a `config.json`, a folder with one, or the hub name of a model in the local cache."""
    file = _find(Path(path))
    if file is None:
        raise ConfigError(
            f"model.path is {str(path)!r}, and there is no {CONFIG_FILE} of it on this machine; give --model "
            f"path/to/{CONFIG_FILE}"
        )
    try:
        values = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read as JSON: {error}") from error
    return parse_shape(cast(Any, values) if isinstance(values, dict) else {}, where=str(file))


def _find(path: Path) -> Path | None:
    if path.is_file():
        return path
    folder = path if (path / CONFIG_FILE).is_file() else hub_folder(str(path))
    return None if folder is None else folder / CONFIG_FILE


def hub_folder(name: str) -> Path | None:
    """Return the folder of a model of the hub that is on this machine; None if there is none."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cached = sorted((home / "hub" / f"models--{name.replace('/', '--')}").glob(f"snapshots/*/{CONFIG_FILE}"))
    return cached[-1].parent if name and cached else None


def parse_shape(values: Mapping[str, Any], *, where: str) -> ModelShape:
    """Return the sizes of the model that the contents of a `config.json` describe."""
    import torch  # late, as transformers is: this module is imported where torch may be missing
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.initialization import no_init_weights

    known: Any = AutoConfig
    try:
        config = known.for_model(**{"model_type": None, **values})
        has_vision = getattr(config, "vision_config", None) is not None
        make: Any = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
        with torch.device("meta"), no_init_weights():
            model = make.from_config(config, dtype=torch.bfloat16).eval()
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{where} describes no language model of transformers: {reason}") from error
    model.tie_weights()
    return ModelShape(model)


def _probe(
    model: Any, *, trained: Sequence[Tensor], linear: Sequence[Tensor]
) -> tuple[Mapping[int, float], int]:
    """Run a forward on the meta device, with a model in bfloat16.

    Returns the numbers per token that the forward keeps for the backward pass, by their bytes, and those in the KV
    cache. A model whose forward reads values of tensors cannot run there. Then the inputs and outputs of all linear
    layers count, and the KV cache is not known.
    """
    import torch

    model.requires_grad_(False)
    for weight in trained:
        weight.requires_grad_(True)
    kept: dict[int, Tensor] = {}
    own = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}

    def keep(tensor: Tensor) -> Tensor:
        is_score = tensor.shape[-2:] == (PROBE_TOKENS, PROBE_TOKENS)  # which fused attention does not keep
        if not is_score and _storage(tensor) not in own:
            kept.setdefault(_storage(tensor), tensor)
        return tensor

    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = model.base_model(input_ids=ids, use_cache=True)
    except Exception:  # noqa: BLE001  (whatever a model raises on tensors without values)
        return {2: float(sum(sum(weight.shape) for weight in linear)), FULL: 0.0}, 0
    numbers = {2: 0.0, FULL: 0.0}
    for tensor in kept.values():
        size = 2 if tensor.itemsize == 2 else FULL
        numbers[size] += tensor.untyped_storage().nbytes() / size / PROBE_TOKENS
    layers: Sequence[Any] = getattr(getattr(result, "past_key_values", None), "layers", ())
    cached = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return numbers, sum(tensor.numel() for tensor in cached if tensor is not None) // PROBE_TOKENS


def _storage(tensor: Tensor) -> int:
    """Return the identity of the storage, which views share."""
    return cast(Any, tensor.untyped_storage())._cdata


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Bytes of one training process, by what takes them."""

    at_rest: Mapping[str, float]
    """Weights, both moments of AdamW, and the weights of the reference model."""
    at_peak: Mapping[str, float]
    """The same, gradients, and what is larger: the passes over a micro-batch, or the optimiser step after them."""
    logits: float
    """Logits, log-probs and their gradients, which a reference model computes too."""
    loading: float
    """The model in float32, in which a single process loads it to its device; 0 for processes that shard it, and for a
    base in 4 bits."""

    @property
    def peak(self) -> float:
        return sum(self.at_peak.values())


def row_tokens(config: Config) -> int:
    """Return the length of the longest row."""
    return config.rollout.prompt_length + config.rollout.response_length


def itemsize(config: Config) -> int:
    """Return the bytes of a number that the model computes with. `auto` counts as bfloat16."""
    return FULL if config.model.dtype == "float32" else 2


def update_memory(shape: ModelShape, config: Config, *, on_gpu: bool) -> UpdateMemory:
    """Return the memory of a training process. On a GPU, the optimiser updates all weights at once."""
    size, processes, actor = itemsize(config), config.trainer.num_processes, config.actor
    rank, bits = config.model.lora_rank, config.model.base_bits
    quantized = sum(weight.numel() for weight in shape.linear) if bits else 0
    frozen = quantized * QUANTIZED + (shape.parameters - quantized) * size if rank else 0.0
    trained = rank * sum(sum(weight.shape) for weight in shape.linear) if rank else shape.parameters
    all_rows = config.data.train_batch_size * config.rollout.n / actor.ppo_mini_batches / processes
    fitting = actor.max_tokens_per_micro_batch // row_tokens(config)
    rows = max(1, min(max(1, int(all_rows)), fitting))
    has_host_copies = processes == 1 and actor.optimizer_on_host
    on_host = has_host_copies and on_gpu
    if processes == 1:
        weights = trained * FULL + (trained * size if size < FULL or has_host_copies else 0) + frozen
        if on_host:  # the device keeps the copies that the model computes with
            weights = trained * size + frozen
        reference = shape.parameters * size
        gathered = 0.0
    else:  # FSDP shards float32 weights, and gathers two layers and everything outside them
        weights = (trained + (shape.parameters if rank else 0)) * FULL / processes
        reference = shape.parameters * FULL / processes
        layer = (shape.parameters - shape.root_parameters) // shape.layers
        gathered = (2 * layer + shape.root_parameters) * size
    largest = max(parameter.numel() for parameter in shape.model.parameters())
    if bits:  # a matrix at a time is dequantised
        gathered = max(weight.numel() for weight in shape.linear) * (size + FULL)
    gradient = 0 if rank else largest * (size + FULL if size < FULL or has_host_copies else FULL)
    has_penalty = bool(actor.kl_loss_coef or config.algorithm.kl_reward_coef)
    # The policy without its adapters is a reference model that needs no memory.
    has_reference = has_penalty and not (rank and actor.reference_path is None)
    if on_gpu and config.placement.reference == "cpu":
        has_reference = False
    at_rest = {
        "weights": weights,
        "optimizer": 0.0 if on_host else 2 * trained * actor.optimizer_bits / 8 / processes,
        "reference": reference if has_reference else 0.0,
    }
    passes = {
        "activations": rows * row_tokens(config) * _activations(shape, config, size),
        "logits": _head(shape, rows * config.rollout.response_length, size, on_gpu=on_gpu),
        "working": gathered + gradient,  # layers that FSDP gathers, and gradients that are not added up yet
    }
    step = {"optimizer step": 0.0 if on_host else (trained / processes if on_gpu else largest) * FULL}
    if sum(step.values()) < sum(passes.values()):
        step = passes
    at_peak = {**at_rest, "gradients": 0.0 if on_host else trained * FULL / processes, **step}
    return UpdateMemory(
        {name: size for name, size in at_rest.items() if size},
        {name: size for name, size in at_peak.items() if size},
        logits=passes["logits"],
        loading=shape.parameters * FULL if processes == 1 and not bits else 0.0,
    )


def _activations(shape: ModelShape, config: Config, size: int) -> float:
    """Return the bytes that all layers keep per token.

    With gradient checkpointing, a layer keeps its input, and one layer at a time is computed again. Selective
    checkpointing also keeps the result of attention.
    """
    activations = shape.activation_bytes(size, is_frozen=bool(config.model.lora_rank))
    kind = config.actor.gradient_checkpointing
    if not kind:
        return activations
    kept = shape.hidden if kind is True else shape.hidden + shape.query_width
    return shape.layers * kept * size + activations / shape.layers


def _head(shape: ModelShape, positions: int, size: int, *, on_gpu: bool) -> float:
    """Return the bytes of the head, which computes a block of logits at a time, forward and backward.

    A block takes its logits, their exponentials and two gradients in float32.
    """
    block = min(positions * shape.vocabulary, max(BLOCK_LOGITS[on_gpu], MIN_BLOCK_TOKENS * positions))
    return 4 * FULL * block + positions * shape.hidden * (size + FULL)
