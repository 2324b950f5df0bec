#!/usr/bin/env bash
# datasets 5.2.0. `map` with a function of an imported module takes the rows of the module's former text from its cache.
# The cache's key is a hash of the function. One would guess a hash of its code; for an imported function only its name is hashed.
# Seen: after the prompt's wording in the module has changed, a new process maps the same file and gets the old prompts. A function of the
# main script with the same change gives the new ones.
# A prompt template, a gold's clean-up or a filter that was corrected is then not in the data that a run is trained on.
set -euo pipefail
packages=(datasets==5.2.0)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
[ -z "${FINDINGS_LATEST:-}" ] || packages=("${packages[@]%%==*}")
"$work/venv/bin/pip" install --quiet --no-compile "${packages[@]}" || exit 2
cd "$work"
export HF_HOME="$work/cache" PYTHONDONTWRITEBYTECODE=1
echo '{"question": "1 + 1"}' > rows.jsonl
for wording in "Solve" "Think, then solve"; do
    build="def build(row): return {'prompt': '$wording: ' + row['question']}"
    echo "$build" > templates.py
    sed "s/^# build/${build//\//\\/}/" > main.py <<'PYTHON'
import datasets, templates

# build
rows = datasets.load_dataset("json", data_files="rows.jsonl", split="train")
imported, local = rows.map(templates.build)[0]["prompt"], rows.map(build)[0]["prompt"]
print(f"module says {templates.build(rows[0])['prompt']!r}: imported {imported!r}, local {local!r}")
assert imported == "Solve: 1 + 1", "the rows follow the edited module"
assert local == build(rows[0])["prompt"]
PYTHON
    venv/bin/python main.py
done
