"""Conformance suite of servers on the vLLM server, with untied weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent_loop.checks import Reference, check_server
from tests.engines.common import MAX_MODEL_LEN, make_model_folder
from tests.engines.vllm_cases import VLLM


def test_vllm_keeps_the_contract_of_servers(tmp_path: Path) -> None:
    path = make_model_folder(tmp_path / "untied", is_tied=False)
    server = VLLM.server(path)

    async def main() -> None:
        await server.start()
        try:
            report = await check_server(
                server, max_model_len=MAX_MODEL_LEN, reference=Reference.load(path), on_result=print
            )
        finally:
            await server.close()
        report.raise_if_failed()
        assert len(report.named("passed")) > 15
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
