"""Loops that run in verl: the shipped loops with a record for verl, and loops written for verl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent_loop.integrations.verl.manager.record import GREEDY, RECORD, VerlRecord, current_record
from agent_loop.integrations.verl.manager.scoring import VerlParts
from agent_loop.integrations.verl.manager.verl_package import load_verl
from agent_loop.integrations.verl.shipped_loops import AgentData
from agent_loop.loops import base, single_turn, tool_agent
from agent_loop.loops.registry import register
from agent_loop.trajectory import AgentLoopMetrics, AgentLoopOutput, Trajectory

SHIPPED = {"single_turn_agent": "SingleTurnAgentLoop", "tool_agent": "ToolAgentLoop"}
"""Loops that verl and this package both ship, with their classes in verl."""


def _begin(row: dict[str, Any]) -> VerlRecord:
    record: VerlRecord = row.pop(RECORD)
    record.begin()
    current_record.set(record)
    return record


@register("verl/single_turn_agent")
class SingleTurnLoop(single_turn.SingleTurnAgentLoop):
    """`single_turn_agent`, with a record for verl."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        _begin(row)
        return await super().run(sampling_params, **row)


@register("verl/tool_agent")
class ToolLoop(tool_agent.ToolAgentLoop):
    """`tool_agent`, with a record for verl."""

    agent_data_class = AgentData

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        self._record = _begin(row)
        return await super().run(sampling_params, **row)

    def _new_agent_data(self, row: Mapping[str, Any]) -> Any:
        self._record.agent_data = agent_data = super()._new_agent_data(row)
        return agent_data


@register("verl/loop")
class LoopFromVerl(base.AgentLoopBase):
    """A loop written for verl. It calls verl's client itself, and its output is kept as it is."""

    parts: VerlParts
    """Parts of verl that create the loop. Set by the worker of the process."""

    async def run(
        self, sampling_params: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        record = _begin(row)
        params = {
            **sampling_params,
            "logprobs": self.parts.has_logprobs,
            **(GREEDY if record.is_greedy else {}),
        }
        returned: Any = await self.parts.make_loop(record.agent_name).run(params, **record.row)
        is_list = isinstance(returned, list)
        record.loop_outputs = cast(list[Any], returned) if is_list else [returned]
        outputs = [_own_output(output) for output in record.loop_outputs]
        return outputs if is_list else outputs[0]


def _own_output(output: Any) -> AgentLoopOutput:
    metrics = output.metrics
    return AgentLoopOutput(
        prompt_ids=output.prompt_ids,
        response_ids=output.response_ids,
        response_mask=output.response_mask,
        response_logprobs=output.response_logprobs or None,
        num_turns=output.num_turns,
        reward_score=output.reward_score,
        metrics=AgentLoopMetrics(
            generate_sequences=metrics.generate_sequences,
            tool_calls=metrics.tool_calls,
            num_preempted=max(0, metrics.num_preempted),
        ),
        weight_version=output.extra_fields.get("max_global_steps") or 0,
    )


def loop_name(agent_name: str, *, is_text: bool) -> str:
    """Return the name of the loop of this package that runs a row.

    Args:
        agent_name: The row's name of a loop.
        is_text: Whether the shipped loops of this package can run. They need a model without a processor, and a chat
            template and a tool format that they support.
    """
    registry: Mapping[str, Any] = load_verl("verl.experimental.agent_loop.agent_loop:_agent_loop_registry")
    entry = registry.get(agent_name)
    if entry is None:
        return agent_name
    target = str(entry["_target_"])
    if agent_name in SHIPPED and _is_verls_own(target, SHIPPED[agent_name]) and is_text:
        return f"verl/{agent_name}"
    return "verl/loop"


def _is_verls_own(target: str, class_name: str) -> bool:
    return target.startswith("verl.experimental.agent_loop.") and target.endswith(f".{class_name}")


def outputs_in_verls_form(record: VerlRecord) -> Sequence[Any]:
    """Return the outputs of a trajectory as verl's `AgentLoopOutput`, with fields that verl's loops add.

    Token lists are int32 arrays unless a loop in verl's form returned them.
    """
    if record.loop_outputs:
        pairs = zip(record.loop_outputs, record.trajectories, strict=True)
        return [_limited(raw, trajectory.output) for raw, trajectory in pairs]
    return [_verls_output(trajectory, record) for trajectory in record.trajectories]


def _limited(raw: Any, output: AgentLoopOutput) -> Any:
    """Return a loop's own output within the limits of the run."""
    if len(raw.prompt_ids) != len(output.prompt_ids) or len(raw.response_ids) != len(output.response_ids):
        raw.prompt_ids = output.prompt_ids.tolist()
        raw.response_ids = output.response_ids.tolist()
        raw.response_mask = output.response_mask.tolist()
        if raw.response_logprobs is not None:
            raw.response_logprobs = raw.response_logprobs[: len(raw.response_ids)]
    return raw


def _verls_output(trajectory: Trajectory, record: VerlRecord) -> Any:
    output = trajectory.output
    metrics = load_verl("verl.experimental.agent_loop.agent_loop:AgentLoopMetrics").model_construct(
        generate_sequences=output.metrics.generate_sequences,
        tool_calls=output.metrics.tool_calls,
        compute_score=0.0,
        num_preempted=-1 if record.num_preempted is None else record.num_preempted,
    )
    fields: dict[str, Any] = {
        **record.extra_fields,
        "turn_scores": [],
        "tool_rewards": [],
        **output.extra_fields,
    }
    if "max_global_steps" not in fields:
        versions = output.weight_versions[output.weight_versions >= 0]
        fields["min_global_steps"] = int(versions.min()) if len(versions) else None
        fields["max_global_steps"] = int(versions.max()) if len(versions) else None
    logprobs = output.response_logprobs if output.num_model_tokens else None
    # Without validation, which would copy the arrays into lists.
    return load_verl("verl.experimental.agent_loop.agent_loop:AgentLoopOutput").model_construct(
        prompt_ids=output.prompt_ids,
        response_ids=output.response_ids,
        response_mask=output.response_mask,
        response_logprobs=logprobs,
        routed_experts=record.routed_experts,
        # As in verl, rewards of tools and interactions are no score of the shipped loops.
        reward_score=None if record.agent_name in SHIPPED else trajectory.reward,
        multi_modal_data=None,
        mm_processor_kwargs=None,
        num_turns=output.num_turns,
        metrics=metrics,
        extra_fields=fields,
    )
