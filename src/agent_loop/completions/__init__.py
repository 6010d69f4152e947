"""OpenAI completions on top of servers that take and return token ids."""
