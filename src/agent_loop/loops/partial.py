"""The tool loop whose trajectories can be cancelled at any moment and resumed later."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from msgspec import structs

from agent_loop.episode import EpisodeStopped
from agent_loop.errors import EpisodeError
from agent_loop.loops.registry import register
from agent_loop.loops.tool_agent import ToolAgentLoop
from agent_loop.recording.row_log import ReplayMismatch, RowLog
from agent_loop.trajectory import AgentLoopOutput, Incident, IncidentKind
from agent_loop.types import Row, StopReason

KEPT_INCIDENTS = (IncidentKind.RESTARTED, IncidentKind.CLOSE_FAILED)
"""Incidents of the cancelled part that a replay does not repeat."""


@register("partial_tool_agent")
class AsyncPartialToolAgentLoop(ToolAgentLoop):
    """`ToolAgentLoop`, whose trajectories can be cancelled by a shared event and resumed from their output.

    A cancelled output has `extra_fields["is_cancel"]`, the last `state`, and `agent_data`: the record of its turns as
    packed bytes, from which any process can resume. The resumed trajectory replays this record first: all sampled
    tokens are kept, and a call that ended is not executed again, unless its tool needs that to restore its state
    (`BaseTool.on_replay`).
    """

    async def run(
        self,
        sampling_params: dict[str, Any],
        *,
        cancellation_event: asyncio.Event | None = None,
        partial_output: AgentLoopOutput | None = None,
        **row: Any,
    ) -> AgentLoopOutput:
        """Run one conversation, or resume it. See `AgentLoopBase.run`.

        Args:
            sampling_params: The same parameters as in the cancelled run.
            cancellation_event: Once it is set, the trajectory ends with `cancelled`. None uses the worker's event. A
                call of a tool or an interaction whose `on_replay` is `once` gets `FINISH_GRACE_S` to end; all other
                calls are aborted.
            partial_output: Output of an earlier run of this row. A cancelled output is resumed; if that is impossible,
                the trajectory starts again, with the incident `restarted`. Any other output is returned unchanged.
            row: The same columns as in the cancelled run.
        """
        if partial_output is not None and partial_output.stop_reason is not StopReason.CANCELLED:
            return partial_output
        event = cancellation_event or self.context.cancellation
        log = self.context.log or RowLog("trajectory")
        self.context = structs.replace(self.context, cancellation=event, log=log)
        try:
            log.continue_from(_recorded(partial_output), cancellation=event)
        except (KeyError, TypeError, ValueError) as error:
            raise EpisodeError(
                'extra_fields["agent_data"] is not the record of a cancelled trajectory; pass the output on unchanged'
            ) from error
        output = await self._resume(log, sampling_params, row)
        if partial_output is not None:
            output = _joined(partial_output, output)
        is_cancel = output.stop_reason is StopReason.CANCELLED
        fields: dict[str, Any] = {"is_cancel": is_cancel, "state": self.state.value}
        if is_cancel:
            fields["agent_data"] = list(log.copies or ())
        return replace(output, extra_fields={**output.extra_fields, **fields})

    async def _resume(self, log: RowLog, sampling_params: dict[str, Any], row: Row) -> AgentLoopOutput:
        try:
            return await self._run_part(sampling_params, row)
        except ReplayMismatch:
            why = log.mismatch
        if log.only_once is not None:
            raise ReplayMismatch(
                f"{why}; the trajectory cannot start again, since {log.only_once} was used and may be used only once"
            )
        log.restart(why=why)
        output = await self._run_part(sampling_params, row)
        return output.noted(Incident(IncidentKind.RESTARTED, f"started again: {why}"))

    async def _run_part(self, sampling_params: dict[str, Any], row: Row) -> AgentLoopOutput:
        try:
            return await super().run(sampling_params, **row)
        except EpisodeStopped as stopped:
            return cast(AgentLoopOutput, self.unfinished_output(stopped.reason))


def _recorded(output: AgentLoopOutput | None) -> Sequence[bytes]:
    if output is None:
        return []
    if "agent_data" not in output.extra_fields:
        raise EpisodeError(
            'partial_output was cancelled, but has no extra_fields["agent_data"]: its loop cannot be resumed, or '
            "something other than the event cancelled it; omit it to start again"
        )
    return output.extra_fields["agent_data"]


def _joined(before: AgentLoopOutput, output: AgentLoopOutput) -> AgentLoopOutput:
    """Return the output with the times and the incidents of the cancelled part."""
    for incident in before.incidents:
        if incident.kind in KEPT_INCIDENTS:
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
