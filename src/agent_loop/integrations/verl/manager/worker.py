"""Worker of a verl run: verl's batches in, trajectories of this package, verl's batches or queue entries out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from omegaconf import DictConfig

from agent_loop.chat.template import ChatTemplate
from agent_loop.errors import AgentLoopError, ChatTemplateError, ConfigError, DataError, RolloutError
from agent_loop.integrations.verl.manager import batch as columns
from agent_loop.integrations.verl.manager.batch import QueueEntry, QueueWriter, trajectory_entry
from agent_loop.integrations.verl.manager.client_server import VerlClientServer
from agent_loop.integrations.verl.manager.rows import (
    RECORD,
    KnownNames,
    LoopFromVerl,
    VerlParts,
    VerlRecord,
    make_row,
    outputs_in_verls_form,
    positions_of,
    read_batch,
    read_tensordict,
)
from agent_loop.integrations.verl.manager.settings import load_verl, read_settings, run_dir_of
from agent_loop.integrations.verl.manager.stored import BatchName, TrajectoryFiles, batch_name
from agent_loop.integrations.verl.manager.tools import load_tools
from agent_loop.rollout.manager import AgentLoopManager
from agent_loop.tracing.tracer import with_trace_names
from agent_loop.trajectory import Trajectory
from agent_loop.types import Row

logger = logging.getLogger(__name__)


class VerlRolloutWorker:
    """Runs the rows of verl's batches with this package. One instance per process."""

    def __init__(
        self,
        config: DictConfig,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
        *,
        number: int = 0,
    ) -> None:
        settings = read_settings(config)
        rollout = config.actor_rollout_ref.rollout
        tools, verls_tools = load_tools(rollout.multi_turn)
        self._parts = VerlParts(
            config,
            tools=verls_tools,
            clients={
                "llm_client": llm_client,
                "teacher_client": teacher_client,
                "reward_loop_worker_handles": reward_loop_worker_handles,
            },
        )
        LoopFromVerl.parts = self._parts
        template, problem = _make_template(self._parts, config, tool_format=rollout.multi_turn.format)
        if problem:
            logger.warning("verl's own single_turn_agent and tool_agent run in this rollout: %s", problem)
        server = VerlClientServer(
            llm_client,
            with_logprobs=rollout.calculate_log_probs,
            is_deterministic=rollout.get("full_determinism", False),
        )
        self._settings = settings
        self._n, self._val_n = rollout.n, rollout.val_kwargs.n
        # Failed trajectories of verl's batches are handled here, and those of its queue by verl.
        own = with_trace_names(settings).model_copy(update={"max_failed_share": 1.0})
        self._manager = AgentLoopManager(
            own, servers=[server], template=template, settings=settings, tools=tools
        )
        self._names = KnownNames(
            tools=tools,
            has_interactions=settings.rollout.multi_turn.interaction_config_path is not None,
            default_agent_loop=rollout.agent.default_agent_loop,
            is_text=not problem,
        )
        self._widths = columns.Widths(
            rollout.prompt_length, rollout.response_length, self._parts.tokenizer.pad_token_id or 0
        )
        self._files = TrajectoryFiles(
            run_dir_of(config), settings=settings, tokenizer=self._parts.tokenizer, worker=number
        )
        self._labels = count()
        self._starting = asyncio.Lock()
        self._is_started = False
        self._writers: dict[str, QueueWriter] = {}
        self._running: set[asyncio.Task[None]] = set()

    # -- V0: a DataProto in, a DataProto out -------------------------------------------------------------------------

    async def generate_batch(self, batch: Any, *, places: Sequence[tuple[int, int]] | None = None) -> Any:
        """Run one trajectory for each row of a `DataProto`, and return verl's batch of them.

        A failed trajectory has its tokens so far with a mask of 0. Its score is the mean of its group, which leaves
        the advantages of the group's others as they are; in validation its score is 0.
        """
        name = batch_name(batch.meta_info)
        validate = name.validate
        rows: list[Row] = []
        for values in read_batch(batch):
            is_greedy = not bool(values.pop("__do_sample__", True)) and not validate
            rows.append(make_row(values, self._names, is_greedy=is_greedy))
        records: list[VerlRecord] = [row[RECORD] for row in rows]
        for number, record in enumerate(records):
            record.place = places[number] if places else (number, 0)

        async def finish(number: int) -> None:
            record = records[number]
            if len(record.trajectories) > 1:
                raise DataError(
                    f"agent loop {record.agent_name!r} returned {len(record.trajectories)} outputs for one row; return "
                    "one, or set trainer.use_v1=true"
                )
            record.outputs = [output] = outputs_in_verls_form(record)
            output.extra_fields["raw_prompt"] = record.row["raw_prompt"]
            if not record.is_failed:
                await self._parts.score([output], record.row, validate=validate)

        await self._run(rows, validate=validate, finish=finish)
        await self._files.write(name, records)
        ordered = [record.outputs[0] for record in records]
        failed = [number for number, record in enumerate(records) if record.is_failed]
        self._refuse_failures(records, failed)
        for number in failed:
            self._neutralize(ordered, records, number, validate=validate)
        return self._make_batch(ordered, batch, validate=validate)

    def _make_batch(self, outputs: Sequence[Any], source: Any, *, validate: bool) -> Any:
        tensors = columns.padded_columns(outputs, self._widths)
        objects = {} if self._parts.has_rewards else dict(source.non_tensor_batch)
        if not self._parts.has_rewards and "agent_name" not in objects:
            objects["agent_name"] = columns.objects([self._names.default_agent_loop] * len(outputs))
        if self._parts.processor is None:
            tensors["position_ids"] = positions_of(tensors["attention_mask"])
            multi_modal_inputs: list[Any] = [{} for _ in outputs]
        else:
            inputs = [
                self._parts.model_inputs(
                    output, input_ids=tensors["input_ids"][row], attention_mask=tensors["attention_mask"][row]
                )
                for row, output in enumerate(outputs)
            ]
            tensors["position_ids"] = torch.stack([positions for positions, _ in inputs])
            multi_modal_inputs = [each for _, each in inputs]
        tensors |= columns.routed_experts_column(outputs, self._widths)
        tensors |= columns.teacher_columns(outputs, self._widths)
        tensors |= columns.score_columns(outputs, tensors, prompt_width=self._widths.prompt)
        objects |= columns.object_columns(outputs)
        objects["multi_modal_inputs"] = columns.objects(multi_modal_inputs)
        meta: dict[str, Any] = {"metrics": [output.metrics.model_dump() for output in outputs]}
        if "rm_scores" in tensors:
            meta["reward_extra_keys"] = columns.reward_extra_keys(outputs)
        tensordict = load_verl("tensordict:TensorDict")(tensors, batch_size=len(outputs))
        return load_verl("verl.protocol:DataProto")(
            batch=tensordict, non_tensor_batch=objects, meta_info=meta
        )

    def _refuse_failures(self, records: Sequence[VerlRecord], failed: Sequence[int]) -> None:
        for number in failed:
            failure = records[number].trajectories[0].output.failure
            logger.error("trajectory %d failed: %s", number, failure.traceback if failure else "")
        share = self._settings.rollout.max_failed_share
        if len(failed) > share * len(records):
            failure = records[failed[0]].trajectories[0].output.failure
            raise RolloutError(
                f"{len(failed)} of {len(records)} trajectories failed, over agent_loop_config.rollout.max_failed_share="
                f"{share}; the first error: {failure.traceback if failure else ''}"
            )

    def _neutralize(
        self, outputs: Sequence[Any], records: Sequence[VerlRecord], number: int, *, validate: bool
    ) -> None:
        """Give a failed trajectory at least one token, a mask of 0, and the mean score of its group."""
        output = outputs[number]
        if not len(output.response_ids):
            output.response_ids = [self._parts.tokenizer.eos_token_id or self._widths.pad_token_id]
        output.response_mask = [0] * len(output.response_ids)
        output.response_logprobs = None
        if not self._parts.has_rewards:
            return
        group = records[number].row.get("uid")
        scores = [
            other.reward_score
            for other, record in zip(outputs, records, strict=True)
            if not record.is_failed and group is not None and record.row.get("uid") == group
        ]
        output.reward_score = 0.0 if validate or not scores else sum(scores) / len(scores)

    # -- V1: a TensorDict in, entries of TransferQueue out -----------------------------------------------------------

    async def start_batch(self, batch: Any, *, first_group: int = 0) -> None:
        """Start the trajectories of a `TensorDict`, and return without waiting. They go to the queue as they end."""
        name = batch_name(batch)
        validate = name.validate
        rows: list[Row] = []
        sizes: dict[str, int] = {}
        for group, values in enumerate(read_tensordict(batch), start=first_group):
            values.pop("validate", None)
            n = int(values.pop("__rollout_n__", self._val_n if validate else self._n))
            is_greedy = not bool(values.pop("__do_sample__", True)) and not validate
            sizes[str(values["uid"])] = n
            for session in range(n):
                row = make_row({**values, "session_id": session}, self._names, is_greedy=is_greedy)
                row[RECORD].place = (group, session)
                rows.append(row)
        writer = self._writer("val" if validate else "train")
        await writer.put([QueueEntry(uid, {"status": "running"}) for uid in sizes])
        task = asyncio.get_running_loop().create_task(
            self._run_to_queue(rows, sizes=sizes, name=name, writer=writer)
        )
        self._running.add(task)  # the event loop keeps no reference
        task.add_done_callback(self._running.discard)

    async def _run_to_queue(
        self,
        rows: Sequence[Row],
        *,
        sizes: Mapping[str, int],
        name: BatchName,
        writer: QueueWriter,
    ) -> None:
        left, failed = dict(sizes), set[str]()

        async def finish(number: int) -> None:
            record: VerlRecord = rows[number][RECORD]
            uid = str(record.row["uid"])
            try:
                entries = await self._entries(record, validate=name.validate)
            except Exception:  # the group fails, as in verl
                logger.exception("the score of a trajectory of uid=%s failed", uid)
                entries = []
            if entries:
                await writer.put(entries)
            else:
                failed.add(uid)
            left[uid] -= 1
            if not any(left.values()):
                # before the trainer knows that the batch has ended
                await self._files.write(name, [row[RECORD] for row in rows])
            if not left[uid]:
                status = "failure" if uid in failed else "finished"
                await writer.put([QueueEntry(uid, {"status": status})])

        try:
            await self._run(rows, validate=name.validate, finish=finish)
        except Exception:  # nobody awaits this task; verl's trainer reads the statuses
            logger.exception("a batch failed")
            await writer.put([QueueEntry(uid, {"status": "failure"}) for uid, num in left.items() if num])

    async def _entries(self, record: VerlRecord, *, validate: bool) -> list[QueueEntry]:
        """Return the queue entries of a trajectory. None if it failed."""
        if record.is_failed:
            failure = record.trajectories[0].output.failure
            trace = failure.traceback if failure else ""
            logger.error("a trajectory of uid=%s failed: %s", record.row["uid"], trace)
            return []
        record.outputs = outputs = outputs_in_verls_form(record)
        await self._parts.score(outputs, record.row, validate=validate)
        last = outputs[-1]
        if last.reward_score is not None:
            for output in outputs[:-1]:
                output.reward_score = last.reward_score
                output.extra_fields["reward_extra_info"] = last.extra_fields.get("reward_extra_info", {})
        entries: list[QueueEntry] = []
        for index, output in enumerate(outputs):
            ids = torch.tensor([*output.prompt_ids, *output.response_ids], dtype=torch.int64)
            positions, inputs = self._parts.model_inputs(
                output, input_ids=ids, attention_mask=torch.ones_like(ids)
            )
            key = f"{record.row['uid']}_{record.row['session_id']}_{index}"
            entries.append(
                trajectory_entry(
                    output, key=key, row=record.row, position_ids=positions, multi_modal_inputs=inputs
                )
            )
        return entries

    def _writer(self, partition: str) -> QueueWriter:
        if not self._writers:
            load_verl("transfer_queue:init")()
        if partition not in self._writers:
            self._writers[partition] = QueueWriter(partition)
        return self._writers[partition]

    # -- both ----------------------------------------------------------------------------------------------------

    async def _run(self, rows: Sequence[Row], *, validate: bool, finish: Callable[[int], Any]) -> None:
        """Run one trajectory per row, and call `finish` with the number of each row as its trajectory ends."""
        await self._start()
        async with asyncio.TaskGroup() as tasks:

            def ended(trajectory: Trajectory) -> None:
                record: VerlRecord = rows[trajectory.group][RECORD]
                record.trajectories.append(trajectory)
                if len(record.trajectories) == 1:
                    # The task begins when all branches of the trajectory are here.
                    tasks.create_task(finish(trajectory.group))

            await self._manager.run(
                rows, n=1, validate=validate, label=str(next(self._labels)), on_trajectory=ended
            )

    async def _start(self) -> None:
        async with self._starting:
            if not self._is_started:
                await self._manager.start()
                self._is_started = True


def _make_template(parts: VerlParts, config: DictConfig, *, tool_format: str) -> tuple[ChatTemplate, str]:
    """Return the chat template, and the reason why the shipped loops of this package cannot use it, or "".

    With such a reason, loops of verl run instead, which have their own templates.
    """
    hf_config = parts.hf_config
    text_config = getattr(hf_config, "text_config", None) or hf_config
    vocab_size = getattr(text_config, "vocab_size", None)
    try:
        template = ChatTemplate(parts.tokenizer, tool_parser=tool_format, vocab_size=vocab_size)
        variables: Any = config.data.get("apply_chat_template_kwargs") or {}
        template = template.with_variables(dict(variables))
    except (ChatTemplateError, ConfigError) as error:
        return _plain_template(parts, vocab_size=vocab_size, error=error), str(error)
    if parts.processor is not None:
        return template, "the model has a processor for images or videos"
    if config.actor_rollout_ref.rollout.get("enable_rollout_routing_replay", False):
        return template, "enable_rollout_routing_replay is set"
    return template, ""


def _plain_template(parts: VerlParts, *, vocab_size: int | None, error: AgentLoopError) -> ChatTemplate:
    """Return a template without verl's settings, for the manager."""
    try:
        return ChatTemplate(parts.tokenizer, vocab_size=vocab_size)
    except (ChatTemplateError, ConfigError):
        raise error from None
