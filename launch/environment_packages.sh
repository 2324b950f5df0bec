#!/usr/bin/env bash
# Makes .venv-packages: an interpreter for the packages in environment_packages.txt, whose requirements conflict with
# vLLM's. It falls back to the packages of .venv, so that only differing packages are installed.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m venv --without-pip --clear .venv-packages
shared=$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
site_packages=$(.venv-packages/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
echo "$shared" > "$site_packages/shared.pth"
.venv/bin/python -m pip --disable-pip-version-check --python .venv-packages/bin/python install --quiet --no-deps \
    -r launch/environment_packages.txt
