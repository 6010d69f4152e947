"""What runs inside vLLM's worker processes: takes weights, and has the sampler give log-probs as trainers need them.

vLLM mixes `WeightWorker` into its worker class; the servers here call its methods by `collective_rpc`.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agent_loop.errors import WeightsError
from agent_loop.runtime.describe import describe_error
from agent_loop.weights import WeightReceiver

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger("vllm.agent_loop")


class WeightWorker:
    """Mixed into vLLM's worker. All methods answer with plain data, which any control channel carries, and none raises:
    an engine dies of that."""

    model_runner: Any
    rank: int

    def agent_loop_hello(self) -> dict[str, Any]:
        """Tells that this class is there, and on what the engine runs."""
        device = str(self.model_runner.device.type)
        return {"rank": self.rank, "device": device, "num_parameters": self._agent_loop_size()}

    def agent_loop_scale_logprobs(self) -> dict[str, Any]:
        """Has the sampler give `log_softmax(logits / temperature)` before top-k and top-p."""
        sampler = getattr(self.model_runner, "sampler", None)
        if sampler is None:  # a stage of a pipeline that does not sample
            return {"patched": "nothing"}
        if hasattr(sampler, "topk_topp_sampler"):
            try:
                sampler.topk_topp_sampler = BeforeCut.around(sampler)
            except Exception as error:
                logger.exception("the sampler could not be exchanged")
                return {"error": describe_error(error)}
            return {"patched": "topk_topp_sampler"}
        if hasattr(sampler, "_sample_random"):
            sampler.logprobs_mode = "processed_logprobs"
            sampler._sample_random = keep_logits_before_cut(sampler._sample_random)
            return {"patched": "_sample_random"}
        return {"error": f"the sampler is a {type(sampler).__name__}, which has no known place for log-probs"}

    def agent_loop_load_weights(self, handle: str) -> dict[str, Any]:
        """Replaces the model's weights by those of an offer.

        Returns:
            Nothing, or `error` with what is wrong and `is_unchanged` that tells whether the old weights are whole.
        """
        try:
            weights = self._agent_loop_receiver().receive_all(handle)
        except WeightsError as error:
            return {"error": str(error), "is_unchanged": True}
        except Exception as error:
            logger.exception("new weights could not be received")
            return {"error": describe_error(error), "is_unchanged": True}
        try:
            self._agent_loop_load(weights.items())
        except Exception as error:
            logger.exception("new weights could not be loaded")
            return {"error": describe_error(error), "is_unchanged": False}
        return {}

    def _agent_loop_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with _vllm_config_of(self):
            self.model_runner.reload_weights(weights_iterator=iter(weights))
            pack_tied_heads(self.model_runner.get_model())

    def _agent_loop_receiver(self) -> WeightReceiver:
        receiver: WeightReceiver | None = self.__dict__.get("_agent_loop_weights")
        if receiver is None:
            receiver = WeightReceiver(rank=self.rank, merges_on=self.model_runner.device)
            self.__dict__["_agent_loop_weights"] = receiver
        return receiver

    def _agent_loop_size(self) -> int:
        return sum(parameter.numel() for parameter in self.model_runner.get_model().parameters())


class BeforeCut(nn.Module):
    """Takes the place of the sampler's last stage: samples as it does, but gives log-probs from before the cut.

    It gets logits that are scaled by the temperature already (1 for greedy requests), of shape
    [num_requests, vocab_size].
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @classmethod
    def around(cls, sampler: Any) -> BeforeCut:
        """Wraps a sampler's stage once. The stage itself gives no log-probs any more, so that it may take its fastest
        way."""
        stage = sampler.topk_topp_sampler
        if isinstance(stage, cls):
            return stage
        use_fp64 = getattr(stage, "use_fp64_gumbel", False)
        return cls(type(stage)("raw_logprobs", use_fp64))

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)  # first: the stage writes to the logits
        sampled, _ = self.inner(logits, generators, k, p)
        return sampled, logprobs


def keep_logits_before_cut(sample_random: Any) -> Any:
    """The same for the sampler of vLLM's second model runner, which returns the logits that log-probs are taken of."""
    if getattr(sample_random, "keeps_logits", False):
        return sample_random

    def sample(processed_logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        before = processed_logits.clone()
        sampled, _ = sample_random(processed_logits, *args, **kwargs)
        return sampled, before

    sample.keeps_logits = True  # type: ignore[attr-defined]
    return sample


def pack_tied_heads(model: nn.Module) -> None:
    """Packs output heads anew that share their weight with the embedding.

    Builds for CPUs multiply with a packed copy of it, which a reload makes anew only for weights that it loads under
    the layer's own name.
    """
    embeddings: Any = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    layers: list[Any] = list(model.modules())
    for layer in layers:
        # An output head is an embedding, too.
        if isinstance(layer, embeddings.VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def _vllm_config_of(worker: Any) -> Any:
    config: Any = import_module("vllm.config")
    return config.set_current_vllm_config(worker.vllm_config)
