"""Export of a checkpoint's model to a folder in the format of the Hugging Face hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedModel

from agent_loop.config import ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.training.adapters import is_adapter_folder, merged_adapters
from agent_loop.training.checkpoint import MODEL_FOLDER, Checkpoint, named_checkpoint
from agent_loop.training.policy import compute_dtype, load_base

MERGED_FOLDER = "merged"
"""Subfolder of a checkpoint of adapters with the merged model, which the first evaluation writes."""


def export_model(
    checkpoint: Checkpoint, out: Path, *, dtype: str | None = None, keep_adapter: bool = False
) -> None:
    """Write weights, configuration, tokenizer and chat template. If it fails, `out` is not created.

    Args:
        checkpoint: Checkpoint of a training. Adapters (LoRA) are merged into the weights.
        out: Folder that does not exist or is empty.
        dtype: Dtype of the weights; None is the dtype that the model computed in.
        keep_adapter: Write only the adapters, in the format of `peft`.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{str(out)!r} exists already; give a folder that does not exist")
    if keep_adapter and not is_adapter_folder(checkpoint.model_path):
        raise ConfigError(f"{str(checkpoint.path)!r} holds a whole model and no adapters (LoRA) to keep")
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    if keep_adapter:
        shutil.copytree(checkpoint.model_path, temporary)
    else:
        config = ModelConfig.model_validate(checkpoint.config["model"])
        model = _load_model(checkpoint, config)
        cast(Any, model).to(compute_dtype(config) if dtype is None else getattr(torch, dtype))
        cast(Any, model).save_pretrained(str(temporary))
        _save_tokenizer(checkpoint, config, temporary)
    os.replace(temporary, out)


def evaluated_model(path: Path) -> Path:
    """Return the folder with the model of a checkpoint, or of a run's last one. The first call merges adapters."""
    checkpoint = named_checkpoint(path, parts=[MODEL_FOLDER])
    if not is_adapter_folder(checkpoint.model_path):
        return checkpoint.model_path
    merged = checkpoint.path / MERGED_FOLDER
    if not merged.exists():  # it is written under another name, and renamed when it is complete
        export_model(checkpoint, merged)
    return merged


def _load_model(checkpoint: Checkpoint, config: ModelConfig) -> PreTrainedModel:
    has_adapters = is_adapter_folder(checkpoint.model_path)
    source = config.path if has_adapters else str(checkpoint.model_path)
    try:
        model = load_base(config, path=source)
    except ConfigError as error:
        raise ConfigError(
            f"{str(checkpoint.path)!r} is from a training of {source!r}, which cannot be loaded: {error}; run this "
            "where that model can be loaded"
        ) from error
    if config.base_bits:  # the adapters were trained on the rounded weights
        model = cast(Any, model).dequantize()
    return merged_adapters(model, folder=checkpoint.model_path) if has_adapters else model


def _save_tokenizer(checkpoint: Checkpoint, config: ModelConfig, folder: Path) -> None:
    """Save the tokenizer, and the processor of a model with images."""
    remote: Any = {"trust_remote_code": config.trust_remote_code}
    if hasattr(cast(Any, AutoConfig).from_pretrained(str(folder), **remote), "vision_config"):
        cast(Any, AutoProcessor).from_pretrained(config.path, **remote).save_pretrained(str(folder))
    cast(Any, AutoTokenizer).from_pretrained(str(checkpoint.model_path), **remote).save_pretrained(
        str(folder)
    )
