#!/usr/bin/env bash
# Create an environment in which SGLang runs on a CPU, for the tests in tests/engines. Needs Python 3.11 and about 3 GB.
#   tests/engines/install_sglang.sh VENV
# SGLang's package requires CUDA builds of many libraries. Its torch code does not need them, so they are not installed.
# sglang_stubs replaces two modules that SGLang imports anyway.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:?usage: install_sglang.sh VENV}
python=${PYTHON:-python3.11}

"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)

# torch is installed first and named again below, so that no package selects another version. If the default index has
# only builds for GPUs, add the build for CPUs as a find-links or an extra index in pip's configuration.
"${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps sglang==0.5.23 torchvision==0.28.0 compressed-tensors==0.18.0
# pip lists the requirements of SGLang that are missing on purpose; the list is filtered out.
"${pip[@]}" torch==2.13.0 transformers==5.19.0 tokenizers==0.23.2 xgrammar==0.2.7 apache-tvm-ffi==0.1.11 \
    blobfile==3.0.0 openai==2.8.0 openai-harmony==0.0.4 sentencepiece==0.2.1 soundfile==0.13.1 \
    'llguidance>=1.7.6,<2' 'uvicorn>=0.51' aiohttp datasets distro easydict einops fastapi gguf interegular ipython \
    loguru msgspec ninja numpy orjson partial_json_parser pillow prometheus-client psutil py-spy pybase64 pydantic \
    python-multipart pyzmq regex requests scipy setproctitle tiktoken tqdm uvloop watchfiles xxhash zstandard \
    2> >(grep -v -e '^sglang .* requires' -e 'dependency resolver' >&2)
"${pip[@]}" --no-deps --editable .
"${pip[@]}" torch==2.13.0 transformers==5.19.0 'omegaconf>=2.3,<3' 'tensordict>=0.12,<1' 'pyarrow>=15' \
    'packaging>=23' 'rich>=13.7' 'typer>=0.15' 'jsonschema>=4.21' 'safetensors>=0.4.3' \
    'pytest>=8.2' 'pytest-timeout>=2.3' 'pytest-rerunfailures>=15' 'hypothesis>=6.100' \
    2> >(grep -v -e '^sglang .* requires' -e 'dependency resolver' >&2)

stubs=$PWD/tests/engines/sglang_stubs
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\nimport sglang_cpu\n' "$stubs" > "$packages/sglang_cpu.pth"

SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -W ignore -c '
import sglang, agent_loop
from sglang.srt.entrypoints.engine import Engine
print("SGLang", sglang.__version__, "is installed")'
