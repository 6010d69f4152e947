"""A tool parser of one's own under a name that ships."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agent_loop.chat.parsers import HermesToolParser, ToolParser
from agent_loop.integrations import verl
from agent_loop.types import ParsedCompletion

WAS_HERMES = r"tool parser 'hermes' was agent_loop.chat.parsers.hermes.HermesToolParser; .* replaces it"


def test_a_shipped_parser_that_is_registered_again_is_replaced_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ToolParser, "_registry", dict(ToolParser.registered()))
    with pytest.warns(UserWarning, match=WAS_HERMES):

        @ToolParser.register("hermes")
        class Silent(ToolParser):
            def parse(self, text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCompletion:
                return ParsedCompletion(text)

    assert isinstance(ToolParser.get("hermes"), Silent)


def test_a_parser_in_verls_form_replaces_a_shipped_one_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verl.ToolParser, "_registry", dict(verl.ToolParser._registry))
    with pytest.warns(UserWarning, match=WAS_HERMES):

        @verl.ToolParser.register("hermes")
        class Silent(verl.ToolParser):
            async def extract_tool_calls(self, responses_ids: Sequence[int]) -> Any:
                return "", []

    assert isinstance(verl.ToolParser.get_tool_parser("hermes", None), Silent)
    assert isinstance(ToolParser.get("hermes"), HermesToolParser)
