#!/usr/bin/env bash
# Creates an environment with verl and this package, for tests/verl and the benchmarks that compare with verl. Needs
# Python 3.11 and about 3 GB.
#   benchmarks/install_verl.sh VENV
set -euo pipefail
venv=${1:?usage: install_verl.sh VENV}
python=${PYTHON:-python3.11}

"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)

# torch is installed first, so that no other package selects another version. If the default index only has a build for
# GPUs, configure find-links or an extra index with a CPU build in pip's own configuration.
"${pip[@]}" torch==2.13.0
# verl's dependencies include packages that agent loops do not need, such as engines for GPUs.
"${pip[@]}" --no-deps verl==0.9.1 TransferQueue==0.1.11
"${pip[@]}" torch==2.13.0 'ray[default]==2.60.0' transformers==5.10.4 tensordict==0.10.0 hydra-core omegaconf datasets \
    peft accelerate codetiming cachetools dill torchdata pybind11 pylatexenc msgspec pyzmq pillow psutil uvicorn fastapi

"${pip[@]}" aiohttp google-re2 jsonschema orjson rich safetensors tiktoken typer \
    hypothesis 'pytest>=8.2' 'pytest-timeout>=2.3' 'pytest-rerunfailures>=15' 'hypothesis>=6.100'
# verl needs an older tensordict than this package declares. Both work with what this package uses of it.
"${pip[@]}" --no-deps --editable "$(dirname "$0")/.."

"$venv/bin/python" -c 'import verl; print("verl", verl.__version__, "is installed")'
