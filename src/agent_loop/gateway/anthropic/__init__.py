"""The Anthropic Messages API as a second dialect: translated at the edge, the same behind it."""
