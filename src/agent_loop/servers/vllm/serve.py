"""Process of `VLLMServer`: runs vLLM's HTTP server with options from a file."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from agent_loop.errors import ConfigError
from agent_loop.servers.base import refuse_unknown_options
from agent_loop.servers.packages import import_engine
from agent_loop.servers.process import end_with_children, refuse_option
from agent_loop.servers.vllm.options import PACKAGE, SUPPORTED


def main(options_file: str) -> None:
    """Serve until the process is terminated."""
    options: dict[str, Any] = json.loads(Path(options_file).read_text(encoding="utf-8"))
    parsing, entry, cli_args = (
        import_engine(name, package=PACKAGE, supported=SUPPORTED)
        for name in (
            "vllm.utils.argparse_utils",
            "vllm.entrypoints.launchers.api_server.entry",
            "vllm.entrypoints.launchers.cli_args",
        )
    )
    try:
        parser: Any = cli_args.make_arg_parser(parsing.FlexibleArgumentParser())
        defaults: Namespace = parser.parse_args([])
        refuse_unknown_options(options, known=vars(defaults))
        nested = [key for key, value in options.items() if isinstance(value, dict)]
        # Parsed, so that they become vLLM's own types.
        texts = [f"--{key.replace('_', '-')}={json.dumps(options.pop(key))}" for key in nested]
        args: Namespace = parser.parse_args(texts)
        vars(args).update(options)
        cli_args.validate_parsed_serve_args(args)
        end_with_children()
        asyncio.run(entry.run_server(args))
    except (ConfigError, ValueError, TypeError) as error:
        refuse_option(error)
