"""Run the stages: `python -m tests.gpu`."""

import sys

from tests.gpu.program import main

if __name__ == "__main__":
    sys.exit(main())
