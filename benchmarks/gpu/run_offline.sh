#!/usr/bin/env bash
# Check the package on this machine's GPU without a network: bash run.sh [--minutes N] [--model FOLDER] ...
# The results are written to gpu.json and gpu.txt beside this script. PYTHON names the interpreter that has PyTorch.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
if [ ! -d "$here/site" ]; then
    # The image's own packages stay as they are.
    "$python" -m pip install --quiet --no-index --no-deps --target "$here/site.part" "$here"/wheels/*.whl
    mv "$here/site.part" "$here/site"
fi
model=()
[ ! -d "$here/model" ] || model=(--model "$here/model")
cd "$here"
PYTHONPATH="$here/src:$here/site" exec "$python" -m benchmarks.gpu --out "$here/gpu.json" "${model[@]}" "$@"
