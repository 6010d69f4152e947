"""On-policy distillation: teachers on servers score the policy's own trajectories, and the policy learns from them.

`open_teachers` starts the servers, `open_scoring` asks them about the trajectories of a step, `Lessons` brings the
scores into the batch, and `TeacherTargets` makes a loss or advantages of them.
"""
