"""The tool `search`: full-text search of a local corpus, or requests to a retrieval service."""
