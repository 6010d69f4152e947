#!/usr/bin/env bash
# Write build/offline: the package, its benchmarks, the wheels that an image with PyTorch and transformers lacks, and
# run.sh, which runs `python -m benchmarks.gpu` on a machine without a network. PYTHON_VERSION is that machine's.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
version=${PYTHON_VERSION:-3.12}
out=build/offline

download() {
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$out/wheels" \
        --python-version "$version" --implementation cp --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "$@"
}

rm -rf "$out"
mkdir -p "$out/wheels"
git ls-files -z --cached --others --exclude-standard src benchmarks examples pyproject.toml README.md LICENSE |
    xargs -0 cp --parents --target-directory "$out"
mv "$out/benchmarks/gpu/run_offline.sh" "$out/run.sh"
download annotated-types attrs cloudpickle google-re2 'importlib-metadata>=8' jsonschema jsonschema-specifications lazy-importer msgspec \
    'omegaconf>=2.3,<2.4' orjson 'pyarrow<20' pydantic pyvers referencing rpds-py tensordict tiktoken typing-inspection zipp
# pydantic works with one version of its core.
core=$("$python" - "$out"/wheels/pydantic-*.whl <<'END'
import re, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
print(re.search(r"Requires-Dist: pydantic-core==(\S+)", wheel.read(metadata).decode()).group(1))
END
)
download "pydantic-core==$core"
# There is no wheel of it: one is built here. It is plain Python.
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$out/wheels" 'antlr4-python3-runtime==4.9.*'
echo "$out: $(du --summarize --human-readable "$out" | cut -f1). Copy it to the machine, and run there: bash offline/run.sh"
