"""Agent loops, tools and servers of this package for TRL's trainers.

```python
from agent_loop.integrations.trl import AgentLoopRollouts

with AgentLoopRollouts(config) as rollouts:
    trainer = GRPOTrainer(
        model,
        reward_funcs=rollouts.reward_func,
        rollout_func=rollouts.rollout_func,
        train_dataset=rollouts.dataset(rows),
        args=args,
    )
    trainer.train()
```

docs/trl.md describes what TRL decides, what the configuration decides, and how to pass a worker to `AsyncGRPOTrainer`.
"""

from agent_loop.integrations.trl.rollouts import AgentLoopRollouts as AgentLoopRollouts
from agent_loop.integrations.trl.worker import AgentLoopRolloutWorker as AgentLoopRolloutWorker
from agent_loop.integrations.trl.worker import AgentLoopWeightTransfer as AgentLoopWeightTransfer
