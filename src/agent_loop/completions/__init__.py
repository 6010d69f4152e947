"""OpenAI completions on top of tokens in, tokens out: requests, replies, and what lies between them."""
