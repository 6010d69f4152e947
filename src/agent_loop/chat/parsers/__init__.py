"""Tool parsers. Importing this package registers the parsers that ship."""

from agent_loop.chat.parsers.completion_walker import THINK, ReasoningMarks
from agent_loop.chat.parsers.gemma import GemmaToolParser
from agent_loop.chat.parsers.gpt_oss import GptOssToolParser
from agent_loop.chat.parsers.hermes import HermesToolParser
from agent_loop.chat.parsers.llama3_json import Llama3JsonToolParser
from agent_loop.chat.parsers.mistral import GraniteToolParser, MistralToolParser
from agent_loop.chat.parsers.pythonic import PythonicToolParser
from agent_loop.chat.parsers.response_template import ResponseTemplateParser, detect_parser
from agent_loop.chat.parsers.sections import DeepSeekV3ToolParser, KimiK2ToolParser
from agent_loop.chat.parsers.tagged import (
    DeepSeekV4ToolParser,
    GlmToolParser,
    KimiK3ToolParser,
    MiniMaxM2ToolParser,
    Qwen3CoderToolParser,
    SeedOssToolParser,
)
from agent_loop.chat.parsers.tool_parser import ToolParser

__all__ = [
    "THINK",
    "DeepSeekV3ToolParser",
    "DeepSeekV4ToolParser",
    "GemmaToolParser",
    "GlmToolParser",
    "GptOssToolParser",
    "GraniteToolParser",
    "HermesToolParser",
    "KimiK2ToolParser",
    "KimiK3ToolParser",
    "Llama3JsonToolParser",
    "MiniMaxM2ToolParser",
    "MistralToolParser",
    "PythonicToolParser",
    "Qwen3CoderToolParser",
    "ReasoningMarks",
    "ResponseTemplateParser",
    "SeedOssToolParser",
    "ToolParser",
    "detect_parser",
]
