#!/usr/bin/env bash
# Create an environment with suites of tasks that others wrote, for the tests in tests/environments. Needs Python 3.11
# and about 3 GB.
#   tests/environments/install_environments.sh DIR
# DIR is a Python environment with this package and the suites. DIR/verifiers is an environment with verifiers, which
# excludes the version of the OpenAI client that other packages need.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=${1:?usage: install_environments.sh DIR}
python=${PYTHON:-python3.11}

"$python" -m venv "$dir"
pip=("$dir/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" --editable ".[gymnasium,minigrid,openenv,reasoning-gym,serve,tau2,textarena]" \
    'openai>=3.52,<4' 'anthropic>=2.12,<3' \
    'pytest>=8.2' 'pytest-timeout>=2.3' 'pytest-rerunfailures>=15' 'hypothesis>=6.100'
# Both pin or need many packages that their tasks do not use; those that they do use follow.
"${pip[@]}" --no-deps 'bfcl-eval==2026.3.*' 'agentdojo==0.1.*'
"${pip[@]}" 'deepdiff>=8.6' 'docstring-parser>=0.15' 'mpmath>=1.3' 'pydantic[email]>=2.7,<3' 'pyyaml>=6' \
    'rank-bm25>=0.2' 'tenacity>=8.5' 'cohere>=5.3.4' 'google-genai>=1.15'

"$python" -m venv "$dir/verifiers"
"$dir/verifiers/bin/python" -m pip install --quiet --disable-pip-version-check 'verifiers==0.4.*' \
    'reasoning-gym>=0.1.25,<0.2'

"$dir/bin/python" -m pip list --disable-pip-version-check |
    grep -iE '^(agentdojo|bfcl|gymnasium|inspect|minigrid|openenv|reasoning|textarena)'
