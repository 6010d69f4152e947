"""Checks of supervised training before it starts. None imports torch, loads a model or encodes a conversation."""

from __future__ import annotations

from functools import partial

from agent_loop.checks.before_start import Checks, check_run_dir, small_sources
from agent_loop.checks.model_files import check_model, check_template
from agent_loop.config import Config
from agent_loop.rollout.rows import load_rows
from agent_loop.storage.query import Condition
from agent_loop.training.supervised.settings import check_sources
from agent_loop.training.supervised.stored import is_stored


def supervised_checks(config: Config, *, resumes: bool, overwrites: bool, is_thorough: bool) -> Checks:
    """Return the checks of a supervised run.

    Args:
        config: All settings.
        resumes: Whether the run is resumed.
        overwrites: Whether the run may replace another one.
        is_thorough: Whether large files are read too.
    """
    sft = config.sft
    return {
        "sft.files": partial(_check_training, config, is_thorough=is_thorough),
        "sft.val_files": partial(_check_examples, config, sft.val_files, is_thorough=is_thorough),
        "sft.where": partial(_check_conditions, sft.conditions),
        "model": partial(check_model, config),
        "chat template": partial(check_template, config),
        "run folder": partial(check_run_dir, config, resumes=resumes, overwrites=overwrites),
    }


def _check_training(config: Config, *, is_thorough: bool) -> str:
    check_sources(config)
    return _check_examples(config, config.sft.files, is_thorough=is_thorough)


def _check_examples(config: Config, sources: list[str], *, is_thorough: bool) -> str:
    stored = [source for source in sources if is_stored(source)]
    found = [f"trajectories of {source}" for source in stored]
    chats = [source for source in sources if source not in stored]
    read = chats if is_thorough else small_sources(chats)
    if read:
        found.append(
            f"{len(load_rows(read, prompt_key=config.sft.messages_key))} conversations of {', '.join(read)}"
        )
    found += [f"{source}, not read" for source in chats if source not in read]
    return ", ".join(found)


def _check_conditions(conditions: list[str]) -> str:
    for condition in conditions:
        Condition.parse(condition)
    return " and ".join(conditions)
