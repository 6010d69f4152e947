"""Backend that computes all requests in one forward, over a KV cache of slots and with this package's attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from agent_loop.errors import ConfigError
from agent_loop.servers.embedded.attention import (
    ATTENTION_NAME,
    AttentionContext,
    KVCache,
    LayerShape,
    ShapeProbe,
)
from agent_loop.servers.embedded.batch import StepBatch, pack_step
from agent_loop.servers.embedded.config import EmbeddedConfig
from agent_loop.servers.embedded.request import EngineRequest, ScoreRequest
from agent_loop.servers.embedded.runner import ModelRunner
from agent_loop.servers.embedded.slots import PrefixInPrefill, Slot, SlotTable
from agent_loop.servers.embedded.vision import media_features

PLAIN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
"""Types of layers that store keys and values."""

CacheKind: TypeAlias = Literal["shared", "per_request", "none"]
"""`shared`: one KV cache, all requests in one forward. `per_request`: the model's own cache and attention, one request
per forward. `none`: no cache; the whole sequence is computed again for each token."""


class StepOutput(NamedTuple):
    """Result of one step."""

    requests: tuple[EngineRequest, ...]
    """Requests whose next token can be sampled. The other requests are still in prefill."""
    logits: Tensor
    """One row for each of `requests`, [rows, vocab]."""
    num_forwards: int
    num_prompt_tokens: int
    """Number of prompt tokens that the step computed."""


class SharedCacheBackend:
    """Continuous batching over a fixed number of slots.

    A request keeps its slot until it ends, and a slot has room for the longest allowed sequence. So no request is ever
    preempted for lack of memory. A prefix that is in another slot is copied.
    """

    kind: CacheKind = "shared"
    resumes_turns = True
    """Whether the next turn of a session computes only the tokens that it adds."""

    def __init__(self, runner: ModelRunner, *, config: EmbeddedConfig) -> None:
        others = set(getattr(runner.text_config, "layer_types", None) or ()) - PLAIN_LAYER_TYPES
        if others:
            raise ConfigError(f"it has layers of type {', '.join(sorted(others))}")
        self._runner = runner
        self._config = config
        self._cache: KVCache | None = None
        self._slots = SlotTable(num_slots=config.max_slots, max_model_len=config.max_model_len)
        self._slot_of: dict[EngineRequest, Slot] = {}
        self._request_in: dict[int, EngineRequest] = {}
        """Running requests by index of their slot."""
        self._awaited: dict[EngineRequest, PrefixInPrefill] = {}
        """Prefixes in prefill that queued requests wait for, to copy them."""
        runner.switch_attention(ATTENTION_NAME)
        try:
            self._layers = self._probe_layers()
        except Exception:
            runner.restore_attention()
            raise
        self.allocate()

    @property
    def num_bytes(self) -> int:
        return 0 if self._cache is None else self._cache.num_bytes

    @property
    def has_room(self) -> bool:
        return self._slots.has_idle

    def allocate(self) -> None:
        """Allocate the cache if it is freed."""
        if self._cache is None:
            self._cache = KVCache(
                self._layers, num_slots=self._config.max_slots, max_model_len=self._config.max_model_len
            )

    def free(self) -> None:
        """Free the cache. All requests must have been released before."""
        self._cache = None
        self._awaited.clear()
        self._slots.drop_idle()

    def admit(self, request: EngineRequest) -> bool:
        """Start a request and set its `num_cached_tokens`. Return False if it has to wait for another request.

        Raises:
            FeaturesError: An image of the request does not fit the model. The request is admitted nevertheless and has
                to be released.
        """
        awaited = self._awaited.get(request)
        if awaited is not None and awaited.is_pending:
            return False
        placement = self._slots.find_placement(request.prompt_ids, session=request.request_id)
        if isinstance(placement, PrefixInPrefill):
            self._awaited[request] = placement
            return False
        self._awaited.pop(request, None)
        slot = self._slots.assign(placement, prompt_ids=request.prompt_ids, session=request.request_id)
        if placement.copy_from is not None and self._cache is not None:
            self._cache.copy_prefix(
                source=placement.copy_from.index,
                target=slot.index,
                start=placement.copy_start,
                end=placement.num_reused,
            )
        request.num_cached_tokens = placement.num_reused
        self._slot_of[request], self._request_in[slot.index] = slot, request
        self._compute_image_features(request, first_token=slot.num_cached)
        return True

    def step(self) -> StepOutput:
        """Compute the next tokens of the admitted requests. At least one request must be admitted."""
        assert self._cache is not None
        batch = pack_step(
            list(self._slot_of.values()),
            cache=self._cache,
            chunk_tokens=self._config.prefill_chunk_tokens,
            images={i: r.images for i, r in self._request_in.items() if r.images is not None},
        )
        logits = self._forward_batch(batch)
        num_prompt_tokens = 0
        for slot, count in batch.chunks:
            num_prompt_left = len(self._request_in[slot.index].prompt_ids) - slot.num_cached
            num_prompt_tokens += max(0, min(count, num_prompt_left))
            slot.num_cached += count
        return StepOutput(
            requests=tuple(self._request_in[slot.index] for slot in batch.sampled_slots),
            logits=logits,
            num_forwards=1,
            num_prompt_tokens=num_prompt_tokens,
        )

    def prefill(self, texts: Sequence[ScoreRequest], *, chunk_tokens: int) -> list[Tensor]:
        """Compute the next `chunk_tokens` tokens of one text, or several texts that have no more tokens together.

        Returns:
            Logits of each text after its new tokens from `ScoreRequest.first` on, [rows, vocab].
        """
        # The texts have a cache of their own, so that they evict no session from the slots.
        cache = texts[0].cache
        if cache is None:
            longest = max(len(text.tokens) for text in texts)
            cache = texts[0].cache = KVCache(self._layers, num_slots=len(texts), max_model_len=longest)
        slots = [
            Slot(i, text.tokens, num_tokens=len(text.tokens), num_cached=text.num_computed, is_busy=True)
            for i, text in enumerate(texts)
        ]
        batch = pack_step(slots, cache=cache, chunk_tokens=chunk_tokens)
        kept: list[int] = []
        """Rows whose logits are needed."""
        parts: dict[int, slice] = {}
        """Range of `kept` that belongs to each text."""
        row = 0
        for slot, count in batch.chunks:
            text = texts[slot.index]
            text.num_computed += count
            row += count
            num_kept = min(count, max(0, text.num_computed - text.first))
            parts[slot.index] = slice(len(kept), len(kept) + num_kept)
            kept += range(row - num_kept, row)
        logit_rows = torch.tensor(kept, dtype=torch.long, device=cache.keys[0].device)
        logits = self._forward_batch(replace(batch, logit_rows=logit_rows))
        return [logits[parts[number]] for number in range(len(texts))]

    def append(self, request: EngineRequest, token_id: int) -> None:
        """Append a sampled token, which the next step computes."""
        self._slot_of[request].append(token_id)

    def release(self, request: EngineRequest, *, discard: bool = False) -> None:
        """Release an admitted request. Its cache is kept for the session's next turn, unless `discard` is set."""
        self._awaited.pop(request, None)
        slot = self._slot_of.pop(request, None)
        if slot is None:
            return
        del self._request_in[slot.index]
        # The logits of a prompt in prefill were not checked: NaN in its cache would reach the next request.
        if discard or slot.is_prefilling:
            slot.is_stale = True
            if self._cache is not None:
                self._cache.zero(slot.index)
        self._slots.release(slot)

    def mark_stale(self, request: EngineRequest) -> None:
        """Keep the cache of an admitted request, but do not reuse it for other requests: older weights computed it."""
        self._slot_of[request].is_stale = True

    def end_session(self, session: str) -> None:
        self._slots.end_session(session)

    def drop_idle(self) -> None:
        self._slots.drop_idle()

    @torch.inference_mode()
    def _compute_image_features(self, request: EngineRequest, *, first_token: int) -> None:
        """Compute the features of the images and videos that have placeholders from `first_token` on."""
        images = request.images
        if images is None:
            return
        images.features.clear()
        media = zip(images.attachments, images.placeholder_indices, strict=True)
        for number, (attachment, indices) in enumerate(media):
            if indices[-1] >= first_token:
                images.features[number] = media_features(
                    self._runner.model, attachment, num_placeholders=len(indices)
                )

    @torch.inference_mode()
    def _forward_batch(self, batch: StepBatch) -> Tensor:
        """Compute a step and return the logits of its sampled slots, [rows, vocab]."""
        inputs = {"input_ids": batch.token_ids}
        if batch.image_rows:
            embeds: Tensor = self._runner.model.get_input_embeddings()(batch.token_ids.clamp(min=0))
            for rows, features in batch.image_rows:
                embeds[0, rows] = features
            inputs = {"inputs_embeds": embeds}
        return self._forward(inputs, batch.position_ids, context=batch.attention, logit_rows=batch.logit_rows)

    def _forward(
        self,
        inputs: dict[str, Tensor],
        position_ids: Tensor,
        *,
        context: AttentionContext,
        logit_rows: Tensor | None = None,
    ) -> Tensor:
        output: Any = self._runner.model(
            **inputs,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=0 if logit_rows is None else logit_rows,
            attention_context=context,
        )
        return output.logits[0]

    @torch.inference_mode()
    def _probe_layers(self) -> list[LayerShape]:
        """Return the shapes that each layer stores, from a forward of two tokens."""
        probe = ShapeProbe(max_model_len=self._config.max_model_len)
        two_tokens = torch.arange(2, device=self._runner.device).unsqueeze(0)
        self._forward({"input_ids": two_tokens}, two_tokens, context=probe)
        num_layers = int(self._runner.text_config.num_hidden_layers)
        if sorted(probe.layers) != list(range(num_layers)):
            raise ConfigError(
                f"only {len(probe.layers)} of its {num_layers} layers use a replaceable attention implementation"
            )
        return [probe.layers[layer] for layer in range(num_layers)]
