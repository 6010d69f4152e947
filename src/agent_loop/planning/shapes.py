"""Sizes of a model, read from its `config.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agent_loop.errors import ConfigError
from agent_loop.files.plain_values import parse_json

KNOWN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3")
"""Model types whose parameters are counted. They differ in biases, norms of queries and keys, and experts."""
CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder with grouped-query attention and a gated MLP."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP, or of one expert."""
    vocabulary: int
    is_tied: bool
    """Whether embedding and head share their weights."""
    experts: int = 0
    """Experts per layer; 0 for a dense MLP."""
    experts_per_token: int = 0
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    max_positions: int | None = None

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Weights of the projections of one layer."""
        return self.hidden * (2 * self.query_width + 2 * self.kv_width)

    @property
    def mlp_parameters(self) -> int:
        """Weights of the MLP, or of all experts and the router, of one layer."""
        one = 3 * self.hidden * self.intermediate
        return one if not self.experts else self.experts * (one + self.hidden)

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.has_qk_norm else 0)
        biases = self.query_width + 2 * self.kv_width if self.has_qkv_bias else 0
        return self.attention_parameters + self.mlp_parameters + norms + biases

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, head and last norm."""
        return self.embedding_parameters * (1 if self.is_tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    def lora_parameters(self, rank: int) -> int:
        """Return the parameters of adapters on all linear modules. Experts are not linear modules, and have none."""
        h, q, kv, i = self.hidden, self.query_width, self.kv_width, self.intermediate
        attention = (h + q) * 2 + (h + kv) * 2
        mlp = 0 if self.experts else 3 * (h + i)
        return self.layers * rank * (attention + mlp)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_width * itemsize


def read_shape(path: str | Path) -> ModelShape:
    """Read the sizes of a model.

    Args:
        path: A `config.json`, a folder with one, or the hub name of a model that is in the local cache.

    Raises:
        ConfigError: There is no such file, or models of its type are not known.
    """
    file = _find(path)
    try:
        values = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(file)!r} cannot be read as JSON: {error}") from error
    given: Mapping[str, Any] = (
        cast(Any, values).get("text_config", values) if isinstance(values, dict) else {}
    )
    return parse_shape(given, where=str(file))


def parse_shape(values: Mapping[str, Any], *, where: str) -> ModelShape:
    """Return the sizes that the contents of a `config.json` name.

    Raises:
        ConfigError: Models of this type are not known, or a size is missing.
    """
    kind = values.get("model_type")
    if kind not in KNOWN:
        raise ConfigError(
            f"{where} has model_type {kind!r}, whose parameters are not counted; known are {', '.join(KNOWN)}"
        )
    try:
        heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
        experts = int(values.get("num_experts") or 0) if kind == "qwen3_moe" else 0
        return ModelShape(
            model_type=kind,
            hidden=hidden,
            layers=int(values["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or hidden // heads),
            intermediate=int(values["moe_intermediate_size" if experts else "intermediate_size"]),
            vocabulary=int(values["vocab_size"]),
            is_tied=bool(values.get("tie_word_embeddings", False)),
            experts=experts,
            experts_per_token=int(values.get("num_experts_per_tok") or 0) if experts else 0,
            has_qk_norm=kind in ("qwen3", "qwen3_moe"),
            has_qkv_bias=kind == "qwen2",
            max_positions=values.get("max_position_embeddings"),
        )
    except KeyError as error:
        raise ConfigError(f"{where} lacks {error}; give the config.json of a transformers model") from error


def _find(path: str | Path) -> Path:
    given = Path(path)
    if given.is_file():
        return given
    if (given / CONFIG_FILE).is_file():
        return given / CONFIG_FILE
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cached = sorted(
        (home / "hub" / f"models--{str(path).replace('/', '--')}").glob(f"snapshots/*/{CONFIG_FILE}")
    )
    if not str(path) or not cached:
        raise ConfigError(
            f"model.path is {str(path)!r}, and there is no {CONFIG_FILE} of it on this machine; give --model "
            f"path/to/{CONFIG_FILE}"
        )
    return cached[-1]
