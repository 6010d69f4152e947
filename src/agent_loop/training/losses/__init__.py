"""Losses of policy and critic: pure functions of tensors. B rows, T response tokens, V tokens of the vocabulary.

A value at a masked token changes no result and gets a gradient of exactly 0, even if it is infinite or NaN.
"""
