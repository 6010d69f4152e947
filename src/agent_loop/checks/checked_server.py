"""Server under check, the requests that the checks send to it, and a reference model to compare it with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from os import PathLike
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.servers.embedded.file_names import to_file_weights
from agent_loop.testing.conformance import CheckFailed, CheckFunction, CheckSkipped, CheckSuite, require
from agent_loop.types import FloatArray, IntArray, SamplingParams, TokenOutput, as_token_ids

NEAR_TIE = 2e-3
"""Nats by which the log-probs of two tokens must differ for a stable order: sums depend on the order of addition."""
POLL_S = 0.02
NUM_TRIALS = 3
"""Measurements before a check of a duration fails: other load on the machine may spoil one."""
MAX_SHARE = 0.5
"""Share of a whole completion's time in which the engine must be idle again after a request was aborted."""


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

    def greedy(self, prompt_ids: Sequence[int], *, num_tokens: int) -> list[int]:
        """Return the greedy continuation. End tokens do not stop it."""
        context = list(prompt_ids)
        for _ in range(num_tokens):
            context.append(int(self._logits(context)[-1].argmax()))
        return context[len(prompt_ids) :]

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


@dataclass(frozen=True, slots=True, eq=False)
class CheckedServer:
    """Server under check, and the limits of the requests that it accepts."""

    server: AsyncServerBase
    vocab_size: int
    max_model_len: int
    reference: Reference | None
    tolerance: float
    """Largest accepted difference of log-probs, in nats."""
    long_tokens: int
    """Number of tokens of a completion that is long enough to be interrupted."""
    _sessions: count[int] = field(default_factory=count)

    def prompt(self, num_tokens: int, *, seed: int = 0) -> IntArray:
        """Return random tokens, the same for the same arguments."""
        random = np.random.default_rng([seed, num_tokens])
        return random.integers(0, self.vocab_size, num_tokens, dtype=np.int32)

    def session(self) -> str:
        """Return a new request id."""
        return f"check-{next(self._sessions)}"

    async def generate(
        self, prompt_ids: IntArray | Sequence[int], *, session: str | None = None, **params: Any
    ) -> TokenOutput:
        """Return a completion. The session stays open if one is given. `params` are those of `SamplingParams`."""
        prompt_ids = as_token_ids(prompt_ids)
        request_id = session or self.session()
        try:
            return await self.server.generate(prompt_ids, SamplingParams(**params), request_id)
        finally:
            if session is None:
                self.server.end_session(request_id)

    async def greedy(
        self, prompt_ids: IntArray | Sequence[int], num_tokens: int, *, session: str | None = None
    ) -> list[int]:
        """Return a greedy completion of `num_tokens` tokens that end tokens do not stop."""
        output = await self.generate(
            prompt_ids, session=session, temperature=0.0, max_tokens=num_tokens, ignore_eos=True
        )
        return output.token_ids

    def require_same(self, got: Sequence[int], wanted: Sequence[int], *, prompt: IntArray, what: str) -> None:
        """Fail the check unless two greedy completions are equal, except after a near tie of the reference."""
        if list(got) == list(wanted):
            return
        reason = ""
        if self.reference is not None and len(got) == len(wanted):
            reason = self.reference.disagreement(prompt.tolist(), got)
            if not reason:
                return
        raise CheckFailed(f"{what}: got {list(got)}, not {list(wanted)}; {reason}".rstrip("; "))

    async def until_idle(self, what: str) -> None:
        """Wait until no request is running or queued in the engine."""
        while True:
            health = await self.server.health()
            if not health.is_alive:
                raise CheckFailed(f"{what}: the server died: {health.detail}")
            if health.num_running + health.num_waiting == 0:
                return
            await asyncio.sleep(POLL_S)

    async def require_early_end(self, begin: Callable[[], Awaitable[Any]], *, whole_s: float) -> str:
        """Fail the check unless the engine is idle long before an aborted completion would have ended by itself.

        `begin` starts a completion, which takes `whole_s` seconds in all, and aborts it.
        """
        clock = asyncio.get_running_loop().time
        shares: list[float] = []
        while len(shares) < NUM_TRIALS and min(shares, default=1.0) > MAX_SHARE:
            await begin()
            started = clock()
            await self.until_idle("after the request was aborted")
            idle_at = clock()
            await self.server.health()
            health_s = clock() - idle_at
            shares.append(max(idle_at - started - health_s, 0.0) / whole_s)
        share = f"{min(shares):.0%} of the time of the whole completion"
        require(min(shares) <= MAX_SHARE, f"the engine kept running for {share}")
        return f"idle after {share}"

    async def until_running(self, task: asyncio.Task[Any]) -> None:
        """Wait until the engine runs a request, or the task is done."""
        while not task.done():
            health = await self.server.health()
            if health.num_running:
                return
            await asyncio.sleep(POLL_S)


ServerCheck: TypeAlias = CheckFunction[CheckedServer]


def add_check(
    name: str,
    *,
    suite: CheckSuite[CheckedServer],
    ability: Ability | None = None,
    needs_reference: bool = False,
    method: str | None = None,
) -> Callable[[ServerCheck], ServerCheck]:
    """Return a decorator that adds a function to a suite. The check is skipped if the server lacks what it needs.

    Args:
        name: The rule of the contract, as a sentence.
        ability: Ability that the server must claim.
        needs_reference: Whether the check compares with a reference model.
        method: Optional method of `AsyncServerBase` that the server must define.
    """

    def add(function: ServerCheck) -> ServerCheck:
        @suite.check(name)
        async def check(subject: CheckedServer) -> str | None:
            server = type(subject.server)
            if ability is not None and ability not in subject.server.abilities:
                raise CheckSkipped(f"the server does not claim {ability}")
            if method is not None and getattr(server, method) is getattr(AsyncServerBase, method):
                raise CheckSkipped(f"the server does not define {method}")
            if needs_reference and subject.reference is None:
                raise CheckSkipped("needs a reference")
            return await function(subject)

        return check

    return add
