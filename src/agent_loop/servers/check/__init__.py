"""The conformance suite of servers: does an implementation of `AsyncServerBase` keep the contract?

```python
from agent_loop.servers.check import Reference, check_server

report = await check_server(server, reference=Reference.load("path/of/the/model"))
report.raise_if_failed()
```

What a server claims in `abilities` is held against it; what it does not claim is skipped and listed as such. Without a
reference, checks compare the server with itself. `agent-loop check-server config.yaml` does the same from a shell.
"""

from agent_loop.servers.check.reference import Reference as Reference
from agent_loop.servers.check.reference import vocab_size_of as vocab_size_of
from agent_loop.servers.check.report import CheckReport as CheckReport
from agent_loop.servers.check.suite import check_server as check_server
from agent_loop.testing.checks import CheckResult as CheckResult
