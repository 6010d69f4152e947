"""Selection of the rows of each step: by epochs, by success so far, and from earlier groups."""

from agent_loop.training.samplers.history import RowHistory, RowResult, row_results
from agent_loop.training.samplers.row_samplers import (
    LoadedSampler,
    SamplerContext,
    curriculum,
    curriculum_weights,
    load_sampler,
    uniform,
)
from agent_loop.training.samplers.selector import RowSelector, Selection, make_selector

__all__ = [
    "LoadedSampler",
    "RowHistory",
    "RowResult",
    "RowSelector",
    "SamplerContext",
    "Selection",
    "curriculum",
    "curriculum_weights",
    "load_sampler",
    "make_selector",
    "row_results",
    "uniform",
]
