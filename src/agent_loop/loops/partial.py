"""The tool loop, in parts: cancelled at any moment, and gone on with later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from msgspec import structs

from agent_loop.episode import EpisodeStopped
from agent_loop.episode.turn_log import ReplayMismatch, TurnLog
from agent_loop.errors import EpisodeError
from agent_loop.loops.registry import register
from agent_loop.loops.tool_agent import ToolAgentLoop
from agent_loop.recording.layered import LayeredLog
from agent_loop.recording.record import RowRecord
from agent_loop.recording.row_log import RowLog
from agent_loop.recording.sink import Memory
from agent_loop.trajectory import AgentLoopOutput, Incident, IncidentKind
from agent_loop.types import Row, StopReason

OF_EARLIER_PARTS = (IncidentKind.RESTARTED, IncidentKind.CLOSE_FAILED)
"""Incidents that do not happen again when what was recorded is run again."""


@register("partial_tool_agent")
class AsyncPartialToolAgentLoop(ToolAgentLoop):
    """`ToolAgentLoop`, whose trajectories can be cancelled by a shared event and resumed from their output.

    A cancelled output has `extra_fields["is_cancel"]`, the `state` in which it stood, and `agent_data`: the record of
    its turns as packed bytes, which any process can go on from. The resumed trajectory is answered from it first: what
    was sampled stays, token by token, and a call that ended is not executed again, unless its tool needs that to come
    to where it was (`BaseTool.on_replay`).
    """

    async def run(
        self,
        sampling_params: dict[str, Any],
        *,
        cancellation_event: asyncio.Event | None = None,
        partial_output: AgentLoopOutput | None = None,
        **row: Any,
    ) -> AgentLoopOutput:
        """As `AgentLoopBase.run`.

        Args:
            sampling_params: The same as before.
            cancellation_event: Once it is set, the trajectory ends with `cancelled`; None is the worker's. A call of a
                tool or an interaction whose `on_replay` is `once` gets `FINISH_GRACE_S` to end; all others are cut.
            partial_output: What came of this row before. If that was cancelled, it goes on from there, or where that
                is impossible begins anew, with the incident `restarted`; else it is the result.
            row: The same columns as before.

        Raises:
            EpisodeError: `partial_output` was cancelled, and not in this loop.
            ReplayMismatch: It can neither go on nor begin anew, since something was used that may be used only once.
        """
        if partial_output is not None and partial_output.stop_reason is not StopReason.CANCELLED:
            return partial_output
        memory = Memory(_recorded(partial_output))
        event = cancellation_event or self.context.cancellation
        log = RowLog("trajectory", sink=memory, record=_read(memory.payloads), cancellation=event)
        self.context = structs.replace(
            self.context, cancellation=event, new_log=_lanes(log, below=self.context.new_log)
        )
        output = await self._resume(log, sampling_params, row)
        if partial_output is not None:
            output = _joined(partial_output, output)
        is_cancel = output.stop_reason is StopReason.CANCELLED
        fields: dict[str, Any] = {"is_cancel": is_cancel, "state": self.state.value}
        if is_cancel:
            fields["agent_data"] = list(memory.payloads)
        return replace(output, extra_fields={**output.extra_fields, **fields})

    async def _resume(self, log: RowLog, sampling_params: dict[str, Any], row: Row) -> AgentLoopOutput:
        try:
            return await self._run_part(sampling_params, row)
        except ReplayMismatch:
            if log.mismatch is None:  # it is the journal's
                raise
            why = log.mismatch
        if log.only_once is not None:
            raise ReplayMismatch(
                f"{why}; the trajectory cannot begin anew, since {log.only_once} was used and may be used only once"
            )
        log.restart()
        output = await self._run_part(sampling_params, row)
        return output.noted(Incident(IncidentKind.RESTARTED, f"begun anew after a cancellation: {why}"))

    async def _run_part(self, sampling_params: dict[str, Any], row: Row) -> AgentLoopOutput:
        try:
            return await super().run(sampling_params, **row)
        except EpisodeStopped as stopped:
            return cast(AgentLoopOutput, self.left_behind(stopped.reason))


def _recorded(output: AgentLoopOutput | None) -> Sequence[bytes]:
    if output is None:
        return []
    if "agent_data" not in output.extra_fields:
        raise EpisodeError(
            'partial_output was cancelled, but has no extra_fields["agent_data"]: its loop cannot be resumed, or '
            "something else than the event cancelled it; leave it out to begin anew"
        )
    return output.extra_fields["agent_data"]


def _read(payloads: Sequence[bytes]) -> RowRecord:
    try:
        return RowRecord.of(payloads)
    except (KeyError, TypeError, ValueError) as error:
        raise EpisodeError(
            'extra_fields["agent_data"] is not what a cancelled trajectory holds; hand it on as it is'
        ) from error


def _lanes(log: RowLog, *, below: Callable[[], TurnLog] | None) -> Callable[[], TurnLog]:
    """Gives the records of episodes, over those of a journal, if one is kept."""

    def new_lane() -> TurnLog:
        lane = log.new_lane()
        return lane if below is None else LayeredLog(lane, below())

    return new_lane


def _joined(before: AgentLoopOutput, output: AgentLoopOutput) -> AgentLoopOutput:
    """The output with the time and the losses of the part before."""
    for incident in before.incidents:
        if incident.kind in OF_EARLIER_PARTS:
            output = output.noted(incident)
    was, metrics = before.metrics, output.metrics
    return output.measured(
        structs.replace(
            metrics,
            generate_sequences=was.generate_sequences + metrics.generate_sequences,
            tool_calls=was.tool_calls + metrics.tool_calls,
            total=was.total + metrics.total,
        )
    )
