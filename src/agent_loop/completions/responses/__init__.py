"""The OpenAI Responses API, translated to and from chat completions."""
