"""The Anthropic Messages API, translated to and from chat completions."""
