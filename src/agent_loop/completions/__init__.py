"""OpenAI requests and responses on top of servers that take and return token ids."""
