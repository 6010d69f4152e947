"""The names that code written for verl's agent loop imports: changing its imports to this module is enough.

```python
from agent_loop.integrations.verl import AgentLoopBase, AgentLoopOutput, register, rollout_trace_op, simple_timer
```

docs/from-verl.md says what stands for what, and what differs.
"""

from agent_loop.integrations.verl.interactions import (
    initialize_interactions_from_config as initialize_interactions_from_config,
)
from agent_loop.integrations.verl.loops import AgentLoopBase as AgentLoopBase
from agent_loop.integrations.verl.loops import AgentLoopOutput as AgentLoopOutput
from agent_loop.integrations.verl.loops import LLMServerClient as LLMServerClient
from agent_loop.integrations.verl.parsing import FunctionCall as FunctionCall
from agent_loop.integrations.verl.parsing import ToolParser as ToolParser
from agent_loop.integrations.verl.timing import simple_timer as simple_timer
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
from agent_loop.tools.base import ToolResponse as ToolResponse
from agent_loop.tracing import rollout_trace_attr as rollout_trace_attr
from agent_loop.tracing import rollout_trace_op as rollout_trace_op
from agent_loop.trajectory import AgentLoopMetrics as AgentLoopMetrics

AsyncLLMServerManager = LLMServerClient
"""The name of `LLMServerClient` in earlier versions of verl."""
