"""Training on the prefix tree of a batch, in which each distinct token is computed once.

`tree` builds the tree and divides rows by a token budget, `layout` arranges a tree in one line and lists the blocks of
its attention, and `attention` computes the blocks in place of a model's own attention.
"""

from agent_loop.training.prefix_tree.attention import refuse_other_layers, tree_inputs, use_tree_attention
from agent_loop.training.prefix_tree.layout import TreeLayout, lay_out
from agent_loop.training.prefix_tree.tree import SortedRows

__all__ = ["SortedRows", "TreeLayout", "lay_out", "refuse_other_layers", "tree_inputs", "use_tree_attention"]
