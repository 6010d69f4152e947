"""The conformance suite of tools: does an implementation of `BaseTool` keep the contract?

```python
from agent_loop.tools.check import check_tool

report = await check_tool(tool, calls=[{"expression": "1 + 1"}])
report.raise_if_failed()
```

`agent-loop check-tool calculator --call '{"expression": "1 + 1"}'` does the same from a shell.
"""

from agent_loop.tools.check.suite import check_tool as check_tool
