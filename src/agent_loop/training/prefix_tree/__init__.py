"""Training on the prefix tree of a batch, in which each distinct token is computed once.

`tree` builds the tree and divides rows by a token budget, `layout` arranges a tree in one line and lists the blocks of
its attention, and `attention` computes the blocks in place of a model's own attention.
"""
