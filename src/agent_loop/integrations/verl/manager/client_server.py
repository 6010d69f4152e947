"""verl's client of its LLM servers as a server of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from agent_loop.errors import BadServerReply
from agent_loop.integrations.verl.manager.rows import GREEDY, current_record
from agent_loop.integrations.verl.manager.settings import load_verl
from agent_loop.servers.base import Ability, AsyncServerBase
from agent_loop.trajectory.attachments import Attachment
from agent_loop.types import IntArray, SamplingParams, TokenOutput


class VerlClientServer(AsyncServerBase):
    """All servers of a verl run, behind verl's client. verl balances, wakes, updates and restarts them."""

    abilities = frozenset({Ability.LOG_PROBS, Ability.PENALTIES, Ability.MIN_P})

    def __init__(self, client: Any, *, with_logprobs: bool, is_deterministic: bool) -> None:
        self.name = "verl"
        self._client = client
        if has_leases_of_sessions(client):
            self._client = SessionClient(client, is_deterministic=is_deterministic)
        self._with_logprobs = with_logprobs
        self._is_deterministic = is_deterministic

    async def generate(
        self,
        prompt_ids: IntArray,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        attachments: Sequence[Attachment] = (),
    ) -> TokenOutput:
        record = current_record.get()
        options: dict[str, Any] = {}
        params = self._params(sampling_params)
        if record is not None and record.is_greedy:
            params |= GREEDY
        if record is not None and record.priority:
            options["priority"] = record.priority
        if record is not None and self._is_deterministic:
            request_id = f"det-{record.priority}"
        output = await self._client.generate(
            request_id,
            prompt_ids=prompt_ids.tolist(),
            sampling_params=params,
            **options,
        )
        if record is not None:
            record.add_completion(output)
        fields = output.extra_fields
        if self._with_logprobs and output.token_ids and not output.log_probs:
            raise BadServerReply(
                "verl's server returned no log-probs, but actor_rollout_ref.rollout.calculate_log_probs is true",
                server=self.name,
                request_id=request_id,
            )
        return TokenOutput(
            output.token_ids,
            output.log_probs if self._with_logprobs else None,
            _stop_reason(output, sampling_params.max_tokens),
            fields.get("max_global_steps") or 0,
            output.num_preempted or 0,
            fields.get("num_cached_tokens"),
        )

    def end_session(self, request_id: str) -> None:
        if isinstance(self._client, SessionClient):
            self._client.end_session(request_id)

    def _params(self, params: SamplingParams) -> dict[str, Any]:
        """Return the parameters under verl's names. Engines get only those that have an effect."""
        named: dict[str, Any] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "repetition_penalty": params.repetition_penalty,
            "logprobs": self._with_logprobs,
        }
        if params.max_tokens is not None:
            named["max_tokens"] = params.max_tokens
        if params.stop_token_ids:
            named["stop_token_ids"] = list(params.stop_token_ids)
        for name in ("presence_penalty", "frequency_penalty", "min_p"):
            if getattr(params, name):
                named[name] = getattr(params, name)
        return named


class SessionClient:
    """verl's client, with one lease of the balancer for all turns of a session instead of one for each turn.

    verl sends all turns of a session to the same server in any case. The balancer then counts sessions instead of
    requests, and two of three messages of a turn are saved.
    """

    def __init__(self, client: Any, *, is_deterministic: bool) -> None:
        self._client = client
        self._is_deterministic = is_deterministic
        self._has_priorities = client.config.actor_rollout_ref.rollout.name == "vllm"  # as in verl
        self._leases: dict[str, tuple[str, Any]] = {}
        """Name and handle of each session's server."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **options: Any
    ) -> Any:
        """Sample one completion, as verl's client does.

        Each argument of a call of an actor costs time, so images and videos, which are None here, are left out.
        """
        if request_id not in self._leases:
            self._leases[request_id] = await self._client._acquire_server(request_id)
        if not self._has_priorities:
            options.pop("priority", None)
        _, server = self._leases[request_id]
        try:
            output = await server.generate.remote(
                request_id=request_id if self._is_deterministic else uuid4().hex,
                prompt_ids=prompt_ids,
                sampling_params=sampling_params,
                **options,
            )
        except BaseException:
            self.end_session(request_id)  # the next turn gets another server if this one is gone
            raise
        for name in ("min_global_steps", "max_global_steps"):
            output.extra_fields.setdefault(name, output.extra_fields.get("global_steps"))
        return output

    def end_session(self, request_id: str) -> None:
        """Release the server of a session, if it has one."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self._client._release_server(lease[0], request_id=request_id)


def has_leases_of_sessions(client: Any) -> bool:
    """Return whether a client can keep its server for a session: verl's default client and default balancer.

    Subclasses may resume requests or lose servers on purpose, and other balancers read each request.
    """
    if type(client) is not load_verl("verl.workers.rollout.llm_server:LLMServerClient"):
        return False
    return not client.config.actor_rollout_ref.rollout.get("router_config_path")


def _stop_reason(output: Any, max_tokens: int | None) -> Any:
    """Return the stop reason. verl calls a completion `completed` whether it stopped or reached its limit."""
    if output.stop_reason in ("aborted", "abort"):
        return "aborted"
    is_cut = max_tokens is not None and len(output.token_ids) >= max_tokens
    return "length" if is_cut or output.stop_reason == "length" else "stop"
