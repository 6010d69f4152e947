"""Classes and functions with verl's names, for code that was written for verl's agent loop.

```python
from agent_loop.integrations.verl import AgentLoopBase, AgentLoopOutput, register, rollout_trace_op, simple_timer
```

docs/from-verl.md lists the counterparts of verl's names, and the differences.
"""

from agent_loop.integrations.verl.gsm8k import Gsm8kInteraction as Gsm8kInteraction
from agent_loop.integrations.verl.gsm8k import Gsm8kTool as Gsm8kTool
from agent_loop.integrations.verl.loops import AgentData as AgentData
from agent_loop.integrations.verl.loops import AgentLoopBase as AgentLoopBase
from agent_loop.integrations.verl.loops import AgentLoopOutput as AgentLoopOutput
from agent_loop.integrations.verl.loops import AsyncPartialToolAgentLoop as AsyncPartialToolAgentLoop
from agent_loop.integrations.verl.loops import LLMServerClient as LLMServerClient
from agent_loop.integrations.verl.loops import SingleTurnAgentLoop as SingleTurnAgentLoop
from agent_loop.integrations.verl.loops import ToolAgentLoop as ToolAgentLoop
from agent_loop.integrations.verl.names import RolloutTraceConfig as RolloutTraceConfig
from agent_loop.integrations.verl.names import async_server_class as async_server_class
from agent_loop.integrations.verl.names import get_trajectory_info as get_trajectory_info
from agent_loop.integrations.verl.names import (
    initialize_interactions_from_config as initialize_interactions_from_config,
)
from agent_loop.integrations.verl.names import load_name
from agent_loop.integrations.verl.names import simple_timer as simple_timer
from agent_loop.integrations.verl.parsing import FunctionCall as FunctionCall
from agent_loop.integrations.verl.parsing import HermesToolParser as HermesToolParser
from agent_loop.integrations.verl.parsing import ToolParser as ToolParser
from agent_loop.integrations.verl.parsing import (
    add_generation_prompt_for_gpt_oss as add_generation_prompt_for_gpt_oss,
)
from agent_loop.integrations.verl.parsing import (
    build_gpt_oss_tool_response_text as build_gpt_oss_tool_response_text,
)
from agent_loop.integrations.verl.parsing import (
    format_gpt_oss_tool_response_manually as format_gpt_oss_tool_response_manually,
)
from agent_loop.integrations.verl.rules import default_compute_score as default_compute_score
from agent_loop.integrations.verl.servers import AsyncServerBase as AsyncServerBase
from agent_loop.integrations.verl.tools import BaseTool as BaseTool
from agent_loop.integrations.verl.tools import (
    OpenAIFunctionParametersSchema as OpenAIFunctionParametersSchema,
)
from agent_loop.integrations.verl.tools import OpenAIFunctionPropertySchema as OpenAIFunctionPropertySchema
from agent_loop.integrations.verl.tools import OpenAIFunctionSchema as OpenAIFunctionSchema
from agent_loop.integrations.verl.tools import OpenAIFunctionToolSchema as OpenAIFunctionToolSchema
from agent_loop.integrations.verl.tools import initialize_tools_from_config as initialize_tools_from_config
from agent_loop.interactions.base import BaseInteraction as BaseInteraction
from agent_loop.loops.registry import register as register
from agent_loop.rollout.manager import AgentLoopManager as AgentLoopManager
from agent_loop.rollout.worker import AgentLoopWorker as AgentLoopWorker
from agent_loop.tools.base import ToolResponse as ToolResponse
from agent_loop.tracing import rollout_trace_attr as rollout_trace_attr
from agent_loop.tracing import rollout_trace_op as rollout_trace_op
from agent_loop.trajectory import AgentLoopMetrics as AgentLoopMetrics
from agent_loop.types import AgentState as AgentState
from agent_loop.types import TokenOutput as TokenOutput

AsyncLLMServerManager = LLMServerClient
"""Name of `LLMServerClient` in earlier versions of verl."""

__getattr__ = load_name
