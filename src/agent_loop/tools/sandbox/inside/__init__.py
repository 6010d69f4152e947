"""What runs in other processes than the agent's: needs the standard library alone, imports nothing from above."""
