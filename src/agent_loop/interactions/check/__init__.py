"""The conformance suite of interactions: does an implementation of `BaseInteraction` keep the contract?

```python
from agent_loop.interactions.check import check_interaction

report = await check_interaction(interaction, interaction_kwargs={"ground_truth": "42"}, answers=["#### 41", "#### 42"])
report.raise_if_failed()
```

`agent-loop check-interaction config.yaml` does the same from a shell.
"""

from agent_loop.interactions.check.suite import check_interaction as check_interaction
