"""Rows behind TRL's prompts. TRL passes on the prompts alone, and Arrow would change the other columns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, cast

from agent_loop.errors import ConfigError, DataError
from agent_loop.types import Message, Row

ROW_KEY = "agent_loop_row"
"""Key in each message of a TRL prompt that holds the number of the row."""


class RowStore:
    """Store of unchanged rows, whose numbers are carried by the prompts for TRL."""

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def dataset(self, rows: Sequence[Row]) -> Any:
        """Return a `datasets.Dataset` with one column, `prompt`, whose messages hold the number of their row.

        Args:
            rows: Rows with `raw_prompt`. TRL sees role and text of its messages, for its logs and for reward models.

        Raises:
            ConfigError: TRL is not installed.
        """
        try:
            from datasets import Dataset  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise ConfigError('agent_loop.integrations.trl needs: pip install "agent-loop[trl]"') from error
        first = len(self._rows)
        self._rows.extend(rows)
        prompts = [
            [_with_row_number(message, number=number) for message in row["raw_prompt"]]
            for number, row in enumerate(rows, start=first)
        ]
        return cast(Any, Dataset).from_dict({"prompt": prompts})

    def rows_of(self, prompts: Sequence[Any]) -> tuple[list[Row], int]:
        """Return the rows of prompts, and the number of samples per row.

        Returns:
            Each row once and the group size if every row is repeated equally often, as TRL does. Otherwise one row per
            prompt and 1. In both cases the order of the samples is the order of the prompts.

        Raises:
            DataError: A prompt is not from a data set of `dataset`.
        """
        numbers = [self._number_of(prompt) for prompt in prompts]
        runs = [(number, len(list(run))) for number, run in groupby(numbers)]
        sizes = {size for _, size in runs}
        if len(sizes) == 1:
            return [self._rows[number] for number, _ in runs], sizes.pop()
        return [self._rows[number] for number in numbers], 1

    def _number_of(self, prompt: Any) -> int:
        messages = cast(list[Any], prompt) if isinstance(prompt, list) else []
        first = cast(dict[str, Any], messages[0]) if messages and isinstance(messages[0], dict) else {}
        number = first.get(ROW_KEY)
        if not isinstance(number, int) or not 0 <= number < len(self._rows):
            raise DataError(
                f"a prompt has {ROW_KEY}={number!r}, which is not a row of these rollouts; pass "
                "train_dataset=rollouts.dataset(rows) to the trainer, and eval_dataset likewise"
            )
        return number


def _with_row_number(message: Message, *, number: int) -> dict[str, Any]:
    return {"role": message["role"], "content": _text(message.get("content")), ROW_KEY: number}


def _text(content: Any) -> str:
    if not isinstance(content, list):
        return str(content or "")
    parts = [
        cast(dict[str, Any], part) if isinstance(part, dict) else {"text": part}
        for part in cast(list[Any], content)
    ]
    return "".join(str(part.get("text") or "") for part in parts)
