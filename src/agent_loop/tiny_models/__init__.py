"""Models that are small enough to train from scratch on one CPU core, and their tokenizers."""
