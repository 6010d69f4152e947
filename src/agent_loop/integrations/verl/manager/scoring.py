"""Scores, teachers and model inputs of finished trajectories, computed by verl's own worker class."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from omegaconf import DictConfig, open_dict

from agent_loop.integrations.verl.manager.verl_package import load_verl


class VerlParts:
    """Parts of verl's `AgentLoopWorker`: tokenizer, registered loops, rewards, teachers, and inputs of vision models.

    Args:
        config: The configuration of the verl run.
        tools: Tools in verl's form, for loops written for verl.
        clients: `llm_client`, `teacher_client` and `reward_loop_worker_handles`.
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
        """Return position ids and `multi_modal_inputs` of one row.

        Args:
            output: The output in verl's form.
            input_ids: Shape [num_tokens].
            attention_mask: Shape [num_tokens].
        """
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
