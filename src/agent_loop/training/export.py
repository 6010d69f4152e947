"""The model of a checkpoint as a folder of its own, for whatever loads models from the Hugging Face hub."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedModel

from agent_loop.config import ModelConfig
from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.vision import auto_model_class
from agent_loop.training.adapters import is_adapter_folder, merged_adapters
from agent_loop.training.checkpoint import MODEL_FOLDER, Checkpoint, named_checkpoint
from agent_loop.training.manifest import find_damage, manifest_form, manifest_of, read_manifest
from agent_loop.training.policy import compute_dtype

MERGED_FOLDER = "merged"
"""Of a checkpoint of adapters: the model with them, made when it is first evaluated."""


def export_model(
    checkpoint: Checkpoint, out: Path, *, dtype: str | None = None, keep_adapter: bool = False
) -> None:
    """Writes weights, configuration, tokenizer and chat template; all of it or nothing.

    Args:
        checkpoint: Of any training. Adapters (LoRA) are merged into the weights below them.
        out: A folder that is not there yet, or is empty.
        dtype: Of the weights; None is what the model was trained to compute in.
        keep_adapter: Write the adapters alone, as `peft` loads them.

    Raises:
        ConfigError: `out` holds something, there are no adapters to keep, or the model below them is gone.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{str(out)!r} is there already; give a folder that is not there yet")
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
        _save_readers(checkpoint, config, temporary)
    os.replace(temporary, out)


def evaluated_model(path: Path) -> Path:
    """The folder with the model of a checkpoint, or of a run's last one. Adapters are merged at the first time.

    Raises:
        CheckpointError: It is missing or damaged.
        ConfigError: The model below the adapters is gone.
    """
    checkpoint = named_checkpoint(path, parts=[MODEL_FOLDER])
    if not is_adapter_folder(checkpoint.model_path):
        return checkpoint.model_path
    merged, kept = checkpoint.path / MERGED_FOLDER, checkpoint.path / f"{MERGED_FOLDER}.json"
    if not _is_whole(merged, kept):
        shutil.rmtree(merged, ignore_errors=True)
        export_model(checkpoint, merged)
        kept.write_text(json.dumps(manifest_form(manifest_of(merged))), encoding="utf-8")
    return merged


def _is_whole(folder: Path, kept: Path) -> bool:
    """Return whether the files of a folder agree with the manifest of the folder."""
    try:
        manifest = read_manifest(json.loads(kept.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return False
    return bool(manifest) and find_damage(folder, manifest) is None


def _load_model(checkpoint: Checkpoint, config: ModelConfig) -> PreTrainedModel:
    has_adapters = is_adapter_folder(checkpoint.model_path)
    source = config.path if has_adapters else str(checkpoint.model_path)
    try:
        loader = auto_model_class(source, trust_remote_code=config.trust_remote_code)
        model = loader.from_pretrained(
            source, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"{str(checkpoint.path)!r} is of a training of {source!r}, which cannot be loaded: {error}; run where it is"
        ) from error
    return merged_adapters(model, folder=checkpoint.model_path) if has_adapters else model


def _save_readers(checkpoint: Checkpoint, config: ModelConfig, folder: Path) -> None:
    """What makes tokens of text and, for a model that sees, of images."""
    remote: Any = {"trust_remote_code": config.trust_remote_code}
    if hasattr(cast(Any, AutoConfig).from_pretrained(str(folder), **remote), "vision_config"):
        cast(Any, AutoProcessor).from_pretrained(config.path, **remote).save_pretrained(str(folder))
    cast(Any, AutoTokenizer).from_pretrained(str(checkpoint.model_path), **remote).save_pretrained(
        str(folder)
    )
