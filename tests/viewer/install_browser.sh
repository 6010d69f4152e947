#!/usr/bin/env bash
# Find a browser for the tests, or install Chromium if possible.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update --quiet
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends chromium
else
    echo "test-browser needs chromium or google-chrome on PATH; install one of them" >&2
    exit 1
fi
