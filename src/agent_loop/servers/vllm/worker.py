"""Extension of vLLM's worker processes: loads weights, and switches the sampler to exact log-probs.

vLLM adds `WeightWorker` to the bases of its worker class. Servers call the methods by `collective_rpc`. Pauses and
weight versions are vLLM's own. The extension stays for what vLLM lacks: log-probs from before top-k and top-p, and a
weight transfer that works on CPUs, verifies every tensor before the first is loaded, and merges adapters. vLLM's own
transfers need a GPU on both sides.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agent_loop.errors import WeightsError
from agent_loop.runtime.describe import describe_error
from agent_loop.weights.receiver import WeightReceiver

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger("vllm.agent_loop")


class WeightWorker:
    """Mixin of vLLM's worker. All methods return plain data, and none raises: an exception kills the engine."""

    model_runner: Any
    rank: int

    def agent_loop_hello(self) -> dict[str, Any]:
        """Return the rank, the device and the size of the model."""
        device = str(self.model_runner.device.type)
        return {"rank": self.rank, "device": device, "num_parameters": self._agent_loop_size()}

    def agent_loop_scale_logprobs(self) -> dict[str, Any]:
        """Switch the sampler to `log_softmax(logits / temperature)` before top-k and top-p.

        Returns:
            `patched` with the replaced part of the sampler, or `error`.
        """
        sampler = getattr(self.model_runner, "sampler", None)
        if sampler is None:  # a stage of a pipeline that does not sample
            return {"patched": "nothing"}
        if hasattr(sampler, "topk_topp_sampler"):
            try:
                sampler.topk_topp_sampler = FullLogProbsStage.wrap(sampler)
            except Exception as error:
                logger.exception("the last stage of the sampler could not be replaced")
                return {"error": describe_error(error)}
            return {"patched": "topk_topp_sampler"}
        if hasattr(sampler, "_sample_random"):
            sampler.logprobs_mode = "processed_logprobs"
            sampler._sample_random = return_full_logits(sampler._sample_random)
            return {"patched": "_sample_random"}
        return {"error": f"the sampler is a {type(sampler).__name__}, which is not supported"}

    def agent_loop_load_weights(self, handle: str) -> dict[str, Any]:
        """Load the weights of a `WeightHandle` into the model.

        Returns:
            An empty dict, or `error`, and `is_unchanged`: whether the model still has all its old weights.
        """
        try:
            weights = self._agent_loop_receiver().receive(handle)
        except WeightsError as error:
            return {"error": str(error), "is_unchanged": True}
        except Exception as error:
            logger.exception("new weights could not be received")
            return {"error": describe_error(error), "is_unchanged": True}
        try:
            self._agent_loop_load(weights)
        except Exception as error:
            logger.exception("new weights could not be loaded")
            return {"error": describe_error(error), "is_unchanged": False}
        return {}

    def _agent_loop_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with _vllm_config_of(self):
            self.model_runner.reload_weights(weights_iterator=iter(weights))
            pack_tied_heads(self.model_runner.get_model())
            if self.model_runner.device.type == "cpu":
                pack_experts(self.model_runner.get_model())

    def _agent_loop_receiver(self) -> WeightReceiver:
        receiver: WeightReceiver | None = self.__dict__.get("_agent_loop_weights")
        if receiver is None:
            receiver = WeightReceiver(rank=self.rank, merges_on=self.model_runner.device)
            self.__dict__["_agent_loop_weights"] = receiver
        return receiver

    def _agent_loop_size(self) -> int:
        return sum(parameter.numel() for parameter in self.model_runner.get_model().parameters())


class FullLogProbsStage(nn.Module):
    """Last stage of the sampler, which samples as before, and returns log-probs from before top-k and top-p.

    Its input are logits that are scaled by the temperature (1 for greedy requests); shape [num_requests, vocab_size].
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @classmethod
    def wrap(cls, sampler: Any) -> FullLogProbsStage:
        """Wrap a sampler's last stage, unless it is wrapped. The inner stage returns no log-probs, which is faster."""
        stage = sampler.topk_topp_sampler
        if isinstance(stage, cls):
            return stage
        use_fp64 = getattr(stage, "use_fp64_gumbel", False)
        return cls(type(stage)("raw_logprobs", use_fp64))

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logprobs = logits.log_softmax(
            dim=-1, dtype=torch.float32
        )  # before sampling, which writes to the logits
        sampled, _ = self.inner(logits, generators, k, p)
        return sampled, logprobs


def return_full_logits(sample_random: Any) -> Any:
    """Wrap `_sample_random` of vLLM's second model runner, to return the logits from before top-k and top-p.

    That model runner takes the log-probs of the returned logits.
    """
    if getattr(sample_random, "returns_full_logits", False):
        return sample_random

    def sample(processed_logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        before = processed_logits.clone()
        sampled, _ = sample_random(processed_logits, *args, **kwargs)
        return sampled, before

    sample.returns_full_logits = True  # type: ignore[attr-defined]
    return sample


def pack_tied_heads(model: nn.Module) -> None:
    """Pack the output heads that share their weight with the embedding.

    vLLM for CPUs multiplies with a packed copy of the weight. A reload updates the copy only for weights that it loads
    under the layer's own name.
    """
    embeddings: Any = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    layers: list[Any] = list(model.modules())
    for layer in layers:
        # vLLM's output heads are subclasses of the embedding.
        if isinstance(layer, embeddings.VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def pack_experts(model: nn.Module) -> None:
    """Pack the experts of a mixture. vLLM for CPUs packs them when it loads a model, but not after a reload."""
    layers: list[Any] = list(model.modules())
    for layer in layers:
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


def _vllm_config_of(worker: Any) -> Any:
    config: Any = import_module("vllm.config")
    return config.set_current_vllm_config(worker.vllm_config)
