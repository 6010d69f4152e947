"""Rows of verl's batches, the loops that run them, and what verl gets of a trajectory besides its tokens."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from omegaconf import DictConfig, open_dict

from agent_loop.chat.messages import normalise_messages, without_added_nulls
from agent_loop.integrations.verl.loops import AgentData
from agent_loop.integrations.verl.manager.settings import load_verl
from agent_loop.loops import base, single_turn, tool_agent
from agent_loop.loops.registry import register
from agent_loop.trajectory import AgentLoopMetrics, AgentLoopOutput, Trajectory
from agent_loop.types import Row

RECORD = "__verl_record__"
"""Column of a row with its `VerlRecord`."""
GREEDY: Mapping[str, Any] = {"temperature": 0, "top_p": 1.0, "top_k": -1}
"""Sampling parameters of verl for rows that ask for the likeliest tokens."""
SPECULATION_COUNTERS = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
"""Fields of completions that verl adds up over the turns."""


class VerlRecord:
    """Record of one trajectory."""

    def __init__(self, row: Mapping[str, Any], *, agent_name: str, is_greedy: bool) -> None:
        self.row = row
        self.agent_name = agent_name
        self.is_greedy = is_greedy
        self.trajectories: list[Trajectory] = []
        """The finished trajectory, or its branches."""
        self.outputs: Sequence[Any] = ()
        """The same in verl's form, scored."""
        self.place: tuple[int, int] = (0, 0)
        """Group and rollout within the step."""
        self.begin()

    def begin(self) -> None:
        """Forget what an earlier attempt recorded."""
        self.extra_fields: dict[str, Any] = {}
        """Fields of the completions, merged as verl's tool loop does."""
        self.num_preempted: int | None = None
        self.routed_experts: Any = None
        self.loop_outputs: Sequence[Any] = ()
        """Return value of a loop in verl's form."""
        self.agent_data: Any = None
        """State of the tool loop, which verl passes to tools."""

    def add_completion(self, output: Any) -> None:
        """Add the fields of a completion, given as verl's `TokenOutput`."""
        if output.num_preempted is not None:
            self.num_preempted = (self.num_preempted or 0) + output.num_preempted
        if output.routed_experts is not None:
            self.routed_experts = output.routed_experts
        fields = output.extra_fields
        if not self.extra_fields:
            self.extra_fields.update(fields)
            return
        if fields.get("max_global_steps"):
            self.extra_fields["max_global_steps"] = fields["max_global_steps"]
        for name in SPECULATION_COUNTERS:
            if name in fields and name in self.extra_fields:
                self.extra_fields[name] = int(self.extra_fields[name]) + int(fields[name])

    @property
    def priority(self) -> int:
        return int(self.row.get("priority", 0))

    @property
    def is_failed(self) -> bool:
        """Whether the trajectory, or any of its branches, failed."""
        return any(trajectory.output.failure is not None for trajectory in self.trajectories)


current_record: ContextVar[VerlRecord | None] = ContextVar("current_record", default=None)
"""Record of the trajectory whose loop is running. None in loops that this package does not ship."""


class VerlParts:
    """Parts of verl's `AgentLoopWorker`: tokenizer, registered loops, rewards, teachers, and inputs of vision models.

    `tools` are in verl's form, for loops written for verl. `clients` has verl's names.
    """

    def __init__(self, config: DictConfig, *, tools: Sequence[Any], clients: Mapping[str, Any]) -> None:
        config = copy.deepcopy(config)
        with open_dict(config):
            # Tools and traces are this package's.
            config.actor_rollout_ref.rollout.multi_turn.tool_config_path = None
            config.actor_rollout_ref.rollout.multi_turn.function_tool_path = None
            config.actor_rollout_ref.rollout.trace.backend = None
        self._worker = load_verl("verl.experimental.agent_loop.agent_loop:AgentLoopWorker")(config, **clients)
        self._worker.tools = list(tools)
        self.config = config
        self.tokenizer: Any = self._worker.tokenizer
        self.processor: Any = self._worker.processor
        self.hf_config: Any = self._worker.model_config.hf_config
        self.has_logprobs: bool = config.actor_rollout_ref.rollout.calculate_log_probs
        self.has_rewards = clients.get("reward_loop_worker_handles") is not None

    def make_loop(self, agent_name: str) -> Any:
        """Create a loop of verl's registry, as verl's worker does."""
        module = "verl.experimental.agent_loop.agent_loop"
        wrap = load_verl(f"{module}:DictConfigWrap")
        worker = self._worker
        return load_verl("hydra.utils:instantiate")(
            config=load_verl(f"{module}:_agent_loop_registry")[agent_name],
            trainer_config=wrap(config=worker.config),
            server_manager=worker.llm_client,
            tokenizer=worker.tokenizer,
            processor=worker.processor,
            hf_model_type=worker.hf_model_type,
            dataset_cls=worker.dataset_cls,
            data_config=wrap(worker.config.data),
            tools=load_verl(f"{module}:ToolListWrap")(worker.tools),
        )

    async def score(self, outputs: Sequence[Any], row: Mapping[str, Any], *, validate: bool) -> None:
        """Set the score of a trajectory's last output, and its teacher's log-probs if there is a teacher."""
        last = outputs[-1]
        await self._worker._compute_score(list(outputs), kwargs=dict(row))
        if not self._worker.distillation_enabled:
            return
        await self._worker._compute_teacher_logprobs(
            last,
            prompt_ids=_as_list(last.prompt_ids),
            response_ids=_as_list(last.response_ids),
            validate=validate,
            sample_kwargs=dict(row),
        )

    def model_inputs(
        self, output: Any, *, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return position ids and `multi_modal_inputs` of one row."""
        if self.processor is None:
            return positions_of(attention_mask), {}
        ids, mask = input_ids.unsqueeze(0), attention_mask.unsqueeze(0)
        inputs = self._worker._compute_multi_modal_inputs(output, ids)
        kwargs = output.mm_processor_kwargs
        if kwargs is None:
            media: Mapping[str, Any] = output.multi_modal_data or {}
            kwargs = self._worker._get_mm_processor_kwargs(media.get("audios"))
        return self._worker._compute_position_ids(ids, mask, inputs, kwargs).squeeze(0), inputs


def positions_of(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the positions of tokens [..., num_tokens]. As in verl, the last one continues over padding."""
    return torch.clip(torch.cumsum(attention_mask, dim=-1) - 1, min=0)


def _as_list(ids: Any) -> list[int]:
    return [int(token_id) for token_id in ids]


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
    target, shipped = str(entry["_target_"]), SHIPPED.get(agent_name)
    is_verls_own = target.startswith("verl.experimental.agent_loop.") and target.endswith(f".{shipped}")
    if shipped and is_verls_own and is_text:
        return f"verl/{agent_name}"
    return "verl/loop"


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


@dataclass(frozen=True, slots=True)
class KnownNames:
    """Names of tools and loops that rows may use. verl ignores others."""

    tools: Collection[str]
    has_interactions: bool
    default_agent_loop: str
    is_text: bool
    """See `loop_name`."""


def read_batch(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the columns of each row of a `DataProto`."""
    columns: Mapping[str, Any] = batch.non_tensor_batch
    for index in range(len(batch)):
        yield {name: values[index] for name, values in columns.items()}


def read_tensordict(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the columns of each row of a `TensorDict`. Columns with one value have this value in each row."""
    one, several = load_verl("tensordict:NonTensorData"), load_verl("tensordict:NonTensorStack")
    columns = dict(batch.items())
    for index in range(len(batch)):
        row: dict[str, Any] = {}
        for name, values in columns.items():
            if isinstance(values, several):
                row[name] = values[index].data
            elif isinstance(values, one):
                row[name] = values.data
            else:
                row[name] = values[index]
        yield row


def make_row(columns: dict[str, Any], names: KnownNames, *, is_greedy: bool = False) -> Row:
    """Return a row for a loop of this package, with its record in the column `RECORD`."""
    agent_name = str(columns.pop("agent_name", names.default_agent_loop))
    record = VerlRecord(columns, agent_name=agent_name, is_greedy=is_greedy)
    prompt = without_added_nulls({"raw_prompt": list(columns["raw_prompt"])})  # verl reads rows with Arrow
    row = {
        **columns,
        "raw_prompt": normalise_messages(prompt["raw_prompt"], where="raw_prompt"),
        "agent_name": loop_name(agent_name, is_text=names.is_text),
        RECORD: record,
    }
    tools_kwargs = cast(Mapping[str, Any], row.pop("tools_kwargs", None) or {})
    row["tools_kwargs"] = {name: kwargs for name, kwargs in tools_kwargs.items() if name in names.tools}
    interaction = cast(Mapping[str, Any], row.pop("interaction_kwargs", None) or {})
    if interaction and names.has_interactions:
        row["interaction_kwargs"] = interaction
    selection = _mapping(columns.get("extra_info")).get("tool_selection")
    if selection is not None and len(selection):
        row["tool_selection"] = [name for name in selection if name in names.tools]
    return row


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}
