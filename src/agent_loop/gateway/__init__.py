"""Gateway that records agent programs, which call the model over the OpenAI or Anthropic API, to the token.

Needs the extra `serve`.
"""

from importlib.util import find_spec

from agent_loop.errors import ConfigError

if any(find_spec(module) is None for module in ("fastapi", "uvicorn")):
    raise ConfigError('agent_program and agent_loop.gateway need: pip install "agent-loop[serve]"')
