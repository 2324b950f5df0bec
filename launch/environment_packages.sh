#!/usr/bin/env bash
# Makes .venv-packages: an interpreter for the packages in environment_packages.txt, whose requirements exclude those of
# vLLM. It sees the packages of .venv behind its own, so that only what differs is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m venv --without-pip --clear .venv-packages
shared=$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
own=$(.venv-packages/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
echo "$shared" > "$own/shared.pth"
.venv/bin/python -m pip --disable-pip-version-check --python .venv-packages/bin/python install --quiet --no-deps \
    -r launch/environment_packages.txt
