"""`python -m agent_loop` is the command `agent-loop`; `torchrun -m agent_loop train` starts it several times."""

from __future__ import annotations

from agent_loop.cli import main

if __name__ == "__main__":
    main()
