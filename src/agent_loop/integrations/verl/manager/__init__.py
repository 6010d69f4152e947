"""Agent loop manager for verl's trainer: rollouts of this package behind verl's interface.

Needs verl. One setting selects it:
`+actor_rollout_ref.rollout.agent.agent_loop_manager_class=agent_loop.integrations.verl.VerlAgentLoopManager`
"""
