"""Reference model: every logit computed from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from agent_loop.servers.embedded.weights import to_file_weights
from agent_loop.types import FloatArray

NEAR_TIE = 2e-3
"""Nats by which the log-probs of two tokens must differ for a stable order: sums depend on the order of addition."""


class Reference:
    """Causal language model that computes every logit from scratch, without cache, batch or fused layers.

    Args:
        model: A `transformers.PreTrainedModel`; it is not changed.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size

    @classmethod
    def load(cls, path: str | PathLike[str], *, trust_remote_code: bool = False) -> Self:
        """Load a model folder in float32."""
        loader: Any = AutoModelForCausalLM
        return cls(loader.from_pretrained(path, dtype=torch.float32, trust_remote_code=trust_remote_code))

    def logprobs(
        self, prompt_ids: Sequence[int], completion: Sequence[int], *, temperature: float = 1.0
    ) -> FloatArray:
        """Return the log-probs of a completion, as `TokenOutput.log_probs` defines them; shape [num_tokens]."""
        logits_TV = self._logits([*prompt_ids, *completion])[len(prompt_ids) - 1 : -1]
        logprobs_TV = torch.log_softmax(logits_TV / (temperature or 1.0), dim=-1)
        return logprobs_TV.gather(-1, torch.tensor(completion)[:, None])[:, 0].numpy()

    def disagreement(self, prompt_ids: Sequence[int], completion: Sequence[int]) -> str:
        """Return why a completion is not greedy, or an empty string. Near ties are allowed."""
        logits_TV = self._logits([*prompt_ids, *completion])[len(prompt_ids) - 1 : -1]
        logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
        for position, token in enumerate(completion):
            best = int(logprobs_TV[position].argmax())
            gap = float(logprobs_TV[position, best] - logprobs_TV[position, token])
            if gap > NEAR_TIE:
                return f"token {position} is {token}, but the reference prefers {best} by {gap:.4f} nats"
        return ""

    def shifted(self, *, seed: int, scale: float = 0.3) -> Reference:
        """Return a reference with other weights: each tensor plus noise of `scale` times its own standard deviation."""
        config = self.model.config
        loader: Any = AutoModelForCausalLM
        other = loader.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            own = dict(self.model.named_parameters())
            for name, parameter in other.named_parameters():
                spread = own[name].std() if own[name].numel() > 1 else torch.tensor(0.0)
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(own[name] + noise * spread.nan_to_num() * scale)
        for name, buffer in other.named_buffers():
            buffer.copy_(dict(self.model.named_buffers())[name])
        return Reference(other)

    def weights(self) -> list[tuple[str, Tensor]]:
        """Return the name in the files and the value of every weight once, as a trainer publishes them."""
        own = ((name, parameter.detach()) for name, parameter in self.model.named_parameters())
        return list(to_file_weights(self.model, own))

    @torch.no_grad()
    def _logits(self, context: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(context)], device=self.model.device)
        return self.model(input_ids=ids, use_cache=False).logits[0].float().cpu()


def vocab_size_of(path: str | PathLike[str], *, trust_remote_code: bool = False) -> int:
    """Return the vocabulary size in the config of a model folder."""
    loader: Any = AutoConfig
    config = loader.from_pretrained(path, trust_remote_code=trust_remote_code)
    return config.get_text_config().vocab_size
