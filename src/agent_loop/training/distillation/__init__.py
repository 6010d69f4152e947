"""On-policy distillation: teachers on servers score the policy's own trajectories, and the policy learns from them.

`open_teachers` starts the servers, `open_scoring` asks them about the trajectories of a step, `Lessons` brings the
scores into the batch, and `TeacherTargets` makes a loss or advantages of them.
"""

from agent_loop.training.distillation.lessons import Lessons
from agent_loop.training.distillation.loss import divergence
from agent_loop.training.distillation.scoring import Scoring, open_scoring
from agent_loop.training.distillation.targets import COLUMNS, TeacherTargets
from agent_loop.training.distillation.teachers import Teachers, open_teachers
from agent_loop.training.distillation.vocabulary import refuse_other_teachers

__all__ = [
    "COLUMNS",
    "Lessons",
    "Scoring",
    "TeacherTargets",
    "Teachers",
    "divergence",
    "open_scoring",
    "open_teachers",
    "refuse_other_teachers",
]
