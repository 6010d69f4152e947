"""State of one running trajectory."""

from agent_loop.episode.episode import Episode
from agent_loop.episode.turns import Completion, EpisodeMark, EpisodeStopped

__all__ = ["Completion", "Episode", "EpisodeMark", "EpisodeStopped"]
