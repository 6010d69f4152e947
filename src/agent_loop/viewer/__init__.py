"""A local web page of a run: its curves, its trajectories down to the token, where its time went."""
