#!/usr/bin/env bash
# datasets 5.2.0 and pyarrow 26.0.1. A JSON column whose every text looks like a date is a column of times.
# One would guess that "2024-01-05" between quotes stays a text, as a number between quotes does.
# Seen: load_dataset("json") gives datetime.datetime(2024, 1, 5, 0, 0), whose text is "2024-01-05 00:00:00"; "12:30:00" and "1/2" stay texts.
# One row that is no date keeps the whole column as it was, so a split, a filter or one more file changes what all golds are.
# A gold compared as text is then wrong for every right answer; a prompt shows "00:00:00".
set -euo pipefail
packages=(datasets==5.2.0 pyarrow==26.0.1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
[ -z "${FINDINGS_LATEST:-}" ] || packages=("${packages[@]%%==*}")
"$work/venv/bin/pip" install --quiet --no-compile "${packages[@]}" || exit 2
cd "$work"
export HF_HOME="$work/cache"
venv/bin/python - <<'PYTHON'
import datetime
import json

import datasets


def golds(*texts):
    with open("rows.jsonl", "w") as file:
        file.writelines(json.dumps({"gold": text}) + "\n" for text in texts)
    return datasets.load_dataset("json", data_files="rows.jsonl", split="train")["gold"][:]


dates, mixed, numbers = golds("2024-01-05", "1999-12-31"), golds("2024-01-05", "a Friday"), golds("007", "1/2")
print(dates, mixed, numbers)
assert dates == [datetime.datetime(2024, 1, 5), datetime.datetime(1999, 12, 31)], "dates are read otherwise"
assert mixed == ["2024-01-05", "a Friday"] and numbers == ["007", "1/2"], "texts are read otherwise"
PYTHON
