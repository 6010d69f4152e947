"""Multi-turn tasks of BFCL: simulated APIs with state, and users who ask for something in every turn."""
