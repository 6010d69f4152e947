#!/usr/bin/env bash
# Create an environment with Tinker's SDK, for the tests marked `tinker`. Needs Python 3.11 or newer and about 2 GB.
#   tests/tinker/install_tinker.sh VENV
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:?usage: install_tinker.sh VENV}
python=${PYTHON:-python3.11}

"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable '.[tinker]' 'tinker>=0.38' \
    'pytest>=8.2' 'pytest-timeout>=2.3' 'pytest-rerunfailures>=15' 'hypothesis>=6.100'
"$venv/bin/python" -c 'import tinker, agent_loop; print("tinker", tinker.__version__, "is installed")'
