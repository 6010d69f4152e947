"""Floor of the comparison: a loop written by hand for this workload, which only encodes and decodes.

    python -m overhead.floor FOLDER ENCODER

It renders and encodes the prompt, decodes completions, parses calls, encodes tool results with the template's text
around them, and pads. It has no tasks, limits, timeouts, records or error handling.
"""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from overhead import tools
from overhead.ours import load_template
from overhead.rounds import Columns, Runner, serve
from overhead.shapes import TAIL_TOKENS, Conversation, Turn, Workload
from overhead.workload import REPLY

END = "<|im_end|>"


class FloorRunner(Runner):
    """Runner of the floor for one scenario."""

    def __init__(self, workload: Workload, *, template: Any) -> None:
        tools.REPLIES.update(workload.replies)
        self._workload = workload
        self._answers = workload.answers
        self._render = template.tokenizer.apply_chat_template
        self._encode = template.encoder.encode
        self._decode = template.encoder.decode
        self._pad_id = int(template.tokenizer.pad_token_id)

    async def run(self) -> Columns:
        shape, rows = self._workload.shape, len(self._workload.conversations)
        columns = Columns(
            prompts=np.full((rows, shape.prompt_width), self._pad_id, np.int64),
            responses=np.full((rows, shape.response_width), self._pad_id, np.int64),
            response_mask=np.zeros((rows, shape.response_width), np.int64),
            logprobs=np.zeros((rows, shape.response_width), np.float32),
        )
        for row, conversation in enumerate(self._workload.conversations):
            prompt, response, mask, logprobs = await self.converse(conversation, number=row)
            columns.prompts[row, shape.prompt_width - len(prompt) :] = prompt
            columns.responses[row, : len(response)] = response
            columns.response_mask[row, : len(mask)] = mask
            columns.logprobs[row, : len(logprobs)] = logprobs
        return columns

    def columns(self, result: Columns) -> Columns:
        return result

    async def answer(self, tail: tuple[int, ...], *, number: int, num_turns_done: int) -> Turn:
        """Return the model's turn after a context.

        Args:
            tail: The last tokens of the context.
            number: Number of the trajectory.
            num_turns_done: Number of earlier turns in the trajectory.
        """
        return self._answers[tail]

    async def converse(
        self, conversation: Conversation, *, number: int
    ) -> tuple[list[int], list[int], list[int], list[float]]:
        """Run one trajectory, and return its prompt, response, mask and log-probs."""
        text = self._render(
            conversation.messages,
            tools=self._workload.tool_schemas or None,
            tokenize=False,
            add_generation_prompt=True,
        )
        prompt: list[int] = self._encode(text)
        response: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        tail = prompt[-TAIL_TOKENS:]
        for num_turns_done in count():
            turn = await self.answer(tuple(tail), number=number, num_turns_done=num_turns_done)
            response += turn.token_ids
            mask += [1] * len(turn.token_ids)
            logprobs += turn.logprobs
            text = self._decode(turn.token_ids)
            _, call, rest = text.partition("<tool_call>\n")
            if not call:
                break
            arguments = json.loads(rest.partition("\n</tool_call>")[0])["arguments"]
            reply = self._encode(REPLY.format(await tools.search(**arguments)))[1:]
            response += reply
            mask += [0] * len(reply)
            logprobs += [0.0] * len(reply)
            tail = response[-TAIL_TOKENS:]
        return prompt, response, mask, logprobs


def main() -> None:
    folder, encoder = Path(sys.argv[1]), sys.argv[2]
    template = load_template(folder, encoder=encoder)
    serve(lambda workload: FloorRunner(workload, template=template), folder)


if __name__ == "__main__":
    main()
