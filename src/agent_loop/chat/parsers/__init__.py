"""Tool parsers. Importing this package registers the parsers that ship."""

from agent_loop.chat.parsers.completion_walker import THINK, ReasoningMarks
from agent_loop.chat.parsers.deepseek_v3 import DeepSeekV3ToolParser
from agent_loop.chat.parsers.detect import detect_parser
from agent_loop.chat.parsers.gemma import GemmaToolParser
from agent_loop.chat.parsers.glm import GlmToolParser
from agent_loop.chat.parsers.gpt_oss import GptOssToolParser
from agent_loop.chat.parsers.hermes import HermesToolParser
from agent_loop.chat.parsers.kimi_k2 import KimiK2ToolParser
from agent_loop.chat.parsers.llama3_json import Llama3JsonToolParser
from agent_loop.chat.parsers.mistral import MistralToolParser
from agent_loop.chat.parsers.qwen3_coder import Qwen3CoderToolParser
from agent_loop.chat.parsers.response_template import ResponseTemplateParser
from agent_loop.chat.parsers.tool_parser import ToolParser

__all__ = [
    "THINK",
    "DeepSeekV3ToolParser",
    "GemmaToolParser",
    "GlmToolParser",
    "GptOssToolParser",
    "HermesToolParser",
    "KimiK2ToolParser",
    "Llama3JsonToolParser",
    "MistralToolParser",
    "Qwen3CoderToolParser",
    "ReasoningMarks",
    "ResponseTemplateParser",
    "ToolParser",
    "detect_parser",
]
