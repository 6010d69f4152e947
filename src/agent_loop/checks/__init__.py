"""Conformance checks of servers, models, tools, interactions, sandboxes and tasks.

```python
from agent_loop.checks import check_tool

report = await check_tool(tool, calls=[{"expression": "1 + 1"}])
report.raise_if_failed()
```

`agent-loop check` runs the same checks from a shell. The names below are imported at first use: the checks of servers
and models load torch and transformers, the others do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_loop.lazy_exports import lazy_exports
from agent_loop.testing.conformance import CheckReport, CheckResult

if TYPE_CHECKING:
    from agent_loop.checks.instances import check_interaction, check_tool
    from agent_loop.checks.model import check_model
    from agent_loop.checks.reference import Reference, vocab_size_of
    from agent_loop.checks.sandbox import check_sandbox
    from agent_loop.checks.server import check_server
    from agent_loop.checks.tasks import check_tasks

__all__ = [
    "CheckReport",
    "CheckResult",
    "Reference",
    "check_interaction",
    "check_model",
    "check_sandbox",
    "check_server",
    "check_tasks",
    "check_tool",
    "vocab_size_of",
]

_MODULE_OF = {
    "Reference": "reference",
    "check_interaction": "instances",
    "check_model": "model",
    "check_sandbox": "sandbox",
    "check_server": "server",
    "check_tasks": "tasks",
    "check_tool": "instances",
    "vocab_size_of": "reference",
}


__getattr__ = lazy_exports(__name__, _MODULE_OF)
