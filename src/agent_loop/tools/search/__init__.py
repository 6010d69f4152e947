"""The tool `search`: a local corpus, or a retrieval service."""
